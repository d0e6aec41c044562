"""How long a step waits for its batch: from the start of its work to the first line of the model.

    python experiments/data_wait.py [flags of the scripts]

Runs rung 11 (the batch is fetched when it is needed) and rung 12 (it is there already) with the same flags, one
micro-step a step, without compilation, and prints the median wait in milliseconds for each: what Python and the device
spend between the end of `optimizer.zero_grad()` and the model, with the device waited for at both ends. The batch that
rung 12 fetches ahead is not in it; on a GPU that hides behind the work of the model, on a CPU it takes its time
elsewhere in the step.
"""
import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from ladder.runner import load_script  # noqa: E402
from ladder.stages import BY_LABEL  # noqa: E402


def median_wait(module, flags):
    """Median milliseconds that a rung's steps wait for their batch, the first two steps left out."""
    settings = module.parse_settings(flags)
    synchronize = torch.get_device_module(settings.device).synchronize
    zero_grad, forward = torch.optim.AdamW.zero_grad, module.GPT.forward
    started, waits = [], []

    def timed_zero_grad(self):
        zero_grad(self)
        synchronize()
        started.append(time.perf_counter())

    def timed_forward(self, *args):
        synchronize()
        waits.append((time.perf_counter() - started[-1]) * 1000)
        return forward(self, *args)

    flags = [*flags, "--total-batch", str(settings.B * settings.T), "--compile-mode", "none"]
    torch.optim.AdamW.zero_grad, module.GPT.forward = timed_zero_grad, timed_forward
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            module.main([*flags, "--log-dir", folder])
    finally:
        torch.optim.AdamW.zero_grad = zero_grad
    return statistics.median(waits[min(2, len(waits) - 1) :])


if __name__ == "__main__":
    for label in ("11", "12"):
        print(f"rung {label}: {median_wait(load_script(BY_LABEL[label]), sys.argv[1:]):.3f} ms a step")
