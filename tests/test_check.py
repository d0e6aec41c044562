"""python -m ladder check: what it finds on this machine and on others, and what fits on paper; the measured rates."""
import itertools
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from run_tool import ladder

from ladder.measure import check, rates


def findings(function, *arguments):
    return {one.what: f"{one.mark} {one.detail}" for one in function(*arguments)}


def test_what_is_here():
    run = ladder("check", CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR="/tmp/empty-inductor-cache")
    assert run.returncode == 0, run.stderr
    for word in ("device", "TF32", "bfloat16", "attention", "fused AdamW", "NCCL", "free disk", "tokenizer"):
        assert word in run.stdout
    assert re.search(r"python -m ladder run --model \S+ -B \d+ -T \d+ --steps \d+\n", run.stdout)
    assert "NVIDIA GPU" not in run.stdout and "x torch.compile" in run.stdout and "install" in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU that is here")
def test_a_gpu_that_torch_cannot_use(tmp_path, monkeypatch):
    """An NVIDIA GPU, as its driver's own tool tells, under a torch that does not see it."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.65.06, 700.00 W'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert re.search("CUDA.*; pip install .*torch==.*whl/cu130", findings(check.check_device, "cpu")["NVIDIA GPU"])
    machine = rates.describe("cpu")
    assert machine["gpus"] == ["NVIDIA H100 80GB HBM3, 580.65.06, 700.00 W"]
    assert "threads" in machine["cpu"] and machine["name"] == machine["cpu"]


@pytest.mark.parametrize("dtype, names, bfloat16", [
    (torch.float32, {"float32"}, "- none in this CPU"), (torch.bfloat16, {"float32", "bfloat16"}, "+ rung 3 gains")])
def test_only_formats_in_hardware_count(dtype, names, bfloat16, monkeypatch):
    """A CPU without bfloat16 multiplies it a hundred times slower: measuring that took minutes."""
    monkeypatch.setattr(rates, "SHAPES", [(8, 8, 8)])
    monkeypatch.setattr(rates, "SECONDS", 0.01)
    monkeypatch.setattr(rates.rung_10, "autocast_dtype", lambda device: dtype)
    assert rates.measure("cpu").keys() == names
    assert findings(check.check_formats, "cpu")["bfloat16"].startswith(bfloat16)


def test_a_product_has_two_operations_for_each_multiplication(monkeypatch):
    """(8, 16) @ (16, 32) in half a second, by a clock that goes on by that at each reading."""
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=map(lambda n: n / 2, itertools.count()).__next__))
    assert rates.best_rate("cpu", torch.float32, (8, 16, 32)) == 2 * 8 * 16 * 32 / 0.5


@pytest.mark.parametrize("capability, tf32, float8", [((7, 5), "-", "-"), ((8, 6), "+", "-"), ((8, 9), "+", "+")])
def test_formats_of_gpus(capability, tf32, float8, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(check.rung_10, "autocast_dtype", lambda device: torch.bfloat16)
    found = findings(check.check_formats, "cuda")
    assert found["TF32"][0] == tf32 and found["float8"][0] == float8


def test_the_attention_kernel_is_torch_s_choice(monkeypatch):
    monkeypatch.setattr(check, "compile_problem", lambda device: None)
    assert findings(check.check_kernels, "cpu")["attention"].startswith("+ torch chooses FLASH_ATTENTION")
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 0)
    assert findings(check.check_kernels, "cpu")["attention"].startswith("- torch chooses MATH")


@pytest.mark.parametrize("gpus, nccl, marks", [(2, True, "++"), (2, False, "+x"), (1, True, "-+"), (1, False, "--")])
def test_whether_several_gpus_can_train_together(gpus, nccl, marks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert "".join(found[0] for found in findings(check.check_ranks, "cuda").values()) == marks


def test_the_data_and_the_way_out_of_the_fallback(tmp_path):
    for source, tokenizer, mark in (("tiny_shakespeare", "gpt2", "+"), ("python_topics", "gpt2", "-"),
                                    ("tiny_shakespeare", "gpt2-bytes", "-")):
        (tmp_path / "meta.json").write_text(json.dumps({"source": source, "tokenizer": tokenizer}))
        found = check.check_data(tmp_path)
        assert found.mark == mark and f"{source} ({tokenizer} tokens)" in found.detail
    (tmp_path / "meta.json").write_text("[]")
    assert check.check_data(tmp_path).mark == "x"
