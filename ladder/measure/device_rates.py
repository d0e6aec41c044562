"""Measure this device's rates of matrix products and memory. Run by `python -m ladder run`.

    python -m ladder.measure.device_rates --device cpu                # prints JSON

The products have the shape of GPT-2's own layers, (4096, 768) @ (768, 3072), and of larger squares; the best of several
tries counts, since the question is what the chip can do. Memory is measured by a copy far larger than any cache.
"""
import argparse
import json

import torch
from torch.nn.attention import SDPBackend
from torch.utils import benchmark

from ladder.measure.this_machine import describe
from ladder.rungs.list import BY_LABEL, load_script

PRODUCTS = [(4096, 768, 3072), (2048, 2048, 2048), (8192, 8192, 8192)]
RATE_SECONDS = 1.0  # of measuring, for each shape and format
COPIED = {"cuda": 2**30, "mps": 2**28, "cpu": 2**28}  # bytes


def autocast_dtype(device):
    """The 16-bit format that rung 10 uses on a device, or float32."""
    return load_script(BY_LABEL["10"]).autocast_dtype(device)


def best_seconds(statement, **values):
    timer = benchmark.Timer(statement, globals=values, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=RATE_SECONDS).times)


def best_rate(device, dtype, shape):
    """The highest FLOP/s over repeated products of one shape (m, k, n)."""
    m, k, n = shape
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return 2 * m * k * n / best_seconds("a @ b", a=a, b=b)


def best_bandwidth(device):
    """The highest bytes/s at which memory is read and written, of repeated copies."""
    source = torch.ones(COPIED[device], device=device, dtype=torch.uint8)
    return 2 * source.numel() / best_seconds("target.copy_(source)", source=source, target=torch.empty_like(source))


def measure(device):
    """{"float32": FLOP/s} and the rates of what else is in hardware: "tf32", "bfloat16" or, failing that, "float16"."""
    shapes = PRODUCTS if device != "cpu" else PRODUCTS[:2]
    dtype = autocast_dtype(device)
    formats = {"float32": (torch.float32, "highest"), str(dtype).removeprefix("torch."): (dtype, "highest")}
    if device == "cuda" and torch.cuda.is_tf32_supported():
        formats["tf32"] = (torch.float32, "high")
    rates = {}
    for name, (dtype, precision) in formats.items():
        torch.set_float32_matmul_precision(precision)
        rates[name] = max(best_rate(device, dtype, shape) for shape in shapes)
    return rates


def attention_kernel(device):
    """The kernel that torch chooses for attention from rung 6 on: GPT-2's heads of 64 in training; None on mps."""
    if device == "mps":
        return None
    # (B, nh, T, hs)
    q = torch.empty(4, 12, 1024, 64, device=device, dtype=autocast_dtype(device), requires_grad=True)
    return SDPBackend(torch._fused_sdp_choice(q, q, q, is_causal=True)).name


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    measured = {"rates": measure(device), "bytes_per_second": best_bandwidth(device),
                "attention": attention_kernel(device)}
    print(json.dumps(measured | describe(device), indent=2))


if __name__ == "__main__":
    main()
