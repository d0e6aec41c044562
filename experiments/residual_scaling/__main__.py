"""Does scaling the residual projections at initialization (rung 4) lower the loss of GPT-2 (124M)?

    python -m experiments.residual_scaling --logs logs/residual_scaling [-T 256] [--model gpt2]    # trains, then prints
    python -m experiments.residual_scaling                                  # prints and draws the record, losses.csv

Rungs 3 and 4 with the same seeds, batches and learning rate, their own, in turn. What is compared is the mean training
loss of 25 steps after 25: four tests, with Holm's correction.
"""
import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pandas

from experiments.runs import finished
from ladder.files import write_whole
from ladder.records.significance import holm_effects, paired_effect
from ladder.rungs.list import BY_LABEL

HERE = Path(__file__).parent
RECORD = HERE / "losses.csv"
LABELS = ["3", "4"]
SEEDS, STEPS, WINDOW = 5, 100, 25


def train(logs, flags):
    """The losses as rows of label, seed, step, loss."""
    rows = []
    for seed in range(1, SEEDS + 1):
        for label in LABELS:
            words = ["--seed", seed, "--steps", STEPS, *flags]
            run = finished(BY_LABEL[label], words, logs / str(seed))
            rows += [{"rung": label, "seed": seed, "step": step, "loss": loss}
                     for step, loss in zip(run.steps, run.losses, strict=True)]
            print(f"rung {label}, seed {seed}: {run.losses[-1]:.3f}, {run.median_ms:.0f} ms a step", flush=True)
    return pandas.DataFrame(rows)


def window_effects(record):
    """{"1 to 25": the Effect of rung 4 on the mean loss of these steps}, corrected."""
    last = (record.step - 1) // WINDOW * WINDOW + WINDOW
    means = record.groupby([last, "rung", "seed"]).loss.mean()
    return holm_effects({f"{end - WINDOW + 1} to {end}": paired_effect(means[end]["3"], means[end]["4"])
                         for end in sorted(last.unique())})


def show(record):
    for steps, effect in window_effects(record).items():
        print(f"steps {steps}: {effect.mean:+.3f} nats (95 %: {effect.low:+.3f} to {effect.high:+.3f}), "
              f"p = {effect.p:.2g}")
    losses = record.pivot(index="step", columns=["rung", "seed"], values="loss")
    difference = (losses["4"] - losses["3"]).rolling(11, center=True).median()  # a single step may be 7 nats off
    figure, axes = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
    axes.axhline(0, color="0.6", linewidth=1)
    axes.plot(difference, color="C0", linewidth=1, alpha=0.6)
    axes.plot(difference.mean(axis=1), color="black", linewidth=2, label="mean of five seeds")
    axes.legend(frameon=False)
    axes.set(xlabel="step", ylabel="training loss, rung 4 less rung 3\n(nats, median of 11 steps)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "losses.png", dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] + " Other flags go to the scripts.",
                                     allow_abbrev=False)
    parser.add_argument("--logs", type=Path, help="train into this folder, and write losses.csv from it")
    args, flags = parser.parse_known_args()
    if args.logs:
        write_whole(RECORD, train(args.logs, flags or ["-B", "1", "-T", "256"]).to_csv(index=False))
    show(pandas.read_csv(RECORD, dtype={"rung": str}))


if __name__ == "__main__":
    main()
