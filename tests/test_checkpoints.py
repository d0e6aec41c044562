"""Rungs 14 and 15: a run that was stopped, crashed or killed continues bit by bit, and nothing is lost or mixed up."""
import json
import os
import re
import resource
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import filelock
import numpy as np
import pytest
import torch
from conftest import (
    ROOT, Crash, as_program, assert_same_weights, builds_on, crash_in_step, cut_in_half, edit_json, files_in,
    flip_a_byte, losses, run_command, rung, rungs_that_change, tokens_of, train)
from torch.nn import functional as F

from ladder.scripts.stages import BY_LABEL

SIX = ("-B", 2, "-T", 32, "--total-batch", 128, "--steps", 6, "--checkpoint-every", 2, "--val-every", 3,
       "--val-sequences", 4)
ONE = ("-B", 1, "-T", 16, "--total-batch", 16, "--val-every", 0)
STEP_4, STEP_6 = "step_0000004.pt", "step_0000006.pt"
RESUMES = [label for label in rungs_that_change(
    "Checkpoints", "DataLoaderLite", "optimizer_step", "MuonAdamW", "GPT.__init__", "train") if builds_on(label, "14")]


def log_name(label):
    return f"{BY_LABEL[label].name}.log"


def six_steps(data, folder, label="15", *more):
    """A rung as a program, with all its files in `folder`."""
    folder.mkdir(exist_ok=True)
    return as_program(label, "--compile-mode", "none", "--data", data, *SIX, "--log-dir", folder, "--save",
                      folder / "model.pt", "--checkpoint-dir", folder / "checkpoints", *more)


def assert_refused(run, line):
    """It ended with this one line, a pattern, and no step was trained."""
    assert run.returncode == 1 and "step : " not in run.stdout
    assert re.fullmatch(line + r".*\n", run.stderr), run.stderr


def what_it_says(log):
    """The lines of a log, without times and without those of a run's interruptions."""
    lines = [re.sub(r"(dt|tokens/sec|left|time): [^|]*", "", line) for line in log.read_text().splitlines()]
    return [line for line in lines if not line.startswith(("# checkpoint", "# resumed", "# ended", "# WARNING"))]


def assert_same_run(folder, whole, label="15", second_half="4-6"):
    """Bit by bit: the losses of all steps, each once, the validation losses, the rest of the log, and the weights."""
    ours, truth = (what_it_says(path / log_name(label)) for path in (folder, whole))
    assert ours == truth and ours[-1].endswith(f"| steps {second_half}")  # the median is that of all steps
    assert_same_weights(folder / "model.pt", whole / "model.pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, byte_tokens):
    """The folder of a run of rung 15 that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run = six_steps(byte_tokens, folder)
    assert run.returncode == 0, run.stderr
    assert files_in(folder / "checkpoints") == {STEP_4, STEP_6}  # the two newest
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    """copied(*names): the folder of these checkpoints of the whole run, of a run in `tmp_path`."""

    def copy(*names):
        (tmp_path / "checkpoints").mkdir()
        for name in names:
            shutil.copy(whole / "checkpoints" / name, tmp_path / "checkpoints")
        return tmp_path / "checkpoints"

    return copy


def assert_resumes(data, whole, folder, step=4):
    run = six_steps(data, folder, "15", "--resume")
    assert run.returncode == 0 and f"# resumed after step {step} of 6" in run.stdout, run.stderr
    assert_same_run(folder, whole)
    return run


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")  # what DCP says of the crash's remains
@pytest.mark.parametrize("label", RESUMES)
def test_14_a_crashed_run_resumes_bit_by_bit(label, byte_tokens, tmp_path):
    """Whatever a rung keeps: momenta, a loader's epoch, masks, the best model; with another rung's flags, too.

    Another run's log in the way is kept, under its date: the log continues from the checkpoint's.
    """
    more = ["--recompute-blocks", 1] if builds_on(label, "16") else []
    assert six_steps(byte_tokens, tmp_path / "whole", label, *more).returncode == 0
    module, folder = rung(label), tmp_path / "crashed"
    crash_in_step(module, 6)
    with pytest.raises(Crash):
        train(module, folder, byte_tokens, *SIX, *more)
    newest, = (path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_0000004"))
    half = newest.with_name("step.partial")  # as a kill during the next save would leave it
    half.mkdir() if newest.is_dir() else half.write_text("a half")
    (folder / log_name(label)).write_text("another run's log")
    run = six_steps(byte_tokens, folder, label, *more, "--resume")
    assert run.returncode == 0, run.stderr
    assert "# resumed after step 4 of 6" in run.stdout and "step : 4 " not in run.stdout
    assert_same_run(folder, tmp_path / "whole", label)
    [earlier] = folder.glob(f"{log_name(label)}.20*")
    assert earlier.read_text() == "another run's log"


def test_14_a_finished_run_repeats_nothing(byte_tokens, whole, copied, tmp_path):
    """Killed after its last checkpoint it still owes its log's end and --save's file; and again, if it is asked to."""
    copied(STEP_6)
    for _ in range(2):
        assert "step : " not in assert_resumes(byte_tokens, whole, tmp_path, 6).stdout


@pytest.mark.parametrize("label, more, meta, reason", [
    ("15", [], {}, f".*{STEP_6}: .*--resume .*--checkpoint-dir"),
    ("16", ["--resume"], {}, "--resume: .* has script rung_15_preemption.py, not rung_16_gradient_checkpointing.py"),
    ("15", ["--resume"], {"sha256": "0" * 64}, r"--resume: .* has text \w+ in bytes tokens, not 0000\w+ in bytes"),
    ("15", ["--resume"], {"tokenizer": "gpt2"}, r"--resume: .* has text (\w+) in bytes tokens, not \1 in gpt2 tokens"),
])
def test_14_a_different_run_is_not_resumed(label, more, meta, reason, copied, byte_tokens, tmp_path):
    """Also one on another text of as many tokens. And its log is still there."""
    copied(STEP_6)
    data = shutil.copytree(byte_tokens, tmp_path / "data")
    edit_json(data / "meta.json", **meta)
    (tmp_path / log_name(label)).write_text("an earlier log")
    assert_refused(six_steps(data, tmp_path, label, *more), "error: " + reason)
    assert [path.read_text() for path in tmp_path.glob("*.log*")] == ["an earlier log"]


FREE = {"B", "device", "compile_mode", "data", "log_dir", "save", "checkpoint_every", "checkpoint_dir", "val_every",
        "val_sequences", "recompute_blocks", "loss_chunk", "patience", "float8_from"}


def another(value):
    """A value of a flag that is not `value`."""
    return value + 1 if type(value) is int else value / 2 if type(value) is float else Path(f"{value or ''}.other")


@pytest.mark.parametrize("label", [
    label for label in rungs_that_change("Checkpoints", "add_flags") if builds_on(label, "14")])
def test_14_every_flag_is_free_or_what_the_run_is(label, tmp_path, byte_tokens):
    """Whatever flags a rung has; --val-sequences is not free where the best model depends on it."""
    module, made = rung(label), []
    Checkpoints = module.Checkpoints
    module.Checkpoints = lambda *args, **parts: made.append((args, parts)) or Checkpoints(*args, **parts)
    train(module, tmp_path, byte_tokens, *ONE, "--steps", 1, "--val-every", 1, "--val-sequences", 1,
          "--checkpoint-every", 1)
    ((settings, loader), parts), = made
    flags = vars(settings)

    def load(**changes):
        """The step that a run with other flags would resume after."""
        return Checkpoints(SimpleNamespace(**flags | {"resume": True} | changes), loader, **parts).load()[0]

    assert load() == 1
    refused = set()
    for name in flags.keys() - {"resume"}:
        try:
            assert load(**{name: another(flags[name])}) == (name != "checkpoint_dir")
        except SystemExit as stop:
            assert f" has {name} {flags[name]}, not {another(flags[name])}; " in stop.code
            refused.add(name)
    free = FREE - ({"val_sequences"} if "patience" in flags else set())
    assert refused == flags.keys() - free - {"resume"} and len(refused) >= 8


@pytest.mark.parametrize("label", ["19", "fsdp", "dcp"])
def test_19_a_run_stopped_before_the_decay_may_get_another_end(label, tmp_path, byte_tokens):
    """12 steps, stopped after 4 and resumed for 8, are 8 from the start. Not once the decay has begun, in either."""
    flags = (*ONE, "--checkpoint-every", 4, "--decay-share", 0.5)
    whole = train(rung(label), tmp_path / "whole", byte_tokens, *flags, "--steps", 8)
    module, stopped = rung(label), tmp_path / "stopped"
    crash_in_step(module, 5)
    with pytest.raises(Crash):
        train(module, stopped, byte_tokens, *flags, "--steps", 12)
    for more, other in ((("--steps", 7), "steps 12, not 7"), (("--decay-share", 0.8), "decay_share 0.5, not 0.8")):
        with pytest.raises(SystemExit, match=f"has {other}; "):
            train(rung(label), stopped, byte_tokens, *flags, "--steps", 12, "--resume", *more)
    resumed = train(rung(label), stopped, byte_tokens, *flags, "--steps", 8, "--resume")
    text = resumed.read_text()
    assert losses(resumed) == losses(whole) and text.endswith("| steps 5-8\n")
    assert "| steps: 8 |" in text and "| steps: 12 |" not in text
    with pytest.raises(SystemExit, match="has steps 8, not 12; "):
        train(rung(label), stopped, byte_tokens, *flags, "--steps", 12, "--resume")


@pytest.mark.parametrize("label", ["14", "15", "33", "fsdp", "dcp"])
def test_14_a_checkpoint_holds_the_log_of_its_own_run(label, tmp_path, byte_tokens):
    """Though another run has taken the log's name meanwhile."""
    module, log_of = rung(label), tmp_path / log_name(label)
    step = module.Log.step

    def step_and_move(log, *args, **more):
        step(log, *args, **more)
        log_of.rename(tmp_path / "moved.log")
        log_of.write_text("another run's log")

    module.Log.step = step_and_move
    train(module, tmp_path, byte_tokens, *ONE, "--steps", 1)
    assert log_of.read_text() == "another run's log"
    log = train(rung(label), tmp_path, byte_tokens, *ONE, "--steps", 1, "--resume").read_text()
    assert len(losses(log_of)) == 1 and log.startswith(f"# script: {BY_LABEL[label].path.name}\n")


@pytest.mark.parametrize("label", ["14", "15", "27", "fsdp"])
def test_14_a_checkpoint_is_on_the_disk_before_it_gets_its_name(label, tmp_path, byte_tokens, monkeypatch):
    """After a power cut a file that was renamed but not written through may be empty."""
    synced, fsync, path = [], os.fsync, tmp_path / "checkpoints" / "step_0000001.pt"
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_size, path.exists())) or fsync(file))
    train(rung(label), tmp_path, byte_tokens, *ONE, "--steps", 1)
    assert synced == [(path.stat().st_size, False)]


@pytest.mark.parametrize("label", [label for label in rungs_that_change("Checkpoints") if label not in ("0", "dcp")])
def test_14_a_checkpoint_is_plain_and_holds_the_scaler(label, tmp_path, byte_tokens):
    """float16, as on a T4: its scale comes back, or begins after bfloat16; and it serves as a saved model does."""
    module, flags = rung(label), [*ONE, "--steps", 2]
    module.autocast_dtype = lambda device: torch.bfloat16
    crash_in_step(module, 2)
    with pytest.raises(Crash):
        train(module, tmp_path, byte_tokens, *flags, "--checkpoint-every", 1)
    path, last = (tmp_path / "checkpoints" / f"step_000000{step}.pt" for step in (1, 2))
    saved, scalers = torch.load(path, weights_only=True), []
    assert {"script", "config", "model", "step", "tokenizer"} <= set(saved) and not saved["scaler"]
    for scaler in ({}, torch.amp.GradScaler("cpu", init_scale=2.0**10).state_dict() | {"_growth_tracker": 7}):
        torch.save(saved | {"scaler": scaler}, path)
        module = rung(label)
        module.autocast_dtype = lambda device: torch.float16
        train(module, tmp_path, byte_tokens, *flags, "--resume")
        scalers.append(torch.load(last, weights_only=True)["scaler"])
        last.unlink()
    assert scalers[0]["scale"] >= 2.0**15  # an overflow may halve the scale of a new scaler
    assert (scalers[1]["scale"], scalers[1]["_growth_tracker"]) == (2.0**10, 8)
    log = train(rung(label), tmp_path / "next", byte_tokens, *flags, "--pretrained", path)
    assert losses(log)[0] < losses(tmp_path / log.name)[0]


@pytest.mark.slow
def test_15_twenty_kills_at_random_moments(tmp_path, byte_tokens):
    """SIGKILL, also while a checkpoint is written: every run ends with the losses and weights of the whole one."""
    text = tokens_of(tmp_path / "tokens", np.fromfile(byte_tokens / "train.bin", dtype="<u2")[:400])  # 24 steps
    flags = ["--model", "tiny", "--device", "cpu", "--data", text, *ONE, "--compile-mode", "none", "--steps", 40,
             "--checkpoint-every", 1, "--val-every", 10, "--val-sequences", 1]
    run = run_command(sys.executable, ROOT / "tests/killed_runs.py", 20, tmp_path, *flags, timeout=900)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["kills"] >= 20 and counts["during_save"] >= 2, counts
    for number in range(1, counts["rounds"] + 1):
        assert_same_run(tmp_path / f"killed_{number}", tmp_path / "whole", second_half="21-40")


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, lambda path: path.write_bytes(b"")])
def test_15_a_damaged_checkpoint_is_named_and_the_one_before_it(damage, byte_tokens, whole, copied, tmp_path):
    newest = copied(STEP_4, STEP_6) / STEP_6
    damage(newest)
    line = f"error: --resume: {newest} is damaged; delete it to continue from {STEP_4}"
    assert_refused(six_steps(byte_tokens, tmp_path, "15", "--resume"), line)
    newest.unlink()
    assert_resumes(byte_tokens, whole, tmp_path)


def test_15_a_healthy_checkpoint_that_cannot_be_read_is_not_called_damaged(copied, byte_tokens, tmp_path, monkeypatch):
    """Whoever follows that line deletes it."""
    copied(STEP_6)
    monkeypatch.setattr(torch, "load", mock.Mock(side_effect=RuntimeError("not enough memory: you tried to allocate")))
    run = six_steps(byte_tokens, tmp_path, "15", "--resume")
    assert run.returncode == 1 and run.stderr.startswith("error: out of memory") and "damaged" not in run.stderr


def test_15_a_full_disk_costs_the_checkpoint_and_not_the_run(byte_tokens, whole, copied, tmp_path):
    """A limit on the size of files stands for the full disk. Only --save's file is missed in the end, in one line."""
    checkpoints, limits = copied(STEP_4), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        run = six_steps(byte_tokens, tmp_path, "15", "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "# WARNING: no checkpoint of step 6: " in run.stdout and "step : 6 |" in run.stdout
    assert re.search("# ended by --steps after step 6; .*step_0000004.pt\n.*median : ", run.stdout, re.DOTALL)
    assert run.returncode == 1 and re.fullmatch(r"error: .*File too large.*\n", run.stderr), run.stderr
    assert [*checkpoints.glob("step*")] == [checkpoints / STEP_4]  # no half of one takes the room that is left
    assert_resumes(byte_tokens, whole, tmp_path)  # there is room again


def interrupt(monkeypatch, call, number=signal.SIGINT):
    """Send this process a signal at this call of the attention, 2 of each forward pass, 4 of a step."""
    attention, calls = F.scaled_dot_product_attention, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_15_a_signal_saves_and_ends_well(number, byte_tokens, whole, tmp_path, monkeypatch):
    interrupt(monkeypatch, 15, number)  # in the third step, or the validation after it
    run = six_steps(byte_tokens, tmp_path)
    assert run.returncode == 0, run.stderr
    end = re.search(r"# ended by a signal after step (\d); newest checkpoint: .*step_0+(\d).pt", run.stdout)
    stopped, newest = end.groups()
    assert stopped == newest in "34"
    monkeypatch.undo()
    assert_resumes(byte_tokens, whole, tmp_path, int(stopped))


def test_15_a_signal_in_the_first_step_ends_it_at_once(byte_tokens, tmp_path, monkeypatch):
    """There is nothing to save yet, and the step may compile for minutes."""
    interrupt(monkeypatch, 3)
    assert_refused(six_steps(byte_tokens, tmp_path), "stopped: ")
    assert not files_in(tmp_path / "checkpoints")


def test_15_a_folder_in_use_or_that_cannot_be_written_is_refused(byte_tokens, tmp_path):
    with filelock.FileLock(tmp_path / "checkpoints" / "lock"):
        run = six_steps(byte_tokens, tmp_path)
    assert_refused(run, f"error: --checkpoint-dir {tmp_path}/checkpoints: another run is using it")
    assert not files_in(tmp_path / "checkpoints")
    (tmp_path / "file").write_text("not a folder")
    run = six_steps(byte_tokens, tmp_path / "run", "15", "--checkpoint-dir", tmp_path / "file" / "checkpoints")
    assert_refused(run, f"error: .*{tmp_path}/file")


def test_15_a_folder_that_the_ranks_do_not_share_is_refused(copied, byte_tokens, tmp_path, group_of_one, monkeypatch):
    """Else rank 0 alone would resume, and the ranks train different models."""
    copied(STEP_6)
    broadcast = torch.distributed.broadcast_object_list

    def from_another(seen):
        broadcast(seen)
        seen[0] = []  # rank 0's folder is empty

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", from_another)
    line = f"error: --checkpoint-dir {tmp_path}/checkpoints: not all ranks see the same files"
    assert_refused(six_steps(byte_tokens, tmp_path, "15", "--resume"), line)


def test_15_which_restarts_can_work(monkeypatch, group_of_one):
    """torchrun says in these variables what it was given: --max-restarts and TORCH_DISABLE_SHARE_RDZV_TCP_STORE.

    And a save by rank 0 may take longer than NCCL's default of ten minutes.
    """
    module, patience = rung("15"), []
    monkeypatch.setattr(module.dist, "init_process_group", lambda backend, timeout: patience.append(timeout))
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 1)
    settings = module.parse_args(["--device", "cpu"])
    for restarts, agent_store in (("3", "False"), ("0", "True")):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
        assert module.init_ranks(settings) == (0, 1)
    assert patience == [timedelta(hours=1)] * 2
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(SystemExit, match="^error: --max-restarts: needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        module.init_ranks(settings)


def test_15_lost_weights_are_not_saved(tmp_path, byte_tokens, monkeypatch):
    """A gradient that is not a number, in the second step."""
    module, unscale, calls = rung("15"), torch.amp.GradScaler.unscale_, []
    module.autocast_dtype = lambda device: torch.float32

    def poisoned(scaler, optimizer):
        calls.append(scaler)
        optimizer.param_groups[0]["params"][0].grad[0, 0] *= float("nan") if len(calls) == 2 else 1
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", poisoned)
    log = train(module, tmp_path, byte_tokens, *ONE, "--steps", 2, "--checkpoint-every", 1).read_text()
    assert files_in(tmp_path / "checkpoints") == {"step_0000001.pt"}
    assert "# WARNING: no checkpoint of step 2: not all weights are finite" in log
    assert re.search("# ended by --steps after step 2; .*step_0000001.pt\n", log)
