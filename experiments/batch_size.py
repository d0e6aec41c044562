"""What does a small --total-batch do to a good learning rate?

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.batch_size data/bytes

The model of docs/own_text.md reads 393,216 characters of Tiny Shakespeare in steps of 768, 3,072 or 12,288, with
one learning rate after another for AdamW and half of it for Muon; two runs at a time, on one thread each. Shown is the
validation loss at the end. Finished runs are not repeated.
"""
import argparse
import os
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import read_log

TOKENS, T = 3 * 2**17, 256
BATCHES = [768, 3072, 12288]
RATES = [0.005, 0.01, 0.02, 0.04]
STAGE = BY_LABEL["29"]


def last_loss(data, total_batch, rate, folder):
    """The validation loss at the end of a run in `folder`, which is made unless it is there."""
    path, steps = folder / f"{STAGE.name}.log", TOKENS // total_batch
    if not path.exists() or not read_log(path).complete:
        flags = ["--model", "4x4x128", "-B", total_batch // T, "-T", T, "--total-batch", total_batch, "--steps", steps,
                 "--warmup-steps", steps // 50, "--max-lr", rate, "--muon-lr", rate / 2, "--dropout", 0,
                 "--val-every", steps, "--val-sequences", 0, "--checkpoint-every", 0,
                 "--checkpoint-dir", folder / "checkpoints", "--data", data, "--log-dir", folder]
        subprocess.run([sys.executable, STAGE.path, *map(str, flags)], check=True, stdout=subprocess.DEVNULL)
    return read_log(path).val_losses[-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a folder of token files")
    parser.add_argument("--out", type=Path, default=Path("logs/batch_size"), help="default: %(default)s")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    jobs = [(args.data, total_batch, rate, args.out / args.data.name / f"{total_batch}_{rate:g}")
            for rate in RATES for total_batch in BATCHES]
    with ThreadPool(2) as pool:
        losses = dict(zip([job[1:3] for job in jobs], pool.starmap(last_loss, jobs), strict=True))
    print("| tokens per step | " + " | ".join(f"{rate:g}" for rate in RATES) + " |\n| --: |" + " --: |" * len(RATES))
    for total_batch in BATCHES:
        print(f"| {total_batch:,} | " + " | ".join(f"{losses[total_batch, rate]:.3f}" for rate in RATES) + " |")
