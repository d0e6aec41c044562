"""Small faults in the tool that no other test notices, each with the test that does: on logs with known numbers."""
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from test_ladder_tool import MEDIAN, write_log

from ladder.measure import check, rates
from ladder.measure.runner import Job, plan, run_job
from ladder.count.memory import recommend, step_bytes
from ladder.scripts.stages import BY_LABEL
from ladder.judge.compare import compare
from ladder.show.logs import read_log
from ladder.show.report import build_report


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


@pytest.mark.parametrize("steps, warm_up", [(1, 0), (2, 1), (3, 1), (6, 3), (10, 5), (11, 5)])
def test_the_warm_up_of_a_log_without_a_median_line(steps, warm_up, tmp_path):
    """The first half, as the scripts count."""
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
        return {"ms": (first, 70, ms), "losses": (9, 8, last), "tail": MEDIAN.replace("1.00 GB", f"{GB} GB")}

    row = rounds(tmp_path, one(3000, 50, 4.0, 3.0), one(9000, 40, 6.0, 2.0), one(5000, 80, 4.1, 2.5))
    assert (row.ms_low, row.ms, row.ms_high, row.rounds) == (40, 50, 80, 3)
    assert (row.last_loss, row.first_step_s, row.peak_memory_gb) == (4.1, 5.0, 2.5)


def test_the_common_loss_is_one_that_all_rungs_reach(tmp_path):
    """The highest of their lowest: seconds to a loss that some never reach would not compare."""
    write_log(tmp_path / "baseline.log", losses=(9, 5, 6))
    write_log(tmp_path / "speedup_01_weight_tying.log", losses=(9, 4, 3))
    report = build_report(tmp_path)
    assert report.common_loss == 5
    assert [row.seconds_to_common_loss for row in report.rows] == [0.15, 0.15]


def test_rows_are_in_the_order_of_the_ladder(tmp_path):
    """And not of the files' names; those of foreign scripts come last."""
    names = ["baseline", "speedup_02_tf32", "speedup_10_fused_adamw", "ddp_run", "rung_12_prefetch", "fsdp_run",
             "peer_transformers", "a_script"]
    for name in names:
        write_log(tmp_path / f"{name}.log")
    assert [row.name for row in build_report(tmp_path).rows] == names


def sentences(tmp_path, *logs):
    """What compare says of logs of baseline.py, each the arguments of write_log."""
    header = "# script: baseline.py\n"
    paths = [write_log(tmp_path / f"{n}.log", header=header, tail=MEDIAN, **more) for n, more in enumerate(logs)]
    return " ".join(compare(*map(read_log, paths)).sentences)


def test_the_same_script_twice_must_repeat_its_losses(tmp_path):
    """No change lies between the two that could excuse the fourth decimal."""
    assert "NOT the same losses" in sentences(tmp_path, {"losses": (9, 8, 7)}, {"losses": (9, 8, 7.0001)})
    assert "The same losses" in sentences(tmp_path, {"losses": (9, 8, 7)}, {"losses": (9, 8, 7)})


def test_slower_is_as_certain_as_faster(tmp_path):
    slow, fast = {"ms": [100, 101, 102] * 5}, {"ms": [50, 51, 52] * 5}
    assert "0.50 times" in (text := sentences(tmp_path, fast, slow)) and "larger than the noise" in text


def test_from_rung_17_on_the_logits_of_a_chunk_count():
    """Twice the batch keeps twice the activations, 36 bytes a token, layer and width, and no more logits."""
    for label, logits in (("16", 10 * 4096 * 50257), ("17", 0), ("24", 0), ("fsdp", 0)):
        more = step_bytes("gpt2", 8, 1024, label) - step_bytes("gpt2", 4, 1024, label)
        assert more == 4096 * 36 * 12 * 768 + logits, label


def test_on_a_cpu_one_sequence_is_recommended():
    """A larger batch only makes a longer step there."""
    assert recommend(200e9, accelerator=False) == ("gpt2", 1, 1024)
    assert recommend(200e9, accelerator=True)[1] == 64


@pytest.mark.parametrize("free, mark", [(1.9e9, check.BAD), (2.1e9, check.GOOD)])
def test_check_warns_of_a_full_disk(free, mark, monkeypatch):
    monkeypatch.setattr(check.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = {one.what: one for one in check.check_files()}["free disk"]
    assert found.mark == mark and ("make room" in found.detail) == (mark == check.BAD)


@pytest.mark.parametrize("count, mark", [(0, check.NEUTRAL), (1, check.NEUTRAL), (2, check.GOOD)])
def test_one_gpu_is_not_several(count, mark, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    found = next(one for one in check.check_ranks("cuda") if one.what.startswith("GPUs"))
    assert found.mark == mark and (f"{count} GPU" in found.detail)


def test_what_the_system_kills_ran_out_of_memory(tmp_path):
    """Linux ends a process that takes too much without a word; on a GPU machine nobody else would."""
    kill = "import os, signal; os.kill(os.getpid(), signal.{})"
    for name, status in (("SIGKILL", "out of memory"), ("SIGTERM", "failed")):
        job = Job("killed", [sys.executable, "-c", kill.format(name)], tmp_path)
        assert run_job(job, 60, "cuda").status == status


def test_a_product_has_two_operations_for_each_multiplication(monkeypatch):
    """(8, 16) @ (16, 32) in half a second, by a clock that goes on by that at each reading."""
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=map(lambda n: n / 2, itertools.count()).__next__))
    assert rates.best_rate("cpu", torch.float32, (8, 16, 32)) == 2 * 8 * 16 * 32 / 0.5
