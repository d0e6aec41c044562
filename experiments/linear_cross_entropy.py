"""Rung 17's chunked cross-entropy beside torch's own (F.linear_cross_entropy, from torch 2.13): memory and time.

    python -m experiments.linear_cross_entropy

The output layer of a model of 12M parameters ("mini") on 16,384 tokens, forward and backward, in float32, eagerly, on
one thread; torch's with the same chunks, and with its own choice. Memory: the most that a process holds, less what it
holds before; each way in a process of its own. Time: the median of five interleaved rounds, and their range.
"""
import os
import statistics
import subprocess
import sys
import time

from ladder.scripts.stages import BY_LABEL, load_script

WAYS = ("rung 17, 4,096 tokens", "torch, 4,096 tokens", "torch, its own chunks", "all logits at once")
N, C, V = 16384, 192, 50257


def step(way):
    """(seconds, MB more than before) of a loss and its gradients."""
    import psutil
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(N, C, requires_grad=True)
    weight = (0.02 * torch.randn(V, C)).requires_grad_()
    targets = torch.randint(V, (N,))
    before = psutil.Process().memory_info().rss
    t0 = time.perf_counter()
    if way == WAYS[0]:
        loss = load_script(BY_LABEL["17"]).ChunkedCrossEntropy.apply(x, weight, targets, V, 4096)
    elif way == WAYS[3]:
        loss = F.cross_entropy(F.linear(x, weight), targets)
    else:
        size = {"batch_chunk_size": 4096} if way == WAYS[1] else {}
        options = torch.nn.LinearCrossEntropyOptions(**size)
        loss = F.linear_cross_entropy(x, weight, targets, options=options)
    loss.backward()
    seconds = time.perf_counter() - t0
    peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
    return seconds, (peak - before) / 1e6


def main():
    found = {way: [] for way in WAYS}
    for _ in range(5):
        for way in WAYS:
            command = [sys.executable, "-m", "experiments.linear_cross_entropy", way]
            done = subprocess.run(command, capture_output=True, text=True, check=True,
                                  env=os.environ | {"OMP_NUM_THREADS": "1"})
            found[way].append([float(word) for word in done.stdout.split()])
    for way, rounds in found.items():
        seconds, memory = zip(*rounds, strict=True)
        print(f"{way}: {statistics.median(memory):,.0f} MB, {statistics.median(seconds):.2f} s "
              f"({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*step(sys.argv[1]))
    else:
        main()
