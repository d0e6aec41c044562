"""How many tokens and seconds each rung needs to reach the same validation loss.

A faster step shows in its milliseconds, a better one only in the loss it reaches. For a fair comparison all rungs train
a model of the same size, on the same data, with the same batch and number of steps, each with its own best learning
rate. The search tries four rates, each twice the one before, and continues until the best has a neighbor on each side
or ten have been tried. Then all rungs run with several seeds, in interleaved rounds. The target is the median of the
first rung's final losses, rounded up to two digits.
"""
import math

from ladder.errors import UserError
from ladder.measure.runner import Job, command_for, split_flags
from ladder.scripts.stages import load_script
from ladder.show.standings import best_of, last_val_loss, read_sweep, searched_by

FIRST_RATES, MOST_RATES = 4, 10  # that a search tries
SEED = 1337  # of the first round, and of the search for the learning rates


def rate_flag(stage):
    """The flag of the learning rate to search for, and its default: Muon's if it has Muon."""
    settings = load_script(stage).Settings
    return ("--muon-lr", settings.muon_lr) if hasattr(settings, "muon_lr") else ("--max-lr", settings.max_lr)


def check_race(stages, settings, flags):
    """Refuse rungs that do not validate, and flags that the race sets itself."""
    for flag in ("--max-lr", "--muon-lr", "--seed"):
        if split_flags(flags, flag)[0]:
            raise UserError(f"{flag}: --race sets it itself, for each rung and round; leave it out")
    for stage in stages:
        if not hasattr(load_script(stage).Settings, "val_every"):
            raise UserError(f"--race: {stage.file} does not validate; take rungs from 13 on, for example --rungs 16-24")
    if not settings.val_every:
        raise UserError("--val-every 0: --race compares validation losses; give the steps from one to the next")


def first_rates(stage):
    """The learning rates that the search for a rung's best one begins with."""
    _, default = rate_flag(stage)
    return [default * 2**power for power in range(FIRST_RATES)]


def search(stage, flags, log_dir, run, processes):
    """Run a rung with one learning rate after another; returns the best."""
    flag, _ = rate_flag(stage)
    losses, rates = {}, first_rates(stage)
    while rates:
        folders = {rate: log_dir / "sweep" / f"{rate:g}" for rate in rates}
        run([Job(stage.name, command_for(stage, [*flags, flag, f"{rate:g}"], folder, processes), folder)
             for rate, folder in folders.items()])
        losses |= {rate: last_val_loss(folder / f"{stage.name}.log") for rate, folder in folders.items()}
        best = best_of(losses)
        if losses[best] == math.inf:
            raise UserError(f"--race: no run of {stage.file} ended with a loss; its logs are in {log_dir}/sweep")
        rates = [best / 2] if best == min(losses) else [2 * best] if best == max(losses) else []
        rates = rates if len(losses) < MOST_RATES else []
    return best


def race(stages, flags, log_dir, seeds, run, processes=2):
    """Run a race: first the search, then the rounds. `run` runs a list of jobs and returns when they have ended."""
    chosen = {}  # the flags of each rung
    adamw = []  # what the first rungs found for AdamW, which keeps the embeddings when Muon takes the matrices
    for stage in stages:
        if (same := searched_by(stage, chosen)).name in chosen:  # same losses: one search for both
            chosen[stage.name] = chosen[same.name]
            continue
        flag, _ = rate_flag(stage)
        fixed = adamw if flag == "--muon-lr" else []
        best = search(stage, [*flags, *fixed, "--seed", str(SEED)], log_dir, run, processes)
        chosen[stage.name] = [*fixed, flag, f"{best:g}"]
        adamw = adamw or ([flag, f"{best:g}"] if flag == "--max-lr" else [])
    for number in range(seeds):
        folder = log_dir / f"round_{number + 1}"
        words = {stage: [*flags, *chosen[stage.name], "--seed", str(SEED + number)] for stage in stages}
        run([Job(stage.name, command_for(stage, words[stage], folder, processes), folder) for stage in stages])


def searching(stages):
    """The rungs that get a search of their own."""
    names = [stage.name for stage in stages]
    return [stage for place, stage in enumerate(stages) if searched_by(stage, names[:place]).name not in names[:place]]


def n_jobs(stages, seeds):
    """How many jobs a race has, if no search continues beyond its first learning rates."""
    return FIRST_RATES * len(searching(stages)) + seeds * len(stages)


def describe_race(stages, seeds):
    """The plan of a race, for the user, before it starts."""
    searches = searching(stages)
    starts = {}  # {"--max-lr 0.0006 to 0.0048": [rung, ...]}
    for stage in searches:
        rates = first_rates(stage)
        starts.setdefault(f"{rate_flag(stage)[0]} {rates[0]:g} to {rates[-1]:g}", []).append(stage.label)
    return (f"race: at least {n_jobs(stages, seeds)} runs: {FIRST_RATES} learning rates or more for each of "
            f"{len(searches)} rungs, then {seeds} seeds of {len(stages)} rungs.\nThe search begins with "
            + "; ".join(f"{rates} (rung {', '.join(labels)})" for rates, labels in starts.items()) + ".")


def search_progress(stages, log_dir):
    """How much of a race's search is done, in one line."""
    sweep = read_sweep(log_dir)
    done = {stage.label: sum(map(math.isfinite, sweep.get(stage.name, {}).values())) for stage in searching(stages)}
    return (f"the search for learning rates has finished {sum(done.values())} of at least {FIRST_RATES * len(done)} "
            f"runs ({', '.join(f'rung {label}: {count}' for label, count in done.items())})")
