"""Reading logs: whole, killed, damaged, or of two runs at once."""
import re

import pytest
from log_files import MEDIAN, write_log

from ladder.count.flops import flops_per_token, mfu
from ladder.records.logs import read_log
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, PEER
from ladder.show.documents import as_json


@pytest.mark.parametrize("header, tail, complete", [
    ("some chatter\n", MEDIAN, True),
    ("# batch: B=4 T=1024 | steps: 3\n", MEDIAN, True),
    ("# batch: B=4 T=1024 | steps: 8\n", MEDIAN, False),  # a signal: `preemption` prints its median then, too
    ("# batch: B=4 T=1024 | steps: 3\n", "\n", False),
    ("# batch: B=4 T=1024 | steps: 3\n", "\nstep : 4 | loss: 5 | dt: 1 ms", False),  # killed while it wrote this line
])
def test_a_run_is_complete_with_its_median_line_and_the_last_step_that_it_promises(header, tail, complete, tmp_path):
    run = read_log(write_log(tmp_path / "a.log", header=header, tail=tail))
    assert run.steps == [1, 2, 3] and run.complete == complete


def test_the_prefix_of_torchrun_s_tee_is_not_the_log_s(tmp_path):
    log = write_log(tmp_path / "a.log", ms=[100, 50, 50], tail=MEDIAN)
    log.write_text("".join(f"[default0]:{line}\n" for line in log.read_text().splitlines()))
    run = read_log(log)
    assert (run.steps, run.complete) == ([1, 2, 3], True)


@pytest.mark.parametrize("steps, warm_up", [(1, 0), (2, 1), (3, 1), (6, 3), (11, 5)])
def test_the_warm_up_is_the_first_half_where_no_median_line_says_otherwise(steps, warm_up, tmp_path):
    run = read_log(write_log(tmp_path / "a.log", ms=[900] * warm_up + [50] * (steps - warm_up)))
    assert (run.warm_up, run.median_ms) == (warm_up, 50)
    tail = MEDIAN.replace("steps 3-", f"steps {steps}-")
    assert read_log(write_log(tmp_path / "a.log", ms=[50] * steps, tail=tail)).warm_up == steps - 1


def test_validations_are_no_steps_and_take_no_time(tmp_path):
    """Three steps of 100 ms, a validation after the second and the third."""
    log = write_log(tmp_path / "3_distributed_validation.log", ms=[100] * 3, losses=[9.0, 8.0, 7.0])
    log.write_text(re.sub("(step : ([23]) .*)", r"\1\nval : step \2 | loss: 7.\2 | time: 60.00 s", log.read_text()))
    run = read_log(log)
    assert (run.losses, run.val_steps, run.val_losses) == ([9.0, 8.0, 7.0], [2, 3], [7.2, 7.3])
    assert build_report(tmp_path).rows[0].last_val_loss == 7.3 and run.seconds[3] == pytest.approx(0.3)


@pytest.mark.parametrize("tokens, vocab_size", [
    ("gpt2", 50257), ("gpt2-bytes", 50257), ("bytes", 257), ("bpe-4096-0a1b2c", 4096), ("my-model", None)])
def test_mfu_counts_the_vocabulary_of_the_data(tokens, vocab_size, tmp_path):
    run = read_log(write_log(tmp_path / "baseline.log", header="# model: 4x4x128\n# batch: B=4 T=64 | steps: 3\n"
                             f"# data: my text ({tokens} tokens) | loaded 9 tokens\n"))
    assert run.vocab_size == vocab_size
    share = mfu(run, {"float32": 1e12}, 1000)
    run.name = "grouped_query_attention"
    assert mfu(run, {"float32": 1e12}, 1000) is None  # its flags change the matrices
    assert share == (vocab_size and flops_per_token("4x4x128", 64, vocab_size=vocab_size) * 1000 / 1e12)


def test_a_rounds_logs_in_one_file_are_those_of_a_folder(tmp_path):
    """Joined as records are, by `cat round_1/*.log > round_1.log`; each is still found by its path."""
    folder, record = tmp_path / "folder" / "machine", tmp_path / "record" / "machine"
    record.mkdir(parents=True)
    for number in range(1, 6):
        for name, ms in ((BY_LABEL["0"].name, 100), (BY_LABEL["1"].name, 90), (PEER, 80)):
            write_log(folder / f"round_{number}" / f"{name}.log", ms=[9000, ms + number**2 % 7, ms + number],
                      header=f"# script: {name}.py\n# batch: B=4 T=1024 | steps: 3\n", tail=MEDIAN)
        joined = "".join(log.read_text() for log in sorted((folder / f"round_{number}").glob("*.log")))
        (record / f"round_{number}.log").write_text(joined)
    reports = [build_report(path) for path in (folder, record)]
    assert as_json(reports[:1]) == as_json(reports[1:]) and len(reports[1].rows) == 3
    assert all(row.rounds == 5 for row in reports[1].rows) and reports[1].rows[1].p_before
    assert read_log(record / "round_2.log" / f"{PEER}.log").ms == read_log(folder / "round_2" / f"{PEER}.log").ms


def test_mfu_of_ranks_counts_their_gpus(tmp_path):
    header = "# model: gpt2\n# device: {}\n# ranks: 2 | x: y\n# batch: B=4 T=1024 | steps: 3\n"
    gpu, cpu = (read_log(write_log(tmp_path / "a.log", header=header.format(device)))
                for device in ("NVIDIA H200", "AMD EPYC (1 threads)"))
    assert mfu(cpu, {"bfloat16": 1e15}, 1000) == pytest.approx(2 * mfu(gpu, {"bfloat16": 1e15}, 1000))


DAMAGED = {
    "binary.log": (bytes(range(256)), "no step line"),
    "empty.log": (b"", "no step line"),
    "two_runs.log": (b"".join(b"step : %d | loss: 9 | dt: 1 ms\n" % step for step in (1, 2, 1, 3, 2)), "two runs"),
    "one_twice.log": (b"".join(b"step : %d | loss: 9 | dt: 1 ms\n" % step for step in (1, 2, 2)), "two runs"),
}


def test_damaged_files_are_named_and_the_others_reported(tmp_path, call):
    write_log(tmp_path / "baseline.log", tail=MEDIAN)
    for name, (content, _) in DAMAGED.items():
        (tmp_path / name).write_bytes(content)
    code, out, _ = call("report", tmp_path)
    named = out.split("! skipped: ")[1:]
    assert code == 0 and len(named) == len(DAMAGED) - 1  # one line for those without a step
    for name, (_, reason) in DAMAGED.items():
        assert sum(name in line and reason in line for line in named) == 1, (name, named)


@pytest.mark.parametrize("device, allocator", [("NVIDIA T4", "torch"), ("AMD EPYC (2 threads)", None)])
def test_a_gpus_allocator_is_torchs_unless_the_log_says_otherwise(device, allocator, tmp_path):
    header = f"# device: {device}\n"
    assert read_log(write_log(tmp_path / "a.log", header=header)).allocator == allocator
    assert read_log(write_log(tmp_path / "b.log", header=header + "# allocator: x\n")).allocator == "x"


def test_a_line_that_a_kill_cut_short_says_nothing(tmp_path):
    """Its loss would be 7, not 7.25."""
    assert read_log(write_log(tmp_path / "a.log", tail="\nval : step 3 | loss: 7")).val_losses == []


RESUMED = ("# batch: B=2 T=1024 | steps: 4 | seed: 1\n# resumed after step 1 of 4\n"
           + "".join(f"step : {n} | loss: {n}.5 | dt: 60 ms\n" for n in (2, 3, 4)))


@pytest.mark.parametrize("tail, complete", [("", False), (MEDIAN.lstrip(), True)])
def test_of_the_steps_that_a_resumed_run_repeated_the_last_count(tail, complete, tmp_path):
    """And its header does, and the validations, and only its own median."""
    val = "val : step 1 | loss: 6 | time: 1 s\nval : step 3 | loss: 5 | time: 1 s"
    log = write_log(tmp_path / "a.log", losses=[9.5, 8.0, 7.0], tail=f"\n{val}{MEDIAN}{RESUMED}{tail}")
    run = read_log(log)
    assert (run.steps, run.losses, run.ms) == ([1, 2, 3, 4], [9.5, 2.5, 3.5, 4.5], [100, 60, 60, 60])
    assert (run.val_steps, run.val_losses, run.B, run.complete) == ([1], [6], 2, complete)
