"""What keeps torch from using a device, or from compiling for it, in one line each, with a remedy."""
import os
import re
import subprocess
import sys

import torch

from ladder.errors import UserError
from ladder.measure.processes import COMPLAINT, OUT_OF_MEMORY
from ladder.measure.this_machine import ask_nvidia_smi

NO_TORCHRUN = ("does not start on Windows, where torch lacks libuv; start each process yourself, "
               "see Windows in docs/running.md, or use WSL")


def problem_of(code):
    """What `python -c CODE`, or a compiler that it starts, complains of; None if it ends well.

    UserError where memory is lacking, which says nothing about the machine.
    """
    # In a process of its own: one that has used a GPU keeps memory there.
    child = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True)
    if child.returncode == 0:
        return None
    lacking = re.search(rf".*({OUT_OF_MEMORY}).*", child.stderr)
    if lacking:
        raise UserError(f"out of memory: end what else uses the device, or wait, and try again ({lacking[0].strip()})")
    # Of gcc, clang and MSVC, within a line: "main.c:5:10: fatal error: Python.h: No such file …".
    by_compiler = re.search(r": ((fatal )?error\b.*)", child.stderr)
    if by_compiler:
        return by_compiler[1]
    lines = [line for line in child.stderr.splitlines() if COMPLAINT.match(line)]
    return lines[-1] if lines else f"exit code {child.returncode}"


def nvidia_problem():
    """What keeps torch from using this machine's NVIDIA GPU, and a remedy; None if nothing does."""
    gpus, failure = ask_nvidia_smi()
    if failure:  # where nvidia-smi hangs, torch may hang as well
        works = "answered" not in failure and problem_of("import torch; torch.ones(1, device='cuda')") is None
        return None if works else f"{failure}; restart the machine, or reinstall its NVIDIA driver"
    problem = problem_of("import torch; torch.ones(1, device='cuda')") if gpus else None
    if problem is None:
        return None
    version, driver = torch.__version__.split("+")[0], re.search(r", (\d+)\.", gpus[0])
    old = "kernel image" in problem or driver is not None and int(driver[1]) < 580
    wheel = "cu126" if old else "cu130"  # CUDA 13 needs driver 580 and a Turing card, or newer ones
    return (f"{problem}; pip install --force-reinstall torch=={version} "
            f"--index-url https://download.pytorch.org/whl/{wheel}")


def compile_problem(device):
    """Why torch.compile is not to be used on a device, in one line; None if it works."""
    if device == "mps":
        return "not reliable yet on Apple GPUs (pytorch issues 150121 and 152155)"
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):  # with either it does nothing, without a word
        if os.environ.get(name) == "1":
            return f"{name}=1 switches it off; unset it"
    return problem_of(f"import torch; torch.compile(torch.sin)(torch.ones(8, device='{device}'))")
