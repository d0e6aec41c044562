"""The rungs lowered to machine code for GPUs that are not there (fake_cuda.py). It takes long: a file of its own."""
import importlib.util
import shutil

import pytest
from test_fake_cuda import GRAPHS, runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="the device guard is compiled with g++"),
    pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install triton"),
]


@pytest.mark.parametrize("card, words", [
    ("sm_90", GRAPHS[:10]), ("sm_90", GRAPHS[10:]),  # an H100
    ("sm_75", ["5", "17", "24", "31"]), ("sm_120", ["24"]),  # a T4, an RTX 5090
    ("sm_80", ["35"]), ("sm_100", ["35"]),  # an A100, a B200
])
def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_shared_memory(card, words, tmp_path):
    """And from rung 6 on no scores of attention are stored."""
    found = runs(tmp_path, "float16" if card == "sm_75" else "bfloat16", card, words)
    assert not [(run["label"], *kernel) for run in found for kernel in run["failed"]]
    assert min(run["kernels"] for run in found) > 10
    explicit = [run["label"] for run in found if not run["fused"]]
    assert explicit == [word for word in words if word == "5"]


def test_07_the_loss_reads_the_padded_logits_in_vectors_and_overwrites_them(tmp_path):
    """Lowered for an H100. Without padding it reads 2 bytes at a time, and its gradients need a tensor of their own."""
    for run in runs(tmp_path, "bfloat16", "sm_90", ["6", "7"]):
        assert run["of_logits"] and bool(run["narrow"]) == (run["label"] == "6")
        assert run["logits"] == 1 + (run["label"] == "6")
