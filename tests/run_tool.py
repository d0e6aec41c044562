"""The tool as a user calls it: in a process of its own, or in this one, which does not measure the machine."""
import json
import sys

import pytest
from run_script import run_command

import ladder.__main__ as tool
from ladder.measure import run_folder, runner, script_flags
from ladder.show.terminal import console

LADDER = [sys.executable, "-m", "ladder"]


def flags(tokens):
    return ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32", "--steps", "4"]


def ladder(*words, timeout=300, **environment):
    return run_command(*LADDER, *words, timeout=timeout, COLUMNS="200", **environment)


@pytest.fixture
def call(monkeypatch, capsys):
    """call(words) gives (exit code, stdout in one line, stderr)."""
    monkeypatch.setattr(console, "width", 200)
    rates = json.dumps({"rates": {"float32": 1e12}, "bytes_per_second": 1e10})
    monkeypatch.setattr(run_folder, "run_module", lambda name, *words: rates)
    monkeypatch.setattr(script_flags, "compile_problem", lambda device: None)  # to try takes ten seconds

    def call(*words):
        try:
            code = tool.main([str(word) for word in words])
        except SystemExit as stop:  # of argparse, and of the scripts' own checks
            code = stop.code if isinstance(stop.code, int) else print(stop.code, file=sys.stderr) or 1
        out, error = capsys.readouterr()
        return code, " ".join(out.split()), error

    return call


@pytest.fixture
def fake_run(tmp_path, monkeypatch, tokens, call):
    """fake_run(do, words): a run, in this test's folder, where do(job) takes the place of training."""
    monkeypatch.chdir(tmp_path)

    def run(do, *words):
        monkeypatch.setattr(runner, "run_jobs", lambda jobs, seconds, device, at_once, ended, show: [
            ended(job, do(job) or runner.Outcome(job.name, "ok")) for job in jobs])
        return call("run", "--rungs", 0, *flags(tokens), *words)

    return run


def is_one_error(answer, *reasons):
    code, _, error = answer
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1, answer
    return all(reason in error for reason in reasons)


def files_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
