"""python -m ladder check: what it finds on this machine and on others."""
import json
import os
import re

import pytest
import torch
from log_files import MEDIAN, write_log
from run_tool import flags, is_one_error

from ladder.errors import UserError
from ladder.measure import machine_check, problems, this_machine


def findings(function, *arguments):
    return {one.what: f"{one.mark} {one.detail}" for one in function(*arguments)}


@pytest.mark.slow
def test_a_missing_compiler_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert "/no/such/compiler" in problems.compile_problem("cpu")


def test_check_says_what_is_here_and_recommends_a_run(monkeypatch, call):
    monkeypatch.setattr(problems, "problem_of", lambda code: "g++ not found")
    code, out, _ = call("check")
    assert code == 0 and "For this machine: python -m ladder run --quick " in out, out
    assert "x torch.compile: " in out and "install" in out and "NVIDIA GPU" not in out
    for word in ("device", "TF32", "bfloat16", "attention", "fused AdamW", "NCCL", "free disk"):
        assert f" {word}: " in out


def test_of_a_compiler_s_output_the_error_is_shown():
    """As on a machine without python3-dev."""
    lines = "Traceback", "main.cpp:2:10: fatal error: Python.h: No such file or directory", "compilation terminated."
    problem = problems.problem_of(f"import sys; print(*{lines}, sep='\\n', file=sys.stderr); sys.exit(1)")
    assert problem == "fatal error: Python.h: No such file or directory"


@pytest.fixture
def in_this_process(monkeypatch):
    """What a check tries in a new process it tries here: to import torch takes longer."""
    def problem_of(code):
        try:
            exec(code, {})
        except Exception as error:
            return str(error)

    for module in (machine_check, problems):
        monkeypatch.setattr(module, "problem_of", problem_of)


@pytest.fixture
def nvidia_smi(in_this_process, tmp_path, monkeypatch):
    """nvidia_smi(driver): an NVIDIA GPU, as its driver tells, and torch does not see it."""
    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU that is here")

    def install(driver):
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, {driver}, 700.00 W'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.mark.parametrize("body, said", [
    ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "fails: Failed to initialize NVML"),
    ("exec sleep 60", "has not answered within 0.5 s"), ("exit 9", "fails: exit code 9")])
def test_a_driver_that_fails_or_hangs(body, said, nvidia_smi, tmp_path, monkeypatch, call):
    """It is not a machine without a GPU: the check says so, and a run stops before it trains on the CPU unasked."""
    nvidia_smi("580.65.06")
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
    monkeypatch.setattr(this_machine, "NVIDIA_SECONDS", 0.5)
    assert f"nvidia-smi {said}" in findings(machine_check.check_device, "cpu")["NVIDIA GPU"]
    assert is_one_error(call("run", "--rungs", "0"), "--device: torch cannot use the NVIDIA GPU", said, "--device cpu")


@pytest.mark.parametrize("driver, wheel", [("580.65.06", "cu130"), ("575.57.08", "cu126")])
def test_beside_a_gpu_that_torch_cannot_use_no_cpu_is_measured(driver, wheel, nvidia_smi, tmp_path, monkeypatch, call):
    """Before anything is written: 200 steps take hours, and the user takes them for the GPU's."""
    nvidia_smi(driver)
    found = findings(machine_check.check_device, "cpu")["NVIDIA GPU"]
    assert re.search(f"CUDA.*; pip install .*torch==.*whl/{wheel}", found)
    assert this_machine.describe("cpu")["gpus"] == [f"NVIDIA H100 80GB HBM3, {driver}, 700.00 W"]
    monkeypatch.chdir(tmp_path)
    reasons = "--device: torch cannot use the NVIDIA GPU", f"whl/{wheel}", "--device cpu"
    assert all(is_one_error(call(verb, "--rungs", "0"), *reasons) for verb in ("run", "profile"))
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_cpu_that_is_asked_for_is_measured_beside_a_gpu(nvidia_smi, tokens, fake_run):
    nvidia_smi("575.57.08")
    assert "--device" in flags(tokens)
    assert fake_run(lambda job: write_log(job.log, tail=MEDIAN) and None)[0] == 0


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_switched_off_torch_compile_is_named(name, monkeypatch):
    """Else the rungs would say "compile: default", and run eagerly."""
    monkeypatch.setenv(name, "1")
    found = findings(machine_check.check_kernels, "cpu")["torch.compile"]
    assert found.endswith(f": {name}=1 switches it off; unset it")


@pytest.mark.parametrize("line", [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB.",
    "torch._inductor.exc.InductorError: RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"])
def test_a_full_gpu_is_not_one_that_cannot_compile(line):
    """Else the rungs would be measured eagerly, and the user sent to install a compiler."""
    with pytest.raises(UserError, match="^out of memory: .*(Tried|ALLOC)"):
        problems.problem_of(f"import sys; print('Traceback', {line!r}, sep='\\n', file=sys.stderr); sys.exit(1)")


@pytest.mark.parametrize("compiled, mark", [
    ("model", "+"), ("lambda idx, targets: 1.05 * model(idx, targets)", "x"),
    # the loss is right, the gradients are not
    ("lambda idx, targets: (loss := model(idx, targets)).detach() + 2 * (loss - loss.detach())", "x")])
def test_a_wrongly_compiled_step_is_found(compiled, mark, in_this_process, monkeypatch):
    code = machine_check.COMPARED.replace("torch.compile(model) if", f"({compiled}) if")
    assert code != machine_check.COMPARED
    monkeypatch.setattr(machine_check, "COMPARED", code)
    assert machine_check.check_compiled("cpu").mark == mark


def test_an_empty_library_in_torchs_cache_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "whole.so").write_bytes(b"ELF")
    assert not [*machine_check.check_cache()]
    (tmp_path / "ab" / "cut.so").touch()
    [found] = machine_check.check_cache()
    assert found.mark == "x" and f"rm -r {tmp_path}" in found.detail


@pytest.mark.parametrize("name, capability, cuda, tf32, float8", [
    ("Tesla T4", (7, 5), "13.0", "-", "-"), ("NVIDIA A10", (8, 6), "13.0", "+", "-"),
    ("NVIDIA L4", (8, 9), "13.0", "+", "+"),
    ("NVIDIA GeForce RTX 4090", (8, 9), "13.0", "-", "+"),  # whose TF32 is as fast as its float32
    ("AMD Instinct MI300X", (9, 4), None, "-", "-"),  # which numbers its cards otherwise
])
def test_a_gpu_gains_only_from_formats_that_it_has(name, capability, cuda, tf32, float8, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(machine_check.device_rates, "autocast_dtype", lambda device: torch.bfloat16)
    found = findings(machine_check.check_formats, "cuda")
    assert found["TF32"][0] == tf32 and found["float8"][0] == float8


def test_the_attention_kernel_is_torch_s_choice(monkeypatch):
    monkeypatch.setattr(machine_check, "compile_problem", lambda device: None)
    assert findings(machine_check.check_kernels, "cpu")["attention"].startswith("+ torch chooses FLASH_ATTENTION")
    asked = []
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda q, *_, **how: asked.append((q, how)) or 0)
    assert findings(machine_check.check_kernels, "cpu")["attention"].startswith("- torch chooses MATH")
    [(q, how)] = asked
    assert q.shape[2:] == (1024, 64) and q.requires_grad and how == {"is_causal": True}  # as in training


@pytest.mark.parametrize("version, mark, on_cpu", [("2.9.1", "x", "x"), ("2.12.1", "x", "+"), ("2.13.0", "+", "+")])
def test_each_device_needs_its_torch(version, mark, on_cpu, monkeypatch):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(machine_check, "free_memory", lambda device: 10e9)
    found = findings(machine_check.check_device, "mps")["torch"]
    assert found[0] == mark and ("future tokens" in found) == (mark == "x")
    assert findings(machine_check.check_device, "cpu")["torch"][0] == on_cpu


@pytest.mark.parametrize("gpus, nccl, marks", [(2, True, "++"), (2, False, "+x"), (1, True, "-+"), (1, False, "--")])
def test_whether_several_gpus_can_train_together(gpus, nccl, marks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert "".join(found[0] for found in findings(machine_check.check_ranks, "cuda").values()) == marks


def test_the_data_and_the_way_out_of_the_fallback(tmp_path):
    for source, tokenizer, mark in (("tiny_shakespeare", "gpt2", "+"), ("python_topics", "gpt2", "-"),
                                    ("tiny_shakespeare", "gpt2-bytes", "-")):
        (tmp_path / "meta.json").write_text(json.dumps({"source": source, "tokenizer": tokenizer}))
        found = machine_check.check_data(tmp_path)
        assert found.mark == mark and f"{source} ({tokenizer} tokens)" in found.detail
    assert machine_check.check_data(tmp_path / "none").mark == "-"
