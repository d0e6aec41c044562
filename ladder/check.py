"""What this machine has, and what each rung will gain from it: one line each, with what to do where it lacks."""
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ladder.memory import recommend
from ladder.stages import ROOT

GOOD, NEUTRAL, BAD = "✓", "–", "✗"


@dataclass
class Finding:
    """`mark` is ✓ (there), – (not there, and the ladder runs without) or ✗ (do something)."""

    mark: str
    what: str
    detail: str


def pick_device():
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def check_device(device):
    import speedup_10_fused_adamw as rung_10

    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = f"{total / 1e9:.0f} GB, {free / 1e9:.0f} GB free"
    else:
        memory = f"{psutil.virtual_memory().total / 1e9:.0f} GB, {psutil.virtual_memory().available / 1e9:.0f} GB free"
    mark = GOOD if device != "cpu" else NEUTRAL
    yield Finding(mark, "device", f"{device}: {rung_10.device_name(device)}, {memory}")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = "" if version >= (2, 11) else ": needs 2.11 or newer, pip install -r requirements.txt"
    yield Finding(BAD if old else GOOD, "torch", torch.__version__ + old)


def check_formats(device):
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    tf32 = capability >= (8, 0) and torch.version.cuda
    yield Finding(GOOD if tf32 else NEUTRAL, "TF32", "rung 2 gains" if tf32 else "rung 2 has no effect on this device")
    if device == "cuda":
        bf16, fp16 = torch.cuda.is_bf16_supported(including_emulation=False), True
    elif device == "mps":
        bf16 = fp16 = True
    else:
        onednn = torch.backends.mkldnn.is_available()
        bf16 = onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        fp16 = onednn and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    without = "rung 3 uses float16 with a GradScaler" if device == "cuda" else "rung 3 will not gain time"
    yield Finding(GOOD if bf16 else NEUTRAL, "bfloat16", "rung 3 gains" if bf16 else f"none in hardware: {without}")
    yield Finding(GOOD if fp16 else NEUTRAL, "float16", "there" if fp16 else "slow here; the ladder uses bfloat16")


def check_kernels(device):
    import speedup_05_compile as rung_5

    problem = rung_5.compile_problem(device)
    need = "a C++ compiler (Linux: apt install g++)" if device == "cpu" else "Triton and a C compiler"
    advice = f"does not work, rungs 5 and up run eagerly: {problem}; install {need}"
    yield Finding(BAD if problem else GOOD, "torch.compile", advice if problem else "works, for rung 5 and up")
    if device == "cuda":
        flash = torch.cuda.get_device_capability() >= (8, 0) and torch.backends.cuda.is_flash_attention_available()
        yield Finding(GOOD if flash else NEUTRAL, "flash attention",
                      "rung 6 gains" if flash else "not on this GPU: rung 6 uses the memory-efficient kernel")
    else:
        yield Finding(GOOD, "flash attention", "torch's own kernel for this device: rung 6 saves memory")
    fused = device in torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    yield Finding(GOOD if fused else NEUTRAL, "fused AdamW", "rung 10 gains" if fused else "not on this device")


def check_ranks(device):
    count = torch.cuda.device_count() if device == "cuda" else 0
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    detail = f"{count} GPUs" if count != 1 else "1 GPU"
    yield Finding(GOOD if count > 1 else NEUTRAL, "GPUs for ddp_run.py",
                  detail if count > 1 else f"{detail}: ddp_run.py can run 2 processes on the CPU, over gloo")
    yield Finding(GOOD if nccl else NEUTRAL, "NCCL", "there" if nccl else "not in this torch; DDP on CPUs uses gloo")


def check_files():
    free = shutil.disk_usage(ROOT).free
    yield Finding(GOOD if free > 2e9 else BAD, "free disk",
                  f"{free / 1e9:.0f} GB" + ("" if free > 2e9 else ": a saved gpt2 takes 0.5 GB; make room"))
    data = Path("data/tokens/meta.json")
    yield Finding(GOOD if data.exists() else NEUTRAL, "data",
                  str(data.parent) if data.exists() else "not yet: the first run makes it (python data/prepare.py)")
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir()) / "data-gym-cache")
    there = cache.is_dir() and any(cache.iterdir())
    yield Finding(GOOD if there else NEUTRAL, "tokenizer",
                  f"in {cache}" if there else "not yet: tiktoken fetches it once; without a network, single bytes")


def check_machine(device=None):
    """All findings, and the command recommended for this machine."""
    device = device or pick_device()
    findings = [*check_device(device), *check_formats(device), *check_kernels(device), *check_ranks(device),
                *check_files()]
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    model, B, T = recommend(free, accelerator=device != "cpu")
    return findings, f"python -m ladder run --model {model} -B {B} -T {T}"
