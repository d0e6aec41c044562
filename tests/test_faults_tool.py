"""Small faults in the tool that no other test notices, each with the test that does: on logs with known numbers."""

import pytest
from test_ladder_tool import MEDIAN, write_log
from test_race import ADAMW, flag_of, run_race

from ladder.show.logs import read_log
from ladder.show.report import build_report
from ladder.measure.runner import plan
from ladder.scripts.stages import BY_LABEL


def test_each_round_of_a_race_has_a_seed_of_its_own(tmp_path):
    jobs = run_race(tmp_path, {ADAMW.name: 1.2e-3}, [ADAMW], seeds=3)
    assert [flag_of(job, "--seed") for job in jobs[-3:]] == ["1337", "1338", "1339"]


def test_rounds_are_interleaved(tmp_path):
    """Rung by rung, drift in machine speed would look like a difference between rungs."""
    jobs = plan([BY_LABEL["0"], BY_LABEL["1"]], [], tmp_path, repeat=2, peers=True)
    assert [(job.log_dir.name, job.name) for job in jobs] == [
        (number, name) for number in ("round_1", "round_2")
        for name in ("baseline", "speedup_01_weight_tying", "peer_transformers")]


def rounds(folder, *logs, name="baseline"):
    """The row of rung `name` in the report on these rounds: each the arguments of write_log."""
    for number, arguments in enumerate(logs, 1):
        (folder / f"round_{number}").mkdir()
        write_log(folder / f"round_{number}" / f"{name}.log", **arguments)
    return build_report(folder).rows[0]


def test_a_round_that_was_cut_short_shows(tmp_path):
    """A row is as complete as its least complete round, and its last step is one that all rounds have."""
    row = rounds(tmp_path, {"tail": MEDIAN}, {"ms": (100, 50)})
    assert (row.last_step, row.complete, row.rounds) == (2, False, 2)


@pytest.mark.parametrize("steps, warm_up", [(1, 0), (2, 1), (3, 2), (6, 2), (10, 2), (11, 5)])
def test_the_warm_up_of_a_log_without_a_median_line(steps, warm_up, tmp_path):
    """As the scripts count on a CPU."""
    run = read_log(write_log(tmp_path / "foreign.log", ms=[900] * warm_up + [50] * (steps - warm_up), header=""))
    assert (run.warm_up, run.median_ms) == (warm_up, 50)


def test_the_numbers_of_one_round(tmp_path):
    """The middle half of the counted steps, the last loss, the first step's time."""
    ms, losses = [4000, 900, 10, 20, 30, 40, 50], [9, 8, 7, 6, 5, 4, 4.5]
    row = rounds(tmp_path, {"ms": ms, "losses": losses, "tail": MEDIAN})
    assert (row.ms_low, row.ms, row.ms_high) == (20, 30, 40)
    assert (row.last_loss, row.first_step_s, row.rounds) == (4.5, 4.0, 1)


def test_the_numbers_of_three_rounds(tmp_path):
    """Medians over the rounds, the spread their lowest and highest."""
    def one(first, ms, last, GB):
        return {"ms": (first, 70, ms), "losses": (9, 8, last), "tail": MEDIAN.replace("peak memory: 1.00", f"peak memory: {GB}")}

    row = rounds(tmp_path, one(3000, 50, 4.0, 3.0), one(9000, 40, 6.0, 2.0), one(5000, 80, 4.1, 2.5))
    assert (row.ms_low, row.ms, row.ms_high, row.rounds) == (40, 50, 80, 3)
    assert (row.last_loss, row.first_step_s, row.peak_memory_gb) == (4.1, 5.0, 2.5)
