"""A race's standings: how many tokens and seconds each rung needs to reach the same validation loss.

The target is the median of the first rung's final losses, rounded up to two digits.
"""
import math
import statistics
from dataclasses import dataclass

import pandas

from ladder.errors import UserError
from ladder.scripts.stages import BY_LABEL, BY_NAME
from ladder.show.logs import read_log

FEWEST_STEPS = 50  # of a race: below, most of a run is warm-up
WIDE = 130  # characters of a terminal wide enough for all columns
IN_THE_README = ["label", "file", "the one change"]  # of the standings; elsewhere "rung" says it


@dataclass
class Racer:
    """One rung: its learning rate, and (median, lowest, highest) over the seeds; inf if a run never reached it."""

    name: str
    title: str
    rate: str  # as the flag has it
    ms: float
    val_loss: tuple  # at the end, in nats
    tokens: tuple  # to the target
    seconds: tuple


def last_val_loss(path):
    """The last validation loss of a log; inf if there is none, or the run stopped early or diverged."""
    try:
        run = read_log(path)
    except UserError:
        return math.inf
    loss = run.val_losses[-1] if run.complete and run.val_losses else math.inf
    return loss if math.isfinite(loss) else math.inf


def best_of(losses):
    """The learning rate with the lowest loss of {rate: loss}; of equals, the higher."""
    return min(sorted(losses, reverse=True), key=losses.get)


def read_sweep(folder):
    """{rung: {learning rate: last validation loss}} of the search in a folder of logs; {} without one."""
    sweep = {}
    for path in folder.glob("sweep/*/*.log"):
        sweep.setdefault(path.stem, {})[float(path.parent.name)] = last_val_loss(path)
    return {name: dict(sorted(losses.items())) for name, losses in sweep.items()}


def steps_to(run, loss):
    """Steps until the validation loss reaches `loss`, interpolated between two validations; inf if it never does."""
    before = None
    for step, now in zip(run.val_steps, run.val_losses, strict=True):
        if now <= loss:
            return step if before is None else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
        before = step, now
    return math.inf


def median_and_range(values):
    """(median, lowest, highest)."""
    return statistics.median(values), min(values), max(values)


def searched_by(stage, names):
    """The stage whose search gave `stage` its rates: the nearest of `names` with the same losses up to rounding."""
    while stage.name not in names and stage.same_losses is not None:
        stage = BY_LABEL[stage.before]
    return stage


def finished(runs):
    """{rung: its finished runs} of {rung: runs}; a race that was stopped has unfinished ones."""
    ended = {name: [run for run in rounds if run.complete and run.val_losses] for name, rounds in runs.items()}
    return {name: rounds for name, rounds in ended.items() if rounds}


def standings(report):
    """(the target, [Racer, ...]) of a report with a sweep. Seconds are steps times the rung's median step."""
    runs_of = finished(report.runs)
    ends = [run.val_losses[-1] for run in next(iter(runs_of.values()))]
    target = math.ceil(round(100 * statistics.median_high(ends), 6)) / 100  # half of them reach it
    racers = []
    for row in (row for row in report.rows if row.name in runs_of):
        runs = runs_of[row.name]
        steps = [steps_to(run, target) for run in runs]
        ms = statistics.median(run.median_ms for run in runs)
        losses = report.sweep[searched_by(BY_NAME[row.name], report.sweep).name]
        racers.append(Racer(
            row.name, row.title, f"{best_of(losses):g}", ms,
            median_and_range([run.val_losses[-1] for run in runs]),
            median_and_range([n * run.tokens_per_step for n, run in zip(steps, runs, strict=True)]),
            median_and_range([n * ms / 1000 for n in steps]),
        ))
    return target, racers


def doubts(report, racers):
    """Yields the reasons to doubt the learning rates of a race, as short clauses."""
    by_name, steps = {racer.name: racer for racer in racers}, finished(report.runs)[racers[0].name][0].steps[-1]
    if steps < FEWEST_STEPS:
        yield f"{steps} steps are too few to choose a learning rate, take {FEWEST_STEPS} or more"
    for name, losses in report.sweep.items():
        if name not in by_name:
            continue
        label, best = f"rung {BY_NAME[name].label}'s", best_of(losses)
        finite = list(filter(math.isfinite, losses.values()))
        _, low, high = by_name[name].val_loss
        if best in (min(losses), max(losses)):
            yield f"{label} best rate, {best:g}, is at the edge of those tried"
        if len(finite) == len(losses) and max(finite) - min(finite) <= high - low:
            yield f"{label} search is flat: its rates differ by no more than its seeds do"


def race_curves(report):
    """Yields (name, steps, seconds, losses) of each rung's validations: the median over the seeds at each step."""
    for name, runs in finished(report.runs).items():
        ms = statistics.median(run.median_ms for run in runs)
        steps = runs[0].val_steps
        losses = [statistics.median(at_step) for at_step in zip(*(run.val_losses for run in runs), strict=True)]
        yield name, steps, [step * ms / 1000 for step in steps], losses


def race_texts(report):
    """(the standings as short strings: a DataFrame with one row per rung, the caption)."""
    target, racers = standings(report)
    first, label = racers[0], BY_NAME[racers[0].name].label

    def of_three(values, pattern="{:,.0f}"):
        return [pattern.format(value) if math.isfinite(value) else "never" for value in values]

    def column(name, pattern="{:,.0f}"):
        """The median and the spread of each racer."""
        texts = [of_three(getattr(racer, name), pattern) for racer in racers]
        return [middle for middle, _, _ in texts], [f"{low}–{high}" for _, low, high in texts]

    losses, loss_spread = column("val_loss", "{:.3f}")
    tokens, _ = column("tokens")
    seconds, seconds_spread = column("seconds", "{:,.0f}" if first.seconds[0] >= 20 else "{:.1f}")
    shares = [racer.seconds[0] / first.seconds[0] for racer in racers]
    texts = pandas.DataFrame({
        "rung": [f"{BY_NAME[racer.name].label} {racer.title}" for racer in racers],
        "label": [BY_NAME[racer.name].label for racer in racers],
        "file": ["[`{0}`]({0})".format(BY_NAME[racer.name].file) for racer in racers],
        "the one change": [racer.title for racer in racers],
        "learning rate": [racer.rate for racer in racers],
        "ms/step": [f"{racer.ms:,.0f}" for racer in racers],
        "val loss": losses, "spread": loss_spread,
        f"tokens to {target:.2f}": tokens, "seconds": seconds, "spread ": seconds_spread,
        f"of rung {label}'s": [f"{share:.0%}" if math.isfinite(share) else "–" for share in shares],
    })
    n_seeds = len(finished(report.runs)[first.name])
    low, high = (f([len(losses) for losses in report.sweep.values()]) for f in (min, max))
    n_rates = f"{low}" if low == high else f"{low} to {high}"
    doubtful = "; ".join(doubts(report, racers))
    return texts, (
        f"{target:.2f} is the median of the validation losses that rung {label} ends with, rounded up. Each rung has "
        f"the best of {n_rates} learning rates, searched with the first seed: Muon's where it has Muon (AdamW then "
        f"keeps rung {label}'s), else AdamW's. The numbers are the median of {n_seeds} seeds, the spreads their "
        "lowest and highest. Seconds are steps times the rung's ms/step: compiling and validating do not count."
        + (f" Doubtful: {doubtful}." if doubtful else ""))


def print_race(report, console):
    """The standings in a terminal; a narrow one omits the spreads."""
    from rich import box
    from rich.table import Table

    texts, caption = race_texts(report)
    table = Table(title="To the same validation loss", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    texts = texts.drop(columns=[*IN_THE_README, *(("spread", "spread ") if console.width < WIDE else ())])
    for heading in texts:
        form = {"min_width": 16} if heading == "rung" else {"no_wrap": True, "justify": "right"}
        table.add_column("\n".join(heading.strip().rsplit(" ", 1)), **form)
    for row in texts.itertuples(index=False):
        table.add_row(*row)
    console.print(table)
