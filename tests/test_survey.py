"""python -m ladder survey: what it does on which device, and that it ends in time."""
import io
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import run_command
from rich.console import Console

from ladder.count.memory import recommend
from ladder.measure import survey
from ladder.measure.runner import check_flags
from ladder.scripts.stages import BY_LABEL
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
    assert "torch" in (tmp_path / "short" / "check.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("device, does", [
    ("cpu", ["12 runs", "profile", "24 runs", "beyond"]),
    ("mps", ["12 runs", "24 runs", "largest_batches", "beyond"]),  # torch.profiler, CUDA graphs: not there
    ("cuda", ["12 runs", "profile", "24 runs", "largest_batches", "beyond", "cuda_graphs"]),
])
def test_a_survey_does_what_the_device_can(device, does, monkeypatch, tmp_path):
    done = []
    monkeypatch.setattr(survey, "check_flags", lambda *_: SimpleNamespace(device=device, B=1, T=32, steps=4))
    monkeypatch.setattr(survey, "with_defaults", lambda flags, minutes: flags)
    monkeypatch.setattr(survey, "name_machine", lambda out, *_: (out / "machine").mkdir() or "name")
    for name in ("profile", "largest_batches"):
        monkeypatch.setattr(survey.Survey, name, lambda self, name=name: done.append(name))
    monkeypatch.setattr(survey.Survey, "run_apart", lambda self, stages, what, *_: done.append(what))
    monkeypatch.setattr(survey.Survey, "run", lambda self, jobs, folder: done.append(f"{len(jobs)} runs"))
    survey.survey(1, tmp_path / "out", [], Console(file=io.StringIO()))
    assert done == does


def test_a_survey_gives_the_profile_and_the_search_for_a_batch_its_deadline(monkeypatch, tmp_path):
    got = []
    monkeypatch.setattr(survey, "largest_batch", lambda *arguments: got.append(arguments[-1]) or (1, 1.0, ""))
    monkeypatch.setattr(survey, "profile_ladder", lambda *arguments: got.append(arguments[-1]))
    deadline = time.monotonic() + 60
    this = survey.Survey([], tmp_path, SimpleNamespace(B=1, T=32), deadline, Console(file=io.StringIO()))
    this.profile()
    this.largest_batches()
    assert got == [deadline] * 5


@pytest.mark.parametrize("flags, minutes, chosen", [
    ([], 10, ("gpt2", 1, 256, 5)), ([], 60, ("gpt2", 1, 1024, 5)),
    (["--model", "tiny", "--batch-size", "3", "--steps", "7"], 10, ("tiny", 3, 256, 7)),
])
def test_a_survey_chooses_what_the_flags_leave_open(monkeypatch, tokens, flags, minutes, chosen):
    monkeypatch.setattr(survey, "run_module", lambda *_: "20_000_000_000")
    flags = survey.with_defaults([*flags, "--device", "cpu", "--data", str(tokens)], minutes)
    settings = check_flags([BY_LABEL["10"]], flags)
    assert (settings.model, settings.B, settings.T, settings.steps) == chosen


@pytest.mark.parametrize("GB", [40, 2000])
def test_a_survey_takes_the_recommended_batch_on_a_gpu(GB, monkeypatch):
    monkeypatch.setattr(survey, "run_module", lambda *_: str(GB * 10**9))
    monkeypatch.setattr(survey, "check_flags", lambda *_: SimpleNamespace(device="cuda"))
    flags = survey.with_defaults([], 10)
    assert flags[flags.index("-B") + 1] == str(recommend(1e9 * GB, accelerator=True)[1])
