"""What this machine has, what each rung will gain from it, and what to do about what is missing: one line each."""
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ladder import formats
from ladder.count.memory import free_memory
from ladder.files import read_json
from ladder.measure import device_rates
from ladder.measure.problems import NO_TORCHRUN, compile_problem, nvidia_problem, problem_of
from ladder.measure.this_machine import ask_nvidia_smi, device_name
from ladder.rungs.list import ROOT

GOOD, NEUTRAL, BAD = "+", "-", "x"  # present; absent, but the ladder runs without it; needs fixing
Finding = namedtuple("Finding", "mark what detail")


def finding(good, what, gains, lacks, bad=NEUTRAL):
    """A Finding: + with the text `gains` if `good`, else `bad` with `lacks`."""
    return Finding(GOOD, what, gains) if good else Finding(bad, what, lacks)


def check_device(device):
    total = torch.cuda.mem_get_info()[1] if device == "cuda" else psutil.virtual_memory().total
    memory = f"{formats.number(total / 1e9)} GB, {formats.number(free_memory(device) / 1e9)} GB free"
    name = f"{device}: {device_name(device)}, {memory}"
    gpus, _ = ask_nvidia_smi()
    if device == "cuda" and gpus:
        name += f" (name, driver, power limit: {'; '.join(gpus)})"
    yield finding(device != "cpu", "device", name, name)
    problem = nvidia_problem()
    if problem:
        yield Finding(BAD, "NVIDIA GPU", f"torch cannot use it: {problem}")
    needs, why = "2.11", ""
    if device == "mps":  # pytorch issue 195910
        needs, why = "2.13", "; before, validation in half precision sees up to 3 future tokens"
    yield finding(torch.__version__ >= needs, "torch", torch.__version__,
                  f"{torch.__version__}: needs {needs} or newer{why}; pip install -r requirements.txt", BAD)


def check_formats(device):
    capability, cuda = (0, 0), False
    if device == "cuda":  # also AMD's GPUs, but without TF32, and with other formats of 8 bits
        capability, cuda = torch.cuda.get_device_capability(), bool(torch.version.cuda)
    tf32 = cuda and capability >= (8, 0)
    slow = tf32 and "GeForce" in torch.cuda.get_device_name()
    lacks = "a GeForce's is no faster than float32 by its datasheet: rung 2 gains little"
    yield finding(tf32 and not slow, "TF32", "rung 2 gains", lacks if slow else "none here: rung 2 gains nothing")
    without = {
        torch.float16: "none in hardware: rung 3 and up use float16 with a GradScaler",
        torch.float32: "none in this CPU: rungs 3 and up run in float32 here and gain nothing",
    }.get(device_rates.autocast_dtype(device))
    yield finding(without is None, "bfloat16", "rung 3 gains", without)
    yield finding(cuda and capability >= (8, 9), "float8", "fp8 gains with wide layers",
                  "fp8 has no effect on this device")


# One step of a small rung 10, eager and compiled: the loss and the norm of its gradients.
COMPARED = """
import torch
from ladder.rungs.list import BY_LABEL, load_script
rung_10 = load_script(BY_LABEL["10"])
steps = []
for compiled in False, True:
    torch.manual_seed(1337)
    model = rung_10.GPT(rung_10.GPTConfig(vocab_size=1024, n_layer=2, n_head=2, n_embd=128)).to(DEVICE)
    idx, targets = torch.randint(1024, (2, 4, 256), device=DEVICE)
    run = torch.compile(model) if compiled else model
    with torch.autocast(DEVICE, dtype=rung_10.autocast_dtype(DEVICE)):
        loss = run(idx, targets)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    steps.append(torch.stack([loss.detach(), norm]))
eager, compiled = steps
torch.testing.assert_close(compiled, eager, rtol=0.02, atol=0.0)
"""


def check_compiled(device):
    """Whether a compiled step computes what an eager one does: on some GPUs torch's fusions were wrong, silently."""
    problem = problem_of(f"DEVICE = {device!r}{COMPARED}")
    return finding(problem is None, "compiled step", "its loss and gradients are those of an eager step",
                   f"its loss or gradients differ from an eager step's; use --compile-mode none (pytorch issue 191433 "
                   f"tells of RTX 50 cards): {problem}", BAD)


def check_cache():
    """Libraries that a compiler had not finished when it was killed; every later run of their rung fails."""
    empty = [path for path in Path(cache_dir()).glob("**/*.so") if path.stat().st_size == 0]
    if empty:
        yield Finding(BAD, "torch's cache", f"{len(empty)} empty libraries, as of a run that was killed while it "
                      f"compiled: rm -r {cache_dir()}")


def check_kernels(device):
    problem = compile_problem(device)
    lacks = f"rungs 5 and up need --compile-mode none, which python -m ladder gives them: {problem}"
    if device == "mps":
        yield Finding(NEUTRAL, "torch.compile", lacks)
        yield Finding(NEUTRAL, "attention", "training computes all scores: rung 6 saves no memory")
    else:
        triton = "Triton, " if device == "cuda" else ""
        remedy = f"; install {triton}a C++ compiler and Python's headers (Linux: apt install g++ python3-dev)"
        if problem and problem.endswith("unset it"):
            remedy = ""
        yield finding(problem is None, "torch.compile", "works, for rung 5 and up",
                      f"does not work, {lacks}{remedy}", BAD)
        if problem is None and device == "cuda":
            yield check_compiled(device)
        kernel = device_rates.attention_kernel(device)
        yield finding(kernel != "MATH", "attention", f"torch chooses {kernel} here: rung 6 gains",
                      "torch chooses MATH here: rung 6 computes all scores and gains nothing")
    fused = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    yield finding(device in fused, "fused AdamW", "rung 10 gains", "not on this device")


def check_ranks(device):
    count = torch.cuda.device_count() if device == "cuda" else 0
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    yield finding(count > 1, "GPUs for ddp_run.py", str(count),
                  f"{count}: it can run 2 processes on the CPU, over gloo")
    yield finding(nccl, "NCCL", "works", "not in this torch: DDP uses gloo, slow on GPUs",
                  BAD if count > 1 else NEUTRAL)
    if sys.platform == "win32":
        yield Finding(NEUTRAL, "torchrun", NO_TORCHRUN)


def check_data(folder):
    """What the token files in `folder` were made from, and how to replace the fallback text."""
    meta = read_json(folder / "meta.json", needs=("source", "tokenizer"))
    if not meta:
        return Finding(NEUTRAL, "data", "not yet: the first run prepares it (python data/prepare.py)")
    fallback = meta["source"] == "python_topics" or meta["tokenizer"] == "gpt2-bytes"
    advice = "; prepared without a network: with one, python data/prepare.py makes Tiny Shakespeare in gpt2 tokens"
    detail = f"{meta['source']} ({meta['tokenizer']} tokens) in {folder}"
    return finding(not fallback, "data", detail, detail + advice)


def check_files():
    free = shutil.disk_usage(ROOT).free
    disk = f"{formats.number(free / 1e9)} GB"
    yield finding(free > 2e9, "free disk", disk, f"{disk}: a saved gpt2 takes 0.5 GB; make room", BAD)
    yield check_data(Path("data/tokens"))


def check_machine(device):
    """All findings, and a command that takes a few minutes on this machine."""
    findings = [*check_device(device), *check_formats(device), *check_kernels(device), *check_ranks(device),
                *check_cache(), *check_files()]
    return findings, f"python -m ladder run {'--quick' if device == 'cpu' else '--steps 200'}"
