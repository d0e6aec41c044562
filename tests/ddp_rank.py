"""One rank of a DDP test: the script's own main() in float32, its weights written at the end. Started by torchrun.

    torchrun ... tests/ddp_rank.py FOLDER NUMBER [flags of rung NUMBER]

In bfloat16 a batch of 2B and two batches of B round differently, which would hide small errors; in float32 they agree
to the last digits. With DIE_RANK ("alone" without torchrun) and DIE_STEP set, that rank kills itself when it fetches
that batch; with DIE_ONCE, the name of a file, only while there is no such file.
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


def died_before():
    marker = os.environ.get("DIE_ONCE")
    if marker is None:
        return False
    died = os.path.exists(marker)
    Path(marker).touch()
    return died


class DyingLoader(ddp_run.DataLoaderLite):
    def next_batch(self):
        batches.append(None)
        now = os.environ.get("RANK", "alone"), str(len(batches))
        if now == (os.environ.get("DIE_RANK"), os.environ.get("DIE_STEP")) and not died_before():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().next_batch()


ddp_run.GPT, ddp_run.DataLoaderLite = RecordedGPT, DyingLoader
ddp_run.main(sys.argv[3:])
torch.save(models[0].state_dict(), Path(sys.argv[1]) / f"rank{os.environ.get('RANK', 'alone')}.pt")
