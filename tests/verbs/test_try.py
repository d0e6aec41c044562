"""python -m ladder try: which tests it runs, what it says, and what it refuses. The tests: test_exercises.py."""
import ast
import importlib.util
import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from load_script import ROOT
from rich.console import Console
from run_tool import files_in, is_one_error, run_in_a_fork, run_jobs_here

from ladder.errors import UserError
from ladder.measure import exercise, runner, script_flags
from ladder.measure.exercise import TESTS, ExerciseTest, run_tests, sentences
from ladder.measure.processes import Job
from ladder.records.logs import Run
from ladder.rungs.list import BY_LABEL
from ladder.rungs.lessons import read_exercises
from ladder.verbs import try_

EXERCISES = [label for label in read_exercises() if label != "0"]  # which has no test


def edited(label, path, *changes):
    """A copy of a rung with (old, new) pieces of code, as a reader makes it."""
    text = BY_LABEL[label].path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def forked(monkeypatch):
    """To import torch in the processes that an exercise starts would take nine tenths of the time."""
    monkeypatch.setattr(exercise, "run_job", run_in_a_fork)
    monkeypatch.setattr(runner, "run_jobs", run_jobs_here)


@pytest.mark.slow
@pytest.mark.parametrize("label", EXERCISES)
def test_the_rung_before_is_not_a_solution(label, tmp_path, forked):
    """And is red because something is missing, not because a test broke. Ours is one: test_exercises.py."""
    reasons = [test.reason for test in run_tests(BY_LABEL[label], BY_LABEL[label].start.path, tmp_path)]
    assert any(reasons)
    assert not [reason for reason in reasons if re.match("(Type|Key|Index|Value|UnboundLocal|Name)Error", reason)]


def test_each_test_belongs_to_an_exercise_and_has_a_hint():
    body = ast.parse(TESTS.read_text(encoding="utf-8")).body
    hints = {node.name: ast.get_docstring(node) for node in body if getattr(node, "name", "").startswith("test_")}
    assert all(hint and "\n" not in hint for hint in hints.values())
    prefixes = [f"test_{label.zfill(2)}_" for label in EXERCISES]
    tests = {prefix: [name for name in hints if name.startswith(prefix)] for prefix in prefixes}
    untested = [prefix for prefix in prefixes if not tests[prefix]]
    assert untested == [], f"{TESTS.name} has no such test, but docs/exercises.md the exercise"
    assert sorted(sum(tests.values(), [])) == sorted(hints), "docs/exercises.md has no section for a test"


@pytest.mark.slow
def test_another_right_solution_passes(forked, call, tmp_path, tokens, monkeypatch):
    """Wherever the file is; then both scripts run, and the changes are shown. Nothing is written beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    edited("0", tmp_path / "elsewhere" / "my try.py", (
        "        self.apply(self._init_weights)\n",
        "        self.lm_head.weight = self.transformer.wte.weight\n        self.apply(self._init_weights)\n"))
    before = files_in(tmp_path / "elsewhere")
    words = ("--rounds", 1, "--", "--steps", 2, "-T", 16, "--data", tokens)
    code, output, error = call("try", 1, "elsewhere/my try.py", *words)
    assert code == 0 and error == ""
    assert "All 2 tests pass." in output and "Loss, ours and yours: " in output and " in step 2; " in output
    assert "+ self.lm_head.weight = self.transformer.wte.weight" in output  # what was changed, and
    assert "+ self.transformer.wte.weight = self.lm_head.weight" in output  # what we change
    assert files_in(tmp_path / "elsewhere") == before and {*os.listdir(tmp_path)} == {"elsewhere", "logs"}


def test_what_is_red_comes_with_a_hint(forked, imported_here, call, tmp_path, monkeypatch):
    """And neither with our solution, nor with a comparison of what does not work."""
    monkeypatch.chdir(tmp_path)
    edited("0", tmp_path / "mine.py", (
        "        self.apply(self._init_weights)\n",
        "        self.transformer.wte.weights = self.lm_head.weight\n        self.apply(self._init_weights)\n"))
    code, output, _ = call("try", 1, "mine.py")
    assert code == 1 and "2 of 2 tests failed" in output
    assert "RED embedding and output layer share one parameter look: Both modules, wte and lm_head, have" in output
    assert "found: assert 163037184 == 124439808" in output
    assert "wte.weight = self.lm_head.weight" not in output and "Losses" not in output


@pytest.mark.parametrize("end", ["os._exit(0)", "pytest.exit('all is well', 0)"])
def test_a_script_that_ends_the_tests_is_not_green(end, forked, imported_here, call, tmp_path, monkeypatch):
    """Ours, but for that: pytest has ended with 0, and no test was red."""
    monkeypatch.chdir(tmp_path)
    edited("1", tmp_path / "mine.py", (
        "        self.apply(self._init_weights)\n",
        f"        import pytest\n        {end}\n        self.apply(self._init_weights)\n"))
    code, output, error = call("try", 1, "mine.py")
    assert code == 1 and ("pytest: it did not come to its end; see " in error or output.count("it did not run") == 2)


def test_the_exercises_need_nothing_that_windows_lacks(tmp_path):
    words = [TESTS, "--basetemp", tmp_path / "tmp", "-p", "no:xdist", "-o", "addopts="]
    env = {"LADDER_TRY": f"1={BY_LABEL['1'].path}"}
    job = Job("pytest", [sys.executable, "-m", "as_on_windows", *map(str, words)], tmp_path, env)
    outcome = run_in_a_fork(job)
    assert outcome.status == "ok" and "2 passed" in outcome.lines[-1], outcome.lines


@pytest.fixture
def console():
    """A Console that keeps what is printed, as `console.file`."""
    return Console(file=io.StringIO(), width=200)


MADE_UP = """
import sys, pytest

def test_01_a():
    "hint a"

@pytest.mark.parametrize("x", "xyz")
def test_01_b(x):
    "hint b"
    assert x != "y", "no"

def test_01_c():
    "hint c"
    print("usage\\nerror: no such flag", file=sys.stderr)
    sys.exit(2)

@pytest.fixture
def broken():
    raise KeyError("k")

def test_01_d(broken):
    "hint d"

def test_01_e():
    "hint e"
    pytest.skip("no compiler")

def test_02_f():
    "of another exercise"

@pytest.mark.parametrize("x", "xy")
def test_01_g(x):
    "hint g"
    if x == "y":
        pytest.exit("all is well", 0)
"""


@pytest.mark.slow
def test_each_red_test_comes_with_its_own_hint(tmp_path, monkeypatch):
    """A test is red if it is for one of its parameters, and one that did not run is red."""
    (tmp_path / "test_made_up.py").write_text(MADE_UP)
    monkeypatch.setattr(exercise, "TESTS", tmp_path / "test_made_up.py")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p exercise_hooks")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    reasons = {"a": "", "b": "no assert 'y' != 'y'", "c": "error: no such flag", "d": "KeyError: 'k'",
               "e": "no compiler", "g": "it did not run"}
    expected = [(name, f"hint {name}", reason) for name, reason in reasons.items()]
    assert run_tests(BY_LABEL["1"], Path("mine.py"), tmp_path) == expected


@pytest.mark.parametrize("status, tests, error", [
    ("failed", [{"sentence": "a", "hint": "hint a", "reason": ""}], "exit code 1"),
    ("ok", None, "it did not come to its end")])
def test_green_is_only_what_pytest_has_run_to_its_end(status, tests, error, tmp_path, monkeypatch):
    def run_job(job, *_):
        if tests:
            Path(job.env["LADDER_TRY_RESULTS"]).write_text(json.dumps(tests))
        return runner.Outcome("pytest", status, "exit code 1" if status == "failed" else "")

    monkeypatch.setattr(exercise, "run_job", run_job)
    with pytest.raises(UserError, match=f"^pytest: {error}"):
        run_tests(BY_LABEL["1"], Path("mine.py"), tmp_path)


def test_both_run_in_a_new_folder_in_few_steps_beyond_rung_10_and_compile_where_that_is_the_exercise(
        console, tmp_path, monkeypatch):
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(try_, "check_file", lambda file: [])
    monkeypatch.setattr(try_, "run_tests", lambda *args: [ExerciseTest("a", "hint a", "")])
    monkeypatch.setattr(try_, "run_both", lambda rung, file, flags, folder, *more: (
        calls.append((folder, flags[flags.index("--steps") + 1], "none" in flags)) or True))
    for label in ("4", "5", "6", "gradient_accumulation", "gradient_accumulation"):
        rung = BY_LABEL[label]
        assert try_.main(SimpleNamespace(rung=label, file=rung.start.path, rounds=None, flags=[]), console) == 0
    folders, steps, eager = zip(*calls, strict=True)
    assert len(set(folders)) == 5 and steps == ("30", "30", "30", "10", "10")
    assert eager == (True, False, True, True, True)


@pytest.mark.parametrize("text, given", [("# no --compile-mode yet", False), ("flag('--compile-mode')", True)])
def test_ours_and_theirs_begin_in_turn(text, given, console, tokens, tmp_path, monkeypatch):
    """The machine gets slower and faster meanwhile. Each gets the flags that it has."""
    ran = []

    class Runner(runner.Runner):
        def run(self, jobs):
            ran.extend(job.log_dir.parent.name for job in jobs)
            assert {"--compile-mode" in job.command for job in jobs if job.name == "mine"} == {given}

        def failed(self):
            return True

    monkeypatch.setattr(exercise, "Runner", Runner)
    (tmp_path / "mine.py").write_text(text)
    flags = ["--device", "cpu", "--steps", "1", "--data", str(tokens), "--compile-mode", "none"]
    exercise.run_both(BY_LABEL["6"], tmp_path / "mine.py", flags, tmp_path, 3, console)
    assert ran == ["ours", "yours", "yours", "ours", "ours", "yours"]


@pytest.mark.parametrize("device, gpus, too_few", [
    ("cuda", 1, True), ("cuda", 2, False), ("mps", 0, True), ("cpu", 0, False)])
def test_two_ranks_run_on_the_cpu_where_there_are_no_two_gpus(device, gpus, too_few, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert exercise.too_few_for_ranks(device) == too_few


@pytest.mark.slow
def test_an_import_without_end_is_stopped(call, tmp_path, monkeypatch):
    monkeypatch.setattr(script_flags, "START_SECONDS", 15)
    (tmp_path / "mine.py").write_text("while True:\n    pass\n")
    assert is_one_error(call("try", 6, tmp_path / "mine.py"), "--help does not end within 15 s")


@pytest.mark.parametrize("label, text, reasons", [
    (6, None, ["mine.py: no such script"]),
    (6, "def f(:\n", ["mine.py: does not start: line 1: SyntaxError: invalid syntax; correct it"]),
    (6, "\n\nimport no_such_module\n", ["mine.py: does not start: line 3: ModuleNotFoundError: No module named"]),
    (6, "import sys\nsys.exit(0)\n", ["mine.py: does not start: its --help shows no flags; correct it"]),
    (6, "x = 1\n", ["does not start: its --help shows no flags"]),
    ("prefetch", "x = 1\n", ["prefetch has no exercise; try one of 1, 2, 3"]),
    (99, "x = 1\n", ["no rung 99"]),
])
def test_one_line_where_there_is_nothing_to_try(label, text, reasons, imported_here, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.py").write_text(text)
    before = files_in(tmp_path)
    assert is_one_error(call("try", label, "mine.py"), *reasons)
    assert files_in(tmp_path) == before


def test_a_script_that_ends_its_process_does_not_start(call, tmp_path):
    (tmp_path / "mine.py").write_text("import os\nprint('all is well', flush=True)\nos._exit(0)\n")
    answer = call("try", 6, tmp_path / "mine.py")
    assert is_one_error(answer, "mine.py: does not start: its --help shows no flags")


def test_without_pytest_it_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert is_one_error(call("try", 6, BY_LABEL["5"].path), "pytest; pip install pytest")


def rounds(*ms, loss=4.0):
    return [Run(Path(f"round_{n}", "x.log"), "x", {}, 1, 64, 1, [1, 2], [5.0, loss], [time, time])
            for n, time in enumerate(ms)]


@pytest.mark.parametrize("ours, yours, said", [
    ((10, 11, 10), (10.1, 10.5, 10), ["About the same speed", "0.95 to 1.01 times as long as ours (3 rounds)."]),
    ((10, 11, 10), (20, 21, 22), ["A step of yours takes 1.91 to 2.20", "(3 rounds); run with --rounds 5"]),
    ((10,), (20,), ["A step of yours takes 2.00 times", "(1 round); run with --rounds 5"]),
    ((10, 11, 10, 11, 10), (20, 21, 22, 20, 20), ["Yours is slower (p "]),
    ((20, 21, 22, 20, 20), (10, 11, 10, 11, 10), ["Yours is faster (p "]),
    ((10, 11, 10, 11, 10), (10.1, 11.2, 10.1, 12, 14), ["A step of yours takes 1.01 to 1.40 times"]),
])
def test_no_verdict_on_speed_that_the_rounds_do_not_carry(ours, yours, said):
    text = " ".join(sentences(rounds(*ours), rounds(*yours)))
    assert all(words in text for words in said), text
    assert ("(p " in text) == any("(p " in words for words in said)


@pytest.mark.parametrize("loss, said", [(4.0, "the same to the last digit"), (4.5, "up to 0.500000 apart")])
def test_the_losses_are_compared(loss, said):
    first = next(sentences(rounds(10), rounds(10, loss=loss)))
    assert said in first and f"5.000000 and 5.000000 in step 1, 4.000000 and {loss:.6f} in step 2" in first
