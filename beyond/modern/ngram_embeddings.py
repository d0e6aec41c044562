"""Hashed n-gram embeddings: the last two and three tokens have embeddings of their own.
Starts from frequency_prior.py.

The next token depends most on the last few. Attention must learn to combine them, but a table can
learn a vector for each pair or triple directly. There are far more pairs and triples than rows, so
a hash chooses the row, and n-grams that collide share a vector. The tables start at zero, so at
first the model computes the same as `frequency_prior`.

Gain: perhaps, on bytes. Older races (logs/reference) had four seeds, too few to claim a gain. On
one text, the final loss is 0.14 nats lower than that of `zero_init`. On another, it is 0.05 lower
than that of `frequency_prior`. In a model ten times as large, it is 0.02 lower than that of
`zero_init` (two seeds). With GPT-2's tokens there is no gain: the larger the vocabulary, the fewer
n-grams recur, and the more of them share a row.
Cost: two tables of n_rows_hashed * n_embd parameters. For GPT-2 (124M) these are 12.6M parameters,
or 0.2 GB with gradients and AdamW's moments. In the race, the model has 3.0M parameters instead of
0.9M, and a step takes 9 % more time. The transformers library has no such model, so sample.py
generates without a key-value cache.

Source: hashed n-grams of 3 to 8 bytes in Pagnoni et al. 2024, "Byte Latent Transformer"; hashed
pairs of tokens, and the factor 36313, in the NanoGPT speedrun.
"""
import argparse
import contextlib
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

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
    flag("--val-every", type=int, default=25, help="steps between validations; 0: never")
    flag("--val-sequences", type=int, default=32, help="sequences to validate on; 0: all")
    # twice rung 8's constant rate: warm-up and decay make that safe
    flag("--max-lr", type=float, default=6e-4, help="peak learning rate, after the warm-up")
    flag("--muon-lr", type=float, default=2e-3, help="peak learning rate for Muon")
    flag("--warmup-steps", type=int, default=10, help="steps of linear warm-up")
    flag("--decay-share", type=float, default=0.4, help="decay over this last share of the steps")
    flag("--seed", type=int, default=1337, help="random seed of the initial weights")
    flag("--device", default=DEVICES[0], help="cuda, mps or cpu; CUDA_VISIBLE_DEVICES picks a GPU")
    flag("--data", type=Path, default="data/tokens", help="folder written by data/prepare.py")
    flag("--log-dir", type=Path, default="logs", help="folder for the log")
    flag("--compile-mode", choices=["default", "reduce-overhead", "max-autotune", "none"],
         default="none" if DEVICES[0] == "mps" else "default", help="torch.compile's mode, or none")
    flag("--save", type=Path, help="write the trained model to this file")


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2 (124M)."""
    block_size: int = 1024  # longest sequence
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_hidden: int = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
    n_rows_hashed: int = 8191  # rows per table; prime, since modulo 8192 only low bits would count

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


class GPT(nn.Module):
    """A Qwen3 that starts from the frequencies of tokens, with GPT-2's names for what both have."""

    def __init__(self, config):
        super().__init__()
        self.config = config
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
        # a bias of the logits that is not trained: at first the model predicts the frequencies
        self.register_buffer("log_frequency", torch.zeros(n_rows))  # train sets it
        angles = rotary_angles(config.block_size, config.n_embd // config.n_head)
        cos, sin = angles.cos(), angles.sin()  # (block_size, hs/2) each
        # for both numbers of a pair, with the signs that `rotate` needs
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)
        self.apply(self._init_weights)
        # the logit for repeating a token is then about 1; a larger one would hide the prior
        nn.init.normal_(self.lm_head.weight, std=1 / config.n_embd)
        self.pairs = nn.Embedding(config.n_rows_hashed, config.n_embd)
        self.triples = nn.Embedding(config.n_rows_hashed, config.n_embd)
        nn.init.zeros_(self.pairs.weight)  # so that the model starts as `frequency_prior`'s
        nn.init.zeros_(self.triples.weight)

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
        before = F.pad(idx, (1, 0))[:, :T]  # (B, T): the token before each; 0 where there is none
        before_that = F.pad(idx, (2, 0))[:, :T]
        # a hash: the large factor spreads the n-grams over the rows; those that collide share one
        pair = 36313 * idx + before  # (B, T)
        triple = 36313 * pair + before_that
        # a vector for each pair and triple: attention would have to learn to compose it
        x = x + self.pairs(pair % self.config.n_rows_hashed)  # (B, T, C)
        x = x + self.triples(triple % self.config.n_rows_hashed)
        for block in self.transformer.h:
            x = block(x, cos, sin)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x) + self.log_frequency  # (B, T, n_rows)
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
        embeddings = [self.transformer.wte.weight, self.pairs.weight, self.triples.weight]
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
    """Batches of consecutive tokens from a token file, which is memory-mapped and may be large."""

    def __init__(self, folder, B, T, split="train"):
        self.B, self.T = B, T
        self.tokens, self.meta = load_tokens(folder, split, B * T + 1)  # (n_tokens,)
        self.n_batches = (len(self.tokens) - 1) // (B * T)

    def batch(self, i):
        """The i-th B*T tokens of the file and the token that follows each: 2 x (B, T).

        Wraps around at the end of the file. No position is stored: i alone determines the batch.
        """
        start = (i % self.n_batches) * self.B * self.T
        chunk = self.tokens[start : start + self.B * self.T + 1]  # (B*T + 1,)
        if chunk.max() >= self.meta["vocab_size"]:
            sys.exit(f"error: --data: token {chunk.max()} is beyond vocab_size; prepare it again")
        chunk = torch.from_numpy(chunk.astype(np.int64))  # astype copies it into memory
        return chunk[:-1].view(self.B, self.T), chunk[1:].view(self.B, self.T)


def count_log_frequencies(tokens, n_rows):
    """The logarithm of each token's share of these tokens: (n_rows,)."""
    counts = np.bincount(tokens, minlength=n_rows) + 0.1  # so that no token is impossible
    return torch.from_numpy(np.log(counts / counts.sum()))


@torch.no_grad()
def evaluate(model, loader, n_sequences, autocast, device):
    """The mean loss on the first sequences of a loader with B=1, in nats per token."""
    total = torch.zeros((), device=device)
    model.eval()
    with autocast:
        for i in range(n_sequences):
            x, y = loader.batch(i)  # (1, T) each: no more memory than a step of training
            total += model(x.to(device), y.to(device))
    model.train()
    loss = total.item() / n_sequences
    if not math.isfinite(loss):
        sys.exit(f"error: the validation loss is {loss}; see NaN in docs/running.md")
    return loss


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


def train(args):
    """Train for args.steps steps; print and log each one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # torchrun started several of them
        sys.exit("error: this script trains in one process; torchrun starts long_run.py")
    device = args.device
    torch.manual_seed(args.seed)
    # TF32, where the device has it: matrix products round their inputs to 10 bits of mantissa
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    # matrix products in this type; the weights, their gradients and the loss stay float32
    autocast = torch.autocast(device, amp_dtype, enabled=amp_dtype != torch.float32)
    # For float16, whose range is small, the scaler multiplies the loss so that small gradients do
    # not underflow, and later divides the gradients by its factor. Otherwise it does nothing.
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype == torch.float16)

    loader = DataLoaderLite(args.data, args.B, args.T)
    model = new_model(args, loader).to(device)
    if args.pretrained is None:  # a pretrained model has its own; 10M tokens are enough to count
        prior = count_log_frequencies(loader.tokens[:10_000_000], len(model.log_frequency))
        model.log_frequency.copy_(prior)
    optimizer = model.configure_optimizers(args.max_lr, args.muon_lr, weight_decay=0.1)
    step_model = model  # the compiled version will share its weights; we save `model`
    if args.compile_mode != "none":
        check_compiler(device)
        # fewer kernels: many intermediate results skip memory, and no Python runs in between
        step_model = torch.compile(model, mode=args.compile_mode)
    notes = {"compile": args.compile_mode}
    if args.val_every:
        # on held-out text, because on its training text a model may just memorize
        val_loader = DataLoaderLite(args.data, 1, args.T, "val")
        n_val = min(args.val_sequences or val_loader.n_batches, val_loader.n_batches)
        notes["validation"] = f"every {args.val_every} steps on {n_val} sequences"
    log = Log(args, model, loader, args.B * args.T, PRECISION[amp_dtype], **notes)

    for step in range(1, args.steps + 1):
        t0 = time.perf_counter()
        x, y = loader.batch(step - 1)  # (B, T) each
        x, y = x.to(device), y.to(device)
        lr = set_learning_rates(optimizer, step, args)
        optimizer.zero_grad()
        with autocast:
            loss = step_model(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # remove the scaler's factor, so that 1.0 limits the true norm
        # without clipping, one odd batch would dominate the running averages for many steps
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm before clipping
        scaler.step(optimizer)
        scaler.update()
        # kernels launch asynchronously: wait for them, then read the clock
        torch.get_device_module(device).synchronize()
        dt = time.perf_counter() - t0
        log.step(step, loss.item(), dt, norm=f"{norm.item():.4f}", lr=f"{lr:.4e}")
        if args.val_every and (step % args.val_every == 0 or step == args.steps):
            t0 = time.perf_counter()
            # the uncompiled model has the same weights and needs no second compilation
            val_loss = evaluate(model, val_loader, n_val, autocast, device)
            seconds = time.perf_counter() - t0
            log.line(f"val : step {step} | loss: {val_loss:.6f} | time: {seconds:.2f} s")

    log.finish(step)
    save_model(args.save, model, loader, step)


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
