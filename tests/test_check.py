"""python -m ladder check: what it finds on this machine and on others, and what fits on paper; the measured rates."""
import itertools
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
from run_tool import call, ladder  # noqa: F401, a fixture

from ladder.measure import check, rates


def findings(function, *arguments):
    return {one.what: f"{one.mark} {one.detail}" for one in function(*arguments)}


def test_what_is_here():
    run = ladder("check", CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR="/tmp/empty-inductor-cache")
    assert run.returncode == 0, run.stderr
    for word in ("device", "TF32", "bfloat16", "attention", "fused AdamW", "NCCL", "free disk", "tokenizer"):
        assert word in run.stdout
    assert re.search(r"python -m ladder run --model \S+ -B \d+ -T \d+", run.stdout)
    assert "NVIDIA GPU" not in run.stdout and "✗ torch.compile" in run.stdout and "install" in run.stdout


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """A machine with an NVIDIA GPU, as its driver's own tool tells; nvidia(driver, cuda) sets torch's side of it."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def nvidia(driver, cuda, capability=None, built_for=()):
        program.write_text(f"#!/bin/sh\ncase $1 in --query*) echo 'NVIDIA H100 80GB HBM3, {driver}, 700.00 W';;"
                           f"*) echo '| NVIDIA-SMI {driver}  Driver Version: {driver}  CUDA Version: 13.0 |';; esac\n")
        program.chmod(0o755)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built_for))
        return findings(check.check_device, "cpu").get("NVIDIA GPU", "")

    return nvidia


DEFAULT_WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.mark.parametrize("driver, cuda, capability, built_for, problem", [
    ("580.65.06", None, None, [], "built without CUDA; pip .*whl/cu130"),
    ("535.183.01", "13.0", None, [], "driver 535.183.01 is too old for CUDA 13.0; update it to 580 or newer"),
    ("580.65.06", "13.0", None, [], "CUDA 13.0 does not start"),
    ("580.65.06", "13.0", (7, 0), DEFAULT_WHEEL, "no kernels for compute capability 7.0, .*whl/cu126"),
    ("580.65.06", "13.0", (9, 0), ["sm_80", "sm_86"], "no kernels for compute capability 9.0"),
    *(("580.65.06", "13.0", fits, DEFAULT_WHEEL, "^$") for fits in ((7, 5), (8, 9), (9, 0), (10, 3), (12, 0))),
    ("580.65.06", "13.0", (13, 0), [*DEFAULT_WHEEL, "compute_120"], "^$"),
])
def test_why_torch_cannot_use_the_gpu(driver, cuda, capability, built_for, problem, nvidia):
    assert re.search(problem, nvidia(driver, cuda, capability, built_for))


def test_a_hidden_gpu(nvidia, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES" in nvidia("580.65.06", "13.0")


def test_the_machine_is_named_with_its_gpu_driver_and_power_limit(nvidia):
    nvidia("580.65.06", None)
    machine = rates.describe("cpu")
    assert machine["gpus"] == ["NVIDIA H100 80GB HBM3, 580.65.06, 700.00 W"]
    assert "threads" in machine["cpu"] and machine["name"] == machine["cpu"]


def test_the_cards_on_paper(call):  # noqa: F811
    code, output, _ = call("check", "--gpus", 8)
    assert code == 0 and len(re.findall(r"\d x \d+ GB (one|DDP|FSDP)", output)) == 4 * 7


@pytest.mark.parametrize("dtype, names, bfloat16", [
    (torch.float32, {"float32"}, "– none in this CPU"), (torch.bfloat16, {"float32", "bfloat16"}, "✓ rung 3 gains")])
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


@pytest.mark.parametrize("capability, tf32, float8", [((7, 5), "–", "–"), ((8, 6), "✓", "–"), ((8, 9), "✓", "✓")])
def test_formats_of_gpus(capability, tf32, float8, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(check.rung_10, "autocast_dtype", lambda device: torch.bfloat16)
    found = findings(check.check_formats, "cuda")
    assert found["TF32"][0] == tf32 and found["float8"][0] == float8


def test_the_attention_kernel_is_torch_s_choice(monkeypatch):
    monkeypatch.setattr(check, "compile_problem", lambda device: None)
    assert findings(check.check_kernels, "cpu")["attention"].startswith("✓ torch chooses FLASH_ATTENTION")
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 0)
    assert findings(check.check_kernels, "cpu")["attention"].startswith("– torch chooses MATH")


@pytest.mark.parametrize("gpus, nccl, marks", [(2, True, "✓✓"), (2, False, "✓✗"), (1, True, "–✓"), (1, False, "––")])
def test_whether_several_gpus_can_train_together(gpus, nccl, marks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert "".join(found[0] for found in findings(check.check_ranks, "cuda").values()) == marks


def test_the_data_and_the_way_out_of_the_fallback(tmp_path):
    for source, tokenizer, mark in (("tiny_shakespeare", "gpt2", "✓"), ("python_topics", "gpt2", "–"),
                                    ("tiny_shakespeare", "gpt2-bytes", "–")):
        (tmp_path / "meta.json").write_text(json.dumps({"source": source, "tokenizer": tokenizer}))
        found = check.check_data(tmp_path)
        assert found.mark == mark and f"{source} ({tokenizer} tokens)" in found.detail
    (tmp_path / "meta.json").write_text("[]")
    assert check.check_data(tmp_path).mark == "✗"
