"""Rung 24, zero-initialized projections: every block starts as the identity. Starts from rung 23.

Rung 4 makes the projections that end the residual branches start smaller, and smaller still in deeper models. If they
start at zero, the branches add nothing at first: the model starts as its embedding and its output layer, and no random
branch stands in the way of a gradient. They do not stay zero, because the gradient of a matrix comes from its input and
from the gradient of its output, not from itself.

Gain: at initialization the model computes the same function at any depth. In our race (docs/race.md) the final loss is
0.011 nats per byte lower, which may be chance (p = 0.015).
Cost: none in time or memory. In the first step the other matrices of the blocks get no gradient: it would have to pass
through a zero matrix. What is left, the embedding and the output layer tied to it, predicts that a token repeats: the
first loss of GPT-2 (124M) is 15.0, where equal probabilities would give 10.8. After 33 steps two other starts, at 10.8,
are no lower beyond chance (experiments/start.txt).

Source: Zhang et al. 2019, "Fixup Initialization".
"""
import argparse
import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import filelock
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SCRIPT = Path(__file__)
DEVICES = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()] + ["cpu"]  # the fastest first
MODELS = {"tiny": "2x2x64", "mini": "6x3x192", "small": "6x6x384", "gpt2": "12x12x768",  # layers x heads x width
          "gpt2-medium": "24x16x1024", "gpt2-large": "36x20x1280", "gpt2-xl": "48x25x1600"}


def add_flags(parser):
    """The flags of this script; a flag's help shows its default."""
    parser.add_argument("--model", default="gpt2", help=f"{', '.join(MODELS)}, or a shape like 4x4x128")
    parser.add_argument("--pretrained", metavar="FILE", help="start from a model written by --save or convert.py")
    parser.add_argument("-B", "--batch-size", dest="B", type=int, default=1 if DEVICES == ["cpu"] else 4,
                        help="sequences per batch")
    parser.add_argument("-T", "--seq-len", dest="T", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps")
    parser.add_argument("--loss-chunk", type=int, default=4096, help="tokens whose logits exist at once; 0: all")
    parser.add_argument("--recompute-blocks", type=int, default=0, help="how many blocks to recompute, from the first")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps between checkpoints; 0: never")
    parser.add_argument("--checkpoint-dir", type=Path, default=f"checkpoints/{SCRIPT.stem}", help="their folder")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if there is one")
    parser.add_argument("--val-every", type=int, default=25, help="steps between validations; 0: never")
    parser.add_argument("--val-sequences", type=int, default=32, help="number of sequences to validate on; 0: all")
    parser.add_argument("--total-batch", type=int, help="tokens per optimizer step; None: 524288, on a CPU 4 batches")
    parser.add_argument("--max-lr", type=float, default=6e-4, help="highest learning rate, after the warm-up")
    parser.add_argument("--muon-lr", type=float, default=2e-3, help="highest learning rate of the blocks' matrices")
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps of linear warm-up")
    parser.add_argument("--decay-share", type=float, default=0.4, help="of the steps, the last ones: the rate falls")
    parser.add_argument("--seed", type=int, default=1337, help="random seed of the initial weights")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="what to train on")
    parser.add_argument("--data", type=Path, default="data/tokens", help="folder of token files, by data/prepare.py")
    parser.add_argument("--log-dir", type=Path, default="logs", help="folder of the log")
    parser.add_argument("--compile-mode", choices=["default", "max-autotune-no-cudagraphs", "none"],
                        default="default", help="of torch.compile; none: run eagerly")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trained model to this file")


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2 (124M)."""
    block_size: int = 1024  # longest sequence
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_hidden: int = 0  # width of the hidden layer of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64

    def __post_init__(self):
        self.n_hidden = self.n_hidden or math.ceil(8 * self.n_embd / 3 / 64) * 64


def config_of(settings, vocab_size):
    """The shape that --model names; exits with a one-line error if it names none."""
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", MODELS.get(settings.model, settings.model))
    n_layer, n_head, n_embd = map(int, shape.groups()) if shape else (0, 1, 1)  # which the next line refuses
    if n_embd % (2 * n_head):
        sys.exit(f"error: --model {settings.model}: give {', '.join(MODELS)}, or layers x heads x width like 4x4x128,"
                 " where width / heads is an even number")
    return GPTConfig(max(GPTConfig.block_size, settings.T), vocab_size, n_layer, n_head, n_embd)


def rotary_angles(T, head_size, theta=10_000.0):
    """Cosine and sine of position * theta^(-2i/hs), for both numbers of each pair: float32, (T, hs) each."""
    radians_per_token = 1.0 / theta ** (torch.arange(0, head_size, 2) / head_size)  # (hs/2,)
    angles = torch.arange(T)[:, None] * radians_per_token  # (T, hs/2)
    return torch.cat((angles.cos(), angles.cos()), dim=-1), torch.cat((-angles.sin(), angles.sin()), dim=-1)


def rotate(x, cos, sin):
    """Rotate the pairs (x[i], x[i + hs/2]) of queries or keys by the angles of their position: (B, nh, T, hs)."""
    return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin  # rolled by half a head: the other one of each pair


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention; each token attends to itself and the tokens before it: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)  # query, key, value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_proj.ends_residual_branch = True
        self.n_head = config.n_head
        self.q_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6)

    def forward(self, x, cos, sin):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs): nh heads of size hs
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q, k = rotate(self.q_norm(q.float()), cos, sin), rotate(self.k_norm(k.float()), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs); (T, T) exists only in tiles
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # concatenate the heads
        return self.c_proj(y)


class MLP(nn.Module):
    """The position-wise feed-forward network: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.up_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)
        self.down_proj = nn.Linear(config.n_hidden, config.n_embd, bias=False)
        self.down_proj.ends_residual_branch = True

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # (B, T, C) -> (B, T, n_hidden) -> (B, T, C)


class Block(nn.Module):
    """One pre-norm transformer layer, two residual branches: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.ln_1(x), cos, sin)
        return x + self.mlp(self.ln_2(x))


class ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of the logits x @ weight.T (N, n_rows) against targets (N,), `chunk` tokens at a time."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, chunk):
        total = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x)  # both are gradients of the sum of the losses; backward() divides them by N
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        for part, ids, part_grad in zip(x.split(chunk), targets.split(chunk), x_grad.split(chunk), strict=True):
            logits = F.linear(part, weight)  # (chunk, C) -> (chunk, n_rows)
            logits[:, vocab_size:] = -torch.inf  # no probability for padding
            log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            total += F.nll_loss(log_probs, ids, reduction="sum")
            if weight_grad is not None:  # not in evaluate()
                one_hot = torch.arange(len(weight), device=ids.device) == ids[:, None]  # (chunk, n_rows)
                logits_grad = log_probs.exp_().add_(one_hot, alpha=-1).to(logits.dtype)  # softmax - one-hot
                part_grad.copy_(logits_grad @ weight)  # into x_grad: (chunk, n_rows) @ (n_rows, C)
                weight_grad += 64 * (logits_grad.T @ (part / 64)).float()  # 64: a chunk's sum must fit into float16
        ctx.save_for_backward(x_grad, weight_grad)
        return total / len(x)

    @staticmethod
    def backward(ctx, loss_grad):
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad * scale, None, None, None


class GPT(nn.Module):
    """A Qwen3, with GPT-2's names for what both have."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.recompute_blocks, self.loss_chunk = 0, 4096  # build_model sets them
        n_rows = math.ceil(config.vocab_size / 128) * 128  # 50257 -> 50304
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(n_rows, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.RMSNorm(config.n_embd, eps=1e-6),
        ))
        self.lm_head = nn.Linear(config.n_embd, n_rows, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one parameter (n_rows, n_embd) under two names
        cos, sin = rotary_angles(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)  # computed once, and not part of a checkpoint
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if hasattr(module, "ends_residual_branch"):
                std = 0.0
            nn.init.normal_(module.weight, mean=0.0, std=std)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size); with targets (B, T), only the mean cross-entropy, in nats."""
        B, T = idx.shape
        cos, sin = self.cos[:T], self.sin[:T]  # (T, hs) each
        x = self.transformer.wte(idx)  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            if self.training and i < self.recompute_blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, cos, sin, use_reentrant=False)  # keeps only its inputs
            else:
                x = block(x, cos, sin)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x)[..., : self.config.vocab_size]  # (B, T, n_rows) -> (B, T, vocab_size)
        x, targets = x.view(B * T, -1), targets.view(B * T)  # (B*T, C), (B*T,)
        return ChunkedCrossEntropy.apply(x, self.lm_head.weight, targets, self.config.vocab_size, self.loss_chunk)

    def configure_optimizers(self, weight_decay):
        """Muon for the matrices of the blocks, fused AdamW for the rest; no decay for RMSNorms."""
        matrices = [p for p in self.transformer.h.parameters() if p.dim() >= 2]
        embeddings = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        others = [p for p in self.parameters() if p.dim() < 2]  # RMSNorms
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return MuonAdamW([*groups, {"params": embeddings}], weight_decay=weight_decay, betas=(0.9, 0.95), fused=True)


def orthogonalize(matrix):
    """(m, n) -> (m, n): the same singular vectors, singular values near 1; by five Newton-Schulz iterations."""
    wide = matrix if len(matrix) <= matrix.size(1) else matrix.mT
    x = (wide / (wide.norm() + 1e-7)).to(torch.float16 if wide.is_cuda else autocast_dtype("cpu"))  # every s <= 1
    for _ in range(5):  # s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5: small s more than triple, large s stay near 1
        gram = x @ x.mT  # (min(m, n), min(m, n)); next, x = 3.4445 x + (-4.7750 gram + 2.0315 gram @ gram) @ x
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if wide is matrix else x.mT


def muon_update(grad, momentum):
    """The update of a matrix, (m, n), from its gradient and its momentum."""
    ahead = grad.lerp(momentum, 0.95)  # 0.05 grad + 0.95 momentum: Nesterov's, one step ahead of the momentum
    return 0.2 * max(ahead.shape) ** 0.5 * orthogonalize(ahead)


class MuonAdamW(torch.optim.AdamW):
    """Muon for the matrices in the first group, AdamW for the others."""
    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", False):
            return  # the scaler sets it where a float16 gradient has overflowed
        muon = self.param_groups[0]
        for p in muon["params"]:
            self.state[p] = self.state[p] or {"step": torch.zeros(()), "momentum": torch.zeros_like(p)}
            momentum = self.state[p]["momentum"].lerp_(p.grad, 0.05)
            p.sub_(muon_update(p.grad, momentum) + muon["weight_decay"] * p, alpha=muon["lr"])
            p.grad = None  # so AdamW skips it
        super().step()


class DataLoaderLite:
    """Batches of consecutive tokens from a token file, on `device`; memory-mapped where it is too large for that."""

    def __init__(self, folder, B, T, device, split="train"):
        self.B, self.T, self.device = B, T, device
        self.tokens, self.meta = open_tokens(folder, split, B * T + 1)  # (n_tokens,)
        self.n_batches = (len(self.tokens) - 1) // (B * T)
        self.prefetched = {}  # {i: the i-th batch}
        self.on_device = 8 * len(self.tokens) <= free_memory(device) / 10  # as int64; most of it is for the model
        if self.on_device:
            self.tokens = torch.from_numpy(self.tokens.astype(np.int64)).to(device)

    def prefetch(self, i):
        """Fetch the i-th batch now; `batch(i)` will give it without a wait."""
        self.prefetched[i] = self.batch(i)

    def batch(self, i):
        """The i-th B*T tokens of the file, wrapping around, and the token that follows each: inputs, targets (B, T)."""
        if i in self.prefetched:
            return self.prefetched.pop(i)
        start = (i % self.n_batches) * self.B * self.T
        chunk = self.tokens[start : start + self.B * self.T + 1]  # (B*T + 1,)
        if not self.on_device:
            chunk = torch.from_numpy(chunk.astype(np.int64))
            chunk = chunk.pin_memory() if self.device == "cuda" else chunk  # so that the copy needs no one to wait
            chunk = chunk.to(self.device, non_blocking=self.device == "cuda")
        return chunk[:-1].view(self.B, self.T), chunk[1:].view(self.B, self.T)


def free_memory(device):
    """Free bytes on a GPU; 0 on a CPU, where there is nothing to copy."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory() if device == "mps" else 0


@torch.no_grad()
def evaluate(model, loader, n_sequences, B, amp_dtype, rank, world_size):
    """The mean loss (nats per token) over the first sequences of `loader`, a loader with B=1, split among the ranks."""
    total = torch.zeros((), device=loader.device)
    model.eval()
    with torch.autocast(loader.device, amp_dtype, enabled=amp_dtype != torch.float32):  # casts each weight only once
        for first in range(rank, n_sequences, world_size * B):
            numbers = range(first, n_sequences, world_size)[:B]
            x, y = map(torch.cat, zip(*map(loader.batch, numbers), strict=True))  # (at most B, T) each
            total += len(numbers) * model(x, y)
    model.train()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / n_sequences


class Checkpoints:
    """The run on disk: each file holds all that the next step depends on. On resuming only `free` flags may differ."""

    def __init__(self, settings, loader, **parts):
        self.settings, self.loader, self.parts, self.folder = settings, loader, parts, settings.checkpoint_dir
        self.folder.mkdir(parents=True, exist_ok=True)
        self.signals = []
        free = {"B", "device", "compile_mode", "data", "log_dir", "save", "checkpoint_every", "checkpoint_dir",
                "resume", "val_every", "val_sequences", "recompute_blocks", "loss_chunk"}
        self.run = {"script": SCRIPT.name, "text": f"{loader.meta.get('sha256')} in {loader.meta['tokenizer']} tokens"}
        self.run |= {name: value for name, value in vars(settings).items() if name not in free}

    def paths(self):
        """The checkpoints, the newest last."""
        return sorted(self.folder.glob("step_*.pt"))

    def lock(self):
        """Keep other runs out of the folder until this process ends; exits if one is in it."""
        try:
            self.held = filelock.FileLock(self.folder / "lock").acquire(timeout=0)
        except filelock.Timeout:
            sys.exit(f"error: --checkpoint-dir {self.folder}: another run is using it; give another")

    def reason_to_stop(self, step):
        """Why training ends after `step`, the same on all ranks: "--steps", "a signal", or "" if it goes on."""
        for number in (signal.SIGTERM, signal.SIGINT):  # not earlier: while the first step compiles, they end the run
            signal.signal(number, lambda received, frame: self.signals.append(received))
        signals = torch.tensor(len(self.signals), device=self.settings.device)
        if dist.is_initialized():
            dist.all_reduce(signals)
        return "--steps" if step == self.settings.steps else "a signal" if signals else ""

    def read(self, path):
        """The contents of a checkpoint; exits with a line that says how to go on without it if it is damaged."""
        try:
            if zipfile.ZipFile(path).testzip() is None:  # torch writes checksums, but does not read them
                return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can raise any
            if isinstance(error, (OSError, MemoryError)) or "memory" in str(error):  # not the file's fault
                raise
        older = [each.name for each in self.paths() if each < path]
        sys.exit(f"error: --resume: {path} is damaged; delete it to continue from {(older or ['step 0'])[-1]}")

    def load(self):
        """Restore the newest checkpoint: its step, the log and the seconds up to it. Exits if it is another run's."""
        paths = self.paths()
        if dist.is_initialized():
            dist.broadcast_object_list(first := [paths])  # what rank 0 sees
            if first != [paths]:
                sys.exit(f"error: --checkpoint-dir {self.folder}: not all ranks see the same files; share the folder")
        if not paths:
            return 0, b"", []
        if not self.settings.resume:
            sys.exit(f"error: {paths[-1]}: from an earlier run; --resume goes on, another --checkpoint-dir starts over")
        saved = self.read(paths[-1])
        falls_after = [run["steps"] * (1 - run.get("decay_share", 1)) for run in (saved["run"], self.run)]
        if saved["step"] <= min(falls_after):  # neither run's rate has begun to fall: they may differ in when it does
            saved["run"] |= {name: self.run[name] for name in ("steps", "decay_share")}
        for name, value in self.run.items():
            if (old := saved["run"].get(name)) != value:
                sys.exit(f"error: --resume: {paths[-1]} has {name} {old}, not {value}; make them equal to continue it")
        for name, part in self.parts.items():
            part.load_state_dict(saved[name] or part.state_dict())  # a scaler's is empty without float16
        log = re.sub(rb"steps: \d+", b"steps: %d" % self.settings.steps, saved["log"], count=1)
        return saved["step"], log, saved["seconds"]

    def save(self, step, log):
        """Write a checkpoint under a temporary name, then rename it: no kill leaves half of one under its name."""
        if not all(weight.isfinite().all() for weight in self.parts["model"].parameters()):
            return log.line(f"# WARNING: no checkpoint of step {step}: not all weights are finite")
        contents = self.loader.meta | {name: part.state_dict() for name, part in self.parts.items()}
        contents |= {"script": SCRIPT.name, "config": asdict(self.parts["model"].config), "T": self.loader.T}
        log.file.seek(0)
        contents |= {"run": self.run, "step": step, "log": log.file.read(), "seconds": log.seconds}
        try:
            with open(self.folder / "step.partial", "wb") as file:
                torch.save(contents, file)
                os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
        except (OSError, RuntimeError):  # torch makes a RuntimeError of a full disk
            (self.folder / "step.partial").unlink(missing_ok=True)  # it fills the disk
            return log.line(f"# WARNING: no checkpoint of step {step}: cannot be written; is the disk full?")
        (self.folder / "step.partial").replace(self.folder / f"step_{step:07}.pt")
        log.line(f"# checkpoint: step {step} in {self.folder}")
        for older in self.paths()[:-2]:
            older.unlink()


def get_lr(step, max_steps, max_lr, warmup_steps, decay_share):
    """The learning rate of `step` (1 to max_steps): linear up to max_lr, constant, linear down; zero after the last."""
    rise = step / max(1, warmup_steps)
    fall = (max_steps + 1 - step) / max(1, decay_share * max_steps)
    return max_lr * min(rise, 1.0, fall)


def autocast_dtype(device):
    """bfloat16; without hardware for it float16 on a GPU (T4, V100) and float32, so no autocast, on a CPU."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.float32 if device == "cpu" and not torch.cpu._is_avx512_bf16_supported() else torch.bfloat16


def compile_model(model, mode, device):
    """`model` compiled, and the mode for the log; where torch cannot compile, `model` itself, and why."""
    if mode == "none" or device == "mps":
        return model, "none" if mode == "none" else "not used on Apple GPUs"
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))  # does it work here at all?
    except Exception:  # no C++ compiler, no Triton, an unsupported Python: any exception
        return model, "not possible here, running eagerly; python -m ladder check says why"
    return torch.compile(model, mode=mode), mode


def init_ranks(settings):
    """(rank, world size) under torchrun, else (0, 1); exits where its processes cannot train together."""
    if "RANK" not in os.environ:
        return 0, 1
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])  # among all, on this machine
    if settings.device == "mps":
        sys.exit("error: --device mps: torch has no DDP for Apple GPUs; use --device cpu")
    if settings.device == "cuda":
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"error: --nproc_per_node: more processes than GPUs; use {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
    if rank > 0:  # only rank 0 prints and saves; each of the others has a log of its own
        sys.stdout = open(os.devnull, "w")
        settings.log_dir, settings.save = settings.log_dir / f"rank_{rank}", None
    nccl = settings.device == "cuda" and dist.is_nccl_available()  # torch for Windows lacks it
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        sys.exit("error: --max-restarts: needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; set it (pytorch issue 135712)")
    dist.init_process_group("nccl" if nccl else "gloo", timeout=timedelta(hours=1))  # they wait for rank 0's saving
    return rank, dist.get_world_size()


def optimizer_step(model, optimizer, scaler, loader, micro_batches, device, amp_dtype):
    """One step on the batches of these numbers: their mean loss, and the norm of its gradient before clipping."""
    optimizer.zero_grad()
    loss = torch.zeros((), device=device)
    for i in micro_batches:
        x, y = loader.batch(i)  # (B, T) each
        accumulating = dist.is_initialized() and i != micro_batches[-1]  # no all-reduce until the last one
        with model.no_sync() if accumulating else contextlib.nullcontext():
            with torch.autocast(device, amp_dtype, enabled=amp_dtype != torch.float32):
                micro_loss = model(x, y) / len(micro_batches)  # the gradients add up to that of the mean loss
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
        loader.prefetch(i + micro_batches.step)  # the next one, while the device is busy with this one
    scaler.unscale_(optimizer)  # undo the scaler's factor: the limit of 1.0 is for unscaled gradients
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the global norm before clipping
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


def build_model(settings, loader):
    """The model on its device, with what the flags say about training it."""
    model = new_model(settings, loader).to(settings.device)
    model.recompute_blocks = min(settings.recompute_blocks, model.config.n_layer)
    model.loss_chunk = settings.loss_chunk or settings.B * settings.T
    return model


def train(settings):
    """Train for `settings.steps` steps; print and log each one."""
    device = settings.device
    rank, world_size = init_ranks(settings)
    tokens = settings.B * settings.T * world_size  # in one batch of every rank
    settings.total_batch = settings.total_batch or (4 * tokens if device == "cpu" else 2**19)
    if settings.total_batch % tokens:
        sys.exit(f"error: --total-batch {settings.total_batch}: not a multiple of B * T * ranks = {tokens}; change one")
    n_micro_batches = settings.total_batch // tokens * world_size  # per step, of all ranks together
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype is torch.float16)  # else it passes everything through
    precision = f"{str(amp_dtype)[6:]} autocast" if amp_dtype != torch.float32 else "float32 (no bfloat16 on this CPU)"

    loader = DataLoaderLite(settings.data, settings.B, settings.T, device)
    model = build_model(settings, loader)
    optimizer = model.configure_optimizers(weight_decay=0.1)
    ddp_model = DDP(model, gradient_as_bucket_view=True) if dist.is_initialized() else model  # views: no second copy
    step_model, compiled = compile_model(ddp_model, settings.compile_mode, device)
    notes = {"compile": compiled, "ranks": world_size, "total_batch": f"{settings.total_batch} tokens"}
    notes["batches"] = "on the device" if loader.on_device else "prefetched" if device == "cuda" else "memory-mapped"
    notes["recomputed_blocks"] = f"{model.recompute_blocks} of {model.config.n_layer}"
    if settings.val_every:
        val_loader = DataLoaderLite(settings.data, 1, settings.T, device, "val")
        n_val = min(settings.val_sequences or val_loader.n_batches, val_loader.n_batches)
        notes["validation"] = f"every {settings.val_every} steps on {n_val} of {val_loader.n_batches} sequences"
    checkpoints = Checkpoints(settings, loader, model=model, optimizer=optimizer, scaler=scaler)
    if rank == 0:
        checkpoints.lock()
    step, old_log, seconds = checkpoints.load()
    steps = range(step + 1, settings.steps + 1)  # those that are left
    log = Log(settings, model, loader, settings.total_batch, precision, **notes)
    if step:
        log.file.truncate(0)  # its new header
        log.file.write(old_log)
        log.seconds = seconds
        log.line(f"# resumed after step {step} of {settings.steps} | device: {device} | B={settings.B}")

    for step in steps:
        t0 = time.perf_counter()
        lr = get_lr(step, settings.steps, settings.max_lr, settings.warmup_steps, settings.decay_share)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.param_groups[0]["lr"] = get_lr(
            step, settings.steps, settings.muon_lr, settings.warmup_steps, settings.decay_share)
        micro_batches = range((step - 1) * n_micro_batches + rank, step * n_micro_batches, world_size)  # of this rank
        loss, norm = optimizer_step(step_model, optimizer, scaler, loader, micro_batches, device, amp_dtype)
        torch.get_device_module(device).synchronize()  # kernels launch asynchronously: wait, then read the clock
        dt = time.perf_counter() - t0
        loss = loss.detach() / world_size
        if dist.is_initialized():
            dist.all_reduce(loss)  # after the clock: only the log needs the mean over the ranks
        left = timedelta(seconds=round((settings.steps - step) * np.median([*log.seconds[-100:], dt])))
        log.step(step, loss.item(), dt, norm=f"{norm.item():.4f}", lr=f"{lr:.4e}", left=left)
        if settings.val_every and (step % settings.val_every == 0 or step == settings.steps):
            t0 = time.perf_counter()
            val_loss = evaluate(model, val_loader, n_val, settings.B, amp_dtype, rank, world_size)
            log.line(f"val : step {step} | loss: {val_loss:.6f} | time: {time.perf_counter() - t0:.2f} s")
        reason = checkpoints.reason_to_stop(step)
        if rank == 0 and settings.checkpoint_every and (step % settings.checkpoint_every == 0 or reason):
            checkpoints.save(step, log)
        if reason:
            log.line(f"# ended by {reason} after step {step}; newest checkpoint: {['none', *checkpoints.paths()][-1]}")
            break

    log.finish(step)
    save_model(settings.save, model, loader, step)
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.5)  # a gloo thread that drops its last result while Python shuts down would abort the process


# ---- the same in every rung: files, log, command line; to skip on a first reading ------------------------------------

def open_tokens(folder, split, n_needed):
    """(The tokens of "train" or "val", memory-mapped, (n_tokens,); meta.json); exits with a line if unusable."""
    if folder == Path("data/tokens") and not folder.exists():  # the first run prepares the default text
        prepare = (parent / "data" / "prepare.py" for parent in SCRIPT.resolve().parents)
        subprocess.run([sys.executable, next(filter(Path.exists, prepare), "data/prepare.py")])
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / f"{split}.bin", dtype=meta["dtype"] if "dtype" in meta else "<u2", mode="r")
        if len(tokens) != meta[f"{split}_tokens"] or tokens[:10**8].max() >= meta["vocab_size"]:
            raise ValueError(f"{split}.bin is not what meta.json describes")
        named = meta["tokenizer"] in ("gpt2", "gpt2-bytes")  # which need no tokenizer.json
        meta["tokenizer_json"] = None if named else (folder / "tokenizer.json").read_text(encoding="utf-8")
        meta["name"] = f"{meta['source']} ({meta['tokenizer']} tokens)"
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: --data {folder}: no token files ({error}); make them: python data/prepare.py --out {folder}")
    if len(tokens) < n_needed:
        sys.exit(f"error: --data {folder}: {len(tokens)} {split} tokens, a batch needs {n_needed}; lower -B or -T")
    return tokens, meta


def new_model(settings, loader):
    """The GPT that --model or --pretrained names; exits with a one-line error if it does not fit the data or -T."""
    if not settings.pretrained:
        return GPT(config_of(settings, loader.meta["vocab_size"]))
    saved, meta = read_model(settings.pretrained), loader.meta
    theirs, ours = (json.loads(each["tokenizer_json"] or "{}").get("model") for each in (saved, meta))
    if saved["config"]["vocab_size"] != meta["vocab_size"] or ours != theirs:
        sys.exit("error: --pretrained: its tokenizer is not the data's; data/prepare.py --tokenizer FILE takes it")
    if saved["config"]["block_size"] < settings.T:
        sys.exit(f"error: -T {settings.T}: the model's longest sequence is {saved['config']['block_size']}; lower -T")
    try:
        model = GPT(GPTConfig(**saved["config"]))
        model.load_state_dict(saved["model"])
        assert all(torch.equal(weight, saved["model"][name]) for name, weight in model.state_dict().items())
    except (AssertionError, RuntimeError, TypeError):  # assert: an untied file, in a script that ties
        sys.exit(f"error: --pretrained: not a model of this script; {saved['script']} loads it")
    return model


def read_model(path):
    """What a file of `save_model` holds; exits with a one-line error if `path` is something else."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        return {key: saved[key] for key in ("script", "config", "model", "tokenizer_json")}
    except Exception:  # no such file, a folder, a text, a damaged archive: any exception
        sys.exit(f"error: {path}: not a model's file; if it is on Hugging Face: python convert.py {path} model.pt")


def save_model(path, model, loader, step):
    """Write a model's file, if a `path` is given: under a temporary name, then renamed; an earlier one gets a date."""
    if path:
        partial, contents = path.with_name(path.name + ".partial"), io.BytesIO()  # torch's own writing hides an OSError
        torch.save(loader.meta | {"script": SCRIPT.name, "config": asdict(model.config), "model": model.state_dict(),
                                  "step": step, "T": loader.T}, contents)
        partial.write_bytes(contents.getbuffer())
        if path.exists():
            path.replace(f"{path}.{time.strftime('%Y-%m-%d_%H.%M.%S')}")
        partial.replace(path)


class Log:
    """The run's log, on the screen and line by line in <log-dir>/<script>.log; an earlier one gets a date as suffix."""

    def __init__(self, settings, model, loader, tokens_per_step, precision, **notes):
        self.device, self.tokens_per_step, self.seconds = settings.device, tokens_per_step, []
        path = settings.log_dir / f"{SCRIPT.stem}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(f"{path}.{time.strftime('%Y-%m-%d_%H.%M.%S')}")
        self.file = open(path, "a+b", buffering=0)  # unbuffered: a killed run keeps its steps
        chip = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        self.line(f"# script: {SCRIPT.name}")
        n_parameters = sum(p.numel() for p in model.parameters())
        self.line(f"# model: {settings.pretrained or settings.model} | parameters: {n_parameters:,}")
        self.line(f"# device: {chip} | torch: {torch.__version__} | precision: {precision}")
        for key, note in notes.items():
            self.line(f"# {key.replace('_', ' ')}: {note}")
        self.line(f"# batch: B={settings.B} T={settings.T} | steps: {settings.steps} | seed: {settings.seed}")
        self.line(f"# data: {loader.meta['name']} | loaded {len(loader.tokens)} tokens"
                  f" | 1 epoch = {loader.n_batches} batches")

    def line(self, text):
        try:
            self.file.write(f"{text}\n".encode())
        except OSError as error:  # a full disk must not end the training
            text += f"\nWARNING: {self.file.name}: this line is lost ({error.strerror})"
        with contextlib.suppress(OSError):  # stdout may be on that disk; or a terminal, which may lack a character
            print(text.encode(known := sys.stdout.encoding or "utf-8", "replace").decode(known), flush=True)

    def step(self, step, loss, dt, **more):
        """Log a step: the loss in nats, dt in seconds, what the rung adds. Exits when the loss is not finite."""
        self.seconds.append(dt)
        self.line(f"step : {step} | loss: {loss:.6f} | dt: {dt * 1000:.2f} ms"
                  f" | tokens/sec: {self.tokens_per_step / dt:.2f}" + "".join(f" | {k}: {v}" for k, v in more.items()))
        if not math.isfinite(loss):
            sys.exit(f"error: the loss is {loss} at step {step}; see NaN in docs/measuring.md")

    def finish(self, step):
        """Log the median time of the second half of the steps; during the first half the device warms up."""
        dt = np.median(self.seconds[len(self.seconds) // 2 :])
        memory = f" | peak memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if self.device == "cuda" else ""
        self.line(f"median : dt: {dt * 1000:.2f} ms | tokens/sec: {self.tokens_per_step / dt:.2f}{memory}"
                  f" | steps {step - (len(self.seconds) - 1) // 2}-{step}")


def parse_settings(argv=None):
    """The command line; exits with argparse's two lines if a value cannot be used."""
    parser = argparse.ArgumentParser(usage="%(prog)s [flags]", description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_flags(parser)
    settings = parser.parse_args(argv)
    numbers = [value for value in vars(settings).values() if type(value) in (int, float)]
    if min(settings.B, settings.T, settings.steps) < 1 or not all(0 <= number < 2**63 for number in numbers):
        parser.error("-B, -T and --steps must be at least 1, other numbers at least 0 and below 2**63")
    if (p := settings.save) and (p.exists() > p.is_file() or not (p.parent.is_dir() and os.access(p.parent, os.W_OK))):
        parser.error(f"argument --save: {settings.save} is not a file in a folder that can be written to")
    return settings


if __name__ == "__main__":
    try:
        train(parse_settings())
    except KeyboardInterrupt:
        sys.exit("stopped: the log keeps the finished steps")
    except (OSError, RuntimeError) as error:  # a folder that cannot be written, a full disk, no memory
        if isinstance(error, RuntimeError) and not re.search("(out of|allocate|enough) memory", str(error)):
            raise
        sys.exit(f"error: {error if isinstance(error, OSError) else 'out of memory; try half the -B, or a lower -T'}")
