"""One rank of a DDP test: the script's own train() in float32, its weights written at the end. Started by torchrun.

    torchrun ... tests/ddp_rank.py FOLDER LABEL [flags of rung LABEL]

In bfloat16 a batch of 2B and two batches of B round differently, which would hide small errors; in float32 they agree
to the last digits. With DIE_RANK ("alone" without torchrun) and DIE_BATCH set, that rank kills itself when it fetches
its DIE_BATCH-th batch, with the signal DIE_WITH (SIGKILL); with DIE_ONCE, the name of a file, only while there is no
such file.
"""
import os
import signal
import sys
from pathlib import Path

import torch
from conftest import main, rung

script = rung(sys.argv[2])
script.autocast_dtype = lambda device: torch.float32  # autocast stays off
models, batches = [], []


class RecordedGPT(script.GPT):
    def __init__(self, config):
        super().__init__(config)
        models.append(self)


def died_before():
    marker = os.environ.get("DIE_ONCE")
    if marker is None:
        return False
    died = os.path.exists(marker)
    Path(marker).touch()
    return died


class DyingLoader(script.DataLoaderLite):
    def batch(self, i):
        if i in getattr(self, "prefetched", ()):
            return super().batch(i)
        batches.append(i)
        now = os.environ.get("RANK", "alone"), str(len(batches))
        if now == (os.environ.get("DIE_RANK"), os.environ.get("DIE_BATCH")) and not died_before():
            os.kill(os.getpid(), getattr(signal, os.environ.get("DIE_WITH", "SIGKILL")))
        return super().batch(i)


script.GPT, script.DataLoaderLite = RecordedGPT, DyingLoader
main(script, *sys.argv[3:])
torch.save(models[0].state_dict(), Path(sys.argv[1]) / f"rank{os.environ.get('RANK', 'alone')}.pt")
