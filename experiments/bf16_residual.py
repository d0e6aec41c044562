"""What does the residual stream in bfloat16 do to the loss?

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.bf16_residual logs/bf16_residual

Rungs 10 and 35 with 24 narrow layers, whose 48 branches the stream adds up, and five seeds, fixed beforehand: eagerly,
in bfloat16, which a CPU needs AVX512-BF16 for. A run's loss is the mean of its last 50 steps; with one seed both rungs
start from the same weights and see the same batches. Losses do not depend on what else the machine does. Finished runs
are not repeated. The learning rate was the best of 5e-4, 1e-3 and 2e-3 for rung 10 at -B 8, with another seed.
"""
import argparse
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

from ladder.rungs.list import BY_LABEL
from ladder.show.logs import read_log

FLAGS = "--data data/bytes --model 24x4x128 -B 2 -T 128 --steps 300 --max-lr 1e-3 --compile-mode none".split()
LABELS, SEEDS = ("10", "35"), (1, 2, 3, 4, 5)
COUNTED = 50  # steps, the last ones
AT_ONCE = 2


def loss_of(label, seed, logs):
    """The mean loss at the end of a run, which is trained unless its log is there."""
    rung, folder = BY_LABEL[label], logs / str(seed)
    path = folder / f"{rung.name}.log"
    if not path.exists() or not read_log(path).complete:
        command = [sys.executable, rung.path, *FLAGS, "--seed", str(seed), "--log-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    loss = np.mean(read_log(path).losses[-COUNTED:])
    print(f"seed {seed}, rung {label}: {loss:.4f}", flush=True)
    return loss


def main(logs):
    runs = [(label, seed, logs) for seed in SEEDS for label in LABELS]
    with ThreadPool(AT_ONCE) as pool:
        losses = np.reshape(pool.starmap(loss_of, runs, chunksize=1), (len(SEEDS), len(LABELS)))
    before, after = losses.T
    found = ttest_rel(after, before)
    low, high = found.confidence_interval(0.95)
    print(f"35 - 10: {np.mean(after - before):+.4f} nats (95 %: {low:+.4f} to {high:+.4f}), p = {found.pvalue:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    main(parser.parse_args().logs)
