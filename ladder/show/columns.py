"""The columns of the ladder's tables: each a heading, and the text that it shows of a row of the summary.

A table in a terminal, in Markdown or on the page is a list of columns. Numbers have the formats of formats.py.
"""
from dataclasses import dataclass, replace

import pandas

from ladder import formats
from ladder.records.significance import BEYOND_CHANCE, FEWEST_ROUNDS, is_significant
from ladder.formats import NOTHING
from ladder.rungs.list import rung_of

CONVENTION = "MFU counts attention's FLOPs in full, as PaLM does"
STARS = (f"× before: * is significant (p < {BEYOND_CHANCE} after Holm's correction, paired test over "
         f"{FEWEST_ROUNDS} rounds or more), ? too few rounds to tell; without a mark no significant difference")
OLDER = "‡"  # at a row of older code


@dataclass(frozen=True)
class Column:
    heading: str
    text: object  # a function of a row
    explains: str = ""  # what a caption says of it


def explained(columns):
    """{heading: what a caption says of the column}."""
    return {column.heading: column.explains for column in columns if column.explains}


def texts_of(rows, columns):
    """What columns show of rows: a DataFrame of short strings, without columns that have no value."""
    texts = pandas.DataFrame({column.heading: [column.text(row) for row in rows] for column in columns})
    return texts.loc[:, (texts != NOTHING).any()]


def times_before(row):
    """The ratio to the rung before, with what a paired test says of it."""
    if row.times_before is None:
        return NOTHING
    return formats.ratio(row.times_before) + ("?" if row.p_before is None else "*" * is_significant(row.p_before))


def mfu_of(row):
    return formats.share(row.mfu) + " (!)" * (row.mfu is not None and row.mfu > 1)


LABEL = Column("", lambda row: rung_of(row.name).label)
TITLE = Column("the one change", lambda row: row.title + OLDER * row.older_code)
LINKED_TITLE = Column("the one change", lambda row: f"[{row.title}]({rung_of(row.name).file}){OLDER * row.older_code}")
MS = Column("ms/step", lambda row: formats.ms(row.ms))
SPREAD = Column("spread", lambda row: formats.spread(row.ms_low, row.ms_high))
MS_SPREAD = Column("ms/step", lambda row: f"{MS.text(row)} ({SPREAD.text(row)})")
TOKENS = Column("tokens/sec", lambda row: formats.number(row.tokens_per_second))
BASELINE = Column("× baseline", lambda row: formats.ratio(row.times_baseline))
BEFORE = Column("× before", times_before, STARS)
MFU = Column("MFU", mfu_of, CONVENTION)
CAUSAL = Column("causal", lambda row: formats.share(row.mfu_causal),
                "causal: MFU with the half of attention's FLOPs that a causal kernel computes")
MEMORY = Column("peak GB", lambda row: formats.gigabytes(row.peak_memory_gb))
LOSS = Column("loss", lambda row: formats.loss(row.last_loss))
FIRST = Column("1st step s", lambda row: formats.seconds(row.first_step_s),
               "1st step: with compilation, unless its graphs were in torch's cache")
VAL_LOSS = Column("val loss", lambda row: NOTHING if row.last_val_loss is None else formats.loss(row.last_val_loss))
# From a narrow terminal, in this order.
COLUMNS_TO_GO = ["causal", "1st step s", "val loss", "spread", "tokens/sec", "loss", "peak GB", "MFU", "× before"]


def all_columns(report):
    """What a terminal and the page show."""
    last_steps = "/".join(map(str, sorted({row.last_step for row in report.rows})))
    loss = replace(LOSS, heading=f"loss @{last_steps}")
    return [TITLE, MS, SPREAD, TOKENS, BASELINE, BEFORE, MFU, CAUSAL, MEMORY, loss, FIRST, VAL_LOSS]


README_COLUMNS = [replace(LABEL, heading="rung"), LINKED_TITLE, MS_SPREAD, BEFORE, BASELINE]
RESULTS_COLUMNS = [*README_COLUMNS[:3], TOKENS, *README_COLUMNS[3:], MFU, MEMORY]


def markdown(texts, n_left=2):
    """A DataFrame of strings in Markdown: the first `n_left` columns are words, the others numbers."""
    lines = [list(texts), ["---"] * n_left + ["--:"] * (len(texts.columns) - n_left), *texts.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
