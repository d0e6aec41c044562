"""`python -m ladder try N FILE`: a reader's script in the place of rung N. Its tests, its losses and times beside ours.

The tests are those of tests/test_exercises.py whose names begin with the rung; a test's docstring is its hint. What
needs torch is imported only after them: a reader sees the first red test some seconds earlier.
"""
import ast
import importlib.util
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import psutil

from ladder.errors import UserError
from ladder.files import new_folder
from ladder.rungs.choose import find_rung
from ladder.rungs.lessons import diff_hunks, print_hunks, split_docstring
from ladder.rungs.list import ROOT, load_script
from ladder.show.chance import BEYOND_CHANCE, FEWEST_ROUNDS, paired_p
from ladder.show.logs import read_log
from ladder.show.terminal import COUNT

TESTS = ROOT / "tests" / "test_exercises.py"
SHORT = ["--model", "tiny", "-T", "128", "--steps"]  # of the runs side by side, unless flags say otherwise
SAME = {"total_batch": ["-B", "4", "--total-batch", "1024"], "muon_lr": ["--muon-lr", "2e-3"],
        "kv_heads": ["--kv-heads", "1"]}  # what both get, since an exercise does not name our defaults
ROUNDS = 3
SECONDS = 60  # for a script's import, and for each test


def exercise_of(rung):
    """{test: hint} of a rung's exercise. Raises UserError if it has none."""
    if not TESTS.exists() or not importlib.util.find_spec("pytest"):
        raise UserError("try: needs tests/ of the repository and pytest; pip install -r requirements-dev.txt")
    body = ast.parse(TESTS.read_text(encoding="utf-8")).body
    tests = {node.name: ast.get_docstring(node) for node in body if getattr(node, "name", "").startswith("test_")}
    found = {name: hint for name, hint in tests.items() if name.split("_")[1] == rung.label.zfill(2)}
    if not found:
        labels = list(dict.fromkeys(name.split("_")[1].lstrip("0") for name in tests))
        raise UserError(f"try: rung {rung.label} has no exercise; try one of {', '.join(labels)}")
    return found


def follow(each, function, *args):
    """Call function(results, *args) in a process of its own, and each(*message) on what it sends; how that ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=function, args=(theirs, *args))
    child.start()
    theirs.close()
    try:
        while ours.poll(SECONDS):
            each(*ours.recv())
        return f"no end within {SECONDS} s"
    except EOFError:
        child.join()
        return f"its process ended (exit code {child.exitcode})"
    finally:
        if child.is_alive():  # also after Ctrl-C
            from ladder.measure.jobs import stop

            stop(psutil.Process(child.pid))


def write_to(path):
    """Let this process write to a file in place of the terminal, and nothing beside the scripts that it imports."""
    output = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.dont_write_bytecode = True


def start(results, file):
    """In a process of its own: import a script, and send its flags, or None and why it does not start."""
    write_to(os.devnull)
    sys.path.insert(0, os.path.dirname(file))  # as for a script that is run
    try:
        script = load_script(SimpleNamespace(name="tried", path=Path(file)))
        known = sorted(vars(script.parse_args([])))
        results.send((known, f"train: {script.train}"))
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"line {frame.lineno}: " for frame in frames if frame.filename == file][-1:]
        results.send((None, "".join([*where, *traceback.format_exception_only(error)]).strip()))


def check_file(file):
    """(the source, the flags) of a script. Raises UserError where it is none, does not compile or does not start."""
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{file}: no such script; give a copy of the rung before, as a .py file")
    try:
        source = file.read_text(encoding="utf-8-sig")
        if "\0" in source:
            raise ValueError
        compile(source, file, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise UserError(f"{file}: line {error.lineno}: {error.msg}; correct it, and try again") from None
    except ValueError:
        raise UserError(f"{file}: not a text in UTF-8, perhaps in UTF-16; save it as UTF-8") from None
    sent = []
    how = follow(lambda *message: sent.append(message), start, str(file.resolve()))
    known, reason = sent[0] if sent else (None, f"its import: {how}")
    if known is None:
        raise UserError(f"{file}: does not start: {reason}; correct it, and try again")
    return source, known


class Reporter:
    """A plugin of pytest: sends which test begins, and how it ended, also for each of a test's parameters."""

    def __init__(self, results):
        self.results = results

    def pytest_runtest_logstart(self, location):
        self.results.send((location[2].partition("[")[0], "begun", ""))

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr or "")
        if reason.startswith("SystemExit"):  # of argparse, which has written why
            reason = (report.capstderr.strip() or reason).splitlines()[-1]
        first, *more = reason.removeprefix("AssertionError: ").split("\n")
        reason = " ".join([first, *(line for line in more if line.startswith(("assert ", "Greatest absolute")))])
        self.results.send((report.location[2].partition("[")[0], report.outcome, reason[:200]))


def run_pytest(results, label, file, folder):
    """In a process of its own: run a rung's tests with a file in its place; what pytest writes goes to tests.txt."""
    import pytest

    write_to(folder / "tests.txt")
    os.environ.update(LADDER_TRY=f"{label}={file}", PYTHONDONTWRITEBYTECODE="1")
    os.chdir(ROOT)
    code = pytest.main([str(TESTS), "-k", f"test_{label.zfill(2)}_", "-vv", "-o", "addopts=", "-p", "no:cacheprovider",
                        "--basetemp", str(folder / "tmp")], plugins=[Reporter(results)])
    results.send(("", "ended", int(code)))


def run_tests(rung, file, folder, each):
    """Run a rung's tests on a file: each(test, outcome, reason) as they end. Why that does not count; "" if it does."""
    last = [("", "", "")]

    def see(test, outcome, reason):
        last[:] = [(test, outcome, reason)]
        if outcome not in ("begun", "ended"):
            each(test, outcome, reason)

    try:
        how = follow(see, run_pytest, rung.label, file.resolve(), folder.resolve())
    finally:
        shutil.rmtree(folder / "tmp", ignore_errors=True)
    test, outcome, reason = last[0]
    if outcome == "ended":
        return f"exit code {reason}" if reason else ""
    if outcome == "begun":
        each(test, "failed", how)
    return how


def code(source):
    """(The lines below a script's docstring, if it has one; the number of the first)."""
    if ast.get_docstring(ast.parse(source)) is None:
        return source.splitlines(), 1
    return split_docstring(source)[1:]


def same_code(one, other):
    """Whether two scripts differ at most in their docstrings, comments and layout."""
    def statements(source):
        tree = ast.parse(source)
        return ast.dump(ast.Module(tree.body[ast.get_docstring(tree) is not None :], []))

    return statements(one) == statements(other)


def show_diffs(rung, file, source, console):
    """What a reader has changed in the rung before, and what the rung itself changes."""
    before, ours = (one.path.read_text(encoding="utf-8") for one in (rung.start, rung))
    old, old_first = code(before)
    for title, text in ((f"{file.name}, against rung {rung.start.label}", source), (f"ours: {rung.file}", ours)):
        console.print(f"\n{title}", style="bold")
        new, new_first = code(text)
        print_hunks(diff_hunks(old, new, old_first, new_first), console)


def run_both(rung, file, known, flags, folder, rounds, console):
    """Run our script and a reader's in turns, and say how losses and times compare. Whether both ran to their ends."""
    from ladder.measure.jobs import Job
    from ladder.measure.runner import Runner, check_flags, command_for, defaults, eager_flags, split_flags

    for name, same in SAME.items():
        if name in defaults(rung):
            flags = [*same, *flags]
    device = check_flags([rung], flags).device
    if rung.torchrun and too_few_for_ranks(device):
        device, flags = "cpu", [*flags, "--device", "cpu"]
    if rung.label == "5":
        flags = eager_flags([rung], flags, device, console)
    jobs = []
    both = [("ours", rung.path), ("yours", file.resolve())]
    for number in range(1, rounds + 1):
        for name, path in both if number % 2 else reversed(both):  # a machine's speed drifts
            logs, own = folder / name / f"round_{number}", flags
            if name == "yours" and "compile_mode" not in known:
                own = split_flags(flags, "--compile-mode")[1]
            words = [str(path) if word == str(rung.path) else word for word in command_for(rung, own, logs)]
            jobs.append(Job(path.stem, words, logs))
    logs = {name: [job.log for job in jobs if job.log_dir.parent.name == name] for name in ("ours", "yours")}
    with Runner(device, folder, 3600, console, n_jobs=len(jobs)) as runner:
        runner.run(jobs)
        runner.progress.update(runner.bar, completed=1, total=1, description="both scripts")
    if runner.failed():
        return False
    ours, yours = ([read_log(log) for log in logs[name]] for name in ("ours", "yours"))
    for sentence in sentences(ours, yours):
        console.print(sentence, soft_wrap=True)
    return True


def too_few_for_ranks(device):
    """Whether a machine has no two devices of this kind for two ranks."""
    import torch

    return device == "mps" or device == "cuda" and torch.cuda.device_count() < 2


def sentences(ours, yours):
    """How the losses, and the times of a step, of the Runs of some rounds compare."""
    pairs = list(zip(ours[0].steps, ours[0].losses, yours[0].losses, strict=False))
    apart = max(abs(a - b) for _, a, b in pairs)
    losses = ", ".join(f"{a:.6f} and {b:.6f} in step {step}" for step, a, b in (pairs[0], pairs[-1]))
    agreement = f"up to {apart:.6f} apart" if apart else "the same to the last digit"
    yield f"Loss, ours and yours: {losses}; {agreement}."
    ratios = sorted(b.median_ms / a.median_ms for a, b in zip(ours, yours, strict=True))
    logs_of_times = [[math.log(run.median_ms) for run in rounds] for rounds in (ours, yours)]
    p = paired_p(*logs_of_times, FEWEST_ROUNDS)
    verdict, doubt = "A step of yours takes", ""
    if p is not None and p < BEYOND_CHANCE:
        how = "slower" if statistics.median(ratios) > 1 else "faster"
        verdict = f"Yours is {how} (p = {p:.1g}): a step takes"
    elif ratios[0] <= 1 <= ratios[-1]:
        verdict = "About the same speed: a step of yours takes"
    elif len(ratios) < FEWEST_ROUNDS:
        doubt = f"; --rounds {FEWEST_ROUNDS} tells whether that is chance"
    yield f"{verdict} {ratios[0]:.2f} to {ratios[-1]:.2f} times as long as ours ({len(ratios)} rounds){doubt}."


def show_tests(rung, file, tests, folder, console):
    """Run the tests and show those that are red, each with its hint, as they end. The names of those that are."""
    failed, ended = [], set()

    def show(test, outcome, reason):
        ended.add(test)
        status.update(f"{len(ended)} of {len(tests)} tests")
        if outcome != "passed" and test not in failed:
            failed.append(test)
            console.print(f"  RED  {sentence_of(test)}", style="red", soft_wrap=True)
            console.print(f"       look: {tests[test]}", soft_wrap=True)
            console.print(f"       found: {reason}", style="dim", soft_wrap=True)

    with console.status("pytest starts") as status:
        how = run_tests(rung, file, folder, show)
        if not ended or how and not failed:
            raise UserError(f"pytest: {how or 'no test ran'}; see {folder / 'tests.txt'},"
                            " or pip install -r requirements-dev.txt")
        for test in [test for test in tests if test not in ended]:
            show(test, "missing", f"it did not run: {how or 'pytest left it out'}")
    for test in [test for test in tests if test not in failed]:
        console.print(f"  ok   {sentence_of(test)}", style="green", soft_wrap=True)
    return failed


def sentence_of(test):
    """What the name of a test says."""
    return " ".join(test.split("_")[2:])


def try_file(rung, file, rounds, flags, folder, console):
    """Do all that `try` does; the exit code."""
    tests, (source, known) = exercise_of(rung), check_file(file)
    if rung.torchrun and sys.platform == "win32":
        from ladder.measure.check import NO_TORCHRUN

        raise UserError(f"try: torchrun {NO_TORCHRUN}")
    if flags:
        from ladder.measure.runner import settings_of

        settings_of(rung, flags)  # exits if they are wrong
    steps = "30" if rung.path.parent == ROOT else "10"
    flags = [*SHORT, steps, *([] if rung.label == "5" else ["--compile-mode", "none"]), *flags]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}_", dir=folder.parent))  # others may try in the same second
    console.print(f"Exercise {rung.label}, {rung.title}: {file} in the place of {rung.file}", style="bold",
                  soft_wrap=True)
    failed = show_tests(rung, file, tests, folder, console)
    if failed:
        if same_code(source, rung.start.path.read_text(encoding="utf-8")):
            console.print(f"{file.name} is still rung {rung.start.label}: only comments differ.", soft_wrap=True)
        console.print(f"{len(failed)} of {len(tests)} tests are red; their output: {folder / 'tests.txt'}. Our change, "
                      f"when you want to see it: python -m ladder diff {rung.label}", soft_wrap=True)
    else:
        console.print(f"All {len(tests)} tests pass.", style="bold")
    if same_code(source, rung.path.read_text(encoding="utf-8")):
        console.print(f"{file.name} is {rung.file}, line for line, but for comments.", soft_wrap=True)
        return 1 if failed else 0
    ran = True
    if rounds or not failed:
        ran = run_both(rung, file, known, flags, folder, rounds or ROUNDS, console)
    if not failed:
        show_diffs(rung, file, source, console)
    return 1 if failed or not ran else 0


def add_flags(parser):
    parser.description += """. Runs the tests of lesson N on FILE and shows a hint for each that is red. Once all pass:
        both scripts in turns, and what each changes in the rung before. docs/exercises.md has the exercises."""
    flag = parser.add_argument
    flag("rung", metavar="N", help="of the lesson, or its file")
    flag("file", type=Path, metavar="FILE", help="your script: a copy of the rung before, with the change made")
    flag("--rounds", type=COUNT, metavar="ROUNDS", help="of both scripts, in turns (default: 3, once the tests pass)")


def main(args, console):
    return try_file(find_rung(args.rung), args.file, args.rounds, args.flags, new_folder("logs/try"), console)
