"""The rungs beyond speed: each capability shown on the thing itself."""
import argparse
import io
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import filelock
import numpy as np
import pytest
import torch
from conftest import ROOT, losses, new_gpt, own_settings, read_steps, run_command, rung, train
from test_ddp import RANK, TWO_RANKS
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.scripts.stages import BY_LABEL

ACCUMULATION, PREFETCH, VALIDATION, RESUME, PREEMPTION, RECOMPUTE = "11", "12", "13", "14", "15", "16"
LAST_TWO = list(BY_LABEL)[-2:]
FLOAT32 = torch.float32
SAVING = pytest.mark.parametrize("label", [PREEMPTION, pytest.param(RESUME, marks=pytest.mark.slow)])


def log_name(label):
    return f"{BY_LABEL[label].name}.log"


def first_gradients(folder, tokens, *flags, label=ACCUMULATION):
    """The gradients that the first optimizer step of a float32 run finds, before AdamW."""
    module = rung(label)
    module.autocast_dtype = lambda device: FLOAT32
    found = []

    def record(optimizer, args, kwargs):
        found.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

    handle = register_optimizer_step_pre_hook(record)
    try:
        log = train(module, folder, tokens, "-T", 32, "--steps", 1, *flags)
    finally:
        handle.remove()
    return found[0], read_steps(log)[0]


def test_11_micro_batches_give_the_gradient_of_the_one_batch(tmp_path, tokens):
    one, one_step = first_gradients(tmp_path / "one", tokens, "-B", 8, "--total-batch", 256)
    parts, parts_step = first_gradients(tmp_path / "parts", tokens, "-B", 2, "--total-batch", 256)
    for expected, actual in zip(one, parts, strict=True):
        assert (actual - expected).norm() <= 1e-6 * expected.norm() + 1e-12
    assert parts_step["loss"] == pytest.approx(one_step["loss"], rel=1e-6)
    assert parts_step["norm"] == pytest.approx(one_step["norm"], abs=2e-4)


@pytest.mark.slow
def test_11_two_ranks_with_micro_batches_equal_one_process(tmp_path, tokens):
    """2 ranks x 2 micro-steps x B=2 against one process with B=8, float32: as for DDP itself."""
    def flags(folder, B):
        return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", B, "-T", 32,
                "--steps", 6, "--compile-mode", "none", "--total-batch", 256]

    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
    two = run_command(*TWO_RANKS, RANK, tmp_path / "two", ACCUMULATION, *flags(tmp_path / "two", 2))
    one = run_command(sys.executable, RANK, tmp_path / "one", ACCUMULATION, *flags(tmp_path / "one", 8))
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    name = log_name(ACCUMULATION)
    assert losses(tmp_path / "two" / name) == pytest.approx(losses(tmp_path / "one" / name), abs=1e-4)
    for step in read_steps(tmp_path / "two" / name):
        assert step["tokens_per_second"] == pytest.approx(256 / (step["ms"] / 1000), rel=1e-3)
    rank0, rank1 = (torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "rankalone.pt", weights_only=True)
    for name in alone:
        assert torch.equal(rank0[name], rank1[name])
        assert torch.allclose(rank0[name], alone[name], rtol=0, atol=6e-6), name


@pytest.fixture
def group_of_one(monkeypatch):
    """The environment that torchrun gives to a single process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}.items():
        monkeypatch.setenv(name, value)


def test_11_gradients_cross_the_ranks_once_a_step(tmp_path, tokens, group_of_one):
    """DDP's averaging is off in every micro-step but the last (counted in a group of one process)."""
    module = rung(ACCUMULATION)
    synchronized = []

    class CountingDDP(module.DDP):
        def forward(self, *args):
            synchronized.append(self.require_backward_grad_sync)
            return super().forward(*args)

    module.DDP = CountingDDP
    train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 64, "--steps", 2)
    assert synchronized == [False, False, False, True] * 2


@pytest.mark.slow
@pytest.mark.parametrize("label", [RECOMPUTE, *LAST_TWO])
def test_compiled_on_two_ranks(label, tmp_path, tokens):
    """DDP, no_sync, at last FSDP, torch.compile, and what later rungs add, in bfloat16 where a CPU has it (0.2 %)."""
    found = []
    for mode in ("default", "none"):
        run = run_command(
            *TWO_RANKS, BY_LABEL[label].file, "--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir",
            tmp_path / mode, "--checkpoint-dir", tmp_path / mode, "-B", 1, "-T", 32, "--total-batch", 192,
            "--steps", 4, "--compile-mode", mode,
        )
        assert run.returncode == 0, run.stderr
        found.append(losses(tmp_path / mode / log_name(label)))
    assert found[0] == pytest.approx(found[1], abs=0.02)


def test_11_total_batch_must_fit(tmp_path, tokens):
    with pytest.raises(SystemExit, match=r"^error: --total-batch 100: not a multiple of B \* T \* ranks = 64"):
        train(rung(ACCUMULATION), tmp_path, tokens, "-B", 2, "-T", 32, "--total-batch", 100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["mapped", "on the device", "pinned"])
def test_12_the_same_batches(way, tokens, monkeypatch):
    """More than two epochs of them, on each of the three ways to the device."""
    device, module = "cpu", rung(PREFETCH)
    module.free_memory = lambda device: 1e12 if way == "on the device" else 0
    if way == "pinned":  # what a GPU would do, as far as a CPU can
        pinned = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
        device = "cuda"
    before = rung(ACCUMULATION).DataLoaderLite(tokens, 8, 1024)
    after = module.DataLoaderLite(tokens, 8, 1024, device)
    assert after.on_device == (way == "on the device") and after.n_batches == before.n_batches
    for i in range(2 * before.n_batches + 1):
        for expected, actual in zip(before.batch(i), after.batch(i), strict=True):
            assert torch.equal(actual, expected) and actual.dtype == torch.int64
    assert way != "pinned" or len(pinned) == 2 * before.n_batches + 1


def tokens_of(folder, ids, val_ids=None):
    """A data folder with these token ids as train and, unless `val_ids` are given, as val."""
    folder.mkdir()
    meta = {"source": "made up", "sha256": "", "tokenizer": "gpt2", "vocab_size": 50257, "end_of_text": 50256}
    for split, own in {"train": ids, "val": ids if val_ids is None else val_ids}.items():
        np.array(own, dtype="<u2").tofile(folder / f"{split}.bin")
        meta[f"{split}_tokens"] = len(own)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("free", [0, 1e12])
def test_13_validation_data_is_val_data(free, tmp_path):
    """Also where the file fits on the device."""
    module = rung(VALIDATION)
    module.free_memory = lambda device: free
    folder = tokens_of(tmp_path / "tokens", range(100), range(50_000, 50_257))
    assert module.DataLoaderLite(folder, 2, 4, "cpu").batch(0)[0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    x, y = module.DataLoaderLite(folder, 1, 4, "cpu", "val").batch(1)
    assert x.tolist() == [[50_004, 50_005, 50_006, 50_007]]  # ids above 32,767 survive the way
    assert y.tolist() == [[50_005, 50_006, 50_007, 50_008]]


def test_12_trains_as_before_and_fetches_before_it_waits_for_the_device(tmp_path, tokens, monkeypatch):
    flags = ("-B", 1, "-T", 32, "--steps", 3)
    expected = losses(train(rung(ACCUMULATION), tmp_path / "before", tokens, *flags))
    module = rung(PREFETCH)
    batch, events = module.DataLoaderLite.batch, []
    module.DataLoaderLite.batch = lambda self, i: (i in self.prefetched or events.append(i)) and None or batch(self, i)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: events.append("synchronize"))
    assert losses(train(module, tmp_path / "after", tokens, *flags)) == expected
    assert events == [0, 1, 2, 3, 4, "synchronize", 5, 6, 7, 8, "synchronize", 9, 10, 11, 12, "synchronize"]


def val_lines(log):
    """[(step, validation loss)] of a log."""
    found = [re.fullmatch(r"val : step (\d+) \| loss: (\S+) \| time: (\S+) s", line)
             for line in log.read_text().splitlines() if line.startswith("val")]
    return [(int(line[1]), float(line[2])) for line in found]


@pytest.mark.parametrize("free", [0, 1e12])
def test_13_the_loss_is_that_of_val_bin(free, tmp_path, tokens):
    """The mean over all whole sequences of val.bin, computed here from the file and the saved weights."""
    module = rung(VALIDATION)
    module.autocast_dtype, module.free_memory = lambda device: FLOAT32, lambda device: free
    B, T = 2, 64
    ids = np.fromfile(tokens / "train.bin", dtype="<u2")
    folder = tokens_of(tmp_path / "tokens", ids[:1000], ids[1000:1500])
    log = train(module, tmp_path, folder, "-B", B, "-T", T, "--steps", 3, "--val-every", 2, "--val-sequences", 0,
                "--save", tmp_path / "model.pt")
    assert [step for step, _ in val_lines(log)] == [2, 3]  # and always after the last step
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(np.fromfile(folder / "val.bin", dtype="<u2").astype(np.int64))
    n = (len(ids) - 1) // T
    total = 0.0
    for i in range(n):
        logits = model(ids[None, i * T : (i + 1) * T])[0].detach()
        total += F.cross_entropy(logits.double(), ids[i * T + 1 : (i + 1) * T + 1]).item()
    assert val_lines(log)[-1][1] == pytest.approx(total / n, abs=1e-5)
    assert f"# validation: every 2 steps on {n} of {n} sequences" in log.read_text()


class Casts(TorchDispatchMode):
    """Counts the casts of a model's parameters."""

    def __init__(self, model):
        super().__init__()
        self.parameters, self.count = {parameter.data_ptr() for parameter in model.parameters()}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self.parameters
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("label", [VALIDATION, *LAST_TWO])
def test_13_each_weight_is_cast_once_for_all_sequences(label, tokens):
    module = rung(label)
    model, counts = new_gpt(module), []
    for n_sequences in (1, 5):
        with Casts(model) as casts:
            loader = module.DataLoaderLite(tokens, 1, 32, "cpu", "val")
            module.evaluate(model, loader, n_sequences, 1, torch.bfloat16, 0, 1)
        counts.append(casts.count)
    assert counts[0] == counts[1] >= 2 * 4  # of two blocks, and not in float32 by accident


@pytest.mark.parametrize("label", [VALIDATION, *LAST_TWO])
def test_13_validates_on_the_same_sequences_whatever_b_and_the_number_of_ranks(label, tokens, monkeypatch):
    module = rung(label)
    model, loader = new_gpt(module), module.DataLoaderLite(tokens, 1, 32, "cpu", "val")
    shapes = []
    model.register_forward_hook(lambda model, inputs, loss: shapes.append(len(inputs[0])))
    with torch.no_grad():
        expected = np.mean([model(*loader.batch(i)).item() for i in range(5)])
    shapes.clear()
    for B, sizes in ((1, [1] * 5), (2, [2, 2, 1]), (8, [5])):
        assert module.evaluate(model, loader, 5, B, torch.float32, 0, 1) == pytest.approx(expected, abs=1e-5)
        assert shapes == sizes
        shapes.clear()
    shares = [module.evaluate(model, loader, 5, 2, torch.float32, rank, 3) for rank in range(3)]
    assert sum(shares) == pytest.approx(expected, abs=1e-5)


def test_13_watching_changes_nothing(tmp_path, tokens):
    flags = ("-B", 1, "-T", 32, "--steps", 3, "--val-sequences", 2)
    logs = [train(rung(VALIDATION), tmp_path / every, tokens, *flags, "--val-every", every) for every in ("0", "1")]
    assert losses(logs[0]) == losses(logs[1])
    assert val_lines(logs[0]) == [] and len(val_lines(logs[1])) == 3


def beyond_flags(tokens, folder, B, *more):
    folder.mkdir(exist_ok=True)
    return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", B, "-T", 32,
            "--compile-mode", "none", "--total-batch", 128, *more]


@pytest.mark.slow
def test_13_two_ranks_see_what_one_process_sees(tmp_path, tokens):
    """Also when the sequences are not a multiple of the ranks."""
    more = ("--steps", 4, "--val-every", 2, "--val-sequences", 5)
    two = run_command(*TWO_RANKS, RANK, tmp_path, VALIDATION, *beyond_flags(tokens, tmp_path / "two", 2, *more))
    one = run_command(sys.executable, RANK, tmp_path, VALIDATION, *beyond_flags(tokens, tmp_path / "one", 4, *more))
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    ours, truth = (val_lines(tmp_path / name / log_name(VALIDATION)) for name in ("two", "one"))
    assert [step for step, _ in ours] == [2, 4]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in truth], abs=1e-4)


def test_13_too_little_text_to_validate(tmp_path):
    folder = tokens_of(tmp_path / "tokens", range(100), range(10))
    with pytest.raises(SystemExit, match="10 val tokens, a batch needs 33"):
        train(rung(VALIDATION), tmp_path, folder, "-B", 1, "-T", 32)
    train(rung(VALIDATION), tmp_path, folder, "-B", 1, "-T", 16, "--steps", 1, "--val-every", 0)


CHECKPOINTS = ("--steps", 6, "--checkpoint-every", 2, "--val-every", 3, "--val-sequences", 4)


def long_run(tokens, folder, label, *more):
    """Six steps of a rung with checkpoints, as a program, but in this process: to import torch takes longer than that.

    What a process has that ended: returncode, stdout, stderr.
    """
    flags = beyond_flags(tokens, folder, 2, *CHECKPOINTS, "--save", folder / "model.pt")
    words = [BY_LABEL[label].path, *flags, "--checkpoint-dir", folder / "checkpoints", *more]
    output, errors = io.StringIO(), io.StringIO()
    with own_settings(), pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", [str(word) for word in words])
        try:
            code = runpy.run_path(sys.argv[0], run_name="__main__") and 0
        except SystemExit as stop:
            code = print(stop.code, file=sys.stderr) or 1 if isinstance(stop.code, str) else stop.code or 0
    return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr=errors.getvalue())


def assert_refused(run, line):
    """It ended with this one line, a pattern, and no step was trained."""
    assert run.returncode == 1 and "step : " not in run.stdout
    assert re.fullmatch(line + r".*\n", run.stderr), run.stderr


def checkpoints_of(folder):
    """The names of what a folder of checkpoints holds."""
    return {path.name for path in folder.iterdir()} - {"lock"}


STEP_4, STEP_6 = "step_0000004.pt", "step_0000006.pt"


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory, tokens):
    """{label: folder of a run that nothing disturbed}, checkpoints of steps 4 and 6 among its files."""
    folders = {}
    for label in (RESUME, PREEMPTION):
        folders[label] = tmp_path_factory.mktemp(f"whole_{label}")
        run = long_run(tokens, folders[label], label)
        assert run.returncode == 0, run.stderr
        assert checkpoints_of(folders[label] / "checkpoints") == {STEP_4, STEP_6}
    return folders


def what_it_says(log):
    """The lines of a log, without times and without those of a run's interruptions."""
    lines = [re.sub(r"(dt|tokens/sec|left|time): [^|]*", "", line) for line in log.read_text().splitlines()]
    return [line for line in lines if not line.startswith(("# checkpoint", "# resumed", "# ended", "# WARNING"))]


def assert_same_run(folder, whole, label, second_half="4-6"):
    """Bit by bit: the losses of all steps, each once, the validation losses, the rest of the log, and the weights."""
    ours, truth = (what_it_says(path / log_name(label)) for path in (folder, whole))
    assert ours == truth and ours[-1].endswith(f"| steps {second_half}")  # the median is that of all steps
    ours, truth = (torch.load(path / "model.pt", weights_only=True)["model"] for path in (folder, whole))
    assert all(torch.equal(ours[key], truth[key]) for key in truth)


def copy_run(whole, folder, *names):
    """Copy these checkpoints of a whole run to a folder; returns the folder of the checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in names:
        (folder / "checkpoints" / name).write_bytes((whole / "checkpoints" / name).read_bytes())
    return folder / "checkpoints"


class Crash(Exception):
    """What ends a run in the middle of a step."""


@SAVING
def test_14_a_crashed_run_resumes_bit_by_bit(label, whole_runs, tokens, tmp_path):
    """Another run's log in the way is kept, under its date: the log continues from the checkpoint's."""
    module = rung(label)
    forward, calls = module.GPT.forward, []

    def crashing_forward(self, *args):
        calls.append(args)
        if len(calls) > 12:  # four steps of 2 micro-steps and a validation of 4 sequences
            raise Crash
        return forward(self, *args)

    module.GPT.forward = crashing_forward
    flags = ["-B", 2, "--total-batch", 128, "--checkpoint-dir", tmp_path / "checkpoints", *CHECKPOINTS]
    with pytest.raises(Crash):
        train(module, tmp_path, tokens, "-T", 32, *flags)
    (tmp_path / log_name(label)).write_text("step : 1 | loss: 1.0 | another run's log\nstep : ")
    run = long_run(tokens, tmp_path, label, "--resume")
    assert run.returncode == 0, run.stderr
    assert "# resumed after step 4 of 6" in run.stdout and "step : 4 " not in run.stdout
    assert_same_run(tmp_path, whole_runs[label], label)
    [earlier] = tmp_path.glob(f"{log_name(label)}.20*")
    assert earlier.read_text() == "step : 1 | loss: 1.0 | another run's log\nstep : "


@SAVING
def test_14_a_finished_run_repeats_nothing(label, whole_runs, tokens, tmp_path):
    """Killed after its last checkpoint it still owes its log's end and --save's file; and again, if it is asked to."""
    copy_run(whole_runs[label], tmp_path, STEP_6)
    for _ in range(2):
        run = long_run(tokens, tmp_path, label, "--resume")
        assert run.returncode == 0, run.stderr
        assert "# resumed after step 6 of 6" in run.stdout and "step : " not in run.stdout
        assert_same_run(tmp_path, whole_runs[label], label)


@pytest.mark.parametrize("label, more, reason", [
    (PREEMPTION, ["--resume", "--steps", 7], "--resume: .*{} has steps 6, not 7"),
    (PREEMPTION, ["--resume", "--max-lr", 1e-3], "--resume: .*{} has max_lr 0.0006, not 0.001"),
    (PREEMPTION, [], ".*{}: from an earlier run; --resume goes on, another --checkpoint-dir starts over"),
    (RECOMPUTE, ["--resume"], "--resume: .*{} has script rung_15_preemption.py, not rung_16_gradient_checkpointing.py"),
])
def test_14_a_different_run_is_not_resumed(label, more, reason, whole_runs, tokens, tmp_path):
    """And its log is still there."""
    copy_run(whole_runs[PREEMPTION], tmp_path, STEP_6)
    (tmp_path / log_name(label)).write_text("an earlier log")
    assert_refused(long_run(tokens, tmp_path, label, *more), "error: " + reason.format(STEP_6))
    assert [path.read_text() for path in tmp_path.glob("*.log*")] == ["an earlier log"]


def test_14_another_text_is_another_run(whole_runs, tokens, tmp_path):
    """Wherever it lies: the same one may be elsewhere."""
    copy_run(whole_runs[PREEMPTION], tmp_path, STEP_6)
    other = tokens_of(tmp_path / "tokens", np.fromfile(tokens / "train.bin", dtype="<u2"))
    line = r"error: --resume: .* has text \w+ in gpt2-bytes tokens, not  in gpt2 tokens"
    assert_refused(long_run(other, tmp_path, PREEMPTION, "--resume"), line)
    in_bytes = shutil.copytree(tokens, tmp_path / "in bytes")
    meta = json.loads((in_bytes / "meta.json").read_text())
    (in_bytes / "meta.json").write_text(json.dumps(meta | {"tokenizer": "gpt2"}))
    line = r"error: --resume: .* has text (\w+) in gpt2-bytes tokens, not \1 in gpt2 tokens"
    assert_refused(long_run(in_bytes, tmp_path, PREEMPTION, "--resume"), line)
    same = shutil.copytree(tokens, tmp_path / "the same")
    assert long_run(same, tmp_path, PREEMPTION, "--resume").returncode == 0


FREE = {"B", "device", "compile_mode", "data", "log_dir", "save", "checkpoint_every", "checkpoint_dir", "val_every",
        "val_sequences", "recompute_blocks", "loss_chunk", "patience"}


def another(value):
    """A value of a flag that is not `value`."""
    return value + 1 if type(value) is int else value / 2 if type(value) is float else Path(f"{value or ''}.other")


@pytest.mark.parametrize("label", [RESUME, PREEMPTION, "29", "31", "fsdp", "dcp"])
def test_14_every_flag_is_free_or_what_the_run_is(label, tmp_path, tokens):
    """Whatever flags a rung has; --val-sequences is not free where the best model depends on it."""
    module, made = rung(label), []

    class Seen(module.Checkpoints):
        def __init__(self, *args, **parts):
            super().__init__(*args, **parts)
            made.append(self)

    module.Checkpoints, original = Seen, module.Checkpoints
    train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 1, "--val-every", 1,
          "--val-sequences", 1, "--checkpoint-every", 1)
    run, refused = made[0], set()
    flags = vars(run.settings) | {"resume": True}
    assert original(SimpleNamespace(**flags), run.loader, **run.parts).load()[0] == 1
    with pytest.raises(SystemExit, match="from an earlier run; --resume goes on"):
        original(SimpleNamespace(**flags | {"resume": False}), run.loader, **run.parts).load()
    for name in flags.keys() - {"resume"}:
        settings = SimpleNamespace(**flags | {name: another(flags[name])})
        try:
            assert original(settings, run.loader, **run.parts).load()[0] == (name != "checkpoint_dir")
        except SystemExit as stop:
            assert f" has {name} {flags[name]}, not {another(flags[name])}; " in stop.code
            refused.add(name)
    free = FREE - ({"val_sequences"} if "patience" in flags else set())
    assert refused == flags.keys() - free - {"resume"} and len(refused) >= 8


def test_14_free_flags_change_no_step(whole_runs, tokens, tmp_path):
    """Four sequences at once, and other habits of validating and saving; up to float32's rounding."""
    copy_run(whole_runs[PREEMPTION], tmp_path, STEP_4)
    run = long_run(tokens, tmp_path, PREEMPTION, "--resume", "-B", 4, "--val-every", 5, "--val-sequences", 1,
                   "--checkpoint-every", 5, "--log-dir", tmp_path / "elsewhere")
    assert run.returncode == 0, run.stderr
    log, truth = tmp_path / "elsewhere" / log_name(PREEMPTION), whole_runs[PREEMPTION] / log_name(PREEMPTION)
    assert losses(log) == pytest.approx(losses(truth), abs=0.01) and [step for step, _ in val_lines(log)] == [3, 5, 6]
    assert checkpoints_of(tmp_path / "checkpoints") == {"step_0000005.pt", STEP_6}


def test_14_what_is_restored_does_not_stay_in_memory(whole_runs, tokens, tmp_path, monkeypatch):
    """Of the checkpoint that was read no weight is left when the first step begins."""
    copy_run(whole_runs[PREEMPTION], tmp_path, STEP_4)
    read, alive = [], []
    load, attention = torch.load, F.scaled_dot_product_attention

    def load_and_watch(*args, **kwargs):
        checkpoint = load(*args, **kwargs)
        read.append(weakref.ref(checkpoint["model"]["transformer.wpe.weight"]))
        return checkpoint

    monkeypatch.setattr(torch, "load", load_and_watch)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: (
        alive.append(read[0]() is not None) or attention(*args, **kwargs)))
    assert long_run(tokens, tmp_path, PREEMPTION, "--resume").returncode == 0
    assert len(read) == 1 and alive and not any(alive)


def test_14_a_run_in_bfloat16_goes_on_in_float16(whole_runs, tokens, tmp_path):
    """As on another GPU: the scaler, disabled until then, begins with its own state."""
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, STEP_4)
    module = rung(PREEMPTION)
    module.autocast_dtype = lambda device: torch.float16
    train(module, tmp_path, tokens, "-B", 2, "-T", 32, "--total-batch", 128, *CHECKPOINTS, "--resume")
    assert torch.load(checkpoints / STEP_6, weights_only=True)["scaler"]["_growth_tracker"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_14_another_number_of_ranks_resumes(first, then, tokens, tmp_path):
    """Float32, the same total batch: the losses of one process that did all six steps."""
    def part(ranks, folder, **dying):
        start = TWO_RANKS if ranks == 2 else [sys.executable]
        flags = beyond_flags(tokens, folder, 2, "--steps", 6, "--checkpoint-every", 2, "--val-every", 0, "--resume")
        return run_command(*start, RANK, folder, RESUME, *flags, "--checkpoint-dir", folder / "checkpoints", **dying)

    # killed in the fifth step; batches are fetched one ahead
    dying = {"DIE_RANK": "0", "DIE_BATCH": "6"} if first == 2 else {"DIE_RANK": "alone", "DIE_BATCH": "10"}
    assert part(first, tmp_path, **dying).returncode != 0
    run = part(then, tmp_path)
    assert run.returncode == 0, run.stderr
    assert part(1, tmp_path / "whole").returncode == 0
    assert "# resumed after step 4 of 6" in run.stdout
    ours, truth = (losses(folder / log_name(RESUME)) for folder in (tmp_path, tmp_path / "whole"))
    assert ours == pytest.approx(truth, abs=1e-4)


def test_14_a_checkpoint_is_plain_and_holds_the_scaler(tmp_path, tokens):
    """float16, as on a T4: the scaler's state is there; and a checkpoint serves wherever a saved model does."""
    module = rung(RESUME)
    module.autocast_dtype = lambda device: torch.float16
    flags = ("-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2)
    train(module, tmp_path, tokens, *flags)
    path = tmp_path / "checkpoints" / "step_0000002.pt"
    checkpoint = torch.load(path, weights_only=True)
    assert {"script", "config", "model", "step", "tokenizer"} <= set(checkpoint)
    assert checkpoint["scaler"]["_growth_tracker"] == 2  # steps since the scale last changed
    log = train(module, tmp_path / "next", tokens, *flags, "--pretrained", path)
    assert losses(log)[0] < losses(tmp_path / log.name)[0]


@SAVING
def test_14_a_folder_that_cannot_be_written_is_noticed_first(label, tmp_path, tokens):
    (tmp_path / "file").write_text("not a folder")
    run = long_run(tokens, tmp_path / "run", label, "--checkpoint-dir", tmp_path / "file" / "checkpoints")
    assert_refused(run, f"error: .*{tmp_path}/file")


@pytest.mark.slow
def test_15_twenty_kills_at_random_moments(tmp_path, tokens):
    """SIGKILL, also while a checkpoint is written: every run ends with the losses and weights of the whole one."""
    text = tokens_of(tmp_path / "tokens", np.fromfile(tokens / "train.bin", dtype="<u2")[:400])  # 24 steps an epoch
    flags = ["--model", "tiny", "--device", "cpu", "--data", text, "-B", 1, "-T", 16, "--total-batch", 16,
             "--compile-mode", "none", "--steps", 40, "--checkpoint-every", 1, "--val-every", 10, "--val-sequences", 1]
    run = run_command(sys.executable, ROOT / "tests/killed_runs.py", 20, tmp_path, *flags, timeout=900)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["kills"] >= 20 and counts["during_save"] >= 2, counts
    for number in range(1, counts["rounds"] + 1):
        assert_same_run(tmp_path / f"killed_{number}", tmp_path / "whole", PREEMPTION, "21-40")


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, lambda path: path.write_bytes(b"")])
def test_15_a_damaged_checkpoint_is_named_and_then_the_one_before_it(damage, whole_runs, tokens, tmp_path):
    """As long as nobody deletes it; then the run continues from the one before."""
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, STEP_4, STEP_6)
    damage(checkpoints / STEP_6)
    line = f"error: --resume: {checkpoints}/{STEP_6} is damaged; delete it to continue from {STEP_4}"
    assert_refused(long_run(tokens, tmp_path, PREEMPTION, "--resume"), line)
    (checkpoints / STEP_6).unlink()
    run = long_run(tokens, tmp_path, PREEMPTION, "--resume")
    assert run.returncode == 0 and "# resumed after step 4 of 6" in run.stdout, run.stderr
    assert_same_run(tmp_path, whole_runs[PREEMPTION], PREEMPTION)


@pytest.mark.parametrize("error, said", [
    (RuntimeError("not enough memory: you tried to allocate 9 bytes"), "error: out of memory"),
    (PermissionError(13, "Permission denied"), r"error: .*Permission denied"),
])
def test_15_a_healthy_checkpoint_that_cannot_be_read_is_not_called_damaged(error, said, whole_runs, tokens, tmp_path,
                                                                           monkeypatch):
    """Whoever follows that line deletes it."""
    copy_run(whole_runs[PREEMPTION], tmp_path, STEP_6)

    def load(*args, **more):
        raise error

    monkeypatch.setattr(torch, "load", load)
    run = long_run(tokens, tmp_path, PREEMPTION, "--resume")
    assert run.returncode == 1 and re.match(said, run.stderr) and "damaged" not in run.stderr


def test_15_the_only_checkpoint_is_damaged(whole_runs, tokens, tmp_path):
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, STEP_6)
    cut_in_half(checkpoints / STEP_6)
    line = f"error: --resume: {checkpoints}/{STEP_6} is damaged; delete it to continue from step 0"
    assert_refused(long_run(tokens, tmp_path, PREEMPTION, "--resume"), line)


@SAVING
def test_14_killed_before_the_rename(label, whole_runs, tokens, tmp_path):
    """The file has still its temporary name, complete or not: it is written again."""
    checkpoints = copy_run(whole_runs[label], tmp_path, STEP_4, STEP_6)
    (checkpoints / STEP_6).rename(checkpoints / "step.partial")
    run = long_run(tokens, tmp_path, label, "--resume")
    assert run.returncode == 0 and "# resumed after step 4 of 6" in run.stdout, run.stderr
    assert_same_run(tmp_path, whole_runs[label], label)
    assert checkpoints_of(checkpoints) == {STEP_4, STEP_6}


def test_15_a_full_disk_costs_the_checkpoint_and_not_the_run(whole_runs, tokens, tmp_path):
    """A limit on the size of files stands for the full disk. Only --save's file is missed in the end, in one line."""
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, STEP_4)
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--resume", "--checkpoint-dir", checkpoints)
    run = subprocess.run(
        [sys.executable, BY_LABEL[PREEMPTION].path, *map(str, flags), "--save", tmp_path / "model.pt"],
        capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    assert "# WARNING: no checkpoint of step 6: " in run.stdout and "step : 6 |" in run.stdout
    assert "# ended by --steps after step 6; newest checkpoint: step 4\n" in run.stdout and "median : " in run.stdout
    assert run.returncode == 1 and re.fullmatch(r"error: .*File too large.*\n", run.stderr), run.stderr
    assert [*checkpoints.glob("step*")] == [checkpoints / STEP_4]  # no half of one takes the room that is left
    assert long_run(tokens, tmp_path, PREEMPTION, "--resume").returncode == 0  # there is room again
    assert_same_run(tmp_path, whole_runs[PREEMPTION], PREEMPTION)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_15_a_signal_saves_and_ends_well(number, whole_runs, tokens, tmp_path):
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--checkpoint-dir", tmp_path / "checkpoints")
    slow = ("import sys, time; sys.path.insert(0, 'tests'); from conftest import main, rung; module = rung('15'); "
            "forward = module.GPT.forward; "
            "module.GPT.forward = lambda *args: time.sleep(0.2) or forward(*args); main(module, *sys.argv[1:])")
    with subprocess.Popen([sys.executable, "-c", slow, *map(str, flags)], stdout=subprocess.PIPE, cwd=ROOT,
                          text=True) as run:
        for line in run.stdout:
            if line.startswith("step : 3"):
                break
        run.send_signal(number)
        rest = run.stdout.read()
    assert run.returncode == 0
    stopped, newest = re.search(r"# ended by a signal after step (\d); newest checkpoint: step (\d)", rest).groups()
    assert 3 <= int(stopped) < 6 and stopped == newest
    assert torch.load(tmp_path / f"checkpoints/step_000000{stopped}.pt", weights_only=True)["step"] == int(stopped)
    assert long_run(tokens, tmp_path, PREEMPTION, "--resume").returncode == 0
    assert_same_run(tmp_path, whole_runs[PREEMPTION], PREEMPTION)


def interrupt(monkeypatch, call):
    """Ctrl-C at this call of the attention, 2 of each forward pass."""
    attention, calls = F.scaled_dot_product_attention, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGINT)
        return attention(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", interrupted)


def test_15_a_signal_in_the_first_step_ends_it_at_once(tokens, tmp_path, monkeypatch):
    """There is nothing to save yet, and the step may compile for minutes."""
    interrupt(monkeypatch, call=3)
    assert_refused(long_run(tokens, tmp_path, PREEMPTION), "stopped: ")
    assert not checkpoints_of(tmp_path / "checkpoints")


def test_15_without_checkpoints_a_signal_promises_nothing(tokens, tmp_path, monkeypatch):
    interrupt(monkeypatch, call=6)  # in the second step
    run = long_run(tokens, tmp_path, PREEMPTION, "--checkpoint-every", 0)
    assert run.returncode == 0 and "step : 2 " in run.stdout and "step : 3 " not in run.stdout
    assert "# ended by a signal after step 2; newest checkpoint: none\n" in run.stdout
    assert "resume" not in run.stdout and not checkpoints_of(tmp_path / "checkpoints")


def test_15_a_second_run_in_one_folder_is_refused(tokens, tmp_path):
    with filelock.FileLock(tmp_path / "checkpoints" / "lock"):
        run = long_run(tokens, tmp_path, PREEMPTION)
    assert_refused(run, f"error: --checkpoint-dir {tmp_path}/checkpoints: another run is using it; give another")
    assert not checkpoints_of(tmp_path / "checkpoints")


@pytest.mark.slow
def test_15_a_killed_rank_comes_back_by_itself(tokens, tmp_path):
    """torchrun --max-restarts: rank 1 kills itself at a batch of step 4, once; the job ends as an undisturbed one."""
    more = ("--steps", 6, "--checkpoint-every", 2, "--val-every", 0, "--resume")
    for name in ("killed", "whole"):
        folder = tmp_path / name
        flags = beyond_flags(tokens, folder, 1, *more, "--checkpoint-dir", folder / "checkpoints")
        dying = {"DIE_RANK": "1", "DIE_BATCH": "8", "DIE_ONCE": str(folder / "died")} if name == "killed" else {}
        run = run_command(*TWO_RANKS, "--max-restarts=1", RANK, folder, PREEMPTION, *flags, **dying,
                          TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "killed" / "died").exists()
    log = log_name(PREEMPTION)
    assert "# resumed after step 2 of 6" in (tmp_path / "killed" / log).read_text()
    assert losses(tmp_path / "killed" / log) == losses(tmp_path / "whole" / log)
    ours, truth = (torch.load(tmp_path / name / "rank1.pt", weights_only=True) for name in ("killed", "whole"))
    assert all(torch.equal(ours[key], truth[key]) for key in truth)


@pytest.mark.slow
def test_15_a_signal_to_one_rank_ends_all_after_the_same_step(tokens, tmp_path):
    """To rank 1, in its third step."""
    flags = beyond_flags(tokens, tmp_path, 1, "--steps", 6, "--val-every", 0, "--checkpoint-dir", tmp_path)
    run = run_command(*TWO_RANKS, RANK, tmp_path, PREEMPTION, *flags, DIE_RANK="1", DIE_BATCH="6", DIE_WITH="SIGTERM")
    assert run.returncode == 0, run.stderr
    assert "# ended by a signal after step 3; newest checkpoint: step 3\n" in run.stdout
    saved = torch.load(tmp_path / "step_0000003.pt", weights_only=True)["model"]
    for rank in (0, 1):
        weights = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert all(torch.equal(weights[name], saved[name]) for name in saved)


@pytest.mark.slow
def test_15_restarts_that_cannot_work_are_refused(tokens, tmp_path):
    run = run_command(*TWO_RANKS, "--max-restarts=1", BY_LABEL[PREEMPTION].path, *beyond_flags(tokens, tmp_path, 1),
                      "--checkpoint-dir", tmp_path / "checkpoints", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert run.returncode != 0
    assert "error: --max-restarts: needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.stderr


@pytest.mark.parametrize("restarts, agent_store, refused", [
    ("3", "True", True), ("3", "False", False), ("0", "True", False),
])
def test_15_which_restarts_can_work(restarts, agent_store, refused, monkeypatch, group_of_one):
    """torchrun says in these variables what it was given: --max-restarts and TORCH_DISABLE_SHARE_RDZV_TCP_STORE.

    And a save by rank 0 may take longer than NCCL's default of ten minutes.
    """
    module, patience = rung(PREEMPTION), []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent_store)
    monkeypatch.setattr(module.dist, "init_process_group", lambda backend, timeout: patience.append(timeout))
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 1)
    settings = module.parse_settings(["--device", "cpu"])
    if refused:
        with pytest.raises(SystemExit, match="^error: --max-restarts: needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            module.init_ranks(settings)
    else:
        assert module.init_ranks(settings) == (0, 1)
    assert patience == ([] if refused else [timedelta(hours=1)])


@pytest.mark.parametrize("dtype, saved", [(torch.float32, False), (torch.float16, True)])
def test_15_lost_weights_are_not_saved(dtype, saved, tmp_path, tokens, monkeypatch):
    """A gradient that is not a number, in the second step: the weights are lost, unless float16's scaler skips it."""
    module, unscale, calls = rung(PREEMPTION), torch.amp.GradScaler.unscale_, []
    module.autocast_dtype = lambda device: dtype

    def poisoned(scaler, optimizer):
        calls.append(scaler)
        optimizer.param_groups[0]["params"][0].grad[0, 0] *= float("nan") if len(calls) == 2 else 1
        unscale(scaler, optimizer)

    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", poisoned)
    log = train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2,
                "--checkpoint-every", 1).read_text()
    assert (tmp_path / "checkpoints" / "step_0000002.pt").exists() == saved
    assert ("# WARNING: no checkpoint of step 2: not all weights are finite" in log) != saved
    assert f"# ended by --steps after step 2; newest checkpoint: step {1 + saved}\n" in log


def test_16_the_same_gradients(tmp_path, tokens):
    flags = ("-B", 2, "--total-batch", 128, "--checkpoint-every", 0, "--val-every", 0)
    before, step_before = first_gradients(tmp_path / "before", tokens, *flags, label=PREEMPTION)
    after, step_after = first_gradients(
        tmp_path / "after", tokens, *flags, "--recompute-blocks", 2, label=RECOMPUTE)
    assert step_after["loss"] == step_before["loss"]
    for expected, actual in zip(before, after, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("flags, recomputed", [((), 0), (("--recompute-blocks", 1), 1), (("--recompute-blocks", 9), 2)])
def test_16_blocks_run_twice(flags, recomputed, tmp_path, tokens):
    """Each block once in the forward pass, the checkpointed ones again in the backward pass, none in validation."""
    module = rung(RECOMPUTE)
    forward, calls = module.Block.forward, []
    module.Block.forward = lambda self, x: calls.append(self.training) or forward(self, x)
    log = train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2, "--val-every", 1,
                "--val-sequences", 1, "--checkpoint-every", 0, *flags)
    assert calls == ([True] * (2 + recomputed) + [False] * 2) * 2  # also after the first validation
    assert f"# recomputed blocks: {recomputed} of 2" in log.read_text()


def peak_of(label, folder, tokens, *flags):
    """GB that a step of the small model takes in a process of its own."""
    code = ("import sys; sys.path.insert(0, 'tests'); from conftest import main, peak_memory, rung; "
            "main(rung(sys.argv[1]), *sys.argv[2:]); print(peak_memory())")
    run = run_command(
        sys.executable, "-c", code, label, "--model", "small", "--device", "cpu", "--data", tokens, "--log-dir", folder,
        "-B", 16, "-T", 128, "--total-batch", 2048, "--steps", 1, "--val-every", 0, "--checkpoint-every", 0,
        "--checkpoint-dir", folder, "--compile-mode", "none", *flags)
    assert run.returncode == 0, run.stderr
    return float(run.stdout.splitlines()[-1]) * 2**20 / 1e9


@pytest.mark.slow
def test_16_memory_falls(tmp_path, tokens):
    """The peak of the whole process, with and without."""
    peaks = [peak_of(RECOMPUTE, tmp_path, tokens, "--recompute-blocks", blocks) for blocks in (0, 6)]
    # At least 8 tensors of (B, T, C), 2 bytes each, in each of the 5 blocks whose activations are not there.
    assert peaks[1] < peaks[0] - 5 * 8 * (16 * 128 * 384) * 2 / 1e9, peaks


@pytest.mark.parametrize("label", ["29", *LAST_TWO])
def test_numbers_below_zero_are_refused(label, capsys):
    """Of every flag, by argparse's two lines, which say what the numbers must be."""
    module, parser = rung(label), argparse.ArgumentParser()
    module.add_flags(parser)
    flags = [action.option_strings[0] for action in parser._actions if action.type in (int, float)]
    assert len(flags) > 12
    for flag in flags:
        with pytest.raises(SystemExit) as stop:
            module.parse_settings([flag, "-1"])
        assert stop.value.code == 2 and "no number below 0" in capsys.readouterr().err.splitlines()[-1]
