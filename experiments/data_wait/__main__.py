"""How long the device sits idle at the start of a step until its batch is there: gradient_accumulation
against prefetch.

    python -m experiments.data_wait [flags of the rungs]

Trains both rungs with the same flags, without compilation and with one micro-step per step, and prints the median time
from `optimizer.zero_grad()` to the first line of `GPT.forward`, the device synchronized at both ends. In between
gradient_accumulation reads its batch and copies it to the device; prefetch has it already. What prefetch spends on
the next batch comes later in the step, after the backward pass is launched: behind the GPU's work, but on a CPU in
its way.
"""
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from ladder.rungs.list import BY_LABEL, load_script


def median_wait(module, flags):
    """Median milliseconds from zero_grad() to the model's start over a run's steps, the first two left out."""
    args = module.parse_args(flags)
    args.compile_mode, args.total_batch = "none", args.B * args.T
    synchronize = torch.get_device_module(args.device).synchronize
    zero_grad, forward = torch.optim.AdamW.zero_grad, module.GPT.forward
    started, waits = [], []

    def timed_zero_grad(self, *args):
        zero_grad(self, *args)
        synchronize()
        started.append(time.perf_counter())

    def timed_forward(self, *args):
        synchronize()
        waits.append((time.perf_counter() - started[-1]) * 1000)
        return forward(self, *args)

    with (tempfile.TemporaryDirectory() as folder, mock.patch.object(torch.optim.AdamW, "zero_grad", timed_zero_grad),
          mock.patch.object(module.GPT, "forward", timed_forward)):
        args.log_dir = Path(folder)
        module.train(args)
    return statistics.median(waits[2:] or waits)


if __name__ == "__main__":
    labels = "gradient_accumulation", "prefetch"
    waits = {label: median_wait(load_script(BY_LABEL[label]), sys.argv[1:]) for label in labels}
    for label, ms in waits.items():
        print(f"{label}: {ms:.3f} ms")
