"""What a folder records about the machine that its logs come from."""
import json
import math
from pathlib import Path

from ladder.errors import UserError


def read_machine(folder):
    """What `run` recorded about the machine; {} without it."""
    path = Path(folder) / "machine.json"
    if not path.exists():
        return {}
    try:
        machine = json.loads(path.read_text(encoding="utf-8"))
        machine["rates"] = {name: float(rate) for name, rate in machine["rates"].items()}
        if not machine["rates"] or not all(0 < rate < math.inf for rate in machine["rates"].values()):
            raise ValueError(f"rates: {machine['rates']}")
        return machine
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): run python -m ladder run again, or delete it") from None
