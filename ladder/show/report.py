"""What each rung did on a machine: one table of its logs, a row for each, and from it one row for each rung.

A rung with several rounds (`run --repeat`) has the median of the rounds' medians, and their spread. Runs that differ in
data, model, B, T or device are refused. What a log does not say is None.
"""
import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pandas

from ladder.count.flops import mfu
from ladder.errors import UserError
from ladder.scripts.stages import BY_LABEL
from ladder.show.chance import speed_p
from ladder.show.compare import MIN_COUNTED
from ladder.show.impossible import CLOCK, impossible
from ladder.show.logs import read_folder, stage_of
from ladder.show.machine import read_machine
from ladder.show.profile import read_profile
from ladder.show.race_table import read_race

WARM_UP_MS = 3000  # for a GPU to reach its clock, after a compiled step
# The columns of a log, and what becomes of them in the row of a rung. ms, seconds, GB (1e9 bytes), nats.
TIMES = {"ms": "median", "ms_low": "min", "ms_high": "max", "rounds": "sum", "counted": "min",
         "first_step_s": "median"}
RESULTS = {"tokens": "first", "ranks": "first", "mfu": "first", "mfu_causal": "first", "peak_memory_gb": "median",
           "last_loss": lambda losses: losses.median(skipna=False), "last_step": "min", "complete": "all",
           "last_val_loss": "median", "seconds_to_common_loss": "median", "seconds_to_common_val_loss": "median"}

@dataclass
class Report:
    """One machine: the table of its rungs, and what they have in common."""

    name: str  # the folder's
    setting: dict  # data, model, B, T, device
    machine: dict  # rates and versions measured in the same run; {} when unknown
    common_loss: float | None  # None if every loss of a run is infinite or not a number
    common_val_loss: float | None  # None without a validation
    table: pandas.DataFrame  # one row per rung: name, title, TIMES, RESULTS; speeds in tokens per second and as
    # times those of others; MFU as a share of 1, by PaLM's FLOPs and with half of attention's
    runs: dict  # {name: [Run, ...]}
    profile: dict | None  # where each rung's step time goes, as profile.json has it
    race: object  # all of its runs, a race_table.Race; None if this is none
    skipped: list  # why files of the folder were not used

    @property
    def rows(self):
        """The table as a list of named tuples, with None for what is not known."""
        return list(self.table.astype(object).where(self.table.notna(), None).itertuples(index=False, name="Row"))


def check_comparable(runs, folder):
    """Refuse to compare runs of different data, models, batches or devices; says which differ."""
    settings = [(run.path, run.setting()) for rounds in runs.values() for run in rounds]
    for key in settings[0][1]:
        paths = {setting[key]: path for path, setting in reversed(settings) if setting[key] is not None}
        if len(paths) > 1:
            (one, its_path), (other, other_path), *_ = reversed(paths.items())
            raise UserError(f"{folder}: logs of different {key} cannot be compared: {its_path} has {one!r}, "
                            f"{other_path} has {other!r}; report them from separate folders")


def check_rounds(runs):
    """Refuse two logs of one script in the same folder: they are no rounds."""
    for one, other in itertools.chain(*(itertools.combinations(rounds, 2) for rounds in runs.values())):
        if one.path.parent == other.path.parent:
            raise UserError(f"{one.path} and {other.path} are of the same script, and would count as rounds; move one")


def common_lowest(losses_of_runs):
    """A loss that all runs reach: the highest of their lowest. Unlike a smoothed loss, it needs no parameter."""
    finite = [list(filter(math.isfinite, losses)) for losses in losses_of_runs]
    return max((min(losses) for losses in finite if losses), default=None)


def log_row(run, alone, rates, common_loss, common_val_loss):
    """A log's row: TIMES and RESULTS. Its spread is that of its steps if no other round shows one."""
    low, high = run.spread if alone else (run.median_ms, run.median_ms)
    return {
        "name": run.name, "ms": run.median_ms, "ms_low": low, "ms_high": high, "rounds": 1,
        "counted": len(run.ms) - run.warm_up, "first_step_s": run.ms[0] / 1000,
        "tokens": run.tokens_per_step,
        "ranks": run.ranks,
        "mfu": mfu(run, rates, 1),  # of one token per second
        "mfu_causal": mfu(run, rates, 1, causal=True),
        "peak_memory_gb": run.peak_memory_gb,
        "last_loss": run.losses[-1],
        "last_step": run.steps[-1],
        "complete": run.complete,
        "last_val_loss": run.val_losses[-1] if run.val_losses else None,
        "seconds_to_common_loss": run.seconds_to(common_loss, run.steps, run.losses),
        "seconds_to_common_val_loss": run.seconds_to(common_val_loss, run.val_steps, run.val_losses),
    }


def merge_rounds(runs, columns, *common):
    """{name: [Run, ...]} -> a DataFrame with one row per name."""
    logs = [log_row(run, len(rounds) == 1, *common) for rounds in runs.values() for run in rounds]
    logs = pandas.DataFrame(logs).set_index("name").apply(pandas.to_numeric)  # an unknown is NaN
    return logs.groupby("name", sort=False).agg(columns)


def table_of(runs, timing, *common):
    """The table of a Report. In a race the times are those of `timing`: its rounds may have shared the machine."""
    timed = {name: timing.get(name, rounds) for name, rounds in runs.items()}
    table = merge_rounds(timed, TIMES, *common).join(merge_rounds(runs, RESULTS, *common))
    table.loc[table.index.isin(timing), ["seconds_to_common_loss", "seconds_to_common_val_loss"]] = math.nan
    stages = [stage_of(name) for name in table.index]
    table.insert(0, "title", [stage.title + (f", {ranks} ranks" if ranks > 1 else "")
                              for stage, ranks in zip(stages, table["ranks"], strict=True)])
    speed = table["tokens_per_second"] = table["tokens"] / table["ms"] * 1000
    table["mfu"] *= speed
    table["mfu_causal"] *= speed
    before = [BY_LABEL[stage.before].name if stage.before else None for stage in stages]
    table["times_baseline"] = speed / speed.get(BY_LABEL["0"].name, math.nan)
    table["times_before"] = speed / speed.reindex(before).to_numpy()
    table["p_before"] = [speed_p(timed[start], timed[name]) if start in timed else math.nan
                         for name, start in zip(table.index, before, strict=True)]
    return table.reset_index()


def build_report(folder):
    """Read all logs of a folder into a Report. Raises UserError when they cannot be compared."""
    race = read_race(folder)
    runs, skipped = (race.runs("round"), race.skipped) if race else read_folder(folder)
    check_comparable(runs, folder)
    if not race:
        check_rounds(runs)
    found = {}
    for read in (read_machine, read_profile):
        try:
            found[read] = read(folder)
        except UserError as error:
            skipped.append(str(error))
    machine, profile = found.get(read_machine, {}), found.get(read_profile)
    first = next(iter(runs.values()))[0]
    if profile and (profile["model"], profile["B"], profile["T"]) != (first.model, first.B, first.T):
        skipped.append(f"{folder}/profile.json is of {profile['model']}, B={profile['B']} T={profile['T']}, "
                       "but the logs are not")
        profile = None
    every_run = [run for rounds in runs.values() for run in rounds]
    common = common_lowest(run.losses for run in every_run), common_lowest(run.val_losses for run in every_run)
    table = table_of(runs, race.timing if race else {}, machine.get("rates"), *common)
    setting = first.setting() | {"device": first.device}
    return Report(Path(folder).resolve().name, setting, machine, *common, table, runs, profile, race, skipped)


def allocators(report):
    """The names of the allocators of all runs; "unknown" is that of logs that do not say."""
    return sorted({run.allocator or "unknown" for rounds in report.runs.values() for run in rounds})


def cores_of(report):
    """How many threads the runs on a CPU had; 0 on other devices."""
    timed = report.race and report.race.timing or report.runs  # a race's rounds may have had half of the cores each
    headers = [run.headers.get("machine", run.headers.get("device", "")) for runs in timed.values() for run in runs]
    return max((int(n) for header in headers for n in re.findall(r"\((\d+) threads\)", header)), default=0)


def warnings(report, card=None):
    """What a reader of the table needs to know: damaged files, impossible values, short warm-ups, unfinished runs.

    `card` is the GPU of logs that name none.
    """
    yield from (f"skipped: {reason}" for reason in report.skipped)
    for row in report.rows:
        run = report.runs[row.name][0]
        if row.mfu and row.mfu > 1:
            yield f"{row.title}: MFU {row.mfu:.0%} is {CLOCK}"
        yield from (f"{row.title}: {found}" for found in impossible(run, card))
        warmed_up = report.race or sum(run.ms[1 : run.warm_up]) >= WARM_UP_MS  # a race's timing has its own length
        if not run.on_cpu and "device" in run.headers and not warmed_up:
            yield (f"{row.title}: the steps between the first and those that count took less than "
                   f"{WARM_UP_MS / 1000:g} s, too few to warm up a GPU: give more --steps")
        if not row.complete:
            yield f"{row.title}: the run did not finish ({row.last_step} steps)"
    if report.table["rounds"].nunique() > 1:
        yield "the rungs have different numbers of rounds: their spreads do not compare"
    if ((report.table["rounds"] == 1) & (report.table["counted"] < MIN_COUNTED)).any():
        yield (f"fewer than {MIN_COUNTED} steps count: too few to tell a gain from noise; give more --steps, or "
               "--repeat 5")
    if len(under := allocators(report)) > 1:
        yield (f"the runs had different memory allocators ({', '.join(under)}): on a CPU they can change the time of a "
               "step by a third")
    if report.table["last_step"].nunique() > 1:
        yield "the runs have different numbers of steps: their last losses do not compare"
    if not report.machine:
        yield "no measured matrix-product rates (machine.json) here, so no MFU"
