"""python -m ladder: every verb on real short runs of the tiny model, and on everything a user can get wrong."""
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import filelock
import psutil
import pytest
import torch
from conftest import ROOT, load_module, make_tokens, new_gpt, own_settings, run_command, rung, train
from log_files import MEDIAN, write_log
from rich.console import Console

import ladder.__main__ as tool
from ladder.errors import UserError
from ladder.measure import check, rates, runner
from ladder.measure.runner import Job, command_for, parse_rungs, plan, run_job
from ladder.count.flops import SHAPES, flops_per_token
from ladder.scripts.lessons import print_lesson, read_lesson
from ladder.count.memory import PROCESS_BYTES, RUN_BY_DEFAULT, largest_fitting, recommend, step_bytes
from ladder.scripts.stages import BY_LABEL, BY_NAME, STAGES
from ladder.show.logs import PEER, read_log
from ladder.show.report import build_report

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


def test_flops_in_closed_form():
    """PaLM's formula on GPT-2's published shapes; the scripts' sizes are the same."""
    assert {name: tuple(map(int, shape.split("x"))) for name, shape in rung(0).MODELS.items()} == SHAPES
    n_matrix = 50257 * 768 + 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    assert flops_per_token("gpt2", 1024) == 6 * n_matrix + 12 * 12 * 768 * 1024
    assert flops_per_token("gpt2", 1024, causal=True) == 6 * n_matrix + 6 * 12 * 768 * 1024
    assert flops_per_token("unknown", 1024) is None
    assert flops_per_token("4x4x128", 64, vocab_size=257) == 6 * (257 * 128 + 4 * 12 * 128**2) + 12 * 4 * 128 * 64
    assert largest_fitting("4x4x128", 64, ["10"], 4e9) > largest_fitting("gpt2", 64, ["10"], 4e9) > 0


RECOMPUTING = list(BY_LABEL)[list(BY_LABEL).index("16") :]


def test_memory_model_against_measured_peaks():
    """Within 30 % for the rungs that recompute nothing, on every reference machine, as one process."""
    checked = set()
    for folder in REFERENCE:
        for name, rounds in build_report(folder).runs.items():
            label = BY_NAME[name].label if name in BY_NAME else None
            if label not in (None, "ddp", *RECOMPUTING):
                for run in rounds:
                    expected = step_bytes(run.model, run.B, run.T, label) / 1e9
                    assert run.peak_memory_gb == pytest.approx(expected, rel=0.3)
                    checked.add(label)
    assert {"0", "5", "10", "14"} <= checked


def test_memory_model_against_what_autograd_keeps():
    """The bytes of all tensors that the baseline's forward pass saves, its gradients of the logits left out."""
    module, B, T = rung(0), 2, 128
    model = new_gpt(module)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    x = torch.randint(0, 50257, (B, T))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x, x)
    gradients = 8 * B * T * 50257
    expected = step_bytes("tiny", B, T, "0") - step_bytes("tiny", 0, T, "0") - gradients
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("GB", [8, 16, 24, 40, 80, 141])
def test_the_recommended_batch_fits_every_rung(GB):
    model, B, T = recommend(GB * 1e9, accelerator=True)
    assert (model, T) == ("gpt2", 1024)
    worst = max(step_bytes(model, B, T, label) for label in RUN_BY_DEFAULT)
    assert worst <= 0.8 * GB * 1e9
    assert B == 64 or max(step_bytes(model, 2 * B, T, label) for label in RUN_BY_DEFAULT) > 0.8 * GB * 1e9
    assert PROCESS_BYTES < step_bytes("tiny", 1, 32, "10") < step_bytes("tiny", 1, 32, "0")


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.label)
def test_lessons_are_the_diff(stage):
    """Applying a lesson's rows to the old file gives the new one, and the marks lie inside the lines."""
    before, after = BY_LABEL[stage.before].path.read_text(), stage.path.read_text()
    lesson = read_lesson(before, after)
    new, old = after.splitlines(), before.splitlines()
    assert lesson.title in after and lesson.added + lesson.removed > 0
    for hunk in lesson.hunks:
        for left, right in hunk:
            assert left is None or old[left.number - 1] == left.text
            assert right is None or new[right.number - 1] == right.text
            for line in (left, right):
                assert line is None or all(0 <= a < b <= len(line.text) for a, b in line.marks)
    shown = {right.text for hunk in lesson.hunks for _, right in hunk if right is not None and right.changed}
    body = after.split('"""', 2)[2]
    missing = {line for line in body.splitlines() if line.strip()} - set(before.splitlines())
    assert missing <= shown


def test_diff_shows_text_change_and_effect(call):
    code, output, _ = call("diff", "06")
    assert code == 0 and "Rung 6, flash attention" in output
    assert "+         y = F.scaled_dot_product_attention(q, k, v, is_causal=True)" in output
    assert "-         att = F.softmax(att, dim=-1)" in output
    assert "Measured: " in output and "ms/step" in output
    assert "+ " in call("diff", "ddp", "rung_12_prefetch.py")[1] and "@@" not in call("diff", 0)[1]
    for wrong in (["99"], ["x"], ["1", "2", "3"]):
        assert is_one_error(call("diff", *wrong))


def test_diff_fills_the_lines_of_a_narrow_terminal():
    """A line ends where the next word would no longer fit; code keeps its lines."""
    for label, code in (("20", None), ("16", "    python beyond/rung_16_gradient_checkpointing.py -B 16 --recompute")):
        before, after = (BY_LABEL[name].path.read_text(encoding="utf-8") for name in (BY_LABEL[label].before, label))
        console = Console(width=80, record=True, file=io.StringIO())
        print_lesson(read_lesson(before, after), console)
        text = console.export_text().split("@@")[0]
        for line, following in itertools.pairwise(text.splitlines()):
            if line[:1].strip() and following[:1].strip():  # not code
                assert len(line.rstrip()) + 1 + len(following.split()[0]) > 80
        assert code is None or code in text


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


def test_two_runs_do_not_share_a_folder(tmp_path, tokens, call):
    with filelock.FileLock(tmp_path / "lock"):
        assert is_one_error(call("run", "--rungs", 0, "--logs", tmp_path, *flags(tokens)), "another run is using it")
    assert [path.name for path in tmp_path.iterdir()] in ([], ["lock"])


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
    (["compare", "/no/a.log", "/no/b.log"], "/no/a.log: No such file"),
    (["propagate", "nothing.py"], "no rung nothing.py"),
])
def test_wrong_words(words, reason, call):
    assert is_one_error(call(*words), reason)
