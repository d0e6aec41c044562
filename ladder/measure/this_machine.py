"""What this machine is called: its chips, driver and versions, and the project's commit."""
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import collect_env

from ladder.rungs.list import ROOT

NVIDIA_SECONDS = 10  # a driver that hangs never answers


def ask_nvidia_smi():
    """(the NVIDIA GPUs, such as "NVIDIA H100 80GB HBM3, 580.65.06, 700.00 W", why nvidia-smi fails, None without)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], None
    query = [program, "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        child = subprocess.run(query, text=True, capture_output=True, timeout=NVIDIA_SECONDS)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi has not answered within {NVIDIA_SECONDS} s"
    except OSError as error:
        return [], f"nvidia-smi does not start: {error.strerror}"
    if child.returncode:
        lines = [*(child.stdout + child.stderr).strip().splitlines(), f"exit code {child.returncode}"]
        return [], f"nvidia-smi fails: {lines[0]}"
    return child.stdout.splitlines(), None


def cpu_name():
    """The processor's name, as far as the system tells."""
    if sys.platform == "darwin":
        return collect_env.run("sysctl -n machdep.cpu.brand_string")[1]
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def device_name(device):
    """The name of the chip, on a CPU with the number of threads."""
    if device == "cpu":
        return f"{cpu_name()} ({torch.get_num_threads()} threads)"
    return torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()} GPU"


def describe(device):
    """What a reader of the rates needs to know about the machine, and the project's commit where git tells it."""
    code, commit, _ = collect_env.run(f'git -C "{ROOT}" describe --always --dirty')
    return ({"commit": commit} if code == 0 else {}) | {
        "device": device, "name": device_name(device), "cpu": device_name("cpu"), "gpus": ask_nvidia_smi()[0],
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "system": platform.platform(), "threads": torch.get_num_threads()}
