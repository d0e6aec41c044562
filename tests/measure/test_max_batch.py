"""The batch that fits: by the memory model, and by trying."""
import re
from types import SimpleNamespace

import pytest
from log_files import MEDIAN, write_log
from rich.console import Console

from ladder.count.memory import step_bytes
from ladder.errors import UserError
from ladder.measure import max_batch, processes, runner
from ladder.measure.script_flags import split_flags
from ladder.rungs.list import LADDER as RUNGS_0_TO_10


@pytest.mark.parametrize("gigabytes, B, left_out", [
    (80, 16, ""), (24, 10, ""), (8, 2, ""), (6, 1, ""), (5, 1, "left out: rung 0:"), (2, None, "")])
def test_without_a_batch_size_a_gpu_gets_one_that_fits(gigabytes, B, left_out, monkeypatch, capsys):
    monkeypatch.setattr(max_batch, "run_module", lambda *_: gigabytes * 1e9)
    settings = SimpleNamespace(device="cuda", model="gpt2", T=1024)
    if B is None:
        with pytest.raises(UserError, match="no rung fits"):
            max_batch.fit_batch(RUNGS_0_TO_10, [], settings, Console())
        return
    fit, batch = max_batch.fit_batch(RUNGS_0_TO_10, [], settings, Console(width=200))
    said = capsys.readouterr().out
    assert batch == ["-B", str(B)] and f"-B {B}:" in said
    assert left_out in said if left_out else "left out" not in said
    for rung in fit:
        assert step_bytes("gpt2", B, 1024, rung.label) <= processes.MEMORY_SHARE * gigabytes * 1e9
    assert max_batch.fit_batch(RUNGS_0_TO_10, ["-B", "3"], settings, Console()) == (RUNGS_0_TO_10, [])


@pytest.mark.parametrize("label, limit", [
    ("0", 33), ("7", 70), ("ddp", 70), ("checkpoints", 50), ("fsdp", 70), ("7", 1), ("7", 0)])
def test_the_search_for_the_largest_batch_starts_where_the_model_says(label, limit, tokens, monkeypatch, call):
    """Few cold compiles when the memory model is about right, an answer in any case, and as many ranks as asked for."""
    commands = []

    def run_job(job, *_):
        commands.append(job.command)
        B = int(split_flags(job.command, "-B")[0][0])
        write_log(job.log, header=f"# batch: B={B} T=1024 | steps: 3\n", tail=MEDIAN)
        return runner.Outcome(job.name, "ok" if B <= limit else "out of memory")

    monkeypatch.setattr(max_batch, "run_job", run_job)
    ranks = 3 if label in ("ddp", "fsdp") else 1
    free = ranks * step_bytes("gpt2", 64 if label != "0" else 32, 1024, label) / processes.MEMORY_SHARE
    monkeypatch.setattr(max_batch, "run_module", lambda *_: free)
    words = ["--rungs", label, "--processes", 3, "--device", "cpu", "--data", tokens]
    code, output, _ = call("run", "--max-batch", *words)
    best = int(re.search(r"─ .*? (\d+) ", output)[1])
    assert best <= limit <= best + max(1, best // 8) and code == (not best) and "out of memory" in output
    assert "to within an eighth" in output
    assert len(commands) <= (5 if limit > 9 else 8)
    for command in commands:
        assert ("--nproc_per_node=3" in command) == (ranks == 3)
        values, _ = split_flags(command, "-B", "--total-batch")
        if label in ("checkpoints", "fsdp"):
            assert int(values[1]) == int(values[0]) * 1024 * ranks  # one micro-step
        else:
            assert len(values) == 1
