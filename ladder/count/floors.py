"""The floor of a rung on a card: the sum over a step's kernels of max(FLOPs / rate, bytes / bandwidth).

What it is and is not: docs/results.md. floors.json has the counts of GPT-2 (124M) at B=16 T=1024, made by
`python -m ladder.count.kernels`.
"""
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from ladder.errors import UserError
from ladder.rungs.list import RUNGS

STORE = Path(__file__).with_name("floors.json")
STORED = {"model": "gpt2", "B": 16, "T": 1024}
COUNTED = [rung.label for rung in RUNGS if rung.has_floor and not rung.torchrun]
TIMES_FLOOR = 1.1794, 1.8953  # what a step took, at least and at most: the GPUs of logs/reference, the lecture's A100
NOT_COUNTED = "floors are of one card, without float8"  # so not of ddp, what shards, fp8


class Kernel(NamedTuple):
    """One operation on the GPU; `launches` is more than 1 where its tensors do not fit into one launch."""

    number_format: str  # of a matrix product; "" if it is none
    flops: int
    bytes: int
    launches: int = 1


def floor_of(kernels, card):
    """{"floor": ms of a step on a card, "products": of its matrix products only, "traffic": of its bytes only}.

    `kernels` is {Kernel: how many}.
    """
    ms = Counter()
    for kernel, n in kernels.items():
        products = 1000 * n * kernel.flops / card.rate(kernel.number_format) if kernel.flops else 0
        traffic = 1000 * n * kernel.bytes / (1e9 * card.bandwidth)
        ms.update({"floor": max(products, traffic), "products": products, "traffic": traffic})
    return dict(ms)


def read_store():
    """{label: {"lesson": its hash, "torch": version, "kernels": {Kernel: how many}}}."""
    rungs = json.loads(STORE.read_text(encoding="utf-8"))["rungs"]
    for rung in rungs.values():
        rung["kernels"] = {Kernel(*kernel): n for n, *kernel in rung["kernels"]}
    return rungs


def counted_rungs(rungs, console):
    """The labels of those rungs that floors are counted of; UserError without one, and says which others are left."""
    labels = [rung.label for rung in rungs]
    counted = [label for label in labels if label in COUNTED]
    if not counted:
        raise UserError(f"--rungs {','.join(labels)}: {NOT_COUNTED}; give others")
    left_out = [label for label in labels if label not in COUNTED]
    if left_out:
        console.print(f"left out: {', '.join(left_out)}; {NOT_COUNTED}")
    return counted


def floor_row(kernels, cards):
    """One rung: TFLOP by number format, GB, launches, and {card: ms} of the floor and its two parts."""
    tflop = Counter()
    for kernel, n in kernels.items():
        tflop[kernel.number_format] += n * kernel.flops / 1e12
    return {"tflop": {name: x for name, x in tflop.items() if x},
            "gb": sum(n * kernel.bytes for kernel, n in kernels.items()) / 1e9,
            "launches": sum(n * kernel.launches for kernel, n in kernels.items()),
            "ms": {card.name: floor_of(kernels, card) for card in cards}}


def stored_floors(cards):
    """{label: what floor_row says of it} of all rungs that are stored."""
    return {label: floor_row(rung["kernels"], cards) for label, rung in read_store().items()}


def floors_on(card):
    """{label: ms of its floor} on one card."""
    return {label: row["ms"][card.name]["floor"] for label, row in stored_floors([card]).items()}
