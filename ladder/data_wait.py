"""How long a step waits for its data: from asking for a batch to the first line of the model.

    python -m ladder.data_wait [flags of the scripts]

Runs rung 11 (the batch is fetched when it is needed) and rung 12 (it is there already) with the same flags, without
compilation, and prints the median wait of a micro-step in milliseconds for each. The wait is what Python and the device
spend before the model can begin: the device is waited for at both ends. What rung 12 reads ahead is not in it; on a GPU
that hides behind the model's own work, on a CPU it takes its time elsewhere in the step.
"""
import contextlib
import io
import statistics
import sys
import tempfile
import time

import torch

from ladder.runner import load_script
from ladder.stages import STAGES

RUNGS = [stage for stage in STAGES if stage.name in ("speedup_11_grad_accum", "speedup_12_device_data")]


def median_wait(module, flags):
    """Median milliseconds between a rung's call for a batch and its model's start, the first two steps left out."""
    device = module.parse_args(flags).device
    synchronize = torch.get_device_module(device).synchronize
    next_batch, forward = module.DataLoaderLite.next_batch, module.GPT.forward
    asked, waits = [], []

    def timed_next_batch(self):
        synchronize()
        asked.append(time.perf_counter())
        return next_batch(self)

    def timed_forward(self, *args):
        synchronize()
        waits.append((time.perf_counter() - asked[-1]) * 1000)
        return forward(self, *args)

    module.DataLoaderLite.next_batch, module.GPT.forward = timed_next_batch, timed_forward
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        module.main([*flags, "--compile-mode", "none", "--log-dir", folder])
    micro_steps = len(waits) // module.parse_args(flags).steps
    return statistics.median(waits[min(2 * micro_steps, len(waits) - 1) :])


if __name__ == "__main__":
    for stage in RUNGS:
        print(f"{stage.name}: {median_wait(load_script(stage), sys.argv[1:]):.3f} ms a micro-step")
