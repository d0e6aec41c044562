"""checkpoints, preemption: a stopped, crashed or killed run continues bit by bit, and nothing is lost or mixed up."""
import copy
import errno
import functools
import gc
import os
import pickle
import pty
import random
import re
import shutil
import signal
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from damaged_files import Attack, cut_in_half
from load_script import builds_on, rung, rungs_that_change
from log_files import losses, read_steps, val_losses
from run_script import Crash, as_program, crash_in_step, forked_program, train
from saved_models import assert_same_weights, names_in, save_as_from_a_gpu
from token_folders import edit_json, tokens_of
from torch.nn import functional as F

from ladder.records.logs import read_log
from ladder.rungs.list import BY_LABEL

SIX = ("-B", 2, "-T", 32, "--total-batch", 128, "--steps", 6, "--checkpoint-every", 2, "--val-every", 3,
       "--val-sequences", 4)
ONE = ("-B", 1, "-T", 16, "--total-batch", 16, "--val-every", 0)
STEP_4, STEP_6 = "step_0000004.pt", "step_0000006.pt"
LOADS = rungs_that_change("Checkpoints", since="checkpoints")
RESUMES = rungs_that_change(
    "Checkpoints", "DataLoaderLite", "optimizer_step", "MuonAdamW", "GPT.__init__", "train", since="checkpoints")


def log_name(label):
    return f"{BY_LABEL[label].name}.log"


def six_steps(data, folder, label="preemption", *more):
    """A rung as a program, with all its files in `folder`."""
    folder.mkdir(exist_ok=True)
    return as_program(label, "--compile-mode", "none", "--data", data, *SIX, "--log-dir", folder, "--save",
                      folder / "model.pt", "--checkpoint-dir", folder / "checkpoints", *more)


def assert_refused(run, line):
    """It ended with this one line, a pattern, and no step was trained."""
    assert run.returncode == 1 and "step : " not in run.stdout
    assert re.fullmatch(line + r".*\n", run.stderr), run.stderr


def numbers_in(log):
    """What is in a log but times: of each step, and {step: validation loss}. Of repeated lines the last counts."""
    steps = [{name: step.get(name) for name in ("step", "loss", "norm", "lr")} for step in read_steps(log)]
    return steps, val_losses(log)


def assert_same_run(folder, whole, label="preemption"):
    """Bit by bit: losses, norms and rates of all steps, the validation losses, and the weights."""
    ours, truth = (numbers_in(path / log_name(label)) for path in (folder, whole))
    assert ours == truth and truth[0]
    assert_same_weights(folder / "model.pt", whole / "model.pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, byte_tokens):
    """The folder of a run of `preemption` that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run = six_steps(byte_tokens, folder)
    assert run.returncode == 0, run.stderr
    assert names_in(folder / "checkpoints") == {STEP_4, STEP_6}  # the two newest
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
    """With the log that the whole run had when it wrote this checkpoint."""
    text = (whole / log_name("preemption")).read_text()
    (folder / log_name("preemption")).write_text(text.partition(f"# checkpoint: step {step + 2} ")[0])
    run = six_steps(data, folder, "preemption", "--resume")
    assert run.returncode == 0 and f"# resumed after step {step} of 6" in run.stdout, run.stderr
    assert_same_run(folder, whole)
    return run


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")  # what DCP says of the crash's remains
@pytest.mark.parametrize("label", RESUMES)
def test_checkpoints_a_crashed_run_resumes_bit_by_bit(label, byte_tokens, tmp_path):
    """Whatever a rung keeps, with another rung's flags, too. The log goes on at its end; the two newest files stay."""
    more = ["--recompute-blocks", 9] if builds_on(label, "gradient_checkpointing") else []
    assert six_steps(byte_tokens, tmp_path / "whole", label, *more).returncode == 0
    module, folder = rung(label), tmp_path / "crashed"
    crash_in_step(module, 6)
    with pytest.raises(Crash):
        train(module, folder, byte_tokens, *SIX, *more)
    newest, = (path for path in (folder / "checkpoints").iterdir() if path.name.startswith("step_0000004"))
    half = newest.with_name("shards.partial" if newest.is_dir() else "partial")  # as a kill in the next save leaves it
    half.mkdir() if newest.is_dir() else half.write_text("a half")
    os.utime(newest / "notes.json" if newest.is_dir() else newest, (0, 0))  # as a copy's, its time says nothing
    crashed = (folder / log_name(label)).read_text()
    run = six_steps(byte_tokens, folder, label, *more, "--resume")
    assert run.returncode == 0, run.stderr
    assert "# resumed after step 4 of 6" in run.stdout and "step : 4 " not in run.stdout
    assert not more or "# recomputed blocks: 2 of 2\n" in run.stdout
    assert_same_run(folder, tmp_path / "whole", label)
    assert {name.removesuffix(".pt") for name in names_in(folder / "checkpoints")} == {STEP_4[:-3], STEP_6[:-3]}
    assert [path.read_text() for path in folder.glob("*.log*")] == [crashed + run.stdout] and "step : 5 " in crashed
    log = read_log(folder / log_name(label))
    assert log.complete and log.first_counted_step == 6


def test_checkpoints_copies_among_the_checkpoints_are_left_alone(byte_tokens, whole, copied, tmp_path):
    """Whatever a user calls them. The one that counts is older than the comparison of the number of tokens."""
    folder = copied(STEP_4)
    names = ("step_keep.pt", "step_0000009_before.pt", "step_00000009.pt")
    for name in names:
        (folder / name).write_text("mine")
    saved = torch.load(folder / STEP_4, weights_only=True)
    del saved["run"]["train_tokens"]
    torch.save(saved, folder / STEP_4)
    assert_resumes(byte_tokens, whole, tmp_path)
    assert [(folder / name).read_text() for name in names] == ["mine"] * len(names)


def test_checkpoints_without_checkpoints_no_folder_is_needed(byte_tokens, copied, tmp_path):
    """Nor is an earlier run's in the way; but --resume goes on from it."""
    def run(*words):
        return six_steps(byte_tokens, tmp_path, "preemption", "--checkpoint-every", 0, *words)

    (tmp_path / "file").write_text("not a folder")
    assert run("--checkpoint-dir", tmp_path / "file" / "x").returncode == 0
    folder = copied(STEP_4)
    assert "step : 1 " in run().stdout
    assert "# resumed after step 4" in run("--resume").stdout and names_in(folder) == {STEP_4}


def test_checkpoints_a_finished_run_repeats_nothing(byte_tokens, whole, copied, tmp_path):
    """Killed after its last checkpoint it still owes its log's end and --save's file; and again, if it is asked to."""
    copied(STEP_6)
    for _ in range(2):
        assert "step : " not in assert_resumes(byte_tokens, whole, tmp_path, 6).stdout
    assert read_log(tmp_path / log_name("preemption")).complete


@pytest.mark.parametrize("label, more, meta, reason", [
    ("preemption", [], {}, f".*{STEP_4} is .*--resume .*--checkpoint-dir"),
    ("gradient_checkpointing", ["--resume"], {}, "--resume: .* with script 5_preemption.py, not 6_gradient_check"),
    ("long_run", ["--resume"], {}, "--resume: .* with script 5_preemption.py, not long_run.py"),
    ("preemption", ["--resume", "--steps", 9], {}, "--resume: .* with steps 6, not 9; .*--pretrained"),
    ("preemption", ["--resume"], {"sha256": "0" * 64}, r"--resume: .* with text \w+ in bytes tokens, not 0000"),
    ("preemption", ["--resume"], {"tokenizer": "gpt2"}, r"--resume: .* text (\w+) in bytes tokens, not \1 in gpt2"),
    ("preemption", ["--resume"], {"train_tokens": 900}, r"--resume: .* with train_tokens \d+, not 900"),
])
def test_checkpoints_a_different_run_is_not_resumed(label, more, meta, reason, copied, byte_tokens, tmp_path):
    """Nor one on another text of as many tokens, nor by a rung that could go on longer. And its log is still there.

    On one text two tokenizers of one name, or two shares of held-out text, show in the number of tokens.
    """
    copied(STEP_4)
    data = shutil.copytree(byte_tokens, tmp_path / "data")
    edit_json(data / "meta.json", **meta)
    (tmp_path / log_name(label)).write_text("an earlier log")
    assert_refused(six_steps(data, tmp_path, label, *more), "error: " + reason)
    assert [path.read_text() for path in tmp_path.glob("*.log*")] == ["an earlier log"]


FREE = {"B", "device", "compile_mode", "data", "log_dir", "save", "checkpoint_every", "checkpoint_dir", "val_every",
        "val_sequences", "recompute_blocks", "loss_chunk"}


def another(value):
    """A value of a flag that is not `value`."""
    return value + 1 if type(value) is int else value / 2 if type(value) is float else Path(f"{value or ''}.other")


@pytest.mark.parametrize("label", rungs_that_change("Checkpoints", "add_flags", since="checkpoints"))
def test_checkpoints_every_flag_is_free_or_what_the_run_is(label, tmp_path, byte_tokens, monkeypatch):
    """Whatever flags a rung has."""
    module, made = rung(label), []
    Checkpoints = module.Checkpoints
    module.Checkpoints = lambda *parts: made.append(parts) or Checkpoints(*parts)
    train(module, tmp_path, byte_tokens, *ONE, "--steps", 4, "--val-every", 4, "--val-sequences", 1,
          "--checkpoint-every", 4)  # after the last step the rate has fallen, so --steps is not free
    (args, *parts), = made
    shutil.copytree(args.checkpoint_dir, another(args.checkpoint_dir))  # somebody may have moved them
    flags, load_file = vars(args), functools.cache(torch.load)
    monkeypatch.setattr(torch, "load", lambda *file, **how: copy.deepcopy(load_file(*file, **how)))  # it takes longer

    def load(**changes):
        """The step that a run with other flags would resume after."""
        return Checkpoints(SimpleNamespace(**flags | {"resume": True} | changes), *parts).load()

    assert load() == 4
    refused = set()
    for name in flags.keys() - {"resume"}:
        try:
            assert load(**{name: another(flags[name])}) == 4
        except SystemExit as stop:
            assert f" with {name} {flags[name]}, not {another(flags[name])}; " in stop.code
            refused.add(name)
    assert refused == flags.keys() - FREE - {"resume"} and len(refused) >= 8


@pytest.mark.parametrize("label", rungs_that_change(
    "Checkpoints.load", "Checkpoints.refuse_other_run", since="trapezoid_lr"))
def test_a_run_stopped_before_the_decay_may_get_another_end(label, tmp_path, byte_tokens):
    """12 steps, stopped after 5 and resumed for 8, are 8 from the start. Not once the decay has begun, in either.

    Of 8 steps the fifth is the last at the highest rate.
    """
    flags = (*ONE, "--checkpoint-every", 5, "--decay-share", 0.5)
    whole = train(rung(label), tmp_path / "whole", byte_tokens, *flags, "--steps", 8)
    module, stopped = rung(label), tmp_path / "stopped"
    crash_in_step(module, 6)
    with pytest.raises(Crash):
        train(module, stopped, byte_tokens, *flags, "--steps", 12)
    for more, other in ((("--steps", 7), "steps 12, not 7"), (("--decay-share", 0.8), "decay_share 0.5, not 0.8")):
        with pytest.raises(SystemExit, match=f"with {other}; "):
            train(rung(label), stopped, byte_tokens, *flags, "--steps", 12, "--resume", *more)
    resumed = train(rung(label), stopped, byte_tokens, *flags, "--steps", 8, "--resume")
    assert losses(resumed) == losses(whole)
    assert read_log(resumed).headers["steps"] == "8"
    with pytest.raises(SystemExit, match="with steps 8, not 12; .*--pretrained"):
        train(rung(label), stopped, byte_tokens, *flags, "--steps", 12, "--resume")


@pytest.mark.parametrize("label", LOADS)
def test_checkpoints_a_checkpoint_is_on_the_disk_before_it_gets_its_name(label, tmp_path, byte_tokens, monkeypatch):
    """After a power cut a file that was renamed but not written through may be empty; so may one of a sharded one's."""
    synced, fsync, folder = [], os.fsync, tmp_path / "checkpoints"

    def watched_fsync(file):
        synced.append((os.fstat(file).st_size, [*folder.glob("step_*")]))
        fsync(file)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    train(rung(label), tmp_path, byte_tokens, *ONE, "--steps", 1)
    path, = folder.glob("step_*")
    files = [*path.iterdir()] if path.is_dir() else [path]
    assert all(not named for _, named in synced)
    assert {size for size, _ in synced} == {file.stat().st_size for file in files}


@pytest.mark.parametrize("label", [label for label in LOADS if label != "sharded_checkpoint"])
def test_checkpoints_a_checkpoint_runs_no_code(label, tmp_path, byte_tokens):
    """As it could if it were unpickled without weights_only."""
    (tmp_path / "checkpoints").mkdir()
    torch.save({"step": Attack(tmp_path / "attacked")}, tmp_path / "checkpoints" / "step_0000001.pt")
    with pytest.raises(pickle.UnpicklingError):
        train(rung(label), tmp_path, byte_tokens, *ONE, "--steps", 2, "--resume")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("label", [label for label in LOADS if label != "sharded_checkpoint"])
def test_checkpoints_a_checkpoint_is_plain_and_holds_the_scaler(label, tmp_path, byte_tokens):
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
        save_as_from_a_gpu(saved | {"scaler": scaler}, path)
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
@pytest.mark.parametrize("label", ["checkpoints", "long_run"])
def test_preemption_twenty_kills_at_random_moments(label, tmp_path, byte_tokens):
    """SIGKILL, also while a checkpoint is written: every run ends with the losses and weights of the whole one."""
    data = tokens_of(tmp_path / "tokens", np.fromfile(byte_tokens / "train.bin", dtype="<u2")[:400])  # 24 steps
    module, moments, kills, half_written = rung(label), random.Random(0), 0, set()
    flags = (*ONE, "--steps", 40, "--checkpoint-every", 1, "--val-every", 10, "--val-sequences", 1, "--resume")
    (tmp_path / "whole").mkdir()
    train(module, tmp_path / "whole", data, *flags, "--save", tmp_path / "whole" / "model.pt")
    while kills < 20:
        folder, longest, ended = tmp_path / f"killed_{kills}", 1.2, False  # seconds; 0.3 until the first step, or more
        folder.mkdir()
        while not ended:  # a life is a fork of this process, which has imported torch
            words = (module, folder, data, *flags, "--save", folder / "model.pt")
            life = get_context("fork").Process(target=train, args=words)
            life.start()
            life.join(moments.uniform(0.01, longest))
            ended = life.exitcode is not None
            life.kill()
            life.join()
            kills, longest = kills + (not ended), 1.1 * longest
            half_written |= {(folder, path.stat().st_mtime_ns) for path in folder.glob("checkpoints/partial")}
        assert life.exitcode == 0
        assert_same_run(folder, tmp_path / "whole", label)
    assert len(half_written) >= 2


@pytest.mark.parametrize("damage", [
    cut_in_half, lambda path: path.write_bytes(b""), lambda path: torch.save({"script": "of --save"}, path)])
def test_checkpoints_what_is_no_whole_checkpoint_is_named(damage, byte_tokens, whole, copied, tmp_path):
    newest = copied(STEP_4, STEP_6) / STEP_6
    damage(newest)
    line = f"error: --resume: {newest} is damaged, or no checkpoint; delete it to resume from the one before"
    assert_refused(six_steps(byte_tokens, tmp_path, "preemption", "--resume"), line)
    newest.unlink()
    assert_resumes(byte_tokens, whole, tmp_path)


def test_checkpoints_a_full_disk_or_a_deleted_folder_costs_a_checkpoint_not_the_run(byte_tokens, whole, tmp_path):
    """Step 2 finds a full disk, step 4 no folder: both are said or mended, and the run is what it would have been."""
    module, folder = rung("preemption"), tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "partial").symlink_to("/dev/full")
    step = module.Log.step

    def step_and_delete(log, number, *args, **more):
        step(log, number, *args, **more)
        if number == 3:
            assert names_in(folder) == set()
            shutil.rmtree(folder)

    module.Log.step = step_and_delete
    log = train(module, tmp_path, byte_tokens, *SIX, "--save", tmp_path / "model.pt")
    assert log.read_text().count("# WARNING: no checkpoint of step 2: ") == log.read_text().count("WARNING: no ") == 1
    assert names_in(folder) == {STEP_4, STEP_6}
    assert_same_weights(tmp_path / "model.pt", whole / "model.pt")


def test_a_full_disk_costs_a_sharded_checkpoint_not_the_run(byte_tokens, tmp_path):
    """Here a file is in the way of the shards."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "shards.partial").write_text("a file")
    log = train(rung("sharded_checkpoint"), tmp_path, byte_tokens, *ONE, "--steps", 1, "--save", tmp_path / "model.pt")
    assert "# WARNING: no checkpoint of step 1: " in log.read_text() and (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_preemption_a_drive_without_locks_keeps_checkpoints(error, byte_tokens, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    run = six_steps(byte_tokens, tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"# WARNING: {tmp_path}/checkpoints has no lock, so start no second run in it: " in run.stdout
    assert names_in(tmp_path / "checkpoints") == {STEP_4, STEP_6}


def interrupt(monkeypatch, call, number=signal.SIGINT):
    """Send this process a signal at this call of the attention, 2 of each forward pass, 4 of a step."""
    attention, calls = F.scaled_dot_product_attention, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", interrupted)


@pytest.mark.parametrize("number, call, steps", [
    (signal.SIGINT, 3, {1}), (signal.SIGTERM, 15, {3, 4}), (signal.SIGHUP, 15, {3, 4})])
def test_preemption_a_signal_saves_and_ends_well(number, call, steps, byte_tokens, whole, tmp_path, monkeypatch):
    """In the first step, or in the third or the validation after it."""
    interrupt(monkeypatch, call, number)
    run = six_steps(byte_tokens, tmp_path)
    assert run.returncode == 0, run.stderr
    stopped = len(losses(tmp_path / log_name("preemption")))
    log = (tmp_path / log_name("preemption")).read_text()
    assert stopped in steps and f"# checkpoint: step {stopped} in " in log
    assert f"# ended by a signal after step {stopped}" in log and f"-{stopped}\n" in log[log.index("median : ") :]
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == stopped
    monkeypatch.undo()
    run = six_steps(byte_tokens, tmp_path, "preemption", "--resume")
    assert f"# resumed after step {stopped} of 6" in run.stdout
    assert_same_run(tmp_path, whole)


def test_preemption_the_first_interrupt_says_what_comes_and_the_third_ends_the_run_at_once(capfd):
    """In a long validation, or where a rank hangs; a second one may be a slip. SIGTERM never: torchrun sends more."""
    caught = rung("preemption").catch_signals()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    assert caught == 3 * [signal.SIGTERM] + [signal.SIGINT]
    assert capfd.readouterr().err == (
        "\nends after this step and saves; a third Ctrl-C ends at once\n")
    assert signal.SIG_DFL not in (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL != signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("nohup", [False, True])
def test_preemption_nohup_outlives_a_hangup(nohup):
    if nohup:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    caught = rung("preemption").catch_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert caught == ([] if nohup else [signal.SIGHUP])


def test_preemption_a_closed_terminal_saves(byte_tokens, tmp_path):
    """Though nothing can be printed any more: the log has the end, and a checkpoint the step."""
    terminal, output = pty.openpty()
    run = forked_program(output, "preemption", "--compile-mode", "none", "--data", byte_tokens, *ONE, "--steps", 10**6,
                         "--log-dir", tmp_path, "--checkpoint-dir", tmp_path / "checkpoints")
    log, deadline = tmp_path / log_name("preemption"), time.monotonic() + 60
    while not (log.exists() and "step : 2 " in log.read_text()):
        assert run.is_alive() and time.monotonic() < deadline
        os.read(terminal, 100_000)
    os.close(terminal)
    run.join(60)
    last = read_log(log).steps[-1]
    assert f"# ended by a signal after step {last}\n" in log.read_text()
    assert names_in(tmp_path / "checkpoints") >= {f"step_{last:07}.pt"}


def test_checkpoints_a_folder_that_cannot_be_written_ends_the_run_before_its_first_step(byte_tokens, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    run = six_steps(byte_tokens, tmp_path / "run", "preemption", "--checkpoint-dir", tmp_path / "file" / "checkpoints")
    assert_refused(run, r"error: \[Errno 20\] Not a directory: '.*/file/checkpoints'")
    assert not (tmp_path / "run" / log_name("preemption")).exists()


@pytest.mark.parametrize("label", rungs_that_change("Checkpoints.lock", since="preemption"))
def test_preemption_the_folder_stays_locked_while_the_run_lives(label, byte_tokens, tmp_path):
    """After each step, and the checkpoint of the first, another run is refused; once it has ended, it is not."""
    module, tried = rung(label), []
    step, other = module.Log.step, (tmp_path / "other", "preemption", "--checkpoint-dir", tmp_path / "checkpoints")

    def step_and_try(log, number, *args, **more):
        step(log, number, *args, **more)
        gc.collect()
        tried.append(six_steps(byte_tokens, *other))

    module.Log.step = step_and_try
    train(module, tmp_path, byte_tokens, *ONE, "--steps", 2, "--checkpoint-every", 1)
    assert len(tried) == 2
    for run in tried:
        assert_refused(run, f"error: --checkpoint-dir {tmp_path}/checkpoints: in use by another run; give another")
    run = six_steps(byte_tokens, *other, "--resume")
    assert "in use" not in run.stderr


def test_checkpoints_a_folder_that_the_ranks_do_not_share_is_refused(copied, byte_tokens, tmp_path, group_of_one,
                                                                     monkeypatch):
    """By the rank that cannot read what rank 0 has found; else the ranks would train different models."""
    missing = copied(STEP_6) / STEP_4
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda found: found.__setitem__(0, [missing]))
    run = six_steps(byte_tokens, tmp_path, "preemption", "--resume")
    assert_refused(run, fr"error: \[Errno 2\] No such file or directory: '{missing}'")
