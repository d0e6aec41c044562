"""`python -m ladder try`: an exercise. (`try` is a keyword of Python's, which no module can be called.)"""
import importlib.util
import sys
import tempfile
from pathlib import Path

from ladder.errors import UserError
from ladder.files import new_folder
from ladder.measure.exercise import ROUNDS, SHORT, check_file, is_red, run_both, run_tests
from ladder.measure.problems import NO_TORCHRUN
from ladder.measure.script_flags import settings_of
from ladder.rungs.lessons import read_exercises
from ladder.rungs.list import ROOT, find_rung
from ladder.show.lesson_text import show_diffs
from ladder.show.terminal import COUNT

STYLES = {"ok": "green", "RED": "red", "found:": "dim"}  # of lines, by their first word


def add_flags(parser):
    parser.description += """. Runs the tests of lesson N on FILE and shows a hint for each that is red. Once all pass:
        both scripts in turns, and what each changes in the rung before. docs/exercises.md has the exercises."""
    flag = parser.add_argument
    flag("rung", metavar="N", help="of the lesson, or its file")
    flag("file", type=Path, metavar="FILE", help="your script: a copy of the rung before, with the change made")
    flag("--rounds", type=COUNT, metavar="ROUNDS", help="of both scripts, in turns (default: 3, once the tests pass)")


def main(args, console):
    rung, file = find_rung(args.rung), args.file
    exercises = [label for label in read_exercises() if label != "0"]  # which has no rung before it
    if rung.label not in exercises:
        raise UserError(f"try: {rung.called} has no exercise; try one of {', '.join(exercises)}")
    if not importlib.util.find_spec("pytest"):
        raise UserError("try: needs pytest; pip install pytest")
    known = check_file(file)
    if rung.torchrun and sys.platform == "win32":
        raise UserError(f"try: torchrun {NO_TORCHRUN}")
    settings_of(rung, args.flags)  # exits if they are wrong
    steps = "30" if rung.path.parent == ROOT else "10"
    flags = [*SHORT, steps, *([] if rung.label == "5" else ["--compile-mode", "none"]), *args.flags]
    folder = new_folder("logs/try")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{folder.name}_", dir=folder.parent))  # others may try in the same second
    console.print(f"Exercise {rung.label}, {rung.title}: {file} in the place of {rung.file}", style="bold",
                  soft_wrap=True)
    with console.status("the tests"):
        said = run_tests(rung, file, folder)
    for line in said:
        console.print(line, style=STYLES.get(line.split()[0]), soft_wrap=True)
    failed = sum(map(is_red, said))
    n_tests = failed + sum(line.startswith("  ok ") for line in said)
    if failed:
        console.print(f"{failed} of {n_tests} tests are red; their output: {folder / 'tests.txt'}. Our change, "
                      f"when you want to see it: python -m ladder diff {rung.label}", soft_wrap=True)
    else:
        console.print(f"All {n_tests} tests pass.", style="bold")
    ran = True
    if args.rounds or not failed:
        ran = run_both(rung, file, known, flags, folder, args.rounds or ROUNDS, console)
    if not failed:
        show_diffs(rung, file, console)
    return 1 if failed or not ran else 0
