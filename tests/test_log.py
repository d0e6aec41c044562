"""The log: its format, honest clocks, the steps that the median counts, and what a killed run leaves behind."""
import io
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
from conftest import ROOT, SHORT, STEP_LINE, STEP_SECONDS, FakeClock, read_steps, rung, train

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
    device = r"# device: .+ \(\d+ threads\) \| torch: [\w.+]+ \| precision: .+ \| allocator: .+"
    assert re.fullmatch(device, run.lines[2])
    assert f"# batch: B=2 T=64 | steps: {N_STEPS} | seed: 1337" in run.lines
    n_tokens = (tokens / "train.bin").stat().st_size // 2
    epoch = (n_tokens - 1) // 128
    assert f"# data: tokens.txt (gpt2-bytes tokens) | loaded {n_tokens} tokens | 1 epoch = {epoch} batches" in run.lines
    assert [step["step"] for step in run.steps] == list(range(1, N_STEPS + 1))
    for step in run.steps:
        assert ("norm" in step, "lr" in step) == (since(label, "8"), since(label, "9"))


def test_a_terminal_without_the_characters(tmp_path, tokens, monkeypatch):
    """The name of a text file comes from its user; the log has it as it is."""
    shutil.copytree(tokens, tmp_path / "tokens")
    meta = json.loads((tokens / "meta.json").read_text())
    (tmp_path / "tokens" / "meta.json").write_text(json.dumps(meta | {"source": "naïve.txt"}))
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", terminal)
    log = train(rung(0), tmp_path, tmp_path / "tokens", "-B", 1, "-T", 8, "--steps", 1)
    assert b"# data: na?ve.txt (gpt2-bytes tokens)" in terminal.buffer.getvalue()
    assert "# data: naïve.txt (gpt2-bytes tokens)" in log.read_text(encoding="utf-8")


@ALL_RUNGS
def test_a_step_is_timed_from_its_batch_to_the_synchronized_device(label, short_run):
    """On the fake clock: all of its parts once, and neither the loss that is read afterwards nor the validation."""
    run = short_run(label)
    expected = sum(STEP_SECONDS[part] for part in ("batch", "forward", "synchronize"))
    for step in run.steps:
        assert step["ms"] == expected * 1000
        assert step["tokens_per_second"] == pytest.approx(2 * 64 / expected, abs=0.005)
    assert run.lines[-1].startswith(f"median : dt: {expected * 1000}.00 ms | tokens/sec: {2 * 64 / expected:.2f} | ")


@pytest.mark.parametrize("label", ["0", "16"])
def test_the_arithmetic_of_each_line(label, tmp_path, tokens):
    """On the real clock. Rung 16 makes 4 micro-steps, a CPU's default."""
    log = train(rung(label), tmp_path, tokens, "-B", 2, "-T", 8, "--steps", 12)
    tokens_per_step = 2 * 8 * (4 if label == "16" else 1)
    steps = read_steps(log)
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(tokens_per_step / (step["ms"] / 1000), rel=1e-3)
    last = re.fullmatch(
        r"median : dt: ([\d.]+) ms \| tokens/sec: ([\d.]+) \| peak memory: ([\d.]+) GB \| steps 6-12",
        log.read_text().splitlines()[-1],
    )
    median = statistics.median(step["ms"] for step in steps[5:])
    assert float(last[1]) == pytest.approx(median, abs=0.011)
    assert float(last[2]) == pytest.approx(tokens_per_step / (median / 1000), rel=1e-3)
    assert 0.1 < float(last[3]) < 100


def counted_steps(seconds, device, folder, monkeypatch):
    """The steps whose median a Log gives for steps that took so many seconds on `device`, and its lines."""
    module = rung(0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3_000_000_000)
    settings = module.Settings(device=device, B=1, log_dir=folder)
    loader = SimpleNamespace(meta={"source": "text", "tokenizer": "gpt2"}, tokens=[1, 2], n_batches=1)
    log = module.Log(settings, torch.nn.Linear(1, 1), loader, 1000, "float32")
    for step, dt in enumerate(seconds, 1):
        log.step(step, 1.0, dt)
    log.finish()
    lines = log.path.read_text().splitlines()
    return lines[-1].rpartition(" | steps ")[2], lines


@pytest.mark.parametrize("steps, counted", [(1, "1-1"), (2, "2-2"), (3, "3-3"), (10, "3-10"), (11, "6-11")])
def test_which_steps_the_median_counts_on_a_cpu(steps, counted, tmp_path, monkeypatch):
    assert counted_steps([0.01] * steps, "cpu", tmp_path, monkeypatch)[0] == counted


@pytest.mark.parametrize("seconds, counted", [
    ([0.75] + [0.25] * 49, "14-50"),  # 12 steps of 0.25 s after the first one make 3 s
    ([40] + [0.25] * 49, "14-50"),  # a compilation keeps the GPU idle: it warms up nothing
    ([2] * 20, "6-20"),  # long steps: 3 s are over before the 5 steps of a CPU
    ([0.01] * 50, "41-50"),  # never 3 s: ten steps count, and the log says so
    ([0.01] * 12, "6-12"),
    ([0.01] * 3, "3-3"),
    ([0.01], "1-1"),
])
def test_an_accelerator_warms_up_for_three_seconds(seconds, counted, tmp_path, monkeypatch):
    found, lines = counted_steps(seconds, "cuda", tmp_path, monkeypatch)
    assert found == counted
    first = int(counted.split("-")[0])
    median = statistics.median(seconds[first - 1 :])
    assert lines[-1].startswith(f"median : dt: {median * 1000:.2f} ms | tokens/sec: {1000 / median:.2f} | ")
    assert "peak memory: 2.00 GB" in lines[-1]
    assert lines[-2] == "# memory reserved by the allocator: 3.00 GB"
    assert ("# warm-up: less than 3 s" in lines[-3]) == (sum(seconds[1 : first - 1]) < 3)


def simulate(folder, first, last, step_seconds, val_seconds=0.0, seconds_of_first=100.0):
    """[(step, minutes that its printed line says are left, or None; those that were)], and the log's lines."""
    module = rung(0)
    clock, printed, ends = FakeClock(module), [], {}
    loader = SimpleNamespace(meta={"source": "text", "tokenizer": "gpt2"}, tokens=[1, 2], n_batches=1)
    log = module.Log(module.Settings(device="cpu", B=1, steps=last, log_dir=folder), torch.nn.Linear(1, 1), loader,
                     1000, "float32")
    module.print = lambda text, **_: printed.append((text, clock.now))
    for step in range(first, last + 1):
        dt = seconds_of_first if step == first else step_seconds
        clock.now += dt  # compiling, then steps of equal length
        log.step(step, 1.0, dt)
        ends[step] = printed[-1]
        clock.now += val_seconds * (step % 10 == 0)
    said = {step: re.search(r" \| left: (?:(\d+) h )?(\d+) min$", text) for step, (text, _) in ends.items()}
    minutes = {step: found and int(found[1] or 0) * 60 + int(found[2]) for step, found in said.items()}
    return [(step, minutes[step], (clock.now - ends[step][1]) / 60) for step in ends], log.path.read_text().splitlines()


@pytest.mark.parametrize("first", [1, 201])
@pytest.mark.parametrize("val_seconds", [0, 20])
def test_the_time_left_is_what_is_left(first, val_seconds, tmp_path):
    """Validations count, the compiling step does not; a resumed run has only its own steps to go by."""
    found, lines = simulate(tmp_path, first, 600, 4.0, val_seconds)
    assert all(minutes is None for step, minutes, _ in found if step < first + 9)
    for step, minutes, true in found[30:-15]:
        assert minutes == pytest.approx(true, rel=0.12 if val_seconds else 0, abs=1.5), step  # whole minutes
    assert found[-1][1] is None
    assert not any("left" in line for line in lines)  # the step lines of a log have a fixed form


def test_a_short_run_says_nothing_about_time(tmp_path):
    assert not any(minutes for _, minutes, _ in simulate(tmp_path, 1, 50, 1.4)[0])


def test_a_validation_says_how_much_time_is_left(tmp_path, tokens, capsys):
    module = rung("13")
    clock = FakeClock(module)
    module.GPT.forward = clock.slow(module.GPT.forward, 100)
    log = train(module, tmp_path, tokens, "-B", 1, "-T", 8, "--steps", 24, "--total-batch", 8, "--val-every", 12,
                "--val-sequences", 6)
    first, last = [line for line in log.read_text().splitlines() if line.startswith("val")]
    assert first.endswith(" s | left: 30 min")  # 12 steps of 100 s and one validation of 600 s, as were before
    assert last.endswith(" s")
    assert read_log(log).val_steps == [12, 24] and "tokens/sec: 0.08 | norm" in capsys.readouterr().out


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
    command = [sys.executable, "-W", "error", ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "--data",
               tokens, "--log-dir", folder, "-B", "1", "-T", "16", "--steps", "100000"]
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
