"""Logs: the numbers in a script's, and made-up ones with known numbers."""
import re
from pathlib import Path

import pytest

STEP_HEAD = re.compile(
    r"step : (?P<step>\d+) \| loss: (?P<loss>\S+) \| dt: (?P<ms>[\d.]+) ms"
    r" \| tokens/sec: (?P<tokens_per_second>[\d.]+)")
STEP_LINE = re.compile(STEP_HEAD.pattern + r"( \| norm: \S+)?( \| lr: \S+)?( \| left: .+)?")
VAL_LINE = re.compile(r"val : step (\d+) \| loss: (\S+) \| time: \S+ s")
MEDIAN = "\nmedian : dt: 50.00 ms | tokens/sec: 1.00 | peak memory: 1.00 GB | steps 3-3\n"


def write_log(path, ms=(100, 50, 50), losses=None, header="# batch: B=4 T=1024 | steps: 3 | seed: 1\n", tail="\n"):
    losses = losses or [10 - i for i in range(len(ms))]
    lines = [f"step : {i + 1} | loss: {losses[i]} | dt: {ms[i]} ms" for i in range(len(ms))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n".join(lines) + tail)
    return path


def read_steps(log):
    """The step lines of a log file as dictionaries of numbers; of repeated ones, of a resumed run, the last."""
    steps = {}
    for line in Path(log).read_text().splitlines():
        if line.startswith("step"):
            found = STEP_HEAD.match(line)
            assert found, f"not a line of Log.step: {line}"
            steps[int(found["step"])] = {key: float(value) for key, value in found.groupdict().items()} | {
                key: float(value) for key, value in re.findall(r"\| (norm|lr): (\S+)", line)}
    return list(steps.values())


def losses(log):
    return [step["loss"] for step in read_steps(log)]


def val_losses(log):
    """{step: validation loss} of a log."""
    lines = [line for line in Path(log).read_text().splitlines() if line.startswith("val")]
    found = [VAL_LINE.fullmatch(line) for line in lines]
    assert None not in found, f"not as `val : step N | loss: 5.123456 | time: 0.12 s`: {lines}"
    return {int(match[1]): float(match[2]) for match in found}


def assert_same_losses(log, truth, after=0):
    """That a log has the steps of another after this one, with its losses, validation losses, norms and rates.

    Float32 sums in another order: losses agree to 1e-5 of 5.5.
    """
    ours, theirs = read_steps(log), read_steps(truth)[after:]
    assert [step["step"] for step in ours] == [step["step"] for step in theirs] and ours
    for key, tolerance in (("loss", 1e-4), ("norm", 1e-3), ("lr", 0)):
        assert [step[key] for step in ours] == pytest.approx([step[key] for step in theirs], abs=tolerance)
    expected = {step: loss for step, loss in val_losses(truth).items() if step > after}
    assert val_losses(log) == pytest.approx(expected, abs=1e-4)
