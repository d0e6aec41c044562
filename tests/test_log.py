"""The log: its format, honest clocks, the steps that the median counts, and what other and killed runs leave."""
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, SHORT, STEP_LINE, STEP_SECONDS, FakeClock, read_steps, run_command, rung, train

from ladder.scripts.stages import BY_LABEL, STAGES
from ladder.show.logs import read_log

ALL_RUNGS = pytest.mark.parametrize("label", BY_LABEL)
POSITION = {stage.label: position for position, stage in enumerate(STAGES)}
N_STEPS = SHORT[-1]


def since(label, first):
    """Whether the rung `label` is `first` or stands above it."""
    return POSITION[label] >= POSITION[first]


@ALL_RUNGS
def test_header_and_steps(label, short_run, tokens):
    run = short_run(label)
    assert run.printed == run.lines  # printed and written alike
    assert run.lines[0] == f"# script: {BY_LABEL[label].path.name}"
    if not since(label, "20"):  # test_model.py counts them for all
        parameters = "3,385,088" if since(label, "7") else "3,382,080" if since(label, "1") else "6,598,528"
        assert run.lines[1] == f"# model: tiny | parameters: {parameters}"
    assert re.fullmatch(r"# device: cpu \| torch: [\w.+]+ \| precision: .+", run.lines[2])
    assert f"# batch: B=2 T=64 | steps: {N_STEPS} | seed: 1337" in run.lines
    n_tokens = (tokens / "train.bin").stat().st_size // 2
    epoch = (n_tokens - 1) // 128
    assert f"# data: tokens.txt (gpt2-bytes tokens) | loaded {n_tokens} tokens | 1 epoch = {epoch} batches" in run.lines
    assert [step["step"] for step in run.steps] == list(range(1, N_STEPS + 1))
    for step in run.steps:
        assert ("norm" in step, "lr" in step) == (since(label, "8"), since(label, "9"))


def test_a_terminal_without_the_characters(tmp_path, tokens):
    """The name of a text file comes from its user; the log has it as it is."""
    shutil.copytree(tokens, tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    (tmp_path / "tokens" / "meta.json").write_text(json.dumps(meta | {"source": "naïve.txt"}))
    run = run_command(sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "--data",
                      tmp_path / "tokens", "--log-dir", tmp_path, "-B", 1, "-T", 8, "--steps", 1,
                      PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "# data: na?ve.txt (gpt2-bytes tokens)" in run.stdout
    assert "# data: naïve.txt (gpt2-bytes tokens)" in (tmp_path / "baseline.log").read_text(encoding="utf-8")


def test_an_earlier_log_is_kept(tmp_path, tokens):
    """Under its date; and what a run still writes that another one has put aside goes to its own file."""
    flags = ("-B", 1, "-T", 8)
    with endless_run(tmp_path, tokens, 10) as (run, printed):
        log = train(rung(0), tmp_path, tokens, *flags, "--steps", 2)
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=60)
    kept, = tmp_path.glob("baseline.log.*")
    assert kept.read_text().splitlines()[:9] == printed[:9] and "steps: 100000" in kept.read_text()
    assert [step["step"] for step in read_steps(log)] == [1, 2] and "steps: 2" in log.read_text()


@ALL_RUNGS
def test_a_step_is_timed_from_its_batch_to_the_synchronized_device(label, short_run):
    """On the fake clock: all of its parts once, and neither the loss that is read afterwards nor the validation."""
    run = short_run(label)
    expected = sum(STEP_SECONDS[part] for part in ("batch", "forward", "synchronize"))
    for step in run.steps:
        also = STEP_SECONDS["batch"] * (since(label, "12") and step["step"] == 1)  # its own batch, and already the next
        assert step["ms"] == (expected + also) * 1000
        assert step["tokens_per_second"] == pytest.approx(2 * 64 / (expected + also), abs=0.005)
    assert run.lines[-1].startswith(f"median : dt: {expected * 1000}.00 ms | tokens/sec: {2 * 64 / expected:.2f} | ")


@pytest.mark.parametrize("label", ["0", "16"])
def test_the_arithmetic_of_each_line(label, tmp_path, tokens):
    """On the real clock. Rung 16 makes 4 micro-steps, a CPU's default."""
    log = train(rung(label), tmp_path, tokens, "-B", 2, "-T", 8, "--steps", 12)
    tokens_per_step = 2 * 8 * (4 if label == "16" else 1)
    steps = read_steps(log)
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(tokens_per_step / (step["ms"] / 1000), rel=1e-3)
    last = re.fullmatch(r"median : dt: ([\d.]+) ms \| tokens/sec: ([\d.]+) \| steps 7-12",
                        log.read_text().splitlines()[-1])
    median = statistics.median(step["ms"] for step in steps[6:])
    assert float(last[1]) == pytest.approx(median, abs=0.011)
    assert float(last[2]) == pytest.approx(tokens_per_step / (median / 1000), rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("n, counted", [(1, "1-1"), (2, "2-2"), (3, "2-3"), (10, "6-10"), (50, "26-50")])
def test_the_median_is_that_of_the_second_half(device, n, counted, tmp_path, monkeypatch):
    """Whatever the first half takes: it compiles and warms up."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2_000_000_000)
    module = rung(0)
    settings = module.parse_settings(["--log-dir", str(tmp_path), "--device", "cpu"])
    settings.device = device
    loader = SimpleNamespace(meta={"name": "text"}, tokens=[1, 2], n_batches=1)
    log = module.Log(settings, torch.nn.Linear(1, 1), loader, 1000, "float32")
    first = int(counted.split("-")[0])
    for step in range(1, n + 1):
        log.step(step, 1.0, 9.0 if step < first else 0.25)
    log.finish(n)
    memory = " | peak memory: 2.00 GB" if device == "cuda" else ""
    assert (tmp_path / "baseline.log").read_text().splitlines()[-1] == (
        f"median : dt: 250.00 ms | tokens/sec: 4000.00{memory} | steps {counted}")


def test_the_time_left_is_that_of_the_steps_left(tmp_path, tokens):
    """From rung 13 on, from the median of the steps so far: a slow first one does not count."""
    module = rung("13")
    clock = FakeClock(module)
    seconds = iter([500, *[100] * 30])
    forward = module.GPT.forward

    def timed(model, *args):
        clock.now += next(seconds) if model.training else 0
        return forward(model, *args)

    module.GPT.forward = timed
    log = train(module, tmp_path, tokens, "-B", 1, "-T", 8, "--steps", 30, "--total-batch", 8, "--val-every", 12,
                "--val-sequences", 6)
    left = [line.rpartition(" | left: ")[2] for line in log.read_text().splitlines() if line.startswith("step")]
    assert left[2] == "0:45:00" and left[-2:] == ["0:01:40", "0:00:00"]
    assert read_log(log).val_steps == [12, 24, 30]


def test_the_same_seed_gives_the_same_run(short_run, tmp_path, tokens):
    flags = (*SHORT[:-1], 2)
    again = read_steps(train(rung(10), tmp_path / "again", tokens, *flags, "--warmup-steps", 10))
    other = read_steps(train(rung(10), tmp_path / "other", tokens, *flags, "--seed", 8))
    first, again, other = [[(step["loss"], step["norm"]) for step in run[:2]]
                           for run in (short_run("10").steps, again, other)]
    assert first == again and first != other


@contextmanager
def endless_run(folder, tokens, n_lines):
    """A program that trains for ever, and the first lines that it printed."""
    command = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", ROOT / "baseline.py", "--model", "tiny",
               "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", "1", "-T", "16", "--steps", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            yield run, [run.stdout.readline().rstrip("\n") for _ in range(n_lines)]
        finally:
            run.kill()


def test_a_killed_run_keeps_its_finished_steps(tmp_path, tokens):
    with endless_run(tmp_path, tokens, 10) as (run, printed):
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=60)
    lines = (tmp_path / "baseline.log").read_text().splitlines()
    assert lines[:9] == printed[:9]  # of the tenth it may not have written more than what is on the screen
    assert all(STEP_LINE.fullmatch(line) for line in lines[5:])


def test_ctrl_c_ends_with_one_line(tmp_path, tokens):
    """Under -W error: until then nothing has warned either."""
    with endless_run(tmp_path, tokens, 7) as (run, _):
        run.send_signal(signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 1
    assert errors.strip() == "stopped: the log keeps the finished steps"
