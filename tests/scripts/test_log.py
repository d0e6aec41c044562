"""The log: the steps that the median counts, and what other and killed runs leave.

Header, steps and the clock of each rung are in test_train.py.
"""
import contextlib
import os
import signal
import sys
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from load_script import rung
from log_files import STEP_LINE, read_steps
from run_script import FakeClock, as_program, forked_program, train


def test_a_running_script_keeps_its_steps_and_a_later_one_its_log(tmp_path, byte_tokens):
    """Under its date, line by line. Ctrl-C ends it with one line, and until then nothing has warned either."""
    ours, output = os.pipe()
    run = forked_program(output, "0", "--data", byte_tokens, "--log-dir", tmp_path, "-B", 1, "-T", 16, "--steps", 10**6)
    with open(ours) as output:
        printed = [output.readline().rstrip("\n") for _ in range(10)]
        log = train(rung("0"), tmp_path, byte_tokens, "-B", 1, "-T", 8, "--steps", 2)
        kept, = tmp_path.glob("baseline.log.*")
        lines = kept.read_text().splitlines()
        os.kill(run.pid, signal.SIGINT)
        last = [line for line in output if not STEP_LINE.match(line)]
    run.join()
    assert lines[:9] == printed[:9] and "steps: 1000000" in kept.read_text()
    assert all(STEP_LINE.fullmatch(line) for line in lines[5:])
    assert [step["step"] for step in read_steps(log)] == [1, 2] and "steps: 2 " in log.read_text()
    assert run.exitcode == 1 and len(last) == 1 and last[0].startswith("stopped: "), last


@pytest.mark.parametrize("device, n, counted", [("cpu", 1, "1-1"), ("cuda", 2, "2-2"), ("cpu", 10, "6-10")])
def test_the_median_is_that_of_the_second_half(device, n, counted, tmp_path, monkeypatch):
    """Whatever the first half takes: it compiles and warms up."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2_000_000_000)
    module, output = rung("0"), mock.Mock(wraps=sys.stdout)
    monkeypatch.setattr(sys, "stdout", output)
    args = module.parse_args(["--log-dir", str(tmp_path), "--device", "cpu"])
    args.device = device
    loader = SimpleNamespace(meta={"source": "text", "tokenizer": "gpt2"}, tokens=[1, 2], n_batches=1)
    log = module.Log(args, torch.nn.Linear(1, 1), loader, 1000, "float32")
    for step in range(1, n + 1):
        log.step(step, 1.0, 9.0 if step < int(counted.split("-")[0]) else 0.25)
    log.finish(n)
    assert output.flush.call_count >= n  # a pipe or a file shows each line at once, too
    memory = " | peak memory: 2.00 GB" if device == "cuda" else ""
    assert (tmp_path / "baseline.log").read_text().splitlines()[-1] == (
        f"median : dt: 250.00 ms | tokens/sec: 4000.00{memory} | steps {counted}")


def test_the_time_left_is_that_of_the_steps_left(tmp_path, byte_tokens):
    """In the long run, from the median of the last 99 steps: a slow first one does not count."""
    module = rung("long_run")
    clock, seconds, forward = FakeClock(module), iter([900, *[200] * 99, *[100] * 99]), module.GPT.forward
    module.GPT.forward = lambda model, *args: clock.slow(forward, next(seconds))(model, *args)
    folder = tmp_path / "new" / "logs"  # which is made, with those above it
    log = train(module, folder, byte_tokens, "--model", "1x1x8", "-B", 1, "-T", 8, "--steps", 199, "--total-batch", 8,
                "--val-every", 0, "--checkpoint-every", 0)
    left = [line.rpartition(" | left: ")[2] for line in log.read_text().splitlines() if line.startswith("step")]
    assert left[2] == str(timedelta(seconds=196 * 200)) and left[-2:] == ["0:01:40", "0:00:00"]


@pytest.mark.parametrize("has_driver, sees_gpu", [(True, False), (True, True), (False, False)])
def test_a_gpu_that_torch_cannot_use_is_named(has_driver, sees_gpu, tmp_path, byte_tokens, monkeypatch):
    """Else a torch without CUDA trains on the CPU, a hundred times slower, and says nothing of it."""
    monkeypatch.setattr("shutil.which", lambda name: name if has_driver else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sees_gpu)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    run = as_program("0", "--data", byte_tokens, "--log-dir", tmp_path, "-B", 1, "-T", 8, "--steps", 1)
    warns = "# WARNING: torch cannot use the GPU here; python -m ladder check says why\n" in run.stdout
    assert run.returncode == 0 and warns == (has_driver and not sees_gpu)
    assert (tmp_path / "baseline.log").read_text() == run.stdout


def test_a_run_outlives_what_reads_its_output(tmp_path, byte_tokens):
    """`| head` ends after its lines, a terminal is closed: the log has all steps, and the model is saved."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with contextlib.suppress(BrokenPipeError), open(write_end, "w") as gone, contextlib.redirect_stdout(gone):
        train(rung("0"), tmp_path, byte_tokens, "-B", 1, "-T", 16, "--steps", 4, "--save", tmp_path / "model.pt")
    assert [step["step"] for step in read_steps(tmp_path / "baseline.log")] == [1, 2, 3, 4]
    assert (tmp_path / "model.pt").exists()
