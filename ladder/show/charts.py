"""The bars that both draw: the pictures (plots.py) and the page."""
from dataclasses import dataclass

from ladder import formats
from ladder.records.step_profile import KINDS, is_reliable
from ladder.rungs.list import BY_NAME, LADDER, rung_of

BLUE = "#4f7fc4"
# One color per kind of work. Blue is the arithmetic; color-blind readers can tell all eight apart, on white and on
# black.
KIND_COLORS = {"matrix products": "#2463c0", "head": "#6fbdf0", "attention": "#c95a2e",
               "normalization and pointwise": "#e5bb3f", "cross-entropy": "#9676b8", "optimizer": "#35ab72",
               "data": "#5f5a66", "waiting": "#b6bfba"}


@dataclass
class Bar:
    title: str
    label: str  # of its rung
    parts: list  # one length, or one for each of KIND_COLORS
    end: str  # the text behind it
    spread: tuple = ()  # the lowest and the highest value, as a thin line
    floor: float = 0  # a mark, if not 0
    pale: bool = False  # where its numbers are in doubt
    color: str = BLUE


def step_bars(report, floors):
    """Milliseconds of a step, of the rungs 0 to 10; `floors` are the ms of {label: the card's counted floor}."""
    return [Bar(row.title, rung_of(row.name).label, [row.ms], formats.ms(row.ms), (row.ms_low, row.ms_high),
                floors.get(rung_of(row.name).label, 0)) for row in report.rows if rung_of(row.name) in LADDER]


def profile_bars(profile):
    """Milliseconds of each rung's step by kind of work; the mark is what its products alone take."""
    bars = []
    for row in profile["rungs"] if profile else []:
        rung, parts, sure = BY_NAME[row["name"]], [row["parts_ms"][kind] for kind in KINDS], is_reliable(row)
        bars.append(Bar(rung.title, rung.label, parts, formats.ms(sum(parts)) + " (!)" * (not sure),
                        floor=row["products_ms"], pale=not sure))
    return bars
