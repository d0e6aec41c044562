"""Jobs of a folder: their order, what compiles first, failures, Ctrl-C, resuming."""
import io
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from load_script import ROOT, rung
from log_files import MEDIAN, write_log
from rich.console import Console
from run_script import run_command, train
from run_tool import LADDER, files_in, flags, is_one_error, run_jobs_here

from ladder.measure import runner as runner_module
from ladder.measure.peer import find_peers
from ladder.measure.processes import Outcome
from ladder.measure.runner import Runner, plan
from ladder.records.logs import read_log
from ladder.records.machine import read_machine
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, PEER
from ladder.rungs.list import LADDER as RUNGS


def test_a_run_shows_the_table_and_can_be_resumed(byte_tokens, tmp_path, call, monkeypatch):
    """What is resumed runs in a process of its own, whose memory and allocator its log tells."""
    logs = tmp_path / "logs"
    with monkeypatch.context() as here:
        here.setattr(runner_module, "run_jobs", run_jobs_here)
        code, output, _ = call("run", "--rungs", "0,1", "--logs", logs, "--", *flags(byte_tokens))
    assert code == 0 and "weight tying" in output and "× base" in output and f"logs: {logs}" in output
    assert read_machine(logs)["code"].keys() == {BY_LABEL["0"].name, BY_LABEL["1"].name}
    gone = logs / "speedup_01_weight_tying.log"
    content = gone.read_text()
    gone.write_text(content[: len(content) // 2])  # as a killed run leaves it
    before = files_in(logs)
    assert call("run", "--resume", "--logs", f"{logs}/")[0] == 0  # no other flag: the run knows them
    after = files_in(logs)
    assert [path.name for path in before if after[path] != before[path]] == [gone.name]
    run = read_log(gone)
    assert run.complete and run.losses == [float(loss) for loss in re.findall(r"loss: ([\d.]+)", content)]
    assert 0.1 < run.peak_memory_gb < 4 and (run.allocator == "mimalloc" or sys.platform != "linux")
    assert is_one_error(call("run", "--resume", "--logs", logs, "--seed", 5), "--resume", "leave the others out")


def test_failures_are_shown_and_the_others_go_on(tmp_path, byte_tokens, call, monkeypatch):
    code, output, _ = call("run", "--rungs", "0-1", "--time-limit", 0.5, "--logs", tmp_path / "a", *flags(byte_tokens))
    assert code == 1 and output.count("timed out: no end after 0.5 s") == 4  # as it happens, and in the end
    monkeypatch.setattr(runner_module, "run_jobs", run_jobs_here)
    words = ["run", "--rungs", "0", "--logs", tmp_path / "b", *flags(byte_tokens), "--pretrained", __file__]
    code, output, _ = call(*words)
    assert code == 1 and "failed: error: " in output and "not a file of --save" in output and "Traceback" not in output
    assert "no rung finished a step" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["Ctrl-C", "kill", "hang-up"])
def test_a_run_that_is_stopped_keeps_what_it_has(number, fake_run):
    """Also one that a shell has started with `&`, which ignores Ctrl-C."""
    def interrupt(job):
        if keeps:
            write_log(job.log)
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        pytest.fail("it goes on")

    signal.signal(number, (lambda *_: None) if number == signal.SIGHUP else signal.SIG_IGN)
    keeps = False
    code, output, _ = fake_run(interrupt)
    assert code == 130 and "no rung finished a step" in output
    keeps = True
    code, output, _ = fake_run(interrupt, "--logs", "second")
    assert code == 130 and "run --resume --logs second continues" in output and "baseline" in output


@pytest.mark.parametrize("words, compiled", [
    ((), ["5", "ddp", PEER]), (("--compile-mode", "none"), []), (("--compile-mode", "default"), ["5", "ddp", PEER])])
def test_what_compiles_first_runs_two_steps_side_by_side_elsewhere(words, compiled, tmp_path, monkeypatch):
    """And however that ends, the jobs themselves run one after another, as they would without."""
    ran = []

    def run_jobs(jobs, seconds, device, at_once, ended, show=None):
        ran.append((at_once, list(jobs)))
        for job in jobs:
            ended(job, Outcome(job.name, "out of memory"))

    monkeypatch.setattr(runner_module, "run_jobs", run_jobs)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    runner = Runner("cpu", tmp_path, 60, Console(file=io.StringIO()))
    jobs = plan([BY_LABEL["4"], BY_LABEL["5"], BY_LABEL["ddp"]], [*words, "--steps", "9"], tmp_path,
                peers=find_peers(True))[0]
    with runner:
        runner.compile_first(jobs, 3)
        assert runner.outcomes == []
        runner.run(jobs)
    (at_once, first), (alone, then) = ran
    assert (at_once, alone) == (3, 1) and then == jobs and len(runner.failed()) == len(jobs)
    assert [job.name for job in first] == [BY_LABEL[one].name if one in BY_LABEL else one for one in compiled]
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ  # else the jobs themselves would compile more slowly
    for job in first:
        assert int(job.env["TORCHINDUCTOR_COMPILE_THREADS"]) >= 1
        assert job.command[-4:-1] == ["--steps", "2", "--log-dir"] and job.log_dir not in (tmp_path, *tmp_path.parents)


def test_each_of_several_rounds_has_an_order_of_its_own(tmp_path):
    def orders(repeat):
        return [[job.name for job in jobs] for jobs in plan(RUNGS, [], tmp_path, repeat, peers=find_peers(True))]

    names = [*(entry.name for entry in RUNGS), PEER]
    assert orders(1) == [names]
    five = orders(5)
    assert five == orders(5) and len({tuple(order) for order in [names, *five]}) == 6  # --resume plans the same
    assert all(sorted(order) == sorted(names) for order in five)
    folders = {job.log_dir.name for jobs in plan(RUNGS, [], tmp_path, 2) for job in jobs}
    assert folders == {"round_1", "round_2"}


@pytest.mark.slow
def test_a_stopped_run_keeps_the_finished_leaves_no_orphan_and_resumes(byte_tokens, tmp_path):
    """Through the tool, with the peer, which compiles: stopped when its second job trains, then resumed to its end."""
    logs, own = tmp_path / "logs", [*flags(byte_tokens), "--model", "1x2x32", "--steps", "99"]
    words = ["run", "--rungs", "0", "--peers", "--repeat", "2", "--at-once", "2", "--logs", logs, *own]
    run = subprocess.Popen([*map(str, [*LADDER, *words])], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + 300
    while len(written := [path for path in logs.glob("round_1/*.log") if "step : 2 " in path.read_text()]) < 2:
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 130 and "run --resume --logs" in output and "Traceback" not in output, output
    assert children and not [child for child in children if child.is_running() and child.status() != "zombie"]
    assert sum(read_log(path).complete for path in written) >= 1
    resumed = run_command(*LADDER, "run", "--resume", "--logs", logs)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    runs, alone = build_report(logs).runs, read_log(train(rung("0"), tmp_path / "alone", byte_tokens, *own))
    assert [len(rounds) for rounds in runs.values()] == [2, 2]
    assert all(run.complete for rounds in runs.values() for run in rounds)
    for run in runs[BY_LABEL["0"].name]:
        assert run.losses == pytest.approx(alone.losses, abs=1e-4)


def test_a_script_without_a_log_of_its_name_fails_alone(fake_run):
    """As one whose SCRIPT is not its file."""
    def do(job):
        if job.name != "baseline":
            write_log(job.log, tail=MEDIAN)

    code, output, _ = fake_run(do, "--rungs", "0,1")
    assert code == 1 and "baseline: failed: it wrote no step to " in output
    assert "speedup_01_weight_tying: loss" in output
