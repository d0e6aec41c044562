"""The rungs on fake CUDA tensors (fake_cuda.py): no tensor on the wrong device; the waits for the device, counted."""
import json
import shutil
import sys

import pytest
from conftest import ROOT, run_command, rungs_that_change

from ladder.scripts.stages import STAGES

LABELS = [stage.label for stage in STAGES if stage.label not in ("fsdp", "dcp")]  # those two need several ranks
COMPILED = LABELS[LABELS.index("5"):]
SCALED = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW") if label in LABELS]
MICRO_STEPS = 2
WAITS = {  # {first rung: waits in the timed part of a step}, until the next rung that is named
    "bfloat16": {"0": 2, "11": 2 * MICRO_STEPS, "12": 0},  # a copy of x and one of y, until 12 prefetches them
    "float16": {"0": 2, "3": 3, "10": 2, "11": 2 * MICRO_STEPS, "12": 0, "18": 1},  # the scaler, but for fused AdamW
}
# {rung and model: width of its heads}; narrower ones than 16 are "NYI" in FlexAttention, and of ones wider than 128 not
# every GPU holds the blocks: those get a boolean mask.
HEADS = {"29": 32, "29:1x2x16": 8, "29:1x2x512": 256}
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the device guard is compiled with g++")


def waits_of(label, dtype):
    known = [rung for rung in WAITS[dtype] if LABELS.index(rung) <= LABELS.index(label)]
    return WAITS[dtype][known[-1]]


@pytest.mark.parametrize("dtype, mode, words", [
    ("bfloat16", "eager", LABELS), ("float16", "eager", SCALED),
    ("bfloat16", "compiled", ["10", *HEADS, "31"]),
    pytest.param("bfloat16", "compiled", COMPILED, marks=pytest.mark.slow),
    pytest.param("float16", "compiled", COMPILED, marks=pytest.mark.slow),
])
def test_no_rung_mixes_devices_breaks_its_graph_or_waits_more_than_it_must(dtype, mode, words, tmp_path):
    command = [sys.executable, ROOT / "tests" / "fake_cuda.py", tmp_path, dtype, mode, *words]
    done = run_command(*command, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(words)
    for word, run in zip(words, found, strict=True):
        assert run["steps"] == 2 and sum(run["waits"].values()) == waits_of(run["label"], dtype), run
        assert not run["breaks"] and run["graphs"] == 2 * (mode == "compiled")  # forward and backward
        assert run["flex"] == 2 * (mode == "compiled" and 16 <= HEADS.get(word, 0) <= 128)
        assert not run["rng"]  # --resume restores the default generator: the masks of dropout must come from it alone
