"""python -m ladder survey: what it does on which device, and that it ends in time."""
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import run_command

from ladder.__main__ import parse_args
from ladder.measure import survey
from ladder.measure.runner import check_flags
from ladder.scripts.stages import BY_LABEL
from ladder.show.chance import FEWEST_ROUNDS
from ladder.show.report import build_report


@pytest.mark.slow
def test_a_survey_ends_in_time_and_leaves_folders_to_commit(tokens, tmp_path):
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "-B", 1, "-T", 32, "--steps", 3]
    command = [sys.executable, "-m", "ladder", "survey"]
    started = time.monotonic()
    done = run_command(*command, "--minutes", 1.5, "--out", tmp_path / "short", *words)
    assert time.monotonic() - started < 90 + 30
    assert done.returncode == 0, done.stdout + done.stderr
    [main] = (tmp_path / "short").glob("*_B1_T32")
    report = build_report(main)
    assert "baseline" in report.runs and all(run.complete for runs in report.runs.values() for run in runs)
    assert {"name", "rates", "torch"} <= report.machine.keys()
    assert "torch" in (tmp_path / "short" / "survey.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("device, verbs", [
    ("cpu", ["run --repeat", "profile --repeat", "run --rungs"]),
    ("mps", ["run --repeat", "run --max-batch", "run --rungs"]),  # torch.profiler, CUDA graphs: not there
    ("cuda", ["run --repeat", "profile --repeat", "run --max-batch", "run --rungs", "run --rungs"]),
])
def test_a_survey_does_what_the_device_can(device, verbs):
    """In words that the tool's own parser takes."""
    settings = SimpleNamespace(device=device, B=1, T=32)
    asked = [words for _, words in survey.commands(settings, ["-B", "1", "--steps", "4"], 60)]
    assert parse_args(asked[0]).repeat == FEWEST_ROUNDS  # from which gains are named
    assert [" ".join(words[:2]) for words in asked] == verbs
    for words in asked:
        args = parse_args(words)
        assert args.flags[:2] == ["-B", "1"]
        assert ("--steps" in args.flags) == (args.verb == "run" and not args.max_batch)  # the others refuse it


@pytest.mark.parametrize("flags, minutes, chosen", [
    ([], 10, ("gpt2", 1, 256, 5)), ([], 60, ("gpt2", 1, 1024, 5)),
    (["--model", "tiny", "--batch-size", "3", "--steps", "7"], 10, ("tiny", 3, 256, 7)),
])
def test_a_survey_chooses_what_the_flags_leave_open(monkeypatch, tokens, flags, minutes, chosen):
    monkeypatch.setattr(survey, "run_module", lambda *_: "20_000_000_000")
    flags = survey.with_defaults([*flags, "--device", "cpu", "--data", str(tokens)], minutes)
    settings = check_flags([BY_LABEL["10"]], flags)
    assert (settings.model, settings.B, settings.T, settings.steps) == chosen
