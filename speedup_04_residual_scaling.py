"""Rung 4, residual scaling: the layers that write into the residual stream start smaller.

Every layer adds to the residual stream twice, once after attention and once after the MLP. Adding up n independent
contributions of equal size makes the sum grow like sqrt(n), and GPT-2 has n = 2 * n_layer = 24 of them. GPT-2
therefore starts the weights of both projections that end a residual branch (`c_proj`) smaller by 1 / sqrt(n).

Gain: what the layers together add to the stream no longer grows with n_layer (a test measures it). Speed and memory
are the same: this rung is about how the loss falls, not about how long a step takes.
Cost: none.

Source: Radford et al. 2019 (GPT-2), section 2.3: "We scale the weights of residual layers at initialization by a
factor of 1/sqrt(N) where N is the number of residual layers."
"""
import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2 (124M)."""

    block_size: int = 1024  # longest sequence
    vocab_size: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768


DEFAULT_DATA = Path("data/tokens")

MODELS = {  # what --model accepts
    "tiny": GPTConfig(n_layer=2, n_head=2, n_embd=64),  # for tests
    "small": GPTConfig(n_layer=6, n_head=6, n_embd=384),  # 30M parameters: what a CPU can train
    "gpt2": GPTConfig(n_layer=12, n_head=12, n_embd=768),  # 124M
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, n_embd=1024),  # 350M
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, n_embd=1280),  # 774M
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, n_embd=1600),  # 1558M
}


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and the tokens before it: (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)  # query, key and value of all heads at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.c_proj.ends_residual_branch = True
        self.n_head = config.n_head
        mask = torch.ones(config.block_size, config.block_size, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)  # (block_size, block_size), True where looking is allowed

    def forward(self, x):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # (B, nh, T, T)
        att = att.masked_fill(~self.mask[:T, :T], float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v  # (B, nh, T, T) @ (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # heads side by side again
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
        x = self.c_fc(x)  # (B, T, 4C)
        x = self.gelu(x)
        return self.c_proj(x)  # (B, T, C)


class Block(nn.Module):
    """One transformer layer, with LayerNorm before each part and a residual around it: (B, T, C) -> (B, T, C)."""

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
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            h=nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            ln_f=nn.LayerNorm(config.n_embd),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight  # one parameter (vocab_size, n_embd) under two names
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            std = 0.02
            if hasattr(module, "ends_residual_branch"):
                std *= (2 * self.config.n_layer) ** -0.5  # two branches per layer
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets=None):
        """Token ids (B, T) -> logits (B, T, vocab_size) and, with `targets` (B, T), the mean cross-entropy in nats."""
        B, T = idx.shape
        pos = torch.arange(T, device=idx.device)  # (T,)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C) + (T, C)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)  # (B, T, vocab_size)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))  # (B*T, vocab_size) against (B*T,)
        return logits, loss

    @classmethod
    def from_pretrained(cls, name_or_folder):
        """A model with the weights of a Hugging Face GPT-2: a name ("gpt2") or a local folder.

        Exits with one line when they cannot be loaded or are not a GPT-2's.
        """
        from transformers import GPT2LMHeadModel

        if Path(name_or_folder).is_file():
            sys.exit(f"error: --pretrained {name_or_folder}: a file: export.py makes a Hugging Face folder of it")
        try:
            hf_model, report = GPT2LMHeadModel.from_pretrained(name_or_folder, output_loading_info=True)
        except Exception as error:  # no network, no such name, no such file, a damaged one: each its own class
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            sys.exit(f"error: --pretrained {name_or_folder}: no GPT-2 by this name ({reason})")
        hf = hf_model.config
        same_mlp = hf.activation_function == "gelu_new" and hf.n_inner in (None, 4 * hf.n_embd)
        same_scale = hf.scale_attn_weights and not hf.scale_attn_by_inverse_layer_idx and hf.layer_norm_epsilon == 1e-5
        if report["missing_keys"] or not (same_mlp and same_scale):
            sys.exit(f"error: --pretrained {name_or_folder}: this is another model than GPT-2")
        if not hf.tie_word_embeddings:
            sys.exit(f"error: --pretrained {name_or_folder}: its output layer is not its embedding: use baseline.py")

        config = GPTConfig(
            block_size=hf.n_positions, vocab_size=hf.vocab_size, n_layer=hf.n_layer, n_head=hf.n_head, n_embd=hf.n_embd
        )
        model = cls(config)
        weights = hf_model.state_dict()
        # GPT-2's "Conv1D" layers store their matrix as (in, out), nn.Linear as (out, in).
        for name in weights:
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                weights[name] = weights[name].t()
        model.load_state_dict(weights)
        return model


class DataLoaderLite:
    """Consecutive batches from the token file that data/prepare.py made, over and over again.

    The file is memory-mapped, so that it may be larger than the memory. Exits with one line when the folder is
    missing or damaged, or when it holds fewer tokens than one batch.
    """

    def __init__(self, folder, B, T):
        self.B, self.T = B, T
        folder = Path(folder)
        try:
            self.meta = json.loads((folder / "meta.json").read_text())
            n_tokens = self.meta["train_tokens"]
            if (folder / "train.bin").stat().st_size != 2 * n_tokens:
                raise ValueError("train.bin does not have the size that meta.json says")
            self.tokens = np.memmap(folder / "train.bin", dtype="<u2", mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"error: no usable token files in {folder} ({error}): make them with"
                     f" python data/prepare.py [--text FILE] --out {folder}")
        if n_tokens < B * T + 1:
            sys.exit(f"error: {n_tokens} tokens in {folder}, but one batch of B={B} T={T} needs {B * T + 1}")
        self.batches_per_epoch = (n_tokens - 1) // (B * T)
        self.position = 0

    def next_batch(self):
        """The next B * T tokens as inputs (B, T), and the token that follows each of them as targets (B, T)."""
        B, T = self.B, self.T
        if self.position + B * T + 1 > len(self.tokens):
            self.position = 0
        chunk = self.tokens[self.position : self.position + B * T + 1].astype(np.int64)
        if chunk.max() >= self.meta["vocab_size"]:
            sys.exit(f"error: train.bin is damaged: token {chunk.max()} is not in the vocabulary")
        self.position += B * T
        chunk = torch.from_numpy(chunk)
        return chunk[:-1].view(B, T), chunk[1:].view(B, T)


def device_name(device):
    """The name of the chip, for the log."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    if device == "mps":
        return "Apple GPU"
    cpuinfo = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    names = [line.split(":")[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else 'CPU'} ({torch.get_num_threads()} threads)"


def peak_memory(device):
    """Peak memory in GB (1e9 bytes): of the allocator on a GPU, of the whole process on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    if device == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    if sys.platform == "win32":
        return float("nan")  # Windows does not tell without another package
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes, Linux in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def autocast_dtype(device):
    """bfloat16, or float16 on GPUs that have no bfloat16 arithmetic."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def parse_args(argv=None):
    """The command line's flags, checked; exits with one line when one cannot be."""
    parser = argparse.ArgumentParser(description="Train GPT-2 and log the loss and the speed of each step.")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default: %(default)s")
    parser.add_argument("--pretrained", metavar="NAME_OR_FOLDER", help="start from these Hugging Face weights")
    parser.add_argument("-B", "--batch-size", dest="B", type=int, help="sequences per step (default: 4; 2 on a CPU)")
    parser.add_argument("-T", "--seq-len", dest="T", type=int, help="tokens per sequence (default: 1024; 256 on a CPU)")
    parser.add_argument("--steps", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1337, help="default: %(default)s")
    parser.add_argument("--device", choices=["cuda", "mps", "cpu"], help="default: the GPU if there is one, else cpu")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="default: %(default)s, made if missing")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the trained model here at the end")
    args = parser.parse_args(argv)

    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    args.device = args.device or next(device for device in available if available[device])
    args.B = 2 if args.B is None and args.device == "cpu" else 4 if args.B is None else args.B
    args.T = 256 if args.T is None and args.device == "cpu" else 1024 if args.T is None else args.T
    if not 0 <= args.seed < 2**63:
        sys.exit(f"error: --seed {args.seed}: must be at least 0 and below 2^63")
    if not available[args.device]:
        sys.exit(f"error: --device {args.device}: torch {torch.__version__} finds no such device here")
    for flag, value in {"-B": args.B, "-T": args.T, "--steps": args.steps}.items():
        if value < 1:
            sys.exit(f"error: {flag} {value}: must be at least 1")
    if args.save and (args.save.is_dir() or not args.save.absolute().parent.is_dir()):
        sys.exit(f"error: --save {args.save}: give the name of a file in a folder that exists")
    return args


def main(argv=None):
    """Train for --steps steps; print and log each one."""
    args = parse_args(argv)
    script, device = Path(__file__), args.device
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype is torch.float16)
    precision = f"{str(amp_dtype).removeprefix('torch.')} autocast"
    onednn = torch.backends.mkldnn.is_available()  # runs the CPU's matrix products
    if device == "cpu" and not (onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        precision += " (this CPU has no fast bfloat16: no gain)"

    if args.data == DEFAULT_DATA and not args.data.exists():
        prepare = script.parent / "data" / "prepare.py"
        if subprocess.run([sys.executable, prepare, "--out", args.data]).returncode:
            sys.exit("error: the data could not be prepared")
    loader = DataLoaderLite(args.data, args.B, args.T)
    model = GPT.from_pretrained(args.pretrained) if args.pretrained else GPT(MODELS[args.model])
    if model.config.vocab_size < loader.meta["vocab_size"]:
        sys.exit(f"error: --pretrained {args.pretrained}: its {model.config.vocab_size} tokens are too few for --data")
    if args.T > model.config.block_size:
        sys.exit(f"error: -T {args.T} is longer than this model's longest sequence, {model.config.block_size}")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    args.log_dir.mkdir(parents=True, exist_ok=True)
    log_file = open(args.log_dir / f"{script.stem}.log", "w", buffering=1)  # line by line: a killed run keeps its log

    def log(line):
        print(line, flush=True)
        print(line, file=log_file)

    log(f"# script: {script.name}")
    name = f"{args.pretrained} (pretrained)" if args.pretrained else args.model
    log(f"# model: {name} | parameters: {sum(p.numel() for p in model.parameters()):,}")
    log(f"# device: {device_name(device)} | torch: {torch.__version__} | precision: {precision}")
    log(f"# batch: B={args.B} T={args.T} | steps: {args.steps} | seed: {args.seed}")
    log(f"# data: {loader.meta['source']} ({loader.meta['tokenizer']} tokens)"
        f" | loaded {len(loader.tokens)} tokens | 1 epoch = {loader.batches_per_epoch} batches")

    tokens_per_step = args.B * args.T
    seconds = []
    for step in range(1, args.steps + 1):
        t0 = time.perf_counter()
        x, y = loader.next_batch()
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=amp_dtype):
            loss = model(x, y)[1]  # [1]: let go of the logits, the largest tensor of the step
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.get_device_module(device).synchronize()  # a GPU runs behind Python: wait for it, then read the clock
        dt = time.perf_counter() - t0
        seconds.append(dt)
        loss = loss.item()
        log(f"step : {step} | loss: {loss:.6f} | dt: {dt * 1000:.2f} ms | tokens/sec: {tokens_per_step / dt:.2f}")
        if not math.isfinite(loss):
            sys.exit(f"error: the loss is {loss} at step {step}, so training cannot go on: see NaN in README.md")

    skipped = min(5 if args.steps > 10 else 2, args.steps - 1)  # the first steps warm up
    dt = statistics.median(seconds[skipped:])
    log(f"median : dt: {dt * 1000:.2f} ms | tokens/sec: {tokens_per_step / dt:.2f}"
        f" | peak memory: {peak_memory(device):.2f} GB | steps {skipped + 1}-{args.steps}")

    if args.save:
        checkpoint = {
            "script": script.name, "config": asdict(model.config), "model": model.state_dict(), "step": args.steps,
            "tokenizer": loader.meta["tokenizer"],
        }
        partial = args.save.with_name(args.save.name + ".partial")
        try:
            torch.save(checkpoint, partial)
            partial.replace(args.save)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            partial.unlink(missing_ok=True)
            sys.exit(f"error: --save {args.save}: {error}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a log folder that cannot be written, a full disk
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        sys.exit("error: out of memory: try half the -B, or a shorter -T")
    except KeyboardInterrupt:
        sys.exit("stopped: the log keeps the finished steps")
