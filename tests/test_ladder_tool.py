"""python -m ladder: every verb on real short runs of the tiny model, and on everything a user can get wrong."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, run_command, rung, train

from ladder.__main__ import main
from ladder.compare import compare
from ladder.errors import UserError
from ladder.flops import SHAPES, flops_per_token, mfu
from ladder.lessons import read_lesson
from ladder.logs import read_log
from ladder.memory import step_bytes
from ladder.propagate import propagate
from ladder.report import beyond_table, build_report, check_comparable, markdown_table, warnings, write_readme
from ladder.runner import command_for, parse_rungs, plan
from ladder.stages import STAGES

LADDER = [sys.executable, "-m", "ladder"]
REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())


def flags(tokens):
    return ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32", "--steps", "4"]


def ladder(*words, timeout=300, **environment):
    return run_command(*LADDER, *words, timeout=timeout, COLUMNS="200", **environment)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tokens):
    """Two rounds of rungs 0, 1 and 10, run by the tool."""
    logs = tmp_path_factory.mktemp("measured") / "logs"
    words = ["run", "--rungs", "0,1,10", "--repeat", 2, "--logs", logs, "--compile-mode", "none", *flags(tokens)]
    run = ladder(*words)
    assert run.returncode == 0, run.stdout + run.stderr
    return logs, run.stdout


def test_run_measures_in_rounds_and_shows_the_table(measured):
    logs, output = measured
    assert "fused AdamW" in output and "× base" in output
    report = build_report(logs)
    assert [row.name for row in report.rows] == ["baseline", "speedup_01_weight_tying", "speedup_10_fused_adamw"]
    assert all(row.rounds == 2 and row.complete and row.last_step == 4 for row in report.rows)
    assert report.machine["rates"].keys() == {"float32", "bfloat16"}
    for row in report.rows:
        medians = [run.median_ms for run in report.runs[row.name]]
        assert (row.ms_low, row.ms_high) == (min(medians), max(medians))
        expected = flops_per_token("tiny", 32) * row.tokens_per_second / max(report.machine["rates"].values())
        assert row.mfu == pytest.approx(expected)
        assert 0 < row.mfu < 1
    assert report.rows[1].times_baseline == pytest.approx(report.rows[0].ms / report.rows[1].ms)


def test_resume_skips_what_is_finished(measured, tokens):
    logs, _ = measured
    kept = logs / "round_1" / "baseline.log"
    gone = logs / "round_2" / "speedup_10_fused_adamw.log"
    before, content = kept.stat().st_mtime_ns, gone.read_text()
    gone.write_text(content[: len(content) // 2])  # as a killed run leaves it
    words = ["run", "--rungs", "0,1,10", "--repeat", 2, "--logs", logs, "--resume", "--compile-mode", "none"]
    run = ladder(*words, *flags(tokens))
    assert run.returncode == 0, run.stdout + run.stderr
    assert kept.stat().st_mtime_ns == before
    assert read_log(gone).complete
    other = ladder(*words, *flags(tokens), "--seed", 5)
    assert other.returncode == 1 and "was made with flags" in other.stderr


def test_failures_are_shown_and_the_others_go_on(tmp_path, tokens):
    """A rung that gets no compiler still runs; a batch too large fails; a time limit ends a long one."""
    run = ladder("run", "--rungs", "0", "--logs", tmp_path / "a", *flags(tokens), "-B", 1_000_000)
    assert run.returncode == 1 and "failed: error: " in run.stdout and "Traceback" not in run.stdout + run.stderr
    started = time.monotonic()
    run = ladder("run", "--rungs", "0-1", "--time-limit", 8, "--logs", tmp_path / "b", *flags(tokens), "--steps", 10**6)
    assert run.returncode == 1
    assert run.stdout.count("timed out: no end after 8 s") >= 2
    assert time.monotonic() - started < 60


def test_ctrl_c_keeps_the_finished_and_leaves_no_orphan(tmp_path, tokens):
    words = ["run", "--rungs", "0-1", "--logs", tmp_path / "logs", *flags(tokens)]
    words[words.index("--steps") + 1] = "40"
    command = [str(word) for word in [*LADDER, *words]]
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    second = tmp_path / "logs" / "speedup_01_weight_tying.log"
    deadline = time.monotonic() + 120
    while not (second.exists() and "step : 2" in second.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = psutil.Process(tool.pid).children(recursive=True)
    tool.send_signal(signal.SIGINT)
    output, _ = tool.communicate(timeout=60)
    assert tool.returncode == 130 and "Traceback" not in output, output
    assert children and not [child for child in children if child.is_running() and child.status() != "zombie"]
    assert read_log(tmp_path / "logs" / "baseline.log").complete


def test_the_peer_runs_in_the_same_run(tmp_path, tokens):
    run = ladder("run", "--rungs", "10", "--peers", "--logs", tmp_path, "--compile-mode", "none", *flags(tokens))
    assert run.returncode == 0, run.stdout + run.stderr
    report = build_report(tmp_path)
    assert [row.name for row in report.rows] == ["speedup_10_fused_adamw", "peer_transformers"]
    ours, peer = (report.runs[row.name][0] for row in report.rows)
    assert peer.losses[0] == pytest.approx(ours.losses[0], abs=0.3)  # both start at ln 50257
    assert ours.tokens_per_step == peer.tokens_per_step


def test_max_batch_finds_the_largest(tmp_path, tokens):
    n_tokens = json.loads((tokens / "meta.json").read_text())["train_tokens"]
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "-T", 512, "--compile-mode", "none"]
    limit = n_tokens // 512
    assert limit > 100
    run = ladder("run", "--rungs", "10", "--max-batch", "--logs", tmp_path, "--time-limit", 6, *words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"fused AdamW.*\d", run.stdout)


def test_rungs_and_flags():
    assert parse_rungs("0-2,10") == [0, 1, 2, 10]
    assert [STAGES[number].name for number in parse_rungs("ddp,11,9-11")] == [
        "ddp_run", "speedup_11_grad_accum", "speedup_09_cosine_lr", "speedup_10_fused_adamw", "ddp_run",
        "speedup_11_grad_accum"]
    for wrong in ("99", "3-1", "a", "", "-1", "0-99"):
        with pytest.raises(UserError, match="--rungs"):
            parse_rungs(wrong)
    assert "--compile-mode" not in command_for(4, ["--compile-mode", "none", "-B", "1"], Path("x"))
    assert command_for(4, ["--compile-mode=none", "-B", "1"], Path("x"))[2:4] == ["-B", "1"]
    assert "--nproc_per_node=3" in command_for(11, [], Path("x"), processes=3)
    with pytest.raises(UserError, match="--save"):
        plan([0], ["--save", "x"], Path("x"))


def write_log(path, ms=(100, 50, 50), losses=None, header="# batch: B=4 T=1024 | steps: 3 | seed: 1\n", tail="\n"):
    losses = losses or [10 - i for i in range(len(ms))]
    lines = [f"step : {i + 1} | loss: {losses[i]} | dt: {ms[i]} ms | tokens/sec: 1.0" for i in range(len(ms))]
    path.write_text(header + "\n".join(lines) + tail)
    return path


def test_a_log_of_a_foreign_script(tmp_path):
    """Step lines without headers: B, T and model come from flags, and units in the file are not believed."""
    log = write_log(tmp_path / "foreign.log", header="some chatter\n")
    run = read_log(log, B=8, T=512, model="gpt2")
    assert (run.name, run.median_ms, run.tokens_per_second) == ("foreign", 50, 8 * 512 / 0.05)
    assert read_log(log).tokens_per_second is None
    done = ladder("report", tmp_path, "-B", 8, "-T", 512, "--model", "gpt2")
    assert done.returncode == 0 and "81,920" in done.stdout


def test_a_log_cut_in_the_middle_of_a_line(tmp_path):
    log = write_log(tmp_path / "cut.log", tail="\nstep : 4 | loss: 5 | dt: 1")
    assert read_log(log).steps == [1, 2, 3] and not read_log(log).complete


@pytest.mark.parametrize("content, reason", [
    (None, "no such log"), (b"", "no step line"), (b"\xff\x00\xfe" * 50, "not a text file"),
    (b"hello\n", "no step line"),
])
def test_logs_that_are_none(content, reason, tmp_path):
    log = tmp_path / "x.log"
    if content is not None:
        log.write_bytes(content)
    good = write_log(tmp_path / "good.log")
    run = ladder("compare", good, log)
    assert run.returncode == 1 and run.stderr.startswith("error: ") and reason in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_rung_without_a_step_does_not_hide_the_others(tmp_path):
    write_log(tmp_path / "baseline.log")
    (tmp_path / "speedup_02_tf32.log").write_text("# script: speedup_02_tf32.py\n")
    assert [row.name for row in build_report(tmp_path).rows] == ["baseline"]


def test_different_machines_are_not_mixed(tmp_path):
    for name, device in (("a", "H200"), ("b", "T4")):
        header = f"# script: {name}.py\n# device: {device} | torch: 2\n# batch: B=4 T=1024 | steps: 3\n"
        write_log(tmp_path / f"{name}.log", header=header)
    run = ladder("report", tmp_path)
    assert run.returncode == 1 and "different device" in run.stderr and "Traceback" not in run.stderr


def test_impossible_speeds_are_marked(tmp_path):
    write_log(tmp_path / "baseline.log", ms=(4.5,) * 12, header="# model: gpt2\n# batch: B=4 T=1024 | steps: 12\n")
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 119e12}}))
    report = build_report(tmp_path)
    assert report.rows[0].mfu > 5
    assert any("impossible measurement" in warning for warning in warnings(report))
    (tmp_path / "machine.json").write_text("{")
    with pytest.raises(UserError, match="machine.json is damaged"):
        build_report(tmp_path)


def test_flops_in_closed_form():
    """PaLM's formula on GPT-2's published shapes; the scripts' sizes are the same."""
    models = rung(0).MODELS
    assert {name: (c.n_layer, c.n_embd) for name, c in models.items()} == SHAPES
    n_matrix = 50257 * 768 + 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    assert flops_per_token("gpt2", 1024) == 6 * n_matrix + 12 * 12 * 768 * 1024
    assert flops_per_token("unknown", 1024) is None


def test_compare_in_words(tmp_path, tokens):
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
    run = ladder("compare", tmp_path / "slow.log", tmp_path / "fast.log")
    assert run.returncode == 0 and "2.0" in run.stdout and "larger than the noise" in run.stdout


def test_csv_and_json(measured):
    logs, _ = measured
    rows = json.loads(ladder("report", logs, "--json").stdout)[0]["rows"]
    assert [row["name"] for row in rows] == ["baseline", "speedup_01_weight_tying", "speedup_10_fused_adamw"]
    lines = ladder("report", logs, "--csv").stdout.splitlines()
    assert len(lines) == 4 and lines[0].startswith("machine,name,title,ms")


def test_plots_are_pictures(measured, tmp_path):
    logs, _ = measured
    run = ladder("report", logs, "--png", tmp_path)
    assert run.returncode == 0, run.stderr
    pictures = sorted(tmp_path.glob("*.png"))
    assert [p.name for p in pictures] == ["logs_ladder.png", "logs_loss.png", "logs_memory.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in pictures)


def test_the_readme_table_is_the_reference_logs(tmp_path, measured):
    """The committed README says what the committed logs say."""
    copy = tmp_path / "README.md"
    shutil.copy(ROOT / "README.md", copy)
    write_readme([build_report(folder) for folder in REFERENCE], copy)
    assert copy.read_text() == (ROOT / "README.md").read_text()
    table = markdown_table(build_report(measured[0]))
    assert "[`speedup_10_fused_adamw.py`](speedup_10_fused_adamw.py)" in table
    copy.write_text("no markers")
    with pytest.raises(UserError, match="must hold"):
        write_readme([], copy)


def test_seconds_to_a_validation_loss(tmp_path):
    """Three steps of 100 ms, a validation after the second and the third; the time of validating does not count."""
    lines = ["# batch: B=1 T=10", "# model: tiny | parameters: 1"]
    for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0)):
        lines.append(f"step : {step} | loss: {loss} | dt: 100.00 ms | tokens/sec: 100.00")
        lines += [f"val : step {step} | loss: {loss + 0.5} | time: 60.00 s"] if step > 1 else []
    (tmp_path / "speedup_13_validation.log").write_text("\n".join(lines) + "\n")
    run = read_log(tmp_path / "speedup_13_validation.log")
    assert (run.val_steps, run.val_losses) == ([2, 3], [8.5, 7.5])
    assert run.losses == [9.0, 8.0, 7.0]  # a validation is no step
    assert run.seconds_to_val(8.5) == pytest.approx(0.2) and run.seconds_to_val(7.4) is None
    row = build_report(tmp_path).rows[0]
    assert (row.last_val_loss, row.seconds_to_common_val_loss) == (7.5, pytest.approx(0.3))
    assert "| 7.000 | 7.500 |" in beyond_table(build_report(tmp_path))
    shown = ladder("report", tmp_path)
    assert "val loss" in shown.stdout and "s to val 7.50" in shown.stdout


def test_reference_logs_are_possible():
    assert REFERENCE
    for folder in REFERENCE:
        report = build_report(folder)
        check_comparable(report.runs, folder)
        for rounds in report.runs.values():
            for run in rounds:
                assert run.complete
                assert not report.machine or 0 < mfu(run, report.machine["rates"]) < 1


def test_memory_model_against_measured_peaks():
    """Within 30 % for the compiled flash-attention rungs of every reference machine."""
    checked = 0
    for folder in REFERENCE:
        for name, rounds in build_report(folder).runs.items():
            if name >= "speedup_06" and name.startswith("speedup"):
                for run in rounds:
                    assert step_bytes(run.model, run.B, run.T) / 1e9 == pytest.approx(run.peak_memory_gb, rel=0.3)
                    checked += 1
    assert checked


@pytest.mark.parametrize("number", range(1, len(STAGES)))
def test_lessons_are_the_diff(number):
    """Applying a lesson's rows to the old file gives the new one, and the marks lie inside the lines."""
    before, after = STAGES[number - 1].path.read_text(), STAGES[number].path.read_text()
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


def test_diff_shows_text_change_and_effect():
    run = ladder("diff", 6)
    assert run.returncode == 0, run.stderr
    assert "Rung 6, flash attention" in run.stdout
    assert "+         y = F.scaled_dot_product_attention(q, k, v, is_causal=True)" in run.stdout
    assert "-         att = F.softmax(att, dim=-1)" in run.stdout
    assert "Measured: " in run.stdout and "ms/step" in run.stdout
    for wrong in (["99"], ["x"], ["1", "2", "3"]):
        run = ladder("diff", *wrong)
        assert run.returncode == 1 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


@pytest.fixture
def repository(tmp_path):
    """A copy of the scripts under git, to be fixed."""
    (tmp_path / "beyond").mkdir()
    for stage in STAGES:
        shutil.copy(stage.path, tmp_path / stage.file)
    commit = ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"]
    for words in (["init", "-q"], ["add", "."], commit):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_propagate_carries_a_fix_to_all_later_rungs(repository):
    old = "        folder = Path(folder)\n        try:\n"  # in DataLoaderLite
    new = "        folder = Path(folder)\n        folder = folder.expanduser()\n        try:\n"
    docstrings = {stage.file: (repository / stage.file).read_text().split('"""')[1] for stage in STAGES}
    edit(repository / "baseline.py", old, new)
    assert propagate("baseline.py", repository) == [stage.file for stage in STAGES[1:]]
    for stage in STAGES:
        text = (repository / stage.file).read_text()
        assert text.count(new) == 1 and old not in text
        assert text.split('"""')[1] == docstrings[stage.file]
        assert text == stage.path.read_text().replace(old, new)  # and nothing else changed
    assert not list(repository.rglob("*.partial"))


def test_propagate_starts_at_the_rung_that_was_fixed(repository):
    edit(repository / "speedup_08_adamw_clip.py", "model.parameters(), 1.0)", "model.parameters(), 2.0)")
    assert propagate("speedup_08_adamw_clip.py", repository) == [stage.file for stage in STAGES[9:]]
    assert "2.0)" not in (repository / "speedup_07_vocab_pad.py").read_text()


def snapshot(folder):
    return {path.name: path.read_text() for path in folder.rglob("*.py*")}


def test_propagate_changes_nothing_on_a_conflict(repository):
    edit(repository / "speedup_05_compile.py", "att = F.softmax(att, dim=-1)", "att = att.softmax(dim=-1)")
    before = snapshot(repository)
    with pytest.raises(UserError, match=r"nothing was changed.*speedup_06_flash_attn.py: line \d+"):
        propagate("speedup_05_compile.py", repository)
    assert snapshot(repository) == before


def test_propagate_refuses_what_it_cannot_do_safely(repository, monkeypatch):
    with pytest.raises(UserError, match="no uncommitted change"):
        propagate("baseline.py", repository)
    for wrong in ("setup.py", "/etc/passwd"):
        with pytest.raises(UserError, match="no rung of the ladder"):
            propagate(wrong, repository)
    with pytest.raises(UserError, match="last rung"):
        propagate(STAGES[-1].file, repository)
    edit(repository / "speedup_03_bf16_autocast.py", "import json\n", "import json\nimport re\n")
    with pytest.raises(UserError, match="speedup_03_bf16_autocast.py has uncommitted changes"):
        propagate("baseline.py", repository)
    edit(repository / "baseline.py", "import json\n", "import json(\n")
    subprocess.run(["git", "checkout", "-q", "speedup_03_bf16_autocast.py"], cwd=repository, check=True)
    with pytest.raises(UserError, match="baseline.py: line"):
        propagate("baseline.py", repository)
    monkeypatch.setenv("PATH", os.fspath(repository))
    with pytest.raises(UserError, match="git is not installed"):
        propagate("baseline.py", repository)


def test_propagate_needs_the_docstring(repository):
    path = repository / "baseline.py"
    path.write_text(path.read_text().split('"""', 2)[2])
    before = snapshot(repository)
    with pytest.raises(UserError, match="must start with its docstring"):
        propagate("./baseline.py", repository)
    assert snapshot(repository) == before


def test_run_never_deletes_logs_it_did_not_write(tmp_path, tokens):
    mine = write_log(tmp_path / "baseline.log")
    run = ladder("run", "--rungs", 0, "--logs", tmp_path, *flags(tokens))
    assert run.returncode == 1 and "did not write" in run.stderr and mine.exists()
    (tmp_path / "machine.json").write_text("{}")
    run = ladder("run", "--rungs", 0, "--logs", tmp_path, *flags(tokens), "--bogus", 3)
    assert run.returncode == 2 and mine.exists()  # the flags are checked first
    (tmp_path / "machine.json").write_text("{")
    run = ladder("run", "--rungs", 0, "--logs", tmp_path, "--resume", *flags(tokens))
    assert run.returncode == 1 and "is damaged" in run.stderr and mine.exists()


def test_mfu_of_ranks_counts_their_gpus(tmp_path):
    header = "# model: gpt2\n# device: {}\n# ranks: 2 | x: y\n# batch: B=4 T=1024 | steps: 3\n"
    gpu = read_log(write_log(tmp_path / "a.log", header=header.format("NVIDIA H200")))
    cpu = read_log(write_log(tmp_path / "b.log", header=header.format("AMD EPYC (1 threads)")))
    rates = {"bfloat16": 1e15}
    assert mfu(cpu, rates) == pytest.approx(2 * mfu(gpu, rates))


def test_propagate_outside_a_repository(repository):
    shutil.rmtree(repository / ".git")
    with pytest.raises(UserError, match="git has no committed baseline.py"):
        propagate("baseline.py", repository)


def test_check_says_what_is_here():
    run = ladder("check")
    assert run.returncode == 0, run.stderr
    for word in ("device", "torch", "TF32", "bfloat16", "torch.compile", "flash attention", "fused AdamW", "NCCL",
                 "free disk", "data", "tokenizer"):
        assert word in run.stdout
    assert re.search(r"python -m ladder run --model \S+ -B \d+ -T \d+", run.stdout)
    run = ladder("check", CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR="/tmp/empty-inductor-cache")
    assert "✗ torch.compile: does not work" in run.stdout and "install" in run.stdout


@pytest.mark.parametrize("words, reason", [
    (["report", "/no/such/folder"], "no such folder of logs"),
    (["run", "--rungs", "77"], "there are rungs 0 to"),
    (["run", "--time-limit", "0"], "must be more than 0"),
    (["compare", "/no/a.log", "/no/b.log"], "no such log"),
    (["propagate", "nothing.py"], "is no rung"),
])
def test_wrong_words(words, reason, capsys):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and reason in error and error.count("\n") == 1
