"""What do few tokens in a step do to a good learning rate?

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.batch_size data/bytes

The model of docs/own_text.md reads 393,216 characters of Tiny Shakespeare in steps of 768, 3,072 or 12,288, with
one learning rate after another for AdamW and half of it for Muon; two runs at a time, on one thread each. Shown is the
validation loss at the end. Finished runs are not repeated.
"""
import argparse
import os
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path

from experiments.own_text import val_losses
from ladder.rungs.list import BY_LABEL

TOKENS, T = 3 * 2**17, 256
BATCHES = [768, 3072, 12288]
RATES = [0.005, 0.01, 0.02, 0.04]


def last_loss(data, batch, rate):
    """The validation loss at the end of a run."""
    steps = TOKENS // batch
    flags = ["-B", batch // T, "-T", T, "--steps", steps,
             "--warmup-steps", steps // 50, "--max-lr", rate, "--muon-lr", rate / 2, "--dropout", 0,
             "--val-every", steps, "--val-sequences", 0, "--data", data]
    return val_losses(BY_LABEL["29"], flags, Path("logs/batch_size") / data.name / f"{batch}_{rate:g}")[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a folder of token files")
    data = parser.parse_args().data
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPool(2) as pool:
        losses = pool.starmap(last_loss, product([data], BATCHES, RATES))
    print("| tokens per step | " + " | ".join(f"{rate:g}" for rate in RATES) + " |\n| --: |" + " --: |" * len(RATES))
    for i, batch in enumerate(BATCHES):
        row = losses[i * len(RATES) : (i + 1) * len(RATES)]
        print(f"| {batch:,} | " + " | ".join(f"{loss:.3f}" for loss in row) + " |")
