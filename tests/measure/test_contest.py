"""A contest: which seeds and rates its jobs have, in which order; of known losses, and for real."""
import json
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from fake_race import ADAMW, BEST, MUON, TRAPEZOID, flag_of, part_of, rates_of, run_race, searched
from rich.console import Console
from run_tool import flags, is_one_error, run_jobs_here

from ladder.errors import UserError
from ladder.measure import contest, processes, runner
from ladder.measure.contest import Contest
from ladder.measure.learning_rates import SEED, Search
from ladder.measure.processes import Job, Outcome
from ladder.records.recipes import read_logs
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    """(the folder of a race, its jobs)."""
    folder = tmp_path_factory.mktemp("race")
    return folder, run_race(folder, [ADAMW, MUON, TRAPEZOID], tries=24)


def test_each_tested_seed_has_a_seed_of_the_search_and_the_rates_that_it_found(race):
    """A slope k in the loss moves the lowest point of (x - b)^2 by -k / 2 octaves: 0.1 down and up."""
    folder, jobs = race
    assert {(flag_of(job, "--seed"), flag_of(job, "--val-every")) for job in part_of(jobs, "sweep")} == {
        ("1337", "40"), ("1336", "40")}
    rounds, names = part_of(jobs, "round"), [entry.name for entry in (ADAMW, MUON, TRAPEZOID)]
    assert [job.name for job in rounds] == [*names, *names[::-1]]
    assert [int(flag_of(job, "--seed")) for job in rounds] == [1338] * 3 + [1339] * 3
    for job in rounds:
        moved = 2 ** (-0.05 if flag_of(job, "--seed") == "1338" else 0.05)
        first, *others = map(float, rates_of(job))
        assert first == pytest.approx(BEST[job.name][0] * moved, rel=1e-3) and tuple(others) == BEST[job.name][1:]
    record, _ = read_logs(folder)
    assert record.own_searches and {*record.tested.seed} == {SEED, SEED + 1}
    assert record.tried(MUON.name).set_index(["max_lr", "muon_lr"]).val_loss[1.2e-3, 4e-3] == pytest.approx(4.0)
    rates = build_report(folder).race.race_table.rates
    assert [rates[name] for name in names] == [pytest.approx(BEST[name], rel=1e-3) for name in names]


def test_neighbors_are_timed_next_to_each_other_in_the_order_abba(race):
    folder, jobs = race[0], part_of(race[1], "timing")
    assert {(flag_of(job, "--steps"), flag_of(job, "--val-every"), flag_of(job, "--seed")) for job in jobs} == {
        ("30", "0", "1338")}
    names = [job.name for job in jobs]
    abba = [name for a, b in pairwise([ADAMW.name, MUON.name, TRAPEZOID.name]) for name in (a, b, b, a)]
    assert names == 3 * abba
    assert [len(list(folder.iterdir())) for folder in folder.glob("timing/*")] == [2] * 12


def test_each_rung_gets_as_many_tries_as_the_longest_search_took(race, tmp_path):
    """Also one with a single rate; and none more than it may have."""
    assert {len({*searched(race[1], entry)}) for entry in (ADAMW, MUON, TRAPEZOID)} == {18}
    jobs = run_race(tmp_path, [ADAMW, MUON, TRAPEZOID], tries=6)
    assert [len({*searched(jobs, entry)}) for entry in (ADAMW, MUON, TRAPEZOID)] == [6, 6, 6]


def test_without_tries_the_rates_are_those_of_the_flags(tmp_path):
    jobs = run_race(tmp_path, [ADAMW, MUON], tries=0)
    assert part_of(jobs, "sweep") == [] and {rates_of(job) for job in jobs} == {("0.0006",), ("0.0006", "0.002")}


def test_a_search_may_be_shorter_than_the_rounds(tmp_path):
    jobs = run_race(tmp_path, [ADAMW], search_steps=20)
    for part, expected in (("sweep", ("20", "20")), ("round", ("40", None))):
        assert {(flag_of(job, "--steps"), flag_of(job, "--val-every")) for job in part_of(jobs, part)} == {expected}


def test_a_run_that_diverges_is_never_the_best_and_a_resumed_race_keeps_its_rates(tmp_path):
    """Though the run that had diverged would now be the best: rounds of both rates would be one rung's."""
    lost = {ADAMW.name: lambda end, job: "nan" if float(flag_of(job, "--max-lr")) > 7e-4 else end}
    jobs = run_race(tmp_path, [ADAMW], tries=24, **lost)
    [(kept,)] = {rates_of(job) for job in part_of(jobs, "round")}
    assert 5e-4 < float(kept) < 7e-4
    jobs = run_race(tmp_path, [ADAMW], tries=24)
    assert part_of(jobs, "sweep") == [] and {rates_of(job) for job in part_of(jobs, "round")} == {(kept,)}
    with pytest.raises(UserError, match="gradient_checkpointing: no run .*/sweep/"):
        run_race(tmp_path / "all", [ADAMW], **{ADAMW.name: lambda end, job: "inf"})


def test_a_try_that_diverges_is_no_failure_of_the_comparison(tmp_path, monkeypatch):
    def run_jobs(jobs, seconds, device, at_once, ended, show):
        for job in jobs:
            ended(job, Outcome(job.name, "failed", "error: the loss is nan"))

    monkeypatch.setattr(runner, "run_jobs", run_jobs)
    held = Contest([MUON], ["--model", "tiny"], tmp_path, 1, runner.Runner("cpu", tmp_path, 60, Console(quiet=True)),
                   searches={MUON.name: Search((6e-4, 2e-3))})
    with held.runner as its_runner:
        held.try_rates({MUON: [(0.0, 0.0)]})
        assert not its_runner.failed() and len(its_runner.outcomes) == 1
        held.run_shared([held.job(MUON, tmp_path / "round_1", (6e-4, 2e-3), SEED)])
    assert len(its_runner.failed()) == 1


def test_runs_side_by_side_share_the_cores_and_the_memory(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(contest, "free_memory", lambda device: 10e9)
    fake = SimpleNamespace(run=lambda jobs, at_once: ran.extend(jobs))
    Contest([], [], tmp_path, 1, fake, at_once=4).run_shared([Job("a", [], tmp_path)])
    assert ran[0].env["OMP_NUM_THREADS"] == "2" and ran[0].memory == processes.MEMORY_SHARE * 10e9 / 4


def test_a_file_is_no_rung_though_it_has_its_name(mine, tmp_path):
    copy = contest.script_of(str(mine(name="7_zero_init.py")))
    rung = BY_LABEL["zero_init"]
    assert copy.label == "" and contest.script_of(str(rung.path)) is rung is contest.script_of("zero_init")


def test_a_changed_file_never_replaces_the_copy_that_ran(mine, tmp_path):
    file = mine()
    rung, before = contest.script_of(str(file)), file.read_bytes()
    copy = contest.copied(rung, tmp_path / "scripts")
    assert contest.copied(rung, tmp_path / "scripts") == copy
    file.write_bytes(before + b"# changed\n")
    with pytest.raises(UserError, match="mine.py: differs from .*mine.py, its copy that ran"):
        contest.copied(rung, tmp_path / "scripts")
    assert copy.path.read_bytes() == before


def test_the_data_are_looked_for_where_the_scripts_read_them(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "bytes").mkdir(parents=True)
    (tmp_path / "data" / "bytes" / "meta.json").write_text("{}")
    answer = call("compare", "zero_init", "muon", "--logs", tmp_path / "logs", "--device", "cpu")
    assert is_one_error(answer, "--data data/bytes: no complete token files")


def test_the_newest_comparison_of_the_same_arguments_is_resumed(monkeypatch, tmp_path):
    monkeypatch.setattr(contest, "FOLDERS", tmp_path)
    for day, seeds in (("01", 5), ("02", 5), ("03", 3)):
        (tmp_path / day).mkdir()
        (tmp_path / day / "contest.json").write_text(json.dumps({"scripts": [{"name": "a"}], "seeds": seeds}))
    assert contest.newest_of({"seeds": 5}).name == "02"
    with pytest.raises(UserError, match="no comparison of these arguments"):
        contest.newest_of({"seeds": 4})


@pytest.mark.slow
def test_a_comparison_for_real(mine, byte_tokens, tmp_path, call, monkeypatch):
    """The same command resumes and repeats nothing; another one, or a changed file, is refused; the folder is shown."""
    monkeypatch.setattr(contest, "Contest", partial(Contest, timings=1))
    logs, file = tmp_path / "logs", mine("import argparse", "import helper\nimport argparse")
    (tmp_path / "helper.py").write_text("")  # beside the file, whose copy runs
    words = ["compare", "zero_init", file, "--logs", logs, "--seeds", "3", "--tries", "2", *flags(byte_tokens),
             "--val-every", "2", "--val-sequences", "2"]
    with monkeypatch.context() as here:  # what is resumed runs in a process of its own
        here.setattr(runner, "run_jobs", run_jobs_here)
        code, out, error = call(*words)
    assert code == 0, error
    assert "mine.py ends with the same losses as zero_init, to the last digit, with every seed." in out
    n_search = 2 * 3  # two tries, a seed of the search for each that is tested
    assert (logs / "compare.png").exists() and len(list(logs.rglob("*.log"))) == 2 * (n_search + 3 + 2)
    assert len((logs / "differences.csv").read_text().splitlines()) == 1 + 3
    again = call("compare", logs)[1]
    assert "the same losses as zero_init" in again and "Doubtful: 4 steps are too few" in again
    gone = logs / "round_2" / "mine.log"
    gone.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert is_one_error(call(*words), "is not empty") and not gone.exists()
    assert call(*words, "--resume")[0] == 0 and gone.exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert is_one_error(call(*words, "--resume", "--max-lr", "0.1"), "with other flags")
    file.write_text(file.read_text() + "# changed\n")
    assert is_one_error(call(*words, "--resume"), "mine.py: differs from")
    about = json.loads((logs / "contest.json").read_text())
    assert about["seeds"] == 3 and about["scripts"][1]["title"] == str(file) and "commit" in about
