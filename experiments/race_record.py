"""The standings of a race, race.json, from its record, race.csv: what `report` and the page show of it.

Used by race.py and race_docs.py; `ladder/records/recipes.py` reads and writes race.csv.
"""
import json
from dataclasses import asdict
from pathlib import Path

from ladder.files import write_whole
from ladder.records.logs import run_of, stage_of
from ladder.records.race import Race, Racer
from ladder.records.recipes import TUNING_SEEDS, doubts, effects, rates_of
from ladder.records.significance import FEWEST_SEEDS
from ladder.records.summary import title_of

FILE = "race.csv"
LONG_TRUNK = " Long trunk: do not compare with newer races."


def middle_and_range(values, middle):
    """(median or mean, lowest, highest) of a Series."""
    return float(middle(values)), float(values.min()), float(values.max())


def racers_of(record):
    """(the target, a Racer for each rung) of a race."""
    ends, step_ms, first = record.ends, record.step_ms(), record.names[0]
    target = record.target(first)
    steps = record.steps_to(target)
    tokens, seconds = steps * ends.tokens / ends.step, steps.mul(step_ms, level="rung") / 1000
    found, racers = effects(ends.val_loss, against_first=False), []
    for name in record.names:
        first_run = next(ends.loc[name].itertuples())
        curve = record.tested.query("rung == @name").groupby("step").val_loss.mean()
        effect = found.get(name)
        racers.append(Racer(
            name, rates_of(first_run), middle_and_range(ends.val_loss[name], lambda values: values.mean()),
            *(middle_and_range(values, lambda values: values.median()) for values in (
                tokens[name], seconds[name], 100 * seconds[name] / seconds[first].median())),
            float(step_ms[name]), first_run.parameters, effect and [effect.mean, effect.low, effect.high],
            effect and effect.p, bool(effect and effect.significant), curve.index.tolist(), curve.tolist()))
    return target, racers


def caption(record):
    """What a reader of these standings needs to know beside KEY."""
    rounds, timing, search = record.tested, record.part("timing"), record.part("search")
    searched = "rates given"
    if len(search):
        tries = sorted({len(losses) for losses in record.sweep.values()})
        searched = f"{' to '.join(str(n) for n in dict.fromkeys((tries[0], tries[-1])))} tries of rates"
        if search.step.max() < rounds.step.max():
            searched += f" in {search.step.max():,} steps"
    n_seeds = rounds.seed.nunique()
    seeds = "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"
    if record.part("round").seed.isin(TUNING_SEEDS).any():
        seeds += f" without {TUNING_SEEDS[-1]}, the search's"
    if n_seeds < FEWEST_SEEDS:
        seeds += ", too few for a star"
    timed = f"timed {timing['round'].nunique()} times, alone" if record.is_timed else "ms/step of the same runs"
    doubtful = "; ".join(f"{stage_of(name).called}'s rates, which {why}" if name else why
                         for name, why in doubts(record))
    modern = any(stage_of(name).file.startswith("beyond/modern/") for name in record.names)
    trunk = LONG_TRUNK if modern and "total batch" in record.facts else ""
    return f"{seeds}; {searched}; {timed}." + trunk + (f" Doubtful: {doubtful}." if doubtful else "")


def row_of(record, name):
    """What is known of a rung as of any other run: {a column of a report's summary: value}."""
    run = run_of(Path(f"{name}.log"), record.facts)
    ends, timed = record.ends.loc[name], record.timed[record.timed.rung == name]
    row = {
        "name": name, "title": title_of(run), "ms": timed.ms.median(), "ms_low": timed.ms.min(),
        "ms_high": timed.ms.max(), "rounds": len(timed), "counted": int(timed.step.min()) // 2,
        "first_step_s": (timed.first_ms / 1000).median(), "tokens": run.tokens_per_step, "ranks": run.ranks,
        "peak_memory_gb": ends.peak_memory_gb[ends.peak_memory_gb > 0].median(),
        "last_loss": ends.loss.median(skipna=False), "last_step": int(ends.step.min()), "complete": True,
        "last_val_loss": ends.val_loss.median()}
    return {what: value for what, value in row.items() if value is not None and value == value}


def write_standings(record, path):
    """What the tool shows of a race, a line for each rung."""
    target, racers = racers_of(record)
    rows = [row_of(record, name) for name in record.names]
    race = Race(record.facts, target, caption(record), rows, racers)
    lines = json.dumps(asdict(race)).replace(', {"name"', ',\n{"name"')
    write_whole(path, lines + "\n")
