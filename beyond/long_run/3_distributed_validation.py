"""Distributed validation: is the model learning the language, or memorizing the text?
Starts from 2_prefetch.py.

After a few epochs over a small text, the training loss keeps falling while the model gets worse on
text that it has not seen. This is overfitting. So data/prepare.py holds out a tenth of the text (at
most 10 million tokens). Every --val-every steps, the model is evaluated on some of it, without
gradients and always on the same sequences, whatever -B is.

With n ranks, each rank evaluates only every n-th of these sequences: rank 0 begins with the first,
rank 1 with the second, and so on. Then an all-reduce adds up the losses of all ranks. This sum,
divided by the number of sequences, is the mean loss that one process would compute (up to
rounding).

    python beyond/long_run/3_distributed_validation.py --val-every 250 --val-sequences 0  # all

Gain: the loss on unseen text, which is the one that matters.
Cost: a forward pass, a third of the arithmetic of training on the same number of tokens. `dt` does
not include it. Validation takes one sequence at a time and stores no activations, so it needs no
more memory than a step. It uses the uncompiled model, which shares its weights with the compiled
one and needs no second compilation.
The line `val : step N` shows the loss after the update of step N. The step line shows the loss
before it.

Source: Karpathy's build-nanogpt, whose training loop has a validation loss.
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
import torch.distributed as dist
import torch.nn as nn
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
    flag("--val-every", type=int, default=25, help="steps between validations; 0: never")
    flag("--val-sequences", type=int, default=32, help="sequences to validate on; 0: all")
    flag("--total-batch", type=int, help="tokens per step; None: 524288, or 4 batches on a CPU")
    # twice rung 8's constant rate: warm-up and decay make that safe
    flag("--max-lr", type=float, default=6e-4, help="peak learning rate, after the warm-up")
    flag("--warmup-steps", type=int, default=10, help="steps of linear warm-up")
    flag("--seed", type=int, default=1337, help="random seed of the initial weights")
    flag("--device", default=DEVICES[0], help="cuda, mps or cpu; CUDA_VISIBLE_DEVICES picks a GPU")
    flag("--data", type=Path, default="data/tokens", help="folder written by data/prepare.py")
    flag("--log-dir", type=Path, default="logs", help="folder for the log")
    # no CUDA graphs: they do not work under DDP, nor where gradients accumulate
    flag("--compile-mode", choices=["default", "max-autotune-no-cudagraphs", "none"],
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
    return GPTConfig(
        block_size=max(1024, args.T),  # GPT-2's, or longer
        vocab_size=vocab_size, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
    )


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention: (B, T, C) -> (B, T, C).

    Each token attends to itself and to the tokens before it.
    """

    def __init__(self, config):
        super().__init__()
        # query, key and value projections of all heads in one matrix ("c_": OpenAI's names)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_proj.ends_residual_branch = True
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        # nh heads of size hs each
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        # (B, nh, T, hs); the (T, T) scores exist only in tiles
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # concatenate the heads
        return self.c_proj(y)


class MLP(nn.Module):
    """The position-wise feed-forward network: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # GPT-2 was trained with the tanh approximation
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.c_proj.ends_residual_branch = True

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))  # (B, T, C) -> (B, T, 4C) -> (B, T, C)


class Block(nn.Module):
    """A pre-norm transformer layer with two residual branches: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    """GPT-2, with the parameter names of the Hugging Face checkpoints."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        n_rows = math.ceil(config.vocab_size / 128) * 128  # 50257 -> 50304: full tiles in products
        # the embeddings of tokens and of positions, the blocks ("hidden"), the last norm
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(n_rows, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, n_rows, bias=False)
        # one parameter (n_rows, n_embd) under two names
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if hasattr(module, "ends_residual_branch"):
                # so that the sum of 2 * n_layer branches does not grow with the depth
                std *= (2 * self.config.n_layer) ** -0.5
            nn.init.normal_(module.weight, mean=0.0, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size).

        With targets (B, T), it returns only the mean cross-entropy, in nats per token.
        """
        B, T = idx.shape
        pos = torch.arange(T, device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C) + (T, C)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)  # (B, T, n_rows)
        if targets is None:
            return logits[..., : self.config.vocab_size]  # (B, T, vocab_size)
        logits = logits.float()  # else F.cross_entropy rounds to bfloat16 under CUDA's autocast
        # masked, not sliced off: rows stay aligned, and padding gets a probability of exp(-inf) = 0
        padding = torch.zeros(logits.size(-1), device=idx.device)  # (n_rows,)
        padding[self.config.vocab_size :] = -torch.inf
        logits = logits + padding  # (B, T, n_rows) + (n_rows,)
        return F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))

    def configure_optimizers(self, lr, weight_decay):
        """Fused AdamW that decays only matrices, which are embeddings and linear layers."""
        # decay pulls weights towards zero, so that no single one grows large
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        # biases and LayerNorms: a gain belongs near one, and decay would pull it to zero
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        # fused: one pass over each tensor instead of about ten; the betas are rung 8's
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay,
                                 fused=True)


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


def get_lr(step, max_steps, max_lr, warmup_steps):
    """The learning rate for `step`, which counts from 1 to max_steps."""
    if step <= warmup_steps:  # small steps while AdamW's averages hold few gradients
        return max_lr * step / warmup_steps
    # then ever smaller steps, so that the loss can settle
    progress = (step - warmup_steps) / (max_steps - warmup_steps)  # from 0 to 1
    min_lr = max_lr / 10
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (max_lr - min_lr)


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
    model = new_model(args, loader).to(device)
    # torch's default weight decay is 0.01
    optimizer = model.configure_optimizers(lr=args.max_lr, weight_decay=0.1)
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
    if args.val_every:
        # on held-out text, because on its training text a model may just memorize
        val_loader = DataLoaderLite(args.data, 1, args.T, device, "val")
        n_val = min(args.val_sequences or val_loader.n_batches, val_loader.n_batches)
        notes["validation"] = f"every {args.val_every} steps on {n_val} sequences"
    if rank == 0:
        log = Log(args, model, loader, args.total_batch, PRECISION[amp_dtype], **notes)

    for step in range(1, args.steps + 1):
        t0 = time.perf_counter()
        lr = get_lr(step, args.steps, args.max_lr, args.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
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
        if rank == 0:
            log.step(step, loss.item(), dt, norm=f"{norm.item():.4f}", lr=f"{lr:.4e}")
        last = step == args.steps
        if args.val_every and (step % args.val_every == 0 or last):
            t0 = time.perf_counter()
            # the uncompiled model has the same weights and needs no second compilation
            loss = evaluate(model, val_loader, n_val, autocast, rank, world_size)
            seconds = time.perf_counter() - t0
            if rank == 0:
                log.line(f"val : step {step} | loss: {loss:.6f} | time: {seconds:.2f} s")

    if rank == 0:
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
