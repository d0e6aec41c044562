"""Long run: a modern model, a long run, several cards.
Starts from 7_chunked_cross_entropy.py and 7_zero_init.py.

    torchrun --standalone --nproc_per_node=8 beyond/long_run/long_run.py --resume

`chunked_cross_entropy` trains GPT-2 for as long as you like: on several cards, in batches of any
size, through crashes, in little memory. `zero_init` trains a Qwen3 in one process, one batch a
step. This script combines both. Every definition comes from one of the two, except the flags and
three places where they meet:

- `GPT.__init__` and `GPT.forward`: a recomputed block also needs RoPE's angles.
- `Checkpoints.refuse_other_run`: until the learning rate decays (`trapezoid_lr`), nothing in a step
  depends on --steps. So a run that was stopped before the decay can be resumed with a different
  --steps or --decay-share.
- `train`: the steps of `chunked_cross_entropy` with the optimizer and the learning rates of
  `zero_init`. The log also shows the remaining time.

Gain: everything from both chains, in one script.
Cost: its length. To learn what one part does, read the script that introduces it. The commands are
in docs/long_runs.md.
"""
import argparse
import contextlib
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
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
MODELS = {  # layers x heads x width
    "tiny": "2x2x64", "mini": "6x3x192", "small": "6x6x384", "gpt2": "12x12x768",
    "gpt2-medium": "24x16x1024", "gpt2-large": "36x20x1280", "gpt2-xl": "48x25x1600",
}
DEVICES = ["cpu"]  # what this machine can train on, the fastest first
if torch.cuda.is_available():
    DEVICES.insert(0, "cuda")
if torch.mps.is_available():
    DEVICES.insert(0, "mps")
DEFAULT_B = 1 if DEVICES == ["cpu"] else 4


def add_flags(parser):
    """Add the flags of this script; --help shows their defaults."""
    flag = parser.add_argument
    flag("--model", default="gpt2", help=f"{', '.join(MODELS)}, or a shape like 4x4x128")
    flag("--pretrained", type=Path, help="start from a model written by --save or convert.py")
    flag("-B", "--batch-size", dest="B", type=int, default=DEFAULT_B, help="sequences per batch")
    flag("-T", "--seq-len", dest="T", type=int, default=1024, help="tokens per sequence")
    flag("--steps", type=int, default=50, help="optimizer steps")
    flag("--loss-chunk", type=int, default=4096, help="tokens whose logits exist at once; 0: all")
    flag("--recompute-blocks", type=int, default=0, help="number of blocks to recompute")
    flag("--checkpoint-every", type=int, default=250, help="steps between checkpoints; 0: never")
    flag("--checkpoint-dir", type=Path, default=f"checkpoints/{SCRIPT.stem}", help="their folder")
    flag("--resume", action="store_true", help="continue from the newest checkpoint, if any")
    flag("--val-every", type=int, default=25, help="steps between validations; 0: never")
    flag("--val-sequences", type=int, default=32, help="sequences to validate on; 0: all")
    flag("--total-batch", type=int, help="tokens per step; None: 524288, or 4 batches on a CPU")
    # twice rung 8's constant rate: warm-up and decay make that safe
    flag("--max-lr", type=float, default=6e-4, help="peak learning rate, after the warm-up")
    flag("--muon-lr", type=float, default=2e-3, help="peak learning rate for Muon")
    flag("--warmup-steps", type=int, default=10, help="steps of linear warm-up")
    flag("--decay-share", type=float, default=0.4, help="decay over this last share of the steps")
    flag("--seed", type=int, default=1337, help="random seed of the initial weights")
    flag("--device", default=DEVICES[0], help="cuda, mps or cpu; CUDA_VISIBLE_DEVICES picks a GPU")
    flag("--data", type=Path, default="data/tokens", help="folder written by data/prepare.py")
    flag("--log-dir", type=Path, default="logs", help="folder for the log")
    # no CUDA graphs: they do not work under DDP, nor where gradients accumulate
    flag("--compile-mode", choices=["default", "max-autotune-no-cudagraphs", "none"],
         default="none" if DEVICES[0] == "mps" else "default", help="torch.compile's mode, or none")
    flag("--save", type=Path, help="write the trained model to this file")


# Flags that --resume does not compare: they change speed, rounding, or what is written.
MAY_CHANGE = {
    "B", "device", "compile_mode", "data", "log_dir", "save",
    "checkpoint_every", "checkpoint_dir", "resume", "val_every", "val_sequences",
    "recompute_blocks", "loss_chunk",
}


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2 (124M)."""
    block_size: int = 1024  # longest sequence
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_hidden: int = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64

    def __post_init__(self):
        if self.n_hidden == 0:  # three matrices have as many weights as two with 4 n_embd
            self.n_hidden = math.ceil(8 * self.n_embd / 3 / 64) * 64


def model_config(args, vocab_size):
    """The model's shape, as --model says, with a vocabulary of this size."""
    shape = MODELS.get(args.model, args.model)
    try:
        n_layer, n_head, n_embd = [int(number) for number in shape.split("x")]
    except ValueError:
        names = ", ".join(MODELS)
        sys.exit(f"error: --model {args.model}: unknown; give {names}, or a shape like 4x4x128")
    if min(n_layer, n_head, n_embd) < 1 or n_embd % n_head != 0:
        sys.exit(f"error: --model {args.model}: needs numbers above 0, and heads that divide width")
    if n_embd // n_head % 2 != 0:
        sys.exit(f"error: --model {args.model}: RoPE rotates pairs; make width / heads even")
    return GPTConfig(
        block_size=max(1024, args.T),  # GPT-2's, or longer
        vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
    )


def rotary_angles(T, head_size, theta=10_000.0):
    """position * theta^(-2i/hs), the angle of each position and pair, in float32: (T, hs/2)."""
    radians_per_token = 1.0 / theta ** (torch.arange(0, head_size, 2) / head_size)  # (hs/2,)
    return torch.arange(T)[:, None] * radians_per_token


def rotate(x, cos, sin):
    """Rotate pairs (a, b) of queries or keys to (a cos - b sin, b cos + a sin): (B, nh, T, hs)."""
    partner = x.roll(x.size(-1) // 2, dims=-1)  # the other one of each pair (x[i], x[i + hs/2])
    return x * cos + partner * sin  # the minus sign is in the first half of sin


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention: (B, T, C) -> (B, T, C).

    Each token attends to itself and to the tokens before it.
    """

    def __init__(self, config):
        super().__init__()
        # query, key and value projections of all heads in one matrix ("c_": OpenAI's names)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_proj.ends_residual_branch = True
        self.n_head = config.n_head
        self.q_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6)

    def forward(self, x, cos, sin):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        # nh heads of size hs each
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        # Only the norms' gains, not the lengths of q and k, can make a score large. (A softmax with
        # all its weight on one token has hardly any gradient.) The norms run in float32; under
        # autocast, the attention below then casts q and k to v's type.
        q = self.q_norm(q.float())
        k = self.k_norm(k.float())
        # a score then depends on the two positions only through their distance
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        # (B, nh, T, hs); the (T, T) scores exist only in tiles
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        # a product of two linear features of x, while GELU saw only one
        gate = F.silu(self.gate_proj(x))  # (B, T, n_hidden)
        return self.down_proj(gate * self.up_proj(x))  # (B, T, n_hidden) -> (B, T, C)


class Block(nn.Module):
    """A pre-norm transformer layer with two residual branches: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        # only scales: it subtracts no mean and adds no bias, which is less to compute
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.ln_1(x), cos, sin)
        x = x + self.mlp(self.ln_2(x))
        return x


class ChunkedCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of x @ weight.T against targets, `chunk` tokens at a time.

    x (N, C), weight (n_rows, C), targets (N,). The forward pass also computes the gradients, while
    the logits exist.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, chunk):
        total = torch.zeros((), device=x.device)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:  # not in evaluate()
            x_grad = torch.empty_like(x)
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        rows = torch.arange(len(weight), device=x.device)
        for i in range(0, len(x), chunk):
            x_part = x[i : i + chunk]  # (chunk, C)
            ids = targets[i : i + chunk]  # (chunk,)
            logits = F.linear(x_part, weight)  # (chunk, C) -> (chunk, n_rows)
            # no probability for padding; set in place, because autograd records nothing here
            logits[:, vocab_size:] = -torch.inf
            log_sum = torch.logsumexp(logits.float(), dim=1)  # (chunk,)
            is_target = rows == ids[:, None]  # (chunk, n_rows)
            # logits[i, ids[i]] as a sum. With gather or F.nll_loss, torch.compile would do this for
            # all chunks in one kernel, at the end, and keep all logits until then.
            target_logits = torch.where(is_target, logits, 0.0).sum(dim=1)  # (chunk,)
            total += (log_sum - target_logits).sum()  # sum of -log(softmax(logits)) at the targets
            if weight_grad is not None:
                # d loss / d logits of each token: softmax, minus 1 at the target
                probs = (logits.float() - log_sum[:, None]).exp_()
                logits_grad = probs.add_(is_target, alpha=-1).to(logits.dtype)
                x_grad[i : i + chunk] = logits_grad @ weight  # (chunk, n_rows) @ (n_rows, C)
                # (n_rows, chunk) @ (chunk, C). This sum over the chunk could overflow float16, so
                # compute 1/64 of it; backward() multiplies by 64.
                weight_grad += logits_grad.T @ (x_part / 64)
        ctx.save_for_backward(x_grad, weight_grad)
        return total / len(x)

    @staticmethod
    def backward(ctx, loss_grad):
        # x_grad is the gradient of the sum of the losses, weight_grad that of a 64th of the sum
        x_grad, weight_grad = ctx.saved_tensors
        scale = loss_grad / len(x_grad)  # the loss is their mean
        return x_grad * scale, weight_grad * (64 * scale), None, None, None


class GPT(nn.Module):
    """A Qwen3, with GPT-2's names for what both have."""

    def __init__(self, config, recompute_blocks=0, loss_chunk=0):
        super().__init__()
        self.config = config
        self.recompute_blocks = min(recompute_blocks, config.n_layer)
        self.loss_chunk = loss_chunk
        n_rows = math.ceil(config.vocab_size / 128) * 128  # 50257 -> 50304: full tiles in products
        # the embedding of tokens, the blocks ("hidden"), the last norm
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(n_rows, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.RMSNorm(config.n_embd, eps=1e-6),
        ))
        self.lm_head = nn.Linear(config.n_embd, n_rows, bias=False)
        # one parameter (n_rows, n_embd) under two names
        self.transformer.wte.weight = self.lm_head.weight
        angles = rotary_angles(config.block_size, config.n_embd // config.n_head)
        cos, sin = angles.cos(), angles.sin()  # (block_size, hs/2) each
        # for both numbers of a pair, with the signs that `rotate` needs
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if hasattr(module, "ends_residual_branch"):
                # The block starts as the identity, so that no random branch is in the way of signal
                # or gradient. These weights get gradients at once, because their inputs are not
                # zero; the block's other weights get theirs from the second step on.
                std = 0.0
            nn.init.normal_(module.weight, mean=0.0, std=std)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size).

        With targets (B, T), it returns only the mean cross-entropy, in nats per token.
        """
        B, T = idx.shape
        cos, sin = self.cos[:T], self.sin[:T]  # (T, hs) each
        x = self.transformer.wte(idx)  # (B, T, C)
        for i, block in enumerate(self.transformer.h):
            if self.training and i < self.recompute_blocks:
                # keeps only x, (B, T, C), and computes the block again in the backward pass;
                # use_reentrant=True would be torch's older way to do this
                x = torch.utils.checkpoint.checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        x = self.transformer.ln_f(x)
        if targets is not None and self.loss_chunk > 0:
            x, targets = x.view(B * T, -1), targets.view(B * T)  # (B*T, C), (B*T,)
            return ChunkedCrossEntropy.apply(
                x, self.lm_head.weight, targets, self.config.vocab_size, self.loss_chunk)
        logits = self.lm_head(x)  # (B, T, n_rows)
        if targets is None:
            return logits[..., : self.config.vocab_size]  # (B, T, vocab_size)
        logits = logits.float()  # else F.cross_entropy rounds to bfloat16 under CUDA's autocast
        # masked, not sliced off: rows stay aligned, and padding gets a probability of exp(-inf) = 0
        padding = torch.zeros(logits.size(-1), device=idx.device)  # (n_rows,)
        padding[self.config.vocab_size :] = -torch.inf
        logits = logits + padding  # (B, T, n_rows) + (n_rows,)
        return F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))

    def configure_optimizers(self, lr, muon_lr, weight_decay):
        """Muon for the blocks' matrices, fused AdamW for the rest; only matrices decay."""
        matrices = [p for p in self.transformer.h.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]  # RMSNorms
        embeddings = [self.transformer.wte.weight]
        groups = [
            {"name": "muon", "params": matrices, "max_lr": muon_lr, "weight_decay": weight_decay},
            {"name": "others", "params": others, "max_lr": lr, "weight_decay": 0.0},
            {"name": "embedding", "params": embeddings, "max_lr": lr, "weight_decay": weight_decay},
        ]
        return MuonAdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def orthogonalize(matrices):
    """(k, m, n) -> (k, m, n): the same singular vectors, all singular values near 1.

    So no direction dominates the update of any of these k matrices.
    """
    if matrices.size(1) > matrices.size(2):
        return orthogonalize(matrices.mT).mT  # so that x @ x.mT is the smaller of the two products
    # This norm is the root of the sum of all s^2, so each singular value s is now at most 1. The
    # division is in float32, because in float16 a gradient of 1e-9 would be 0.
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-12)
    if x.is_cuda:
        x = x.half()  # float16: enough range from here on, three more mantissa bits than bfloat16
    elif torch.cpu._is_avx512_bf16_supported():
        x = x.bfloat16()
    # x is U S V^T and gram @ x is U S^3 V^T, so an iteration keeps U and V, and takes each s to
    # 3.4445 s - 4.7750 s^3 + 2.0315 s^5: small ones more than triple, large ones stay near 1.
    for _ in range(5):
        gram = x @ x.mT  # (k, m, m)
        # -4.7750 gram + 2.0315 gram @ gram
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        # 3.4445 x + polynomial @ x
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.to(matrices.dtype)


def muon_update(grads, momenta):
    """The updates (k, m, n) of k matrices of one shape, from lists of gradients and momenta."""
    # Nesterov momentum, one step ahead of the plain one: 0.05 grad + 0.95 momentum
    ahead = torch.stack(torch._foreach_lerp(grads, momenta, 0.95))  # (k, m, n)
    # orthogonalize leaves an RMS of longer_side^-0.5; this factor makes it 0.2, about AdamW's
    return 0.2 * max(ahead.shape[1:]) ** 0.5 * orthogonalize(ahead)


class MuonAdamW(torch.optim.AdamW):
    """Muon for the matrices of the group "muon", and AdamW for the other parameters."""

    BATCH = 16  # matrices per batch; more would take memory without keeping a GPU any busier

    @torch.no_grad()
    def step(self, closure=None):
        if getattr(self, "found_inf", False):
            return  # set by the gradient scaler, if a float16 gradient has overflowed
        [muon] = [group for group in self.param_groups if group["name"] == "muon"]
        of_shape = {}
        for p in muon["params"]:
            of_shape.setdefault(p.shape, []).append(p)
        for same in of_shape.values():
            for i in range(0, len(same), self.BATCH):
                self.muon_step(same[i : i + self.BATCH], muon["lr"], muon["weight_decay"])
        super().step()

    def muon_step(self, matrices, lr, weight_decay):
        """Update matrices of one shape as a batch, in a few large kernels, not many small ones."""
        for p in matrices:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
                state["step"] = torch.zeros(())  # only because AdamW's load_state_dict asks for it
        grads = [p.grad for p in matrices]
        momenta = [self.state[p]["momentum"] for p in matrices]
        # _foreach: the same operation on each tensor of a list
        torch._foreach_lerp_(momenta, grads, 0.05)  # 0.95 momentum + 0.05 grad
        updates = muon_update(grads, momenta)
        torch._foreach_mul_(matrices, 1 - lr * weight_decay)  # decays as AdamW does
        torch._foreach_add_(matrices, updates.unbind(), alpha=-lr)
        for p in matrices:
            p.grad = None  # so that AdamW skips it


class DataLoaderLite:
    """Batches of consecutive tokens from a token file, on the device."""

    def __init__(self, folder, B, T, device, split="train"):
        self.B, self.T, self.device = B, T, device
        self.tokens, self.meta = load_tokens(folder, split, B * T + 1)  # (n_tokens,)
        self.n_batches = (len(self.tokens) - 1) // (B * T)
        self.prefetched = {}  # {i: the i-th batch}

    def prefetch(self, i):
        """Fetch the i-th batch now, so that batch(i) returns it without waiting."""
        self.prefetched[i] = self.batch(i)

    def batch(self, i):
        """The i-th B*T tokens of the file and the token that follows each: 2 x (B, T).

        Wraps around at the end of the file. No position is stored: i alone determines the batch.
        """
        if i in self.prefetched:
            return self.prefetched.pop(i)
        start = (i % self.n_batches) * self.B * self.T
        chunk = self.tokens[start : start + self.B * self.T + 1]  # (B*T + 1,)
        if chunk.max() >= self.meta["vocab_size"]:
            sys.exit(f"error: --data: token {chunk.max()} is beyond vocab_size; prepare it again")
        chunk = torch.from_numpy(chunk.astype(np.int64))  # astype copies it into memory
        if self.device == "cuda":
            chunk = chunk.pin_memory()  # the GPU copies from it by itself, while Python continues
        chunk = chunk.to(self.device, non_blocking=self.device == "cuda")
        return chunk[:-1].view(self.B, self.T), chunk[1:].view(self.B, self.T)


@torch.no_grad()
def evaluate(model, loader, n_sequences, autocast, rank, world_size):
    """The mean loss on the first sequences of a loader with B=1, in nats per token.

    Each of n ranks evaluates every n-th sequence, and an all-reduce adds up their losses.
    """
    total = torch.zeros((), device=loader.device)
    model.eval()
    with autocast:
        for i in range(rank, n_sequences, world_size):
            x, y = loader.batch(i)  # (1, T) each: no more memory than a step of training
            total += model(x, y)
    model.train()
    if dist.is_initialized():
        dist.all_reduce(total)  # the sum of all ranks, on each of them
    loss = total.item() / n_sequences
    if not math.isfinite(loss):
        sys.exit(f"error: the validation loss is {loss}; see NaN in docs/running.md")
    return loss


class Checkpoints:
    """The run on disk. Each file contains all that the next step depends on."""

    def __init__(self, args, loader, model, optimizer, scaler):
        self.args = args
        self.loader = loader
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.folder = args.checkpoint_dir
        # what identifies the run: the script, the text, the flags
        text = f"{loader.meta['sha256']} in {loader.meta['tokenizer']} tokens"
        self.run = {"script": SCRIPT.name, "text": text, "train_tokens": len(loader.tokens)}
        for name, value in vars(args).items():
            if name not in MAY_CHANGE:
                self.run[name] = str(value) if isinstance(value, Path) else value

    def paths(self):
        """The paths of the checkpoints, the newest last."""
        return sorted(self.folder.glob("step_" + 7 * "[0-9]" + ".pt"))

    def lock(self):
        """Lock the folder until this process ends; exit if another run uses it."""
        self.folder.resolve().mkdir(parents=True, exist_ok=True)
        self.folder_lock = filelock.FileLock(self.folder / "lock")
        try:
            self.folder_lock.acquire(timeout=0)
        except filelock.Timeout:
            sys.exit(f"error: --checkpoint-dir {self.folder}: in use by another run; give another")
        except PermissionError:  # also an OSError, but it does not mean that the drive lacks locks
            raise
        except (OSError, NotImplementedError) as error:  # some network drives have no locks
            print(f"# WARNING: {self.folder} has no lock, so start no second run in it: {error}")

    def load(self):
        """Restore the newest checkpoint and return its step; without one or --resume, return 0."""
        found = [self.paths()]
        if dist.is_initialized():
            # rank 0's list, so that all resume after the same step (or fail, if they lack the file)
            dist.broadcast_object_list(found)
        [paths] = found
        if paths and not self.args.resume and self.args.checkpoint_every:
            sys.exit(f"error: {paths[-1]} is from an earlier run; add --resume to continue it,"
                     " or name another --checkpoint-dir to start over")
        if not paths or not self.args.resume:
            return 0
        newest = paths[-1]
        try:
            saved = torch.load(newest, map_location="cpu", weights_only=True)
            self.refuse_other_run(newest, saved)
        except (EOFError, KeyError, RuntimeError):  # half a file, or one written by --save
            sys.exit(f"error: --resume: {newest} is damaged, or no checkpoint;"
                     " delete it to resume from the one before")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if saved["scaler"]:  # empty unless that part of the run was in float16
            self.scaler.load_state_dict(saved["scaler"])
        return saved["step"]

    def refuse_other_run(self, path, saved):
        """Exit if the checkpoint is from another run."""
        # until the rate starts to fall, a longer or shorter run takes the same steps
        not_yet_falling = (
            saved["step"] <= last_step_at_max_lr(self.run)
            and saved["step"] <= last_step_at_max_lr(saved["run"])
        )
        for name, value in self.run.items():
            theirs = saved["run"].get(name, value)  # an older file may lack it
            if name in ("steps", "decay_share") and not_yet_falling:
                continue
            if theirs != value:
                sys.exit(f"error: --resume: {path} was trained with {name} {theirs}, not {value};"
                         " for a new run from it, give --pretrained and another --checkpoint-dir")

    def save(self, step, log):
        """Write a checkpoint; keep the newest two. On a full disk, only this checkpoint is lost."""
        # no data position and no RNG state: all that a step reads or draws follows from its number
        saved = model_file(self.model, self.loader, step)
        # without its moments the first resumed steps would go astray
        saved["optimizer"] = self.optimizer.state_dict()
        saved["scaler"] = self.scaler.state_dict()
        saved["run"] = self.run
        # written aside, then renamed, so that being killed leaves no half-written checkpoint
        partial = self.folder / "partial"
        try:
            self.folder.resolve().mkdir(parents=True, exist_ok=True)  # also if it was deleted
            with open(partial, "wb") as file:
                torch.save(saved, file)
                os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
            partial.replace(self.folder / f"step_{step:07}.pt")
            log.line(f"# checkpoint: step {step} in {self.folder}")
        except (OSError, RuntimeError) as error:  # torch raises it when the disk is full
            partial.unlink(missing_ok=True)
            log.line(f"# WARNING: no checkpoint of step {step}: {error}")
        for older in self.paths()[:-2]:
            older.unlink()


def last_step_at_max_lr(run):
    """The last step at the peak rate, from a run's flags; 1 if they have no decay_share."""
    return run["steps"] * (1 - run.get("decay_share", 1)) + 1


def get_lr(step, max_steps, max_lr, warmup_steps, decay_share):
    """The learning rate for `step`, from 1 to max_steps; at max_steps + 1 it would reach 0."""
    rise = step / max(1, warmup_steps)  # small steps while AdamW's averages hold few gradients
    # The rate stays at its peak until late, because large steps make most progress. But they also
    # keep the weights jumping around the minimum, and the fall ends that.
    fall = (max_steps + 1 - step) / max(1, decay_share * max_steps)  # to zero
    return max_lr * min(rise, 1.0, fall)


def set_learning_rates(optimizer, step, args):
    """Set each group's learning rate for this step; return AdamW's, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = get_lr(
            step, args.steps, group["max_lr"], args.warmup_steps, args.decay_share)
    return optimizer.param_groups[-1]["lr"]


PRECISION = {  # for the log
    torch.bfloat16: "bfloat16 autocast", torch.float16: "float16 autocast",
    torch.float32: "float32 (no bfloat16 on this CPU)",
}


def autocast_dtype(device):
    """The type for matrix products: bfloat16, if the hardware has it."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16  # T4, V100 and older
    if device == "cpu" and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32  # no autocast: emulated bfloat16 is slower than float32
    return torch.bfloat16


def check_compiler(device):
    """Exit with an error if torch cannot compile, for example without a C++ compiler."""
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":
            sys.exit(f"error: {name}=1 forbids torch.compile; unset it, or add --compile-mode none")
    try:
        torch.compile(torch.sin)(torch.ones(1, device=device))
    except (OSError, RuntimeError) as error:  # OSError: the cache cannot be written to
        if "out of memory" in str(error):
            raise
        reason = str(error).strip().splitlines()[0]
        sys.exit(f"error: torch.compile does not work here ({reason}); --compile-mode none trains"
                 " without it, and python -m ladder check says what is missing")


def on_any_rank(condition, device):
    """Whether the condition is true on at least one rank."""
    count = torch.tensor(int(condition), device=device)
    if dist.is_initialized():
        dist.all_reduce(count)
    return count.item() > 0


def catch_signals():
    """Return a list that from now on collects the signals asking this process to end."""
    caught = []

    def catch(number, frame):
        caught.append(number)
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):  # print could be what was interrupted
                os.write(2, b"\nends after this step and saves; a third Ctrl-C ends at once\n")
        if caught.count(signal.SIGINT) == 2:  # a second one is often a slip
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    # SIGTERM comes before a cluster takes the machine away
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP"):  # the terminal was closed; Windows has no such signal
        numbers.append(signal.SIGHUP)
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, catch)
    return caught


def init_ranks(device):
    """Join torchrun's other processes; return this rank and the number of ranks."""
    if "RANK" not in os.environ:
        return 0, 1
    if not {"WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        sys.exit("error: RANK: torchrun's other variables are missing; unset it, or use torchrun")
    if device == "mps":
        sys.exit("error: --device mps: Apple GPUs have no torch.distributed; use --device cpu")
    backend = "gloo"  # sends tensors between processes, in main memory; nccl does so between GPUs
    if device == "cuda":
        local_rank = int(os.environ["LOCAL_RANK"])  # among the processes of this machine
        n_gpus = torch.cuda.device_count()
        if local_rank >= n_gpus:
            sys.exit(f"error: --nproc_per_node: there are {n_gpus} GPUs; give at most that number")
        torch.cuda.set_device(local_rank)
        if dist.is_nccl_available():  # not on Windows
            backend = "nccl"
    dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def batches_per_step(args, world_size):
    """The number of batches of B * T tokens in a step, on all ranks, as --total-batch says."""
    tokens = args.B * args.T * world_size  # of one batch of every rank
    if args.total_batch is None:
        args.total_batch = 4 * tokens if args.device == "cpu" else 524288
    if args.total_batch < 1 or args.total_batch % tokens != 0:
        sys.exit(f"error: --total-batch {args.total_batch}: not a multiple of"
                 f" B * T * ranks = {tokens}; change one of them")
    return args.total_batch // (args.B * args.T)


def optimizer_step(model, optimizer, scaler, loader, numbers, world_size, autocast):
    """Take one step on the batches with these numbers; return mean loss and unclipped norm."""
    optimizer.zero_grad()
    loss = torch.zeros((), device=loader.device)
    for i in numbers:
        x, y = loader.batch(i)  # (B, T) each
        # DDP averages the gradients of the ranks once, in the last backward pass
        averages_later = contextlib.nullcontext()  # does nothing
        if dist.is_initialized() and i != numbers[-1]:
            averages_later = model.no_sync()
        with averages_later:
            with autocast:
                micro_loss = model(x, y) / len(numbers)  # gradients add up to those of the mean
            scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
        loader.prefetch(i + world_size)  # this rank's next batch, while the device is busy
    scaler.unscale_(optimizer)  # remove the scaler's factor, so that 1.0 limits the true norm
    # without clipping, one odd batch would dominate the running averages for many steps
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm before clipping
    scaler.step(optimizer)
    scaler.update()
    return loss, norm


def train(args):
    """Train for args.steps steps; print and log each one."""
    device = args.device
    rank, world_size = init_ranks(device)
    n_batches = batches_per_step(args, world_size)
    torch.manual_seed(args.seed)
    # TF32, where the device has it: matrix products round their inputs to 10 bits of mantissa
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    # matrix products in this type; the weights, their gradients and the loss stay float32
    autocast = torch.autocast(device, amp_dtype, enabled=amp_dtype != torch.float32)
    # For float16, whose range is small, the scaler multiplies the loss so that small gradients do
    # not underflow, and later divides the gradients by its factor. Otherwise it does nothing.
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype == torch.float16)

    loader = DataLoaderLite(args.data, args.B, args.T, device)
    options = {"recompute_blocks": args.recompute_blocks, "loss_chunk": args.loss_chunk}
    model = new_model(args, loader, **options).to(device)
    optimizer = model.configure_optimizers(args.max_lr, args.muon_lr, weight_decay=0.1)
    step_model = model  # the compiled version will share its weights; we save `model`
    if dist.is_initialized():
        # backward() will also average the gradients over the ranks, so that all ranks keep the same
        # weights. The gradients stay views of the buckets they travel in, and are not copied out.
        # The model's buffers never change here, so DDP need not send them.
        step_model = DDP(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    if args.compile_mode != "none":
        check_compiler(device)
        # fewer kernels: many intermediate results skip memory, and no Python runs in between
        step_model = torch.compile(step_model, mode=args.compile_mode)
    notes = {"compile": args.compile_mode, "ranks": world_size}
    notes["total_batch"] = f"{args.total_batch} tokens"
    notes["recomputed_blocks"] = f"{model.recompute_blocks} of {model.config.n_layer}"
    if args.val_every:
        # on held-out text, because on its training text a model may just memorize
        val_loader = DataLoaderLite(args.data, 1, args.T, device, "val")
        n_val = min(args.val_sequences or val_loader.n_batches, val_loader.n_batches)
        notes["validation"] = f"every {args.val_every} steps on {n_val} sequences"
    checkpoints = Checkpoints(args, loader, model, optimizer, scaler)
    if args.checkpoint_every and rank == 0:
        checkpoints.lock()
    step = checkpoints.load()
    if rank == 0:
        log = Log(args, model, loader, args.total_batch, PRECISION[amp_dtype],
                  append=step > 0, **notes)
        if step > 0:  # log readers discard what the earlier run logged after this step
            log.line(f"# resumed after step {step} of {args.steps}")

    steps_left = range(step + 1, args.steps + 1)
    signals = catch_signals()
    for step in steps_left:
        t0 = time.perf_counter()
        lr = set_learning_rates(optimizer, step, args)
        # the batches of this step; the ranks take them in turn
        first = (step - 1) * n_batches
        numbers = range(first + rank, first + n_batches, world_size)
        loss, norm = optimizer_step(
            step_model, optimizer, scaler, loader, numbers, world_size, autocast)
        # kernels launch asynchronously: wait for them, then read the clock
        torch.get_device_module(device).synchronize()
        dt = time.perf_counter() - t0
        loss = loss / world_size
        if dist.is_initialized():
            dist.all_reduce(loss)  # after the clock: only the log needs the mean over the ranks
        # all must end after the same step, or some would wait for the others forever
        stop = on_any_rank(len(signals) > 0, device)
        if rank == 0:
            seconds = (args.steps - step) * np.median([*log.seconds[-99:], dt])
            left = timedelta(seconds=round(seconds))
            log.step(step, loss.item(), dt, norm=f"{norm.item():.4f}", lr=f"{lr:.4e}", left=left)
        last = step == args.steps
        if args.val_every and (step % args.val_every == 0 or last):
            t0 = time.perf_counter()
            # the uncompiled model has the same weights and needs no second compilation
            loss = evaluate(model, val_loader, n_val, autocast, rank, world_size)
            seconds = time.perf_counter() - t0
            if rank == 0:
                log.line(f"val : step {step} | loss: {loss:.6f} | time: {seconds:.2f} s")
        last = last or stop  # save now, or the steps since the last checkpoint would be lost
        if args.checkpoint_every and (step % args.checkpoint_every == 0 or last) and rank == 0:
            checkpoints.save(step, log)
        if stop and rank == 0:
            log.line(f"# ended by a signal after step {step}")
        if last:
            break

    if rank == 0:
        if log.seconds:  # else no step was left
            log.finish(step)
        save_model(args.save, model, loader, step)
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.5)  # so that gloo's threads end: one that outlives Python aborts the process


# ---- the same in every rung: files, log, command line; skip this on a first reading --------------
def load_tokens(folder, split, n_needed):
    """The memory-mapped tokens of "train" or "val", (n_tokens,), and the content of meta.json."""
    if folder == Path("data/tokens") and not folder.exists() and Path("data/prepare.py").exists():
        subprocess.run([sys.executable, "data/prepare.py"])  # the default text
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        n_tokens, dtype = meta[f"{split}_tokens"], meta.get("dtype", "<u2")
        tokens = np.memmap(folder / f"{split}.bin", dtype, mode="r", shape=n_tokens)
        path = folder / "tokenizer.json"  # GPT-2's tokenizer needs none
        meta["tokenizer_json"] = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, LookupError, ValueError) as error:
        sys.exit(f"error: --data {folder}: no complete token files ({error}); beside baseline.py,"
                 f" run python data/prepare.py --text YOUR.txt --out {folder}")
    if len(tokens) < n_needed:
        sys.exit(f"error: -T, -B: a batch needs {n_needed} {split} tokens; there are"
                 f" {len(tokens)}, so lower one of them")
    return tokens, meta


def new_model(args, loader, **options):
    """The GPT of --model or --pretrained; exits with an error if that file does not fit."""
    if args.pretrained is None:
        return GPT(model_config(args, loader.meta["vocab_size"]), **options)
    try:
        saved = torch.load(args.pretrained, map_location="cpu", weights_only=True)
        tokenizer = saved["tokenizer_json"] or saved["tokenizer"]  # GPT-2's is stored by name
    except (pickle.UnpicklingError, EOFError, LookupError, OSError, RuntimeError, ValueError):
        sys.exit(f"error: --pretrained {args.pretrained}: not a file of --save or convert.py")
    if tokenizer != (loader.meta["tokenizer_json"] or loader.meta["tokenizer"]):
        sys.exit(f"error: --pretrained: its tokenizer is not that of --data {args.data};"
                 f" prepare your text with data/prepare.py --tokenizer {args.pretrained}")
    if saved["config"]["block_size"] < args.T:
        sys.exit(f"error: -T: the model takes at most {saved['config']['block_size']} tokens")
    try:
        model = GPT(GPTConfig(**saved["config"]), **options)
        model.load_state_dict(saved["model"])
    except (TypeError, RuntimeError):  # a field, a shape or names that this model does not have
        sys.exit(f"error: --pretrained: not a model of this script; use {saved['script']}")
    return model


def model_file(model, loader, step):
    """The content of a model's file."""
    return {
        "script": SCRIPT.name, "config": asdict(model.config), "model": model.state_dict(),
        "step": step, "T": loader.T, "end_of_text": loader.meta.get("end_of_text"),
        "tokenizer": loader.meta["tokenizer"], "tokenizer_json": loader.meta["tokenizer_json"],
    }


def save_model(path, model, loader, step):
    """Write the model to `path`, if given; under a temporary name until it is complete."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted
        partial = path.with_name(path.name + ".partial")
        try:
            torch.save(model_file(model, loader, step), partial)
        except RuntimeError as error:  # torch raises it when the disk is full
            partial.unlink(missing_ok=True)
            sys.exit(f"error: --save {path}: not written; is the disk full? ({error})")
        set_aside(path)
        partial.replace(path)


def set_aside(path):
    """Add the date to the name of an earlier file with this name."""
    if path.exists():
        path.replace(f"{path}.{datetime.now():%Y-%m-%d_%H.%M.%S.%f}")


class Log:
    """The run's log, which is printed and written to <log-dir>/<script>.log."""

    def __init__(self, args, model, loader, tokens_per_step, precision, append=False, **notes):
        self.device, self.tokens_per_step, self.seconds = args.device, tokens_per_step, []
        args.log_dir.resolve().mkdir(parents=True, exist_ok=True)  # also creates a symlink's target
        path = args.log_dir / f"{SCRIPT.stem}.log"
        if not append:
            set_aside(path)
        self.file = open(path, "a", 1, "utf-8", "backslashreplace")  # 1: flush after every line
        chip = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        n_parameters = sum(p.numel() for p in model.parameters())
        self.line(f"# script: {SCRIPT.name}")
        self.line(f"# model: {args.pretrained or args.model} | parameters: {n_parameters:,}")
        self.line(f"# device: {chip} | torch: {torch.__version__} | precision: {precision}")
        if DEVICES == ["cpu"] and shutil.which("nvidia-smi"):
            self.line("# WARNING: torch cannot use the GPU here; python -m ladder check says why")
        for key, note in notes.items():
            self.line(f"# {key.replace('_', ' ')}: {note}")
        self.line(f"# batch: B={args.B} T={args.T} | steps: {args.steps} | seed: {args.seed}")
        self.line(f"# data: {loader.meta['source']} ({loader.meta['tokenizer']} tokens)"
                  f" | loaded {len(loader.tokens)} tokens | 1 epoch = {loader.n_batches} batches")

    def line(self, text):
        try:
            self.file.write(text + "\n")
        except OSError as error:  # a full disk must not end the run
            text += f" | not logged: {error}"
        with contextlib.suppress(OSError, UnicodeError):  # stdout may be closed, or not Unicode
            print(text, flush=True)

    def step(self, step, loss, dt, **more):
        """Log a step's loss in nats, its dt in seconds, and `more`; exit if the loss is NaN."""
        self.seconds.append(dt)
        text = f"step : {step} | loss: {loss:.6f} | dt: {dt * 1000:.2f} ms"
        text += f" | tokens/sec: {self.tokens_per_step / dt:.2f}"
        self.line(text + "".join(f" | {key}: {value}" for key, value in more.items()))
        if not math.isfinite(loss):
            sys.exit(f"error: the loss is {loss} at step {step}; see NaN in docs/running.md")

    def finish(self, step):
        """Log the median of the second half of the steps; the device warms up in the first."""
        counted = self.seconds[len(self.seconds) // 2 :]
        dt = np.median(counted)
        text = f"median : dt: {dt * 1000:.2f} ms | tokens/sec: {self.tokens_per_step / dt:.2f}"
        if self.device == "cuda":
            text += f" | peak memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB"
        self.line(f"{text} | steps {step - len(counted) + 1}-{step}")


def parse_args(argv=None):
    """Parse the command line; a wrong value ends in argparse's error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_flags(parser)
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        least = 1 if name in ("B", "T", "steps") else 0
        if isinstance(value, (int, float)) and not least <= value < math.inf:
            parser.error(f"argument --{name.replace('_', '-')}: give at least {least}, not {value}")
    if args.device not in DEVICES:
        parser.error(f"argument --device: give one of {DEVICES}; python -m ladder check says why")
    if args.save and (args.save.suffix == ".safetensors" or args.save.is_dir()
                      or not os.access(f"{args.save.parent}/", os.W_OK)):
        parser.error(f"argument --save: {args.save}: give a model.pt in a writable folder")
    return args


if __name__ == "__main__":
    try:
        train(parse_args())
    except KeyboardInterrupt:
        sys.exit("stopped: the log keeps the finished steps")
    except OSError as error:  # no permission, a file in the way, a full disk
        sys.exit(f"error: {error}")
    except RuntimeError as error:  # raised by torch or cuBLAS, directly or inside another error
        if not any(words in str(error) for words in ("out of memory", "ALLOC_FAILED", "allocate")):
            raise
        sys.exit(f"error: out of memory; try half the -B, or a lower -T ({error})")
