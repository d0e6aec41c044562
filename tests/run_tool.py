"""The tool as a user calls it: in a process of its own, or in this one, which does not measure the machine."""
import contextlib
import io
import json
import multiprocessing
import os
import runpy
import sys
import traceback
from types import SimpleNamespace
from unittest import mock

import pytest
from run_script import own_settings, run_command, start_forkserver

import ladder.__main__ as tool
from ladder.measure import run_folder, runner, script_flags
from ladder.measure.processes import Outcome, judge
from ladder.rungs.list import BY_LABEL
from ladder.show.terminal import console

LADDER = [sys.executable, "-m", "ladder"]


def flags(tokens):
    return ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32", "--steps", "4"]


def ladder(*words, timeout=300, **environment):
    return run_command(*LADDER, *words, timeout=timeout, COLUMNS="200", **environment)


def run_here(job, *_):
    """What run_job does, but in this process: to import torch takes longer than to train a tiny model."""
    words, said, end = [*map(str, job.command[1:])], io.StringIO(), ""
    with own_settings(), mock.patch("sys.argv", words), contextlib.redirect_stdout(said):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stop:
            end = str(stop)
    lines = [*said.getvalue().splitlines(), end]
    return Outcome(job.name, *judge(bool(end), lines), lines)


def run_jobs_here(jobs, seconds, device, at_once, ended, show=None):
    for job in jobs:
        ended(job, run_here(job))


def run_in_a_fork(job, *_):
    """What run_job does with a `python -m ...`, but as a fork of a process that has imported torch."""
    start_forkserver()
    job.log_dir.mkdir(parents=True, exist_ok=True)
    output = job.log_dir / "output.txt"
    fork = multiprocessing.get_context("forkserver").Process(target=_fork, args=(job.command[2:], job.env, output))
    fork.start()
    fork.join()
    lines = output.read_text(encoding="utf-8").splitlines()
    return Outcome(job.name, *judge(fork.exitcode, lines), lines)


def _fork(words, env, output):
    with open(output, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ.update(env)
    for name, module in [*sys.modules.items()]:  # what the tests share reads it when it is imported
        if str(getattr(module, "__file__", "")).startswith(os.path.dirname(__file__)):
            del sys.modules[name]
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


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
def imported_here(monkeypatch):
    """A reader's script is imported in this process, where the tool would start one for it."""
    def run(words, **_):
        out, error, code = io.StringIO(), io.StringIO(), 0
        monkeypatch.setattr("sys.argv", words[2:])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                runpy.run_path(str(words[2]), run_name="__main__")
            except SystemExit as stop:
                code = stop.code
            except Exception:
                code = traceback.print_exc() or 1
        return SimpleNamespace(stdout=out.getvalue(), stderr=error.getvalue(), returncode=code)

    monkeypatch.setattr("sys.dont_write_bytecode", True)
    monkeypatch.setattr(script_flags.subprocess, "run", run)


@pytest.fixture
def mine(tmp_path):
    """mine(old, new): a copy of `zero_init` with a change."""
    def write(old="", new="", name="mine.py"):
        source = BY_LABEL["zero_init"].path.read_text(encoding="utf-8")
        assert old in source
        path = tmp_path / name
        path.write_text(source.replace(old, new, 1), encoding="utf-8")
        return path

    return write


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
