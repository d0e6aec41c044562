"""Files and folders of the tool."""
import json
import time
from pathlib import Path

from ladder.errors import UserError


def write_whole(path, text):
    """Write `text` to the Path `path`, all of it or nothing, even if killed meanwhile; OSError if it cannot."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    partial.replace(path)


def new_folder(inside):
    """A folder called by date and time."""
    return Path(inside) / time.strftime("%Y-%m-%d_%H-%M-%S")


def read_json(path, needs=()):
    """The JSON in a file, an object that has the keys `needs`; {} without the file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for key in needs:
            if key not in found:
                raise ValueError(f"it lacks {key}")
        return found
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and run its command again") from None
