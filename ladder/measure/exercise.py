"""An exercise: a reader's script in the place of rung N. Its tests, its losses and times beside ours.

pytest runs the tests, and tests/exercise_hooks.py writes how each ended; `try` shows it.
"""
import math
import re
import sys
from typing import NamedTuple

import torch

from ladder import formats
from ladder.errors import UserError
from ladder.files import read_json
from ladder.measure.processes import Job, run_job
from ladder.measure.runner import Runner
from ladder.measure.script_flags import check_flags, command_for, defaults, eager_flags, split_flags
from ladder.records.logs import read_log
from ladder.records.significance import FEWEST_ROUNDS, paired_effect
from ladder.rungs.list import ROOT

TESTS = ROOT / "tests" / "scripts" / "test_exercises.py"
SHORT = ["--model", "tiny", "-T", "128", "--steps"]  # of the runs side by side, unless flags say otherwise
SAME = {"total_batch": ["-B", "4", "--total-batch", "1024"], "muon_lr": ["--muon-lr", "2e-3"],
        "kv_heads": ["--kv-heads", "1"]}  # what both get, since an exercise does not name our defaults
ROUNDS = 3
TEST_SECONDS = 60


class ExerciseTest(NamedTuple):
    """A test of an exercise."""

    sentence: str  # what must be true
    hint: str
    reason: str  # why it is red; "" if it is green


def run_tests(rung, file, folder):
    """The ExerciseTests of a rung with a file in its place, as tests/exercise_hooks.py writes them; UserError without.

    All that pytest prints goes to tests.txt in the folder.
    """
    options = ["-vv", "-p", "no:cacheprovider", "--basetemp", str(folder / "tmp"), "-o", "addopts=",
               "-o", "tmp_path_retention_policy=none", "-o", f"timeout={TEST_SECONDS}"]
    results = folder.resolve() / "tests.json"
    env = {"LADDER_TRY": f"{rung.label}={file.resolve()}", "LADDER_TRY_RESULTS": str(results),
           "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", str(TESTS), *options]
    outcome = run_job(Job("pytest", command, folder, env), math.inf, "cpu")
    (folder / "tests.txt").write_text("\n".join(outcome.lines), encoding="utf-8")
    tests = [ExerciseTest(**test) for test in read_json(results) or []]
    if not tests or outcome.status != "ok" and not any(test.reason for test in tests):
        raise UserError(f"pytest: {outcome.reason or 'it did not come to its end'}; see {folder / 'tests.txt'}, or "
                        "pip install -r requirements-dev.txt")
    return tests


def too_few_for_ranks(device):
    """Whether two ranks cannot both have one of these."""
    return device == "mps" or device == "cuda" and torch.cuda.device_count() < 2


def run_both(rung, file, flags, folder, rounds, console):
    """Run our script and a reader's in turns, and say how losses and times compare. Whether both ran to their ends."""
    for name, same in SAME.items():
        if name in defaults(rung):
            flags = [*same, *flags]
    device = check_flags([rung], flags).device
    if rung.torchrun and too_few_for_ranks(device):
        device, flags = "cpu", [*flags, "--device", "cpu"]
    if rung.about_compiling:
        flags = eager_flags([rung], flags, device, console)
    text = file.read_text(encoding="utf-8", errors="replace")
    compiles = re.search(r"""\(\s*["']--compile-mode["']""", text)
    sides = {"ours": (rung.path, flags),
             "yours": (file.resolve(), flags if compiles else split_flags(flags, "--compile-mode")[1])}
    jobs, logs = [], {"ours": [], "yours": []}
    for number in range(1, rounds + 1):
        for side in sides if number % 2 else reversed(sides):  # a machine's speed drifts
            (path, its_flags), log_dir = sides[side], folder / side / f"round_{number}"
            jobs.append(Job(path.stem, command_for(rung, its_flags, log_dir, script=[path]), log_dir))
            logs[side].append(jobs[-1].log)
    with Runner(device, folder, 3600, console, n_jobs=len(jobs)) as runner:
        runner.run(jobs)
    if runner.failed():
        return False
    for sentence in sentences(*(list(map(read_log, paths)) for paths in logs.values())):
        console.print(sentence, soft_wrap=True)
    return True


def sentences(ours, yours):
    """How the losses, and the times of a step, of the Runs of some rounds compare."""
    pairs = list(zip(ours[0].steps, ours[0].losses, yours[0].losses, strict=False))
    apart = max(abs(a - b) for _, a, b in pairs)
    losses = ", ".join(f"{formats.logged_loss(a)} and {formats.logged_loss(b)} in step {step}"
                       for step, a, b in (pairs[0], pairs[-1]))
    agreement = f"up to {formats.logged_loss(apart)} apart" if apart else "the same to the last digit"
    yield f"Loss, ours and yours: {losses}; {agreement}."
    ratios = sorted(b.median_ms / a.median_ms for a, b in zip(ours, yours, strict=True))
    logs_of_times = [[math.log(run.median_ms) for run in rounds] for rounds in (ours, yours)]
    effect = paired_effect(*logs_of_times)
    verdict, doubt = "A step of yours takes", ""
    if effect and effect.significant:
        how = "slower" if effect.mean > 0 else "faster"
        verdict = f"Yours is {how} ({formats.p_is(effect.p)}): a step takes"
    elif ratios[0] <= 1 <= ratios[-1]:
        verdict = "About the same speed: a step of yours takes"
    elif len(ratios) < FEWEST_ROUNDS:
        doubt = f"; run with --rounds {FEWEST_ROUNDS} to test whether that is chance"
    least, most = formats.ratio(ratios[0]), formats.ratio(ratios[-1])
    times, rounds = (f"{least} to {most}", f"{len(ratios)} rounds") if len(ratios) > 1 else (least, "1 round")
    yield f"{verdict} {times} times as long as ours ({rounds}){doubt}."
