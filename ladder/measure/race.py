"""How many tokens and seconds each rung needs to reach the same validation loss.

A faster step shows in its milliseconds, a better one only in the loss it reaches. For a fair comparison all rungs train
a model of the same size, on the same data, with the same batch and number of steps, each with its own best learning
rates: AdamW's, and Muon's where a rung has Muon. A race has three parts:

The search begins at the best rates of the rung before and tries half and twice of each, the other one fixed. It moves
to the best of all tried and repeats that, until no neighbor is better or MOST_RATES have been tried. Then all rungs run
with several seeds, in interleaved rounds. These two give losses, which do not depend on what else the machine does, so
that several scripts may run at once. The last part gives times: short runs of all rungs, in interleaved rounds, each
alone on the machine. The target is the median of the first rung's final losses, rounded up to two digits. At its end
race.csv has all that the logs say about it, so that they can go.
"""
import json
import math
from functools import partial

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.runner import Job, command_for, defaults, settings_of, split_flags
from ladder.show.race_table import FILE, RATES, best_of, last_val_loss, read_logs, read_rates, write_csv
from ladder.show.standings import neighbors, show_rates

MOST_RATES = 12  # that a search tries
SEED = 1337  # of the first round, and of the search for the learning rates
TIMINGS, TIMED_STEPS = 3, {"cpu": 30}  # rounds that measure the time of a step, and their length, elsewhere 200


def default_rates(stage):
    """{flag: default} of the learning rates of a rung: AdamW's, and Muon's if it has Muon."""
    settings = defaults(stage)
    return {f"--{name.replace('_', '-')}": settings[name] for name in ("max_lr", "muon_lr") if name in settings}


def check_race(stages, flags):
    """Refuse rungs that do not validate, and flags that the race sets itself."""
    for flag in ("--max-lr", "--muon-lr", "--seed"):
        if split_flags(flags, flag)[0]:
            raise UserError(f"{flag}: --race sets it itself, for each rung and round; leave it out")
    for stage in stages:
        if "val_every" not in defaults(stage):
            raise UserError(f"--race: {stage.file} does not validate; take rungs from 13 on, for example --rungs 16-24")
    if not settings_of(stages[0], flags).val_every:
        raise UserError("--val-every 0: --race compares validation losses; give the steps from one to the next")


def search(stage, start, try_rates):
    """The best rates of a rung, by a pattern search from `start`. `try_rates` makes {rates: loss} of rates."""
    losses, best = {}, start
    while new := [rates for rates in (best, *neighbors(best)) if rates not in losses][: MOST_RATES - len(losses)]:
        losses |= try_rates(new)
        best = best_of(losses)
        if losses[best] == math.inf:
            raise UserError(f"--race: no run of {stage.file} ended with a loss; its logs are in sweep/")
    return best


def race(stages, flags, log_dir, seeds, run, processes=2, at_once=1, timed=True, search_steps=None):
    """Run a race: the search, the rounds, the timing. `run` runs a list of jobs, and returns when they have ended.

    The search's runs are as long as the rounds, or have `search_steps`.
    """
    settings = settings_of(stages[0], flags)
    chosen, carried = read_rates(log_dir), {}  # {rung: its rates}; {flag: the last rate that a search found}

    def job(stage, folder, rates, *more):
        words = [word for flag, rate in zip(default_rates(stage), rates, strict=True) for word in (flag, f"{rate:g}")]
        return Job(stage.name, command_for(stage, [*flags, *words, *more], folder, processes), folder)

    def try_rates(stage, new):
        """{rates: final validation loss}, with the first seed and no other validation."""
        length = str(search_steps or settings.steps)
        more = ["--steps", length, "--val-every", length, "--seed", str(SEED)]
        folders = {rates: log_dir / "sweep" / show_rates(rates, "_") for rates in new}
        run([job(stage, folder, rates, *more) for rates, folder in folders.items()], at_once)
        return {rates: last_val_loss(folder / f"{stage.name}.log") for rates, folder in folders.items()}

    for stage in stages:
        start = default_rates(stage) | {flag: carried[flag] for flag in default_rates(stage) if flag in carried}
        if stage.name not in chosen:
            chosen[stage.name] = search(stage, tuple(start.values()), partial(try_rates, stage))
            write_whole(log_dir / RATES, json.dumps(chosen))
        carried |= zip(start, chosen[stage.name], strict=True)
    run([job(stage, log_dir / f"round_{n + 1}", chosen[stage.name], "--seed", str(SEED + n))
         for n in range(seeds) for stage in stages], at_once)
    timed_steps = min(settings.steps, TIMED_STEPS.get(settings.device, 200))
    more = ["--steps", str(timed_steps), "--val-every", "0", "--seed", str(SEED)]
    run([job(stage, log_dir / "timing" / f"round_{n + 1}", chosen[stage.name], *more)
         for n in range(TIMINGS * timed) for stage in stages])
    write_csv(read_logs(log_dir), log_dir / FILE)


def n_jobs(stages, seeds):
    """How many jobs a race has at least: if no search goes on from where it begins."""
    return sum(1 + 2 * len(default_rates(stage)) for stage in stages) + (seeds + TIMINGS) * len(stages)
