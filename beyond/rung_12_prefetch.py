"""Rung 12, prefetch: no step waits for its batch, but the first. Starts from rung 11.

Kernels launch asynchronously, so Python has time to spare while the device computes. Until now that time went unused:
the batch was fetched when the step began, and the device sat idle for as long as that took. Now

- a token file that takes, as int64, at most a tenth of the device's free memory is kept there: a batch is a slice;
- a larger one stays memory-mapped, and the next batch is fetched while the device is still busy with this one, into
  pinned memory (which the operating system cannot move), from where the GPU copies it without Python waiting.

Gain: only the first step waits for its batch. In all others the host waited for the GPU twice in each micro-step, and
now never before the clock is read (counted: tests/test_fake_cuda.py); experiments/data_wait.py measures the wait in ms.
Cost: 8 bytes of device memory per token of the file, or one more batch. The batches and their order stay the same.
No effect on a CPU: the tokens are in its memory already. On Apple GPUs only the first way helps: there torch waits for
each copy.

Source: PyTorch's tutorial on pin_memory and non_blocking; torch.cuda.mem_get_info in its documentation.
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
import torch.distributed as dist
import torch.nn as nn
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
    parser.add_argument("--total-batch", type=int, help="tokens per optimizer step; None: 524288, on a CPU 4 batches")
    parser.add_argument("--max-lr", type=float, default=6e-4, help="highest learning rate, after the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=10, help="steps of linear warm-up")
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

    def configure_optimizers(self, weight_decay):
        """Fused AdamW, with weight decay only on two-dimensional tensors: embeddings and linear layers."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]  # biases, LayerNorms
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


class DataLoaderLite:
    """Batches of consecutive tokens from a token file, on `device`; memory-mapped where it is too large for that."""

    def __init__(self, folder, B, T, device):
        self.B, self.T, self.device = B, T, device
        self.tokens, self.meta = open_tokens(folder, "train", B * T + 1)  # (n_tokens,)
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


def get_lr(step, max_steps, max_lr, warmup_steps):
    """The learning rate of `step` (1 to max_steps): linear up to max_lr, then half a cosine down to a tenth of it."""
    if step <= warmup_steps:
        return max_lr * step / warmup_steps
    progress = (step - warmup_steps) / (max_steps - warmup_steps)  # from 0 to 1
    min_lr = max_lr / 10
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (max_lr - min_lr)


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
    dist.init_process_group("nccl" if nccl else "gloo")
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
    model = new_model(settings, loader).to(device)
    optimizer = model.configure_optimizers(weight_decay=0.1)
    ddp_model = DDP(model, gradient_as_bucket_view=True) if dist.is_initialized() else model  # views: no second copy
    step_model, compiled = compile_model(ddp_model, settings.compile_mode, device)
    notes = {"compile": compiled, "ranks": world_size, "total_batch": f"{settings.total_batch} tokens"}
    notes["batches"] = "on the device" if loader.on_device else "prefetched" if device == "cuda" else "memory-mapped"
    log = Log(settings, model, loader, settings.total_batch, precision, **notes)

    for step in range(1, settings.steps + 1):
        t0 = time.perf_counter()
        lr = get_lr(step, settings.steps, settings.max_lr, settings.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        micro_batches = range((step - 1) * n_micro_batches + rank, step * n_micro_batches, world_size)  # of this rank
        loss, norm = optimizer_step(step_model, optimizer, scaler, loader, micro_batches, device, amp_dtype)
        torch.get_device_module(device).synchronize()  # kernels launch asynchronously: wait, then read the clock
        dt = time.perf_counter() - t0
        loss = loss.detach() / world_size
        if dist.is_initialized():
            dist.all_reduce(loss)  # after the clock: only the log needs the mean over the ranks
        log.step(step, loss.item(), dt, norm=f"{norm.item():.4f}", lr=f"{lr:.4e}")

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
