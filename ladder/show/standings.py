"""Training recipes in one table: a race, each script beside the row before, or a comparison, each beside the first."""
import math

from ladder import formats
from ladder.records.recipes import TUNING_SEEDS, doubts, show_rates
from ladder.records.significance import BEYOND_CHANCE, FEWEST_SEEDS
from ladder.rungs.list import rung_of, today
from ladder.show.columns import Column

BRACKETS = "In parentheses: the lowest and the highest value (range), or a 99 % interval."
FOR_ALL = ("The intervals hold for all rows at once (Bonferroni), so one may include zero although Holm's p < "
           f"{BEYOND_CHANCE}.")
REFUTED = "†"  # at a star that a check removed


def label_of(name):
    """What a reader calls a script: its label, or the file."""
    return rung_of(name).label or f"{name}.py"


def as_ratio(logarithm):
    """A ratio, from its logarithm."""
    return formats.ratio(math.exp(logarithm))


def between(effect, form):
    """An effect's mean and its interval."""
    return formats.with_interval(effect.mean, effect.low, effect.high, form) if effect else formats.NOTHING


def p_of(effect, refuted=False):
    if not effect:
        return formats.NOTHING
    return formats.p(effect.p) + "*" * effect.significant + REFUTED * refuted


SCRIPT = Column("script", lambda row: rung_of(row.name).row if rung_of(row.name).label else label_of(row.name))
TRIES = Column("tries", lambda row: str(row.tries), goes=1)


def recipe_columns(beside, refuted=()):
    """The columns of the standings; `beside` is what each script is compared with."""
    return [
        Column("learning rates", lambda row: show_rates(float(f"{rate:.3g}") for rate in row.rates),
               "learning rates: AdamW's, and Muon's if the script has Muon", goes=2),
        Column("val loss (range)",
               lambda row: formats.with_spread(row.val_loss, row.val_low, row.val_high, formats.loss),
               "val loss: the mean over the seeds", goes=6),
        Column(f"change from {beside}", lambda row: between(row.change, formats.difference),
               "change: of the loss, the mean over pairs of runs with the same seed, with its 99 % interval"),
        Column("p", lambda row: p_of(row.change, row.name in refuted),
               f"p: from a paired t-test, after Holm's correction for all rows; * marks p < {BEYOND_CHANCE} with at "
               f"least {FEWEST_SEEDS} seeds"),
        Column("ms/step (range)", lambda row: formats.with_spread(row.ms, row.ms_low, row.ms_high),
               "ms/step: the median of timed runs, without compilation and validation", goes=4),
        Column(f"ms / {beside} (99 %)", lambda row: between(row.times, as_ratio),
               f"ms / {beside}: from pairs of runs, timed one after the other", goes=5),
        Column("parameters", lambda row: formats.number(row.parameters), goes=3),
    ]


def how_sure(record):
    """In a sentence, whether p holds the luck of the searches."""
    if not len(record.part("search")):
        return "p and the intervals apply to these learning rates only; other rates could change the result."
    if record.own_searches:
        return ("p and the intervals include only a part of the luck of the learning-rate search: each seed has its "
                "own rates, of which the table shows the median.")
    return "p may be too low, because p and the intervals leave out the luck of the learning-rate search."


def race_caption(report, times=True):
    """What a reader of a race needs to know beside what explains the columns; `times`: whether these are shown."""
    record, table = report.race, report.race.race_table
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
    if n_seeds < record.planned:
        seeds = f"only {n_seeds} of {record.planned} seeds, so no p"
    elif n_seeds < FEWEST_SEEDS:
        seeds += ", too few for a star"
    rounds_of_time = max((effect.pairs for effect in table.times if effect), default=0)
    timed = f"timed in {rounds_of_time} rounds, one script at a time" if rounds_of_time else "not timed"
    modern = any(rung_of(name).file.startswith("beyond/modern/") for name in record.names)
    parts = [f"{seeds}; {searched}; {timed}." if times else f"{seeds}; {searched}."]
    if modern and "total batch" in record.facts:
        parts.append("These scripts also had gradient accumulation and checkpoints, and other searches for rates. "
                     "Do not compare their losses with those of newer races.")
    if table.change.notna().any():
        parts.append(how_sure(record))
    unsure = [f"the rates of {label_of(name)}, which {why}" if name else why for name, why in doubts(record)]
    if unsure:
        parts.append(f"Doubtful: {'; '.join(unsure)}.")
    return " ".join(parts + [f"{REFUTED} {why}." for why in refuted_in(report).values()])


def refuted_in(report):
    """{script: why its star does not stand} of a race, which its machine.json says."""
    return {today(name): why for name, why in report.machine.get("refuted", {}).items()}


def race_columns(report, scripts=(SCRIPT,)):
    """`scripts` are the columns that name a script."""
    return [*scripts, *recipe_columns("the previous row", refuted_in(report))]
