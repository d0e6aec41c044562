"""What a contest found (ladder/measure/contest.py): from its logs to one table, and from that to effects.

The table has every validation of every run, so that the logs can go. Loads no torch.
"""
import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas

from ladder.errors import UserError
from ladder.files import read_json, write_whole
from ladder.records.logs import lines_of, read_headers, read_log
from ladder.records.significance import holm_effects, paired_effect
from ladder.rungs.list import today

FOLDERS = Path("logs/compare")  # of comparisons, each in one
CSV, DIFFERENCES, RACE = "compare.csv", "differences.csv", "race.csv"
SEEDS = 8  # that are tested, unless a user asks for others
MOST_TRIES = 24  # of learning rates, for each script of a search
TUNING_SEEDS = (1336, 1337)  # of the searches; rounds that have one, in older races, are not tested
RATES = "rates.json"  # the learning rates that the searches have found
FEWEST_STEPS = 50  # below, most of a run is warm-up
PARTS = {"search": "sweep/*/*/*.log", "round": "round_*/*.log", "timing": "timing/round_*/*.log"}
FACTS = ["model", "device", "machine", "torch", "precision", "allocator", "compile", "ranks", "total batch", "batch",
         "steps", "validation", "data"]  # of the logs' headers: what the runs of a contest have in common
COLUMNS = {"part": str, "rung": str, "max_lr": float, "muon_lr": float, "round": int, "seed": float, "step": int,
           "tokens": int, "loss": float, "val_loss": float, "ms": float, "first_ms": float,
           "peak_memory_gb": float, "parameters": float}


@dataclass
class Record:
    """The runs of a contest that finished; those of its search that did not have an infinite loss."""

    facts: dict  # of the logs' headers: {"model": "4x4x128", "data": ..., ...}, and the planned number of "seeds"
    points: pandas.DataFrame  # COLUMNS; a row for each validation, one for a run without; `ms` is the run's median

    def part(self, name):
        """The rows of the "search", of the "round"s, each with its seed, or of the "timing"."""
        return self.points[self.points.part == name]

    @cached_property
    def tested(self):
        """The rows of the rounds whose seed chose no learning rates."""
        rounds = self.part("round")
        return rounds[~rounds.seed.isin(TUNING_SEEDS)]

    @property
    def names(self):
        """Of the scripts that have finished a round."""
        return self.tested.rung.unique().tolist()

    @property
    def planned(self):
        """How many seeds were to be tested; an older record says only how many were."""
        return int(self.facts.get("seeds", self.tested.seed.nunique()))

    @cached_property
    def ends(self):
        """The last row of each run that counts, by script and seed."""
        return self.tested.groupby(["rung", "seed"], sort=False).tail(1).set_index(["rung", "seed"])

    @cached_property
    def race_table(self):
        """The standings of a race: each script compared with the row before."""
        return recipe_table(self, against_first=False)

    @property
    def own_searches(self):
        """Whether each tested seed has learning rates from a seed of its own, so that p holds the searches' luck."""
        return self.part("search").seed.nunique() >= self.tested.seed.nunique()

    def tried(self, name):
        """A row for each learning rates of a script's search: the last validation loss, the mean over the seeds."""
        search = self.part("search")
        lasts = search[search.rung == name].groupby(["max_lr", "muon_lr", "round"], dropna=False).tail(1)
        return lasts.groupby(["max_lr", "muon_lr"], dropna=False).val_loss.mean().reset_index()


def show_rates(rates, between=", "):
    """(0.0048, 0.002) as "0.0048, 0.002"."""
    return between.join(f"{rate:g}" for rate in rates)


# ---- effects ---------------------------------------------------------------------------------------------------------


def pairs_of(names, against_first):
    """[(before, after)] of one family: each with the first, or with the one before."""
    return [(names[0], name) for name in names[1:]] if against_first else [*itertools.pairwise(names)]


def effects(values, pairs, whole=True):
    """{after: Effect} for pairs (before, after), of a Series by script and seed (or round), with Holm's p.

    A script without all seeds gets None: to leave out those with which it diverged would flatter it. Unless all are
    needed (`whole`), as for times, a pair counts the rounds that have both.
    """
    table, by_name = values.unstack(sort=False), {}
    for before, after in pairs:
        pair = table.reindex([before, after])
        by_name[after] = paired_effect(*(pair if whole else pair.dropna(axis="columns")).to_numpy())
    return holm_effects(by_name)


def recipe_table(record, against_first):
    """A DataFrame, a row for each script that finished a round: what every table and sentence about recipes shows.

    `change` is the Effect on the last validation loss, once all planned seeds have finished; `times` is that on the
    logarithm of a step's time.
    """
    pairs, rows = pairs_of(record.names, against_first), []
    timed = record.part("timing").drop_duplicates(["rung", "round"], keep="last")  # a row for each run
    change = effects(record.ends.val_loss, pairs) if record.tested.seed.nunique() == record.planned else {}
    times = effects(timed.set_index(["rung", "round"]).ms.map(math.log), pairs, whole=False)
    for name in record.names:
        ends, ms = record.ends.loc[name], timed.ms[timed.rung == name]
        rows.append({
            "name": name, "rates": tuple(ends[["max_lr", "muon_lr"]].median().dropna()),
            "tries": len(record.tried(name)), "seeds": len(ends), "val_loss": ends.val_loss.mean(),
            "val_low": ends.val_loss.min(), "val_high": ends.val_loss.max(), "change": change.get(name),
            "ms": ms.median(), "ms_low": ms.min(), "ms_high": ms.max(), "times": times.get(name),
            "parameters": int(ends.parameters.iloc[0])})
    return pandas.DataFrame(rows).set_index("name", drop=False)


def by_seed(record):
    """A DataFrame for a spreadsheet: a row for each script after the first, and seed, with the difference and its p."""
    losses, changes, rows = record.ends.val_loss.unstack(sort=False), recipe_table(record, True).change, []
    first, *others = record.names
    for name in others:
        effect = changes[name]
        test = {"mean": effect.mean, "low_99": effect.low, "high_99": effect.high, "p": effect.p} if effect else {}
        for seed in losses.columns:
            loss, against = losses.loc[name, seed], losses.loc[first, seed]
            rows.append({"script": name, "against": first, "seed": int(seed), "val_loss": loss,
                         "val_loss_against": against, "difference": loss - against} | test)
    return pandas.DataFrame(rows)


def doubts(record):
    """Yields the reasons to doubt the learning rates of a contest: (the script's name or None, a short clause)."""
    steps = record.tested.step.max()
    if steps < FEWEST_STEPS:
        yield None, f"{steps} steps are too few to choose a learning rate, take {FEWEST_STEPS} or more"
    for name in record.names:
        tried, ends = record.tried(name), record.ends.val_loss[name]
        if tried.empty:
            continue
        best, rates = tried.val_loss.idxmin(), tried[["max_lr", "muon_lr"]].dropna(axis="columns")
        if any(rates[rate][best] in (rates[rate].min(), rates[rate].max()) for rate in rates):
            yield name, f"are at the edge of the {len(tried)} tried"
        spread = tried.val_loss.max() - tried.val_loss.min()
        if math.isfinite(spread) and spread <= ends.max() - ends.min():
            yield name, "differ by no more than its seeds do"


# ---- from logs, to CSV and back --------------------------------------------------------------------------------------


def finished_run(path, validated=True):
    """The run of a log; raises UserError if it did not finish or, where it should have, validate."""
    run = read_log(path)
    if not run.complete or run.tokens_per_step is None or validated and not run.val_losses:
        raise UserError(f"{path}: not a finished run; rerun it, or leave it out")
    return run


def last_val_loss(path):
    """The last validation loss of a log; inf if there is none, or the run stopped early or diverged."""
    try:
        return rows_of(finished_run(path))[-1]["val_loss"]
    except UserError:
        return math.inf


def rows_of(run):
    """The rows of a run, one for each validation, less what only its place in the contest tells."""
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
    """{script: its learning rates in each round} as far as they are chosen: a contest that is resumed keeps them."""
    rates = read_json(Path(folder) / RATES)
    return {name: [tuple(of_round) for of_round in found] for name, found in rates.items()}


def place_of(part, path, chosen):
    """What the place of a log in the folder tells: the part, the script, its learning rates, the round."""
    if part == "search":
        rates, number = [float(rate) for rate in path.parts[-3].split("_")], int(path.parent.name)  # the seed
    else:
        number = int(path.parent.name.removeprefix("round_"))
        rates = chosen[path.stem][number - 1 if part == "round" else 0]
    muon_lr = rates[1] if len(rates) > 1 else math.nan
    return {"part": part, "rung": path.stem, "max_lr": rates[0], "muon_lr": muon_lr, "round": number}


def read_logs(folder, names=()):
    """(The Record of a folder of logs as far as it has come, why other logs do not count); `names` give the order."""
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
    facts = {name: facts[name] for name in FACTS if name in facts}
    if chosen:
        facts["seeds"] = str(max(map(len, chosen.values())))
    points, order = pandas.DataFrame(rows, columns=[*COLUMNS]).astype(COLUMNS), [*(names or chosen)]
    points["place"] = points.rung.map({name: place for place, name in enumerate(order)})
    points = points.sort_values(["part", "place", "round", "max_lr", "muon_lr"], kind="stable", ignore_index=True)
    return Record(facts, points[[*COLUMNS]]), skipped


def write_csv(record, path):
    facts = "".join(f"# {name}: {value}\n" for name, value in record.facts.items())
    write_whole(path, facts + record.points.convert_dtypes().to_csv(index=False))


def read_csv(path):
    lines = lines_of(path.read_text(encoding="utf-8"))
    n_facts = sum(line.startswith("# ") for line in lines)
    points = pandas.read_csv(path, skiprows=n_facts, dtype=COLUMNS, usecols=[*COLUMNS])
    points["rung"] = points.rung.map(today)
    return Record(read_headers(lines[:n_facts]), points)


def read_race(folder):
    """The Record of the race in a folder; None without one, or before its first run has ended."""
    path = Path(folder) / RACE
    race = path.exists() and read_csv(path)
    return race if race and race.names else None
