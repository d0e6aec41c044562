"""Rung 7, vocabulary padding: 50257 tokens in a matrix of 50304 rows, a multiple of 128.

GPU kernels usually work in tiles whose sides are powers of two, and tensor cores want aligned rows. 50257 is odd: the
largest matrix product of the model, (B*T, 768) @ (768, 50257), ends in ragged tiles and misaligned rows. 47 more rows
make it 393 * 128.

The extra rows belong to no token: they are never an input and never a target, and `forward` cuts their logits off, so
that they get no probability and no gradient.

Gain: faster kernels for the output projection and its gradients, on GPUs.
Cost: 36,096 parameters that do nothing. Changing the shape changes the random initialization, so this rung starts from
different weights than rung 6 with the same seed.

Source: Andrej Karpathy's build-nanogpt; NVIDIA's "Matrix Multiplication Background User's Guide" (tile quantization).
"""
import argparse
import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

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
    parser.add_argument("--seed", type=int, default=1337, help="random seed of the initial weights")
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0], help="what to train on")
    parser.add_argument("--data", type=Path, default="data/tokens", help="folder of token files, by data/prepare.py")
    parser.add_argument("--log-dir", type=Path, default="logs", help="folder of the log")
    parser.add_argument("--compile-mode", choices=["default", "reduce-overhead", "max-autotune", "none"],
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


def config_of(settings, vocab_size):
    """The shape that --model names; exits with a one-line error if it names none."""
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", MODELS.get(settings.model, settings.model))
    n_layer, n_head, n_embd = map(int, shape.groups()) if shape else (0, 1, 1)  # which the next line refuses
    if n_embd % (2 * n_head):
        sys.exit(f"error: --model {settings.model}: give {', '.join(MODELS)}, or layers x heads x width like 4x4x128,"
                 " where width / heads is an even number")
    return GPTConfig(max(GPTConfig.block_size, settings.T), vocab_size, n_layer, n_head, n_embd)


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention; each token attends to itself and the tokens before it: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_proj.ends_residual_branch = True
        self.n_head = config.n_head

    def forward(self, x):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs): nh heads of size hs
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs); (T, T) exists only in tiles
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
    """One pre-norm transformer layer, two residual branches: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2, with the parameter names of the Hugging Face checkpoints."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        n_rows = math.ceil(config.vocab_size / 128) * 128  # 50257 -> 50304
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(n_rows, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, n_rows, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one parameter (n_rows, n_embd) under two names
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = 0.02
            if hasattr(module, "ends_residual_branch"):
                std *= (2 * self.config.n_layer) ** -0.5  # two branches per layer
            nn.init.normal_(module.weight, mean=0.0, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size); with targets (B, T), only the mean cross-entropy, in nats."""
        B, T = idx.shape
        pos = torch.arange(T, device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C) + (T, C)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)[..., : self.config.vocab_size]  # (B, T, n_rows) -> (B, T, vocab_size)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))  # (B*T, vocab_size) against (B*T,)


class DataLoaderLite:
    """Batches of consecutive tokens from a token file; memory-mapped, so it may be larger than memory."""

    def __init__(self, folder, B, T):
        self.B, self.T = B, T
        self.tokens, self.meta = open_tokens(folder, "train", B * T + 1)  # (n_tokens,)
        self.n_batches = (len(self.tokens) - 1) // (B * T)

    def batch(self, i):
        """The i-th B*T tokens of the file, wrapping around, and the token that follows each: inputs, targets (B, T)."""
        start = (i % self.n_batches) * self.B * self.T
        chunk = torch.from_numpy(self.tokens[start : start + self.B * self.T + 1].astype(np.int64))  # (B*T + 1,)
        return chunk[:-1].view(self.B, self.T), chunk[1:].view(self.B, self.T)


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


def train(settings):
    """Train for `settings.steps` steps; print and log each one."""
    device = settings.device
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype is torch.float16)  # else it passes everything through
    precision = f"{str(amp_dtype)[6:]} autocast" if amp_dtype != torch.float32 else "float32 (no bfloat16 on this CPU)"

    loader = DataLoaderLite(settings.data, settings.B, settings.T)
    model = new_model(settings, loader).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step_model, compiled = compile_model(model, settings.compile_mode, device)
    log = Log(settings, model, loader, settings.B * settings.T, precision, compile=compiled)

    for step in range(1, settings.steps + 1):
        t0 = time.perf_counter()
        x, y = loader.batch(step - 1)  # (B, T) each
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, amp_dtype, enabled=amp_dtype != torch.float32):
            loss = step_model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.get_device_module(device).synchronize()  # kernels launch asynchronously: wait, then read the clock
        dt = time.perf_counter() - t0
        log.step(step, loss.item(), dt)

    log.finish(step)
    save_model(settings.save, model, loader, step)


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
