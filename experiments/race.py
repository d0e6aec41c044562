"""How many tokens and seconds does each rung need to reach the same validation loss?

    python -m experiments.race logs/race --seeds 5 --jobs 2 --rungs validation,18-24 --data data/bytes \
        --model 4x4x128 -B 16 -T 64 --steps 600 --val-every 75 --val-sequences 1024

A faster step shows in its milliseconds, a better one only in the loss it reaches. For a fair comparison all rungs train
a model of the same size, on the same data, with the same batch and number of steps, each with its own best learning
rates: AdamW's, and Muon's where a rung has Muon. A race has three parts:

The search begins at the best rates of the rung before and tries half and twice of each, the other one fixed. It moves
to the best of all tried and repeats that, until no neighbor is better or MOST_RATES have been tried. Then all rungs run
with several seeds, in interleaved rounds. These two give losses, which do not depend on what else the machine does, so
that several scripts may run at once. The last part gives times: short runs of all rungs, in interleaved rounds, each
alone on the machine. The target is the median of the first rung's final losses, rounded up to two digits.

Rerun the same command to resume. At its end, or when it is stopped, race.csv has all that the logs say about the race,
so that they can go; race.json and race.png have the standings, and python -m ladder report shows them.
"""
import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from experiments.race_docs import races_picture
from experiments.race_record import FILE, RATES, last_val_loss, neighbors, read_logs, read_rates
from experiments.race_record import write_csv, write_standings
from ladder.count.memory import free_memory
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.jobs import MEMORY_SHARE
from ladder.measure.run import show_end
from ladder.measure.runner import (
    Job, Runner, check_flags, command_for, defaults, eager_flags, locked, settings_of, split_flags)
from ladder.rungs.choose import parse_rungs
from ladder.show import standings
from ladder.show.machine import read_machine
from ladder.show.plots import save
from ladder.show.report import build_report

MOST_RATES = 24  # that a search tries
SEED = 1337  # of the first round, and of the search for the learning rates
TIMINGS = 3  # rounds that measure the time of a step
TIMED_STEPS_ON_A_CPU, TIMED_STEPS = 30, 200


# ---- the runs --------------------------------------------------------------------------------------------------------


def default_rates(rung):
    """{flag: default} of the learning rates of a rung: AdamW's, and Muon's if it has Muon."""
    settings = defaults(rung)
    return {f"--{name.replace('_', '-')}": settings[name] for name in ("max_lr", "muon_lr") if name in settings}


def check_race(rungs, flags):
    """Refuse rungs that do not validate, and flags that the race sets itself."""
    for flag in ("--max-lr", "--muon-lr", "--seed"):
        if split_flags(flags, flag)[0]:
            raise UserError(f"{flag}: a race sets it itself, for each rung and round; leave it out")
    for rung in rungs:
        if "val_every" not in defaults(rung):
            raise UserError(f"--rungs: {rung.file} does not validate; take others, for example validation,18-24")
    if not settings_of(rungs[0], flags).val_every:
        raise UserError("--val-every 0: a race compares validation losses; give the steps from one to the next")


def best_of(losses):
    """The learning rates with the lowest loss of {rates: loss}; of equals, the higher."""
    return min(sorted(losses, reverse=True), key=losses.get)


def search(rung, start, try_rates):
    """The best rates of a rung, by a pattern search from `start`. `try_rates` makes {rates: loss} of rates."""
    losses, best = {}, start
    while len(losses) < MOST_RATES:
        new = [rates for rates in (best, *neighbors(best)) if rates not in losses]
        if not new:
            break
        losses |= try_rates(new[: MOST_RATES - len(losses)])
        best = best_of(losses)
        if losses[best] == math.inf:
            raise UserError(f"no run of {rung.file} ended with a loss; its logs are in sweep/")
    return best


@dataclass
class Contest:
    """A race to be run into a folder; `run` runs a list of jobs, `at_once` at a time, until all have ended."""

    rungs: list
    flags: list
    folder: Path
    seeds: int
    run: Callable
    at_once: int = 1
    processes: int = 2
    search_steps: int | None = None  # the length of the runs of the search; None: that of the rounds

    def job(self, rung, folder, rates, seed, *more):
        words = ["--seed", str(seed), *more]
        for flag, rate in zip(default_rates(rung), rates, strict=True):
            words += [flag, f"{rate:g}"]
        return Job(rung.name, command_for(rung, [*self.flags, *words], folder, self.processes), folder)

    def run_shared(self, jobs):
        """Run the jobs, `at_once` at a time with an equal share of the cores and the memory."""
        if self.at_once > 1:
            threads = max(1, torch.get_num_threads() // self.at_once)
            memory = MEMORY_SHARE * free_memory("cpu") / self.at_once
            jobs = [replace(job, env={"OMP_NUM_THREADS": str(threads)}, memory=memory) for job in jobs]
        self.run(jobs, self.at_once)

    def try_rates(self, rung, new):
        """{rates: final validation loss}, with the first seed and no other validation."""
        steps = str(self.search_steps or settings_of(rung, self.flags).steps)
        folders = {rates: self.folder / "sweep" / standings.show_rates(rates, "_") for rates in new}
        self.run_shared([self.job(rung, folder, rates, SEED, "--steps", steps, "--val-every", steps)
                         for rates, folder in folders.items()])
        return {rates: last_val_loss(folder / f"{rung.name}.log") for rates, folder in folders.items()}

    def search_all(self):
        """{rung: its best rates}, of a race that is resumed those that it has found already."""
        chosen, last = read_rates(self.folder), {}  # last: {flag: the rate that the last search found}
        for rung in self.rungs:
            known = default_rates(rung)
            start = tuple(last.get(flag, rate) for flag, rate in known.items())
            if rung.name not in chosen:
                chosen[rung.name] = search(rung, start, lambda new, rung=rung: self.try_rates(rung, new))
                write_whole(self.folder / RATES, json.dumps(chosen))
            last |= zip(known, chosen[rung.name], strict=True)
        return chosen

    def race(self, timed=True):
        """The search, the rounds, the timing."""
        chosen = self.search_all()
        rounds = []
        for number in range(self.seeds):
            folder = self.folder / f"round_{number + 1}"
            rounds += [self.job(rung, folder, chosen[rung.name], SEED + number) for rung in self.rungs]
        self.run_shared(rounds)
        if timed:
            self.run(self.timings(chosen))

    def timings(self, chosen):
        """The jobs that measure the time of a step."""
        settings, jobs = settings_of(self.rungs[0], self.flags), []
        most = TIMED_STEPS_ON_A_CPU if settings.device == "cpu" else TIMED_STEPS
        more = ["--steps", str(min(settings.steps, most)), "--val-every", "0"]
        for number in range(TIMINGS):
            folder = self.folder / "timing" / f"round_{number + 1}"
            jobs += [self.job(rung, folder, chosen[rung.name], SEED, *more) for rung in self.rungs]
        return jobs


def n_jobs(rungs, seeds):
    """How many jobs a race has at least: if no search goes on from where it begins."""
    return sum(1 + 2 * len(default_rates(rung)) for rung in rungs) + (seeds + TIMINGS) * len(rungs)


# ---- the command -----------------------------------------------------------------------------------------------------


def keep(folder):
    """Write what has ended: race.csv and, with a round, race.json and race.png; why other logs do not count."""
    record, skipped = read_logs(folder)
    if len(record.points):
        write_csv(record, folder / FILE)
    if record.rungs:
        write_standings(record, folder / standings.FILE)
        save(races_picture([build_report(folder)]), folder / "race.png")
    return skipped


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] + " Other flags go to the scripts.")
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("--rungs", required=True, help="for example validation,18-24; they must validate")
    parser.add_argument("--seeds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time, each on its share of the cores; "
                        "the timing always runs one (default: %(default)s)")
    parser.add_argument("--search-steps", type=int, help="the length of the searches' runs (default: --steps)")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds of a run (default: %(default)s)")
    args, flags = parser.parse_known_args(argv)
    console, rungs = Console(highlight=False, markup=False), parse_rungs(args.rungs)
    check_race(rungs, flags)
    settings = check_flags(rungs, flags)
    flags = eager_flags(rungs, flags, settings.device, console)
    known = read_machine(args.logs).get("arguments")
    if known not in (None, argv):
        raise UserError(f"{args.logs}: holds the race of other arguments, {' '.join(known)}; give these to resume it")
    runner = Runner(settings.device, args.logs, args.time_limit, console, True, n_jobs(rungs, args.seeds))
    with locked(args.logs, resume=known is not None, flag="LOGS"):
        try:
            with runner:
                runner.measure_machine(arguments=argv)
                Contest(rungs, flags, args.logs, args.seeds, runner.run, args.jobs,
                        search_steps=args.search_steps).race()
                runner.measure_machine()
        finally:
            for reason in keep(args.logs):
                console.print(f"! skipped: {reason}", soft_wrap=True)
    show_end(runner, console)
    return 1 if runner.failed() else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; rerun the same command to resume")
