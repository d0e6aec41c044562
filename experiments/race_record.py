"""What a race has found: from its logs to one table, race.csv, and from that to its standings, race.json.

race.csv has every validation of every run, so that the logs can go. race.json has what `python -m ladder report` and
the page show. Used by race.py and race_docs.py.
"""
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.show import standings
from ladder.show.chance import FEWEST_SEEDS, paired_p
from ladder.show.logs import ORDER, read_headers, read_lines, read_log, run_of, stage_of
from ladder.show.machine import read_json
from ladder.show.report import Row, median, title_of
from ladder.show.standings import Racer

FILE = "race.csv"
RATES = "rates.json"  # the learning rates that the searches have found
FEWEST_STEPS = 50  # of a race: below, most of a run is warm-up
PARTS = {"search": "sweep/*/*.log", "round": "round_*/*.log", "timing": "timing/round_*/*.log"}
FACTS = ["model", "device", "machine", "torch", "precision", "allocator", "compile", "ranks", "total batch", "batch",
         "steps", "validation", "data"]  # of the logs' headers: what the runs of a race have in common
LONG_TRUNK = " Long trunk: scripts with micro-batches and checkpoints, not to be compared with newer races."
COLUMNS = {"part": str, "rung": str, "max_lr": float, "muon_lr": float, "round": int, "seed": float, "step": int,
           "tokens": int, "loss": float, "val_loss": float, "ms": float, "first_ms": float,
           "peak_memory_gb": float, "parameters": float}


@dataclass
class Record:
    """The runs of a race that finished; those of its search that did not have an infinite loss."""

    facts: dict  # of the logs' headers: {"model": "4x4x128", "data": ..., ...}
    points: pandas.DataFrame  # COLUMNS; a row for each validation, one for a run without; `ms` is the run's median

    def part(self, name):
        """The rows of the "search", of the "round"s, each with its seed, or of the "timing"."""
        return self.points[self.points.part == name]

    @property
    def rungs(self):
        """The names of the rungs that have finished a round."""
        return self.part("round").rung.unique().tolist()

    @property
    def is_timed(self):
        """Whether every rung was timed, alone on the machine; else the rounds tell the times of all."""
        return {*self.rungs} <= {*self.part("timing").rung}

    @property
    def timed(self):
        """A row for each run whose times count."""
        return self.part("timing" if self.is_timed else "round").drop_duplicates(["rung", "round"], keep="last")

    @property
    def sweep(self):
        """{rung: {its learning rates: last validation loss}} of the search."""
        sweep = {}
        for run in self.part("search").itertuples():
            sweep.setdefault(run.rung, {})[rates_of(run)] = run.val_loss
        return {name: dict(sorted(losses.items())) for name, losses in sweep.items()}

    def step_ms(self):
        """A Series: the time of each rung's step, the median of its runs."""
        return self.timed.groupby("rung").ms.median()


def rates_of(run):
    """The learning rates of a row: AdamW's, and Muon's if its rung has Muon."""
    return (run.max_lr,) if math.isnan(run.muon_lr) else (run.max_lr, run.muon_lr)


# ---- race.csv --------------------------------------------------------------------------------------------------------


def finished_run(path, validated=True):
    """The run of a log; raises UserError if it did not finish or, where it should have, validate."""
    run = read_log(path)
    if not run.complete or run.tokens_per_step is None or validated and not run.val_losses:
        raise UserError(f"{path}: not a finished run of a race")
    return run


def last_val_loss(path):
    """The last validation loss of a log; inf if there is none, or the run stopped early or diverged."""
    try:
        return rows_of(finished_run(path))[-1]["val_loss"]
    except UserError:
        return math.inf


def rows_of(run):
    """The rows of a run, one for each validation, less what only its place in the race tells."""
    whole = {name: int(run.headers.get(name, "0").replace(",", "")) for name in ("seed", "parameters")}
    whole |= {"ms": run.median_ms, "first_ms": run.ms[0], "peak_memory_gb": run.peak_memory_gb}
    losses, rows = dict(zip(run.steps, run.losses, strict=True)), []
    validations = dict(zip(run.val_steps, run.val_losses, strict=True)) or {run.steps[-1]: None}
    for step, val_loss in validations.items():
        if val_loss is not None and not math.isfinite(val_loss):
            val_loss = math.inf
        rows.append(whole | {"step": step, "tokens": step * run.tokens_per_step, "loss": losses.get(step),
                             "val_loss": val_loss})
    return rows


def read_rates(folder):
    """{rung: the learning rates of its rounds} as far as they are chosen: a race that is resumed keeps them."""
    rates = read_json(folder / RATES, dict, "delete it to search again")
    return {name: tuple(found) for name, found in rates.items()}


def place_of(part, path, chosen):
    """What the place of a log in the folder tells: the part, the rung, its learning rates, the round."""
    if part == "search":
        rates, number = [float(rate) for rate in path.parent.name.split("_")], 1
    else:
        rates, number = chosen[path.stem], int(path.parent.name.removeprefix("round_"))
    muon_lr = rates[1] if len(rates) > 1 else math.nan
    return {"part": part, "rung": path.stem, "max_lr": rates[0], "muon_lr": muon_lr, "round": number}


def place_in_table(column):
    """What a column of a race's table is sorted by: rungs in the ladder's order."""
    if column.name == "rung":
        return column.map({name: place for place, name in enumerate(ORDER)})
    return column


def read_logs(folder):
    """(The Record of a folder of logs as far as it has come, why other logs do not count)."""
    chosen, rows, skipped, headers = read_rates(folder), [], [], {}
    for part, pattern in PARTS.items():
        for path in sorted(folder.glob(pattern)):
            place = place_of(part, path, chosen)
            try:
                run = finished_run(path, validated=part != "timing")
            except UserError as error:
                if part == "search":
                    rows.append(place | {"step": 0, "tokens": 0, "val_loss": math.inf})
                else:
                    skipped.append(str(error))
                continue
            rows += [place | row for row in rows_of(run)]
            headers.setdefault(part, run.headers)
    facts = headers.get("round", {}) | {name: value for name, value in headers.get("timing", {}).items()
                                        if name in ("device", "machine")}  # with all of its cores
    points = pandas.DataFrame(rows, columns=[*COLUMNS]).astype(COLUMNS)
    points = points.sort_values(["part", "rung", "round", "max_lr", "muon_lr"], kind="stable", ignore_index=True,
                                key=place_in_table)
    return Record({name: facts[name] for name in FACTS if name in facts}, points), skipped


def write_csv(race, path):
    """Keep a race in one file."""
    facts = "".join(f"# {name}: {value}\n" for name, value in race.facts.items())
    write_whole(path, facts + race.points.convert_dtypes().to_csv(index=False))


def read_csv(path):
    """The Record that write_csv wrote."""
    points = pandas.read_csv(path, comment="#", dtype=COLUMNS, usecols=[*COLUMNS])
    return Record(read_headers(read_lines(path)), points)


# ---- race.json -------------------------------------------------------------------------------------------------------


def neighbors(rates):
    """Half and twice of each learning rate, the others fixed."""
    return [(*rates[:i], rate * factor, *rates[i + 1 :]) for i, rate in enumerate(rates) for factor in (0.5, 2)]


def steps_to(points, loss):
    """Steps until the validation loss reaches `loss`, interpolated between two validations; inf if it never does."""
    last_step, last_loss = 0, math.inf
    for step, now in zip(points.step, points.val_loss, strict=True):
        if now <= loss and last_loss == math.inf:
            return step
        if now <= loss:
            return last_step + (step - last_step) * (last_loss - loss) / (last_loss - now)
        last_step, last_loss = step, now
    return math.inf


def median_and_range(values):
    """(median, lowest, highest) of a Series."""
    return float(values.median()), float(values.min()), float(values.max())


def chances(values):
    """[p, ...] of each rung against the one before; None where too few seeds have both.

    `values` is a Series by rung and seed. The first rung has none before it.
    """
    rungs = list(values.unstack("seed", sort=False).itertuples(index=False))
    found = [None]
    for before, after in itertools.pairwise(rungs):
        both = pandas.DataFrame({"before": before, "after": after}).dropna()
        found.append(paired_p(both.before, both.after, FEWEST_SEEDS))
    return found


def racers_of(record):
    """(the target, a Racer for each rung) of a race."""
    runs, step_ms = record.part("round").groupby(["rung", "seed"], sort=False), record.step_ms()
    ends = runs.tail(1).set_index(["rung", "seed"])
    first = record.rungs[0]
    target = ends.val_loss[first].quantile(interpolation="higher")  # half of the seeds reach it
    target = math.ceil(round(100 * target, 6)) / 100
    steps = runs.apply(steps_to, target)
    tokens, seconds = steps * ends.tokens / ends.step, steps.mul(step_ms, level="rung") / 1000
    p_loss = chances(ends.val_loss)
    # A run that never gets there counts with its whole length: the test then sees less of a difference, not more.
    p_tokens = chances(tokens.clip(upper=ends.tokens))
    racers = []
    for place, name in enumerate(record.rungs):
        first_run = next(ends.loc[name].itertuples())
        curve = record.part("round").query("rung == @name").groupby("step").val_loss.median()
        racers.append(Racer(
            name, rates_of(first_run), median_and_range(ends.val_loss[name]), median_and_range(tokens[name]),
            median_and_range(seconds[name]), median_and_range(100 * seconds[name] / seconds[first].median()),
            float(step_ms[name]), first_run.parameters, p_loss[place], p_tokens[place], curve.index.tolist(),
            curve.tolist()))
    return target, racers


def doubts(race, racers):
    """Yields the reasons to doubt the learning rates of a race, as short clauses."""
    steps = race.part("round").step.max()
    if steps < FEWEST_STEPS:
        yield f"{steps} steps are too few to choose a learning rate, take {FEWEST_STEPS} or more"
    for racer in racers:
        losses = race.sweep.get(racer.name)
        if losses is None:
            continue
        finite = list(filter(math.isfinite, losses.values()))
        _, low, high = racer.val_loss
        if not losses.keys() >= set(neighbors(racer.rates)):
            yield f"rung {racer.label}'s rates, whose search was cut off after {len(losses)} tries"
        if len(finite) == len(losses) and max(finite) - min(finite) <= high - low:
            yield f"rung {racer.label}'s rates, which differ by no more than its seeds do"


def caption(race, racers):
    """What a reader of these standings needs to know beside KEY."""
    rounds, timing, search = race.part("round"), race.part("timing"), race.part("search")
    searched = "rates given"
    if len(search):
        tries = [len(losses) for losses in race.sweep.values()]
        fewest, most = min(tries), max(tries)
        searched = f"{fewest if fewest == most else f'{fewest} to {most}'} tries of rates"
        if search.step.max() < rounds.step.max():
            searched += f" in {search.step.max():,} steps"
    timed = f"timed {timing['round'].nunique()} times, alone" if race.is_timed else "ms/step of the same runs"
    doubtful = "; ".join(doubts(race, racers))
    modern = any(stage_of(racer.name).file.startswith("beyond/modern/") for racer in racers)
    trunk = LONG_TRUNK if modern and "total batch" in race.facts else ""
    text = f"{rounds.seed.nunique()} seeds; {searched}; {timed}."
    return text + trunk + (f" Doubtful: {doubtful}." if doubtful else "")


def row_of(record, name):
    """A rung as `report` shows it; seconds to a loss are told by the standings."""
    run = run_of(Path(f"{name}.log"), record.facts)
    ends = record.part("round").drop_duplicates(["rung", "round"], keep="last")
    ends, timed = ends[ends.rung == name], record.timed[record.timed.rung == name]
    return Row(
        name=name, title=title_of(run), ms=median(timed.ms), ms_low=timed.ms.min(), ms_high=timed.ms.max(),
        rounds=len(timed), counted=int(timed.step.min()) // 2, first_step_s=median(timed.first_ms / 1000),
        tokens=run.tokens_per_step, ranks=run.ranks,
        peak_memory_gb=median(ends.peak_memory_gb[ends.peak_memory_gb > 0]),
        last_loss=None if ends.loss.isna().any() else median(ends.loss), last_step=int(ends.step.min()), complete=True,
        last_val_loss=median(ends.val_loss))


def write_standings(record, path):
    """What the tool shows of a race, a line for each rung."""
    target, racers = racers_of(record)
    race = standings.Race(record.facts, target, caption(record, racers),
                          [asdict(row_of(record, name)) for name in record.rungs], racers)
    lines = json.dumps(asdict(race)).replace(', {"name"', ',\n{"name"')
    write_whole(path, lines + "\n")
