"""python -m ladder smoke: what it tries, and that it notices what does not work."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, own_settings, run_command

import ladder.__main__ as tool
from ladder.measure import smoke
from ladder.measure.smoke import Trial, plan
from ladder.scripts.stages import BY_LABEL, STAGES, load_script

GOOD = [11.0, 10.9, 10.8, 10.7]


def logs(losses, first=1, more="pass"):
    """A command that logs these losses, and what else it does."""
    steps = "".join(f"step : {n} | loss: {loss:.6f} | dt: 1.00 ms | tokens/sec: 9.00\n"
                    for n, loss in enumerate(losses, first))
    return [sys.executable, "-c", f"import os, sys, time; print({steps!r}, end='', flush=True); {more}"]


@pytest.fixture
def fake(monkeypatch, tmp_path, tokens, capsys):
    """fake(name=(command, more about the trial)): (exit code, what is printed, the summary) of a smoke of these."""
    def run(**commands):
        trials = [Trial(name, command, tmp_path / name, **more) for name, (command, more) in commands.items()]
        monkeypatch.setattr(smoke, "plan", lambda settings, scratch: trials)
        monkeypatch.setattr(tool.console, "width", 200)
        with own_settings():
            code = tool.main(["smoke", "--device", "cpu", "--data", str(tokens), "--out", str(tmp_path / "out")])
        return code, capsys.readouterr().out, json.loads((tmp_path / "out" / "summary.json").read_text())

    yield run


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    monkeypatch.setattr(smoke, "os", SimpleNamespace(environ=dict(os.environ), cpu_count=os.cpu_count))


def test_what_works_is_listed_and_the_folder_tells_it(fake, tmp_path):
    code, output, summary = fake(
        a=(logs(GOOD), {"first": 1}), b=(logs([11.01, 10.9, 10.8, 10.72]), {"first": 1, "like": "a"}),
        a_use=(logs([]), {}))
    assert code == 0 and "0 failed" in output and re.search(r"a +ok +\d+ s  loss 11.000 10.900 10.800 10.700", output)
    assert "\n1 must have the same losses as another, 0 disagree; the largest difference is 0.0200." in output
    assert summary["machine"]["torch"] == torch.__version__ == summary["packages"]["torch"] and summary["commit"]
    assert {trial["name"]: trial["losses"] for trial in summary["trials"]}["b"]["4"] == 10.72
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} >= {"a.txt", "b.txt", "a_use.txt", "summary.txt", "summary.json"}
    assert (out / "summary.txt").read_text() in output and "step : 4 | loss: 10.700000" in (out / "a.txt").read_text()
    assert not (tmp_path / "a").exists()  # checkpoints and models are not for sending


def test_a_script_that_fails_is_shown_and_the_others_go_on(fake):
    use = Trial("broken-use", logs([]), ROOT)
    code, output, summary = fake(
        broken=(logs([11.0], more="raise ValueError('no such kernel')"), {"first": 1, "then": [use]}),
        whole=(logs(GOOD), {"first": 1, "like": "broken"}))
    assert code == 1 and "1 failed" in output and "| ValueError: no such kernel\n" in output
    assert "failed: broken: ValueError: no such kernel" in output and re.search("broken-use +not run", output)
    assert {trial["name"]: trial["status"] for trial in summary["trials"]}["whole"] == "ok"


def test_the_end_of_a_rank_s_output_is_shown_and_not_what_torchrun_says(fake):
    report = r"[rank0]: ValueError: no such kernel\nE1 failed (exitcode: 1) local_rank: 0" + 9 * r"\nhost : <N/A>"
    code, output, _ = fake(a=(logs([], more=f"print('{report}'); sys.exit(1)"), {}))
    assert code == 1 and "failed: a: [rank0]: ValueError: no such kernel\n" in output and "<N/A>" not in output


@pytest.mark.parametrize("losses, first, reason", [
    (GOOD[:3], 1, r"it logged the steps [1, 2, 3], not [1, 2, 3, 4]"),
    (GOOD, 3, r"it logged the steps [1, 2, 3, 4], not [3, 4]"),  # a resume that starts over
], ids=["stops", "starts over"])
def test_a_script_that_does_not_do_its_steps_has_failed(losses, first, reason, fake):
    code, output, _ = fake(a=(logs(losses), {"first": first}))
    assert code == 1 and f"failed: a: {reason}" in output


def test_losses_that_must_be_equal_and_are_not(fake):
    code, output, _ = fake(
        a=(logs(GOOD), {"first": 1}), near=(logs([11.09, 10.9, 10.8, 10.7]), {"first": 1, "like": "a", "within": 0.1}),
        far=(logs([10.8, 10.5], first=3), {"first": 3, "like": "a"}))
    assert code == 1 and "0 failed" in output and output.count("disagrees: ") == 1
    assert "disagrees: far and a: loss 10.500 and 10.700 at step 4, more than 0.05 apart" in output


def test_what_the_machine_lacks_is_said_and_is_no_failure(fake):
    code, output, _ = fake(
        a=(logs([], more="sys.exit('error: --device mps: torch has no DDP')"), {"first": 1}),
        b=(logs(GOOD, more="print('# compile: not possible here, running eagerly')"), {"first": 1}),
        c=(logs(GOOD, more="print('# device: X | precision: float32 (no bfloat16 on this CPU)')"), {"first": 1}))
    assert code == 0 and re.search(r"a +not here +\d+ s  error: --device mps: torch", output)
    for words in ("error: --device mps: torch has no DDP", "compile: not possible here, running eagerly",
                  "precision: float32 (no bfloat16 on this CPU)"):
        assert f"not on this machine (no failure): {words}\n" in output


def test_a_script_that_hangs_is_stopped(fake, monkeypatch):
    monkeypatch.setattr(smoke, "SECONDS", 1)
    code, output, _ = fake(a=(logs([11.0], more="time.sleep(100)"), {"first": 1}))
    assert code == 1 and "failed: a: no end after 1 s" in output


STOPPED = """
import sys
from ladder.measure import smoke
import ladder.__main__ as tool
folder = smoke.Path(sys.argv[1])
code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"
trials = [smoke.Trial(str(n), [sys.executable, "-c", code], folder / str(n)) for n in range(9)]
smoke.plan = lambda settings, scratch: trials
sys.exit(tool.main(["smoke", "--device", "cpu", "--data", sys.argv[2], "--out", str(folder / "out")]))
"""


def test_ctrl_c_stops_all_with_everything_that_they_have_started(tmp_path, tokens):
    running = subprocess.Popen([sys.executable, "-c", STOPPED, tmp_path, tokens], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline, children = time.monotonic() + 60, []
    while len(children) < 4 and time.monotonic() < deadline:  # two trials, and what each has started
        time.sleep(0.05)
        children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=20)
    assert running.returncode == 130 and "stopped" in output and "Traceback" not in output, output
    assert "1/9" not in output  # a trial that was stopped has not failed
    assert len(children) >= 4 and not [each for each in children if each.is_running() and each.status() != "zombie"]


def test_a_missing_data_folder_is_said_before_anything_starts(tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: --data .*no token files"):
        tool.main(["smoke", "--device", "cpu", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_plan_has_every_script_and_what_it_compares_with(device, tmp_path, monkeypatch):
    monkeypatch.setattr(smoke.rung_10, "autocast_dtype", lambda device: torch.bfloat16)
    settings = SimpleNamespace(device=device, model="tiny", data=tmp_path)
    trials = {each.name: each for trial in plan(settings, tmp_path) for each in (trial, *trial.then)}
    others = {"24-eager", "24-float16", "24-resume", "27-resume", "check"}
    assert {stage.label for stage in STAGES} | others <= trials.keys()
    assert {trial.like for trial in trials.values()} <= trials.keys() | {""}
    for stage in STAGES:
        assert trials[stage.label].like == (stage.before if stage.torchrun or stage.same_losses else "")
        assert (f"{stage.label}-torchrun" in trials) == (
            stage.torchrun or stage.label == "24" or stage.label in ("25", "29") and device == "cuda")
    assert ("10-graphs" in trials) == (device == "cuda") and ("26-pinned" in trials) == (device != "cpu")
    samples = {name for name in trials if name.endswith("-sample")}
    assert {"0-sample", "31-sample"} < samples and "0-convert" in trials and "31-convert" not in trials
    if device == "cpu":  # each script takes its flags, and a step has the same tokens in all of them
        for label in ("10", "ddp", "24", "fsdp"):
            alone, ranks = (load_script(BY_LABEL[label]).parse_settings(words) for words in (
                trials[label].command[2:-2], trials[f"{label}-torchrun" if f"{label}-torchrun" in trials else label]
                .command[-len(trials[label].command) + 2 : -2]))
            assert alone.steps == 4 and alone.B == ranks.B * (2 if label != "10" else 1) and alone.T == ranks.T


def test_float16_makes_rung_3_another_rung(tmp_path, monkeypatch):
    """On a T4 its scaler skips the first steps, so its losses are not those of rung 2."""
    monkeypatch.setattr(smoke.rung_10, "autocast_dtype", lambda device: torch.float16)
    settings = SimpleNamespace(device="cuda", model="tiny", data=tmp_path)
    trials = {trial.name: trial for trial in plan(settings, tmp_path)}
    assert trials["3"].like == "" and trials["2"].like == "1"


@pytest.mark.parametrize("how, label, note", [
    ("float16", "3", "precision: float16 autocast"), ("on-device", "12", "# batches: on the device"),
    ("pinned", "12", "# batches: memory-mapped"),
])
def test_a_patched_script_does_so(how, label, note, tmp_path, tokens, capsys):
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", tmp_path, "-T", 32, "--steps", 1]
    smoke.main(how, label, *map(str, words), *([] if label == "3" else ["--compile-mode", "none"]))
    assert note in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_everything_works_here(tmp_path, tokens):
    command = [sys.executable, "-m", "ladder", "smoke", "--device", "cpu", "--model", "1x2x64", "--data", tokens]
    run = run_command(*command, "--out", tmp_path / "out", timeout=2900)
    assert run.returncode == 0, run.stdout + run.stderr
    trials = json.loads((tmp_path / "out" / "summary.json").read_text())["trials"]
    assert len(trials) > 45 and not [trial for trial in trials if trial["status"] != "ok"]
    assert re.search(r" 0 failed\.\n\d\d must have the same losses as another, 0 disagree", run.stdout)
