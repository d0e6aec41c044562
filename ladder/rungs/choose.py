"""What users write for rungs, such as "0-2,ddp", "7" or a file's name, and the rungs that they mean."""
from pathlib import Path

from ladder.errors import UserError
from ladder.rungs.list import BY_LABEL, BY_NAME, RUNGS

NUMBERS = [label for label in BY_LABEL if label.isdigit()]
OTHERS = [label for label in BY_LABEL if not label.isdigit()]
CHOICE = f"0 to {max(NUMBERS, key=int)}, {', '.join(OTHERS)}"


def parse_rungs(text):
    """The rungs of "0-2,ddp", without duplicates; raises UserError for anything that is not a rung."""
    labels, rungs = list(BY_LABEL), []
    for part in text.replace(" ", "").split(","):
        ends = part.split("-")
        places = [labels.index(label) for label in ends if label in labels]
        if len(places) != len(ends) or len(ends) > 2 or places[0] > places[-1]:
            raise UserError(f"--rungs {text}: not rungs; write for example 0-10 or 0,5,ddp, of {CHOICE}")
        rungs += RUNGS[places[0] : places[-1] + 1]
    return list(dict.fromkeys(rungs))


def find_rung(word):
    """The rung called "7", "07" or "ddp", or by its file's name."""
    rung = BY_LABEL.get(word.lstrip("0") or "0") or BY_NAME.get(Path(word).stem)
    if rung is None:
        raise UserError(f"no rung {word}: write one of {CHOICE}, or its file's name")
    return rung
