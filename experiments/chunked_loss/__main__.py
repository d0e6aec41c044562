"""What does `chunked_cross_entropy`'s loss save, and what torch's own? Memory and time of a loss and its gradients.

    OMP_NUM_THREADS=1 python -m experiments.chunked_loss --tokens 16384 --width 384

All compute the same: all logits at once (--loss-chunk 0), `chunked_cross_entropy`'s chunks of 4,096 tokens, and
F.linear_cross_entropy's, new in torch 2.13. Each runs in a process of its own, under the rung's
autocast; its memory is the most that the process has had, less what it had before. Linux, on a CPU.
"""
import argparse
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from ladder.rungs.list import BY_LABEL, load_script

VOCAB_SIZE = 50304  # without padding, which F.linear_cross_entropy does not know
ROUNDS = 3
LOSSES = {
    "F.cross_entropy": lambda script, x, weight, targets: F.cross_entropy(
        F.linear(x, weight), targets),
    "chunked_cross_entropy": lambda script, x, weight, targets: script.ChunkedCrossEntropy.apply(
        x, weight, targets, VOCAB_SIZE, 4096),
    # autocast does not reach into it: it computes in the type that it is given
    "F.linear_cross_entropy, float32": lambda script, x, weight, targets: F.linear_cross_entropy(
        x, weight, targets, options=torch.nn.LinearCrossEntropyOptions()),
    "F.linear_cross_entropy, bfloat16": lambda script, x, weight, targets: F.linear_cross_entropy(
        x.bfloat16(), weight.bfloat16(), targets, options=torch.nn.LinearCrossEntropyOptions()),
}


def gigabytes(field):
    """VmRSS or VmHWM of this process: what it has, or the most that it has had."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) / 1e9


def measure(name, n_tokens, n_embd):
    """Print the loss, the memory and the times of one of LOSSES."""
    script = load_script(BY_LABEL["chunked_cross_entropy"])
    dtype = script.autocast_dtype("cpu")
    torch.manual_seed(0)
    x = torch.randn(n_tokens, n_embd, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(VOCAB_SIZE, n_embd))
    targets = torch.randint(0, VOCAB_SIZE, (n_tokens,))
    before = gigabytes("VmRSS")
    seconds = []
    for _ in range(ROUNDS + 1):  # the first warms up
        x.grad = weight.grad = None
        started = time.perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = LOSSES[name](script, x, weight, targets)
        loss.backward()
        seconds.append(time.perf_counter() - started)
    rest = seconds[1:]
    times = f"{statistics.median(rest):.2f} s ({min(rest):.2f} to {max(rest):.2f})"
    memory = gigabytes("VmHWM") - before
    print(f"{name}: {memory:.2f} GB, {times}, loss {loss.item():.4f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--only", choices=LOSSES, help="one of the losses, in this process")
    args = parser.parse_args()
    if args.only:
        measure(args.only, args.tokens, args.width)
        return
    print(f"{args.tokens} tokens x {args.width} -> {VOCAB_SIZE}, {ROUNDS} rounds", flush=True)
    for name in LOSSES:
        command = [sys.executable, "-m", "experiments.chunked_loss", *sys.argv[1:], "--only", name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
