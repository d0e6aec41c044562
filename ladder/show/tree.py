"""The tree of rungs: as text; and as the page shows it, in parts, indented, with a path of two evenings."""
from dataclasses import dataclass

from ladder.rungs.list import RUNGS


@dataclass(frozen=True)
class Part:
    """A part of the page: the scripts of a folder of beyond/, or the others."""

    id: str  # the folder's name, or "ladder"
    title: str
    intro: str  # in the docstrings' Markdown


PARTS = [
    Part("ladder", "The ladder",
         "Each lesson is the script's own explanation, an exercise, the change, folded until you ask for it, and what "
         "the change did on the machines that ran it."),
    Part("modern", "From GPT-2 to Qwen3, and past it",
         "A branch of its own, from rung 10 on: one process, one batch a step. The scripts from `muon` to `zero_init` "
         "change the optimizer, the schedule and the architecture: one by one they turn GPT-2 into a Qwen3. A step "
         "does not get faster; what counts is the time to a validation loss, each script with its own best learning "
         "rates. The others start from `zero_init`: for larger models, for fewer tokens to the same loss, for learning "
         "rates that fit a wider model, and for a small model with a large vocabulary."),
    Part("small_text", "A small text", "What a model needs that reads its text many times."),
    Part("long_run", "A long run",
         "These scripts are not about speed. They add what a long training run needs, then lower its memory: first the "
         "activations of the blocks, then the logits. `long_run` joins `chunked_cross_entropy` with the model of "
         "`zero_init`, and `grouped_query_attention` gives it the shape of the published Qwen3s."),
    Part("several_cards", "Several cards",
         "Under DDP every card holds the whole model and its optimizer. Here the cards share them: `sharded_optimizer` "
         "the optimizer's work and moments, FSDP also the parameters and gradients, for a model that does not fit on "
         "one card."),
    Part("gpu", "The last milliseconds on a GPU",
         "From rung 10 on: what is left of a step when the usual means are used up."),
]

# A learner's path; every other lesson is reference.
EVENINGS = {"first": ("0", "1", "2", "3", "5", "6"), "second": ("8", "10", "gradient_accumulation", "muon", "rope")}
EXERCISES = {"first": ("0", "1", "6"), "second": ("9", "gradient_accumulation")}


def parts():
    """Yields (Part, its rungs), in the order of the list of rungs."""
    for part in PARTS:
        yield part, [rung for rung in RUNGS if (rung.track or "ladder") == part.id]


def tree_lines():
    """Yields (a line of the tree: a label behind its branches, the rung), from rung 0 on.

    A rung starts from the line above it; from a line with several branches start several.
    """
    return lines_from(RUNGS[0], "", "")


def lines_from(rung, before, mark):
    """The lines of a rung and of all that come from it; `before` are the branches that pass it, `mark` is its own."""
    more = f" (and {', '.join(start.label for start in rung.starts[1:])})" if rung.starts[1:] else ""
    yield before + mark + rung.label + more, rung
    before += {"": "", "├─ ": "│  ", "└─ ": "   "}[mark]
    children = [other for other in RUNGS if other.start is rung]
    for child in children:
        yield from lines_from(child, before, "" if len(children) == 1 else "└─ " if child is children[-1] else "├─ ")


def after(rung):
    """The rungs that start from this one."""
    return [other for other in RUNGS if rung in other.starts]


def depth(rung):
    """How many branches lie before a rung; one that starts from two rungs belongs to the second."""
    if rung.start is None:
        return 0
    parent = rung.starts[-1]
    children = [other for other in after(parent) if other.starts[-1] is parent]
    return depth(parent) + (len(children) > 1)


def evening(rung):
    """The evening of the path that a rung belongs to; None for reference."""
    return next((name for name, labels in EVENINGS.items() if rung.label in labels), None)
