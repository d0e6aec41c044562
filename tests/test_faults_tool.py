"""Small faults in the tool that no other test notices, each with the test that does: on logs with known numbers."""
import itertools
import sys
from types import SimpleNamespace

import pytest
import torch
from test_race import ADAMW, BEST, flag_of, part_of, run_race

from ladder.measure import check, rates
from ladder.measure.runner import Job, plan, run_job
from ladder.count.memory import recommend, step_bytes
from ladder.scripts.stages import BY_LABEL
from ladder.show.report import build_report
from ladder.judge.standings import race_curves, standings


def test_each_round_of_a_race_has_a_seed_of_its_own(tmp_path):
    jobs = run_race(tmp_path, BEST, [ADAMW], seeds=3)
    assert [flag_of(job, "--seed") for job in part_of(jobs, "round")] == ["1337", "1338", "1339"]


def test_rounds_are_interleaved(tmp_path):
    """Rung by rung, drift in machine speed would look like a difference between rungs."""
    jobs = plan([BY_LABEL["0"], BY_LABEL["1"]], [], tmp_path, repeat=2, peers=True)
    assert [(job.log_dir.name, job.name) for job in jobs] == [
        (number, name) for number in ("round_1", "round_2")
        for name in ("baseline", "speedup_01_weight_tying", "peer_transformers")]


def test_the_target_of_a_race_is_not_rounded_up_twice(tmp_path):
    """100 * 1.1 is a little more than 110 in floating point."""
    run_race(tmp_path, BEST, [ADAMW], **{ADAMW.name: lambda end, job: (9, 8, 7, 1.1)})
    report = build_report(tmp_path)
    assert standings(report)[0] == 1.1


def test_the_curve_of_a_race_is_the_median_of_its_seeds(tmp_path):
    ends = {"round_1": 6.1, "round_2": 5.0, "round_3": 5.9}
    run_race(tmp_path, BEST, [ADAMW], 3,
             **{ADAMW.name: lambda end, job: (9, 8, 7, ends.get(job.log_dir.name, end))})
    [(_, steps, _, losses)] = race_curves(build_report(tmp_path))
    assert (steps, losses) == ([10, 20, 30, 40], [9, 8, 7, 5.9])


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
