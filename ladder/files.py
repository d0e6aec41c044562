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


def read_json(path):
    """The JSON in a file; {} without the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and run its command again") from None
