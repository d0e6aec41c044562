"""How many tokens and seconds each rung needs to the same validation loss.

A faster step shows in its milliseconds, a better one only in where it gets to. The comparison is fair where all rungs
train the same size of model, on the same data, with the same batch and number of steps, and each with its own best
learning rate. The search tries four, every one twice the one before, and goes on until the best of them has a
neighbour on each side, or there are ten. Then all rungs run with several seeds, in interleaved rounds. The target is
the loss that the first rung ends with, in the median, rounded up to two digits.
"""
import math

from ladder.errors import UserError
from ladder.measure.runner import Job, command_for
from ladder.scripts.stages import load_script
from ladder.show.standings import best_of, last_val_loss, searched_by

MOST_RATES = 10  # that a search tries
SEED = 1337  # of the first round, and of the search for the learning rates


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
        if (same := searched_by(stage, chosen)).name in chosen:  # to rounding: one search for both
            chosen[stage.name] = chosen[same.name]
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
    names = [stage.name for stage in stages]
    searches = sum(searched_by(stage, names[:place]).name not in names[:place] for place, stage in enumerate(stages))
    return 4 * searches + seeds * len(stages)


