"""Training recipes in one table: a race, each script beside the row before, or a comparison, each beside the first."""
import math

import pandas

from ladder.records.logs import stage_of
from ladder.records.recipes import TUNING_SEEDS, doubts, show_rates
from ladder.records.significance import BEYOND_CHANCE, FEWEST_SEEDS
from ladder.rungs.list import today
from ladder.show import formats
from ladder.show.terminal import print_texts

IN_A_LINK = ["label", "the one change"]  # columns of a race in Markdown; elsewhere "script" says it
FOR_ALL = (" The intervals hold for all rows at once, by Bonferroni's correction. It is stricter than Holm's, so an "
           f"interval may include zero although p < {BEYOND_CHANCE}.")
REFUTED = "†"  # at a star that a check removed
FIRST_TO_GO = ["tries", "learning rates", "parameters", "ms/step", "ms /", "val loss"]  # of a narrow terminal


def called(name):
    """What a reader calls a script: its label, or the file."""
    return stage_of(name).label or f"{name}.py"


def exactly(logarithm):
    """A ratio, from its logarithm."""
    return formats.ratio(math.exp(logarithm))


def between(effect, form):
    """An effect's mean and its interval."""
    return formats.with_interval(effect.mean, effect.low, effect.high, form) if effect else formats.NOTHING


def p_of(effect, refuted=False):
    if not effect:
        return formats.NOTHING
    return formats.p(effect.p) + "*" * effect.significant + REFUTED * refuted


def recipe_texts(table, beside, refuted=()):
    """The standings as short texts; `beside` is what each script is compared with, in the headings."""
    rows = []
    for row in table.itertuples():
        rung = stage_of(row.name)
        rows.append({
            "script": rung.row if rung.label else called(row.name),
            "label": f"`{called(row.name)}`",
            "the one change": f"[{rung.title}]({rung.file})",
            "learning rates": show_rates(float(f"{rate:.3g}") for rate in row.rates),
            "tries": str(row.tries),
            "val loss (range)": formats.with_spread(row.val_loss, row.val_low, row.val_high, formats.loss),
            f"− {beside} (99 %)": between(row.change, formats.difference),
            "p": p_of(row.change, row.name in refuted),
            "ms/step (range)": (formats.with_spread(row.ms, row.ms_low, row.ms_high) if math.isfinite(row.ms)
                                else formats.NOTHING),
            f"ms / {beside} (99 %)": between(row.times, exactly),
            "parameters": formats.number(row.parameters),
        })
    texts = pandas.DataFrame(rows)
    times = [heading for heading in texts if heading.startswith("ms")]
    return texts if table.ms.notna().any() else texts.drop(columns=times)


def how_sure(record):
    """In a sentence, whether p holds the luck of the searches."""
    if not len(record.part("search")):
        return "p and the intervals apply to these learning rates only; other rates could change the result."
    if record.own_searches:
        return ("p and the intervals include only a part of the luck of the learning-rate search: each seed has its "
                "own rates, of which the table shows the median.")
    return ("p and the intervals leave out the luck of the learning-rate search: another search would find other "
            "rates. So p may be too low.")


# ---- a race ----------------------------------------------------------------------------------------------------------

COLUMNS = [  # what they are
    "learning rates: AdamW's, and Muon's if the script has Muon.",
    "val loss: the mean over the seeds.",
    "− the row before: the mean change of the loss between runs with the same seed.",
    f"p: from a paired t-test, after Holm's correction for all rows; * marks p < {BEYOND_CHANCE} with at least "
    f"{FEWEST_SEEDS} seeds.",
    f"In parentheses: the lowest and the highest value (range), or a 99 % interval.{FOR_ALL}",
]
KEY = " ".join(COLUMNS)
TIMES = ("ms/step: the median of timed runs, without compilation and validation. ms / the row before: from pairs of "
         "runs, timed one after the other.")


def caption(report):
    """What a reader of a race needs to know beside KEY."""
    record, table = report.race, report.race.table
    rounds, search = record.tested, record.part("search")
    searched = "learning rates not searched"
    if len(search):
        tries = sorted({*table.tries})
        searched = f"{' to '.join(str(n) for n in dict.fromkeys((tries[0], tries[-1])))} tries of learning rates"
        if search.step.max() < rounds.step.max():
            searched += f", of {search.step.max():,} steps each"
    n_seeds = rounds.seed.nunique()
    seeds = "1 seed" if n_seeds == 1 else f"{n_seeds} seeds"
    if record.part("round").seed.isin(TUNING_SEEDS).any():
        seeds += f" without {TUNING_SEEDS[-1]}, the search's"
    if n_seeds < FEWEST_SEEDS:
        seeds += ", too few for a star"
    rounds_of_time = max((effect.pairs for effect in table.times if effect), default=0)
    timed = f"timed in {rounds_of_time} rounds, one script at a time" if rounds_of_time else "not timed"
    modern = any(stage_of(name).file.startswith("beyond/modern/") for name in record.names)
    parts = [f"{seeds}; {searched}; {timed}."]
    if modern and "total batch" in record.facts:
        parts.append("These scripts also had gradient accumulation and checkpoints: do not compare their losses with "
                     "those of newer races.")
    if table.change.notna().any():
        parts.append(how_sure(record))
    unsure = [f"the rates of {called(name)}, which {why}" if name else why for name, why in doubts(record)]
    if unsure:
        parts.append(f"Doubtful: {'; '.join(unsure)}.")
    return " ".join(parts + [f"{REFUTED} {why}." for why in refuted_in(report).values()])


def refuted_in(report):
    """{script: why its star does not stand} of a race, which its machine.json says."""
    return {today(name): why for name, why in report.machine.get("refuted", {}).items()}


def race_texts(report):
    """(the standings as short texts, the caption)."""
    return recipe_texts(report.race.table, "the row before", refuted_in(report)).drop(columns="tries"), caption(report)


def print_race(report, console):
    """The standings in a terminal."""
    texts, below = race_texts(report)
    print_texts(texts.drop(columns=IN_A_LINK), console, f"{report.name}: a race", f"{below} {KEY}",
                {heading: TIMES for heading in texts if heading.startswith("ms/step")}, FIRST_TO_GO)
