"""The tree of rungs, as the page draws it: rows of rungs that build on each other, and lines between the rows."""
from dataclasses import dataclass, field

from ladder.rungs.list import RUNGS


@dataclass(frozen=True)
class Section:
    """A part of the page: the rungs from those that start it up to those that start another one."""

    id: str
    title: str
    starts: tuple  # the labels of its first rungs


SECTIONS = [
    Section("ladder", "The ladder", ("0",)),
    Section("long-runs", "A long run", ("11",)),
    Section("memory", "Memory", ("16",)),
    Section("modern", "From GPT-2 to Qwen3", ("validation",)),
    Section("larger", "Larger models", ("25",)),
    Section("small-text", "A small text", ("26",)),
    Section("past-qwen3", "Past Qwen3", ("30",)),
    Section("both", "A long run of a modern model", ("long_run",)),
    Section("published-qwen3s", "The published Qwen3s", ("32",)),
    Section("cards", "Several cards", ("33", "fsdp")),
    Section("rates", "A wide model’s learning rates", ("34",)),
    Section("gpu", "The last milliseconds on a GPU", ("35",)),
]
STARTS = {label: section for section in SECTIONS for label in section.starts}


@dataclass
class Row:
    """Rungs of one section, each but the first the only one that starts from the one before it.

    Vertical lines stand at levels; the rungs of a row stand at the level `depth`, a branch's one to the right of those
    of the rung that it starts from.
    """

    section: Section
    depth: int
    is_branch: bool  # its first rung is one of several that start from the same one
    passing: tuple  # the levels of lines that go on to later branches
    rungs: list = field(default_factory=list)
    goes_on: bool = False  # a rung of a later row starts from its last one


def after(rung):
    """The rungs that start from this one."""
    return [other for other in RUNGS if rung in other.starts]


def drawn_after(rung):
    """Those that the tree shows behind it: one that starts from two rungs stands behind the second."""
    return [other for other in after(rung) if other.starts[-1] is rung]


def tree_rows(rung=RUNGS[0], section=SECTIONS[0], depth=0, is_branch=False, passing=()):
    """The rows of a rung and all that build on it, in the order in which the page shows them."""
    row = Row(section, depth, is_branch, passing, [rung])
    following = drawn_after(rung)
    while len(following) == 1 and following[0].label not in STARTS:
        row.rungs += following
        following = drawn_after(following[0])
    row.goes_on = bool(following)
    yield row
    for one in following:
        section = STARTS.get(one.label, row.section)
        if len(following) == 1:
            yield from tree_rows(one, section, depth, False, passing)
        else:
            later = (depth,) if one is not following[-1] else ()
            yield from tree_rows(one, section, depth + 1, True, passing + later)


def section_of(rung):
    """The section that a rung stands in."""
    return next(row.section for row in tree_rows() if rung in row.rungs)
