"""The floor of a rung on a card: the sum over a step's kernels of max(FLOPs / rate, bytes / bandwidth).

What it is and is not: docs/floors.md. The counts of GPT-2 (124M) at B=16 T=1024 are stored in floors.json.
"""
import ast
import hashlib
import json
from collections import Counter
from pathlib import Path

from ladder.errors import UserError
from ladder.count.flops import SHAPES
from ladder.scripts.stages import BANNER, BY_LABEL, LADDER

STORE = Path(__file__).with_name("floors.json")  # made by `python -m ladder floor --save`
STORED = {"model": "gpt2", "B": 16, "T": 1024}
LONGEST, COUNTED = 1024, [stage.label for stage in LADDER]  # tokens; the rungs' labels


def total(kernels):
    """{(number format, FLOPs, bytes, launches): how many}: all that floors need, in compact form."""
    return Counter((one.number_format, one.flops, one.bytes, one.launches) for one in kernels)


def floor_ms(kernels, card):
    """(floor, only its matrix products, only its memory traffic) of a step on a card, in ms; `kernels` from `total`."""
    floor = products = traffic = 0.0
    for (number_format, flops, n_bytes, _), n in kernels.items():
        compute = flops / card.rate(number_format) if flops else 0.0
        transfer = n_bytes / (1e9 * card.bandwidth)
        floor, products, traffic = floor + n * max(compute, transfer), products + n * compute, traffic + n * transfer
    return 1000 * floor, 1000 * products, 1000 * traffic


def lesson_hash(label):
    """A hash of what a step of a rung computes: its model and `train` up to the end of the loop, without docstrings."""
    lesson = BY_LABEL[label].path.read_text(encoding="utf-8").partition("\n" + BANNER)[0]
    parts = [node for node in ast.parse(lesson).body
             if getattr(node, "name", "add_flags") not in ("add_flags", "config_of", "DataLoaderLite", "get_lr")]
    for node in (node for part in parts for node in ast.walk(part)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    train = parts[-1]
    train.body = train.body[: 1 + max(i for i, node in enumerate(train.body) if isinstance(node, ast.For))]
    return hashlib.sha256("\n".join(map(ast.unparse, parts)).encode()).hexdigest()[:16]


def read_store():
    return json.loads(STORE.read_text(encoding="utf-8"))["rungs"]


def save_store(counted):
    """Add {label: kernels}, counted at the stored setting, to floors.json."""
    import torch

    rungs = (read_store() if STORE.exists() else {}) | {
        label: {"lesson": lesson_hash(label), "torch": torch.__version__,
                "kernels": [[n, *kernel] for kernel, n in sorted(kernels.items())]}
        for label, kernels in counted.items()}
    lines = ",\n".join(f" {json.dumps(label)}: {json.dumps(rung)}" for label, rung in rungs.items())
    STORE.write_text(f"{json.dumps(STORED)[:-1]}, \"rungs\": {{\n{lines}\n}}}}\n", encoding="utf-8")


def kernels_of(label, model, B, T, stored=True):
    """The counted kernels of a rung, from floors.json if it has this setting and the script's current lesson."""
    if stored and {"model": model, "B": B, "T": T} == STORED:
        rung = read_store().get(label)
        if rung and rung["lesson"] == lesson_hash(label):
            return Counter({tuple(kernel): n for n, *kernel in rung["kernels"]})
    from ladder.count.kernels import count  # takes seconds to import

    return total(count(label, model, B, T))


def floor_data(cards, labels=None):
    """For the page: what is stored for each rung, and its floors on `cards`."""
    rows = []
    for label, rung in read_store().items():
        kernels = Counter({tuple(kernel): n for n, *kernel in rung["kernels"]})
        if labels is None or label in labels:
            rows.append(row_of(label, kernels, cards))
    return STORED | {"rungs": rows}


def row_of(label, kernels, cards):
    """One rung: TFLOP by number format, GB, launches, and {card: ms} of the floor and its two parts."""
    tflop = Counter()
    for (number_format, flops, _, _), n in kernels.items():
        tflop[number_format] += n * flops / 1e12
    floors = {card.name: dict(zip(("floor", "products", "traffic"), floor_ms(kernels, card), strict=True))
              for card in cards}
    return {"label": label, "title": BY_LABEL[label].title, "tflop": {name: x for name, x in tflop.items() if x},
            "gb": sum(n * kernel[2] for kernel, n in kernels.items()) / 1e9,
            "launches": sum(n * kernel[3] for kernel, n in kernels.items()), "ms": floors}


def check_setting(labels, model, B, T, save=False):
    """Raises UserError for what cannot be counted."""
    if model not in SHAPES:
        raise UserError(f"--model {model}: no such model; give one of {', '.join(SHAPES)}")
    if T > LONGEST:
        raise UserError(f"-T {T}: the longest sequence is {LONGEST}; lower -T")
    if wrong := [label for label in labels if label not in COUNTED]:
        raise UserError(f"--rungs {wrong[0]}: floors are counted for rungs 0 to 10; give some of these")
    if save and {"model": model, "B": B, "T": T} != STORED:
        raise UserError(f"--save: stores only {STORED['model']} at B={STORED['B']} T={STORED['T']}; leave out --model, "
                        "-B and -T")
