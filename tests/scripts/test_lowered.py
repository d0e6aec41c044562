"""The rungs lowered to machine code for GPUs that are not there (fake_cuda.py). It takes long: a file of its own."""
import functools
import importlib.util
import shutil
from tempfile import TemporaryDirectory

import pytest
from test_fake_cuda import GRAPHS, in_float16, runs

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
    ("sm_90", GRAPHS[:10]), ("sm_90", GRAPHS[10:]),  # an H100
    ("sm_75", in_float16(["5", "chunked_cross_entropy", "zero_init", "ngram_embeddings"])),  # a T4
    ("sm_120", ["zero_init"]),  # an RTX 5090
    ("sm_80", ["bf16_residual", "no_biases"]), ("sm_100", ["bf16_residual", "no_biases"]),  # an A100, a B200
])
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_shared_memory(card, words):
    """And from rung 6 on no scores of attention are stored."""
    found = lowered(card, *words)
    assert not [(run["label"], *kernel) for run in found for kernel in run["failed"]]
    assert min(run["kernels"] for run in found) > 10
    explicit = [run["label"] for run in found if not run["fused"]]
    assert explicit == ["5"] * (words[0].partition(":")[0] == "5")


def test_07_the_loss_reads_the_padded_logits_in_vectors_and_overwrites_them():
    """Lowered for an H100. Without padding it reads 2 bytes at a time, and its gradients need a tensor of their own."""
    found = {run["label"]: run for run in lowered("sm_90", *GRAPHS[:10])}
    for label in "67":
        assert found[label]["of_logits"] and bool(found[label]["narrow"]) == (label == "6")
        assert found[label]["logits"] == 1 + (label == "6")
