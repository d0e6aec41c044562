"""Is p uniform where two recipes are the same? `validation` against a copy that only adds 10,000 to its seed.

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.fair_comparison.null --logs logs/null       # trains; a contest that has ended is not repeated
    python -m experiments.fair_comparison.null                        # prints and draws null.csv

Each contest follows the rule of `python -m ladder compare`, its searches included, with a single block of width 32 and
short runs. All runs share this process, because importing torch takes longer than a run. Each contest has other seeds.
`older_rule.csv` holds 40 contests of `zero_init` by the rule before: five seeds, one pair of rates for all of them.
"""
import argparse
import contextlib
import io
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
import pandas
import torch
from scipy.stats import binomtest, kstest

from ladder.files import write_whole
from ladder.measure.contest import Contest
from ladder.records.recipes import effects, read_logs
from ladder.rungs.list import BY_LABEL, Rung, load_script

HERE = Path(__file__).parent
RECORD = HERE / "null.csv"
FLAGS = ["--data", "data/bytes", "--model", "1x1x32", "-B", "4", "-T", "32", "--steps", "40", "--val-every", "40",
         "--val-sequences", "16", "--compile-mode", "none", "--max-lr", "0.01", "--muon-lr", "0.01"]
SCRIPT, SEEDS, MOST_TRIES = "validation", 8, 24
SEED_LINE = "torch.manual_seed(args.seed"


def copy_of(rung, path):
    """A rung's script that adds 10,000 to its seed."""
    source = rung.path.read_text(encoding="utf-8")
    if source.count(SEED_LINE) != 1:
        raise ValueError(f"{rung.file}: sets its seed in another way; change SEED_LINE")
    path.write_text(source.replace(SEED_LINE, f"{SEED_LINE} + 10_000"), encoding="utf-8")
    return Rung("", str(path.resolve()), path.name, None, frozenset())


def first_seed(number):
    """What a contest adds to its seeds: a hundred contests, then the ten thousand that their copies add, and so on."""
    return 100 * number + 10_000 * (number // 100)


class InThisProcess:
    """Runs the jobs of one contest in this process, with seeds that no other contest has."""

    def __init__(self, scripts, number):
        self.by_name, self.number = {rung.name: load_script(rung) for rung in scripts}, number

    def run(self, jobs, at_once=1):
        for job in jobs:
            script = self.by_name[job.name]
            args = script.parse_args(job.command[2:])
            args.seed += first_seed(self.number)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):  # at NaN
                script.train(args)


def train(logs, contests):
    """A row for each contest: its effect, and the rates of both."""
    logs.mkdir(parents=True, exist_ok=True)
    base, rows = BY_LABEL[SCRIPT], []
    scripts = [base, copy_of(base, logs / "reseeded.py")]
    for number in range(contests):
        folder = logs / str(number)
        if not (folder / "row.json").exists():
            contest = Contest(scripts, FLAGS, folder, SEEDS, InThisProcess(scripts, number), most_tries=MOST_TRIES,
                              timings=0)
            contest.hold()
            record, _ = read_logs(folder)
            effect = effects(record.ends.val_loss, [(base.name, "reseeded")])["reseeded"]
            rates = [record.ends.loc[rung.name].max_lr for rung in scripts]
            tries = {len(record.tried(rung.name)) for rung in scripts}
            write_whole(folder / "row.json", json.dumps({
                "contest": number, "p": effect.p, "mean": effect.mean, "tries": max(tries),
                "max_lr_low": min(rates[0]), "max_lr_high": max(rates[0]),
                "copy_max_lr_low": min(rates[1]), "copy_max_lr_high": max(rates[1])}))
        rows.append(json.loads((folder / "row.json").read_text()))
        print(rows[-1], flush=True)
    return pandas.DataFrame(rows)


def show(record):
    """Print how flat p is, and draw its distribution."""
    p = numpy.sort(record.p.to_numpy())
    print(f"{len(p)} contests: Kolmogorov-Smirnov p = {kstest(p, 'uniform').pvalue:.2f}")
    for limit in (0.01, 0.05, 0.2, 0.5):
        n = int((p < limit).sum())
        low, high = binomtest(n, len(p)).proportion_ci()
        print(f"p < {limit}: {n} of {len(p)} (95 % interval of the share {low:.3f} to {high:.3f})")
    octaves = numpy.log2(record[["max_lr_low", "max_lr_high", "copy_max_lr_low", "copy_max_lr_high"]])
    apart = abs(octaves.iloc[:, :2].mean(axis=1) - octaves.iloc[:, 2:].mean(axis=1)) > 2
    for which, part in (("more", record[apart]), ("less", record[~apart])):
        print(f"{len(part)} contests whose rates are {which} than a factor of 4 apart: p < 0.05 in "
              f"{(part.p < 0.05).mean():.0%}, p < 0.2 in {(part.p < 0.2).mean():.0%}")
    difference = record["mean"]
    print(f"the mean difference is {difference.mean():+.4f} nats, its standard deviation {difference.std():.4f}")
    figure, axes = plt.subplots(figsize=(4.5, 3.6), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.6", linewidth=1, label="flat")
    axes.step([0, *p, 1], [*numpy.arange(len(p) + 1) / len(p), 1], where="post", label=f"{len(p)} contests")
    axes.set(xlabel="p of validation against itself, with other seeds", ylabel="share of contests with a p below")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(HERE / "null.png", dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=Path, help="train into this folder, and write null.csv from it")
    parser.add_argument("--contests", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.logs:
        write_whole(RECORD, train(args.logs, args.contests).to_csv(index=False))
    show(pandas.read_csv(RECORD))


if __name__ == "__main__":
    main()
