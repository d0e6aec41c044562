"""Which training recipe is better? A search for each one's learning rates, runs with several seeds, timed steps.

The rule, by which every comparison of recipes here is made:

1. The number of seeds is fixed beforehand. All scripts train with each seed, in interleaved rounds.
2. The learning rates of all are searched, with the same number of tries and as many seeds as are tested, others than
   these. Each search begins at the script's own rates and tries a quarter and four times of each, the others fixed. It
   moves to the try with the best mean over the seeds and repeats that until no neighbor is better, then with half and
   twice. The longest search sets the number of tries; the others spend the rest on finer steps.
3. Each tested seed trains with the rates that one seed of the search found: the lowest point of a parabola through that
   seed's tries within a factor of two of the best. So p holds that part of the search's luck that its seeds differ by.
4. Effect, interval and p come from one estimator: the mean over the seeds of the difference of the last validation
   losses, and the paired t-test of that mean.
5. Within a family, several scripts against one or a race's neighbors, p is Holm's, and the 99 % intervals hold for all
   at once. A star means p < 0.01 after that, with five seeds or more. A script that diverges with a seed is not tested.
6. Times are measured apart: short runs, alone on the machine, of the two scripts that are compared, in the order A B B
   A. Their ratio has an interval over these rounds.

p leaves three things out. The seeds of a search share the points that it tries. Rates found in short runs need not be
the best in longer ones (in the race on bytes that gave SwiGLU its star). And nothing is said about other sizes and
texts. With rates that are given, p is conditional on them. In older records one pair of rates served all seeds, so
their p is also conditional, and may be too low. experiments/README.md ("Is `compare` a fair test?") measures how often
p is small when a recipe is compared with itself.

Losses do not depend on what else the machine does, so that several scripts may run at once where no time is measured.
"""
import hashlib
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ladder.count.memory import free_memory
from ladder.errors import UserError
from ladder.files import new_folder, read_json, write_whole
from ladder.measure.fairness import check_fair, check_logs, check_scripts, known_flags
from ladder.measure.learning_rates import RATE_FLAGS, SEED, Search, rate_flags, tuning_seeds
from ladder.measure.processes import MEMORY_SHARE, Job
from ladder.measure.run_folder import locked
from ladder.measure.runner import Runner
from ladder.measure.script_flags import command_for, settings_of
from ladder.measure.this_machine import describe
from ladder.records.logs import THREADS_OF
from ladder.records.recipes import (
    CSV, FOLDERS, MOST_TRIES, RATES, last_val_loss, pairs_of, read_logs, read_rates, show_rates, write_csv)
from ladder.rungs.list import BY_NAME, Rung, find_rung

TIMINGS = 3  # of each pair of scripts that is compared, in the order A B B A
TIMED_STEPS_ON_A_CPU, TIMED_STEPS = 30, 200
SMALL = ["--model", "4x4x128", "-B", "16", "-T", "64", "--steps", "200", "--val-every", "20", "--val-sequences", "256",
         "--compile-mode", "none"]  # unless flags say otherwise: a run takes seconds on a CPU


@dataclass
class Contest:
    """A contest to be held in a folder."""

    scripts: list  # Rungs
    flags: list  # each script gets those it knows
    folder: Path
    seeds: int
    runner: object = None  # a Runner, of `open_contest`
    at_once: int = 1
    most_tries: int = MOST_TRIES  # 0: the rates that the flags name, or the scripts' own
    search_steps: int | None = None  # the length of the runs of the search; None: that of the rounds
    timings: int = TIMINGS
    against_first: bool = False  # else each script is compared with the one before
    env: dict = field(default_factory=dict)  # variables for all jobs
    searches: dict = field(default_factory=dict)  # {script: its Search}

    def settings(self, rung):
        return settings_of(rung, known_flags(rung, self.flags))

    def job(self, rung, folder, rates, seed, *more):
        words = ["--seed", str(seed), *more]
        for flag, rate in zip(rate_flags(rung), rates, strict=True):
            words += [flag, f"{rate:g}"]
        flags = [*known_flags(rung, self.flags), *words]
        return Job(rung.name, command_for(rung, flags, folder), folder, self.env)

    def run_shared(self, jobs):
        """Run the jobs, `at_once` at a time with an equal share of the cores and the memory."""
        if self.at_once > 1:
            threads = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // self.at_once))}
            memory = MEMORY_SHARE * free_memory("cpu") / self.at_once
            jobs = [replace(job, env=job.env | threads, memory=memory) for job in jobs]
        self.runner.run(jobs, self.at_once)
        check_logs([job.log for job in jobs])

    def try_rates(self, wanted):
        """Add the losses of {script: points} to its searches: means over their seeds, from one validation of each."""
        tries = []
        for rung, points in wanted.items():
            steps = str(self.search_steps or self.settings(rung).steps)
            for point in points:
                rates = self.searches[rung.name].rates(point)
                folder = self.folder / "sweep" / show_rates(rates, "_")
                jobs = {seed: self.job(rung, folder / str(seed), rates, seed, "--steps", steps, "--val-every", steps)
                        for seed in tuning_seeds(self.seeds)}
                tries.append((rung, point, jobs))
        all_jobs = [replace(job, is_try=True) for *_, jobs in tries for job in jobs.values()]
        self.runner.n_jobs += len(all_jobs)
        self.run_shared(all_jobs)
        for rung, point, jobs in tries:
            self.searches[rung.name].add(point, {seed: last_val_loss(job.log) for seed, job in jobs.items()})

    def search_until(self, most, finest):
        """Go on with all searches side by side, until each has as many tries as it may have, or none is wanted."""
        while True:
            wanted = {rung: self.searches[rung.name].wanted(most, finest) for rung in self.scripts}
            if not any(wanted.values()):
                return
            self.try_rates(wanted)
            for rung in self.scripts:
                if min(self.searches[rung.name].losses.values()) == math.inf:
                    raise UserError(f"{rung.called}: no run of it ended with a loss, as said above; correct it, or "
                                    f"give lower rates (logs: {self.folder}/sweep/)")

    def find_rates(self):
        """{script: its rates in each round}; a contest that is resumed keeps those that it has found."""
        chosen = read_rates(self.folder)
        if chosen:
            return chosen
        for rung in self.scripts:
            settings = vars(self.settings(rung))
            given = tuple(settings[name] for name in RATE_FLAGS if name in settings)
            chosen[rung.name] = [given] * self.seeds
            self.searches[rung.name] = Search(given)
        if self.most_tries:
            self.search_until(self.most_tries, finest=1.0)
            n_tries = max(len(search.losses) for search in self.searches.values())
            self.search_until(n_tries, finest=0.0)
            chosen = {name: [search.chosen(seed) for seed in tuning_seeds(self.seeds)]
                      for name, search in self.searches.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / RATES, json.dumps(chosen))
        return chosen

    def hold(self):
        """The search, the rounds, the timing."""
        timed_pairs = self.timed_pairs()
        self.runner.n_jobs = len(self.scripts) * self.seeds + sum(map(len, timed_pairs))  # the search adds its own
        chosen = self.find_rates()
        for number in range(self.seeds):
            folder = self.folder / f"round_{number + 1}"
            in_turns = self.scripts[::-1] if number % 2 else self.scripts  # so that none always runs first
            self.run_shared([self.job(rung, folder, chosen[rung.name][number], SEED + number) for rung in in_turns])
        settings, timing = self.settings(self.scripts[0]), []
        most = TIMED_STEPS_ON_A_CPU if settings.device == "cpu" else TIMED_STEPS
        short = ["--steps", str(min(settings.steps, most)), "--val-every", "0"]
        for number, pair in enumerate(timed_pairs):
            folder = self.folder / "timing" / f"round_{number + 1}"
            timing += [self.job(rung, folder, chosen[rung.name][0], SEED, *short) for rung in pair]
        self.runner.run(timing)

    def timed_pairs(self):
        """The scripts of each round of the timing: pairs that are compared, in the order A B, B A."""
        pairs = pairs_of(self.scripts, self.against_first) or [tuple(self.scripts)]
        return [order for _ in range(self.timings) for pair in pairs for order in (pair, pair[::-1])]


# ---- a contest in a folder -------------------------------------------------------------------------------------------

CONTEST = "contest.json"  # what is compared, how, and on which machine


def open_contest(contest, about, device, seconds, console):
    """Give a contest its runner; write contest.json in its folder, which must be locked and holds no other contest."""
    folder = contest.folder
    about["scripts"] = [{"name": rung.name, "label": rung.label, "title": rung.title,
                         "sha256": hashlib.sha256(rung.path.read_bytes()).hexdigest()} for rung in contest.scripts]
    here = describe(device)
    begun = read_json(folder / CONTEST, needs=("torch", "name")) or about | here
    for what, new in about.items():
        if begun.get(what) != new:
            others = "scripts" if what == "what" else what
            raise UserError(f"{folder}: holds a comparison with other {others}; rerun its own command, or name a new "
                            "folder")
    for what in ("torch", "name"):
        old, new = (THREADS_OF.sub("", machine[what]) for machine in (begun, here))
        if old != new:
            raise UserError(f"{folder}: was begun with {old}, and this is {new}; give a new folder")
    write_whole(folder / CONTEST, json.dumps(begun, indent=2) + "\n")
    contest.runner = Runner(device, folder, seconds, console, resume=True)


# ---- what `compare` does ---------------------------------------------------------------------------------------------


def script_of(word):
    """The Rung that a word names: one of the ladder, or any other file, which has no label."""
    path = Path(word)
    if path.suffix != ".py":
        return find_rung(word)
    known = BY_NAME.get(path.stem)
    return known if known and known.path == path.resolve() else Rung("", str(path.resolve()), word)


def copied(rung, folder):
    """A file's copy in the folder, so that each run is of the same script; a rung of the ladder is itself."""
    copy = folder / rung.path.name
    if rung.label:
        return rung
    if not copy.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(rung.path, copy)
    elif copy.read_bytes() != rung.path.read_bytes():
        raise UserError(f"{rung.path}: differs from {copy}, its copy that ran; give a new folder")
    return Rung("", str(copy.resolve()), rung.title)


def newest_of(about):
    """The newest folder with a comparison of this kind."""
    for folder in sorted(FOLDERS.glob("*"), reverse=True):
        if about.items() <= read_json(folder / CONTEST).items():
            return folder
    raise UserError(f"--resume: {FOLDERS} holds no comparison of these arguments; start it without --resume")


def hold_comparison(args, console):
    """Hold the contest that these arguments describe: (its folder, its runner or None where it was stopped)."""
    scripts = [script_of(word) for word in args.what]
    beside = [str(rung.path.parent) for rung in scripts if not rung.label]  # modules that a file may import
    sys.path += beside
    check_scripts(scripts)
    data = "data/bytes" if Path("data/bytes/meta.json").exists() else "data/tokens"  # bytes take a third of the time
    flags = [*SMALL, "--data", data, *args.flags]
    settings = check_fair(scripts, flags)
    at_once = args.jobs or (2 if settings.device == "cpu" else 1)
    about = {"what": args.what, "seeds": args.seeds, "tries": args.tries, "flags": flags}
    folder = args.logs or (newest_of(about) if args.resume else new_folder(FOLDERS))
    with locked(folder, args.resume):
        scripts = [copied(rung, folder / "scripts") for rung in scripts]
        path = os.pathsep.join([*beside, os.environ.get("PYTHONPATH", "")])
        contest = Contest(scripts, flags, folder, args.seeds, at_once=at_once, most_tries=args.tries,
                          against_first=True, env={"PYTHONPATH": path})
        open_contest(contest, about, settings.device, args.time_limit, console)
        try:
            with contest.runner:
                contest.hold()
            return folder, contest.runner
        except KeyboardInterrupt:
            return folder, None
        finally:
            record, _ = read_logs(folder, [rung.name for rung in scripts])
            if len(record.points):
                write_csv(record, folder / CSV)
