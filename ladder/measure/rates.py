"""Measure this device's rates of matrix products and memory, and name the machine. Run by `python -m ladder run`.

    python -m ladder.measure.rates --device cpu                # prints JSON

The products have the shape of GPT-2's own layers, (4096, 768) @ (768, 3072), and of larger squares; the best of several
tries counts, since the question is what the chip can do. Memory is measured by a copy far larger than any cache.
"""
import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import benchmark, collect_env

from ladder.rungs.list import BY_LABEL, ROOT, load_script

rung_10 = load_script(BY_LABEL["10"])
SHAPES = [(4096, 768, 3072), (2048, 2048, 2048), (8192, 8192, 8192)]
SECONDS = 1.0  # of measuring, for each shape and format
COPIED = {"cuda": 2**30, "mps": 2**28, "cpu": 2**28}  # bytes
NVIDIA_SECONDS = 10  # a driver that hangs never answers


def best_rate(device, dtype, shape):
    """The highest FLOP/s over repeated products of one shape (m, k, n)."""
    m, k, n = shape
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    timer = benchmark.Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * m * k * n / min(timer.blocked_autorange(min_run_time=SECONDS).times)


def best_bandwidth(device):
    """The highest bytes/s at which memory is read and written, of repeated copies."""
    source = torch.ones(COPIED[device], device=device, dtype=torch.uint8)
    timer = benchmark.Timer("target.copy_(source)", globals={"source": source, "target": torch.empty_like(source)},
                            num_threads=torch.get_num_threads())
    return 2 * source.numel() / min(timer.blocked_autorange(min_run_time=SECONDS).times)


def measure(device):
    """{"float32": FLOP/s} and the rates of what else is in hardware: "tf32", "bfloat16" or, failing that, "float16"."""
    shapes = SHAPES if device != "cpu" else SHAPES[:2]
    dtype = rung_10.autocast_dtype(device)
    formats = {"float32": (torch.float32, "highest"), str(dtype).removeprefix("torch."): (dtype, "highest")}
    if device == "cuda" and torch.cuda.is_tf32_supported():
        formats["tf32"] = (torch.float32, "high")
    rates = {}
    for name, (dtype, precision) in formats.items():
        torch.set_float32_matmul_precision(precision)
        rates[name] = max(best_rate(device, dtype, shape) for shape in shapes)
    return rates


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
        said = (child.stdout + child.stderr).strip() or f"exit code {child.returncode}"
        return [], f"nvidia-smi fails: {said.splitlines()[0]}"
    return child.stdout.splitlines(), None


def nvidia_gpus():
    """The machine's NVIDIA GPUs, as far as their driver tells."""
    return ask_nvidia_smi()[0]


def cpu_name():
    """The processor's name, as far as the system tells."""
    if sys.platform == "darwin":
        return collect_env.run("sysctl -n machdep.cpu.brand_string")[1]
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def device_name(device):
    """The name of the chip, on a CPU with the number of threads."""
    if device == "cpu":
        return f"{cpu_name()} ({torch.get_num_threads()} threads)"
    return torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()} GPU"


def describe(device):
    """What a reader of the rates needs to know about the machine, and the project's commit where git tells it."""
    code, commit, _ = collect_env.run(f'git -C "{ROOT}" describe --always --dirty')
    return ({"commit": commit} if code == 0 else {}) | {
        "device": device, "name": device_name(device), "cpu": device_name("cpu"), "gpus": nvidia_gpus(),
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "system": platform.platform(), "threads": torch.get_num_threads(),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    measured = {"rates": measure(device), "bytes_per_second": best_bandwidth(device)}
    print(json.dumps(measured | describe(device), indent=2))


if __name__ == "__main__":
    main()
