"""The rungs lowered to machine code for GPUs that are not there (fake_cuda.py). It takes long: a file of its own."""
import functools
import importlib.util
import shutil
from tempfile import TemporaryDirectory

import pytest
from test_fake_cuda import ENDS, LADDER, in_float16, runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="the device guard is compiled with g++"),
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install triton"),
]


@functools.cache
def lowered(card, *words):
    with TemporaryDirectory() as folder:
        return runs(folder, card, words)


@pytest.mark.parametrize("card, words", [
    ("sm_90", LADDER), ("sm_90", ENDS),  # an H100
    ("sm_75", in_float16(["5", "long_run"])),  # a T4
    ("sm_80", ["bf16_residual"]), ("sm_100", ["no_biases"]), ("sm_120", ["long_run"]),  # an A100, a B200, an RTX 5090
])
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_shared_memory(card, words):
    """Of the graphs, which are whole; and from rung 6 on no scores of attention are stored."""
    found = lowered(card, *words)
    assert not [run for run in found if run["breaks"] or run["graphs"] != 2]  # forward and backward
    assert not [(run["label"], *kernel) for run in found for kernel in run["failed"]]
    assert min(run["kernels"] for run in found) > 10
    explicit = [run["label"] for run in found if not run["fused"]]
    assert explicit == ["5"] * (words[0].partition(":")[0] == "5")


def test_07_the_loss_reads_the_padded_logits_in_vectors_and_overwrites_them():
    """Lowered for an H100. Without padding it reads 2 bytes at a time, and its gradients need a tensor of their own."""
    found = {run["label"]: run for run in lowered("sm_90", *LADDER)}
    for label in "67":
        assert found[label]["of_logits"] and bool(found[label]["narrow"]) == (label == "6")
        assert found[label]["logits"] == 1 + (label == "6")
