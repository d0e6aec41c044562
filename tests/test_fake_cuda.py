"""The rungs on fake CUDA tensors (fake_cuda.py): no tensor on the wrong device; the waits for the device, counted."""
import importlib.util
import json
import shutil
import sys

import pytest
from conftest import ROOT, builds_on, run_command, rungs_that_change

from ladder.scripts.stages import STAGES

LABELS = [stage.label for stage in STAGES if stage.label not in ("fsdp", "dcp")]  # those two need several ranks
COMPILED = LABELS[LABELS.index("5"):]
# The rungs in which a step with the scaler differs from that of the rung before.
SCALED = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW") if label in LABELS
          and (not builds_on(label, "11") or label in rungs_that_change("optimizer_step", "MuonAdamW"))]
# The rungs whose graph is not that of the rung before.
GRAPHS = [label for label in COMPILED if label == "5" or label in rungs_that_change(
    "CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward", "ChunkedCrossEntropy", "OutputLayerLoss")]
MICRO_STEPS = 2
WAITS = {  # {first rung: waits in the timed part of a step}, until the next rung that is named
    "bfloat16": {"0": 2, "11": 2 * MICRO_STEPS, "12": 0},  # a copy of x and one of y, until 12 prefetches them
    "float16": {"0": 2, "3": 3, "10": 2, "11": 2 * MICRO_STEPS, "12": 0, "18": 1},  # the scaler, but for fused AdamW
}
# {rung and model: width of its heads}; narrower ones than 16 are "NYI" in FlexAttention, and of ones wider than 128 not
# every GPU holds the blocks: those get a boolean mask. So do cards without bfloat16, where Triton's products are slow.
HEADS = {"29": 32, "29:1x2x16": 8, "29:1x2x512": 256}
RECOMPUTED = "29:1x2x64:recompute"
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the device guard is compiled with g++")


def waits_of(label, dtype):
    known = [rung for rung in WAITS[dtype] if builds_on(label, rung)]
    return WAITS[dtype][known[-1]]


def runs(folder, dtype, backend, words):
    done = run_command(sys.executable, ROOT / "tests" / "fake_cuda.py", folder, dtype, backend, *words, cwd=folder,
                       timeout=3000)  # the kernels of a rung take 20 s to compile
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(words) and {run["steps"] for run in found} == {2}
    return found


@pytest.mark.parametrize("dtype, backend, words", [
    ("bfloat16", "none", LABELS), ("float16", "none", SCALED),
    ("bfloat16", "aot_eager", ["10", *HEADS, RECOMPUTED, "31"]),
    pytest.param("bfloat16", "aot_eager", COMPILED, marks=pytest.mark.slow),
    pytest.param("float16", "aot_eager", COMPILED, marks=pytest.mark.slow),
])
def test_no_rung_mixes_devices_breaks_its_graph_or_waits_more_than_it_must(dtype, backend, words, tmp_path):
    compiled = backend != "none"
    for word, run in zip(words, runs(tmp_path, dtype, backend, words), strict=True):
        assert sum(run["waits"].values()) == waits_of(run["label"], dtype), run
        assert not run["breaks"] and run["graphs"] == 2 * compiled  # forward and backward
        if word == RECOMPUTED:
            assert_recomputed(run)
            continue
        flex = compiled and dtype == "bfloat16" and 16 <= HEADS.get(word, 0) <= 128
        assert run["flex"] == 2 * flex
        assert not run["rng"]  # --resume restores the default generator: the masks of dropout must come from it alone


def assert_recomputed(run):
    """The attention of one block once more, and the same dropout masks."""
    assert run["flex"] == 3
    assert run["rng"] == 2 * ["run_and_save_rng_state"] + 2 * ["run_with_rng_state"]


@pytest.mark.slow
def test_29_recomputes_attention_also_where_ddp_splits_the_graph(tmp_path):
    plain, recomputed = runs(tmp_path, "bfloat16", "ddp", ["29", RECOMPUTED])
    assert not plain["breaks"] and not recomputed["breaks"]
    assert plain["graphs"] == recomputed["graphs"] == 4 and plain["flex"] == 2
    assert_recomputed(recomputed)


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install triton")
@pytest.mark.parametrize("card, words", [
    ("sm_75", GRAPHS), ("sm_90", GRAPHS),  # a T4, an H100
    ("sm_80", ["35", "37"]), ("sm_100", ["35", "37", "38"]),  # an A100, a B200
    ("sm_120", ["5", "24", "28", "31"]),  # an RTX 5090
    # FlexAttention takes more shared memory the wider the heads are: 256 would not fit into any of these but sm_80.
    *[(card, ["29:2x2x256", "29:2x2x512"]) for card in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120")],
])
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_shared_memory(card, words, tmp_path):
    """FlexAttention with tensor cores; and from rung 6 on no scores of attention are stored."""
    found = runs(tmp_path, "float16" if card == "sm_75" else "bfloat16", card, words)
    assert not [(run["label"], *kernel) for run in found for kernel in run["failed"]]
    assert min(run["kernels"] for run in found) > 10
    explicit = [run["label"] for run in found if not run["fused"] and not run["flex"]]
    assert explicit == [word for word in words if word == "5"]
