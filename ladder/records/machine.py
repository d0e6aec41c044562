"""What a folder records about the machine that its logs come from."""
import json
from pathlib import Path

from ladder.count.cards import Card
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


def measured_card(folder):
    """The machine of a run as a Card: the rates that were measured in it, not a datasheet's."""
    machine = read_machine(folder)
    if not {"rates", "bytes_per_second"} <= machine.keys():
        raise UserError(f"{folder}/machine.json: has no measured rates of products and memory; run it again, or name a "
                        "card")
    rates = {name: rate / 1e12 for name, rate in machine["rates"].items()}  # 16 bits: whichever format is in hardware
    bits16 = rates.get("bfloat16") or rates.get("float16") or rates["float32"]
    return Card(machine["name"], rates["float32"], rates.get("tf32", rates["float32"]), bits16,
                machine["bytes_per_second"] / 1e9, f"measured, {folder}")
