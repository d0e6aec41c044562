"""python -m ladder try: which tests it runs, what it says, and what it refuses. The tests: test_exercises.py."""
import importlib.util
import io
import itertools
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from conftest import start_forkserver
from rich.console import Console
from run_tool import files_in, is_one_error

from ladder.errors import UserError
from ladder.measure import exercise, runner
from ladder.measure.exercise import TESTS, exercise_of, run_tests, sentences
from ladder.rungs.list import BY_LABEL
from ladder.show.logs import Run

EXERCISES = [*map(str, range(1, 11)), "ddp", "11", "13", "14", *map(str, range(16, 25)), "32"]


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """What `try` starts imports no torch: that takes longer than most of its tests."""
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(exercise.multiprocessing, "get_context", lambda method: context)


def edited(label, path, *changes):
    """A copy of a rung with (old, new) pieces of code, as a reader makes it."""
    text = BY_LABEL[label].path.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("label", EXERCISES)
def test_the_rung_before_is_not_a_solution(label, tmp_path):
    """And is red because something is missing, not because a test broke. Ours is one: test_exercises.py."""
    failed = {}
    before = BY_LABEL[label].start.path
    run_tests(BY_LABEL[label], before, tmp_path, lambda test, outcome, reason: (
        failed.setdefault(test, reason) if outcome != "passed" else None))
    assert failed
    broken = ("TypeError", "KeyError", "IndexError", "ValueError", "UnboundLocalError", "NameError")
    assert {test: reason for test, reason in failed.items() if reason.startswith(broken)} == {}


def test_each_test_belongs_to_an_exercise_and_has_a_hint():
    tests = {label: exercise_of(BY_LABEL[label]) for label in EXERCISES}
    names = [name for of_label in tests.values() for name in of_label]
    assert len(names) == len(set(names)) == TESTS.read_text().count("\ndef test_")
    assert all(hint and "\n" not in hint for of_label in tests.values() for hint in of_label.values())


def test_another_right_solution_passes(call, tmp_path, tokens, monkeypatch):
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


def test_what_is_red_comes_with_a_hint(call, tmp_path, monkeypatch):
    """And neither with our solution, nor with a comparison of what does not work."""
    monkeypatch.chdir(tmp_path)
    edited("0", tmp_path / "mine.py", (
        "        self.apply(self._init_weights)\n",
        "        self.transformer.wte.weights = self.lm_head.weight\n        self.apply(self._init_weights)\n"))
    code, output, _ = call("try", 1, "mine.py")
    assert code == 1 and "2 of 2 tests are red" in output
    assert "RED embedding and output layer share one parameter look: Both modules, wte and lm_head, have" in output
    assert "found: assert 163037184 == 124439808" in output
    assert "wte.weight = self.lm_head.weight" not in output and "Losses" not in output


@pytest.mark.parametrize("end, said", [
    ("os._exit(0)", "2 of 2 tests are red"), ("pytest.exit('all is well', 0)", "error: pytest: no test ran; see ")])
def test_a_script_that_ends_the_tests_is_not_green(end, said, call, tmp_path, monkeypatch):
    """Ours, but for that: pytest has ended with 0, and no test was red."""
    monkeypatch.chdir(tmp_path)
    edited("1", tmp_path / "mine.py", (
        "        self.apply(self._init_weights)\n",
        f"        import pytest\n        {end}\n        self.apply(self._init_weights)\n"))
    code, output, error = call("try", 1, "mine.py")
    assert code == 1 and said in output + error


@pytest.fixture
def console():
    """A Console that keeps what is printed, as `console.file`."""
    return Console(file=io.StringIO(), width=200)


def shown(console, tests, outcomes, how, monkeypatch):
    """What show_tests prints, and gives, if pytest ends so."""
    def run_tests(rung, file, folder, each):
        for outcome in outcomes:
            each(*outcome)
        return how

    monkeypatch.setattr(exercise, "run_tests", run_tests)
    failed = exercise.show_tests(None, None, tests, Path(), console)
    return failed, console.file.getvalue()


@pytest.mark.parametrize("red", [red for n in range(4) for red in itertools.combinations("abc", n)])
def test_each_red_test_comes_with_its_own_hint(red, console, monkeypatch):
    """Whichever they are. A test is red once, also if it is for several of its parameters, and green for others."""
    tests = {f"test_01_{name}": f"hint {name}" for name in "abc"}
    outcomes = [(f"test_01_{name}", outcome, f"reason {name}") for name in "cab"
                for outcome in ("passed", *["failed"] * 2 * (name in red), "passed")]
    failed, text = shown(console, tests, outcomes, "exit code 1" if red else "", monkeypatch)
    expected = [f"  RED  {name}\n       look: hint {name}\n       found: reason {name}\n"
                for name in "cab" if name in red]
    assert text == "".join([*expected, *(f"  ok   {name}\n" for name in "abc" if name not in red)])
    assert sorted(failed) == [f"test_01_{name}" for name in red]


def test_green_is_only_what_pytest_has_run_to_its_end(console, monkeypatch):
    tests = {"test_01_a": "hint", "test_01_b": "hint"}
    passed = [(test, "passed", "") for test in tests]
    assert shown(console, tests, passed[:1], "", monkeypatch)[0] == ["test_01_b"]
    for outcomes, how in ((passed, "exit code 1"), (passed, "its process ended (exit code 0)"), ([], "exit code 4")):
        with pytest.raises(UserError, match="^pytest: .*exit code"):
            shown(console, tests, outcomes, how, monkeypatch)


def test_each_call_has_a_folder_of_its_own_and_few_steps_from_rung_11_on(console, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(exercise, "check_file", lambda file: (file.read_text(), []))
    monkeypatch.setattr(exercise, "show_tests", lambda *args: [])
    monkeypatch.setattr(exercise, "run_both", lambda rung, file, known, flags, folder, *more: (
        calls.append((folder, flags[flags.index("--steps") + 1])) or True))
    for label in ("10", "11", "11"):
        rung = BY_LABEL[label]
        assert exercise.try_file(rung, rung.start.path, 0, [], tmp_path / "logs" / "now", console) == 0
    folders, steps = zip(*calls, strict=True)
    assert steps == ("30", "10", "10") and len(set(folders)) == 3
    exercise.try_file(BY_LABEL["10"], BY_LABEL["10"].path, 0, [], tmp_path / "now", console)  # nothing to compare
    assert len(calls) == 3 and "line for line" in console.file.getvalue()


def test_ours_and_theirs_begin_in_turn(console, tmp_path, monkeypatch):
    """The machine gets slower and faster meanwhile."""
    ran = []

    class Runner(runner.Runner):
        def run(self, jobs):
            ran.extend(job.log_dir.parent.name for job in jobs)

        def failed(self):
            return True

    monkeypatch.setattr(runner, "Runner", Runner)
    flags = ["--device", "cpu", "--steps", "1"]
    exercise.run_both(BY_LABEL["1"], tmp_path / "mine.py", [], flags, tmp_path, 3, console)
    assert ran == ["ours", "yours", "yours", "ours", "ours", "yours"]


@pytest.mark.parametrize("device, gpus, too_few", [
    ("cuda", 1, True), ("cuda", 2, False), ("mps", 0, True), ("cpu", 0, False)])
def test_two_ranks_run_on_the_cpu_where_there_are_no_two_gpus(device, gpus, too_few, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert exercise.too_few_for_ranks(device) == too_few


@pytest.mark.parametrize("label, text, reasons", [
    (6, None, ["mine.py: no such script"]),
    (6, "def f(:\n", ["mine.py: line 1: invalid syntax"]),
    (6, "\n\nimport no_such_module\n", ["mine.py: does not start: line 3: ModuleNotFoundError: No module named"]),
    (6, "import sys\nsys.exit(0)\n", ["mine.py: does not start: line 2: SystemExit: 0; correct it"]),
    (6, "import os\nos._exit(0)\n", ["does not start: its import: its process ended (exit code 0)"]),
    (6, "while True:\n    pass\n", ["does not start: its import: no end within 3 s"]),
    (6, "x = 1\n".encode("utf-16"), ["mine.py: not a text in UTF-8, perhaps in UTF-16; save it as UTF-8"]),
    (6, "x = 1\n".encode("utf-16-le"), ["mine.py: not a text in UTF-8"]),
    (6, "x = 1\n", ["does not start: AttributeError", "'parse_args'"]),
    (12, "x = 1\n", ["rung 12 has no exercise; try one of 1, 2, 3"]),
    (99, "x = 1\n", ["no rung 99"]),
])
def test_one_line_where_there_is_nothing_to_try(label, text, reasons, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("mine.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    if label == 6 and "while" in str(text):
        monkeypatch.setattr(exercise, "SECONDS", 3)
    before = files_in(tmp_path)
    assert is_one_error(call("try", label, "mine.py"), *reasons)
    assert files_in(tmp_path) == before


def test_without_pytest_it_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert is_one_error(call("try", 6, BY_LABEL["5"].path), "pytest; pip install -r requirements-dev.txt")


def rounds(*ms, loss=4.0):
    return [Run(Path(f"round_{n}", "x.log"), "x", {}, 1, 64, 1, [1, 2], [5.0, loss], [time, time])
            for n, time in enumerate(ms)]


@pytest.mark.parametrize("ours, yours, said", [
    ((10, 11, 10), (10.1, 10.5, 10), ["About the same speed", "0.95 to 1.01 times as long as ours (3 rounds)."]),
    ((10, 11, 10), (20, 21, 22), ["A step of yours takes 1.91 to 2.20", "(3 rounds); --rounds 5 tells whether"]),
    ((10, 11, 10, 11, 10), (20, 21, 22, 20, 20), ["Yours is slower (p = "]),
    ((20, 21, 22, 20, 20), (10, 11, 10, 11, 10), ["Yours is faster (p = "]),
    ((10, 11, 10, 11, 10), (10.1, 11.2, 10.1, 12, 14), ["A step of yours takes 1.01 to 1.40 times"]),
])
def test_no_verdict_on_speed_that_the_rounds_do_not_carry(ours, yours, said):
    text = " ".join(sentences(rounds(*ours), rounds(*yours)))
    assert all(words in text for words in said), text
    assert ("p = " in text) == any("p = " in words for words in said)


@pytest.mark.parametrize("loss, said", [(4.0, "the same to the last digit"), (4.5, "up to 0.500000 apart")])
def test_the_losses_are_compared(loss, said):
    first = next(sentences(rounds(10), rounds(10, loss=loss)))
    assert said in first and f"5.000000 and 5.000000 in step 1, 4.000000 and {loss:.6f} in step 2" in first
