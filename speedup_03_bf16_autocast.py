"""Rung 3, bfloat16 autocast: matrix products and most activations in 16 bits. Starts from rung 2.

bfloat16 is the upper half of a float32: the same 8 exponent bits, but 7 bits of mantissa. Under
torch.autocast each operation gets a suitable type: matrix products run in bfloat16, and on GPUs
softmax and LayerNorm run in float32. The loss also needs float32, because bfloat16 rounds a
log-probability near -11 (a uniform guess) to a multiple of 1/16. Left alone, CUDA's autocast would
still round the log-softmax inside F.cross_entropy to bfloat16, so `GPT.forward` casts the logits to
float32 first. Parameters, gradients, optimizer states and the residual stream (the vectors that all
blocks add to) stay float32. The backward pass reuses the forward pass's types, so it stays outside
the `with` block.

Gain: matrix units multiply 16-bit numbers faster, and the products' outputs take half the bytes. On
an H100 a step takes 166 ms instead of 187 (with an older version, whose loss was in bfloat16). Peak
memory only falls from 30.9 to 30.1 GB, since softmax, LayerNorm and the residual stream stay
float32. On two Xeon cores with AMX a step takes 1.6 s instead of 3.7.
Cost: activations keep two to three decimal digits, and the loss agrees with rung 2's to about two
decimals. GPUs without bfloat16 (T4, V100) use float16, whose small range requires a GradScaler.
CPUs without bfloat16 instructions keep float32, which is faster than emulation.

Sources: Micikevicius et al. 2018, "Mixed Precision Training"; PyTorch's "Automatic Mixed Precision"
documentation.
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
    flag("--seed", type=int, default=1337, help="random seed of the initial weights")
    flag("--device", default=DEVICES[0], help="cuda, mps or cpu; CUDA_VISIBLE_DEVICES picks a GPU")
    flag("--data", type=Path, default="data/tokens", help="folder written by data/prepare.py")
    flag("--log-dir", type=Path, default="logs", help="folder for the log")
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
        self.n_head = config.n_head
        # (block_size, block_size), True where a token may attend; not a part of the model's file
        mask = torch.ones(config.block_size, config.block_size, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        # nh heads of size hs each
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # (B, nh, T, T)
        att = att.masked_fill(~self.mask[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v  # (B, nh, T, T) @ (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # concatenate the heads
        return self.c_proj(y)


class MLP(nn.Module):
    """The position-wise feed-forward network: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU(approximate="tanh")  # GPT-2 was trained with the tanh approximation
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

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
        # the embeddings of tokens and of positions, the blocks ("hidden"), the last norm
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        # one parameter (vocab_size, n_embd) under two names
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
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
        logits = self.lm_head(x)  # (B, T, vocab_size)
        if targets is None:
            return logits
        logits = logits.float()  # else F.cross_entropy rounds to bfloat16 under CUDA's autocast
        return F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))


class DataLoaderLite:
    """Batches of consecutive tokens from a token file, which is memory-mapped and may be large."""

    def __init__(self, folder, B, T):
        self.B, self.T = B, T
        self.tokens, self.meta = load_tokens(folder, "train", B * T + 1)  # (n_tokens,)
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


def train(args):
    """Train for args.steps steps; print and log each one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # torchrun started several of them
        sys.exit("error: this script trains in one process; torchrun starts ddp_run.py")
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    log = Log(args, model, loader, args.B * args.T, PRECISION[amp_dtype])

    for step in range(1, args.steps + 1):
        t0 = time.perf_counter()
        x, y = loader.batch(step - 1)  # (B, T) each
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with autocast:
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        # kernels launch asynchronously: wait for them, then read the clock
        torch.get_device_module(device).synchronize()
        dt = time.perf_counter() - t0
        log.step(step, loss.item(), dt)

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
