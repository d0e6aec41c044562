"""What the page draws and quotes: the tree of rungs, first and last lines, and drawings that are exact."""
import os
import re

import pandas
import pytest
import torch
from conftest import ROOT, losses, new_gpt, rung, train

from ladder.count.memory import PROCESS_BYTES, largest_fitting, split_parameters, step_bytes
from ladder.measure.first_and_last import command_of, first_and_last
from ladder.rungs.list import BY_LABEL, RUNGS
from ladder.show import drawings, page, tree
from ladder.show.exercises import read_printed

# ---- the tree --------------------------------------------------------------------------------------------------------


def test_each_rung_stands_once_in_the_tree_behind_what_it_starts_from():
    rows = list(tree.tree_rows())
    shown = [entry for row in rows for entry in row.rungs]
    assert sorted(entry.label for entry in shown) == sorted(entry.label for entry in RUNGS)
    for row in rows:
        for before, entry in zip(row.rungs, row.rungs[1:], strict=False):
            assert entry.starts == (before,) and tree.drawn_after(before) == [entry]
        assert row.goes_on == bool(tree.drawn_after(row.rungs[-1]))
        starts = row.rungs[0].starts
        assert row.is_branch == (starts != () and len(tree.drawn_after(starts[-1])) > 1)


# ---- first and last lines --------------------------------------------------------------------------------------------

LOG = """# script: x.py
# batch: B=1 T=256 | steps: 3 | seed: 1337
step : 1 | loss: 10.9 | dt: 81.23 ms | tokens/sec: 3151.55 | norm: 1.2 | left: 0:01:02
step : 2 | loss: 10.8 | dt: 1.00 ms | tokens/sec: 9.99
step : 3 | loss: 10.7 | dt: 1.00 ms | tokens/sec: 9.99
val : step 3 | loss: 10.6 | time: 0.12 s
median : dt: 1.00 ms | tokens/sec: 9.99 | steps 2-3"""


def test_first_and_last_lines_have_no_times():
    assert first_and_last(LOG.splitlines()) == ([
        "# script: x.py", "# batch: B=1 T=256 | steps: 3 | seed: 1337",
        "step : 1 | loss: 10.9 | dt: … ms | tokens/sec: … | norm: 1.2 | left: …",
    ], [
        "step : 3 | loss: 10.7 | dt: … ms | tokens/sec: …", "val : step 3 | loss: 10.6 | time: … s",
        "median : dt: … ms | tokens/sec: … | steps 2-3",
    ])


def test_every_rung_has_its_first_and_last_lines():
    """In the committed file, with the number of its parameters and the last of 50 steps."""
    printed = read_printed()
    assert list(printed) == [entry.label for entry in RUNGS]
    for entry in RUNGS:
        one, module = printed[entry.label], rung(entry.label)
        with torch.device("meta"):
            n_parameters = sum(p.numel() for p in new_gpt(module).parameters())
        assert f"# model: tiny | parameters: {n_parameters:,}" in one["first"], entry.label
        assert one["command"] == command_of(entry) and one["first"][-1].startswith("step : 1 ")
        assert one["last"][0].startswith("step : 50 ") and any(line.startswith("median : ") for line in one["last"])


def shape_of_line(line):
    """A line of a log without its values."""
    return re.sub(r": [^|]*|\d+", "", line)


@pytest.mark.slow
@pytest.mark.skipif(not {"TIKTOKEN_CACHE_DIR", "TINY_SHAKESPEARE"} <= set(os.environ), reason="see .ci/run")
def test_the_first_lines_are_what_the_rungs_print(tmp_path):
    """Those of some rungs. Other machines round differently, and have other precisions."""
    from data import prepare
    prepare.main(["--text", os.environ["TINY_SHAKESPEARE"], "--out", str(tmp_path / "data")])
    printed = read_printed()
    for entry in (BY_LABEL[label] for label in ("0", "5", "10", "ddp", "15", "24", "29", "fsdp")):
        B = 2 if entry.torchrun else 1  # the batches of both ranks
        log = train(rung(entry.label), tmp_path / entry.label, tmp_path / "data", "-B", B, "-T", 256, "--steps", 1)
        lines = log.read_text().splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith("step : 1 "))
        assert [*map(shape_of_line, lines[:first])] == [*map(shape_of_line, printed[entry.label]["first"][:-1])]
        loss = float(page.LAST_LOSS.match(printed[entry.label]["first"][-1])[2])
        assert loss == pytest.approx(losses(log)[0], abs=0.02), entry.label


# ---- drawings --------------------------------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("number", [1 / 3, 1.0, 0.1, -1.00390625, 1.01171875])  # the last two lie halfway in bfloat16
def test_the_bits_are_torchs(number):
    for name, dtype in DTYPES.items():
        bits, truth = drawings.bits_of(number, name), torch.tensor(number, dtype=dtype)
        whole = truth.view(torch.int32 if name == "float32" else torch.int16).item()
        assert bits == f"{whole % 2 ** len(bits):0{len(bits)}b}" and drawings.value_of(bits, name) == truth.item()
        n_exponent, n_mantissa = drawings.FORMATS[name]
        assert torch.finfo(dtype).eps == 2**-n_mantissa and 1 + n_exponent + n_mantissa == torch.finfo(dtype).bits
    tf32 = drawings.bits_of(number, "TF32")  # float32's range, float16's precision
    assert len(tf32) == 19 and drawings.value_of(tf32, "TF32") == torch.tensor(number, dtype=torch.float16).item()


def test_the_memory_of_a_step_is_the_memory_models():
    peak = max(size for _, size in drawings.memory_curve("15"))
    parameters = step_bytes("gpt2", 0, drawings.T, "15")
    assert peak + parameters == pytest.approx(step_bytes("gpt2", drawings.B, drawings.T, "15"))
    assert parameters > PROCESS_BYTES and largest_fitting("gpt2", drawings.T, ["15"], peak + parameters) == drawings.B
    for label in ("15", "16", "17"):
        points = drawings.memory_curve(label)
        assert points[-1] == (12 * (drawings.FORWARD + drawings.BACKWARD) + drawings.LOSS, 0)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    logits = 4 * 50257 * drawings.B * drawings.T
    assert drawings.kept_bytes("16")[2] == logits and drawings.kept_bytes("17")[2:] == (logits / 4, 4)


def test_the_rotated_pair_is_rung_20s():
    angles = rung("20").rotary_angles(16, drawings.HEAD_SIZE)[:, drawings.PAIR]
    assert angles.tolist() == pytest.approx([position * drawings.RADIANS_A_TOKEN for position in range(16)])
    assert drawings.angle_between(5, 2) == pytest.approx(drawings.angle_between(13, 10))


def test_the_rates_are_the_records():
    """The lowest loss of each width, and the rate that its caption names."""
    record = pandas.read_csv(ROOT / "experiments" / "widths.csv")
    searches = record[record.part == "search"]
    for rung_name in ("rung 24", "rung 34"):
        shown = drawings.searched_rates(rung_name)
        lowest = searches[searches.rung == rung_name].sort_values("val_loss").groupby("width").first()
        for width, points in shown.items():
            assert min(points, key=lambda point: point[1]) == tuple(lowest.loc[width, ["muon_lr", "val_loss"]])
            assert [rate for rate, _ in points] == sorted(rate for rate, _ in points) and len(points) >= 3
        assert list(shown) == list(lowest.index) == [64, 128, 256, 512]
        inside = [drawings.RATES[0] <= rate <= drawings.RATES[1] and drawings.LOSSES[0] <= loss <= drawings.LOSSES[1]
                  for points in shown.values() for rate, loss in points]
        assert all(inside)


def test_the_cards_hold_what_the_scripts_keep():
    """Under DDP and FSDP as counted; in rung 33 moments have the owners that the script gives them."""
    shares = drawings.shares()
    held = {scheme: [sum(last - first for first, last in parts) for parts in cards] for scheme, cards in shares.items()}
    embedding, block, n_layer = split_parameters("gpt2")
    state = 16 * embedding + 12 * block * n_layer
    assert held["DDP"] == pytest.approx([state] * 4)
    assert held["fsdp"] == pytest.approx([state / 4] * 4)
    with torch.device("meta"):
        model = new_gpt(rung("33"), "gpt2")
    owned, moments = [0] * 4, [0] * 4  # parameters, bytes
    for p in sorted(model.parameters(), key=torch.numel, reverse=True):
        owner = owned.index(min(owned))
        owned[owner] += p.numel()
        moments[owner] += p.numel() * (8 if p is model.lm_head.weight else 4)
    weights = 2 * 4 * sum(owned)
    assert held["33"] == pytest.approx([weights + own for own in moments], rel=0.01)  # the drawing leaves norms out
    for scheme, n_whole in (("DDP", 3), ("33", 2), ("fsdp", 0)):  # the rest is divided, without gaps
        for i, (_, whole) in enumerate(shares["DDP"][0]):
            parts = [card[i] for card in shares[scheme]]
            divided = [0, *(last for _, last in parts)] == [*(first for first, _ in parts), whole]
            assert parts == [(0, whole)] * 4 if i < n_whole else divided
