"""The tree of rungs as the page shows it: its parts, how far a rung is indented, and a path of two evenings."""
import itertools
from dataclasses import dataclass

from ladder.rungs.list import RUNGS


@dataclass(frozen=True)
class Part:
    """A part of the page: the rungs from those that start it up to those that start another one."""

    id: str
    title: str
    starts: tuple  # the labels of its first rungs
    intro: str  # in the docstrings' Markdown


PARTS = [
    Part("ladder", "The ladder", ("0",),
         "Each lesson is the script's own explanation, an exercise, the change, folded until you ask for it, and what "
         "the change did on the machines that ran it."),
    Part("long-runs", "A long run", ("gradient_accumulation",),
         "These rungs are not about speed: they add what a long training run needs."),
    Part("memory", "Memory", ("gradient_checkpointing",),
         "The same losses in less memory: first the activations of the blocks, then the logits."),
    Part("modern", "From GPT-2 to Qwen3", ("validation",),
         "A branch of its own, from rung 10 on: one process, one batch a step. These scripts change the optimizer, "
         "the schedule and the architecture: one by one they turn GPT-2 into a Qwen3. A step does not get faster; what "
         "counts is the time to a validation loss, each rung with its own best learning rates."),
    Part("larger", "Larger models", ("fp8",), "FP8 for the matrix products that are large enough."),
    Part("past-qwen3", "Past Qwen3", ("frequency_prior",),
         "Fewer tokens to the same loss, in models that transformers does not have."),
    Part("rates", "A wide model's learning rates", ("mup",),
         "What is found in a cheap run of a narrow model is used in a wide one."),
    Part("vocabulary", "A small model's vocabulary", ("sampled_softmax",),
         "GPT-2's 50,257 tokens take most of a small model's step, in its output layer."),
    Part("small-text", "A small text", ("shuffled_windows",), "What a model needs that reads its text many times."),
    Part("both", "A long run of a modern model", ("long_run",),
         "The two trunks meet: the long run of `chunked_cross_entropy` and the model of `zero_init`."),
    Part("published-qwen3s", "The published Qwen3s", ("grouped_query_attention",),
         "`zero_init` has the parts of a Qwen3; this rung gives it the shape of those that are published."),
    Part("cards", "Several cards", ("sharded_optimizer", "fsdp"),
         "Under DDP every card holds the whole model and its optimizer. Here the cards share them: `sharded_optimizer` "
         "the optimizer's work and moments, FSDP also the parameters and gradients, for a model that does not fit on "
         "one card."),
    Part("gpu", "The last milliseconds on a GPU", ("bf16_residual",),
         "From rung 10 on: what is left of a step when the usual means are used up."),
]
STARTS = {label: part for part in PARTS for label in part.starts}

# A learner's path; every other lesson is reference.
EVENINGS = {"first": ("0", "1", "2", "3", "5", "6"), "second": ("8", "10", "gradient_accumulation", "muon", "rope")}
EXERCISES = {"first": ("0", "1", "6"), "second": ("9", "gradient_accumulation")}


def parts():
    """Yields (Part, its rungs), in the order of the list of rungs."""
    part, part_of = None, {}
    for rung in RUNGS:
        part = part_of[rung] = STARTS.get(rung.label, part)
    for part, rungs in itertools.groupby(RUNGS, part_of.get):
        yield part, list(rungs)


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
