"""The columns of the ladder's tables: each a heading, and the text that it shows of a row of the summary.

A table in a terminal, in Markdown or on the page is a list of columns. Numbers have the formats of formats.py.
"""
from dataclasses import dataclass, replace
from operator import itemgetter

from ladder import formats
from ladder.records.significance import BEYOND_CHANCE, FEWEST_ROUNDS, is_significant
from ladder.formats import NOTHING
from ladder.rungs.list import rung_of

CONVENTION = "MFU counts attention's FLOPs in full, as PaLM does"
STARS = (f"× previous: * is significant (p < {BEYOND_CHANCE} after Holm's correction, paired test over "
         f"{FEWEST_ROUNDS} rounds or more), ? too few rounds to tell; without a mark no significant difference")
OLDER = "‡"  # at a row of older code


@dataclass(frozen=True)
class Column:
    heading: str
    text: object  # a function of a row
    explains: str = ""  # what a caption says of it
    goes: int = 99  # a terminal that is too narrow leaves out the column with the least, of several the last
    has_words: bool = False  # not numbers


def columns_of(texts, first_to_go=(), explains=None):
    """Columns for rows that are texts, {heading: text}."""
    return [Column(heading, itemgetter(heading), (explains or {}).get(heading, ""),
                   first_to_go.index(heading) if heading in first_to_go else 99) for heading in texts[0]]


def texts_of(rows, columns):
    """{heading: what the column shows of each row}, without columns that have no value."""
    texts = {column.heading: [column.text(row) for row in rows] for column in columns}
    return {heading: cells for heading, cells in texts.items() if {*cells} - {NOTHING}}


def times_before(row):
    """The ratio to the rung before, with what a paired test says of it."""
    if row.times_before is None:
        return NOTHING
    return formats.ratio(row.times_before) + ("?" if row.p_before is None else "*" * is_significant(row.p_before))


def mfu_of(row):
    return formats.share(row.mfu) + " (!)" * (row.mfu is not None and row.mfu > 1)


LABEL = Column("", lambda row: rung_of(row.name).label)
RUNG = Column("rung", lambda row: f"{rung_of(row.name).label} {row.title}".strip() + OLDER * row.older_code)
LINKED_TITLE = Column("the one change", lambda row: f"[{row.title}]({rung_of(row.name).file}){OLDER * row.older_code}")
MS = Column("ms/step", lambda row: formats.ms(row.ms))
SPREAD = Column("spread", lambda row: formats.spread(row.ms_low, row.ms_high), goes=4)
MS_SPREAD = Column("ms/step", lambda row: f"{MS.text(row)} ({SPREAD.text(row)})")
TOKENS = Column("tokens/sec", lambda row: formats.number(row.tokens_per_second), goes=5)
BASELINE = Column("× baseline", lambda row: formats.ratio(row.times_baseline))
BEFORE = Column("× previous", times_before, STARS, goes=9)
MFU = Column("MFU", mfu_of, CONVENTION, goes=8)
CAUSAL = Column("causal", lambda row: formats.share(row.mfu_causal),
                "causal: MFU with the half of attention's FLOPs that a causal kernel computes", goes=1)
MEMORY = Column("peak GB", lambda row: formats.gigabytes(row.peak_memory_gb), goes=7)
LOSS = Column("loss", lambda row: formats.loss(row.last_loss), goes=6)
FIRST = Column("1st step s", lambda row: formats.seconds(row.first_step_s),
               "1st step: with compilation, unless its graphs were in torch's cache", goes=2)
VAL_LOSS = Column("val loss", lambda row: NOTHING if row.last_val_loss is None else formats.loss(row.last_val_loss),
                  goes=3)


def all_columns(report):
    """What a terminal and the page show."""
    last_steps = "/".join(map(str, sorted({row.last_step for row in report.rows})))
    loss = replace(LOSS, heading=f"loss @{last_steps}")
    return [RUNG, MS, SPREAD, TOKENS, BASELINE, BEFORE, MFU, CAUSAL, MEMORY, loss, FIRST, VAL_LOSS]


README_COLUMNS = [replace(LABEL, heading="rung"), LINKED_TITLE, MS_SPREAD, BEFORE, BASELINE]
RESULTS_COLUMNS = [*README_COLUMNS[:3], TOKENS, *README_COLUMNS[3:], MFU, MEMORY]


def markdown(texts, n_words=2):
    """{heading: texts} in Markdown: the first `n_words` columns are words, the others numbers."""
    lines = [list(texts), ["---"] * n_words + ["--:"] * (len(texts) - n_words), *zip(*texts.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
