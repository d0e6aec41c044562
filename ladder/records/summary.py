"""A folder of logs as tables: a row for each round of a script, then for each script; or a race.

A script with several rounds (`run --repeat`) has the median of the rounds' medians, and their spread. Runs that differ
in data, model, B, T or device are refused. What a log does not say is NaN in a table and None in a row.
"""
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas

from ladder.count.flops import mfu
from ladder.errors import UserError
from ladder.records.impossible import CLOCK, impossible
from ladder.records.logs import allocators_of, read_folder, run_of
from ladder.records.machine import read_machine
from ladder.records.recipes import Record, read_race
from ladder.records.significance import holm, speed_p
from ladder.records.two_logs import MIN_COUNTED
from ladder.records.step_profile import read_profile
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, BY_NAME, rung_of, today

GPU_STEPS, GPU_MS = 150, 3000  # of a run, at least: a GPU's first second is one or two percent faster than the rest


@dataclass
class Report:
    """One machine: its tables, and what its runs have in common."""

    name: str  # the folder's
    setting: dict  # data, model, B, T, device
    machine: dict  # rates and versions measured in the same run; {} when unknown
    runs: dict = field(default_factory=dict)  # {name: [Run, ...]}; none in a race, nor a row of a table
    rounds: pandas.DataFrame = None  # of `rounds_of`
    table: pandas.DataFrame = None  # of `summary_of`
    profile: dict | None = None  # where each rung's step time goes, as profile.json has it
    race: Record | None = None
    skipped: list = field(default_factory=list)  # why files of the folder were not used
    cores: int = 0  # of a CPU
    allocators: list = field(default_factory=list)

    @cached_property
    def rows(self):
        """The rows of the summary, None where a value is not known."""
        known = self.table.astype(object).where(self.table.notna(), None)
        return list(known.itertuples(index=False, name="Row"))


def rounds_of(runs):
    """A row for each Run, by name and round: the median and the middle half of its counted steps' ms, and its end."""
    rows = []
    for run in runs:
        title = rung_of(run.name).title + (f", {run.ranks} ranks" if run.ranks > 1 else "")
        low, high = pandas.Series(run.ms[run.warm_up :]).quantile([0.25, 0.75])
        rows.append({
            "name": run.name, "round": run.path.parent.name, "title": title, "tokens": run.tokens_per_step,
            "ranks": run.ranks, "ms": run.median_ms, "ms_low": low, "ms_high": high, "counted": run.counted,
            "first_step_s": run.ms[0] / 1000, "peak_memory_gb": run.peak_memory_gb, "last_loss": run.losses[-1],
            "last_step": run.steps[-1], "last_val_loss": run.val_losses[-1] if run.val_losses else None,
            "complete": run.complete})
    return pandas.DataFrame(rows).set_index(["name", "round"])


def summary_of(runs, rounds, rates):
    """A row for each script: the medians over its rounds, and its speed, also beside other scripts.

    One round shows the spread of its steps. `rates` are the measured FLOP/s.
    """
    by_name = rounds.groupby("name", sort=False)
    table = by_name.agg(
        title=("title", "first"), ms=("ms", "median"), ms_low=("ms", "min"), ms_high=("ms", "max"),
        rounds=("ms", "size"), counted=("counted", "min"), first_step_s=("first_step_s", "median"),
        tokens=("tokens", "first"), ranks=("ranks", "first"), peak_memory_gb=("peak_memory_gb", "median"),
        last_loss=("last_loss", lambda losses: losses.median(skipna=False)), last_step=("last_step", "min"),
        complete=("complete", "all"), last_val_loss=("last_val_loss", "median"))
    alone = table.rounds == 1
    for side in ("ms_low", "ms_high"):
        table.loc[alone, side] = by_name[side].first()[alone]
    speed = table["tokens_per_second"] = table.tokens / table.ms * 1000
    for column, causal in (("mfu", False), ("mfu_causal", True)):
        table[column] = [mfu(runs[name][0], rates, tokens_per_second, causal)
                         for name, tokens_per_second in speed.items()]
    before = {name: rung_of(name).start for name in table.index}
    before = {name: start.name for name, start in before.items() if start and start.name in table.index}
    table["times_baseline"] = speed / speed.get(BY_LABEL["0"].name, math.nan)
    table["times_before"] = pandas.Series({name: speed[name] / speed[start] for name, start in before.items()})
    ps = {name: speed_p(rounds, start, name) for name, start in before.items()}
    table["p_before"] = pandas.Series(holm({name: p for name, p in ps.items() if p is not None}))
    return table.reset_index().astype({"tokens": "Int64"})


def older_code(name, machine):
    """Whether a script has changed in what a step computes since the run whose machine.json this is."""
    code = {today(old): recorded for old, recorded in machine.get("code", {}).items()}
    return name in code and name in BY_NAME and code[name] != code_of([BY_NAME[name]])[name]


def common_setting(runs, folder):
    """{"data": ..., "model", "B", "T", "device": None where no log says it}; UserError where logs say different things.

    Also for two logs of one script that are not rounds.
    """
    setting, seen = {}, {}
    for key in runs[0].setting():
        paths = {}
        for run in runs:
            paths.setdefault(run.setting()[key], run.path)
        paths.pop(None, None)
        if len(paths) > 1:
            (value, path), (other, other_path), *_ = paths.items()
            raise UserError(f"{folder}: logs of different {key} cannot be compared: {path} has {value!r}, "
                            f"{other_path} has {other!r}; report them from separate folders")
        setting[key] = next(iter(paths), None)
    for run in runs:
        other = seen.setdefault((run.name, run.path.parent), run)
        if other is not run:
            raise UserError(f"{other.path} and {run.path} are of the same script, and would be its rounds; move one")
    return setting


def build_report(folder):
    """Read all logs of a folder, or its race, into a Report. Raises UserError when they cannot be compared."""
    race, machine, profile = read_race(folder), read_machine(folder), read_profile(folder)
    runs, skipped = ({}, []) if race else read_folder(folder)
    # The logs of a race are gone: what their headers had in common.
    every_run = [run_of(Path(folder), race.facts)] if race else [run for rounds in runs.values() for run in rounds]
    setting = common_setting(every_run, folder)
    setting["device"] = setting["device"] or every_run[0].device  # "cpu", where no log names it
    if profile and any(profile[key] != setting[key] for key in ("model", "B", "T")):
        skipped.append(f"{folder}/profile.json is of {profile['model']}, B={profile['B']} T={profile['T']}, "
                       "but the logs are not")
        profile = None
    rounds = table = pandas.DataFrame()
    if runs:
        for name, logs in runs.items():  # those that finished, or all if none did
            whole = [run for run in logs if run.complete]
            skipped += [f"{run.path}: its run did not finish" for run in logs if whole and not run.complete]
            runs[name] = whole or logs
        every_run = [run for logs in runs.values() for run in logs]
        rounds, titles = rounds_of(every_run), machine.get("titles", {})  # titles: of what it ran then
        table = summary_of(runs, rounds, machine.get("rates"))
        table["title"] = [titles.get(row.name, row.title) for row in table.itertuples()]
        table["older_code"] = [older_code(name, machine) for name in table.name]
    # "unknown" is the allocator of whole logs that do not say.
    allocators = allocators_of([run for run in every_run if run.complete or run.allocator])
    return Report(Path(folder).resolve().name, setting, machine, runs, rounds, table, profile, race, skipped,
                  max(run.threads for run in every_run), allocators)


def warnings(report):
    """What a reader of the table needs to know: damaged files, impossible values, short warm-ups, unfinished runs."""
    short = []
    for reason in report.skipped:
        yield f"skipped: {reason}"
    for row in report.rows:
        run = report.runs[row.name][0]
        if row.mfu and row.mfu > 1:
            yield f"{row.title}: MFU {row.mfu:.0%} is {CLOCK}"
        for sentence in impossible(run):
            yield f"{row.title}: {sentence}"
        if not row.complete:
            yield f"{row.title}: the run did not finish ({row.last_step} steps)"
        if not run.on_cpu and "device" in run.headers and (len(run.ms) < GPU_STEPS or sum(run.ms[1:]) < GPU_MS):
            short.append(row.title)
    if short:
        yield (f"{short[0] if len(short) == 1 else f'{len(short)} rungs'}: fewer than {GPU_STEPS} steps or "
               f"{GPU_MS / 1000:g} s after the first step; a GPU's first second is one or two percent faster than the "
               "rest: give more --steps")
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
    if not report.machine.get("rates"):
        yield "no measured matrix-product rates (machine.json) here, so no MFU"
