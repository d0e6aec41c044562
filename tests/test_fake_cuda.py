"""The rungs on fake CUDA tensors (fake_cuda.py): no tensor on the wrong device; the waits for the device, counted."""
import importlib.util
import json
import shutil
import sys

import pytest
from conftest import ROOT, builds_on, run_command, rungs_that_change

from ladder.scripts.stages import BY_LABEL, STAGES

LABELS = [stage.label for stage in STAGES if stage.label not in ("fsdp", "dcp")]  # those two need several ranks
COMPILED = LABELS[LABELS.index("5"):]
# The rungs in which a step with the scaler differs from that of the rung before.
SCALED = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW") if label in LABELS
          and (not builds_on(label, "11") or label in rungs_that_change("optimizer_step", "MuonAdamW"))]
# The rungs whose graph is not that of the rung before.
GRAPHS = [label for label in COMPILED if label == "5" or label in rungs_that_change(
    "CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward", "ChunkedCrossEntropy", "OutputLayerLoss")]
MICRO_STEPS = 2
# {rung and model: width of its heads}; narrower ones than 16 are "NYI" in FlexAttention, and of ones wider than 128 not
# every GPU holds the blocks: those get a boolean mask. So do cards without bfloat16, where Triton's products are slow.
HEADS = {"29": 32, "29:1x2x16": 8, "29:1x2x512": 256}
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
    ("bfloat16", "aot_eager", ["10", *HEADS, RECOMPUTED, "31"]),
    pytest.param("bfloat16", "aot_eager", COMPILED, marks=pytest.mark.slow),
    pytest.param("float16", "aot_eager", COMPILED, marks=pytest.mark.slow),
])
def test_no_rung_mixes_devices_breaks_its_graph_or_waits_more_than_it_must(dtype, backend, words, tmp_path):
    compiled = backend != "none"
    for word, run in zip(words, runs(tmp_path, dtype, backend, words), strict=True):
        assert sum(run["waits"].values()) == waits_of(run["label"], dtype), run
        assert not run["breaks"] and run["graphs"] == 2 * compiled  # forward and backward
        in_chunks = BY_LABEL[run["label"]].chunked  # whose log-sum-exp is rung 17's own
        assert run["losses_in"] == ([] if in_chunks else ["torch.float32"])
        flex = compiled and dtype == "bfloat16" and 16 <= HEADS.get(word, 0) <= 128
        assert run["flex"] == 2 * flex
        assert not run["rng"]  # the masks of dropout come from the default generator, which --seed sets


@pytest.mark.slow
def test_16_recomputes_also_where_ddp_splits_the_graph(tmp_path):
    for run in runs(tmp_path, "bfloat16", "ddp", ["long_run", RECOMPUTED]):
        assert not run["breaks"] and run["graphs"] == 4


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install triton")
@pytest.mark.parametrize("card, words", [
    ("sm_90", GRAPHS[:10]), ("sm_90", GRAPHS[10:]),  # an H100
    ("sm_75", ["5", "17", "24", "31"]), ("sm_120", ["5", "24", "31"]),  # a T4, an RTX 5090
    ("sm_80", ["35", "37"]), ("sm_100", ["35", "37", "38"]),  # an A100, a B200
    # FlexAttention takes more shared memory the wider the heads are: 256 would not fit into any of these but sm_80.
    *[(card, ["29:2x2x256", "29:2x2x512"]) for card in ("sm_75", "sm_80", "sm_89")],
])
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_shared_memory(card, words, tmp_path):
    """FlexAttention with tensor cores; and from rung 6 on no scores of attention are stored."""
    found = runs(tmp_path, "float16" if card == "sm_75" else "bfloat16", card, words)
    assert not [(run["label"], *kernel) for run in found for kernel in run["failed"]]
    assert min(run["kernels"] for run in found) > 10
    explicit = [run["label"] for run in found if not run["fused"] and not run["flex"]]
    assert explicit == [word for word in words if word == "5"]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install triton")
def test_07_the_loss_reads_the_padded_logits_in_vectors_and_overwrites_them(tmp_path):
    """Lowered for an H100. Without padding it reads 2 bytes at a time, and its gradients need a tensor of their own."""
    for run in runs(tmp_path, "bfloat16", "sm_90", ["6", "7"]):
        assert run["of_logits"] and bool(run["narrow"]) == (run["label"] == "6")
        assert run["logits"] == 1 + (run["label"] == "6")
