"""What a folder records about the machine that its logs come from."""
from pathlib import Path

from ladder.count.cards import Card
from ladder.errors import UserError
from ladder.files import read_json


def read_machine(folder):
    """What `run` recorded about the machine; {} without it."""
    return read_json(Path(folder) / "machine.json")


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
