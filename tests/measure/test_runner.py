"""python -m ladder run: jobs and how they end, folders, resuming, Ctrl-C; the largest batch."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import filelock
import psutil
import pytest
import torch
from load_script import ROOT
from log_files import MEDIAN, write_log
from rich.console import Console
from run_tool import files_in, flags, is_one_error

from ladder.count.memory import step_bytes
from ladder.errors import UserError
from ladder.measure import machine_check, max_batch, processes, run_folder, runner, script_flags
from ladder.measure.processes import Job, run_job
from ladder.measure.script_flags import ONE_MACHINE, command_for, eager_flags, split_flags
from ladder.records.logs import PEER, newest_run, read_log
from ladder.records.machine import read_machine
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, load_script
from ladder.rungs.list import LADDER as RUNGS_0_TO_10

LOSS = re.compile(r"loss: ([\d.]+)")


def test_torchrun_where_the_host_s_name_has_no_address(byte_tokens, tmp_path):
    """A laptop away from its network: torchrun would wait for its own address without end."""
    train = command_for(BY_LABEL["ddp"], flags(byte_tokens) + ["--compile-mode", "none"], tmp_path, processes=1)
    away = ["unshare", "--uts", "sh", "-c", 'hostname laptop-nosuch.local && exec "$@"', "sh"]
    if subprocess.run([*away, "true"], capture_output=True).returncode:
        pytest.skip("only root may rename the host")
    run = subprocess.run([*away, *train], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "median : " in run.stdout, run.stderr


@pytest.mark.parametrize("code, status, reason", [
    ("print('step', end='', flush=True); time.sleep(0.5); print(' : 1')", "ok", ""),  # read in two halves
    ("os.kill(os.getpid(), 9)", "out of memory", ""),  # Linux ends a process that takes too much without a word
    ("os.kill(os.getpid(), signal.SIGTERM)", "failed", "exit code -15"),
    ("print('RuntimeError: CUDA out of memory'); sys.exit(1)", "out of memory", "RuntimeError: CUDA out of memory"),
    ("print('RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED in x'); sys.exit(1)",
     "out of memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED in x"),
    ("print('torch.AcceleratorError: no'); print('a hint'); sys.exit(1)", "failed", "torch.AcceleratorError: no"),
    ("print('error: --data x: none'); print('later'); sys.exit(1)", "failed", "error: --data x: none"),
    (r"print('[rank1]: ValueError: no\nelastic.ChildFailedError:'); sys.exit(1)", "failed", "[rank1]: ValueError: no"),
    ("print('begun'); print('Killed.'); sys.exit(3)", "failed", "Killed."),
    ("print(subprocess.Popen(['sleep', '60']).pid); sys.stdout.flush(); time.sleep(60)", "timed out",
     "no end after 5 s"),
])
def test_a_job_ends_with_a_status_and_the_complaint_that_matters(code, status, reason, tmp_path):
    command = [sys.executable, "-c", f"import os, signal, subprocess, sys, time; {code}"]
    outcome = run_job(Job("job", command, tmp_path), 5 if status == "timed out" else 60, "cuda")
    assert (outcome.name, outcome.status, outcome.reason) == ("job", status, reason)
    assert status != "ok" or outcome.lines == ["step : 1"]
    if status == "timed out":  # what it has started ends with it, as torchrun's ranks do
        [pid] = outcome.lines
        assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == "zombie"


def test_a_rank_that_the_kernel_kills_ran_out_of_memory(tmp_path):
    """torchrun itself ends with 1, and its last line is a row of "="."""
    (tmp_path / "rank.py").write_text("import os; os.kill(os.getpid(), 9)")
    command = [sys.executable, "-m", "torch.distributed.run", *ONE_MACHINE, str(tmp_path / "rank.py")]
    outcome = run_job(Job("job", command, tmp_path), 60, "cuda")
    assert outcome.status == "out of memory" and "SIGKILL" in outcome.reason


def test_a_stopped_compiler_leaves_no_half_of_a_library(tmp_path):
    """A kill while it links would leave an empty file in torch's cache, which later runs try to load."""
    (tmp_path / "g++").symlink_to(sys.executable)
    library = "import time; time.sleep(2); open('library', 'w').write('whole')"
    script = f"import subprocess; subprocess.run([{str(tmp_path / 'g++')!r}, '-c', {library!r}], cwd={str(tmp_path)!r})"
    outcome = run_job(Job("job", [sys.executable, "-c", script], tmp_path), 1, "cuda")
    assert outcome.status == "timed out" and (tmp_path / "library").read_text() == "whole"


HUNGRY = "import time; x = b'1' * {}; time.sleep(1)"
TWO_RANKS = """import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", {!r}]) for _ in range(2)]
sys.exit(sum(rank.wait() for rank in ranks))"""


@pytest.mark.parametrize("code", [HUNGRY.format(150_000_000), TWO_RANKS.format(HUNGRY.format(45_000_000))],
                         ids=["alone", "two"])
def test_a_job_that_takes_too_much_memory_is_stopped_on_a_cpu(code, monkeypatch, tmp_path):
    """Also of two processes, each of which would fit. On a GPU nobody watches: what fills up is not this memory."""
    memory = psutil.virtual_memory()._replace(available=100e6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    job = Job("hungry", [sys.executable, "-c", code], tmp_path)
    assert run_job(job, 60, "cpu").status == "out of memory" and run_job(job, 60, "cuda").status == "ok"
    assert run_job(replace(job, memory=1e9), 60, "cpu").status == "ok"  # its share, where it has one


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


def test_a_rung_gets_the_flags_that_it_has_and_saves_no_checkpoints():
    def command(label, *flags, **more):
        return command_for(BY_LABEL[label], list(flags), Path("x"), **more)[1:]

    assert command("4", "--compile-mode", "none", "-B", "1")[1:] == ["-B", "1", "--log-dir", "x"]
    assert "--compile-mode" in command("5", "--compile-mode", "none")
    assert "--nproc_per_node=3" in command("ddp", processes=3) and "--nproc_per_node=3" in command("fsdp", processes=3)
    assert "--checkpoint-every" not in command("distributed_validation")
    assert command("checkpoints")[1:3] == command("gradient_checkpointing")[1:3] == ["--checkpoint-every", "0"]


def test_where_torch_cannot_compile_scripts_run_eagerly_and_that_is_said(fake_run, monkeypatch, capsys):
    monkeypatch.setattr(script_flags, "compile_problem", lambda device: (
        machine_check.compile_problem("mps") if device == "mps" else "No working C++ compiler"))
    modes = {}

    def do(job):
        modes[job.name] = split_flags(job.command, "--compile-mode")[0]
        write_log(job.log, tail=MEDIAN)

    assert eager_flags([BY_LABEL["5"]], [], "mps", Console()) == ["--compile-mode", "none"]
    assert eager_flags([BY_LABEL["4"]], [], "mps", Console()) == []  # which has no such flag
    assert "152155" in capsys.readouterr().out
    code, output, _ = fake_run(do, "--rungs", "4,5", "--peers")
    assert code == 0
    assert modes == {BY_LABEL["4"].name: [], BY_LABEL["5"].name: ["none"], PEER: ["none"]}
    assert output.count("--compile-mode none") == 1 and "No working C++ compiler" in output


@pytest.mark.parametrize("words", [["--rungs", "10,ddp"], ["--max-batch", "--rungs", "fsdp"]])
def test_windows_has_no_torchrun(words, tokens, monkeypatch, call):
    monkeypatch.setattr(script_flags, "sys", SimpleNamespace(platform="win32"))
    answer = call("run", *words, *flags(tokens))
    assert is_one_error(answer, "--rungs ", "torchrun does not start on Windows", "running.md")


def test_a_machine_keeps_its_highest_rates(monkeypatch, tmp_path):
    for rate in (2e12, 3e12, 1e12):
        found = json.dumps({"rates": {"float32": rate}, "bytes_per_second": rate / 10})
        monkeypatch.setattr(run_folder, "run_module", lambda *_, found=found: found)
        run_folder.write_machine(tmp_path, "cpu", arguments=["run"])
    assert json.loads((tmp_path / "machine.json").read_text()) == {
        "rates": {"float32": 3e12}, "bytes_per_second": 3e11, "arguments": ["run"]}


def test_a_run_shows_the_table_and_can_be_resumed(byte_tokens, tmp_path, call):
    logs = tmp_path / "logs"
    code, output, _ = call("run", "--rungs", "0,1", "--logs", logs, "--", *flags(byte_tokens))
    assert code == 0 and "weight tying" in output and "× base" in output and f"logs: {logs}" in output
    for [run] in build_report(logs).runs.values():
        assert run.complete and run.steps == [1, 2, 3, 4] and 0.1 < run.peak_memory_gb < 4
        assert run.allocator == "mimalloc" or sys.platform != "linux"
    assert read_machine(logs)["code"].keys() == {BY_LABEL["0"].name, BY_LABEL["1"].name}
    gone = logs / "speedup_01_weight_tying.log"
    content = gone.read_text()
    gone.write_text(content[: len(content) // 2])  # as a killed run leaves it
    before = files_in(logs)
    assert call("run", "--resume", "--logs", f"{logs}/")[0] == 0  # no other flag: the run knows them
    after = files_in(logs)
    assert [path.name for path in before if after[path] != before[path]] == [gone.name]
    assert read_log(gone).complete and read_log(gone).losses == [float(loss) for loss in LOSS.findall(content)]
    assert is_one_error(call("run", "--resume", "--logs", logs, "--seed", 5), "--resume", "leave the others out")


def test_failures_are_shown_and_the_others_go_on(tmp_path, byte_tokens, call):
    code, output, _ = call("run", "--rungs", "0-1", "--time-limit", 0.5, "--logs", tmp_path / "a", *flags(byte_tokens))
    assert code == 1 and output.count("timed out: no end after 0.5 s") == 4  # as it happens, and in the end
    words = ["run", "--rungs", "0", "--logs", tmp_path / "b", *flags(byte_tokens), "--pretrained", __file__]
    code, output, _ = call(*words)
    assert code == 1 and "failed: error: " in output and "not a file of --save" in output and "Traceback" not in output
    assert "no rung finished a step" in output


def test_a_run_never_touches_the_logs_of_another(tmp_path, tokens, call):
    words = ["run", "--rungs", 0, "--logs", tmp_path, *flags(tokens)]
    with filelock.FileLock(tmp_path / "lock"):
        assert is_one_error(call(*words), "another run is using it")
    command = [sys.executable, "-c", "input()", "--log-dir", tmp_path / "round_1"]
    killed = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert is_one_error(call(*words), "of a killed run still writes there", f"end process {killed.pid}")
    killed.communicate()
    write_log(tmp_path / "baseline.log")
    before = files_in(tmp_path)
    assert is_one_error(call(*words), "not empty", "--resume")
    assert is_one_error(call("run", "--resume", "--logs", tmp_path), "holds no run")
    assert files_in(tmp_path) == before
    (tmp_path / "machine.json").write_text("{")
    assert is_one_error(call("run", "--resume", "--logs", tmp_path), "is damaged")


@pytest.mark.parametrize("folder", ["/proc/logs", f"{__file__}/logs"], ids=["read-only", "in a file"])
def test_a_folder_that_cannot_be_written_to(folder, tokens, call):
    assert is_one_error(call("run", "--rungs", 0, "--logs", folder, *flags(tokens)), f"--logs {folder}: ")


def test_every_run_has_its_folder_and_the_newest_is_shown(fake_run, call):
    for words in (["report"], ["run", "--resume"]):
        assert is_one_error(call(*words), "holds no run")
    assert fake_run(lambda job: write_log(job.log, losses=[1, 2, 3], tail=MEDIAN) and None)[0] == 0
    first = newest_run()
    time.sleep(1.1)  # folders are called by the second
    assert fake_run(lambda job: write_log(job.log, losses=[4, 5, 6], tail=MEDIAN) and None)[0] == 0
    second = newest_run()
    assert second != first and "6.000" in call("report")[1]
    (first / "baseline.log").write_text("# script: baseline.py\n")  # killed before its first step: not to be shown
    os.utime(first / "machine.json")
    assert newest_run() == second and newest_run(Path.exists) == first  # but to be resumed


def test_a_run_may_write_to_the_folder_that_it_stands_in(fake_run):
    assert fake_run(lambda job: write_log(job.log, tail=MEDIAN) and None, "--logs", ".")[0] == 0


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


@pytest.mark.parametrize("gigabytes, B, left_out", [
    (80, 16, ""), (24, 10, ""), (8, 2, ""), (6, 1, ""), (5, 1, "left out: rung 0:"), (2, None, "")])
def test_without_a_batch_size_a_gpu_gets_one_that_fits(gigabytes, B, left_out, monkeypatch, capsys):
    monkeypatch.setattr(max_batch, "run_module", lambda *_: gigabytes * 1e9)
    settings = SimpleNamespace(device="cuda", model="gpt2", T=1024)
    args = SimpleNamespace(flags=[], argv=["run"])
    if B is None:
        with pytest.raises(UserError, match="no rung fits"):
            max_batch.fit_batch(args, RUNGS_0_TO_10, settings, Console())
        return
    fit = max_batch.fit_batch(args, RUNGS_0_TO_10, settings, Console(width=200))
    said = capsys.readouterr().out
    assert args.flags == ["-B", str(B)] and f"-B {B}:" in said
    assert left_out in said if left_out else "left out" not in said
    for rung in fit:
        assert step_bytes("gpt2", B, 1024, rung.label) <= processes.MEMORY_SHARE * gigabytes * 1e9
    assert args.argv == ["run", "--rungs", ",".join(rung.label for rung in fit), "-B", str(B)]  # as --resume reads it
    args.flags = ["-B", "3"]
    assert max_batch.fit_batch(args, RUNGS_0_TO_10, settings, Console()) == RUNGS_0_TO_10 and args.flags == ["-B", "3"]


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


def test_a_quick_look_prepares_its_text_and_says_what_comes_next(byte_tokens, tmp_path, monkeypatch, call):
    """With its own flags, unless others are given."""
    monkeypatch.chdir(tmp_path)
    started, prepared = [], []

    def prepare(command):
        prepared.append([str(word) for word in command])
        shutil.copytree(byte_tokens, command[-1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script_flags.subprocess, "run", prepare)
    monkeypatch.setattr(runner, "run_jobs", lambda jobs, *rest: started.extend(job.command for job in jobs))
    for number in (1, 2):
        code, output, error = call("run", "--quick", "-T", 64, "--device", "cpu", "--logs", tmp_path / str(number))
        assert code == 0 and "python -m ladder run --rungs 0,5,6 --steps 10" in output, error
    assert [words[-4:] for words in prepared] == [["--tokenizer", "bytes", "--out", "data/bytes"]]
    assert [Path(command[1]).stem for command in started] == 2 * [BY_LABEL[label].name for label in ("0", "5", "6")]
    settings = load_script(BY_LABEL["6"]).parse_args(started[2][2:])
    assert (settings.T, settings.model, settings.data) == (64, "2x4x128", Path("data/bytes"))
