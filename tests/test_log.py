"""The log: its format, honest clocks, and what a killed run leaves behind."""
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
from conftest import STEP_LINE, read_steps, rung, train

from ladder.stages import ROOT, STAGES

B, T, STEPS = 2, 32, 12
GRAD_ACCUM, VALIDATION = 12, 14
ALL_RUNGS = pytest.mark.parametrize("number", range(len(STAGES)), ids=[stage.name for stage in STAGES])


@ALL_RUNGS
def test_header_and_arithmetic_of_each_line(number, tmp_path, tokens, capsys):
    log = train(rung(number), tmp_path, tokens, "-B", B, "-T", T, "--steps", STEPS)
    lines = log.read_text().splitlines()
    assert capsys.readouterr().out.splitlines() == lines  # printed and written alike
    assert lines[0] == f"# script: {STAGES[number].path.name}"
    assert re.fullmatch(r"# model: tiny \| parameters: [\d,]+", lines[1])
    assert re.fullmatch(r"# device: .+ \| torch: .+ \| precision: .+", lines[2])
    assert f"# batch: B={B} T={T} | steps: {STEPS} | seed: 1337" in lines
    n_tokens = (tokens / "train.bin").stat().st_size // 2
    epoch = (n_tokens - 1) // (B * T)
    assert f"# data: tokens.txt (gpt2-bytes tokens) | loaded {n_tokens} tokens | 1 epoch = {epoch} batches" in lines

    tokens_per_step = B * T * (4 if number >= GRAD_ACCUM else 1)  # 4 micro-steps is a CPU's default
    steps = read_steps(log)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(tokens_per_step / (step["ms"] / 1000), rel=1e-3)
        assert ("norm" in step, "lr" in step) == (number >= 8, number >= 9)

    last = re.fullmatch(
        r"median : dt: ([\d.]+) ms \| tokens/sec: ([\d.]+) \| peak memory: ([\d.]+) GB \| steps 6-12", lines[-1]
    )
    median = statistics.median(step["ms"] for step in steps[5:])
    assert float(last[1]) == pytest.approx(median, abs=0.011)
    assert float(last[2]) == pytest.approx(tokens_per_step / (median / 1000), rel=1e-3)
    assert 0.1 < float(last[3]) < 100


@pytest.mark.parametrize("steps, counted", [(1, "1-1"), (2, "2-2"), (3, "3-3"), (10, "3-10"), (11, "6-11")])
def test_which_steps_the_median_counts(steps, counted, tmp_path, tokens):
    log = train(rung(0), tmp_path, tokens, "-B", 1, "-T", 8, "--steps", steps)
    assert log.read_text().splitlines()[-1].endswith(f"| steps {counted}")


@ALL_RUNGS
def test_a_slow_model_shows_in_dt(number, tmp_path, tokens):
    """A sleep inside forward is counted in every step's time."""
    module = rung(number)
    forward = module.GPT.forward

    def slow_forward(*args):
        time.sleep(0.5)
        return forward(*args)

    module.GPT.forward = slow_forward
    beyond = ["--total-batch", 16] if number >= GRAD_ACCUM else []  # one micro-step
    beyond += ["--val-every", 0] if number >= VALIDATION else []
    steps = read_steps(train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 3, *beyond))
    assert all(step["ms"] >= 500 for step in steps)
    assert all(step["tokens_per_second"] <= 16 / 0.5 for step in steps)


def test_a_slow_loader_and_a_slow_device_show_in_dt(tmp_path, tokens, monkeypatch):
    """The clock starts before the batch is fetched and stops after the device has finished."""
    module = rung(10)
    next_batch = module.DataLoaderLite.next_batch
    module.DataLoaderLite.next_batch = lambda self: time.sleep(0.3) or next_batch(self)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: time.sleep(0.3))
    steps = read_steps(train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 2))
    assert all(step["ms"] >= 600 for step in steps)


@ALL_RUNGS
def test_no_cuda_call_on_a_cpu(number, tmp_path, tokens, monkeypatch):
    def must_not_be_called(*args, **kwargs):
        raise AssertionError("a CUDA call on a CPU")

    for name in ("synchronize", "get_device_name", "get_device_capability", "max_memory_allocated",
                 "is_bf16_supported", "set_device", "current_device", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, must_not_be_called)
    train(rung(number), tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 2)


def test_the_same_seed_gives_the_same_run(tmp_path, tokens):
    flags = ("-B", 1, "-T", 32, "--steps", 4)
    runs = [read_steps(train(rung(10), tmp_path / str(i), tokens, *flags, "--seed", [7, 7, 8][i])) for i in range(3)]
    first, again, other = [[(step["loss"], step["norm"]) for step in run] for run in runs]
    assert first == again and first != other


def test_a_killed_run_keeps_its_finished_steps(tmp_path, tokens):
    command = [sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "--data", tokens,
               "--log-dir", tmp_path, "-B", "1", "-T", "16", "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        printed = [line for line, _ in zip(run.stdout, range(15), strict=False)]
        run.send_signal(signal.SIGKILL)
    lines = (tmp_path / "baseline.log").read_text().splitlines()
    assert lines[:15] == [line.rstrip("\n") for line in printed]
    assert all(STEP_LINE.fullmatch(line) for line in lines[5:])


def test_ctrl_c_ends_with_one_line(tmp_path, tokens):
    command = [sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "--data", tokens,
               "--log-dir", tmp_path, "-B", "1", "-T", "16", "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        for _ in range(8):
            run.stdout.readline()
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert errors.strip() == "stopped: the log keeps the finished steps"
