"""How many tokens and seconds each rung needs to the same validation loss.

A faster step shows in its milliseconds, a better one only in where it gets to. The comparison is fair where all rungs
train the same size of model, on the same data, with the same batch and number of steps, and each with its own best
learning rate. The search tries four, every one twice the one before, and goes on until the best of them has a
neighbour on each side, or there are ten. Then all rungs run with several seeds, in interleaved rounds. The target is
the loss that the first rung ends with, in the median, rounded up to two digits.
"""
import math
import statistics
from dataclasses import dataclass

import pandas

from ladder.errors import UserError
from ladder.logs import read_log
from ladder.runner import Job, command_for, load_script
from ladder.stages import BY_NAME

MOST_RATES = 10  # that a search tries
SEED = 1337  # of the first round, and of the search for the learning rates
IN_THE_README = ["label", "file", "the one change"]  # of the standings; elsewhere "rung" says it
SAME_LOSS = {"rung_17_chunked_cross_entropy": "rung_16_gradient_checkpointing"}  # to rounding: one search for both


@dataclass
class Racer:
    """One rung: its learning rate, and (median, lowest, highest) over the seeds; inf where a run never got there."""

    name: str
    title: str
    rate: str  # as the flag has it
    ms: float
    val_loss: tuple  # at the end, in nats
    tokens: tuple  # to the target
    seconds: tuple


def rate_flag(stage):
    """The flag of the learning rate to search for, and its default: the matrices' where Muon has one of its own."""
    settings = load_script(stage).Settings
    return ("--muon-lr", settings.muon_lr) if hasattr(settings, "muon_lr") else ("--max-lr", settings.max_lr)


def check_race(stages, settings):
    """Refuse rungs without a validation."""
    for stage in stages:
        if not hasattr(load_script(stage).Settings, "val_every"):
            raise UserError(f"--race: {stage.file} does not validate; take rungs from 13 on, for example --rungs 16-24")
    if not settings.val_every:
        raise UserError("--val-every 0: --race compares validation losses; give the steps from one to the next")


def last_val_loss(path):
    """The last validation loss of a log; inf if there is none, or the run broke off or diverged."""
    try:
        run = read_log(path)
    except UserError:
        return math.inf
    loss = run.val_losses[-1] if run.complete and run.val_losses else math.inf
    return loss if math.isfinite(loss) else math.inf


def best_of(losses):
    """The learning rate with the lowest loss of {rate: loss}; of two that are equal, the higher."""
    return min(sorted(losses, reverse=True), key=losses.get)


def search(stage, flags, log_dir):
    """Yields the jobs that try a rung's learning rates, each when the ones before are done; returns the best rate."""
    flag, default = rate_flag(stage)
    losses, rates = {}, [default * 2**power for power in range(4)]
    while rates:
        for rate in rates:
            folder = log_dir / "sweep" / f"{rate:g}"
            yield Job(stage.name, command_for(stage, [*flags, flag, f"{rate:g}"], folder), folder)
            losses[rate] = last_val_loss(folder / f"{stage.name}.log")
        best = best_of(losses)
        if losses[best] == math.inf:
            raise UserError(f"--race: no run of {stage.file} ended with a loss; its logs are in {log_dir}/sweep")
        rates = [best / 2] if best == min(losses) else [2 * best] if best == max(losses) else []
        rates = rates if len(losses) < MOST_RATES else []
    return best


def race(stages, flags, log_dir, seeds):
    """Yields all jobs of a race, each when the ones before are done: the search first, then round by round."""
    chosen = {}  # the flags of each rung
    adamw = []  # what the first rungs found for AdamW, which has the embeddings where Muon has the matrices
    for stage in stages:
        if SAME_LOSS.get(stage.name) in chosen:
            chosen[stage.name] = chosen[SAME_LOSS[stage.name]]
            continue
        flag, _ = rate_flag(stage)
        fixed = adamw if flag == "--muon-lr" else []
        best = yield from search(stage, [*flags, *fixed, "--seed", str(SEED)], log_dir)
        chosen[stage.name] = [*fixed, flag, f"{best:g}"]
        adamw = adamw or ([flag, f"{best:g}"] if flag == "--max-lr" else [])
    for number in range(seeds):
        folder = log_dir / f"round_{number + 1}"
        for stage in stages:
            words = [*flags, *chosen[stage.name], "--seed", str(SEED + number)]
            yield Job(stage.name, command_for(stage, words, folder), folder)


def n_jobs(stages, seeds):
    """How many jobs a race has, if no search goes on beyond its four learning rates."""
    names = {stage.name for stage in stages}
    return sum(0 if SAME_LOSS.get(name) in names else 4 for name in names) + seeds * len(stages)


def read_sweep(folder):
    """{rung: {learning rate: last validation loss}} of the search in a folder of logs; {} without one."""
    sweep = {}
    for path in folder.glob("sweep/*/*.log"):
        sweep.setdefault(path.stem, {})[float(path.parent.name)] = last_val_loss(path)
    return {name: dict(sorted(losses.items())) for name, losses in sweep.items()}


def steps_to(run, loss):
    """Steps until the validation loss is `loss`, by a straight line between two validations; inf if it never is."""
    before = None
    for step, now in zip(run.val_steps, run.val_losses, strict=True):
        if now <= loss:
            return step if before is None else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
        before = step, now
    return math.inf


def spread(values):
    return statistics.median(values), min(values), max(values)


def finished(runs):
    """{rung: its runs that came to their end} of {rung: runs}; a race that was stopped has others, too."""
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
        losses = report.sweep.get(row.name) or report.sweep[SAME_LOSS[row.name]]
        racers.append(Racer(
            row.name, row.title, f"{best_of(losses):g}", ms,
            spread([run.val_losses[-1] for run in runs]),
            spread([n * run.tokens_per_step for n, run in zip(steps, runs, strict=True)]),
            spread([n * ms / 1000 for n in steps]),
        ))
    return target, racers


def curves(report):
    """Yields (name, steps, seconds, losses) of each rung's validations: the median over the seeds at each step."""
    for name, runs in finished(report.runs).items():
        ms = statistics.median(run.median_ms for run in runs)
        steps = runs[0].val_steps
        losses = [statistics.median(at_step) for at_step in zip(*(run.val_losses for run in runs), strict=True)]
        yield name, steps, [step * ms / 1000 for step in steps], losses


def race_texts(report):
    """(the standings as short texts: a DataFrame with a row per rung, the caption)."""
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
    return texts, (
        f"{target:.2f} is the median of the validation losses that rung {label} ends with, rounded up. Each rung has "
        f"the best of {n_rates} learning rates, searched with the first seed: Muon's where it has Muon (AdamW then "
        f"keeps rung {label}'s), else AdamW's. The numbers are the median of {n_seeds} seeds, the spreads their "
        "lowest and highest. Seconds are steps times the rung's ms/step: compiling and validating do not count.")


def print_race(report, console):
    """The standings in a terminal; a narrow one goes without the spreads."""
    from rich import box
    from rich.table import Table

    from ladder.report import WIDE

    texts, caption = race_texts(report)
    table = Table(title="To the same validation loss", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    texts = texts.drop(columns=[*IN_THE_README, *(("spread", "spread ") if console.width < WIDE else ())])
    for heading in texts:
        form = {"min_width": 16} if heading == "rung" else {"no_wrap": True, "justify": "right"}
        table.add_column("\n".join(heading.strip().rsplit(" ", 1)), **form)
    for row in texts.itertuples(index=False):
        table.add_row(*row)
    console.print(table)
