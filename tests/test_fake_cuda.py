"""The rungs on fake CUDA tensors (fake_cuda.py): no tensor on the wrong device; the waits for the device, counted."""
import json
import shutil
import sys

import pytest
from conftest import ROOT, builds_on, run_command, rungs_that_change

from ladder.rungs.list import BY_LABEL, RUNGS

LABELS = [entry.label for entry in RUNGS if entry.label not in ("fsdp", "dcp")]  # those two need several ranks
COMPILED = LABELS[LABELS.index("5"):]
# The rungs in which a step with the scaler differs from that of the rung before.
SCALED = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW") if label in LABELS
          and (not builds_on(label, "11") or label in rungs_that_change("optimizer_step", "MuonAdamW"))]
# The rungs whose graph is not that of the rung before.
GRAPHS = [label for label in COMPILED if label == "5" or label in rungs_that_change(
    "CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward", "ChunkedCrossEntropy")]
MICRO_STEPS = 2
RECOMPUTED = "long_run:1x2x64:recompute"
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the device guard is compiled with g++")


def waits_of(label, dtype):
    """In the timed part of a step: a copy of x and one of y, until 12 prefetches; the scaler, but for fused AdamW."""
    copies = 0 if builds_on(label, "12") else 2 * (MICRO_STEPS if builds_on(label, "11") else 1)
    scales = dtype == "float16" and builds_on(label, "3")
    return copies + (scales and (builds_on(label, "18") or not builds_on(label, "10")))


def runs(folder, dtype, backend, words):
    done = run_command(sys.executable, ROOT / "tests" / "fake_cuda.py", folder, dtype, backend, *words, cwd=folder,
                       timeout=3000)  # the kernels of a rung take 20 s to compile
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(words) and {run["steps"] for run in found} == {2}
    return found


@pytest.mark.parametrize("dtype, backend, words", [
    ("bfloat16", "none", LABELS), ("float16", "none", SCALED),
    ("bfloat16", "aot_eager", ["10", "29", RECOMPUTED, "31"]),
    pytest.param("bfloat16", "aot_eager", COMPILED, marks=pytest.mark.slow),
    pytest.param("float16", "aot_eager", COMPILED, marks=pytest.mark.slow),
])
def test_no_rung_mixes_devices_breaks_its_graph_or_waits_more_than_it_must(dtype, backend, words, tmp_path):
    compiled = backend != "none"
    for run in runs(tmp_path, dtype, backend, words):
        assert sum(run["waits"].values()) == waits_of(run["label"], dtype), run
        assert not run["breaks"] and run["graphs"] == 2 * compiled  # forward and backward
        own = BY_LABEL[run["label"]].chunked
        assert run["losses_in"] == ([] if own else ["torch.float32"])  # rung 17 has a loss of its own
        assert not run["rng"]  # the masks of dropout come from the default generator, which --seed sets


@pytest.mark.slow
def test_16_recomputes_also_where_ddp_splits_the_graph(tmp_path):
    for run in runs(tmp_path, "bfloat16", "ddp", ["long_run", RECOMPUTED]):
        assert not run["breaks"] and run["graphs"] == 4
