"""The rungs on fake CUDA tensors (fake_cuda.py): no tensor on the wrong device; the waits for the device, counted."""
import json
import shutil
import sys

import pytest
from load_script import LEAVES, ROOT, builds_on, rungs_that_change
from run_script import run_command

from ladder.rungs.list import BY_LABEL, RUNGS

LABELS = [entry.label for entry in RUNGS if not builds_on(entry.label, "fsdp")]  # which needs several ranks
COMPILED = LABELS[LABELS.index("5"):]
# Where the scaler, the clipping or the optimizer is another; that its steps are right: test_speedups.py.
SCALED = ["8", *(label for label in LABELS if BY_LABEL[label].may_change & {
    "autocast_dtype", "optimizer_step", "GPT.configure_optimizers", "MuonAdamW"})]
# The rungs whose graph is not that of the rung before.
GRAPHS = [label for label in COMPILED if label == "5" or label in rungs_that_change(
    "CausalSelfAttention", "MLP", "Block", "GPT.__init__", "GPT.forward", "ChunkedCrossEntropy")]
MICRO_STEPS = 2
LADDER = ["5", "6", "7"]
ENDS = ["no_biases", "fp8", "ngram_embeddings", "mup", "sampled_softmax", "documents_apart", "long_run",
        "grouped_query_attention"]  # of the trunks and branches: between them they have every part of these graphs
TRACED = ["cuda_graphs", *(label for label in GRAPHS if label not in [*LADDER, *ENDS])]  # those: test_lowered.py
RECOMPUTED = "long_run:recompute"
# Of the others test_train.py sees whether a step reads the loss, and test_loader.py how a batch gets to the device.
QUICK = ["0", *(entry.label for entry in LEAVES if entry.label in LABELS), "3:float16", "sharded_optimizer:float16"]
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the device guard is compiled with g++")


def waits_of(label, float16):
    """In the timed part of a step: a copy of x and one of y, until 12 prefetches; the scaler, but for fused AdamW."""
    micro_steps = MICRO_STEPS if builds_on(label, "gradient_accumulation") else 1
    copies = 0 if builds_on(label, "prefetch") else 2 * micro_steps
    scales = float16 and builds_on(label, "3")
    return copies + (scales and (builds_on(label, "muon") or not builds_on(label, "10")))


def runs(folder, backend, words):
    done = run_command(sys.executable, ROOT / "tests" / "fake_cuda.py", folder, backend, *words, cwd=folder,
                       timeout=3000)  # the kernels of a rung take 20 s to compile
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(words) and {run["steps"] for run in found} == {2}
    return found


def in_float16(labels):
    return [f"{label}:float16" for label in labels]


@pytest.mark.parametrize("backend, words", [
    ("none", QUICK),
    pytest.param("none", [word for word in [*LABELS, *in_float16(SCALED)] if word not in [*QUICK, *TRACED]],
                 marks=pytest.mark.slow),
    pytest.param("aot_eager", [*TRACED, *in_float16(["no_biases", "long_run"]), RECOMPUTED], marks=pytest.mark.slow),
], ids=["quick", "none", "aot_eager"])
def test_no_rung_mixes_devices_breaks_its_graph_or_waits_more_than_it_must(backend, words, tmp_path):
    compiled = backend != "none"
    for run in runs(tmp_path, backend, words):
        assert sum(run["waits"].values()) == waits_of(run["label"], run["float16"]), run
        assert not run["breaks"] and run["graphs"] == 2 * compiled  # forward and backward
        own = BY_LABEL[run["label"]].chunked
        assert run["losses_in"] == ([] if own else ["torch.float32"])  # `chunked_cross_entropy` has a loss of its own
        assert not run["rng"]  # the masks of dropout come from the default generator, which --seed sets


@pytest.mark.slow
def test_gradient_checkpointing_recomputes_also_where_ddp_splits_the_graph(tmp_path):
    for run in runs(tmp_path, "ddp", ["long_run", RECOMPUTED]):
        assert not run["breaks"] and run["graphs"] == 4
