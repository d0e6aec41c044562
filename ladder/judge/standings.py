"""A race's standings: how many tokens and seconds each rung needs to reach the same validation loss.

The target is the median of the first rung's final losses, rounded up to two digits.
"""
import math
import statistics
import textwrap
import warnings
from dataclasses import dataclass

import pandas

from ladder.errors import UserError
from ladder.scripts.stages import BY_LABEL, BY_NAME
from ladder.show.logs import read_folder, read_log

FEWEST_STEPS = 50  # of a race: below, most of a run is warm-up
BEYOND_CHANCE = 0.01  # a p below it: the NanoGPT speedrun's rule for a new record
WIDE = 130  # characters of a terminal wide enough for all columns
IN_A_LINK = ["label", "the one change"]  # columns of the standings in Markdown; elsewhere "rung" says it


@dataclass
class Racer:
    """One rung: its learning rates, and (median, lowest, highest) over the seeds; inf if a run never reached it."""

    name: str
    title: str
    rates: tuple  # AdamW's, and Muon's if it has Muon
    ms: float
    val_loss: tuple  # at the end, in nats
    tokens: tuple  # to the target
    seconds: tuple
    percent: tuple  # the seconds as a share of the first rung's median
    p_loss: float | None  # of a paired t-test against the rung before in the table; None without two seeds
    p_tokens: float | None
    parameters: int
    peak_memory_gb: float | None


def show_rates(rates, between=", "):
    """(0.0048, 0.002) as "0.0048, 0.002"."""
    return between.join(f"{rate:g}" for rate in rates)


def last_val_loss(path):
    """The last validation loss of a log; inf if there is none, or the run stopped early or diverged."""
    try:
        run = read_log(path)
    except UserError:
        return math.inf
    loss = run.val_losses[-1] if run.complete and run.val_losses else math.inf
    return loss if math.isfinite(loss) else math.inf


def best_of(losses):
    """The learning rates with the lowest loss of {rates: loss}; of equals, the higher."""
    return min(sorted(losses, reverse=True), key=losses.get)


def neighbors(rates):
    """Half and twice of each learning rate, the others fixed."""
    return [(*rates[:i], rate * factor, *rates[i + 1 :]) for i, rate in enumerate(rates) for factor in (0.5, 2)]


def read_sweep(folder):
    """{rung: {its learning rates: last validation loss}} of the search in a folder of logs; {} without one."""
    sweep = {}
    for path in folder.glob("sweep/*/*.log"):
        sweep.setdefault(path.stem, {})[tuple(map(float, path.parent.name.split("_")))] = last_val_loss(path)
    return {name: dict(sorted(losses.items())) for name, losses in sweep.items()}


def read_timing(folder, names):
    """{rung: its runs that measured the time of a step} of a race; {} unless each of `names` has one that finished."""
    try:
        timed, _ = read_folder(folder / "timing")
    except UserError:
        return {}
    timed = {name: [run for run in rounds if run.complete] for name, rounds in timed.items()}
    return timed if all(timed.get(name) for name in names) else {}


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


def paired_p(values, others):
    """The p of a two-sided paired t-test: {round: value} of two rungs, by seed. None where it says nothing."""
    from scipy.stats import ttest_rel

    both = [number for number in values if number in others]
    with warnings.catch_warnings():  # about differences that are all the same
        warnings.simplefilter("ignore")
        p = ttest_rel([values[n] for n in both], [others[n] for n in both]).pvalue if len(both) > 1 else math.nan
    return float(p) if math.isfinite(p) else None


def standings(report):
    """(the target, [Racer, ...]) of a report with a sweep. Seconds are steps times the rung's median step."""
    runs_of = finished(report.runs)
    ends = [run.val_losses[-1] for run in next(iter(runs_of.values()))]
    target = math.ceil(round(100 * statistics.median_high(ends), 6)) / 100  # half of them reach it
    racers, before, first_seconds = [], None, None
    for row in (row for row in report.rows if row.name in runs_of):
        runs, ms = runs_of[row.name], step_ms(report, row.name)
        steps = [steps_to(run, target) for run in runs]
        seconds = median_and_range([n * ms / 1000 for n in steps])
        first_seconds = first_seconds or seconds[0]
        rounds = [run.path.parent.name for run in runs]  # each has a seed of its own, the same for all rungs
        losses = dict(zip(rounds, (run.val_losses[-1] for run in runs), strict=True))
        # A run that never gets there counts with its whole length: the test then sees less of a difference, not more.
        lengths = dict(zip(rounds, (min(n, run.steps[-1]) * run.tokens_per_step
                                    for n, run in zip(steps, runs, strict=True)), strict=True))
        same = before is None or searched_by(BY_NAME[row.name], [before[0]]).name == before[0]
        racers.append(Racer(
            row.name, row.title, best_of(report.sweep[searched_by(BY_NAME[row.name], report.sweep).name]), ms,
            median_and_range(losses.values()),
            median_and_range([n * run.tokens_per_step for n, run in zip(steps, runs, strict=True)]),
            seconds, tuple(100 * value / first_seconds for value in seconds),
            None if same else paired_p(losses, before[1]), None if same else paired_p(lengths, before[2]),
            int(runs[0].headers["parameters"].replace(",", "")), row.peak_memory_gb,
        ))
        before = row.name, losses, lengths
    return target, racers


def step_ms(report, name):
    """The time of a rung's step: the median of its timings, or of its rounds in a race without timings."""
    return statistics.median(run.median_ms for run in report.timing.get(name) or finished(report.runs)[name])


def doubts(report, racers):
    """Yields the reasons to doubt the learning rates of a race, as short clauses."""
    steps = finished(report.runs)[racers[0].name][0].steps[-1]
    if steps < FEWEST_STEPS:
        yield f"{steps} steps are too few to choose a learning rate, take {FEWEST_STEPS} or more"
    for racer in (racer for racer in racers if racer.name in report.sweep):
        label, losses = f"rung {BY_NAME[racer.name].label}'s", report.sweep[racer.name]
        finite = list(filter(math.isfinite, losses.values()))
        _, low, high = racer.val_loss
        if not losses.keys() >= set(neighbors(racer.rates)):
            yield f"{label} search ended after {len(losses)} tries, so {show_rates(racer.rates)} may not be its best"
        if len(finite) == len(losses) and max(finite) - min(finite) <= high - low:
            yield f"{label} search is flat: its rates differ by no more than its seeds do"


def race_curves(report):
    """Yields (name, steps, seconds, losses) of each rung's validations: the median over the seeds at each step."""
    for name, runs in finished(report.runs).items():
        ms, steps = step_ms(report, name), runs[0].val_steps
        losses = [statistics.median(at_step) for at_step in zip(*(run.val_losses for run in runs), strict=True)]
        yield name, steps, [step * ms / 1000 for step in steps], losses


def race_texts(report):
    """(the standings as short strings: a DataFrame with one row per rung, the caption)."""
    target, racers = standings(report)
    first, label = racers[0], BY_NAME[racers[0].name].label

    def column(name, pattern="{:,.0f}"):
        """Each racer's median, and in brackets its lowest and highest."""
        for values in (getattr(racer, name) for racer in racers):
            middle, low, high = (pattern.format(value) if math.isfinite(value) else "never" for value in values)
            yield middle if low == high else f"{middle} ({low}–{high})"

    def chance(p):
        return "–" if p is None else ("<0.001" if p < 0.001 else f"{p:.3f}") + "*" * (p < BEYOND_CHANCE)

    texts = pandas.DataFrame({
        "rung": [f"{BY_NAME[racer.name].label} {racer.title}" for racer in racers],
        "label": [BY_NAME[racer.name].label for racer in racers],
        "the one change": [f"[{racer.title}]({BY_NAME[racer.name].file})" for racer in racers],
        "learning rates": [show_rates(racer.rates) for racer in racers],
        "val loss": list(column("val_loss", "{:.3f}")), "p": [chance(racer.p_loss) for racer in racers],
        f"tokens to {target:.2f}": [text.split(" (")[0] for text in column("tokens")],
        "p ": [chance(racer.p_tokens) for racer in racers],
        "ms/step": [f"{racer.ms:,.0f}" if racer.ms >= 100 else f"{racer.ms:.1f}" for racer in racers],
        "seconds": [("{:,.0f}" if first.seconds[0] >= 20 else "{:.1f}").format(racer.seconds[0])
                    if math.isfinite(racer.seconds[0]) else "never" for racer in racers],
        f"% of rung {label}'s": list(column("percent", "{:.0f}")),
        "parameters": [f"{racer.parameters / 1e6:.2f}M" for racer in racers],
        "GB": [f"{racer.peak_memory_gb:.2f}" if racer.peak_memory_gb else "–" for racer in racers],
    })
    n_seeds = len(finished(report.runs)[first.name])
    low, high = (f([len(losses) for losses in report.sweep.values()]) for f in (min, max))
    n_tries = f"{low}" if low == high else f"{low} to {high}"
    n_timings = len(report.timing.get(first.name, []))
    timed = f"measured {n_timings} times, alone on the machine" if n_timings else "that of the same runs"
    doubtful = "; ".join(doubts(report, racers))
    return texts, (
        f"{target:.2f} is the median of the validation losses that rung {label} ends with, rounded up. Each rung has "
        f"the best learning rates (AdamW's, and Muon's if it has Muon) of {n_tries} tries with the first seed. The "
        f"numbers are the median of {n_seeds} seeds, and in brackets the lowest and highest. Tokens to the target are "
        f"interpolated between two validations; a run that is there at the first may have been sooner. Seconds are "
        f"steps times ms/step, {timed}: compiling and validating do not count."
        + f" p: how likely so large a difference from the row before would be by chance alone, a paired t-test over "
          f"the seeds; * marks p < {BEYOND_CHANCE}, the NanoGPT speedrun's rule. A run that never gets there counts "
          f"with all its tokens." * (n_seeds > 1)
        + f" Doubtful: {doubtful}." * bool(doubtful))


def print_race(report, console):
    """The standings in a terminal, without what print_table shows; a narrow one gets no ranges."""
    from rich import box
    from rich.table import Table

    texts, caption = race_texts(report)
    table = Table(title="To the same validation loss", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    texts = texts.drop(columns=[*IN_A_LINK, "ms/step", "parameters", "GB"])
    if console.width < WIDE:
        texts = texts.drop(columns="p ").replace({r" \(.*": "", ", ": ",\n"}, regex=True)
    for heading in texts:
        form = {"min_width": 16} if heading == "rung" else {"no_wrap": True, "justify": "right"}
        table.add_column(textwrap.fill(heading, 7, break_long_words=False), **form)
    for row in texts.itertuples(index=False):
        table.add_row(*row)
    console.print(table)
