"""A race as one table with every validation of every run: made from its logs, kept as race.csv when they are gone."""
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pandas

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.show.logs import ORDER, Run, read_headers, read_lines, read_log
from ladder.show.machine import read_json

FILE, RATES = "race.csv", "rates.json"
FACTS = ["model", "device", "machine", "torch", "precision", "allocator", "compile", "ranks", "total batch", "batch",
         "steps", "validation", "data"]  # of the logs' headers: what the runs of a race have in common
PARTS = {"search": "sweep/*/*.log", "round": "round_*/*.log", "timing": "timing/round_*/*.log"}
COLUMNS = {"part": str, "rung": str, "max_lr": float, "muon_lr": float, "round": int, "seed": float, "step": int,
           "tokens": int, "loss": float, "val_loss": float, "ms": float, "first_ms": float,
           "peak_memory_gb": float, "parameters": float}


@dataclass
class Race:
    """The runs of a race that finished; those of its search that did not have an infinite loss."""

    facts: dict  # {"model": "4x4x128", "data": ..., ...}
    points: pandas.DataFrame  # COLUMNS; a row for each validation, one for a run without; `ms` is the run's median
    skipped: list  # why other logs do not count

    def part(self, name):
        """The rows of the "search", of the "round"s, each with its seed, or of the "timing"."""
        return self.points[self.points.part == name]

    @property
    def sweep(self):
        """{rung: {its learning rates: last validation loss}} of the search."""
        sweep = {}
        for run in self.part("search").itertuples():
            sweep.setdefault(run.rung, {})[rates_of(run)] = run.val_loss
        return {name: dict(sorted(losses.items())) for name, losses in sweep.items()}

    @property
    def timing(self):
        """{rung: [Run, ...]} that measured the time of a step; {} where a rung lacks a timing, and rounds tell it."""
        return self.runs("timing") if {*self.part("timing").rung} >= {*self.part("round").rung} else {}

    def step_ms(self):
        """A Series: the time of each rung's step, the median of its runs."""
        part = self.part("timing" if self.timing else "round")
        return part.groupby(["rung", "round"]).ms.first().groupby("rung").median()

    def runs(self, part):
        """{rung: [Run, ...]} for the report, as if each step after the first had taken the median."""
        batch = re.search(r"B=(\d+) T=(\d+)", self.facts.get("batch", ""))
        B, T = map(int, batch.groups()) if batch else (None, None)
        runs = {}
        for (name, number), points in self.part(part).groupby(["rung", "round"], sort=False):
            rows = points.to_dict("records")
            last, losses = rows[-1], {row["step"]: row["loss"] for row in rows}
            headers = {"steps": f"{last['step']}", "parameters": f"{last['parameters']:,.0f}"}
            runs.setdefault(name, []).append(Run(
                Path(f"{part}_{number}"), name, self.facts | headers, B, T, int(self.facts.get("ranks", 1)),
                steps=[*range(1, last["step"] + 1)], first_counted_step=min(2, last["step"]),
                losses=[losses.get(step, math.nan) for step in range(1, last["step"] + 1)],
                ms=[last["first_ms"], *[last["ms"]] * (last["step"] - 1)],
                val_steps=[*losses] if part != "timing" else [],
                val_losses=[row["val_loss"] for row in rows] if part != "timing" else [],
                peak_memory_gb=last["peak_memory_gb"] if last["peak_memory_gb"] > 0 else None,
            ))
        return runs


def rates_of(run):
    """The learning rates of a row: AdamW's, and Muon's if its rung has Muon."""
    return (run.max_lr,) if math.isnan(run.muon_lr) else (run.max_lr, run.muon_lr)


def best_of(losses):
    """The learning rates with the lowest loss of {rates: loss}; of equals, the higher."""
    return min(sorted(losses, reverse=True), key=losses.get)


def best_rates(name, sweep):
    """The learning rates that a search found for a rung; () if it had none."""
    return best_of(sweep[name]) if name in sweep else ()


def last_val_loss(path):
    """The last validation loss of a log; inf if there is none, or the run stopped early or diverged."""
    try:
        return points_of(finished_run(path))[-1]["val_loss"]
    except UserError:
        return math.inf


def finished_run(path, validated=True):
    """The run of a log; raises UserError if it did not finish or, where it should have, validate."""
    run = read_log(path)
    if not run.complete or run.tokens_per_step is None or validated and not run.val_losses:
        raise UserError(f"{path}: not a finished run of a race")
    return run


def points_of(run):
    """The rows of a run, less what only its place in the race tells."""
    seed, parameters = (int(run.headers.get(key, "0").replace(",", "")) for key in ("seed", "parameters"))
    same = {"seed": seed, "ms": run.median_ms, "first_ms": run.ms[0],
            "peak_memory_gb": run.peak_memory_gb, "parameters": parameters}
    losses = dict(zip(run.steps, run.losses, strict=True))
    val_losses = {step: loss if math.isfinite(loss) else math.inf
                  for step, loss in zip(run.val_steps, run.val_losses, strict=True)}
    return [same | {"step": step, "tokens": step * run.tokens_per_step, "loss": losses.get(step), "val_loss": val_loss}
            for step, val_loss in (val_losses or {run.steps[-1]: None}).items()]


def as_table(rows):
    """The rows, dictionaries, as a DataFrame in the ladder's order."""
    order = {name: place for place, name in enumerate(ORDER)}
    table = pandas.DataFrame(rows, columns=[*COLUMNS]).astype(COLUMNS)
    return table.sort_values(["part", "rung", "round", "max_lr", "muon_lr"], kind="stable", ignore_index=True,
                             key=lambda column: column.map(order) if column.name == "rung" else column)


def read_rates(folder):
    """{rung: the learning rates of its rounds} as far as they are chosen: a race that is resumed keeps them."""
    rates = read_json(folder / RATES, dict, "delete it to search again")
    return {name: tuple(found) for name, found in rates.items()}


def read_logs(folder):
    """The Race in a folder of logs, as far as it has come."""
    rows, skipped, headers = [], [], {}
    chosen = read_rates(folder)
    for part, pattern in PARTS.items():
        sweep = Race({}, as_table(rows), []).sweep
        for path in sorted(folder.glob(pattern)):
            number = path.parent.name.partition("round_")[2]
            found = chosen.get(path.stem) or best_rates(path.stem, sweep)
            rates = found if number else map(float, path.parent.name.split("_"))
            max_lr, muon_lr, *_ = [*rates, math.nan, math.nan]
            place = {"part": part, "rung": path.stem, "max_lr": max_lr, "muon_lr": muon_lr, "round": int(number or 1)}
            try:
                run = finished_run(path, validated=part != "timing")
            except UserError as error:
                if part == "search":
                    rows.append(place | {"step": 0, "tokens": 0, "val_loss": math.inf})
                else:
                    skipped.append(str(error))
                continue
            rows += [place | row for row in points_of(run)]
            headers.setdefault(part, run.headers)
    known = headers.get("round", {}) | {name: value for name, value in headers.get("timing", {}).items()
                                        if name in ("device", "machine")}  # with all of its cores
    return Race({name: known[name] for name in FACTS if name in known}, as_table(rows), skipped)


def read_csv(path):
    """The Race of a file that write_csv wrote; raises UserError for others."""
    try:
        points = pandas.read_csv(path, comment="#", dtype=COLUMNS, usecols=[*COLUMNS])
    except ValueError as error:
        raise UserError(f"{path}: not the table of a race: {error}") from None
    return Race(read_headers(read_lines(path)), points, [])


def write_csv(race, path):
    """Keep a race in one file."""
    facts = "".join(f"# {name}: {value}\n" for name, value in race.facts.items())
    write_whole(path, facts + race.points.convert_dtypes().to_csv(index=False))


def read_race(folder):
    """The Race in a folder, from its logs, else from its race.csv; None without a rung that has finished a round."""
    folder = Path(folder)
    if (folder / "sweep").is_dir():
        race = read_logs(folder)
    elif (folder / FILE).exists():
        race = read_csv(folder / FILE)
    else:
        return None
    return None if race.part("round").empty else race
