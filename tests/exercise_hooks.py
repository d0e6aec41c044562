"""What pytest does for `python -m ladder try`: the tests of one rung with another file in its place, and hints."""
import itertools
import json
import os
import re
from pathlib import Path

import pytest
from load_script import TRIED

EXERCISE = {}  # {test: why it is not green, or ""}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    if TRIED:
        items[:] = [item for item in items if item.name.startswith(f"test_{TRIED.zfill(2)}_")]
        EXERCISE.update(dict.fromkeys(items, "it did not run"))


def reason_of(report, error):
    """Why a test is not green, in a line."""
    first, *more = re.sub("^(AssertionError|Skipped): ", "", error.exconly()).split("\n")
    if error.errisinstance(SystemExit) and report.capstderr.strip():  # of argparse, which has written why
        first, more = report.capstderr.strip().splitlines()[-1], []
    return " ".join([first, *(line for line in more if line.startswith(("assert ", "Greatest absolute")))])[:200]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item in EXERCISE and (report.when == "call" or call.excinfo):
        EXERCISE[item] = reason_of(report, call.excinfo) if call.excinfo else ""
    return report


def pytest_sessionfinish():
    """What `try` reads: of each test of an exercise its sentence, its hint, and the (first) reason why it is red."""
    results, tests = os.environ.get("LADDER_TRY_RESULTS"), []
    for function, items in itertools.groupby(EXERCISE, key=lambda item: item.function):
        sentence = function.__name__.removeprefix(f"test_{TRIED.zfill(2)}_").replace("_", " ")
        reason = next((EXERCISE[item] for item in items if EXERCISE[item]), "")
        tests.append({"sentence": sentence, "hint": function.__doc__, "reason": reason})
    if results:
        Path(results).write_text(json.dumps(tests), encoding="utf-8")
