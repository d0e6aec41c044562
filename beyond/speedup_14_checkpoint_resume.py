"""Rung 14, checkpoints: a run that survives what happens to it overnight.

Every --checkpoint-every steps all that the next step depends on goes into one file: the weights, the optimizer's
moments, the gradient scaler, the place in the text, the random numbers. --resume goes on from the newest one:

    python beyond/speedup_14_checkpoint_resume.py --steps 20000 --resume

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc_per_node=8 --max-restarts=3 beyond/speedup_14_checkpoint_resume.py --resume

Give --resume from the start: without a checkpoint it starts at step 1, and the same command goes on after anything.
torchrun's --max-restarts starts all ranks again when one dies; without that variable it would hand the new ranks the
addresses of the dead ones.
Gain: a crash costs the steps since the last checkpoint. On a CPU they come out bit by bit as they would have; on a GPU
some sums are added in a varying order, resumed or not.
Cost: 12 bytes a parameter on the disk for each of the --checkpoint-keep newest (1.5 GB for GPT-2), and the time to
write them, outside of `dt`.
A checkpoint is written under another name, brought to the disk and then renamed, so that no kill can leave half of one;
the CRC-32 that torch.save puts on each tensor is checked before it is used, and a damaged one falls back to the one
before. SIGTERM, which clusters send before they take a machine, saves after the step and ends with exit code 0
(torchrun gives its ranks 30 seconds for that, and reports the signal itself).
Rank 0 reads and writes; the others get its checkpoint, so only its disk must live on. Another -B or number of ranks may
go on too, as long as --total-batch stays: the text goes on where it was.
torch.distributed.checkpoint would spread the file over the ranks; under DDP each has everything, so one file will do.

Source: "Saving and loading a general checkpoint" in PyTorch's tutorials; torchrun's help; pytorch issue 135712.
"""
import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class GPTConfig:
    """The shape of the model; the defaults are GPT-2 (124M)."""

    block_size: int = 1024  # longest sequence
    vocab_size: int = 50304  # rows of the embedding: n_tokens, padded to a multiple of 128
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_tokens: int = 50257  # 50,000 BPE merges + 256 bytes + 1 <|endoftext|>


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

    def forward(self, x):
        B, T, C = x.shape  # batch, sequence, n_embd
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x (B, T, C)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
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
        padding = torch.arange(self.config.vocab_size, device=idx.device) >= self.config.n_tokens  # (vocab_size,)
        logits = logits.masked_fill(padding, float("-inf"))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))  # (B*T, vocab_size) against (B*T,)
        return logits, loss

    def configure_optimizers(self, weight_decay):
        """Fused AdamW with weight decay on tensors of two dimensions only: embeddings and linear layers."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]  # biases, LayerNorms
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)

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
            block_size=hf.n_positions, n_tokens=hf.vocab_size, n_layer=hf.n_layer, n_head=hf.n_head, n_embd=hf.n_embd
        )
        config.vocab_size = math.ceil(config.n_tokens / 128) * 128
        model = cls(config)
        weights = hf_model.state_dict()
        # GPT-2's "Conv1D" layers store their matrix as (in, out), nn.Linear as (out, in).
        for name in weights:
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                weights[name] = weights[name].t()
        for name in ("transformer.wte.weight", "lm_head.weight"):
            weights[name] = F.pad(weights[name], (0, 0, 0, config.vocab_size - config.n_tokens))  # rows of zeros below
        model.load_state_dict(weights)
        return model


class DataLoaderLite:
    """Consecutive batches from the token file that data/prepare.py made, over and over again; the ranks take turns.

    The batches are on `device`. The file is copied there if it is small; else it is memory-mapped, so that it may be
    larger than the memory. Exits with one line when the folder is missing or damaged, or when it holds fewer tokens
    than one batch.
    """

    def __init__(self, folder, B, T, rank=0, world_size=1, device="cpu", split="train"):
        self.B, self.T, self.device, self.split = B, T, device, split
        self.rank, self.world_size = rank, world_size
        folder = Path(folder)
        try:
            self.meta = json.loads((folder / "meta.json").read_text())
            n_tokens = self.meta[f"{split}_tokens"]
            if (folder / f"{split}.bin").stat().st_size != 2 * n_tokens:
                raise ValueError(f"{split}.bin does not have the size that meta.json says")
            self.tokens = np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r")
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.exit(f"error: no usable token files in {folder} ({error}): make them with"
                     f" python data/prepare.py [--text FILE] --out {folder}")
        if n_tokens < B * T * world_size + 1:
            sys.exit(f"error: {n_tokens} {split} tokens in {folder}, but one batch of B={B} T={T} on each of"
                     f" {world_size} ranks needs {B * T * world_size + 1}")
        self.batches_per_epoch = (n_tokens - 1) // (B * T * world_size)
        self.position = 0
        self.ahead = None  # the batch that prefetch() has read
        self.on_device = None  # the whole file there: (n_tokens,)
        if 10 * self.tokens.nbytes <= free_memory(device):
            self.check(self.tokens)
            # torch does little with uint16, so the same bits travel as int16; & 0xFFFF reads them as unsigned again.
            self.on_device = torch.from_numpy(np.memmap(folder / "train.bin", dtype="<i2", mode="c")).to(device)

    def check(self, tokens):
        if tokens.max() >= self.meta["vocab_size"]:
            sys.exit(f"error: {self.split}.bin is damaged: token {tokens.max()} is not in the vocabulary")

    def read_batch(self):
        """The B * T tokens at the current position, as next_batch() returns them."""
        B, T = self.B, self.T
        if self.position + B * T * self.world_size + 1 > len(self.tokens):
            self.position = 0
        start = self.position + B * T * self.rank
        if self.on_device is not None:
            chunk = self.on_device[start : start + B * T + 1].to(torch.int64) & 0xFFFF
        else:
            chunk = self.tokens[start : start + B * T + 1].astype(np.int64)
            self.check(chunk)
            chunk = torch.from_numpy(chunk)
            if self.device == "cuda":
                chunk = chunk.pin_memory()
            chunk = chunk.to(self.device, non_blocking=self.device == "cuda")
        return chunk[:-1].view(B, T), chunk[1:].view(B, T)

    def prefetch(self):
        """Read the next batch already: to be called while the device is busy."""
        self.ahead = self.read_batch()

    def next_batch(self):
        """The next B * T tokens as inputs (B, T), and the token that follows each of them as targets (B, T)."""
        batch = self.ahead or self.read_batch()
        self.ahead = None
        self.position += self.B * self.T * self.world_size
        return batch


@torch.no_grad()
def evaluate(model, loader, n_batches, amp_dtype):
    """The mean loss (nats per token) of the first `n_batches` batches of `loader`, on this rank."""
    loader.position, loader.ahead = 0, None
    total = torch.zeros((), device=loader.device)
    model.eval()
    for _ in range(n_batches):
        x, y = loader.next_batch()
        with torch.autocast(device_type=loader.device, dtype=amp_dtype):
            total += model(x, y)[1]
        loader.prefetch()
    model.train()
    return total / n_batches


def save_checkpoint(folder, checkpoint, keep):
    """Write `checkpoint` into `folder` and delete all but the newest `keep`. Returns the reason if that fails."""
    path = folder / f"step_{checkpoint['step']:08d}.pt"
    partial = path.with_suffix(".partial")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_behind in folder.glob("step_*.partial"):
            left_behind.unlink()
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # after a power cut a new name must not stand for nothing
        partial.replace(path)
        up_to_this = sorted(other for other in folder.glob("step_*.pt") if other <= path)  # a later one is damaged
        for old in up_to_this[:-keep]:
            old.unlink()
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        return str(error).splitlines()[0]


def newest_checkpoint(folder):
    """The newest whole checkpoint in `folder`, None if there is none at all; exits with one line if all are damaged."""
    paths = sorted(folder.glob("step_*.pt"), reverse=True)
    for path in paths:
        try:
            with zipfile.ZipFile(path) as archive:  # what torch.save writes
                if damaged := archive.testzip():
                    raise ValueError(f"{damaged} does not have its checksum")
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # zipfile, pickle and torch: each its own class
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"WARNING: {path} is damaged ({reason}): trying the one before", file=sys.stderr, flush=True)
    if paths:
        sys.exit(f"error: --resume: no checkpoint in {folder} can be read: remove them to start anew")


def get_lr(step, max_steps, max_lr=6e-4, min_lr=6e-5, warmup_steps=10):
    """The learning rate of `step` (1 ... max_steps): a line from 0 up to max_lr, then half a cosine down to min_lr."""
    if step <= warmup_steps:
        return max_lr * step / warmup_steps
    progress = (step - warmup_steps) / (max_steps - warmup_steps)  # from 0 to 1
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (max_lr - min_lr)


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


def free_memory(device):
    """Bytes that are free on a GPU; 0 for a CPU, where a copy of what is in memory already would buy nothing."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if device == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return 0


def autocast_dtype(device):
    """bfloat16, or float16 on GPUs that have no bfloat16 arithmetic."""
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return torch.bfloat16


def compile_problem(device):
    """Why torch.compile does not work here, in one line, found out by compiling something tiny; None if it works."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=device))
    except Exception as error:  # no compiler, no Triton, no headers, an unsupported Python: each its own class
        return (str(error).strip() or type(error).__name__).splitlines()[0]


def parse_args(argv=None):
    """The command line's flags, checked; exits with one line when one cannot be."""
    parser = argparse.ArgumentParser(description="Train GPT-2 and log the loss and the speed of each step.")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="default: %(default)s")
    parser.add_argument("--pretrained", metavar="NAME_OR_FOLDER", help="start from these Hugging Face weights")
    parser.add_argument("-B", "--batch-size", dest="B", type=int, help="sequences per step (default: 4; 2 on a CPU)")
    parser.add_argument("-T", "--seq-len", dest="T", type=int, help="tokens per sequence (default: 1024; 256 on a CPU)")
    parser.add_argument("--total-batch", type=int, help="tokens per step (default: 524288; 4 micro-batches on a CPU)")
    parser.add_argument("--steps", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--val-every", type=int, default=25, help="steps; 0: never (default: %(default)s)")
    parser.add_argument("--val-sequences", type=int, default=32, help="of T tokens; 0: all (default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=int, default=250, help="steps; 0: never (default: %(default)s)")
    folder = Path("checkpoints", Path(__file__).stem)
    parser.add_argument("--checkpoint-dir", type=Path, default=folder, help="default: %(default)s")
    parser.add_argument("--checkpoint-keep", type=int, default=2, help="the newest ones (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    parser.add_argument("--seed", type=int, default=1337, help="default: %(default)s")
    parser.add_argument("--device", choices=["cuda", "mps", "cpu"], help="default: the GPU if there is one, else cpu")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="default: %(default)s, made if missing")
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="default: %(default)s")
    modes = ["default", "reduce-overhead", "max-autotune", "none"]
    parser.add_argument("--compile-mode", choices=modes, default="default", help="none: run eagerly")
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
    at_least_1 = {"-B": args.B, "-T": args.T, "--steps": args.steps, "--checkpoint-keep": args.checkpoint_keep}
    for flag, value in at_least_1.items():
        if value < 1:
            sys.exit(f"error: {flag} {value}: must be at least 1")
    at_least_0 = {"--val-every": args.val_every, "--val-sequences": args.val_sequences}
    for flag, value in {**at_least_0, "--checkpoint-every": args.checkpoint_every}.items():
        if value < 0:
            sys.exit(f"error: {flag} {value}: must be at least 0")
    if args.checkpoint_every and not args.resume and any(args.checkpoint_dir.glob("step_*.pt")):
        sys.exit(f"error: {args.checkpoint_dir} holds the checkpoints of a run: add --resume to go on with it, or"
                 " remove them, or give another --checkpoint-dir")
    if args.save and (args.save.is_dir() or not args.save.absolute().parent.is_dir()):
        sys.exit(f"error: --save {args.save}: give the name of a file in a folder that exists")
    return args


def main(argv=None):
    """Train for --steps steps; print and log each one."""
    args = parse_args(argv)
    script, device = Path(__file__), args.device
    ddp = "RANK" in os.environ  # torchrun tells each process who it is
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if ddp:
        if device == "mps":
            sys.exit("error: torch has no DDP for Apple GPUs: add --device cpu")
        if device == "cuda" and local_rank >= torch.cuda.device_count():
            sys.exit(f"error: more processes than GPUs: use --nproc_per_node={torch.cuda.device_count()}")
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if restarts and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
            sys.exit("error: --max-restarts works only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun:"
                     " without it the new ranks look for the dead ones (pytorch issue 135712)")
        if device == "cuda":
            torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    amp_dtype = autocast_dtype(device)
    scaler = torch.amp.GradScaler(device, enabled=amp_dtype is torch.float16)
    precision = f"{str(amp_dtype).removeprefix('torch.')} autocast"
    onednn = torch.backends.mkldnn.is_available()  # runs the CPU's matrix products
    if device == "cpu" and not (onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        precision += " (this CPU has no fast bfloat16: no gain)"

    if local_rank == 0 and args.data == DEFAULT_DATA and not args.data.exists():
        prepare = script.parent.parent / "data" / "prepare.py"
        if subprocess.run([sys.executable, prepare, "--out", args.data]).returncode:
            sys.exit("error: the data could not be prepared")
    if ddp:
        dist.barrier()  # from here on the data is there
    loader = DataLoaderLite(args.data, args.B, args.T, rank, world_size, device)
    fetching = "the whole file is on the device" if loader.on_device is not None else "fetched during the step before"
    if device == "cpu":
        fetching = "memory-mapped, nothing to copy: no effect on a CPU"
    validation = "never"
    if args.val_every:
        val_loader = DataLoaderLite(args.data, 1, args.T, rank, world_size, device, split="val")
        all_batches = val_loader.batches_per_epoch  # of one sequence on each rank
        val_batches = min(math.ceil(args.val_sequences / world_size) or all_batches, all_batches)
        val_tokens = val_batches * args.T * world_size
        validation = f"every {args.val_every} steps, {val_tokens} of {len(val_loader.tokens)} tokens"
    tokens_per_micro_step = args.B * args.T * world_size
    default_batch = 4 * tokens_per_micro_step if device == "cpu" else 2**19
    tokens_per_step = default_batch if args.total_batch is None else args.total_batch
    if tokens_per_step < 1 or tokens_per_step % tokens_per_micro_step:
        sys.exit(f"error: --total-batch {tokens_per_step}: no multiple of B * T * ranks = {tokens_per_micro_step}")
    micro_steps = tokens_per_step // tokens_per_micro_step
    if micro_steps > 1 and device == "cuda" and args.compile_mode in ("reduce-overhead", "max-autotune"):
        sys.exit("error: CUDA graphs reuse the memory of gradients that still add up: use --compile-mode default")
    model = GPT.from_pretrained(args.pretrained) if args.pretrained else GPT(MODELS[args.model])
    if model.config.vocab_size < loader.meta["vocab_size"]:
        sys.exit(f"error: --pretrained {args.pretrained}: its {model.config.vocab_size} tokens are too few for --data")
    if args.T > model.config.block_size:
        sys.exit(f"error: -T {args.T} is longer than this model's longest sequence, {model.config.block_size}")
    model.to(device)
    ddp_model = DDP(model) if ddp else None
    step_model, compiled = ddp_model or model, "none"
    if args.compile_mode != "none":
        problem = compile_problem(device)
        compiled = f"not possible here, running eagerly ({problem})" if problem else args.compile_mode
        if not problem:
            step_model = torch.compile(step_model, mode=args.compile_mode)
    if compiled == "reduce-overhead" and device != "cuda":
        compiled += " (CUDA graphs: no effect on this device)"
    optimizer = model.configure_optimizers(weight_decay=0.1)

    name = f"{args.pretrained} (pretrained)" if args.pretrained else args.model
    data = f"{loader.meta['tokenizer']} tokens of {loader.meta['sha256']}"
    # What the run that goes on must share with the one that wrote the checkpoint.
    run = {"model": name, "-T": args.T, "--steps": args.steps, "--total-batch": tokens_per_step, "--seed": args.seed,
           "data": data}
    found = [newest_checkpoint(args.checkpoint_dir) if args.resume and rank == 0 else None]
    if ddp and args.resume:
        dist.broadcast_object_list(found)
    checkpoint = found.pop()
    steps_done = checkpoint["step"] if checkpoint else 0
    if checkpoint:
        for key, value in run.items():
            if checkpoint["run"][key] != value:
                sys.exit(f"error: --resume: the checkpoint's run has {key} {checkpoint['run'][key]}, this one {value}:"
                         " give another --checkpoint-dir to start anew")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["scaler"] and scaler.is_enabled():  # float16 before and now
            scaler.load_state_dict(checkpoint["scaler"])
        loader.position = checkpoint["position"]
        torch.set_rng_state(checkpoint["rng"])
        if checkpoint["device"] == device != "cpu":
            torch.get_device_module(device).set_rng_state(checkpoint["device_rng"])
    earlier_log = checkpoint["log"] if checkpoint else ""
    del checkpoint  # its memory

    args.log_dir.mkdir(parents=True, exist_ok=True)
    log_path = args.log_dir / f"{script.stem}.log" if rank == 0 else os.devnull
    if earlier_log and rank == 0:
        partial = log_path.with_suffix(".partial")
        partial.write_text(earlier_log)
        partial.replace(log_path)
    log_file = open(log_path, "a" if earlier_log else "w", buffering=1)  # line by line: a killed run keeps its log

    def log(line):
        if rank > 0:
            return
        print(line, flush=True)
        print(line, file=log_file)

    log(f"# script: {script.name}")
    log(f"# model: {name} | parameters: {sum(p.numel() for p in model.parameters()):,}")
    log(f"# device: {device_name(device)} | torch: {torch.__version__} | precision: {precision}")
    log(f"# compile: {compiled}")
    log(f"# ranks: {world_size} | gradients: {dist.get_backend() if ddp else 'no torchrun, so no DDP: no effect'}")
    log(f"# total batch: {tokens_per_step} tokens in {micro_steps} micro-steps")
    log(f"# batch: B={args.B} T={args.T} | steps: {args.steps} | seed: {args.seed}")
    log(f"# data: {loader.meta['source']} ({loader.meta['tokenizer']} tokens)"
        f" | loaded {len(loader.tokens)} tokens | 1 epoch = {loader.batches_per_epoch} batches")
    log(f"# batches: {fetching}")
    log(f"# validation: {validation}")
    log(f"# checkpoints: {f'every {args.checkpoint_every} steps' if args.checkpoint_every else 'never'}"
        f" | steps done before: {steps_done}")

    sigterm = []  # no longer empty once the signal has come
    if args.checkpoint_every:
        signal.signal(signal.SIGTERM, lambda *_: sigterm.append(True))
    seconds = []
    for step in range(steps_done + 1, args.steps + 1):
        t0 = time.perf_counter()
        lr = get_lr(step, args.steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss = torch.zeros((), device=device)
        for micro_step in range(1, micro_steps + 1):
            x, y = loader.next_batch()
            # Until the last micro-step each rank only adds up its own gradients; the last one averages the sums.
            waits = ddp and micro_step < micro_steps
            with ddp_model.no_sync() if waits else contextlib.nullcontext():
                with torch.autocast(device_type=device, dtype=amp_dtype):
                    micro_loss = step_model(x, y)[1] / micro_steps  # [1]: let go of the logits, the largest tensor
                scaler.scale(micro_loss).backward()
            loader.prefetch()  # the device is still busy with what the lines above asked for
            loss += micro_loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the length before clipping
        scaler.step(optimizer)
        scaler.update()
        torch.get_device_module(device).synchronize()  # a GPU runs behind Python: wait for it, then read the clock
        dt = time.perf_counter() - t0
        seconds.append(dt)
        stopping = torch.tensor(len(sigterm), device=device)
        if ddp:
            dist.all_reduce(loss)  # after the clock: only the log needs the mean over the ranks
            dist.all_reduce(stopping)  # whichever rank got the signal, all stop after the same step
        loss, stopping = loss.item() / world_size, stopping.item() > 0
        log(f"step : {step} | loss: {loss:.6f} | dt: {dt * 1000:.2f} ms | tokens/sec: {tokens_per_step / dt:.2f}"
            f" | norm: {norm.item():.4f} | lr: {lr:.4e}")
        if not math.isfinite(loss):
            sys.exit(f"error: the loss is {loss} at step {step}, so training cannot go on: see NaN in README.md")
        if args.val_every and (step % args.val_every == 0 or step == args.steps):
            t0 = time.perf_counter()
            val_loss = evaluate(model, val_loader, val_batches, amp_dtype)
            if ddp:
                dist.all_reduce(val_loss)
            val_loss = val_loss.item() / world_size
            log(f"val : step {step} | loss: {val_loss:.6f} | time: {time.perf_counter() - t0:.2f} s")
        if args.checkpoint_every and (step % args.checkpoint_every == 0 or stopping) and rank == 0:
            t0 = time.perf_counter()
            checkpoint = {
                "script": script.name, "config": asdict(model.config), "model": model.state_dict(), "step": step,
                "tokenizer": loader.meta["tokenizer"], "run": run,
                "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                "position": loader.position, "log": log_path.read_text(),
                "device": device, "rng": torch.get_rng_state(),
                "device_rng": None if device == "cpu" else torch.get_device_module(device).get_rng_state(),
            }
            problem = f"the gradients' norm is {norm.item()}"  # in bfloat16 the weights may be lost already
            if math.isfinite(norm):
                problem = save_checkpoint(args.checkpoint_dir, checkpoint, args.checkpoint_keep)
            del checkpoint
            if problem and stopping:
                sys.exit(f"error: stopped by SIGTERM after step {step}, without a checkpoint of it ({problem})")
            log(f"# WARNING: no checkpoint at step {step} ({problem}): the ones before stay" if problem else
                f"# checkpoint: step {step} | time: {time.perf_counter() - t0:.2f} s")
        if stopping and step < args.steps:
            log(f"# stopped by SIGTERM after step {step}: go on with --resume")
            break

    finished = steps_done + len(seconds) == args.steps
    if finished and seconds:
        skipped = min(5 if len(seconds) > 10 else 2, len(seconds) - 1)  # the first steps warm up
        dt = statistics.median(seconds[skipped:])
        log(f"# first step, compilation included: {seconds[0]:.2f} s")
        log(f"median : dt: {dt * 1000:.2f} ms | tokens/sec: {tokens_per_step / dt:.2f}"
            f" | peak memory: {peak_memory(device):.2f} GB | steps {steps_done + skipped + 1}-{args.steps}")

    if args.save and rank == 0 and finished:
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
    if ddp:
        dist.destroy_process_group()
        time.sleep(0.5)  # gloo's threads let go of their last work: one that still does when Python ends would abort it


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
