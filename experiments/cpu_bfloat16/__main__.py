"""What does a bfloat16 matrix product cost a CPU that has no instructions for it?

    python -m experiments.cpu_bfloat16

Times the MLP's product, (512, 768) @ (768, 3072), in float32 and in bfloat16, in turn, three rounds.
"""
import statistics
import time

import torch


def gflops(dtype, m=512, k=768, n=3072):
    """The rate of one product in GFLOP/s, after a product that warms up."""
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    a @ b
    started = time.perf_counter()
    a @ b
    return 2 * m * k * n / (time.perf_counter() - started) / 1e9


if __name__ == "__main__":
    print(f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    rounds = [(gflops(torch.float32), gflops(torch.bfloat16)) for _ in range(3)]
    for name, rates in zip(("float32", "bfloat16"), zip(*rounds, strict=True), strict=True):
        print(f"{name}: {statistics.median(rates):.1f} GFLOP/s ({min(rates):.1f} to {max(rates):.1f})")
