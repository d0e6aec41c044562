"""What do the scripts of beyond/small_text/ bring, on a text that a small model memorizes and on one that it does not?

    U=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    curl -sL $U | head -c 80000 > small.txt
    python data/prepare.py --text small.txt --tokenizer bytes --out data/small
    python -m experiments.python_corpus docstrings.jsonl --docstrings
    python data/prepare.py --text docstrings.jsonl --tokenizer bytes --out data/docstrings
    python -m experiments.own_text data/small data/docstrings --png experiments/own_text/losses.png

For each text the two learning rates are searched with `zero_init` and shared by all rungs; two rates of dropout are
tried. Every rung is trained with three seeds, two runs at a time on one thread each. "last" is the validation loss at
the end, "lowest" that of the best validation, which `best_checkpoint` keeps. Finished runs are not repeated.
--png draws losses.
"""
import argparse
import os
import statistics
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path

from experiments.runs import finished
from ladder.rungs.list import BY_LABEL

EVERY = 100  # steps from one validation to the next
FLAGS = (f"--model 4x4x128 -B 6 -T 256 --steps 1100 --val-every {EVERY} "
         "--val-sequences 256 --warmup-steps 20").split()
RATES = list(product((0.005, 0.01), (0.005, 0.01)))  # AdamW's, Muon's
BASE = "zero_init"
ROWS = {  # what it is: (rung, its flags)
    BASE: (BASE, []),
    "shuffled windows": ("shuffled_windows", []),
    "dropout 0.1": ("dropout", ["--dropout", "0.1"]),
    "dropout 0.2": ("dropout", ["--dropout", "0.2"]),
    "documents apart, no dropout": ("documents_apart", ["--dropout", "0"]),
}
SEEDS = [1337, 1338, 1339]


def val_losses(row, data, rates, seed, out):
    """The validation losses of a run."""
    label, flags = ROWS[row]
    flags = [*FLAGS, "--data", data, "--max-lr", rates[0], "--muon-lr", rates[1], *flags, "--seed", seed]
    folder = out / "{}_{:g}_{:g}_{}".format(row.replace(" ", "_"), *rates, seed)
    return finished(BY_LABEL[label], flags, folder).val_losses


def search(data, out, pool):
    """The pair of RATES with which `zero_init`'s lowest loss is lowest."""
    runs = pool.starmap(val_losses, [(BASE, data, rates, SEEDS[0], out) for rates in RATES])
    lowest = dict(zip(RATES, map(min, runs), strict=True))
    print(f"\n{data}, lowest loss by AdamW's and Muon's rate: "
          + ", ".join("{:g} {:g}: {:.3f}".format(*rates, loss) for rates, loss in lowest.items()))
    return min(lowest, key=lowest.get)


def train_all(data, rates, out, pool):
    """{row: [the validation losses of a seed, ...]}"""
    jobs = [(row, data, rates, seed, out) for row in ROWS for seed in SEEDS]
    runs = pool.starmap(val_losses, jobs)
    return {row: runs[i * len(SEEDS) : (i + 1) * len(SEEDS)] for i, row in enumerate(ROWS)}


def spread(numbers, sign=""):
    """Their median, lowest and highest."""
    return f"{statistics.median(numbers):{sign}.3f} ({min(numbers):{sign}.3f} to {max(numbers):{sign}.3f})"


def table(found):
    """A line for each row of {row: [losses of a seed, ...]}: its last and lowest losses, and these less BASE's."""
    lines = []
    for row, seeds in found.items():
        last, lowest = [losses[-1] for losses in seeds], [min(losses) for losses in seeds]
        less = [loss - min(base) for loss, base in zip(lowest, found[BASE], strict=True)]
        lines.append(f"| {row} | {spread(last)} | {spread(lowest)} | {spread(less, '+')} |")
    return lines


def draw(found, path):
    """The losses of {text: {row: [losses of a seed, ...]}}: the median over the seeds, and their range."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(5 * len(found), 4), squeeze=False, layout="constrained")
    for panel, (text, rows) in zip(panels[0], found.items(), strict=True):
        for row, seeds in rows.items():
            at_once = list(zip(*seeds, strict=True))  # the seeds' losses of one validation after another
            steps = [EVERY * (i + 1) for i in range(len(at_once))]
            line, = panel.plot(steps, [statistics.median(losses) for losses in at_once], label=row)
            lowest, highest = list(map(min, at_once)), list(map(max, at_once))
            panel.fill_between(steps, lowest, highest, color=line.get_color(), alpha=0.2)
        panel.set(title=text, xlabel="step", ylabel="validation loss, nats per byte")
        panel.set_ylim(top=min(panel.get_ylim()[1], 2.5))
    panels[0][-1].legend()
    figure.savefig(path, dpi=100)
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="+", help="folders of token files")
    parser.add_argument("--out", type=Path, default=Path("logs/own_text"), help="default: %(default)s")
    parser.add_argument("--png", type=Path, help="draw the losses into this file")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {}
    with ThreadPool(2) as pool:
        for data in args.data:
            out = args.out / data.name
            rates = search(data, out, pool)
            found[data.name] = train_all(data, rates, out, pool)
            print("| {:g} and {:g} | last | lowest | lowest, less zero_init's |".format(*rates))
            print("\n".join(["| --- | --: | --: | --: |", *table(found[data.name])]), flush=True)
    if args.png:
        draw(found, args.png)


if __name__ == "__main__":
    main()
