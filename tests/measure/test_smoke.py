"""python -m ladder smoke: what it tries, and that it notices what does not work."""
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import get_context
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import run_command, run_script, start_forkserver
from run_tool import is_one_error

import ladder.__main__ as tool
from ladder.measure import processes
from ladder.measure import trials as smoke
from ladder.measure.machine_check import Finding
from ladder.measure.runner import split_flags
from ladder.measure.trials import Trial, plan_trials
from ladder.records.logs import read_log
from ladder.rungs.list import BY_LABEL, RUNGS

GOOD = [11.0, 10.9, 10.8, 10.7]


def logs(losses, first=1, more="pass"):
    """A command that logs these losses, and what else it does."""
    steps = "".join(f"step : {n} | loss: {loss:.6f} | dt: 1.00 ms | tokens/sec: 9.00\n"
                    for n, loss in enumerate(losses, first))
    return [sys.executable, "-c", f"import os, sys, time; print({steps!r}, end='', flush=True); {more}"]


@pytest.fixture
def fake(monkeypatch, tmp_path, tokens, capsys):
    """fake([[(name, command, more about the trial), ...], ...]): (exit code, output) of a smoke of these."""
    def run(*chains):
        trials = []
        for (name, command, more), *users in chains:
            first = Trial(name, command, tmp_path / name, **more)
            trials += [first, *(Trial(use, words, **{"log_dir": first.log_dir, "after": first} | other)
                                for use, words, other in users)]
        monkeypatch.setattr(smoke, "plan_trials", lambda settings, scratch: trials)
        monkeypatch.setattr(smoke, "check_machine", lambda device: ([Finding("-", "float8", "none here")], ""))
        monkeypatch.setattr(smoke, "compile_problem", lambda device: None)
        monkeypatch.setattr("ladder.show.terminal.console.width", 200)
        monkeypatch.setattr(smoke, "os", SimpleNamespace(environ=dict(os.environ), cpu_count=lambda: 4))
        code = tool.main(["smoke", "--device", "cpu", "--data", str(tokens), "--out", str(tmp_path / "out")])
        return code, capsys.readouterr().out

    return run


def test_what_works_is_listed_and_the_folder_tells_it(fake, tmp_path):
    code, output = fake(
        [("a", logs(GOOD), {"first": 1}), ("a-use", logs([]), {})],
        [("b", logs([11.01, 10.9, 10.8, 10.72]), {"first": 1, "like": "a"})])
    assert code == 0 and "0 failed" in output and re.search(r"a +ok +\d+ s  loss 11.000 10.900 10.800 10.700", output)
    assert "the largest difference is 0.0200" in output and "- float8: none here\n" in output
    out = tmp_path / "out"
    assert (out / "summary.txt").read_text() in output and "step : 4 | loss: 10.700000" in (out / "a.txt").read_text()
    assert not (tmp_path / "a").exists()  # checkpoints and models are not for sending


def test_a_model_is_there_for_a_trial_with_a_folder_of_its_own(fake, tmp_path):
    model = str(tmp_path / "a" / "model.pt")
    code, output = fake([("a", logs([], more=f"open({model!r}, 'w')"), {}),
                         ("b", logs([], more=f"open({model!r})"), {"log_dir": tmp_path / "b"})])
    assert code == 0, output
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_wrong_model_ends_before_the_trials(tmp_path, tokens, call):
    words = ["smoke", "--model", "nope", "--device", "cpu", "--data", tokens, "--out", tmp_path / "out"]
    assert is_one_error(call(*words), "--model nope: ") and not (tmp_path / "out").exists()


def test_a_script_that_fails_is_shown_and_the_others_go_on(fake):
    code, output = fake(
        [("broken", logs([11.0], more="raise ValueError('no such kernel')"), {"first": 1}), ("use", logs([]), {})],
        [("whole", logs(GOOD), {"first": 1, "like": "broken"})])
    assert code == 1 and "1 failed" in output and "failed: broken: ValueError: no such kernel" in output
    assert re.search("whole +ok ", output) and re.search("use +not run: broken failed", output)


@pytest.mark.parametrize("command, first, reason", [
    # not what torchrun says after it
    (logs([], more=r"print('[rank0]: ValueError: no kernel\nE1 failed (exitcode: 1)' + 9 * '\nhost: x'); sys.exit(1)"),
     0, "[rank0]: ValueError: no kernel"),
    (logs(GOOD[:3]), 1, "it logged the steps [1, 2, 3], not [1, 2, 3, 4]"),
    (logs(GOOD), 3, "it logged the steps [1, 2, 3, 4], not [3, 4]"),  # a resume that starts over
    (logs([11.0], more="time.sleep(100)"), 1, "no end after 2 s"),
], ids=["raises", "stops", "starts over", "hangs"])
def test_a_script_that_does_not_do_its_steps_has_failed(command, first, reason, fake, monkeypatch):
    monkeypatch.setattr(smoke, "SECONDS", 2)
    code, output = fake([("a", command, {"first": first})])
    assert code == 1 and f"failed: a: {reason}\n" in output and "host: x" not in output


def test_losses_that_must_be_equal_and_are_not(fake):
    near, far = [11.09, 10.9, 10.8, 10.7], logs([10.5, 10.7], first=3)
    code, output = fake([("a", logs(GOOD), {"first": 1})], [("far", far, {"first": 3, "like": "a"})],
                              [("near", logs(near), {"first": 1, "like": "a", "within": 0.1})])
    assert code == 1 and "0 failed" in output and output.count("disagrees: ") == 1
    assert "disagrees: far and a: loss 10.500 and 10.800 at step 3, more than 0.05 apart" in output


def test_ctrl_c_stops_all_that_run(fake, tmp_path):
    """A trial that was stopped has not failed, and one that waits does not start."""
    files = [tmp_path / f"{name}.pid" for name in "abc"]
    sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"

    def interrupt():
        while not all(file.exists() and file.read_text() for file in files[:2]):
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, output = fake(*([(file.stem, [sys.executable, "-c", sleeper, str(file)], {})] for file in files))
    assert code == 130 and "stopped" in output and "0 trials in" in output and not files[2].exists()
    assert not any(psutil.pid_exists(int(file.read_text())) for file in files[:2])


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_plan_has_every_script_and_what_it_compares_with(device, tmp_path, monkeypatch):
    monkeypatch.setattr(smoke.rung_10, "autocast_dtype", lambda device: torch.bfloat16)
    settings = SimpleNamespace(device=device, model="tiny", data=tmp_path, compile_mode="default")
    trials = {trial.name: trial for trial in plan_trials(settings, tmp_path)}
    others = {"zero_init-eager", "zero_init-float16", "documents_apart-documents", "long_run-float16",
              "long_run-resume"}
    assert {entry.label for entry in RUNGS} | others <= trials.keys()
    assert {trial.like for trial in trials.values()} <= trials.keys() | {""}
    assert not any("None" in trial.command for trial in trials.values())
    for entry in RUNGS:
        assert trials[entry.label].like == (entry.start.label if entry.torchrun or entry.same_losses else "")
        assert (f"{entry.label}-torchrun" in trials) == (device != "mps" and (  # which has no DDP
            entry.torchrun or entry.label == "long_run"))
    assert ("10-graphs" in trials) == (device == "cuda")
    names = list(trials)  # first what the others are compared with, then what has run least often
    assert names.index("zero_init") < names.index("zero_init-eager") < names.index("rope")
    samples = {name for name in trials if name.endswith("-sample")}
    assert {"0-sample", "no_biases-sample"} < samples and "0-convert" in trials
    assert "no_biases-convert" not in trials


@pytest.mark.slow
def test_trials_with_several_documents_would_notice_attention_across_them(tmp_path, tokens):
    """`dropout` is `documents_apart` without its mask."""
    settings = SimpleNamespace(device="cpu", model="tiny", data=tokens, compile_mode="default")
    trials = {trial.name: trial for trial in smoke.own_text(settings, tmp_path)}
    for trial in (trials["dropout-own-text-prepare"], trials["dropout-own-text"], trials["documents_apart-own-text"]):
        trial.log_dir.mkdir(exist_ok=True)
        done = run_command(*trial.command)
        assert done.returncode == 0, done.stderr
    trials["documents_apart-documents"].log_dir.mkdir()
    masked, unmasked = BY_LABEL["documents_apart"], BY_LABEL["dropout"]
    without = [word.replace(masked.file, unmasked.file) for word in trials["documents_apart-documents"].command]
    done = run_command(*without, "--compile-mode", "none")
    assert done.returncode == 0, done.stdout + done.stderr
    first, other = (read_log(path).losses[0] for path in (
        trials["documents_apart-own-text"].log_dir / f"{masked.name}.log",
        trials["documents_apart-documents"].log_dir / f"{unmasked.name}.log"))
    assert abs(first - other) > 2 * trials["documents_apart-documents"].within, (first, other)


def test_the_plan_where_nothing_compiles_and_on_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(smoke.rung_10, "autocast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(smoke, "sys", SimpleNamespace(platform="win32", executable="python"))
    settings = SimpleNamespace(device="cuda", model="tiny", data=tmp_path, compile_mode="none")
    trials = {trial.name: trial for trial in plan_trials(settings, tmp_path)}
    assert not [name for name in trials if name.endswith(("-torchrun", "-graphs"))]
    assert split_flags(trials["zero_init"].command, "--compile-mode")[0] == ["none"]
    assert "documents_apart-documents" not in trials
    assert "--compile-mode" not in trials["4"].command


def test_float16_makes_rung_3_another_rung(tmp_path, monkeypatch):
    """On a T4 its scaler skips the first steps, so its losses are not those of rung 2."""
    monkeypatch.setattr(smoke.rung_10, "autocast_dtype", lambda device: torch.float16)
    settings = SimpleNamespace(device="cuda", model="tiny", data=tmp_path, compile_mode="default")
    trials = {trial.name: trial for trial in plan_trials(settings, tmp_path)}
    assert trials["3"].like == "" and trials["2"].like == "1"


class Fork:
    """A subprocess.Popen that runs a script in a fork of a process that has imported torch.

    Not for torchrun, whose ranks show whether a script imports all that it needs.
    """

    def __init__(self, command, stdout, env, **_):
        self.process = get_context("forkserver").Process(target=run_script, args=(command[1:], stdout.name, env))
        self.process.start()
        self.pid, self.stdin, self.wait = self.process.pid, io.BytesIO(), self.process.join

    def poll(self):
        return self.process.exitcode


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_everything_works_here(tmp_path, byte_tokens, monkeypatch, capsys):
    def start(command, **more):
        return (subprocess.Popen if "torch.distributed.run" in command else Fork)(command, **more)

    start_forkserver("torch._inductor.compile_fx", "transformers.models.gpt2.modeling_gpt2")
    monkeypatch.setattr(processes, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": start}))
    words = ["smoke", "--device", "cpu", "--model", "1x2x64", "--data", byte_tokens, "--out", tmp_path / "out"]
    code = tool.main(words)
    output = capsys.readouterr().out
    assert code == 0, output
    assert len(re.findall(r"(?m)^ *\d+/\d+ \S+ +ok ", output)) > 44
    assert "precision: float16" in (tmp_path / "out" / "zero_init-float16.txt").read_text()
    assert re.search(r" 0 failed\.\n\d\d must have the same losses as another, 0 disagree", output)
