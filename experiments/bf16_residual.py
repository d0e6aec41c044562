"""What does the residual stream in bfloat16 do to the loss?

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.bf16_residual logs/bf16_residual

Rungs 10 and 35 with 24 narrow layers, whose 48 branches the stream adds up: eagerly, in bfloat16, which a CPU needs
AVX512-BF16 for. Each rung has the best of three learning rates, found with a seed that is not tested; then five seeds,
fixed beforehand. A run's loss is the mean of its last 50 steps; with one seed both rungs start from the same weights
and see the same batches. Losses do not depend on what else the machine does. Finished runs are not repeated.
"""
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
from scipy.stats import ttest_rel

from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import read_log

FLAGS = "--data data/bytes --model 24x4x128 -B 8 -T 128 --steps 300 --warmup-steps 30 --compile-mode none".split()
LABELS, RATES, SEARCHED, SEEDS = ("10", "35"), ("5e-4", "1e-3", "2e-3"), 100, (1, 2, 3, 4, 5)
COUNTED = 50  # steps, the last ones
AT_ONCE = 2


def loss_of(label, rate, seed, logs):
    """The mean loss at the end of a run, which is trained unless its log is there."""
    stage, folder = BY_LABEL[label], logs / f"{rate}_{seed}"
    path = folder / f"{stage.name}.log"
    if not path.exists() or not read_log(path).complete:
        command = [sys.executable, stage.path, *FLAGS, "--max-lr", rate, "--seed", str(seed), "--log-dir", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    loss = np.mean(read_log(path).losses[-COUNTED:])
    print(f"rung {label}, --max-lr {rate}, seed {seed}: {loss:.4f}", flush=True)
    return loss


def main(logs):
    with ThreadPool(AT_ONCE) as pool:
        tried = [(label, rate, SEARCHED, logs) for rate in RATES for label in LABELS]
        searched = dict(zip(tried, pool.starmap(loss_of, tried), strict=True))
        best = {label: min((loss, rate) for (name, rate, *_), loss in searched.items() if name == label)[1]
                for label in LABELS}
        tested = [(label, best[label], seed, logs) for seed in SEEDS for label in LABELS]
        losses = np.reshape(pool.starmap(loss_of, tested, chunksize=1), (len(SEEDS), len(LABELS)))
    before, after = losses.T
    found = ttest_rel(after, before)
    low, high = found.confidence_interval(0.95)
    print(f"35 - 10: {np.mean(after - before):+.4f} nats (95 %: {low:+.4f} to {high:+.4f}), p = {found.pvalue:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
