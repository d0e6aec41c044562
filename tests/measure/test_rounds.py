"""python -m ladder run --at-once, --repeat: what compiles does so first, side by side; then all train one by one."""
import io
import signal
import subprocess
import time

import psutil
import pytest
from load_script import ROOT, rung
from rich.console import Console
from run_script import run_command, train
from run_tool import LADDER, flags

from ladder.measure import runner as runner_module
from ladder.measure.peer import find_peers
from ladder.measure.processes import Outcome
from ladder.measure.runner import Runner, plan
from ladder.records.logs import PEER, read_log
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL
from ladder.rungs.list import LADDER as RUNGS


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
    for job in first:
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
