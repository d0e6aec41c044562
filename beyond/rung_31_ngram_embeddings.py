"""Rung 31, hashed n-gram embeddings: the last two and the last three tokens have embeddings of their own.

What comes next depends most on the last few tokens. Attention has to learn to combine them; a table can learn a vector
for a pair or a triple directly. There are far more of them than rows, so a hash chooses the row, and n-grams that
collide share a vector. The tables start at zero, so the model starts as rung 30's.

Gain: on bytes the most since Muon: rung 16's loss after 18 instead of 41 % of its seconds, and a final loss 0.045 lower
(p < 0.001, docs/race.md). None with GPT-2's tokens: the larger the vocabulary, the fewer n-grams recur, and the more
share a row.
Cost: two tables of n_rows_hashed * n_embd parameters, 12.6M for GPT-2 (124M), with their gradients and AdamW's moments
0.2 GB: in the race 3.0M parameters instead of 0.9M, and 5 % more time per step. No key-value cache when sampling.

Source: hashed n-grams of 3 to 8 bytes in Pagnoni et al. 2024, "Byte Latent Transformer"; hashed pairs of tokens, and
the factor 36313, in the NanoGPT speedrun.
"""
import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, get_args

import filelock
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.checkpoint
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Settings:
    """The command line's flags, one per line: type, help (and alias), default."""

    model: Annotated[str, "tiny, mini, small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a shape: 4x4x128"] = "gpt2"
    pretrained: Annotated[str, "start from Hugging Face weights: a name or a folder"] = None
    B: Annotated[int, "sequences per batch and process; None: 4, on a CPU 1", "--batch-size"] = None
    T: Annotated[int, "tokens per sequence", "--seq-len"] = 1024
    steps: Annotated[int, "optimizer steps"] = 50
    loss_chunk: Annotated[int, "tokens whose logits exist at once; 0: all"] = 4096
    recompute_blocks: Annotated[int, "how many blocks, from the first; None: all, 0: none"] = None
    checkpoint_every: Annotated[int, "steps from one checkpoint to the next; 0: never"] = 250
    checkpoint_dir: Annotated[Path, "folder of the checkpoints"] = Path("checkpoints") / Path(__file__).stem
    resume: Annotated[bool, "continue from the newest checkpoint, if there is one"] = False
    val_every: Annotated[int, "steps from one validation to the next; 0: never"] = 25
    val_sequences: Annotated[int, "number of T-token sequences to validate on; 0: all"] = 32
    total_batch: Annotated[int, "tokens per optimizer step; None: 524288, on a CPU 4 micro-batches"] = None
    max_lr: Annotated[float, "highest learning rate, after the warm-up"] = 6e-4
    muon_lr: Annotated[float, "highest learning rate of the blocks' matrices"] = 2e-3
    warmup_steps: Annotated[int, "steps of linear warm-up"] = 10
    decay_share: Annotated[float, "share of the steps, the last ones, in which the learning rate falls"] = 0.4
    seed: Annotated[int, "random seed of the initial weights"] = 1337
    device: Annotated[Literal["cuda", "mps", "cpu"], "None: the accelerator if there is one"] = None
    data: Annotated[Path, "folder of token files, made by data/prepare.py"] = Path("data/tokens")
    log_dir: Annotated[Path, "folder of the log"] = Path("logs")
    compile_mode: Annotated[Literal["default", "reduce-overhead", "max-autotune", "none"], "none: eager"] = "default"
    save: Annotated[Path, "write the trained model to this file"] = None


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2 (124M)."""

    block_size: int = 1024  # longest sequence
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_rows_hashed: int = 8191  # of each table of n-grams; a prime: in a power of two only an id's low bits count

    @property
    def n_hidden(self):
        """Width of the hidden layer of the MLP."""
        return math.ceil(8 * self.n_embd / 3 / 64) * 64


def rotary_angles(T, head_size):
    """Cosine and sine of position * 10000^(-2i/hs), float32, (T, hs/2) each."""
    radians_per_token = 1.0 / 10_000 ** (torch.arange(0, head_size, 2) / head_size)  # (hs/2,)
    angles = torch.arange(T)[:, None] * radians_per_token  # (T, hs/2)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Rotate the pairs (x[i], x[i + hs/2]) of queries or keys by the angles of their position: (B, nh, T, hs)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention; each token attends to itself and the tokens before it: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)  # query, key, value of all heads
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_proj.ends_residual_branch = True
        self.n_head = config.n_head
        self.q_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6)

    def forward(self, x, cos, sin):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q, k = rotate(self.q_norm(q.float()), cos, sin), rotate(self.k_norm(k.float()), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
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
    """The mean cross-entropy of x @ weight.T + bias (N, n_rows) and targets (N,), `chunk` rows at a time."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets, vocab_size, chunk):
        total = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x)  # of the sum of the losses
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)  # likewise, added up chunk by chunk
        for rows, ids, rows_grad in zip(x.split(chunk), targets.split(chunk), x_grad.split(chunk), strict=True):
            logits = F.linear(rows, weight, bias)  # (chunk, C) -> (chunk, n_rows)
            logits[:, vocab_size:] = -torch.inf  # no probability for padding
            log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            total += F.nll_loss(log_probs, ids, reduction="sum")
            if ctx.needs_input_grad[0]:  # not in evaluate()
                is_target = torch.arange(len(weight), device=ids.device) == ids[:, None]  # (chunk, n_rows)
                logits_grad = log_probs.exp_().add_(is_target, alpha=-1).to(logits.dtype)
                rows_grad.copy_(logits_grad @ weight)
                root = len(ids) ** 0.5  # divided by it, no sum over the chunk exceeds float16's range
                weight_grad += root * (logits_grad.T @ (rows / root)).float()
        ctx.save_for_backward(x_grad, weight_grad)
        return total / len(x)

    @staticmethod
    def backward(ctx, loss_grad):
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)
        return x_grad * scale, weight_grad * scale, None, None, None, None


class GPT(nn.Module):
    """A Qwen3 and what rungs 30 and up add to it, with GPT-2's names for what both have."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.recompute_blocks, self.loss_chunk = config.n_layer, Settings.loss_chunk
        n_rows = math.ceil(config.vocab_size / 128) * 128  # 50257 -> 50304
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(n_rows, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.RMSNorm(config.n_embd, eps=1e-6),
        ))
        self.lm_head = nn.Linear(config.n_embd, n_rows, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one parameter (n_rows, n_embd) under two names
        self.register_buffer("log_frequency", torch.zeros(n_rows))  # set in train()
        cos, sin = rotary_angles(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)  # computed once, and not part of a checkpoint
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init_weights)
        nn.init.normal_(self.lm_head.weight, std=1 / config.n_embd)  # or its products would hide the prior
        zeros = torch.zeros(2, config.n_rows_hashed, config.n_embd)
        self.n_grams = nn.ModuleList([nn.Embedding.from_pretrained(table, freeze=False) for table in zeros])

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if hasattr(module, "ends_residual_branch"):
                std = 0.0
            nn.init.normal_(module.weight, mean=0.0, std=std)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size); with targets (B, T), only the mean cross-entropy, in nats."""
        B, T = idx.shape
        cos, sin = self.cos[:T], self.sin[:T]  # (T, hs/2) each
        x = self.transformer.wte(idx)  # (B, T, C)
        n_gram = idx
        for n, table in enumerate(self.n_grams, 1):  # pairs, then triples
            n_gram = 36313 * n_gram + F.pad(idx, (n, 0))[:, :T]  # (B, T); ahead of the first token there are zeros
            x = x + table(n_gram % self.config.n_rows_hashed)  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            if self.training and i < self.recompute_blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, cos, sin, use_reentrant=False)  # keeps its inputs alone
            else:
                x = block(x, cos, sin)
        x = self.transformer.ln_f(x)
        if targets is None:
            logits = self.lm_head(x) + self.log_frequency  # (B, T, n_rows)
            return logits[..., : self.config.vocab_size]  # (B, T, n_rows) -> (B, T, vocab_size)
        x, targets = x.view(B * T, -1), targets.view(B * T)  # (B*T, C), (B*T,)
        return ChunkedCrossEntropy.apply(
            x, self.lm_head.weight, self.log_frequency, targets, self.config.vocab_size, self.loss_chunk)

    def configure_optimizers(self, weight_decay):
        """Muon for the matrices of the blocks, fused AdamW for the rest; no decay for RMSNorms."""
        matrices = [p for p in self.transformer.h.parameters() if p.dim() >= 2]
        embeddings = [module.weight for module in self.modules() if isinstance(module, nn.Embedding)]
        others = [p for p in self.parameters() if p.dim() < 2]  # RMSNorms
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return MuonAdamW([*groups, {"params": embeddings}], weight_decay=weight_decay, betas=(0.9, 0.95), fused=True)


def orthogonalize(matrices):
    """(N, m, n) -> (N, m, n): the same singular vectors, singular values near 1; five Newton-Schulz iterations."""
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    x = F.normalize(wide, dim=(-2, -1), eps=1e-7).to(torch.float16 if wide.is_cuda else autocast_dtype("cpu"))
    for _ in range(5):  # s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5: small s more than triple, large s stay near 1
        gram = x @ x.mT  # (N, min(m, n), min(m, n))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x if wide is matrices else x.mT


class MuonAdamW(torch.optim.AdamW):
    """Muon for the matrices in the first group, AdamW for the others, which expects a "step" in each state it loads."""
    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", False):
            return  # float16: the scaler has found an overflow
        muon, stacks = self.param_groups[0], {}  # matrices of one shape are computed together: few kernels
        for i, p in enumerate(muon["params"]):
            stacks.setdefault((p.shape, i * p.numel() // 2**27), []).append(p)  # of a large model only a few layers
            self.state[p] = self.state[p] or {"step": torch.zeros(()), "momentum": torch.zeros_like(p)}
        for stack in stacks.values():
            grads, momenta = torch.stack([p.grad for p in stack]), [self.state[p]["momentum"] for p in stack]
            torch._foreach_lerp_(momenta, grads.unbind(), 0.05)  # and in the next line Nesterov's look ahead
            update = 0.2 * max(stack[0].shape) ** 0.5 * orthogonalize(grads.lerp(torch.stack(momenta), 0.95))
            torch._foreach_sub_(stack, (update + muon["weight_decay"] * torch.stack(stack)).unbind(), alpha=muon["lr"])
        for p in muon["params"]:
            p.grad = None  # so AdamW skips it
        super().step()


class DataLoaderLite:
    """Batches of consecutive tokens from a token file, on `device`; memory-mapped where it is too large for that."""

    def __init__(self, folder, B, T, device, split="train"):
        self.B, self.T, self.device = B, T, device
        self.tokens, self.meta = open_tokens(folder, split, B * T + 1)  # (n_tokens,)
        self.n_batches = (len(self.tokens) - 1) // (B * T)
        self.on_device = 10 * 8 * len(self.tokens) <= free_memory(device)
        if self.on_device:
            self.tokens = torch.from_numpy(self.tokens.astype(np.int64)).to(device)

    def batch(self, i):
        """The i-th B*T tokens of the file, wrapping around, and the token that follows each: inputs, targets (B, T)."""
        start = i % self.n_batches * self.B * self.T
        chunk = self.tokens[start : start + self.B * self.T + 1]  # (B*T + 1,)
        if not self.on_device:
            chunk = torch.from_numpy(chunk.astype(np.int64))
            chunk = chunk.pin_memory() if self.device == "cuda" else chunk
            chunk = chunk.to(self.device, non_blocking=self.device == "cuda")
        return chunk[:-1].view(self.B, self.T), chunk[1:].view(self.B, self.T)


def count_log_frequencies(tokens, n_rows):
    """The logarithm of each token's share of `tokens`: (n_rows,); 0.1 more of each, so that none is impossible."""
    counts = np.bincount(tokens, minlength=n_rows) + 0.1
    return torch.from_numpy(np.log(counts / counts.sum()))


def free_memory(device):
    """Free bytes on a GPU; 0 on a CPU, where there is nothing to copy."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory() if device == "mps" else 0


@torch.no_grad()
def evaluate(model, loader, n_sequences, amp_dtype, rank, world_size):
    """The mean loss (nats per token) over the first sequences of `loader`, a loader with B=1, split among the ranks."""
    total = torch.zeros((), device=loader.device)
    model.eval()
    for i in range(rank, n_sequences, world_size):
        x, y = loader.batch(i)  # (1, T) each
        with torch.autocast(loader.device, amp_dtype, enabled=amp_dtype != torch.float32):
            total += model(x, y)
    model.train()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / n_sequences


def read_newest(paths):
    """The first of the checkpoints `paths` that is not damaged; exits with a one-line error if all are."""
    for path in paths:
        with contextlib.suppress(Exception):  # a damaged file can raise any exception
            if not zipfile.ZipFile(path).testzip():
                return torch.load(path, map_location="cpu", weights_only=True)
        print(f"WARNING: {path} is damaged; skipping it", file=sys.stderr)
    sys.exit(f"error: --resume: {paths[0]}: no checkpoint here can be read; delete them to start over")


def load_checkpoint(path, settings, run, model, optimizer, scaler):
    """Restore the checkpoint at `path`: its step and log, or 0 and ""; exits with one line if it is another run's."""
    make_folder(path.parent, "newest/notes.json", "previous/notes.json")  # of fsdp_sharded_checkpoint.py
    paths = [path.with_name(name) for name in ("next.pt", "newest.pt", "previous.pt") if path.with_name(name).exists()]
    if not paths:
        return 0, ""
    if not settings.resume:
        sys.exit(f"error: {path}: from an earlier run; add --resume, or give another --checkpoint-dir and --log-dir")
    checkpoint = read_newest(paths)
    if all(checkpoint["step"] <= each["steps"] * (1 - each.get("decay_share", 1)) for each in (checkpoint["run"], run)):
        checkpoint["run"] |= {key: run[key] for key in ("steps", "decay_share")}  # no decay yet: they may change
    if other := [f"{key} {old}, not {run.get(key)}" for key, old in checkpoint["run"].items() if old != run.get(key)]:
        sys.exit(f"error: --resume: {path} has {'; '.join(other)}; make them equal, the steps done depend on them")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if checkpoint["scaler"]:  # empty if autocast was not in float16
        scaler.load_state_dict(checkpoint["scaler"])
    return checkpoint["step"], checkpoint["log"]


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
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception:  # no C++ compiler, no Triton, an unsupported Python: any exception
        return model, "not possible here, running eagerly; python -m ladder check says why"
    return torch.compile(model, mode=mode), mode


def init_ranks(settings):
    """(rank, world size) of this process under torchrun, else (0, 1)."""
    if "RANK" not in os.environ:
        return 0, 1
    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # its number on this machine
    backend = "nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=1))  # not NCCL's 10 minutes: saving may take longer
    return dist.get_rank(), dist.get_world_size()


def count_micro_steps(settings, world_size):
    """How many batches of B * T tokens on each rank make --total-batch; exits with a one-line error if none do."""
    tokens = settings.B * settings.T * world_size
    if settings.total_batch is None:
        settings.total_batch = 4 * tokens if settings.device == "cpu" else 2**19
    micro_steps, rest = divmod(settings.total_batch, tokens)
    if rest or not micro_steps:
        sys.exit(f"error: --total-batch {settings.total_batch}: not a multiple of B * T * ranks = {tokens}; change one")
    if micro_steps > 1 and settings.device == "cuda" and settings.compile_mode in ("reduce-overhead", "max-autotune"):
        sys.exit(f"error: --compile-mode {settings.compile_mode}: no CUDA graphs with accumulation; use default")
    return micro_steps


def train(settings):
    """Train for `settings.steps` steps; print and log each one."""
    device = settings.device
    if settings.decay_share > 1:
        sys.exit(f"error: --decay-share {settings.decay_share}: more than all steps; give at most 1")
    rank, world_size = init_ranks(settings)
    micro_steps = count_micro_steps(settings, world_size)
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype is torch.float16)  # else it passes everything through
    precision = f"{amp_dtype} autocast" if amp_dtype != torch.float32 else "float32 (no bfloat16 on this CPU)"

    loader = DataLoaderLite(settings.data, settings.B, settings.T, device)
    model = new_model(settings, loader).to(device)
    if not settings.pretrained:
        tokens = loader.tokens[:10_000_000]
        tokens = tokens.cpu() if loader.on_device else tokens
        model.log_frequency.copy_(count_log_frequencies(tokens, len(model.log_frequency)))
    if settings.recompute_blocks is not None:
        model.recompute_blocks = min(settings.recompute_blocks, model.config.n_layer)
    model.loss_chunk = settings.loss_chunk or settings.B * settings.T
    optimizer = model.configure_optimizers(weight_decay=0.1)
    ddp_model = DDP(model, gradient_as_bucket_view=True) if dist.is_initialized() else model
    step_model, compiled = compile_model(ddp_model, settings.compile_mode, device)
    notes = {"compile": compiled, "ranks": world_size, "total_batch": f"{settings.total_batch} tokens"}
    notes["batches"] = "on the device" if loader.on_device else "prefetched" if device == "cuda" else "memory-mapped"
    notes["recomputed_blocks"] = f"{model.recompute_blocks} of {model.config.n_layer}"
    if settings.val_every:
        val_loader = DataLoaderLite(settings.data, 1, settings.T, device, "val")
        n_val = min(settings.val_sequences or val_loader.n_batches, val_loader.n_batches)
        notes["validation"] = f"every {settings.val_every} steps on {n_val} of {val_loader.n_batches} sequences"
    shared = ("model", "pretrained", "T", "steps", "total_batch", "seed", "max_lr", "warmup_steps",
              "decay_share")
    run = {name: getattr(settings, name) for name in shared} | {"data": loader.meta["id"], "script": SCRIPT.stem}
    run["muon_lr"] = settings.muon_lr
    try:  # kept in `settings`: a lock is released when its object is garbage-collected
        settings.lock = rank == 0 and filelock.FileLock(settings.checkpoint_dir / "lock").acquire(timeout=0)
    except filelock.Timeout:
        sys.exit(f"error: --checkpoint-dir {settings.checkpoint_dir}: another run is using it; give another")
    stop = []  # no longer empty once a signal has come
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(True))
    path, every = settings.checkpoint_dir / "newest.pt", settings.checkpoint_every
    done, old_log = load_checkpoint(path, settings, run, model, optimizer, scaler)
    if done == settings.steps:
        print(f"{path}: this run is finished, all of its {done} steps are done")
        return save_model(settings, model, loader, done)
    log = Log(settings, model, loader, settings.total_batch, precision, **notes)
    if done and rank == 0:
        old_log = re.sub(r"steps: \d+", f"steps: {settings.steps}", old_log, count=1)
        log.path.write_text(old_log, encoding="utf-8")
    log.line(f"# checkpoints: every {every} steps | steps done before: {done}")
    batch = loader.batch(done * micro_steps * world_size + rank)

    for step in range(done + 1, settings.steps + 1):
        t0 = time.perf_counter()
        lr = get_lr(step, settings.steps, settings.max_lr, settings.warmup_steps, settings.decay_share)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.param_groups[0]["lr"] = get_lr(
            step, settings.steps, settings.muon_lr, settings.warmup_steps, settings.decay_share)
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            i = (step - 1) * micro_steps + micro_step
            x, y = batch  # (B, T) each
            accumulating = dist.is_initialized() and micro_step < micro_steps - 1  # no all-reduce until the last one
            with ddp_model.no_sync() if accumulating else contextlib.nullcontext():
                with torch.autocast(device, amp_dtype, enabled=amp_dtype != torch.float32):
                    micro_loss = step_model(x, y) / micro_steps
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
            batch = loader.batch((i + 1) * world_size + rank)  # while the device is busy
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the global norm before clipping
        scaler.step(optimizer)
        scaler.update()
        torch.get_device_module(device).synchronize()  # kernels launch asynchronously: wait, then read the clock
        dt = time.perf_counter() - t0
        loss, stopping = loss / world_size, torch.tensor(len(stop), device=device)
        if dist.is_initialized():
            dist.all_reduce(loss)  # after the clock: only the log needs the mean over the ranks
            dist.all_reduce(stopping)  # all ranks stop after the same step
        log.step(step, loss.item(), dt, norm=f"{norm.item():.4f}", lr=f"{lr:.4e}")
        if settings.val_every and (step % settings.val_every == 0 or step == settings.steps):
            t0 = time.perf_counter()
            val_loss = evaluate(model, val_loader, n_val, amp_dtype, rank, world_size)
            log.line(f"val : step {step} | loss: {val_loss:.6f} | time: {time.perf_counter() - t0:.2f} s{log.left()}")
        due = every and (step % every == 0 or step == settings.steps or stopping)
        if rank == 0 and due and (norm.isfinite() or scaler.is_enabled()):
            state = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "run": run}
            newer = path.with_name("next.pt")
            problem = save_checkpoint(newer, model, loader, step, **state, log=log.path.read_text(encoding="utf-8"))
            log.line(f"# WARNING: {problem}" if problem else f"# checkpoint: step {step} in {path}")
            for old, new in ((path, path.with_name("previous.pt")), (newer, path)):
                if old.exists() and not problem:
                    old.replace(new)
        if stopping:
            log.line(f"# stopped by a signal after step {step}; rerun with --resume to continue")
            break

    new, cached = (counters["inductor"][f"fxgraph_cache_{result}"] for result in ("miss", "hit"))
    log.line(f"# first step: {log.seconds[0]:.2f} s | graphs compiled: {new}, from the cache: {cached}")
    log.finish()
    save_model(settings, model, loader, step)


# ---- the same in every rung ------------------------------------------------------------------------------------------

SCRIPT = Path(__file__)
RANK = int(os.environ.get("RANK", 0))  # under torchrun (ddp_run.py); only rank 0 prints, logs and saves
TOKENIZER = ("tokenizer", "tokenizer_json", "end_of_text")  # of the data, stored with a model
MODELS = {  # what --model accepts by name; sizes with tied embeddings
    "tiny": GPTConfig(n_layer=2, n_head=2, n_embd=64),  # for tests
    "mini": GPTConfig(n_layer=6, n_head=3, n_embd=192),  # 12M parameters: what two CPU cores can compare
    "small": GPTConfig(n_layer=6, n_head=6, n_embd=384),  # 30M parameters: what a CPU can train
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 355M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}


def parse_settings(argv=None):
    """The command line as Settings; exits with a one-line error if a value cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    flags = {"B": "-B", "T": "-T"}
    for field in fields(Settings):
        kind, text, *alias = get_args(field.type)
        how = {"choices": get_args(kind)} if get_args(kind) else {"type": kind}
        how = {"action": "store_true"} if kind is bool else how
        how.update(default=field.default, help=f"{text} (default: {field.default})")
        flag = flags.setdefault(field.name, "--" + field.name.replace("_", "-"))
        parser.add_argument(flag, *alias, dest=field.name, **how)
    settings = Settings(**vars(parser.parse_args(argv)))
    found = [name for name in ("cuda", "mps") if getattr(torch, name).is_available()] + ["cpu"]
    if not settings.device and found == ["cpu"] and shutil.which("nvidia-smi"):
        print("WARNING: the NVIDIA GPU is not being used; python -m ladder check says why", file=sys.stderr)
    settings.device = settings.device or found[0]
    shape_of(settings.model)
    if settings.B is None:
        settings.B = 1 if settings.device == "cpu" else 4
    for name, value in vars(settings).items():
        lowest = 1 if name in ("B", "T", "steps") else 0
        if type(value) in (int, float) and not lowest <= value < 2**63:
            sys.exit(f"error: {flags[name]} {value}: out of range; give at least {lowest}")
    if settings.device not in found:
        sys.exit(f"error: --device {settings.device}: torch {torch.__version__} has only {found} here")
    folder = settings.save.parent if settings.save else Path()
    if settings.save and (settings.save.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK))):
        sys.exit(f"error: --save {settings.save}: cannot be written; name a file in a folder that exists")
    if "RANK" in os.environ:
        check_torchrun(settings)
    return settings


def check_torchrun(settings):
    """Exit with a one-line error where the processes that torchrun has started cannot train together."""
    if settings.device == "mps":
        sys.exit("error: --device mps: torch has no DDP for Apple GPUs; use --device cpu")
    if settings.device == "cuda":
        if not torch.distributed.is_nccl_available():
            sys.exit("error: --device cuda: this torch lacks NCCL, as on Windows; use WSL, or --device cpu")
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            sys.exit(f"error: --nproc_per_node: more processes than GPUs; use {torch.cuda.device_count()}")
        if (mode := getattr(settings, "compile_mode", "")) in ("reduce-overhead", "max-autotune"):
            sys.exit(f"error: --compile-mode {mode}: no CUDA graphs under DDP (pytorch issue 169545); use default")
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        sys.exit("error: --max-restarts: needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; set it (pytorch issue 135712)")


def make_folder(folder, *foreign):
    """Make `folder`; exits with a one-line error if it is not writable, or holds a file `foreign`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        sys.exit(f"error: {folder}: cannot be written ({error.strerror}); give another folder")
    if found := [name for name in foreign if (folder / name).exists()]:
        sys.exit(f"error: {folder}: holds checkpoints of another format, {found[0]}; give another --checkpoint-dir")


def open_tokens(folder, split, n_needed):
    """(the tokens of "train" or "val", memory-mapped, (n_tokens,) uint16; meta.json); prepares missing default data.

    Exits with a one-line error if the files are missing or unusable.
    """
    if folder == Settings.data and not folder.exists():
        prepare = SCRIPT.resolve().parents[SCRIPT.parent.name == "beyond"] / "data" / "prepare.py"
        if subprocess.run([sys.executable, prepare]).returncode:
            sys.exit(f"error: --data {folder}: could not be prepared; see above")
    try:
        meta = {"end_of_text": 50256} | json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens = np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r")
        fits = len(tokens) == meta[f"{split}_tokens"] and tokens[:10**8].max() < meta["vocab_size"]
        if not fits or not {"source", "tokenizer"} <= meta.keys():
            raise ValueError(f"{split}.bin is not what meta.json describes")
        named = meta["tokenizer"] in ("gpt2", "gpt2-bytes")  # the name says it all
        meta["tokenizer_json"] = None if named else (folder / "tokenizer.json").read_text(encoding="utf-8")
        meta["id"] = f"{meta.get('sha256')} in {meta['tokenizer']} tokens"
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: --data {folder}: no usable token files ({error}); make them with"
                 f" python data/prepare.py [--text FILE] --out {folder}")
    if len(tokens) < n_needed:
        sys.exit(f"error: --data {folder}: {len(tokens)} {split} tokens, a batch needs {n_needed}; lower -B or -T")
    return tokens, meta


def shape_of(name):
    """The GPTConfig of a --model; exits with a one-line error if there is none."""
    numbers = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})", name)
    if name not in MODELS and not numbers:
        sys.exit(f"error: --model {name}: give {', '.join(MODELS)}, or layers x heads x width, for example 4x4x128")
    if name in MODELS:
        return MODELS[name]
    n_layer, n_head, n_embd = map(int, numbers.groups())
    if n_embd % (2 * n_head):
        sys.exit(f"error: --model {name}: {n_embd} cannot be split into {n_head} heads of even width; change one")
    return GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)


def new_model(settings, loader):
    """The GPT that --model or --pretrained names; exits with a one-line error if it does not fit the data or -T."""
    if settings.pretrained:
        model = from_pretrained(settings.pretrained)
        ours, path = loader.meta["tokenizer_json"], Path(settings.pretrained, "tokenizer.json")
        theirs = path.read_text(encoding="utf-8") if ours and path.is_file() else ours
        other = ours and json.loads(ours)["model"] != json.loads(theirs)["model"]
        if other or model.config.vocab_size != loader.meta["vocab_size"]:
            sys.exit(f"error: --data {settings.data}: its {loader.meta['vocab_size']} tokens are not the model's"
                     f" {model.config.vocab_size}; prepare it again with --tokenizer {settings.pretrained}")
    else:
        longest = max(GPTConfig.block_size, settings.T if "rotate" in globals() else 0)  # RoPE (rung 20) has no limit
        model = GPT(replace(shape_of(settings.model), vocab_size=loader.meta["vocab_size"], block_size=longest))
    if settings.T > model.config.block_size:
        sys.exit(f"error: -T {settings.T}: the model's longest sequence is {model.config.block_size}; lower -T")
    return model


def from_pretrained(name):
    """A GPT with the weights of a Hugging Face GPT-2, from rung 23 on a Qwen3 (name or folder); exits with one line."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        hf = AutoConfig.from_pretrained(name)
        model = GPT(config_of(hf, name))
        hf_model, report = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True)
        if report["missing_keys"]:  # transformers has drawn them at random
            raise ValueError("it lacks weights")
    except Exception as error:  # no network, no such name, a damaged file: any exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        sys.exit(f"error: --pretrained {name}: cannot be loaded ({reason}); give another name or folder")
    if model.lm_head.weight is model.transformer.wte.weight and not hf.tie_word_embeddings:
        sys.exit(f"error: --pretrained {name}: its embeddings are untied; use baseline.py")
    names = {"model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "model.norm": "transformer.ln_f",
             "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn": "attn", "o_proj": "c_proj"}
    weights, found = model.state_dict(), hf_model.state_dict()
    for key in [key for key in found if "q_proj" in key]:  # a Qwen3 has three matrices where c_attn is one
        parts = [found.pop(key.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[key.replace("q_proj", "c_attn")] = torch.cat(parts)
    for key, weight in found.items():
        if hf.model_type == "gpt2" and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            weight = weight.t()  # GPT-2's Conv1D stores (in, out), nn.Linear (out, in)
        for theirs, ours in names.items():
            key = key.replace(theirs, ours)
        weights[key][: len(weight)] = weight  # a padded vocabulary (rung 7) has more rows
    return model


def config_of(hf, name):
    """The GPTConfig of a Hugging Face configuration; exits with a one-line error if this script has another model."""
    rungs = {"gpt2": "a GPT-2; use rung 19 or one before", "qwen3": "a Qwen3; use rung 23 or later"}
    kind = "qwen3" if hasattr(GPTConfig, "n_hidden") else "20 to 22" if "rotate" in globals() else "gpt2"
    if hf.model_type != kind:
        other = "not a GPT-2 checkpoint; give the name or the folder of one"
        sys.exit(f"error: --pretrained {name}: {rungs.get(hf.model_type, other)}")
    config = GPTConfig(
        hf.max_position_embeddings, hf.vocab_size, hf.num_hidden_layers, hf.num_attention_heads, hf.hidden_size)
    if kind == "gpt2":
        needed = {"activation_function": "gelu_new", "n_inner": hf.n_inner and 4 * config.n_embd,
                  "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "layer_norm_epsilon": 1e-5}
    else:
        needed = {"num_key_value_heads": config.n_head, "head_dim": config.n_embd // config.n_head,
                  "intermediate_size": config.n_hidden, "hidden_act": "silu", "rms_norm_eps": 1e-6,
                  "attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
                  "sliding_window": None, "tie_word_embeddings": True}
    for key, ours in needed.items():
        if (found := getattr(hf, key, None)) != ours:
            title = {"gpt2": "GPT-2", "qwen3": "Qwen3"}[kind]
            sys.exit(f"error: --pretrained {name}: not a {title} checkpoint that fits here (its {key} is {found}, not"
                     f" {ours}); give one of this script's shape")
    return config


def save_checkpoint(path, model, loader, step, **more):
    """Write a checkpoint under a temporary name, then rename it, so a kill never leaves half a file.

    Returns an error message, or None on success.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            torch.save({"script": SCRIPT.name, "config": asdict(model.config), "model": model.state_dict(),
                        "step": step, **{key: loader.meta[key] for key in TOKENIZER}, **more}, file)
            os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        partial.unlink(missing_ok=True)
        return f"{path} could not be written ({getattr(error, 'strerror', 'is the disk full?')})"


def save_model(settings, model, loader, step):
    """Write the trained model to --save's file; exits with a one-line error if that fails."""
    if settings.save and RANK == 0 and (problem := save_checkpoint(settings.save, model, loader, step)):
        sys.exit(f"error: --save: {problem}")


def device_name(device):
    """The name of the chip."""
    if device != "cpu":
        return torch.cuda.get_device_name() if device == "cuda" else "Apple GPU"
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    name = re.search(r"model name\s*: (.+)", cpuinfo)
    return f"{name[1] if name else 'CPU'} ({torch.get_num_threads()} threads)"


def allocator(device):
    """What hands out the device's memory; on a CPU "default" is what the system and this build of torch have."""
    if device != "cpu":
        return "torch"
    libraries = Path("/proc/self/maps").read_text() if os.path.exists("/proc/self/maps") else ""
    preloaded = re.search(r"/lib(tcmalloc|jemalloc|mimalloc)[^/]*\.so", libraries)
    kept = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} <= os.environ.keys()  # glibc keeps what is freed
    return preloaded[1] if preloaded else "glibc, memory kept" if kept else "default"


def peak_memory(device):
    """Peak memory in GB (1e9 bytes): of torch's allocator on CUDA, of the process on a CPU; on MPS what is held now."""
    if device != "cpu":
        return (torch.cuda.max_memory_allocated() if device == "cuda" else torch.mps.driver_allocated_memory()) / 1e9
    if sys.platform == "win32":
        return float("nan")  # Windows has no resource module
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Log:
    """The run's log, on the screen and line by line in <log-dir>/<script>.log: a killed run keeps its steps."""

    def __init__(self, settings, model, loader, tokens_per_step, precision, **notes):
        self.device, self.tokens_per_step, self.seconds = settings.device, tokens_per_step, []
        self.steps, self.start = settings.steps, time.perf_counter()
        make_folder(settings.log_dir)
        self.path = settings.log_dir / f"{SCRIPT.stem}.log"
        if RANK == 0:
            self.path.write_text("")
        name = f"{settings.pretrained} (pretrained)" if settings.pretrained else settings.model
        self.line(f"# script: {SCRIPT.name}")
        self.line(f"# model: {name} | parameters: {sum(p.numel() for p in model.parameters()):,}")
        precision = precision.removeprefix("torch.")
        self.line(f"# device: {device_name(self.device)} | torch: {torch.__version__} | precision: {precision}"
                  f" | allocator: {allocator(self.device)}")
        for key, note in notes.items():
            self.line(f"# {key.replace('_', ' ')}: {note}")
        self.line(f"# batch: B={settings.B} T={settings.T} | steps: {settings.steps} | seed: {settings.seed}")
        self.line(f"# data: {loader.meta['source']} ({loader.meta['tokenizer']} tokens)"
                  f" | loaded {len(loader.tokens)} tokens | 1 epoch = {loader.n_batches} batches")

    def line(self, text, on_screen=""):
        if RANK > 0:
            return
        print(text + on_screen, flush=True)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:  # a full disk must not end the training
            print(f"WARNING: {self.path}: this line is lost ({error.strerror})", file=sys.stderr, flush=True)

    def step(self, step, loss, dt, **more):
        """Log a step: the loss in nats, dt in seconds, what the rung adds. Exits when the loss is not finite."""
        self.seconds.append(dt)
        self.last = step
        self.line(f"step : {step} | loss: {loss:.6f} | dt: {dt * 1000:.2f} ms"
                  f" | tokens/sec: {self.tokens_per_step / dt:.2f}" + "".join(f" | {k}: {v}" for k, v in more.items()),
                  self.left())
        if not math.isfinite(loss):
            sys.exit(f"error: the loss is {loss} at step {step}, so training stops; see NaN in docs/measuring.md")

    def left(self):
        """The time left, from this process's steps and from what was between them: validations, checkpoints."""
        between = (time.perf_counter() - self.start - sum(self.seconds)) / len(self.seconds)
        minutes = int((self.steps - self.last) * (np.median(self.seconds[-100:]) + between) / 60)
        hours = f"{minutes // 60} h " if minutes >= 60 else ""
        return f" | left: {hours}{minutes % 60} min" if minutes and len(self.seconds) >= 10 else ""

    def finish(self):
        """Log the median step time after warm-up: 5 steps (2 in runs of up to 10), on an accelerator 3 s if longer."""
        n = len(self.seconds)
        warm_up = min(5 if n > 10 else 2, n - 1)
        if self.device != "cpu":
            needed = 2 + (np.cumsum(self.seconds[1:]) < 3).sum()  # 3 s after the first step, during which it compiles
            warm_up = max(warm_up, min(needed, n - 10))  # 10 steps are left for the median
            if warm_up < needed:
                self.line("# warm-up: less than 3 s, so the median may be too high; give more --steps")
        if self.device == "cuda":
            self.line(f"# memory reserved by the allocator: {torch.cuda.max_memory_reserved() / 1e9:.2f} GB")
        dt, first = np.median(self.seconds[warm_up:]), self.last - n + warm_up + 1
        self.line(f"median : dt: {dt * 1000:.2f} ms | tokens/sec: {self.tokens_per_step / dt:.2f}"
                  f" | peak memory: {peak_memory(self.device):.2f} GB | steps {first}-{self.last}")


def main(argv=None):
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout has no such method
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know a character of a file's name
    train(parse_settings(argv))
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # under torchrun
        torch.distributed.destroy_process_group()
        time.sleep(0.5)  # a gloo thread that drops its last result while Python shuts down would abort the process


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: the log keeps the finished steps")
    except OSError as error:  # a folder that cannot be written, a full disk
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        if "no kernel image" in str(error):  # CUDA's words where this build of torch leaves the GPU's architecture out
            sys.exit("error: --device cuda: this torch was not built for this GPU; see python -m ladder check")
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        sys.exit("error: out of memory; try half the -B, or a shorter -T")
