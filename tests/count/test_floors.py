"""Floors: what is stored belongs to the scripts, equals closed forms, and lies below what was measured."""
import itertools
import math

import pytest
import torch
from load_script import builds_on, new_gpt, rung

from ladder.__main__ import main
from ladder.count import floors
from ladder.count.cards import CARDS, find_card
from ladder.count.flops import SHAPES
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, LADDER, RUNGS


def test_floor_is_the_slower_of_arithmetic_and_memory_kernel_by_kernel():
    card = find_card("mine:1,2,4,1000")
    step = {floors.Kernel("16 bits", 8 * 10**12, 10**12): 2, floors.Kernel("", 0, 10**12, 3): 2}
    assert floors.floor_of(step, card) == pytest.approx({"floor": 6000, "products": 4000, "traffic": 4000})
    row = floors.floor_row(step, [card])
    assert (row["tflop"], row["gb"], row["launches"]) == ({"16 bits": 16}, 4000, 8)


def test_stored_counts_belong_to_the_scripts_as_they_are():
    stored, code = floors.read_store(), code_of(RUNGS)
    stale = [label for label in floors.COUNTED
             if label not in stored or stored[label]["lesson"] != code[BY_LABEL[label].name]]
    again = f"python -m ladder.count.kernels --rungs {','.join(stale)}"
    assert not stale, f"{stale} have changed, or are new: {again}"
    assert list(stored) == floors.COUNTED  # in the order of the ladder


def test_stored_products_are_the_closed_forms():
    """Of a step's tokens; from `muon` on also Muon's: 5 iterations of three products for each matrix of a block."""
    n_layer, _, n_embd = SHAPES["gpt2"]
    for label, row in floors.stored_floors([]).items():
        causal = BY_LABEL[label].causal
        with torch.device("meta"):
            model = new_gpt(rung(label), "gpt2")
        matrices = [weight.shape for weight in model.transformer.h.parameters() if weight.dim() == 2]
        # one row for each token, and others
        n_rows = 16 * 1024 + 1024 if label == "sampled_softmax" else len(model.lm_head.weight)
        attention = (7 if causal else 12) * n_layer * n_embd * 1024  # 7: half, and the scores again
        expected = (6 * (n_rows * n_embd + sum(map(math.prod, matrices))) + attention) * 16 * 1024
        muon = sum(4 * max(shape) * min(shape) ** 2 + 2 * min(shape) ** 3 for shape in matrices)
        expected += 5 * muon * builds_on(label, "muon")
        assert sum(row["tflop"].values()) == pytest.approx(expected / 1e12, rel=1e-9), label


def test_every_floor_lies_below_the_published_step_and_falls_with_it():
    rows = {label: row["ms"]["A100"] for label, row in floors.stored_floors([CARDS["A100"]]).items()}
    for entry in (entry for entry in LADDER if entry.lecture_ms):
        assert 0.3 * entry.lecture_ms < rows[entry.label]["floor"] < entry.lecture_ms
        assert max(rows[entry.label]["products"], rows[entry.label]["traffic"]) <= rows[entry.label]["floor"]
    lowest = [rows[entry.label]["floor"] for entry in LADDER if entry.lecture_ms]
    assert all(before > 0.99 * after for before, after in itertools.pairwise(lowest))


def test_command_prints_what_is_stored_for_several_cards(capsys):
    assert main(["floor", "--gpu", "a100", "mine:19.5,156,312,1555", "--rungs", "0,10"]) == 0
    out = capsys.readouterr().out
    assert "0 baseline" in out and "10 fused" in out and "mine, ms" in out
    row = floors.stored_floors([CARDS["A100"]])["0"]
    assert out.count(f"{row['ms']['A100']['floor']:,.1f}") == 2


def test_what_is_stored_is_of_one_setting(monkeypatch):
    """With another --model, -B or -T kernels are counted anew."""
    counted = []
    monkeypatch.setattr("ladder.count.kernels.count_all", lambda labels, setting, _: (
        counted.append(setting) or {"0": floors.read_store()["0"]["kernels"]}))
    changes = {"model": "tiny"}, {"B": 4}, {"T": 512}
    for change in ({}, *changes):
        words = [(f"--{name}" if name == "model" else f"-{name}", str(value)) for name, value in change.items()]
        assert main(["floor", "--rungs", "0", *itertools.chain(*words)]) == 0
    assert counted == [floors.STORED | change for change in changes]
