"""python -m ladder run: what it refuses, and what a run that is resumed must still have."""
from pathlib import Path
from types import SimpleNamespace

import pytest
from log_files import MEDIAN, write_log
from run_tool import flags, is_one_error

from ladder.measure import runner
from ladder.rungs.list import BY_LABEL
from ladder.verbs import run


@pytest.mark.parametrize("words", [["--rungs", "10,ddp"], ["--max-batch", "--rungs", "fsdp"]])
def test_windows_has_no_torchrun(words, tokens, monkeypatch, call):
    monkeypatch.setattr(run, "sys", SimpleNamespace(platform="win32"))
    answer = call("run", *words, *flags(tokens))
    assert is_one_error(answer, "--rungs ", "torchrun does not start on Windows", "running.md")


def test_a_quick_run_has_its_own_rungs(tokens, call):
    code, _, error = call("run", "--quick", "--rungs", "0,10", *flags(tokens))
    assert code == 2 and "not allowed with" in error


def test_a_run_is_not_resumed_with_changed_code(fake_run, call, monkeypatch):
    """Else its rounds would be of two scripts, in one median."""
    stopped = runner.Outcome(BY_LABEL["0"].name, "timed out")
    assert fake_run(lambda job: stopped, "--logs", "begun")[0] == 1
    with monkeypatch.context() as changed:
        changed.setattr("ladder.records.summary.code_of", lambda rungs: {rung.name: "changed" for rung in rungs})
        assert is_one_error(call("run", "--resume", "--logs", "begun"), "--resume: baseline.py has changed")
    assert call("run", "--resume", "--logs", "begun")[0] == 1  # goes on, and stops again


def test_a_batch_that_was_fitted_is_kept_behind_flags_for_the_scripts(fake_run, call, monkeypatch):
    monkeypatch.setattr(run, "fit_batch", lambda rungs, given, *_: (rungs, [] if "2" in given else ["-B", "2"]))
    commands = []

    def do(job):
        commands.append(job.command)
        write_log(job.log, tail=MEDIAN)

    assert fake_run(do, "--logs", "begun", "--", "--seed", 5)[0] == 0
    Path("begun", "baseline.log").unlink()
    assert call("run", "--resume", "--logs", "begun")[0] == 0
    assert commands[0] == commands[1] and commands[0].count("-B") == 2
