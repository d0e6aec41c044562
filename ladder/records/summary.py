"""What each rung did on a machine, a row for each, made of its logs; or a race.

A rung with several rounds (`run --repeat`) has the median of the rounds' medians, and their spread. Runs that differ in
data, model, B, T or device are refused. What a log does not say is None.
"""
import math
import re
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pandas

from ladder.count.flops import mfu
from ladder.errors import UserError
from ladder.records.impossible import CLOCK, impossible
from ladder.records.logs import read_folder, run_of, stage_of
from ladder.records.machine import read_machine
from ladder.records.race import Race, read_race
from ladder.records.significance import holm, speed_p
from ladder.records.two_logs import MIN_COUNTED
from ladder.records.work import read_profile
from ladder.rungs.list import BY_LABEL

WARM_UP_MS = 3000  # for a GPU to reach its clock, after a compiled step


@dataclass
class Row:
    """What a rung did, in medians over its rounds: all that is shown of it, None where it is not known."""

    name: str
    title: str
    ms: float  # of a step
    ms_low: float
    ms_high: float
    rounds: int
    counted: int  # how many steps a round's median is of, at least
    first_step_s: float
    tokens: int | None  # of a step
    ranks: int
    mfu: float | None = None  # a share of 1, by PaLM's FLOPs
    mfu_causal: float | None = None  # with half of attention's
    peak_memory_gb: float | None = None  # 1e9 bytes
    last_loss: float | None = None
    last_step: int = 0
    complete: bool = False
    last_val_loss: float | None = None
    tokens_per_second: float | None = None
    times_baseline: float | None = None  # its tokens per second as times those of others
    times_before: float | None = None
    p_before: float | None = None  # by Holm, over the rungs of the table


@dataclass
class Report:
    """One machine: the rows of its rungs, and what they have in common."""

    name: str  # the folder's
    setting: dict  # data, model, B, T, device
    machine: dict  # rates and versions measured in the same run; {} when unknown
    rows: list = field(default_factory=list)  # none in a race, as the next
    runs: dict = field(default_factory=dict)  # {name: [Run, ...]}
    profile: dict | None = None  # where each rung's step time goes, as profile.json has it
    race: Race | None = None
    skipped: list = field(default_factory=list)  # why files of the folder were not used
    cores: int = 0  # of a CPU
    allocators: list = field(default_factory=list)

    @property
    def table(self):
        """The rows as a DataFrame."""
        return pandas.DataFrame([asdict(row) for row in self.rows])


def check_comparable(runs, folder):
    """Refuse runs of different data, models, batches or devices, and two logs of a script that are no rounds."""
    every_run, seen = [run for rounds in runs.values() for run in rounds], {}
    for key in every_run[0].setting():
        paths = {}
        for run in every_run:
            if run.setting()[key] is not None:
                paths.setdefault(run.setting()[key], run.path)
        if len(paths) > 1:
            (one, its_path), (other, other_path), *_ = paths.items()
            raise UserError(f"{folder}: logs of different {key} cannot be compared: {its_path} has {one!r}, "
                            f"{other_path} has {other!r}; report them from separate folders")
    for run in every_run:
        other = seen.setdefault((run.name, run.path.parent), run)
        if other is not run:
            raise UserError(f"{other.path} and {run.path} are of the same script, and would count as rounds; move one")


def median(values):
    """The median of those that are known; None if none is."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.median(known) if known else None


def title_of(run):
    return stage_of(run.name).title + (f", {run.ranks} ranks" if run.ranks > 1 else "")


def row_of(rounds):
    """The Row of a rung's rounds, without speeds. A single round shows the spread of its steps."""
    medians, last_losses = [run.median_ms for run in rounds], [run.losses[-1] for run in rounds]
    low, high = (min(medians), max(medians)) if len(rounds) > 1 else rounds[0].spread
    return Row(
        name=rounds[0].name, title=title_of(rounds[0]), ms=median(medians), ms_low=low, ms_high=high,
        rounds=len(rounds), counted=min(run.counted for run in rounds),
        first_step_s=median(run.ms[0] / 1000 for run in rounds),
        tokens=rounds[0].tokens_per_step, ranks=rounds[0].ranks,
        peak_memory_gb=median(run.peak_memory_gb for run in rounds),
        last_loss=None if any(map(math.isnan, last_losses)) else median(last_losses),
        last_step=min(run.steps[-1] for run in rounds), complete=all(run.complete for run in rounds),
        last_val_loss=median(run.val_losses[-1] for run in rounds if run.val_losses),
    )


def add_speeds(rows, runs, rates):
    """Fill in what follows from a row's time and tokens, also beside other rows."""
    speeds = {}
    for row in rows:
        if row.tokens is None:
            continue
        run, speed = runs[row.name][0], row.tokens / row.ms * 1000
        row.tokens_per_second = speeds[row.name] = speed
        row.mfu, row.mfu_causal = mfu(run, rates, speed), mfu(run, rates, speed, causal=True)
    baseline = BY_LABEL["0"].name
    for row in rows:
        before = stage_of(row.name).start
        if {row.name, baseline} <= speeds.keys():
            row.times_baseline = speeds[row.name] / speeds[baseline]
        if before and {row.name, before.name} <= speeds.keys():
            row.times_before = speeds[row.name] / speeds[before.name]
        if before and before.name in runs:
            row.p_before = speed_p(runs[before.name], runs[row.name])
    corrected = holm({row.name: row.p_before for row in rows if row.p_before is not None})
    for row in rows:
        row.p_before = corrected.get(row.name)


def build_report(folder):
    """Read all logs of a folder, or its race, into a Report. Raises UserError when they cannot be compared."""
    race, machine, profile = read_race(folder), read_machine(folder), read_profile(folder)
    if race:  # its logs are gone: what their headers had in common
        runs, skipped, every_run = {}, [], [run_of(Path(folder), race.facts)]
    else:
        runs, skipped = read_folder(folder)
        check_comparable(runs, folder)
        for name, rounds in runs.items():  # those that finished, or all if none did
            whole = [run for run in rounds if run.complete]
            skipped += [f"{run.path}: its run did not finish" for run in rounds if whole and not run.complete]
            runs[name] = whole or rounds
        every_run = [run for rounds in runs.values() for run in rounds]
    first = every_run[0]
    if profile and (profile["model"], profile["B"], profile["T"]) != (first.model, first.B, first.T):
        skipped.append(f"{folder}/profile.json is of {profile['model']}, B={profile['B']} T={profile['T']}, "
                       "but the logs are not")
        profile = None
    rows = list(map(row_of, runs.values()))
    for row in rows:  # a record says where what it ran differs from today's
        row.title = machine.get("titles", {}).get(row.name, row.title)
    add_speeds(rows, runs, machine.get("rates"))
    # "unknown" is the allocator of whole logs that do not say.
    allocators = {run.allocator or "unknown" for run in every_run if run.complete or run.allocator}
    headers = [run.headers.get("machine", run.headers.get("device", "")) for run in every_run]
    cores = [int(n) for header in headers for n in re.findall(r"\((\d+) threads\)", header)]
    return Report(Path(folder).resolve().name, first.setting() | {"device": first.device}, machine, rows, runs, profile,
                   race, skipped, max(cores, default=0), sorted(allocators))


def warnings(report, card=None):
    """What a reader of the table needs to know: damaged files, impossible values, short warm-ups, unfinished runs.

    `card` is the GPU of logs that name none.
    """
    cold = []
    for reason in report.skipped:
        yield f"skipped: {reason}"
    for row in report.rows:
        run = report.runs[row.name][0]
        if row.mfu and row.mfu > 1:
            yield f"{row.title}: MFU {row.mfu:.0%} is {CLOCK}"
        for found in impossible(run, card):
            yield f"{row.title}: {found}"
        if not row.complete:
            yield f"{row.title}: the run did not finish ({row.last_step} steps)"
        if not run.on_cpu and "device" in run.headers and sum(run.ms[1 : run.warm_up]) < WARM_UP_MS:
            cold.append(row.title)
    if cold and not report.machine.get("kept_busy"):  # a GPU that other runs kept warm
        yield (f"{cold[0] if len(cold) == 1 else f'{len(cold)} rungs'}: the steps between the first and those that "
               f"count took less than {WARM_UP_MS / 1000:g} s, too few to warm up a GPU: give more --steps")
    if len({row.rounds for row in report.rows}) > 1:
        yield "the rungs have different numbers of rounds: their spreads do not compare"
    if any(row.rounds == 1 and row.counted < MIN_COUNTED for row in report.rows):
        yield (f"fewer than {MIN_COUNTED} steps count: too few to tell a gain from noise; give more --steps, or "
               "--repeat 5")
    if len(report.allocators) > 1:
        yield (f"the runs had different memory allocators ({', '.join(report.allocators)}): on a CPU they can change "
               "the time of a step by a third")
    if len({row.last_step for row in report.rows}) > 1:
        yield "the runs have different numbers of steps: their last losses do not compare"
    if not report.machine:
        yield "no measured matrix-product rates (machine.json) here, so no MFU"
