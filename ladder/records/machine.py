"""What a folder records about the machine that its logs come from."""
import json
from pathlib import Path

from ladder.errors import UserError


def read_json(path, check, remedy):
    """The JSON object in the file `path` after `check`, which raises for a wrong one; {} without the file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        check(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): {remedy}") from None
    return data


def read_machine(folder):
    """What `run` recorded about the machine; {} without it."""
    return read_json(Path(folder) / "machine.json", dict, "run python -m ladder run again, or delete it")
