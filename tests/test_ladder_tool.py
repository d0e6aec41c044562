"""python -m ladder: every verb on real short runs of the tiny model, and on everything a user can get wrong."""
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import filelock
import psutil
import pytest
import torch
from conftest import ROOT, load_module, make_tokens, own_settings, run_command, rung, train

import ladder.__main__ as tool
from ladder.errors import UserError
from ladder.measure import check, rates, runner
from ladder.measure.runner import Job, command_for, parse_rungs, plan, run_job
from ladder.count.flops import flops_per_token, mfu
from ladder.count.memory import step_bytes
from ladder.scripts.stages import BY_LABEL, BY_NAME, STAGES
from ladder.judge.compare import compare
from ladder.show.logs import PEER, read_log
from ladder.show.plots import shown_in_docs
from ladder.show.report import beyond_table, build_report, check_comparable, markdown_table, warnings, write_tables

LADDER = [sys.executable, "-m", "ladder"]
REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
WHOLE = max((folder for folder in REFERENCE if (folder / "round_1" / "baseline.log").exists()),
            key=lambda folder: len(list(folder.rglob("*.log"))))  # a whole ladder, in rounds


def flags(tokens):
    return ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32", "--steps", "4"]


def ladder(*words, timeout=300, **environment):
    """The tool as a user calls it."""
    return run_command(*LADDER, *words, timeout=timeout, COLUMNS="200", **environment)


@pytest.fixture
def call(monkeypatch, capsys):
    """The tool in this process, without measuring the machine: call(words) gives (exit code, stdout, stderr)."""
    monkeypatch.setattr(tool.console, "width", 200)
    monkeypatch.setattr(runner, "run_module", lambda name, *words: json.dumps({"rates": {"float32": 1e12}}))
    handler = signal.getsignal(signal.SIGTERM)

    def call(*words):
        try:
            code = tool.main([str(word) for word in words])
        except SystemExit as stop:  # of argparse, and of the scripts' own checks
            code = stop.code if isinstance(stop.code, int) else print(stop.code, file=sys.stderr) or 1
        return code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, handler)


def is_one_error(answer, *reasons):
    code, _, error = answer
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1, answer
    return all(reason in error for reason in reasons)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tokens):
    """Two rounds of rungs 0 and 1, run by the tool in this process; the machine's rates are not measured."""
    logs = tmp_path_factory.mktemp("measured") / "logs"
    words = ["run", "--rungs", "0,1", "--repeat", 2, "--logs", logs, "--compile-mode", "none", *flags(tokens)]
    machine = json.dumps({"rates": {"float32": 1e12}, **rates.describe("cpu")})
    output = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with pytest.MonkeyPatch.context() as patch, own_settings(), redirect_stdout(output):
        patch.setattr(tool.console, "width", 200)
        patch.setattr(runner, "run_module", lambda name, *words: machine)
        assert tool.main([str(word) for word in words]) == 0
        output.flush()
    return logs, output.buffer.getvalue().decode()


def test_run_measures_in_rounds_and_shows_the_table(measured):
    logs, output = measured
    assert "weight tying" in output and "× base" in output and f"logs: {logs}" in output.replace("\n", "")
    report = build_report(logs)
    assert [row.name for row in report.rows] == ["baseline", "speedup_01_weight_tying"]
    assert all(row.rounds == 2 and row.complete and row.last_step == 4 for row in report.rows)
    assert "float32" in report.machine["rates"] and report.machine["cpu"]
    for row in report.rows:
        medians = [run.median_ms for run in report.runs[row.name]]
        assert (row.ms_low, row.ms_high) == (min(medians), max(medians))
        expected = flops_per_token("tiny", 32) * row.tokens_per_second / max(report.machine["rates"].values())
        assert row.mfu == pytest.approx(expected)
        assert 0 < row.mfu_causal < row.mfu < 1
    base, tied = report.rows
    assert tied.times_baseline == tied.times_before == pytest.approx(base.ms / tied.ms)


def test_resume_skips_what_is_finished(measured, call):
    logs, _ = measured
    kept = logs / "round_1" / "baseline.log"
    gone = logs / "round_2" / "speedup_01_weight_tying.log"
    before, content = kept.stat().st_mtime_ns, gone.read_text()
    gone.write_text(content[: len(content) // 2])  # as a killed run leaves it
    code, output, error = call("run", "--resume", "--logs", logs)  # no other flag: the run knows them
    assert code == 0, output + error
    assert kept.stat().st_mtime_ns == before
    again = read_log(gone)
    assert again.complete and again.headers["batch"] == read_log(kept).headers["batch"]
    assert is_one_error(call("run", "--resume", "--logs", logs, "--seed", 5), "--resume", "leave the others out")


@pytest.mark.parametrize("rungs, more, reasons", [
    ("10,16", [], ["speedup_10_fused_adamw.py does not validate", "take rungs from 13 on"]),
    ("16", ["--val-every", 0], ["--val-every 0: --race compares validation losses"]),
    ("16", ["--max-lr", 0.01], ["--max-lr: --race sets it itself"]),
    ("18", ["--muon-lr=0.01"], ["--muon-lr: --race sets it itself"]),
    ("16", ["--seed", 3], ["--seed: --race sets it itself"]),
    ("16", ["--repeat", 2], ["--repeat: not with --race"]), ("16", ["--peers"], ["--peers: not with --race"]),
])
def test_runs_that_cannot_race(rungs, more, reasons, tmp_path, tokens, call):
    answer = call("run", "--race", 2, "--rungs", rungs, *flags(tokens), *more, "--logs", tmp_path / "logs")
    assert is_one_error(answer, *reasons) and not list(tmp_path.iterdir())
    assert is_one_error(call("run", "--race-jobs", 2, *flags(tokens)), "--race-jobs: only with --race; leave it out")


def test_failures_are_shown_and_the_others_go_on(tmp_path, tokens, call):
    started = time.monotonic()
    code, output, _ = call("run", "--rungs", "0-1", "--time-limit", 0.5, "--logs", tmp_path / "a", *flags(tokens))
    assert code == 1 and output.count("timed out: no end after 0.5 s") == 4  # as it happens, and in the end
    assert time.monotonic() - started < 60
    code, output, _ = call("run", "--rungs", "0", "--logs", tmp_path / "b", *flags(tokens), "--pretrained", __file__)
    assert code == 1 and "failed: error: " in output and "not a model's file" in output and "Traceback" not in output
    assert "no rung finished a step" in output and not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [False, True], ids=["Ctrl-C", "kill"])
def test_a_stop_keeps_the_finished_and_leaves_no_orphan(tmp_path, tokens, in_background):
    words = ["run", "--rungs", "0-1", "--logs", tmp_path / "logs", *flags(tokens)]
    words[words.index("--steps") + 1] = "15"
    command = [str(word) for word in [*LADDER, *words]]
    command = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command] if in_background else command  # as `nohup ... &`
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    second = tmp_path / "logs" / "speedup_01_weight_tying.log"
    deadline = time.monotonic() + 120
    while not (second.exists() and "step : 2" in second.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(tool.pid).children(recursive=True)
    tool.send_signal(signal.SIGTERM if in_background else signal.SIGINT)
    output, _ = tool.communicate(timeout=60)
    assert tool.returncode == 130 and "Traceback" not in output, output
    assert children and not [child for child in children if child.is_running() and child.status() != "zombie"]
    assert read_log(tmp_path / "logs" / "baseline.log").complete


def test_the_peer_is_rung_10_with_another_model(tmp_path, tokens, monkeypatch):
    """The rungs' own dtype and compile check: no bfloat16 where there is none, eager where nothing compiles."""
    module = rung(10)
    peer = load_module(ROOT / "ladder" / "measure" / "peer_transformers.py")
    assert peer.rung_10 is module
    monkeypatch.setattr(module, "autocast_dtype", lambda device: torch.float32)

    def refuse(*_, **__):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    peer.main([*flags(tokens), "--log-dir", str(tmp_path)])
    log = read_log(tmp_path / "peer_transformers.log")
    assert log.name == PEER and log.complete
    assert log.headers["precision"].startswith("float32") and "running eagerly" in log.headers["compile"]
    assert "norm: " in log.path.read_text()  # clipped, as rung 10 is
    ours = read_log(train(rung(1), tmp_path, tokens, *flags(tokens)[4:]))
    assert log.losses[0] == pytest.approx(ours.losses[0], abs=0.3)  # both start at ln 50257, with tied weights
    assert log.tokens_per_step == ours.tokens_per_step
    rows = build_report(tmp_path).rows
    assert [(row.name, row.times_before) for row in rows] == [(ours.name, None), (PEER, None)]
    with pytest.raises(SystemExit, match="error: --pretrained"):
        peer.main([*flags(tokens), "--save", str(tmp_path / "x.pt")])


def fake_machine(monkeypatch, limit):
    """A machine on which a batch up to `limit` fits; returns the commands that were run."""
    commands = []

    def run_job(job, *_):
        commands.append(job.command)
        B = int(job.command[job.command.index("-B") + 1])
        if B > limit:
            return runner.Outcome(job.name, "out of memory", "killed")
        write_log(job.log_dir / f"{job.name}.log", header=f"# batch: B={B} T=1024 | steps: 3\n", tail=MEDIAN)
        return runner.Outcome(job.name, "ok")

    monkeypatch.setattr(runner, "run_job", run_job)
    return commands


@pytest.mark.parametrize("label, limit", [("0", 33), ("7", 70), ("ddp", 70), ("14", 50), ("fsdp", 70), ("7", 9),
                                          ("7", 1), ("7", 0)])
def test_max_batch_starts_where_the_model_says(label, limit, monkeypatch, tmp_path):
    """Few cold compiles when the memory model is about right, an answer in any case, and as many ranks as asked for."""
    commands = fake_machine(monkeypatch, limit)
    free = step_bytes("gpt2", 64 if label != "0" else 32, 1024, label) / runner.MEMORY_SHARE
    ranks = 3 if label in ("ddp", "fsdp") else 1
    monkeypatch.setattr(runner, "run_module", lambda *_: free * ranks)
    best, speed, why = runner.largest_batch(BY_LABEL[label], ["--device", "cpu"], tmp_path, 60, 3, lambda line: None)
    assert best <= limit <= best + max(1, best // 8) and (speed or not best) and "out of memory" in why
    assert len(commands) <= (5 if limit > 9 else 8)
    for command in commands:
        B = command[command.index("-B") + 1]
        assert ("--nproc_per_node=3" in command) == (ranks == 3)
        assert ("--total-batch" in command) == (label in ("14", "fsdp"))
        if "--total-batch" in command:
            assert command[command.index("--total-batch") + 1] == str(int(B) * 1024 * ranks)  # one micro-step


def test_the_search_for_the_largest_batch_ends_at_its_deadline(monkeypatch, tmp_path):
    """A clock that each attempt moves on by all that it may take; without the deadline every one would get 600 s."""
    clock = [1000.0]

    def run_job(job, seconds, device):
        clock[0] += min(seconds, 70)
        return runner.Outcome(job.name, "timed out", "")

    monkeypatch.setattr(runner, "run_job", run_job)
    monkeypatch.setattr(runner, "run_module", lambda *_: 40e9)
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    runner.largest_batch(BY_LABEL["7"], ["--device", "cpu"], tmp_path, 600, 1, lambda line: None, deadline=1100.0)
    assert clock[0] == 1100


@pytest.mark.parametrize("has_name", [True, False], ids=["Linux", "Windows"])
def test_a_killed_child_is_out_of_memory_and_any_other_failed(has_name, monkeypatch, tmp_path):
    if not has_name:
        monkeypatch.delattr(signal, "SIGKILL")
    for ending, status in (("os.kill(os.getpid(), 9)", "out of memory"), ("sys.exit(3)", "failed")):
        job = Job("job", [sys.executable, "-c", f"import os, sys; {ending}"], tmp_path)
        assert run_job(job, 60, "cuda").status == status


@pytest.mark.slow
def test_max_batch_finds_the_largest(real_text, tmp_path):
    """Here the text ends before the memory does: 3,600 tokens are three sequences of 1,024."""
    words = ["--model", "tiny", "--device", "cpu", "-T", 1024, "--compile-mode", "none"]
    data = make_tokens(tmp_path / "tokens", real_text[:4000])
    run = ladder("run", "--rungs", "10", "--max-batch", "--data", data, *words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.search(r"fused AdamW.*?│\s*(\d+)", run.stdout)[1]) == 3


def test_a_child_that_takes_too_much_memory_is_stopped_on_a_cpu(monkeypatch, tmp_path):
    """Pages that processes share count once, and on a GPU nobody watches: what fills up there is not this memory."""
    script = "import os, time\nx = b'1' * 150_000_000\n[os.fork() for _ in range(2)]\ntime.sleep(3)"
    child = subprocess.Popen([sys.executable, "-c", script])
    time.sleep(1.5)
    assert runner.holds_more(child.pid, 150e6) and not runner.holds_more(child.pid, 350e6)  # RSS: more than 600 MB
    runner.stop(child)
    memory = psutil.virtual_memory()._replace(available=100e6)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    job = Job("hungry", [sys.executable, "-c", "import time; x = b'1' * 150_000_000; time.sleep(1)"], tmp_path)
    assert run_job(job, 60, "cpu").status == "out of memory"
    assert run_job(job, 60, "cuda").status == "ok"
    job.memory = 400e6  # its share of what was free when nothing else ran
    assert run_job(job, 60, "cpu").status == "ok"


def test_rungs_and_flags(call, tmp_path):
    def labels(text):
        return [stage.label for stage in parse_rungs(text)]

    assert labels("0-2,10") == ["0", "1", "2", "10"]
    assert labels("ddp, 11,9-11") == ["ddp", "11", "9", "10"]  # each once: a second one would overwrite the first's log
    for wrong in ("99", "3-1", "a", "", "-1", "0-99", "1-2-3", "3-"):
        with pytest.raises(UserError, match="--rungs"):
            parse_rungs(wrong)

    def command(label, *flags, **more):
        return command_for(BY_LABEL[label], list(flags), Path("x"), **more)[1:]

    assert command("4", "--compile-mode", "none", "-B", "1")[1:] == ["-B", "1", "--log-dir", "x"]
    assert command("4", "--compile-mode=none", "-B", "1")[1:] == ["-B", "1", "--log-dir", "x"]
    assert "--compile-mode" in command("5", "--compile-mode", "none")
    assert "--nproc_per_node=3" in command("ddp", processes=3) and "--nproc_per_node=3" in command("fsdp", processes=3)
    assert "--checkpoint-every" not in command("13")
    assert command("14")[1:3] == command("16")[1:3] == ["--checkpoint-every", "0"]
    assert command_for(None, [], Path("x"))[1].endswith("peer_transformers.py")
    jobs = plan([BY_LABEL["0"]], [], Path("x"), repeat=2, peers=True)
    assert [job.name for job in jobs] == ["baseline", PEER] * 2
    assert [job.log_dir.name for job in jobs] == ["round_1", "round_1", "round_2", "round_2"]
    assert is_one_error(call("run", "--rungs", 0, "--logs", tmp_path / "a", "--save=x"), "--save")


MEDIAN = "\nmedian : dt: 50.00 ms | tokens/sec: 1.00 | peak memory: 1.00 GB | steps 3-3\n"


def write_log(path, ms=(100, 50, 50), losses=None, header="# batch: B=4 T=1024 | steps: 3 | seed: 1\n", tail="\n"):
    losses = losses or [10 - i for i in range(len(ms))]
    lines = [f"step : {i + 1} | loss: {losses[i]} | dt: {ms[i]} ms | tokens/sec: 1.0" for i in range(len(ms))]
    path.write_text(header + "\n".join(lines) + tail)
    return path


def test_a_log_of_a_foreign_script(tmp_path, call):
    """Step lines without headers: B, T and model come from flags, and units in the file are not believed."""
    log = write_log(tmp_path / "foreign.log", header="some chatter\n")
    run = read_log(log, B=8, T=512, model="gpt2")
    assert (run.name, run.median_ms, run.tokens_per_second) == ("foreign", 50, 8 * 512 / 0.05)
    assert read_log(log).tokens_per_second is None
    for where in ([tmp_path], ["--logs", tmp_path]):
        code, output, _ = call("report", *where, "-B", 8, "-T", 512, "--model", "gpt2")
        assert code == 0 and "81,920" in output


def test_tokens_per_millisecond_are_called_so(tmp_path, call):
    """The log of a script that reads the clock too early and divides by milliseconds: 6 * 1024 tokens in 4.5 ms."""
    path = tmp_path / "train_gpt2.log"
    path.write_text("".join(f"step : {i} | loss: 9.0 | dt: 4.50 ms | tokens/sec: 1365.50\n" for i in range(20)))
    code, output, _ = call("report", tmp_path, "-B", 6, "-T", 1024, "--model", "gpt2")
    assert code == 0 and "1,365.5 tokens/sec where B * T * ranks / dt is 1,365,333.3: " in output
    assert "tokens per millisecond" in output and "no MFU; --peak-tflops can stand in" in output
    path.write_text(path.read_text().replace("1365.50", "682666.67"))
    assert "off by a factor of 2" in call("report", tmp_path, "-B", 6, "-T", 1024)[1]
    path.write_text(path.read_text().replace("682666.67", "1365333.33"))
    assert "B * T" not in call("report", tmp_path, "-B", 6, "-T", 1024)[1]


def test_a_given_rate_stands_in_for_a_measured_one(tmp_path, call):
    header = "# model: gpt2\n# batch: B=6 T=1024 | steps: 12\n"
    write_log(tmp_path / "baseline.log", ms=[4.5] * 12, header=header, tail=MEDIAN)
    code, output, _ = call("report", tmp_path, "--peak-tflops", 119)
    share = flops_per_token("gpt2", 1024) * 6 * 1024 / 4.5e-3 / 119e12
    assert code == 0 and f"MFU {share:.0%} is an impossible measurement" in output and share > 5
    assert "MFU is of 119.00 TFLOP/s, given by --peak-tflops" in " ".join(output.split())
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 1e18}}))
    output = " ".join(call("report", tmp_path, "--peak-tflops", 119)[1].split())
    assert "fastest matrix products measured: 1000000.00 TFLOP/s in bfloat16" in output and "--peak" not in output
    for wrong in ("0", "-1", "nan", "inf", "x"):
        assert call("report", tmp_path, "--peak-tflops", wrong)[0] == 2


def test_a_log_cut_in_the_middle_of_a_line(tmp_path):
    log = write_log(tmp_path / "cut.log", tail="\nstep : 4 | loss: 5 | dt: 1")
    assert read_log(log).steps == [1, 2, 3] and not read_log(log).complete


def test_a_run_that_a_signal_stopped_is_not_complete(tmp_path):
    """Rung 15 prints its median then, too: the header's number of steps decides."""
    header = "# batch: B=4 T=1024 | steps: {} | seed: 1\n"
    assert read_log(write_log(tmp_path / "a.log", header=header.format(3), tail=MEDIAN)).complete
    assert not read_log(write_log(tmp_path / "a.log", header=header.format(8), tail=MEDIAN)).complete
    assert not read_log(write_log(tmp_path / "a.log", header=header.format(3))).complete


def test_the_median_is_the_log_s_own(tmp_path):
    """On a GPU the scripts leave out at least 3 seconds; their median line says which steps count."""
    tail = MEDIAN.replace("3-3", "6-8")
    log = read_log(write_log(tmp_path / "a.log", ms=[900] * 5 + [50, 51, 52], tail=tail))
    assert (log.warm_up, log.median_ms) == (5, 51)


def test_the_first_step_is_cold_or_warm(tmp_path, call):
    lines = {"a": "\n# first step: 0.10 s | graphs compiled: 3, from the cache: 0\n",
             "b": "\n# first step: 0.50 s | graphs compiled: 0, from the cache: 3\n",
             "c": "\n# first step: 0.10 s | graphs compiled: 0, from the cache: 0\n", "d": "\n"}
    logs = {name: write_log(tmp_path / f"{name}.log", tail=tail) for name, tail in lines.items()}
    assert [read_log(log).start for log in logs.values()] == ["cold", "warm", None, None]
    for number, name in ((1, "a"), (2, "b")):
        (tmp_path / f"round_{number}").mkdir()
        shutil.copy(logs[name], tmp_path / f"round_{number}" / "speedup_05_compile.log")
    row = [row for row in build_report(tmp_path).rows if row.name == "speedup_05_compile"][0]
    assert (row.cold_first_step_s, row.warm_first_step_s) == (0.1, 0.1)
    output = " ".join(call("report", tmp_path)[1].split())
    assert "0.1 cold, 0.1 warm" in output and "1st step s: cold compiled its graphs, warm found them in" in output
    shutil.rmtree(tmp_path / "round_1")
    shutil.rmtree(tmp_path / "round_2")
    logs["a"].unlink()
    logs["b"].unlink()
    assert "compiled" not in call("report", tmp_path)[1]


def test_logs_of_several_runs_are_not_taken_for_rounds(tmp_path, call):
    for name in ("one_run", "another"):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "baseline.log")
    assert is_one_error(call("report", tmp_path), "holds no logs")


@pytest.mark.parametrize("content, reason", [
    (None, "no such log"), (b"", "no step line"), (b"\xff\x00\xfe" * 50, "not a text file"),
    (b"hello\n", "no step line"),
])
def test_logs_that_are_none(content, reason, tmp_path, call):
    log = tmp_path / "x.log"
    if content is not None:
        log.write_bytes(content)
    good = write_log(tmp_path / "good.log")
    assert is_one_error(call("compare", good, log), reason)


def test_a_rung_without_a_step_does_not_hide_the_others(tmp_path):
    write_log(tmp_path / "baseline.log")
    (tmp_path / "speedup_02_tf32.log").write_text("# script: speedup_02_tf32.py\n")
    report = build_report(tmp_path)
    assert [row.name for row in report.rows] == ["baseline"]
    assert any("speedup_02_tf32.log has no step line" in warning for warning in warnings(report))


def test_damaged_files_are_named_and_the_others_reported(tmp_path, call):
    write_log(tmp_path / "baseline.log", tail=MEDIAN)
    (tmp_path / "binary.log").write_bytes(bytes(range(256)))
    (tmp_path / "folder.log").mkdir()
    write_log(tmp_path / "ranks.log", header="# batch: B=4 T=1024 | steps: 3\n# ranks: x\n")
    write_log(tmp_path / "no_ranks.log", header="# batch: B=4 T=1024 | steps: 3\n# ranks: 0\n")
    write_log(tmp_path / "still.log", ms=(100, 0, 50))
    (tmp_path / "machine.json").write_text('{"rates": {}}')
    code, output, _ = call("report", tmp_path)
    assert code == 0 and "81,920" in output
    lines = [line for line in output.splitlines() if line.startswith("! skipped: ")]
    named = {"binary.log": "not a text file", "folder.log": "is a folder", "ranks.log": "'x' is not a number",
             "no_ranks.log": "'0' is not a number", "still.log": "0.0 ms", "machine.json": "is damaged"}
    for name, why in named.items():
        assert sum(f"/{name} " in line and why in line for line in lines) == 1, output
    assert len(lines) == 6


def mutated(data, rng):
    """A file's bytes with one thing wrong with them."""
    lines = data.splitlines(keepends=True) or [b""]
    i, at = rng.randrange(len(lines)), rng.randrange(len(data) + 1)
    odd = [b"nan", b"inf", b"-1", b"0", b"1e400", b"9" * 5000, b"", b"x", b"\xff", b"\0", b" | ", b"$", b"[/b]"]
    not_machines = [b"", b"{}", b"[]", b"null", b'{"rates": 1}', b'{"rates": {"x": "y"}}', b'{"rates": {"x": 0}}']
    numbers = list(re.finditer(rb"\d+(?:\.\d+)?", data)) or [re.match(b"", data)]
    number = rng.choice(numbers)
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: b"".join(lines[:i] + lines[i + 1 :]),
        lambda: b"".join([*lines[:i], lines[i], *lines[i:]]),
        lambda: data[: number.start()] + rng.choice(odd) + data[number.end() :],
        lambda: data.replace(lines[i].split(b": ")[-1], rng.choice(odd)),
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
        lambda: rng.choice(not_machines),
    ])()


def test_no_damage_ends_in_a_traceback(tmp_path, call):
    """A report says in one line that it cannot compare, or shows what is left; the numbers are valid JSON."""
    source = tmp_path / "source"
    shutil.copytree(WHOLE / "round_1", source / "round_1")
    shutil.copytree(WHOLE / "round_2", source / "round_2")
    for name in ("machine.json", "profile.json"):
        shutil.copy(WHOLE / name, source)
    for path in source.glob("round_*/speedup_0[1-9]*.log"):
        path.unlink()
    for seed in range(100):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(source, folder)
        (folder / "round_2" / "peer_transformers.log").rename(folder / "ddp_run.log")
        for path in rng.sample(sorted(path for path in folder.rglob("*") if path.is_file()), 2):
            path.write_bytes(mutated(path.read_bytes(), rng))
        code, output, error = call("report", folder, *(["--json"] if seed % 2 else []))
        assert code == 0 or is_one_error((code, output, error)), seed
        if seed % 2 and code == 0:
            json.loads(output, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_different_machines_are_not_mixed(tmp_path, call):
    for name, device in (("a", "H200"), ("b", "T4")):
        header = f"# script: {name}.py\n# device: {device} | torch: 2\n# batch: B=4 T=1024 | steps: 3\n"
        write_log(tmp_path / f"{name}.log", header=header)
    assert is_one_error(call("report", tmp_path), "different device")


def test_impossible_speeds_are_marked(tmp_path):
    write_log(tmp_path / "baseline.log", ms=(4.5,) * 12, header="# model: gpt2\n# batch: B=4 T=1024 | steps: 12\n")
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 119e12}}))
    report = build_report(tmp_path)
    assert report.rows[0].mfu > 5
    assert any("impossible measurement" in warning for warning in warnings(report))


@pytest.mark.parametrize("devices, refused", [
    (("EPYC (2 threads)", "cpu"), False), (("EPYC (2 threads)", "EPYC (1 threads)"), False),
    (("EPYC (2 threads)", "Xeon (2 threads)"), True)])
def test_a_cpu_that_nobody_named_may_be_the_same(devices, refused, tmp_path):
    """A script alone does not name it, nor does the log of one that was stopped; a resumed run has both."""
    for stage, device in zip(STAGES[:2], devices, strict=True):
        header = f"# script: {stage.name}.py\n# device: {device}\n# batch: B=1 T=8\n"
        write_log(tmp_path / f"{stage.name}.log", header=header)
    if refused:
        with pytest.raises(UserError, match="different device"):
            build_report(tmp_path)
    else:
        assert len(build_report(tmp_path).rows) == 2


@pytest.mark.parametrize("device, ms, warned", [
    ("NVIDIA A100", [2000, *[100] * 19], True), ("NVIDIA A100", [2200, *[100] * 19], False),
    ("EPYC (2 threads)", [2000, *[100] * 19], False)])
def test_a_short_warm_up_of_a_gpu_is_said(device, ms, warned, tmp_path):
    header = f"# script: baseline.py\n# device: {device}\n# batch: B=4 T=1024\n"
    write_log(tmp_path / "baseline.log", ms=ms, header=header)
    assert any("less than 3 s" in warning for warning in warnings(build_report(tmp_path))) == warned


@pytest.mark.parametrize("tokens, vocab_size", [
    ("gpt2", 50257), ("gpt2-bytes", 50257), ("bytes", 257), ("bpe-4096", 4096), ("my-model", None)])
def test_mfu_counts_the_vocabulary_of_the_data(tokens, vocab_size, tmp_path):
    write_log(tmp_path / "baseline.log", header="# model: 4x4x128\n# batch: B=4 T=64 | steps: 3\n"
                                                f"# data: my text ({tokens} tokens) | loaded 9 tokens\n")
    run = read_log(tmp_path / "baseline.log")
    assert run.vocab_size == vocab_size
    share = mfu(run, {"float32": 1e12}, 1000)
    assert share == (vocab_size and flops_per_token("4x4x128", 64, vocab_size=vocab_size) * 1000 / 1e12)


def test_compare_in_words(tmp_path, tokens, call):
    small = ("-B", 1, "-T", 64, "--steps", 12)
    tied = read_log(train(rung(1), tmp_path, tokens, *small))
    tf32 = read_log(train(rung(2), tmp_path, tokens, *small))
    base = read_log(train(rung(0), tmp_path, tokens, *small))
    assert "The same losses" in compare(tied, tf32).sentences[0]
    assert "meant to change them" in compare(base, tied).sentences[0]
    tf32.losses[3] += 1
    assert "NOT the same losses" in compare(tied, tf32).sentences[0]

    slow = read_log(write_log(tmp_path / "slow.log", ms=[100, 101, 102, 100] * 5))
    fast = read_log(write_log(tmp_path / "fast.log", ms=[50, 51, 52, 50] * 5))
    assert "larger than the noise" in compare(slow, fast).sentences[-1]
    assert compare(slow, fast).faster == pytest.approx(2, rel=0.02)
    noisy = read_log(write_log(tmp_path / "noisy.log", ms=[60, 90, 120, 150] * 5))
    assert "within the noise" in compare(slow, noisy).sentences[-1]
    code, output, _ = call("compare", tmp_path / "slow.log", tmp_path / "fast.log")
    assert code == 0 and "2.0" in output and "larger than the noise" in output


def test_compare_does_not_judge_what_does_not_compare(tmp_path):
    """Of different work neither the speed nor the losses; of other data or seeds not the losses; of devices both."""
    first = "# model: gpt2\n# device: T4\n# batch: B=4 T=1024 | steps: 20 | seed: 1\n# data: a (gpt2 tokens)\n"

    def sentences(change):
        one = read_log(write_log(tmp_path / "a.log", ms=[100] * 20, header=first, tail=MEDIAN))
        other = read_log(write_log(tmp_path / "b.log", ms=[50] * 20, header=first.replace(*change), tail=MEDIAN))
        result = compare(one, other)
        return " ".join(result.sentences), result

    text, result = sentences(("x", "x"))
    assert "larger than the noise" in text and result.faster == pytest.approx(2) and "Different" not in text
    for change, what in ((("gpt2\n", "tiny\n"), "model"), (("B=4", "B=8"), "B"), (("T=1024", "T=512"), "T")):
        text, result = sentences(change)
        assert f"Different {what}: " in text and f"with a different {what}: this does not measure" in text, text
        assert "noise" not in text and "The losses do not compare step by step" in text
    assert "4.00 times" in sentences(("B=4", "B=8"))[0]
    for change, what in ((("a (gpt2", "b (gpt2"), "data"), (("seed: 1", "seed: 2"), "seed")):
        text, _ = sentences(change)
        assert f"The losses do not compare step by step: different {what}." in text and "larger than the noise" in text
    text, _ = sentences(("T4", "H200"))
    assert "Different device: T4 against H200." in text and "larger than the noise" in text
    assert "do not compare" not in text


def test_compare_counts_the_tokens_of_all_ranks(tmp_path):
    """Twice the tokens in the same time, to within the noise of a step, is twice the speed beyond the noise."""
    header = "# batch: B=4 T=1024 | steps: 20\n# ranks: {}\n"
    one, two = (read_log(write_log(tmp_path / f"{ranks}.log", ms=[100, 105, 95, 101] * 5, header=header.format(ranks)))
                for ranks in (1, 2))
    result = compare(one, two)
    assert result.faster == pytest.approx(2) and "larger than the noise" in result.sentences[-1]
    assert "Different tokens per step: 4096 against 8192." in result.sentences
    half = read_log(write_log(tmp_path / "half.log", ms=[100] * 20, header=header.format(2).replace("B=4", "B=2")))
    text = " ".join(compare(one, half).sentences)
    assert "Different B: 4 against 2." in text and "The losses of the same tokens" in text and "per step" not in text


@pytest.mark.parametrize("ms, verdict", [
    ((500,), "too few steps to say"), ((500, *[50] * 17), "too few steps to say"),  # the first half warms up
    ((500, *[50] * 18), "larger than the noise"),
])
def test_compare_needs_steps_after_the_warm_up(ms, verdict, tmp_path):
    one = read_log(write_log(tmp_path / "one.log", ms=ms))
    other = read_log(write_log(tmp_path / "other.log", ms=[2 * one for one in ms]))
    result = compare(one, other)
    assert verdict in result.sentences[-1] and result.beyond_noise == (verdict == "larger than the noise")


ALLOCATORS = "# script: {}.py\n# device: {} | allocator: {}\n# batch: B=4 T=1024 | steps: 20 | seed: 1\n"


@pytest.mark.parametrize("device, one, other, different", [
    ("EPYC (2 threads)", "malloc", "tcmalloc", "malloc against tcmalloc"),
    ("EPYC (2 threads)", "", "tcmalloc", "unknown against tcmalloc"), ("EPYC (2 threads)", "malloc", "malloc", None),
    ("NVIDIA H200", "", "torch", None),
])
def test_compare_names_different_allocators(device, one, other, different, tmp_path):
    logs = [read_log(write_log(tmp_path / f"{side}.log", ms=[ms] * 20, tail=MEDIAN,
                               header=ALLOCATORS.format("baseline", device, name).replace(" | allocator: \n", "\n")))
            for side, ms, name in (("a", 100, one), ("b", 50, other))]
    text = " ".join(compare(*logs).sentences)
    assert "The same losses" in text  # which no allocator changes
    assert (f"Different allocator: {different}." in text) == bool(different) == ("may be the allocator's" in text)


def test_a_report_names_its_allocators_and_warns_of_several(tmp_path, call):
    for number, names in enumerate((("malloc", "malloc"), ("malloc", "tcmalloc")), 1):
        (tmp_path / f"round_{number}").mkdir()
        for script, name in zip(("baseline", "speedup_01_weight_tying"), names, strict=True):
            write_log(tmp_path / f"round_{number}" / f"{script}.log", header=ALLOCATORS.format(script, "EPYC", name))
    output = " ".join(call("report", tmp_path)[1].split())
    assert "! the runs had different memory allocators (malloc: baseline, weight tying; tcmalloc: weight " in output
    assert "EPYC (allocator: malloc and tcmalloc)" in output
    output = " ".join(call("report", tmp_path / "round_1")[1].split())
    assert "allocators" not in output and "EPYC (allocator: malloc), unknown model" in output


def test_a_ratio_within_the_noise_is_called_so(tmp_path, monkeypatch, call):
    """Rungs 11, 12 and 13: the second as fast as the first, the third faster than the spread of either."""
    names = [BY_LABEL[label].name for label in ("11", "12", "13")]
    for number, times in enumerate(((100, 98, 50), (110, 109, 52)), 1):
        folder = tmp_path / "machine" / f"round_{number}"
        folder.mkdir(parents=True)
        for name, ms in zip(names, times, strict=True):
            write_log(folder / f"{name}.log", ms=[ms] * 8, header="# batch: B=4 T=1024 | steps: 8\n", tail=MEDIAN)
    report = build_report(tmp_path / "machine")
    assert [row.before_within_noise for row in report.rows] == [None, True, False]
    table = beyond_table(report)
    assert "| 1.01 (noise) |" in table and "| 2.03 |" in table and "the spreads of the two rungs overlap" in table
    assert "1.01 (noise)" in call("report", tmp_path / "machine")[1]
    monkeypatch.setattr(tool, "REFERENCE", tmp_path)
    assert ("105 (100–110) -> 104 (98–109) ms/step (1.01 x the tokens/sec, within the noise: the spreads overlap)"
            in call("diff", 12)[1])
    assert "104 (98–109) -> 51 (50–52) ms/step (2.03 x the tokens/sec), 1.00" in call("diff", 13)[1]


def test_compare_does_not_pass_over_nan(tmp_path):
    logs = [read_log(write_log(tmp_path / f"{name}.log", losses=losses))
            for name, losses in (("speedup_04_residual_scaling", [3, 2, 1]), ("speedup_05_compile", [3, 2, "nan"]))]
    assert compare(*logs).sentences[-2].startswith("NOT the same losses")


def test_compare_knows_what_lies_between_two_rungs(tmp_path):
    def verdict(one, other, losses):
        logs = [read_log(write_log(tmp_path / f"{BY_LABEL[label].name}.log", losses=loss, tail=MEDIAN))
                for label, loss in ((one, None), (other, losses))]
        return compare(*logs).sentences[0]

    nearly = [10.0001, 9.001, 8.0]
    assert verdict("1", "3", nearly).startswith("The same losses") and "0.15" in verdict("1", "3", nearly)
    assert verdict("16", "11", nearly).startswith("The same losses")  # in either order
    assert verdict("13", "14", [10, 9, 7]).startswith("NOT the same losses")
    for one, other in (("3", "4"), ("10", "ddp"), ("2", "9"), ("ddp", "11")):
        assert "meant to change them" in verdict(one, other, nearly)


def test_csv_and_json(measured, call):
    logs, _ = measured
    code, output, _ = call("report", logs, "--json")
    report = json.loads(output)[0]
    assert code == 0 and "PaLM" in report["mfu"]
    assert [row["name"] for row in report["rows"]] == ["baseline", "speedup_01_weight_tying"]
    row = build_report(logs).rows[1]
    for name in ("ms", "mfu", "mfu_causal", "last_loss", "last_val_loss"):
        assert report["rows"][1][name] == pytest.approx(getattr(row, name))
    lines = call("report", logs, "--csv")[1].splitlines()
    assert len(lines) == 3 and lines[0].startswith("machine,name,title,ms,") and lines[1].startswith("logs,baseline,")


def test_plots_are_pictures(measured, tmp_path, call):
    logs, _ = measured
    code, _, error = call("report", logs, "--png", tmp_path)
    assert code == 0, error
    pictures = sorted(tmp_path.glob("*.png"))
    assert [p.name for p in pictures] == ["logs_ladder.png", "logs_loss.png", "logs_memory.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in pictures)


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("logs/reference/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)


def test_every_picture_is_shown_somewhere():
    assert {path.name for path in ROOT.glob("docs/*.png")} == shown_in_docs(ROOT)


def test_the_committed_tables_are_the_reference_logs(tmp_path, measured):
    """README.md and docs/ say what the committed logs say."""
    (tmp_path / "docs").mkdir()
    tables = ["README.md", "docs/results.md", "docs/long_runs.md", "docs/race.md"]
    for file in tables:
        shutil.copy(ROOT / file, tmp_path / file)
    write_tables([build_report(folder) for folder in REFERENCE], tmp_path)
    for file in tables:
        assert (tmp_path / file).read_text() == (ROOT / file).read_text(), "run python -m ladder report --readme"
    table = markdown_table(build_report(measured[0]))
    assert "| 1 | [`speedup_01_weight_tying.py`](speedup_01_weight_tying.py) | weight tying |" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and {row.count("|") for row in rows} == {12} and "PaLM" in table
    (tmp_path / "docs" / "race.md").write_text("no markers")
    with pytest.raises(UserError, match="docs/race.md must hold"):
        write_tables([], tmp_path)


def test_seconds_to_a_validation_loss(tmp_path, call):
    """Three steps of 100 ms, a validation after the second and the third; the time of validating does not count."""
    lines = ["# batch: B=1 T=10", "# model: tiny | parameters: 1"]
    for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0)):
        lines.append(f"step : {step} | loss: {loss} | dt: 100.00 ms | tokens/sec: 100.00")
        lines += [f"val : step {step} | loss: {loss + 0.5} | time: 60.00 s"] if step > 1 else []
    (tmp_path / "rung_13_validation.log").write_text("\n".join(lines) + "\n")
    run = read_log(tmp_path / "rung_13_validation.log")
    assert (run.val_steps, run.val_losses) == ([2, 3], [8.5, 7.5])
    assert run.losses == [9.0, 8.0, 7.0]  # a validation is not a step
    assert run.seconds_to_val(8.5) == pytest.approx(0.2) and run.seconds_to_val(7.4) is None
    row = build_report(tmp_path).rows[0]
    assert (row.last_val_loss, row.seconds_to_common_val_loss) == (7.5, pytest.approx(0.3))
    assert "| 7.000 | 7.500 |" in beyond_table(build_report(tmp_path))
    shown = call("report", tmp_path)[1]
    assert "val loss" in shown and "s to val 7.50" in shown
    shown = " ".join(shown.split())
    assert "s to 7.00: seconds to the first step with this loss, the lowest that all reach" in shown
    assert "s to val 7.50: seconds to the first validation with this loss" in shown
    assert "s to 7.00" not in beyond_table(build_report(tmp_path))  # which has no such column


def test_reference_logs_are_possible():
    assert REFERENCE
    for folder in REFERENCE:
        report = build_report(folder)
        check_comparable(report.runs, folder)
        for rounds in report.runs.values():
            for run in rounds:
                assert run.complete and run.name in {*BY_NAME, PEER}
                assert not report.machine or 0 < mfu(run, report.machine["rates"], run.tokens_per_second) < 1


def snapshot(folder):
    return {path.name: path.read_text() for path in folder.rglob("*.py*")}


def test_a_run_never_touches_the_logs_of_another(tmp_path, tokens, call):
    mine = write_log(tmp_path / "baseline.log")
    before = snapshot(tmp_path)
    assert is_one_error(call("run", "--rungs", 0, "--logs", tmp_path, *flags(tokens)), "not empty", "--resume")
    assert is_one_error(call("run", "--resume", "--logs", tmp_path), "holds no run")
    (tmp_path / "machine.json").write_text("{")
    assert is_one_error(call("run", "--resume", "--logs", tmp_path), "is damaged")
    (tmp_path / "machine.json").unlink()
    assert snapshot(tmp_path) == before and mine.exists()


REFUSED = [["--bogus", 3], ["-B", 0], ["--compile-mode", "fast"], ["--save", "x"], ["--data", "no/such/folder"],
           ["-B", 1_000_000], ["--resume"], ["--repeat", 0], ["--rungs", "0-77"]]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda words: " ".join(map(str, words)))
def test_refused_flags_leave_no_trace(refused, tmp_path, tokens, monkeypatch, call):
    """Neither of themselves, nor in the results of the run before."""
    monkeypatch.setattr(tool, "RUNS", tmp_path / "runs")
    (tmp_path / "runs" / "last").mkdir(parents=True)
    write_log(tmp_path / "runs" / "last" / "baseline.log", losses=[4, 5, 6], tail=MEDIAN)
    (tmp_path / "runs" / "last" / "machine.json").write_text('{"rates": {"x": 1}}')
    before = files_in(tmp_path)
    code, output, error = call("run", "--rungs", "0,5", *flags(tokens), *refused)
    assert code in (1, 2) and "error: " in error and str(refused[0]) in error and output == ""
    assert files_in(tmp_path) == before and "6.000" in call("report")[1]


def files_in(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_usage_errors_name_the_command(call, monkeypatch, tokens):
    monkeypatch.setattr(sys, "argv", ["/somewhere/ladder/__main__.py"])
    for words in (["run", "--bogus", 3, *flags(tokens)], ["profile", "-B", "x"], ["report", "--bogus"],
                  ["run", "--race", 2, "--max-batch"]):
        code, _, error = call(*words)
        assert code == 2 and error.splitlines()[-1].startswith(f"python -m ladder {words[0]}: error: "), error
        assert "__main__" not in error


@pytest.fixture
def fake_run(tmp_path, monkeypatch, tokens, call):
    """A run in RUNS whose job does as it is told, instead of training."""
    monkeypatch.setattr(tool, "RUNS", tmp_path / "runs")

    def run(do, *words):
        monkeypatch.setattr(runner, "run_job", lambda job, *_: do(job) or runner.Outcome(job.name, "ok"))
        return call("run", "--rungs", 0, *flags(tokens), *words)

    return run


def test_every_run_has_its_folder_and_the_newest_is_shown(fake_run, call):
    for words in (["report"], ["run", "--resume"]):
        assert is_one_error(call(*words), "holds no run")
    assert fake_run(lambda job: write_log(job.log_dir / "baseline.log", losses=[1, 2, 3], tail=MEDIAN) and None)[0] == 0
    first = tool.newest_run()
    time.sleep(1.1)  # folders are called by the second
    assert fake_run(lambda job: write_log(job.log_dir / "baseline.log", losses=[4, 5, 6], tail=MEDIAN) and None)[0] == 0
    second = tool.newest_run()
    assert second != first and len(list(tool.RUNS.iterdir())) == 2 and "6.000" in call("report")[1]
    assert json.loads((first / "machine.json").read_text())["arguments"][:3] == ["run", "--rungs", "0"]
    shutil.copytree(first, tool.RUNS / "killed")  # before its first step: nothing to show, but to be resumed
    (tool.RUNS / "killed" / "baseline.log").write_text("# script: baseline.py\n")
    os.utime(tool.RUNS / "killed" / "machine.json")
    assert tool.newest_run() == second and tool.newest_run(Path.exists).name == "killed"


def test_a_run_that_is_stopped_keeps_what_it_has(fake_run):
    def interrupt(job):
        raise KeyboardInterrupt

    code, output, _ = fake_run(interrupt)
    assert code == 130 and "no rung finished a step" in output and not list(tool.RUNS.iterdir())

    def interrupt_later(job):
        write_log(job.log_dir / "baseline.log")
        raise KeyboardInterrupt

    code, output, _ = fake_run(interrupt_later)
    assert code == 130 and f"run --resume --logs {tool.newest_run()} continues" in output and "baseline" in output


def test_ctrl_c_during_a_search_says_how_far_it_is(fake_run, call):
    done = []

    def interrupt_the_second(job):
        job.log_dir.mkdir(parents=True)
        write_log(job.log_dir / f"{job.name}.log", header="# batch: B=1 T=32 | steps: 3 | seed: 1\n",
                  tail="\nval : step 3 | loss: 5.0 | time: 0.1 s" + MEDIAN if not done else "\n")
        done.append(job)
        if len(done) == 2:
            raise KeyboardInterrupt

    code, output, _ = fake_run(interrupt_the_second, "--rungs", "16-18", "--race", 2, "--warmup-steps", 1)
    assert code == 130 and "race: at least 23 runs" in output and len(done) == 2, output
    assert "has finished 1 of at least 8 runs (rung 16: 1, rung 18: 0)" in output
    assert f"run --resume --logs {tool.newest_run(Path.exists)} continues" in output and "no table" not in output


def test_without_folders_each_output_shows_its_own(tmp_path, monkeypatch, call):
    """One's own newest run in the table and the plots, the reference machines in page and README."""
    made = {}
    monkeypatch.setattr(tool, "RUNS", tmp_path)
    (tmp_path / "mine").mkdir()
    write_log(tmp_path / "mine" / "baseline.log", tail=MEDIAN)
    (tmp_path / "mine" / "machine.json").write_text('{"rates": {"x": 1}}')

    def maker(kind):
        def make(reports, *where):
            made[kind] = [report.name for report in reports]
            return where[0].write_text("") if kind == "html" else []

        return make

    monkeypatch.setitem(sys.modules, "ladder.show.plots", SimpleNamespace(
        write_plots=maker("png"), shown_in_docs=lambda root: set()))
    monkeypatch.setitem(sys.modules, "ladder.show.page", SimpleNamespace(write_page=maker("html")))
    monkeypatch.setattr("ladder.show.report.write_tables", maker("readme"))
    own, reference, page = ["mine"], [folder.name for folder in REFERENCE], ["--html", tmp_path / "page.html"]
    for words, expected in (
        (["--png", "x"], {"png": own}),
        (["--png", "x", *page], {"png": own, "html": reference}),
        (page, {"html": reference}),
        (["--readme", *page, "--png", "x"], {"readme": reference, "html": reference, "png": reference}),
        ([REFERENCE[0], "--png", "x", *page], {"png": reference[:1], "html": reference[:1]}),
    ):
        made.clear()
        assert call("report", *words)[0] == 0 and made == expected, words
    assert json.loads(call("report", "--json", *page)[1])[0]["name"] == "mine"
    assert "Without LOG_FOLDER" in call("report", "--help")[1]


def test_two_runs_do_not_share_a_folder(tmp_path, tokens, call):
    with filelock.FileLock(tmp_path / "lock"):
        assert is_one_error(call("run", "--rungs", 0, "--logs", tmp_path, *flags(tokens)), "another run is using it")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["lock"])


def test_mfu_of_ranks_counts_their_gpus(tmp_path):
    header = "# model: gpt2\n# device: {}\n# ranks: 2 | x: y\n# batch: B=4 T=1024 | steps: 3\n"
    gpu = read_log(write_log(tmp_path / "a.log", header=header.format("NVIDIA H200")))
    cpu = read_log(write_log(tmp_path / "b.log", header=header.format("AMD EPYC (1 threads)")))
    rates = {"bfloat16": 1e15}
    assert mfu(cpu, rates, 1000) == pytest.approx(2 * mfu(gpu, rates, 1000))


def test_check_says_what_is_here(monkeypatch, call):
    run = ladder("check", CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR="/tmp/empty-inductor-cache")
    assert run.returncode == 0, run.stderr
    for word in ("device", "torch", "TF32", "bfloat16", "torch.compile", "attention", "fused AdamW", "NCCL",
                 "free disk", "data", "tokenizer"):
        assert word in run.stdout
    assert re.search(r"python -m ladder run --model \S+ -B \d+ -T \d+", run.stdout)
    assert "NVIDIA GPU" not in run.stdout
    assert "✗ torch.compile: does not work" in run.stdout and "install" in run.stdout
    monkeypatch.setattr(torch, "compile", lambda function: function)
    code, output, _ = call("check")
    assert code == 0 and "✓ torch.compile: works" in output


@pytest.fixture
def nvidia(tmp_path, monkeypatch):
    """A machine with an NVIDIA GPU, as its driver's own tool tells; nvidia(driver, cuda) sets torch's side of it."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def nvidia(driver, cuda, available=False, capability=(9, 0), built_for=()):
        program.write_text(f"#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, {driver}, 700.00 W'\n")
        program.chmod(0o755)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built_for))

    return nvidia


def test_the_cards_fit_a_narrow_terminal(monkeypatch, call):
    """One line per row, at 80 columns."""
    monkeypatch.setattr(tool.console, "width", 80)
    code, output, _ = call("check", "--gpus", 8)
    rows = [line for line in output.splitlines() if line.startswith("│")]
    assert code == 0 and len(rows) == 4 * 7 and all(" GB │" in row for row in rows) and "…" not in output


def test_check_says_why_torch_cannot_use_the_gpu(nvidia, monkeypatch):
    def finding():
        found = [one for one in check.check_device("cpu") if one.what == "NVIDIA GPU"]
        return f"{found[0].mark} {found[0].detail}" if found else None

    nvidia("580.65.06", None)
    assert "✗ torch cannot use it: this torch is built without CUDA" in finding() and "whl/cu130" in finding()
    nvidia("535.183.01", "13.0")
    assert "535.183.01 is too old for CUDA 13.0" in finding() and "580 or newer" in finding()
    nvidia("580.65.06", "13.0")
    assert "CUDA 13.0 does not start" in finding()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES hides it" in finding()
    default_wheel = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    nvidia("580.65.06", "13.0", available=True, capability=(7, 0), built_for=default_wheel)
    assert "no kernels for compute capability 7.0" in finding() and "whl/cu126" in finding()
    for capability in ((7, 5), (8, 9), (9, 0), (10, 3), (12, 0)):
        nvidia("580.65.06", "13.0", available=True, capability=capability, built_for=default_wheel)
        assert finding() is None
    nvidia("580.65.06", "13.0", available=True, capability=(9, 0), built_for=["sm_80", "sm_86"])
    assert "no kernels for compute capability 9.0" in finding()
    nvidia("580.65.06", "13.0", available=True, capability=(13, 0), built_for=[*default_wheel, "compute_120"])
    assert finding() is None


def test_the_machine_is_named_with_its_gpu_driver_and_power_limit(nvidia):
    nvidia("580.65.06", None)
    machine = rates.describe("cpu")
    assert machine["gpus"] == [{"name": "NVIDIA H100 80GB HBM3", "driver": "580.65.06", "power limit": "700.00 W"}]
    assert "threads" in machine["cpu"] and machine["name"] == machine["cpu"]


def test_only_formats_in_hardware_are_measured(monkeypatch):
    """A CPU without bfloat16 multiplies it a hundred times slower: measuring that took minutes."""
    monkeypatch.setattr(rates, "SHAPES", [(8, 8, 8)])
    monkeypatch.setattr(rates, "SECONDS", 0.01)
    for dtype, names in ((torch.float32, {"float32"}), (torch.bfloat16, {"float32", "bfloat16"})):
        monkeypatch.setattr(rates.rung_10, "autocast_dtype", lambda device, dtype=dtype: dtype)
        assert rates.measure("cpu").keys() == names


def test_a_machine_without_nvidia_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rates.nvidia_gpus() == []


def findings(function, *arguments):
    return {one.what: f"{one.mark} {one.detail}" for one in function(*arguments)}


def test_check_on_apple_gpus_does_not_promise_compilation(monkeypatch):
    monkeypatch.setattr(check, "compile_problem", lambda device: pytest.fail("a pointwise probe proves nothing there"))
    assert "not used on Apple GPUs" in findings(check.check_kernels, "mps")["torch.compile"]


def test_check_names_the_attention_kernel(monkeypatch):
    monkeypatch.setattr(check, "compile_problem", lambda device: None)
    assert "✓ torch chooses FLASH_ATTENTION here" in findings(check.check_kernels, "cpu")["attention"]
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 3)
    assert "torch chooses CUDNN_ATTENTION here" in findings(check.check_kernels, "cpu")["attention"]


def test_check_on_a_cpu_without_bfloat16(monkeypatch):
    monkeypatch.setattr(check.rung_10, "autocast_dtype", lambda device: torch.float32)
    assert "rungs 3 and up run in float32 here" in findings(check.check_formats, "cpu")["bfloat16"]


@pytest.mark.parametrize("capability, finding", [
    ((8, 6), "– rung 25 has no effect on this device"), ((8, 9), "✓ rung 25 gains with wide layers")])
def test_check_says_what_float8_needs(capability, finding, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(check.rung_10, "autocast_dtype", lambda device: torch.bfloat16)
    assert findings(check.check_formats, "cuda")["float8"] == finding


@pytest.mark.parametrize("gpus, nccl, expected", [
    (2, True, "✓ 2 GPUs"),
    (2, False, "✗ 2 GPUs, over gloo, which is slow: this torch lacks NCCL, as on Windows; WSL has it"),
    (1, False, "– 1 GPU: ddp_run.py can run 2 processes on the CPU, over gloo"),
])
def test_check_says_whether_several_gpus_can_train_together(gpus, nccl, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    assert findings(check.check_ranks, "cuda")["GPUs for ddp_run.py"] == expected


def test_check_names_the_data_and_the_way_out_of_the_fallback(tmp_path):
    def finding(source, tokenizer):
        (tmp_path / "meta.json").write_text(json.dumps({"source": source, "tokenizer": tokenizer}))
        found = check.check_data(tmp_path)
        return f"{found.mark} {found.detail}"

    assert "not yet" in check.check_data(tmp_path).detail
    assert finding("tiny_shakespeare", "gpt2") == f"✓ tiny_shakespeare (gpt2 tokens) in {tmp_path}"
    for fallback in (("python_topics", "gpt2"), ("tiny_shakespeare", "gpt2-bytes")):
        assert f"– {fallback[0]} ({fallback[1]} tokens)" in finding(*fallback)
        assert "python data/prepare.py makes Tiny Shakespeare" in finding(*fallback)
    (tmp_path / "meta.json").write_text("[]")
    assert check.check_data(tmp_path).mark == "✗"


@pytest.mark.parametrize("encoding, times, good", [("ascii", "x", "+"), ("cp437", "x", "+"), ("cp1252", "×", "+"),
                                                   ("utf-8", "×", "✓")])
def test_terminals_without_the_characters(encoding, times, good, monkeypatch, fake_run):
    """Every verb ends well there, and reads well."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    logs = [WHOLE / "round_1" / f"{name}.log" for name in ("speedup_05_compile", "speedup_10_fused_adamw")]

    def shown(verb):
        """What a verb, called without arguments, writes to such a terminal."""
        terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            assert verb() == 0
        return terminal.buffer.getvalue().decode(encoding)

    assert f"{good} torch: " in shown(lambda: tool.main(["check"]))
    assert f"{times} base" in shown(lambda: tool.main(["report", str(WHOLE)]))
    assert "B - A" in shown(lambda: tool.main(["compare", *map(str, logs)]))
    assert "Rung 7" in shown(lambda: tool.main(["diff", "7"]))
    job = lambda job: write_log(job.log_dir / "baseline.log", header="# device: π\n", tail=MEDIAN) and None  # noqa: E731
    assert "ms/step" in shown(lambda: fake_run(job)[0])


@pytest.mark.parametrize("words, reason", [
    (["report", "/no/such/folder"], "no such folder of logs"),
    (["run", "--rungs", "77"], "there are rungs 0 to"),
    (["run", "--time-limit", "0"], "must be more than 0"),
    (["compare", "/no/a.log", "/no/b.log"], "no such log"),
    (["propagate", "nothing.py"], "no rung nothing.py"),
])
def test_wrong_words(words, reason, call):
    assert is_one_error(call(*words), reason)
