"""What this machine has, what each rung will gain from it, and what to do about what is missing: one line each."""
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pandas
import psutil
import torch
from torch.nn.attention import SDPBackend

from ladder.measure.allocator import keeping_freed_memory, name_of
from ladder.measure.rates import device_name, nvidia_gpus, rung_10
from ladder.count.memory import card_bytes, free_memory, largest_model, recommend, sent_bytes, split_parameters
from ladder.scripts.stages import ROOT
from ladder.show.terminal import print_texts

GOOD, NEUTRAL, BAD = "+", "-", "x"  # which every terminal has
COLORS = {GOOD: "green", NEUTRAL: "yellow", BAD: "red"}


# `mark` is + (present), - (absent, but the ladder runs without it) or x (needs fixing).
Finding = namedtuple("Finding", "mark what detail")


def finding(good, what, gains, lacks, bad=NEUTRAL):
    """A Finding: + with the text `gains` if `good`, else `bad` with `lacks`."""
    return Finding(GOOD, what, gains) if good else Finding(bad, what, lacks)


def nvidia_problem():
    """What keeps torch from using this machine's NVIDIA GPU, in torch's words, and a remedy; None if nothing does."""
    if not nvidia_gpus():
        return None
    try:
        torch.ones(1, device="cuda")
    except Exception as error:  # no CUDA in this torch, an old driver, a hidden card, no kernels for it: any exception
        version = torch.__version__.split("+")[0]
        return (f"{str(error).splitlines()[0]}; pip install --force-reinstall torch=={version} --index-url "
                "https://download.pytorch.org/whl/cu130 has CUDA, cu126 in its place is for older drivers and cards")


def check_device(device):
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else psutil.virtual_memory().total
    memory = f"{total / 1e9:.0f} GB, {free_memory(device) / 1e9:.0f} GB free"
    name = f"{device}: {device_name(device)}, {memory}"
    if device == "cuda" and (gpus := nvidia_gpus()):
        name += f" (name, driver, power limit: {'; '.join(gpus)})"
    yield finding(device != "cpu", "device", name, name)
    if problem := nvidia_problem():
        yield Finding(BAD, "NVIDIA GPU", f"torch cannot use it: {problem}")
    yield finding(torch.torch_version.TorchVersion(torch.__version__) >= (2, 11), "torch", torch.__version__,
                  f"{torch.__version__}: needs 2.11 or newer, pip install -r requirements.txt", BAD)


def check_formats(device):
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    yield finding(capability >= (8, 0) and torch.version.cuda, "TF32", "rung 2 gains",
                  "rung 2 has no effect on this device")
    without = {
        torch.float16: "none in hardware: rung 3 and up use float16 with a GradScaler",
        torch.float32: "none in this CPU: rungs 3 and up run in float32 here and gain nothing",
    }.get(rung_10.autocast_dtype(device))
    yield finding(without is None, "bfloat16", "rung 3 gains", without)
    yield finding(capability >= (8, 9), "float8", "rung 25 gains with wide layers",
                  "rung 25 has no effect on this device")


def compile_problem(device):
    """Why torch.compile fails here on a tiny function, in one line; None if it works."""
    try:
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except Exception as error:  # no compiler, no Triton, no headers, an unsupported Python: any exception
        return f"{type(error).__name__}: {error}".splitlines()[0]


def check_kernels(device):
    if device == "mps":
        yield Finding(NEUTRAL, "torch.compile", "not used on Apple GPUs: rungs 5 and up run eagerly")
        yield Finding(GOOD, "attention", "Apple's own kernel: rung 6 saves memory")
    else:
        problem = compile_problem(device)
        need = "a C++ compiler (Linux: apt install g++)" if device == "cpu" else "Triton and a C compiler"
        yield finding(problem is None, "torch.compile", "works, for rung 5 and up",
                      f"does not work, rungs 5 and up run eagerly: {problem}; install {need}", BAD)
        q = torch.empty(4, 12, 1024, 64, device=device, dtype=rung_10.autocast_dtype(device))  # (B, nh, T, hs)
        kernel = SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name
        yield finding(kernel != "MATH", "attention", f"torch chooses {kernel} here: rung 6 gains",
                      "torch chooses MATH here: rung 6 computes all scores and gains nothing")
    yield finding(device in torch.utils._foreach_utils._get_fused_kernels_supported_devices(), "fused AdamW",
                  "rung 10 gains", "not on this device")


def check_ranks(device):
    count = torch.cuda.device_count() if device == "cuda" else 0
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    yield finding(count > 1, "GPUs for ddp_run.py", str(count),
                  f"{count}: it can run 2 processes on the CPU, over gloo")
    yield finding(nccl, "NCCL", "works", "not in this torch, nor on Windows (WSL has it): DDP uses gloo, slow on GPUs",
                  BAD if count > 1 else NEUTRAL)


def check_data(folder):
    """What the token files in `folder` were made from, and how to replace the fallback text."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        source, tokenizer = meta["source"], meta["tokenizer"]
    except FileNotFoundError:
        return Finding(NEUTRAL, "data", "not yet: the first run prepares it (python data/prepare.py)")
    except (ValueError, KeyError, TypeError) as error:
        return Finding(BAD, "data", f"{folder}/meta.json is damaged ({error}); run python data/prepare.py")
    fallback = source == "python_topics" or tokenizer == "gpt2-bytes"
    advice = "; prepared without a network: with one, python data/prepare.py makes Tiny Shakespeare in gpt2 tokens"
    detail = f"{source} ({tokenizer} tokens) in {folder}"
    return finding(not fallback, "data", detail, detail + advice)


def check_allocator(device):
    """What happens to memory that a script frees on a CPU; torch's wheels for Windows have mimalloc built in."""
    if device != "cpu" or sys.platform != "linux":
        return
    name = name_of(os.environ | keeping_freed_memory())
    yield finding(name == "mimalloc", "allocator",
                  "mimalloc: python -m ladder keeps freed memory in the process; a script by itself: docs/measuring.md",
                  f"{name}; mimalloc needs less memory: pip install cmeel-mimalloc")


def check_files():
    free = shutil.disk_usage(ROOT).free
    disk = f"{free / 1e9:.0f} GB"
    yield finding(free > 2e9, "free disk", disk, f"{disk}: a saved gpt2 takes 0.5 GB; make room", BAD)
    yield check_data(Path("data/tokens"))
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir()) / "data-gym-cache")
    yield finding(cache.is_dir() and any(cache.iterdir()), "tokenizer", f"in {cache}",
                  "not yet: tiktoken downloads it once; else tokens are bytes")


def check_machine(device=None):
    """All findings, and the command recommended for this machine."""
    device = device or rung_10.parse_args([]).device
    findings = [*check_device(device), *check_formats(device), *check_kernels(device), *check_ranks(device),
                *check_allocator(device), *check_files()]
    model, B, T = recommend(free_memory(device), accelerator=device != "cpu")
    return findings, f"python -m ladder run --model {model} -B {B} -T {T} --steps {10 if device == 'cpu' else 200}"


def print_check(console):
    findings, command = check_machine()
    for mark, what, detail in findings:
        console.print(f"{mark} {what}: {detail}", style=COLORS[mark])
    console.print(f"\nFor this machine:\n    {command}")


def plan_cards(gpus, memories):
    """What 1, 2, 4 … `gpus` GPUs of each of `memories` GB hold on paper, 90 % of it used: a DataFrame of texts."""
    counts = [2**n for n in range(gpus.bit_length()) if 2**n < gpus] + [gpus]
    ways = [(n, sharded) for n in counts for sharded in (False, True)[:n]]  # a single card has nothing to shard
    embedding, block, _ = split_parameters("gpt2-xl")
    rows = []
    for memory, (n, sharded) in itertools.product(memories, ways):
        model, n_blocks = largest_model(0.9e9 * memory, n, sharded)
        rows.append({
            "GPUs": f"{n} x {memory:g} GB",
            "": "FSDP" if sharded else "DDP" if n > 1 else "one",
            "largest\n--model": model or "none",
            "GB\na GPU": f"{card_bytes(model, 1, 1024, n, sharded) / 1e9:.1f}" if model else "–",
            "GB sent\na step": f"{sent_bytes(model, n, sharded) / 1e9:.1f}" if model else "–",
            "at most, 1e9\nparameters": f"{(embedding + block * n_blocks) / 1e9:.1f}" if n_blocks else "–",
        })
    return pandas.DataFrame(rows)


def print_cards(gpus, memories, console):
    """What 1 to `gpus` GPUs hold on paper, independent of this machine."""
    print_texts(plan_cards(gpus, memories), console,
                "The largest model that trains at B=1, T=1024 in 90 % of the memory, on paper")
    console.print("DDP: rung 24; FSDP: beyond/fsdp_run.py. Sent: by each GPU, in a step of one micro-step; FSDP sends "
                  "most of it again in each further one.\nAt most: as wide as gpt2-xl (1600), and as deep as fits.")
