"""Do learning rates that were found with a narrow model fit a wide one?

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.widths experiments/widths.csv --logs logs/widths     # trains
    python -m experiments.widths experiments/widths.csv                        # prints, draws experiments/widths.png

Rungs 24 and 34 with two layers of width 64, 128, 256 and 512. At each width both learning rates are searched as in a
race. (In the record, which is older, each search began at the best rates of the width before.) Then the models of width
256 and 512 train with several seeds, with their own best rates and with those found at width 128. Losses do not depend
on what else the machine does, so other work may run meanwhile. Rerun the second command to resume.
"""
import argparse
import itertools
import math
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas
from rich.console import Console

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.contest import SEED, Contest
from ladder.measure.runner import Runner
from ladder.records.recipes import TUNING_SEEDS, last_val_loss, read_logs
from ladder.records.significance import paired_effect
from ladder.rungs.list import BY_LABEL, ROOT
from ladder.show.plots import digest

WIDTHS = [64, 128, 256, 512]
FROM, TO = 128, [256, 512]  # the width whose rates are carried over, and those that they are tried at
STEPS = 200
FLAGS = ["--data", "data/bytes", "-B", "8", "-T", "128", "--steps", str(STEPS),
         "--val-every", str(STEPS), "--val-sequences", "256", "--compile-mode", "none",
         "--max-lr", "0.005", "--muon-lr", "0.004"]  # where the searches begin
RATES = [0.00125, 0.0025, 0.005, 0.01, 0.02]  # marked on the picture's axes
RUNGS = {"rung 24": "zero_init", "rung 34": "mup"}
COLORS = {"rung 24": "#31356e", "rung 34": "#d9822b"}


# ---- training ------------------------------------------------------------------------------------------------------

def train(logs, seeds, at_once):
    """Search at each width; train the wide models with their own rates and those of FROM. A row for each run."""
    rungs, rows, best = {BY_LABEL[label].name: BY_LABEL[label] for label in RUNGS.values()}, [], {}
    titles = dict(zip(rungs, RUNGS, strict=True))
    with Runner("cpu", logs, 3600, Console(), resume=True) as runner:
        for width in WIDTHS:  # every head has size 32
            folder, flags = logs / str(width), [*FLAGS, "--model", f"2x{width // 32}x{width}"]
            contest = Contest([*rungs.values()], flags, folder, seeds, runner.run, at_once)
            best[width] = contest.find_rates()
            for name, tried in read_logs(folder)[0].sweep.items():
                rows += [("search", titles[name], width, *rates, math.nan, loss) for rates, loss in tried.items()]
            for part, name, number in itertools.product(("own", "carried"), rungs, range(seeds if width in TO else 0)):
                rates = best[width if part == "own" else FROM][name]
                job = contest.job(rungs[name], folder / f"{part}_{number + 1}", rates, SEED + number)
                contest.run_shared([job])
                rows.append((part, titles[name], width, *rates, SEED + number, last_val_loss(job.log)))
    return pandas.DataFrame(rows, columns=["part", "rung", "width", "max_lr", "muon_lr", "seed", "val_loss"])


# ---- showing -------------------------------------------------------------------------------------------------------

def searched(record, rung, width):
    """{(AdamW's rate, Muon's): loss} of one search, and the best rates."""
    rows = record[(record.part == "search") & (record.rung == rung) & (record.width == width)]
    losses = {(row.max_lr, row.muon_lr): row.val_loss for row in rows.itertuples()}
    return losses, min(losses, key=losses.get)


def lowest_point(losses, best, place):
    """A rate's best value between the tried ones: the lowest point of the parabola through three of them."""
    half, twice = (tuple(rate * factor if i == place else rate for i, rate in enumerate(best)) for factor in (0.5, 2))
    below, at, above = (losses.get(rates, math.inf) for rates in (half, best, twice))
    if not all(map(math.isfinite, (below, at, above))):
        return best[place]
    return best[place] * 2 ** (0.5 * (below - above) / (below - 2 * at + above))


def best_rates(record, rung, place):
    """The best value of one of the two rates at each width."""
    found = []
    for width in WIDTHS:
        losses, best = searched(record, rung, width)
        found.append(lowest_point(losses, best, place))
    return found


def ends_of(record, rung, width, part):
    """The losses of the seeds that are tested, of a wide model with its own rates or with those carried over."""
    rows = record[(record.part == part) & (record.rung == rung) & (record.width == width)]
    rows = rows[~rows.seed.isin(TUNING_SEEDS)]
    return rows.sort_values("seed").val_loss.to_numpy()


def draw(record, path, seen):
    """The best rates against the width, and the losses of the wide models with those of width FROM."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    for place, (one, title) in enumerate(zip(axes, ("best AdamW rate", "best Muon rate"), strict=False)):
        for name in RUNGS:
            one.plot(WIDTHS, best_rates(record, name, place), "o-", color=COLORS[name], label=name)
        one.set(xscale="log", yscale="log", xlabel="n_embd")
        one.set_title(title, fontsize=9, loc="left")
        one.set_xticks(WIDTHS, WIDTHS)
        one.set_yticks(RATES, [f"{rate:g}" for rate in RATES])
        one.set_xticks([], minor=True)
        one.set_yticks([], minor=True)
        one.grid(color="0.92")
    axes[0].legend(frameon=False, fontsize=8)
    labels = []
    for width, name in itertools.product(TO, RUNGS):
        for offset, part, marker in ((-0.12, "own", "o"), (0.12, "carried", "x")):
            losses = ends_of(record, name, width, part)
            axes[2].plot(np.full(len(losses), len(labels) + offset), losses, marker, color=COLORS[name])
        labels.append(f"{name}\n{width}")
    axes[2].set_xticks(range(len(labels)), labels, fontsize=8)
    axes[2].set_xlim(-0.5, len(labels) - 0.5)
    axes[2].set_title(f"validation loss\no: its width's best rates, x: those of {FROM}", fontsize=9, loc="left")
    axes[2].grid(color="0.92", axis="y")
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150, metadata={"Digest": seen})
    plt.close(figure)
    print(path)


def compare(what, losses, others):
    """Print how far some losses are from others of the same seeds: the mean, its 95 % interval, and p."""
    effect = paired_effect(others, losses)
    print(f"{what}: {effect.mean:+.3f} ({effect.low:+.3f} to {effect.high:+.3f}; {effect.pairs} seeds, "
          f"p = {effect.p:.2g})")


def show(record):
    for name, width in itertools.product(RUNGS, WIDTHS):
        losses, best = searched(record, name, width)
        adamw, muon = (lowest_point(losses, best, place) for place in (0, 1))
        print(f"{name}, width {width}: {losses[best]:.3f} with {best[0]:g} and {best[1]:g} "
              f"({len(losses)} tried; between them {adamw:.4f} and {muon:.4f})")
    for width in TO:
        for name, part in itertools.product(RUNGS, ("own", "carried")):
            print(f"{name}, width {width}, {part} rates: "
                  + ", ".join(f"{loss:.3f}" for loss in ends_of(record, name, width, part)))
        for name in RUNGS:
            compare(f"{name}, width {width}, carried less own", ends_of(record, name, width, "carried"),
                    ends_of(record, name, width, "own"))
        for part in ("own", "carried"):
            compare(f"width {width}, {part}, rung 34 less rung 24", ends_of(record, "rung 34", width, part),
                    ends_of(record, "rung 24", width, part))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="a CSV file")
    parser.add_argument("--logs", type=Path, help="train into this folder, and write the record from it")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    args = parser.parse_args()
    if args.logs:
        write_whole(args.record, train(args.logs, args.seeds, args.jobs).to_csv(index=False))
    text = args.record.read_text(encoding="utf-8")
    record = pandas.read_csv(args.record)
    show(record)
    draw(record, ROOT / "experiments" / "widths.png", digest(text))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
