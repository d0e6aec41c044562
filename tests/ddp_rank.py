"""One rank of a DDP test: the script's own main() in float32, its weights written at the end. Started by torchrun.

    torchrun ... tests/ddp_rank.py FOLDER NUMBER [flags of rung NUMBER]

In bfloat16 a batch of 2B and two batches of B round differently, which would hide small errors; in float32 they agree
to the last digits. With DIE_RANK and DIE_STEP set, that rank kills itself when it fetches that batch.
"""
import os
import signal
import sys
from pathlib import Path

import torch
from conftest import rung

ddp_run = rung(int(sys.argv[2]))
ddp_run.autocast_dtype = lambda device: torch.float32  # which switches autocast off
models, batches = [], []


class RecordedGPT(ddp_run.GPT):
    def __init__(self, config):
        super().__init__(config)
        models.append(self)


class DyingLoader(ddp_run.DataLoaderLite):
    def next_batch(self):
        batches.append(None)
        if (os.environ.get("RANK"), str(len(batches))) == (os.environ.get("DIE_RANK"), os.environ.get("DIE_STEP")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().next_batch()


ddp_run.GPT, ddp_run.DataLoaderLite = RecordedGPT, DyingLoader
ddp_run.main(sys.argv[3:])
torch.save(models[0].state_dict(), Path(sys.argv[1]) / f"rank{os.environ.get('RANK', 'alone')}.pt")
