"""The scripts as modules: a rung by its label, which rungs a lesson is about, its flags, its fresh models."""
import itertools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ladder.rungs.list import BY_LABEL, RUNGS, load_script  # noqa: E402

LEAVES = [entry for entry in RUNGS if entry not in {start for other in RUNGS for start in other.starts}]
TRIED, _, TRIED_FILE = os.environ.get("LADDER_TRY", "").partition("=")  # a rung's label, and the file in its place


def load_module(path):
    """Import a file of the project under its own name, fresh."""
    return load_script(SimpleNamespace(name=path.stem, path=path))


def rung(label):
    """A fresh module of the rung with this label ("0" to "10", "ddp", "gradient_accumulation" and up), safe to patch.

    LADDER_TRY=LABEL=FILE, of `python -m ladder try`, puts another file in the place of one rung.
    """
    entry = BY_LABEL[str(label)]
    return load_script(SimpleNamespace(name=entry.name, path=Path(TRIED_FILE)) if TRIED == entry.label else entry)


def rungs_that_change(*definitions, since="0"):
    """The labels of rungs whose lesson may lie in one of these definitions; in others it is that of the rung before.

    test_check_laws.py holds the scripts to that, so these stand for all: `since`, and those that go back to it.
    """
    def overlap(one, other):
        return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")

    return [entry.label for entry in BY_LABEL.values() if builds_on(entry.label, since) and (
        entry.start is None or any(overlap(*pair) for pair in itertools.product(definitions, entry.may_change)))]


def builds_on(label, first):
    """Whether a rung is `first` or goes back to it."""
    return label == first or any(builds_on(start.label, first) for start in BY_LABEL[label].starts)


def validates(label):
    """Whether a rung has a validation loss."""
    return builds_on(label, "distributed_validation") or builds_on(label, "validation")


def known_flags(module, **wanted):
    """The words for these settings, as far as a script has them."""
    known = vars(module.parse_args([]))
    return [word for name, value in wanted.items() if name in known
            for word in (f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}", str(value))]


def new_gpt(module, size="tiny", vocab_size=50257):
    """A fresh model of a script, of one of the shapes that --model names."""
    return module.GPT(module.model_config(module.parse_args(["--model", size]), vocab_size))


def tiny(label, size="tiny", vocab_size=257):
    """A fresh small model of a rung, always with the same weights."""
    import torch  # not where pytest only starts the processes that test

    torch.manual_seed(0)
    return new_gpt(rung(label), size, vocab_size)
