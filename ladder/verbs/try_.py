"""`python -m ladder try`: an exercise. (`try` is a keyword of Python's, which no module can be called.)"""
import importlib.util
import sys
import tempfile
from pathlib import Path

from ladder.errors import UserError
from ladder.files import new_folder
from ladder.measure.exercise import ROUNDS, SHORT, run_both, run_tests
from ladder.measure.problems import NO_TORCHRUN
from ladder.measure.script_flags import check_file, settings_of
from ladder.rungs.lessons import read_exercises
from ladder.rungs.list import ROOT, find_rung
from ladder.show.lesson_text import show_diffs
from ladder.show.terminal import COUNT


def add_flags(parser):
    parser.description += """ The command runs the tests of exercise N on FILE and prints a hint for each failing test.
        Once all pass, it runs your script and ours in turn, and shows what each changes in the previous rung. The
        exercises are in docs/exercises.md."""
    flag = parser.add_argument
    flag("rung", metavar="N", help="label of the exercise's rung, such as 6 or muon")
    flag("file", type=Path, metavar="FILE", help="your script: a copy of the previous rung, with your change")
    flag("--rounds", type=COUNT, metavar="ROUNDS", help="number of rounds in which both scripts run, even if a test "
         "fails (default: 3 once all tests pass)")


def main(args, console):
    rung, file = find_rung(args.rung), args.file
    exercises = [label for label in read_exercises() if label != "0"]  # which has no rung before it
    if rung.label not in exercises:
        raise UserError(f"try: {rung.called} has no exercise; try one of {', '.join(exercises)}")
    if not importlib.util.find_spec("pytest"):
        raise UserError("try: needs pytest; pip install pytest")
    check_file(file)
    if rung.torchrun and sys.platform == "win32":
        raise UserError(f"try: torchrun {NO_TORCHRUN}")
    settings_of(rung, args.flags)  # exits if they are wrong
    steps = "30" if rung.path.parent == ROOT else "10"
    flags = [*SHORT, steps, *([] if rung.about_compiling else ["--compile-mode", "none"]), *args.flags]
    folder = new_folder("logs/try")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}_", dir=folder.parent))  # others may try in the same second
    console.print(f"Exercise {rung.label}, {rung.title}: {file} in the place of {rung.file}", style="bold",
                  soft_wrap=True)
    with console.status("the tests"):
        tests = run_tests(rung, file, folder)
    failed = [test for test in tests if test.reason]
    for test in tests:
        mark, style = ("RED ", "red") if test.reason else ("ok  ", "green")
        console.print(f"  {mark} {test.sentence}", style=style, soft_wrap=True)
        if test.reason:
            console.print(f"       look: {test.hint}", soft_wrap=True)
            console.print(f"       found: {test.reason}", style="dim", soft_wrap=True)
    if failed:
        console.print(f"{len(failed)} of {len(tests)} tests failed; their output: {folder / 'tests.txt'}. Our change, "
                      f"when you want to see it: python -m ladder diff {rung.label}", soft_wrap=True)
    else:
        console.print(f"All {len(tests)} tests pass.", style="bold")
    ran = True
    if args.rounds or not failed:
        ran = run_both(rung, file, flags, folder, args.rounds or ROUNDS, console)
    if not failed:
        show_diffs(rung, file, console)
    return 1 if failed or not ran else 0
