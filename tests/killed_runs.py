"""Train with a rung, killed at random moments and resumed until it is done, over and over. Prints what happened.

    python tests/killed_runs.py LABEL KILLS FOLDER [flags of the rung]

Every life is a fork of this process, which has imported torch already, so that none has to wait for that.
"""
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401 - the optimizer would import it in every life: two seconds
from conftest import main, rung

LONGEST_LIFE = 1.2  # seconds; a life needs about 0.3 until its first step, on a busy machine far more: so it grows
module = rung(sys.argv[1])


def live(flags, seconds):
    """One process; SIGKILL after `seconds`. Returns whether it came to its end before that."""
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        sys.stdout = open(os.devnull, "w")
        main(module, *flags)
        os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0, f"the run failed with status {status}"
            return True
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def one_run(folder, flags, seconds):
    """Lives until the run is done. Returns the number of kills, and of those that hit the writing of a checkpoint."""
    flags = [*flags, "--resume", "--log-dir", str(folder), "--checkpoint-dir", str(folder / "checkpoints"),
             "--save", str(folder / "model.pt")]
    folder.mkdir(parents=True)
    kills, half_written = 0, set()
    while not live(flags, seconds(kills)):
        kills += 1
        half_written |= {(path.name, path.stat().st_mtime_ns) for path in (folder / "checkpoints").glob("partial")}
    return kills, len(half_written)


wanted, folder, flags = int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
moments = random.Random(0)
one_run(folder / "whole", flags, lambda kills: 300)
rounds = kills = during_save = 0
while kills < wanted:
    rounds += 1
    counts = one_run(folder / f"killed_{rounds}", flags, lambda kills: moments.uniform(0.01, LONGEST_LIFE * 1.1**kills))
    kills, during_save = kills + counts[0], during_save + counts[1]
print(json.dumps({"rounds": rounds, "kills": kills, "during_save": during_save}))
