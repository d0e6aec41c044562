"""The tree of rungs: as text, by branches or by chains; and as the page shows it, with a path of two evenings."""
from dataclasses import dataclass

from ladder.rungs.list import RUNGS


@dataclass(frozen=True)
class Part:
    """A part of the page: the scripts of a folder of beyond/, or the others."""

    id: str  # the folder's name, or "ladder"
    title: str
    intro: str  # in the docstrings' Markdown

    @property
    def rungs(self):
        return [rung for rung in RUNGS if (rung.track or "ladder") == self.id]


PAGE_PARTS = [
    Part("ladder", "The ladder",
         "Each lesson has the script's own explanation, an exercise and the change, which stays folded until you open "
         "it. Below it stands what the change did on the machines that ran it."),
    Part("modern", "From GPT-2 to Qwen3, and past it",
         "This branch starts from rung 10 and trains in one process, with one batch a step. From `muon` to "
         "`zero_init`, the scripts change the optimizer, the schedule and the architecture, until GPT-2 has become a "
         "Qwen3. They do not make a step faster, so they are compared by their validation loss, each at its own best "
         "learning rates. The other scripts start from `zero_init`."),
    Part("small_text", "A small text", "These scripts help a model that reads its text many times."),
    Part("long_run", "A long run",
         "These scripts do not make a step faster. They add what a long training run needs. `gradient_checkpointing` "
         "saves memory in the blocks, and `chunked_cross_entropy` saves the memory of the logits. `long_run` combines "
         "all of them with the model of `zero_init`. `grouped_query_attention` gives it the shape of the published "
         "Qwen3s."),
    Part("several_cards", "Several cards",
         "Under DDP every card holds the whole model and its optimizer. With `sharded_optimizer` the cards share the "
         "optimizer's work and moments. With FSDP they also share the parameters and gradients, so a model can be "
         "larger than one card holds."),
    Part("gpu", "The last milliseconds on a GPU",
         "These scripts start from rung 10, and save what is left to save in a step on one GPU."),
]

# A learner's path; every other lesson is reference.
EVENINGS = {"first": ("0", "1", "2", "3", "5", "6"), "second": ("8", "10", "gradient_accumulation", "muon", "rope")}
EXERCISES = {"first": ("0", "1", "6"), "second": ("9", "gradient_accumulation")}


def tree_lines(rung=RUNGS[0], before="", mark=""):
    """Yields (a line of the tree: a label behind its branches, the rung), for a rung and all that come from it.

    A rung starts from the line above it; from a line with several branches start several. `before` are the branches
    that pass the rung, `mark` is its own.
    """
    more = f" (and {', '.join(start.label for start in rung.starts[1:])})" if rung.starts[1:] else ""
    yield before + mark + rung.label + more, rung
    before += {"": "", "├─ ": "│  ", "└─ ": "   "}[mark]
    children = children_of(rung)
    for child in children:
        yield from tree_lines(child, before, "" if len(children) == 1 else "└─ " if child is children[-1] else "├─ ")


def chains(rung):
    """Yields what comes from a rung as lists in which each rung starts from the one before it.

    A list ends where no rung follows, or several do; each of these begins a list of its own.
    """
    for child in children_of(rung):
        chain = [rung, child]
        while len(children_of(chain[-1])) == 1:
            chain += children_of(chain[-1])
        yield chain
        yield from chains(chain[-1])


def children_of(rung):
    """The rungs that are compared with this one."""
    return [child for child in RUNGS if child.start is rung]


def after(rung):
    """The rungs that start from this one."""
    return [later for later in RUNGS if rung in later.starts]


def depth(rung):
    """How many branches lie before a rung; one that starts from two rungs belongs to the second."""
    if rung.start is None:
        return 0
    parent = rung.starts[-1]
    children = [child for child in after(parent) if child.starts[-1] is parent]
    return depth(parent) + (len(children) > 1)


def evening(rung):
    """The evening of the path that a rung belongs to; None for reference."""
    return next((name for name, labels in EVENINGS.items() if rung.label in labels), None)
