"""Jobs: how they end, what a stop leaves, and what their logs get."""
import re
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch
from load_script import ROOT
from run_tool import flags

from ladder.measure import processes
from ladder.measure.processes import Job, run_job
from ladder.measure.script_flags import ONE_MACHINE, command_for
from ladder.rungs.list import BY_LABEL


@pytest.mark.slow
def test_torchrun_where_the_host_s_name_has_no_address(byte_tokens, tmp_path):
    """A laptop away from its network: torchrun would wait for its own address without end."""
    train = command_for(BY_LABEL["ddp"], flags(byte_tokens) + ["--compile-mode", "none"], tmp_path, processes=1)
    away = ["unshare", "--uts", "sh", "-c", 'hostname laptop-nosuch.local && exec "$@"', "sh"]
    if subprocess.run([*away, "true"], capture_output=True).returncode:
        pytest.skip("only root may rename the host")
    run = subprocess.run([*away, *train], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "median : " in run.stdout, run.stderr


def shell(words, folder):
    return Job("job", ["sh", "-c", words], folder)


def has_ended(pid):
    return not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie"


def test_a_job_ends_with_its_lines_killed_or_timed_out(tmp_path):
    outcome = run_job(shell("printf step; sleep 0.4; echo ' : 1'", tmp_path), 60, "cuda")
    assert (outcome.name, outcome.status, outcome.reason, outcome.lines) == ("job", "ok", "", ["step : 1"])
    # Linux ends a process that takes too much without a word
    assert run_job(shell("kill -9 $$", tmp_path), 60, "cuda").status == "out of memory"
    began = time.monotonic()
    outcome = run_job(shell("sleep 60 & echo $!; wait", tmp_path), 0.5, "cuda")
    assert (outcome.status, outcome.reason) == ("timed out", "no end after 0.5 s")
    assert has_ended(*outcome.lines)  # what it has started ends with it, as torchrun's ranks do
    assert time.monotonic() - began < 9  # though in a container perhaps nobody reaps it


@pytest.mark.parametrize("code, lines, status, reason", [
    (-15, [], "failed", "ended by SIGTERM"),
    (-11, ["step : 3 | loss: 9.5 | dt: 93.1 ms"], "failed", "ended by SIGSEGV"),
    (-9, ["error: a", "step : 3"], "out of memory", "error: a; ended by SIGKILL"),
    (1, ["RuntimeError: CUDA out of memory"], "out of memory", "RuntimeError: CUDA out of memory"),
    (1, ["RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED in x"], "out of memory",
     "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED in x"),
    (1, ["torch.AcceleratorError: no", "a hint"], "failed", "torch.AcceleratorError: no"),
    (1, ["error: --data x: none", "later"], "failed", "error: --data x: none"),
    (1, ["[rank1]: ValueError: no", "elastic.ChildFailedError:"], "failed", "[rank1]: ValueError: no"),
    (3, ["begun", "Killed.", ""], "failed", "Killed."),
])
def test_of_a_job_that_failed_the_complaint_that_matters_is_kept(code, lines, status, reason):
    assert processes.judge(code, lines) == (status, reason)


def test_what_a_dead_job_left_behind_ends_and_no_process_that_has_its_number(tmp_path, monkeypatch):
    """As torchrun's ranks, which have sessions of their own."""
    outcome = run_job(shell("setsid sleep 60 & echo $!; sleep 0.6; exit 3", tmp_path), 60, "cuda")
    assert outcome.status == "failed" and has_ended(*outcome.lines)
    tree, stranger = processes.process_tree, subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(processes, "process_tree", lambda pid: tree(pid if psutil.pid_exists(pid) else stranger.pid))
    assert run_job(shell("true", tmp_path), 60, "cuda").status == "ok" and stranger.poll() is None
    stranger.kill()


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_ran_out_of_memory(tmp_path):
    """torchrun itself ends with 1, and its last line is a row of "="."""
    (tmp_path / "rank.py").write_text("import os; os.kill(os.getpid(), 9)")
    command = [sys.executable, "-m", "torch.distributed.run", *ONE_MACHINE, str(tmp_path / "rank.py")]
    outcome = run_job(Job("job", command, tmp_path), 60, "cuda")
    assert outcome.status == "out of memory" and "SIGKILL" in outcome.reason


@pytest.mark.slow
def test_a_stopped_compiler_leaves_no_half_of_a_library(tmp_path):
    """A kill while it links would leave an empty file in torch's cache, which later runs try to load."""
    (tmp_path / "g++").symlink_to(sys.executable)
    library = "import time; time.sleep(2); open('library', 'w').write('whole')"
    script = f"import subprocess; subprocess.run([{str(tmp_path / 'g++')!r}, '-c', {library!r}], cwd={str(tmp_path)!r})"
    outcome = run_job(Job("job", [sys.executable, "-c", script], tmp_path), 1, "cuda")
    assert outcome.status == "timed out" and (tmp_path / "library").read_text() == "whole"


HUNGRY = "import time; x = b'1' * {}; time.sleep(0.7)"
TWO_RANKS = """import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", {!r}]) for _ in range(2)]
sys.exit(sum(rank.wait() for rank in ranks))"""


@pytest.mark.slow
def test_a_job_that_takes_too_much_memory_is_stopped_on_a_cpu(monkeypatch, tmp_path):
    """Also of two processes, each of which would fit. On a GPU nobody watches: what fills up is not this memory."""
    memory = psutil.virtual_memory()._replace(available=100e6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    job = Job("job", [sys.executable, "-c", HUNGRY.format(150_000_000)], tmp_path)
    assert run_job(job, 60, "cpu").status == "out of memory" and run_job(job, 60, "cuda").status == "ok"
    assert run_job(replace(job, memory=1e9), 60, "cpu").status == "ok"  # its share, where it has one
    two = replace(job, command=[sys.executable, "-c", TWO_RANKS.format(HUNGRY.format(45_000_000))])
    assert run_job(two, 60, "cpu").status == "out of memory"


@pytest.mark.slow
def test_the_peak_of_several_ranks_is_that_of_the_largest(tmp_path):
    job = Job("job", [sys.executable, "-c", TWO_RANKS.format(HUNGRY.format(300_000_000))], tmp_path)
    job.log.touch()
    assert run_job(job, 60, "cpu").status == "ok"
    assert 0.3 <= float(re.search(r"process memory: (\S+) GB", job.log.read_text())[1]) < 0.5


@pytest.mark.parametrize("label, n_processes, alone", [("0", 2, True), ("ddp", 1, True), ("ddp", 2, False)])
def test_the_threads_of_a_run_are_in_its_log(label, n_processes, alone, tmp_path, monkeypatch):
    """torchrun gives each of several ranks one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    job = Job("job", command_for(BY_LABEL[label], [], tmp_path, n_processes), tmp_path)
    job.log.touch()
    processes.record(job, {}, 0)
    assert f"({7 if alone else 1} threads)" in job.log.read_text()
