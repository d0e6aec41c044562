"""What do rungs 26 to 29 bring, on a text that a small model memorizes and on one that it does not?

    U=https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
    curl -sL $U | head -c 80000 > small.txt
    python data/prepare.py --text small.txt --tokenizer bytes --out data/small
    python -m experiments.python_corpus docstrings.jsonl --docstrings
    python data/prepare.py --text docstrings.jsonl --tokenizer bytes --out data/docstrings
    python -m experiments.own_text data/small data/docstrings

For each text the two learning rates are searched with rung 24 and shared by all rungs; two rates of dropout are
tried. Every rung is trained with three seeds, two runs at a time on one thread each. "last" is the validation loss at
the end, "lowest" that of the best validation, which rung 27 keeps. Finished runs are not repeated. --png draws losses.
"""
import argparse
import os
import statistics
import subprocess
import sys
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path

from ladder.rungs.list import BY_LABEL
from ladder.show.logs import read_log

EVERY = 100  # steps from one validation to the next
FLAGS = (f"--model 4x4x128 -B 6 -T 256 --steps 1100 --val-every {EVERY} "
         "--val-sequences 256 --warmup-steps 20").split()
RATES = list(product((0.005, 0.01), (0.005, 0.01)))  # AdamW's, Muon's
ROWS = {  # what it is: (rung, its flags)
    "24": ("24", []),
    "26 shuffled windows": ("26", []),
    "28 dropout 0.1": ("28", ["--dropout", "0.1"]),
    "28 dropout 0.2": ("28", ["--dropout", "0.2"]),
    "29 documents apart, no dropout": ("29", ["--dropout", "0"]),
}
SEEDS = [1337, 1338, 1339]


def val_losses(rung, flags, folder):
    """The validation losses of a run in `folder`, which is trained unless it is there."""
    path = folder / f"{rung.name}.log"
    if not path.exists() or not read_log(path).complete:
        words = [rung.path, *FLAGS, *flags, "--log-dir", folder]
        subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return read_log(path).val_losses


def compare(data, out, pool):
    """Search the rates, run all rows with all seeds, print the table; {row: [losses of a seed's validations, ...]}."""
    base = ["--data", data]
    rates = {pair: ["--max-lr", pair[0], "--muon-lr", pair[1]] for pair in RATES}
    found = pool.starmap(val_losses, [(BY_LABEL["24"], [*base, *rates[pair]], out / "{:g}_{:g}".format(*pair))
                                      for pair in RATES])
    lowest = {pair: min(losses) for pair, losses in zip(RATES, found, strict=True)}
    print(f"\n{data}, lowest loss by AdamW's and Muon's rate: "
          + ", ".join("{:g} {:g}: {:.3f}".format(*pair, loss) for pair, loss in lowest.items()))
    best = rates[min(lowest, key=lowest.get)]
    jobs = [(BY_LABEL[label], [*base, *best, *flags, "--seed", seed], out / f"{name.replace(' ', '_')}_{seed}")
            for seed in SEEDS for name, (label, flags) in ROWS.items()]
    runs = dict(zip([(seed, name) for seed in SEEDS for name in ROWS], pool.starmap(val_losses, jobs), strict=True))
    print(f"| {' '.join(map(str, best))} | last | lowest | lowest, less rung 24's |\n| --- | --: | --: | --: |")
    for name in ROWS:
        last, low = ([pick(runs[seed, name]) for seed in SEEDS] for pick in (lambda losses: losses[-1], min))
        less = [loss - min(runs[seed, "24"]) for loss, seed in zip(low, SEEDS, strict=True)]
        print(f"| {name} | " + " | ".join(f"{statistics.median(x):{sign}.3f} ({min(x):{sign}.3f} to {max(x):{sign}.3f})"
                                          for x, sign in ((last, ""), (low, ""), (less, "+"))) + " |", flush=True)
    return {name: [runs[seed, name] for seed in SEEDS] for name in ROWS}


def draw(found, path):
    """The losses of {text: {row: [losses of a seed, ...]}}: the median over the seeds, and their range."""
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(5 * len(found), 4), squeeze=False, layout="constrained")
    for panel, (text, rows) in zip(panels[0], found.items(), strict=True):
        for name, seeds in rows.items():
            steps = [EVERY * (i + 1) for i in range(len(seeds[0]))]
            line, = panel.plot(steps, list(map(statistics.median, zip(*seeds, strict=True))), label=name)
            panel.fill_between(steps, *([pick(x) for x in zip(*seeds, strict=True)] for pick in (min, max)),
                               color=line.get_color(), alpha=0.2)
        panel.set(title=text, xlabel="step", ylabel="validation loss, nats per byte")
        panel.set_ylim(top=min(panel.get_ylim()[1], 2.5))
    panels[0][-1].legend()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="+", help="folders of token files")
    parser.add_argument("--out", type=Path, default=Path("logs/own_text"), help="default: %(default)s")
    parser.add_argument("--png", type=Path, help="draw the losses into this file")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPool(2) as pool:
        found = {data.name: compare(data, args.out / data.name, pool) for data in args.data}
    if args.png:
        draw(found, args.png)
