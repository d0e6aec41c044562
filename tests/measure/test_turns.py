"""python -m ladder run --at-once: rungs that start together, and train one after another."""
import io
import json
import signal
import sys
import threading
import time

import psutil
import pytest
import torch
from conftest import run_command, rung, train
from log_files import MEDIAN
from rich.console import Console
from run_tool import LADDER, flags

from ladder.measure import turn
from ladder.measure.jobs import Job
from ladder.measure.peer import find_peers
from ladder.measure.runner import Runner, plan
from ladder.records.logs import PEER, read_log
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, LADDER as RUNGS

# A script that compiles for a moment, begins its log, and trains for another; it tells when, and who it was.
SCRIPT = f"""
import json, os, sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
times = [os.getpid(), time.monotonic()]
time.sleep(0.1)
COMPILES
times.append(time.monotonic())
print("# script: fake.py", flush=True)
times.append(time.monotonic())
TRAINS
time.sleep(0.1)
with open(folder / f"{{name}}.log", "w") as log:
    log.write("# batch: B=4 T=1024 | steps: 3\\n" + "".join(
        f"step : {{n}} | loss: {{9 - n}} | dt: 50 ms\\n" for n in (1, 2, 3)) + {MEDIAN.lstrip()!r})
with open(folder / "times", "a") as file:
    print(json.dumps([name, *times, time.monotonic()]), file=file)
"""


@pytest.fixture
def turns(tmp_path):
    """turns(names, at_once, compiles, trains, …): (Runner, [[name, pid, begin, compiled, trains, end] by end])."""
    def run(names, at_once, compiles="", trains="", seconds=30, folder="round_1"):
        logs = tmp_path / folder
        logs.mkdir(exist_ok=True)
        script = logs / "script.py"
        script.write_text(SCRIPT.replace("COMPILES", compiles).replace("TRAINS", trains))
        command = [sys.executable, "-m", "ladder.measure.turn", "once", str(script), str(logs)]
        runner = Runner("cuda", tmp_path, seconds, Console(file=io.StringIO()))
        with runner:
            runner.run_in_turns([Job(name, [*command, name], logs) for name in names], at_once)
        times = logs / "times"
        return runner, [json.loads(line) for line in times.read_text().splitlines()] if times.exists() else []

    return run


def test_all_start_together_and_one_trains_at_a_time_in_the_order_given(turns):
    slow = "time.sleep(0.5 if name == 'a' else 0)"
    rounds = [turns(names, 3, slow, folder=folder)[1] for names, folder in (("cab", "round_1"), ("ba", "round_2"))]
    assert [[one[0] for one in ended] for ended in rounds] == [list("cab"), list("ba")]
    assert len({one[1] for ended in rounds for one in ended}) == 5  # new processes in every round
    for ended in rounds:
        _, _, _, compiled, trains, ends = zip(*ended, strict=True)
        assert max(compiled) < min(trains)
        assert all(end < start for end, start in zip(ends, trains[1:], strict=False))


def test_no_more_start_together_than_may(turns):
    _, [a, b, c] = turns("abc", 2, trains="time.sleep(0.4)")
    assert (a[0], b[0], c[0]) == ("a", "b", "c")
    assert b[2] < a[5] and b[5] < c[2]  # two begin together, and the third when both have ended


@pytest.mark.parametrize("part", ["compiles", "trains"])
def test_a_child_that_hangs_is_stopped_and_named_and_the_others_lose_no_time_by_it(turns, part):
    """Not even one that waits for longer than it may take."""
    runner, ended = turns("abc", 3, **{part: "time.sleep(60 if name == 'a' else 0.4)"}, seconds=2)
    assert [(one.name, one.status, one.reason) for one in runner.failed()] == [("a", "timed out", "no end after 2 s")]
    assert [one[0] for one in ended] == ["b", "c"]


def test_a_child_that_lacked_memory_beside_the_others_is_tried_again_alone_at_the_end(turns):
    beside = "if name == 'd' or name == 'a' and len(list(folder.glob('*.log'))) < 2: "
    runner, ended = turns("abcd", 2, compiles=f"{beside}sys.exit('error: torch: CUDA out of memory')")
    assert [(one.name, one.status) for one in runner.outcomes] == [
        ("b", "ok"), ("c", "ok"), ("a", "ok"), ("d", "out of memory")]


def test_ctrl_c_keeps_finished_logs_and_leaves_no_process(turns, tmp_path):
    logs = tmp_path / "round_1"

    def interrupt():
        while not (logs / "a.log").exists() or len(list(logs.glob("*.pid"))) < 3:
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        turns("abc", 3, compiles="(folder / f'{name}.pid').write_text(str(os.getpid()))",
              trains="time.sleep(60 if name == 'b' else 0)")
    assert read_log(logs / "a.log").complete and not (logs / "c.log").exists()
    assert not any(psutil.pid_exists(int(file.read_text())) for file in logs.glob("*.pid"))


def test_a_child_that_nobody_gives_a_turn_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('before')\nprint('# script: x.py')\nprint('trains')")
    without_input = "import subprocess, sys; subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL)"
    turn = [sys.executable, "-m", "ladder.measure.turn", "once", script]
    done = run_command(sys.executable, "-c", without_input, *turn)
    assert "before\nwaits" in done.stdout and "trains" not in done.stdout and "error: nobody" in done.stderr


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


def test_only_what_compiles_has_a_first_run_and_only_in_the_first_round(tmp_path):
    """The other rounds find its graphs on disk, and start sooner."""
    def turns(*flags):
        jobs = plan([BY_LABEL["4"], BY_LABEL["5"], BY_LABEL["ddp"]], [*flags], tmp_path, 2, {"peer": ["a.py"]}, 2, 2)
        return [{job.name: job.command[3] for job in round_ if "ladder.measure.turn" in job.command} for round_ in jobs]

    rung_4, rung_5 = BY_LABEL["4"].name, BY_LABEL["5"].name
    once = dict.fromkeys([rung_4, rung_5, "peer"], "once")
    assert turns() == [{rung_4: "once", rung_5: "twice", "peer": "twice"}, once]
    assert turns("--compile-mode", "none") == [once, once]


def test_the_run_that_compiles_leaves_no_memory_and_no_peak_on_a_gpu(monkeypatch):
    gpu = {"cached": 0, "peak": 0}
    monkeypatch.setattr(turn, "run", lambda *_: gpu.update(cached=9, peak=9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpu.update(cached=0))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: gpu.update(peak=0))
    turn.compile_first("script.py", [])
    assert gpu == {"cached": 0, "peak": 0}


@pytest.mark.slow
def test_rungs_in_turns_train_as_they_do_alone_and_a_stopped_run_is_resumed(tokens, tmp_path):
    """Through the tool, with the peer: stopped once a log is there, then resumed to its end."""
    logs = tmp_path / "logs"
    words = ["run", "--rungs", "0,10", "--peers", "--repeat", "2", "--at-once", "3", "--logs", logs, *flags(tokens)]
    stop = "import os, signal, subprocess, sys, time; from pathlib import Path\n" \
           "run = subprocess.Popen(sys.argv[2:])\n" \
           "while not list(Path(sys.argv[1]).glob('round_1/*.log')): time.sleep(0.02)\n" \
           "run.send_signal(signal.SIGINT); sys.exit(run.wait())"
    stopped = run_command(sys.executable, "-c", stop, logs, *LADDER, *words)
    assert stopped.returncode == 130 and "run --resume --logs" in stopped.stdout, stopped.stdout + stopped.stderr
    resumed = run_command(*LADDER, "run", "--resume", "--logs", logs)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    runs = build_report(logs).runs
    assert [len(rounds) for rounds in runs.values()] == [2, 2, 2]
    for label in ("0", "10"):
        alone = read_log(train(rung(label), tmp_path / "alone", tokens, *flags(tokens)[4:]))
        for run in runs[BY_LABEL[label].name]:
            assert run.complete and run.losses == pytest.approx(alone.losses, abs=1e-4), label
