"""The rungs beyond speed: each capability shown on the thing itself."""
import io
import json
import re
import resource
import runpy
import signal
import subprocess
import sys
import weakref
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, losses, own_settings, read_steps, run_command, rung, train
from test_ddp import RANK, TWO_RANKS
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


@pytest.mark.parametrize("total", [0, 100])
def test_11_total_batch_must_fit(total, tmp_path, tokens):
    flags = ["--data", str(tokens), "--log-dir", str(tmp_path), "--model", "tiny", "--device", "cpu"]
    with pytest.raises(SystemExit, match="not a multiple of B \\* T \\* ranks = 64"):
        rung(ACCUMULATION).main([*flags, "-B", "2", "-T", "32", "--total-batch", str(total)])


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_where_they_break(mode, monkeypatch, group_of_one):
    """CUDA graphs overwrite gradients that still accumulate, and do not take tied weights under DDP."""
    module = rung(ACCUMULATION)
    settings = module.Settings(B=1, T=32, total_batch=64, device="cuda", compile_mode=mode)
    with pytest.raises(SystemExit, match="no CUDA graphs with accumulation; use default"):
        module.count_micro_steps(settings, 1)


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
    meta = {"source": "made up", "sha256": "", "tokenizer": "gpt2", "vocab_size": 50257}
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
    module.DataLoaderLite.batch = lambda self, i: events.append(i) or batch(self, i)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: events.append("synchronize"))
    assert losses(train(module, tmp_path / "after", tokens, *flags)) == expected
    assert events == [0, 1, 2, 3, 4, "synchronize", 5, 6, 7, 8, "synchronize", 9, 10, 11, 12, "synchronize"]


def val_lines(log):
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


@pytest.fixture(scope="module")
def whole_runs(tmp_path_factory, tokens):
    """{label: folder of a run that nothing disturbed}, checkpoints of steps 4 and 6 among its files."""
    folders = {}
    for label, names in {RESUME: {"newest.pt"}, PREEMPTION: {"newest.pt", "previous.pt"}}.items():
        folders[label] = tmp_path_factory.mktemp(f"whole_{label}")
        run = long_run(tokens, folders[label], label)
        assert run.returncode == 0, run.stderr
        assert {path.name for path in (folders[label] / "checkpoints").iterdir()} - {"lock"} == names
    return folders


def assert_same_run(folder, whole, label):
    """Bit by bit: the losses of all steps, each once, the validation losses, and the weights."""
    def key(path):
        steps = [(step["step"], step["loss"], step["norm"], step["lr"]) for step in read_steps(path / log_name(label))]
        return steps, val_lines(path / log_name(label))

    assert key(folder) == key(whole)
    ours, truth = (torch.load(path / "model.pt", weights_only=True)["model"] for path in (folder, whole))
    assert all(torch.equal(ours[key], truth[key]) for key in truth)


def copy_run(whole, folder, label, *checkpoints):
    """A folder with the log and these checkpoints of a whole run; returns the folder of the checkpoints."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in checkpoints:
        (folder / "checkpoints" / name).write_bytes((whole / "checkpoints" / name).read_bytes())
    (folder / log_name(label)).write_bytes((whole / log_name(label)).read_bytes())
    return folder / "checkpoints"


class Crash(Exception):
    """What ends a run in the middle of a step."""


@SAVING
def test_14_a_crashed_run_resumes_bit_by_bit(label, whole_runs, tokens, tmp_path):
    """Another run's log in the way does not matter: the log continues from the checkpoint's."""
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
    assert "steps done before: 4" in run.stdout
    assert_same_run(tmp_path, whole_runs[label], label)


@SAVING
def test_14_a_finished_run_says_so_and_repeats_nothing(label, whole_runs, tokens, tmp_path):
    checkpoints = copy_run(whole_runs[label], tmp_path, label, "newest.pt")
    log = (tmp_path / log_name(label)).read_text()
    run = long_run(tokens, tmp_path, label, "--resume")
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"{checkpoints}/newest.pt: this run is finished, all of its 6 steps are done\n"
    assert (tmp_path / log_name(label)).read_text() == log
    assert_same_run(tmp_path, whole_runs[label], label)  # killed after its last checkpoint, it still owes --save's file


@pytest.mark.parametrize("flags, reason", [
    (["--steps", "7"], "has steps 6, not 7; make them equal, the steps done depend on them"),
    (["--seed", "1"], "has seed 1337, not 1"),
    (["-T", "16"], "has T 32, not 16"),
    (["--total-batch", "64"], "has total_batch 128, not 64"),
    (["--max-lr", "1e-3"], "has max_lr 0.0006, not 0.001"),
])
def test_14_a_different_run_is_not_resumed(flags, reason, whole_runs, tokens, tmp_path):
    """And its log is still there."""
    checkpoints = copy_run(whole_runs[RESUME], tmp_path, RESUME, "newest.pt")
    log = (tmp_path / log_name(RESUME)).read_text()
    own = [str(flag) for flag in beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS)]
    with pytest.raises(SystemExit, match=reason):
        rung(RESUME).main([*own, "--checkpoint-dir", str(checkpoints), "--resume", *flags])
    with pytest.raises(SystemExit, match="newest.pt: from an earlier run; add --resume, or .* --log-dir"):
        rung(RESUME).main([*own, "--checkpoint-dir", str(checkpoints), *flags])
    with pytest.raises(SystemExit, match="has script rung_14_checkpoint_resume, not rung_18_muon; make them equal"):
        rung("18").main([*own, "--checkpoint-dir", str(checkpoints), "--resume"])
    assert (tmp_path / log_name(RESUME)).read_text() == log


@pytest.mark.parametrize("label", [RESUME, PREEMPTION])
def test_14_sharded_checkpoints_are_not_started_over(label, tmp_path, tokens):
    """Those of torch.distributed.checkpoint, which a script that shards writes: folders, newest/ the newest."""
    (tmp_path / "checkpoints" / "newest").mkdir(parents=True)
    (tmp_path / "checkpoints" / "newest" / "notes.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds checkpoints of another format, .*; give another --checkpoint-dir"):
        train(rung(label), tmp_path, tokens, "-B", 1, "-T", 16, "--resume")
    assert not (tmp_path / log_name(label)).exists()


def test_14_what_is_restored_does_not_stay_in_memory(whole_runs, tokens, tmp_path, monkeypatch):
    """Of the checkpoint that was read no weight is left when the first step begins."""
    checkpoints = copy_run(whole_runs[RESUME], tmp_path, RESUME, "newest.pt")
    torch.save({**torch.load(checkpoints / "newest.pt", weights_only=True), "step": 5}, checkpoints / "newest.pt")
    module, read, alive = rung(RESUME), [], []
    load, forward = torch.load, module.GPT.forward

    def load_and_watch(*args, **kwargs):
        checkpoint = load(*args, **kwargs)
        read.append(weakref.ref(checkpoint["model"]["transformer.wpe.weight"]))
        return checkpoint

    monkeypatch.setattr(torch, "load", load_and_watch)
    module.GPT.forward = lambda *args: alive.append(read[0]() is not None) or forward(*args)
    module.main([str(flag) for flag in beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--resume", "--checkpoint-dir",
                                                    checkpoints)])
    assert alive and not any(alive)


def test_14_a_finished_run_that_cannot_be_saved_says_so(whole_runs, tokens, tmp_path, monkeypatch):
    checkpoints = copy_run(whole_runs[RESUME], tmp_path, RESUME, "newest.pt")
    module = rung(RESUME)
    monkeypatch.setattr(module, "save_checkpoint", lambda *args: "model.pt could not be written (disk full)")
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--resume", "--checkpoint-dir", checkpoints)
    with pytest.raises(SystemExit, match="^error: --save: model.pt could not be written"):
        module.main([*map(str, flags), "--save", str(tmp_path / "model.pt")])


def test_14_a_run_in_bfloat16_goes_on_in_float16(whole_runs, tokens, tmp_path):
    """As on another GPU: the scaler, disabled until then, begins with its own state."""
    checkpoints = copy_run(whole_runs[RESUME], tmp_path, RESUME, "newest.pt")
    torch.save({**torch.load(checkpoints / "newest.pt", weights_only=True), "step": 5}, checkpoints / "newest.pt")
    module = rung(RESUME)
    module.autocast_dtype = lambda device: torch.float16
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--resume", "--checkpoint-dir", checkpoints)
    module.main([str(flag) for flag in flags])
    assert torch.load(checkpoints / "newest.pt", weights_only=True)["scaler"]["_growth_tracker"] == 1


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
    assert "steps done before: 4" in run.stdout
    ours, truth = (losses(folder / log_name(RESUME)) for folder in (tmp_path, tmp_path / "whole"))
    assert ours == pytest.approx(truth, abs=1e-4)


def test_14_a_checkpoint_is_plain_and_holds_the_scaler(tmp_path, tokens):
    """float16, as on a T4: the scaler's state is there; and a checkpoint serves wherever a saved model does."""
    module = rung(RESUME)
    module.autocast_dtype = lambda device: torch.float16
    train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 2, "--total-batch", 16, "--checkpoint-dir", tmp_path)
    checkpoint = torch.load(tmp_path / "newest.pt", weights_only=True)
    assert {"script", "config", "model", "step", "tokenizer"} <= set(checkpoint)
    assert checkpoint["scaler"]["_growth_tracker"] == 2  # steps since the scale last changed
    model = module.GPT(module.GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])


@SAVING
def test_14_a_folder_that_cannot_be_written_is_noticed_first(label, tmp_path, tokens):
    (tmp_path / "file").write_text("not a folder")
    run = long_run(tokens, tmp_path / "run", label, "--checkpoint-dir", tmp_path / "file" / "checkpoints")
    assert run.returncode == 1 and "step : 1" not in run.stdout
    assert run.stderr.startswith("error: ") and str(tmp_path / "file") in run.stderr and run.stderr.count("\n") == 1


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
        assert_same_run(tmp_path / f"killed_{number}", tmp_path / "whole", PREEMPTION)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, lambda path: path.write_bytes(b"")])
def test_15_a_damaged_newest_checkpoint_falls_back(damage, whole_runs, tokens, tmp_path):
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, PREEMPTION, "newest.pt", "previous.pt")
    damage(checkpoints / "newest.pt")
    run = long_run(tokens, tmp_path, PREEMPTION, "--resume")
    assert run.returncode == 0, run.stderr
    assert f"WARNING: {checkpoints}/newest.pt is damaged" in run.stderr and run.stderr.count("\n") == 1
    assert "steps done before: 4" in run.stdout
    assert_same_run(tmp_path, whole_runs[PREEMPTION], PREEMPTION)


@pytest.mark.parametrize("names", [("next.pt",), ("previous.pt", "next.pt")])
def test_15_killed_between_two_renames(names, whole_runs, tokens, tmp_path):
    """The finished file has still its first name."""
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, PREEMPTION, "newest.pt", *set(names) - {"next.pt"})
    (checkpoints / "newest.pt").rename(checkpoints / "next.pt")
    run = long_run(tokens, tmp_path, PREEMPTION, "--resume")
    assert run.returncode == 0 and "all of its 6 steps are done" in run.stdout, run.stderr


def test_15_nothing_but_damaged_checkpoints(whole_runs, tokens, tmp_path):
    checkpoints = copy_run(whole_runs[PREEMPTION], tmp_path, PREEMPTION, "newest.pt", "previous.pt")
    for name in ("newest.pt", "previous.pt"):
        cut_in_half(checkpoints / name)
    run = long_run(tokens, tmp_path, PREEMPTION, "--resume")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert re.match("error: --resume: .* no checkpoint here can be read", run.stderr.splitlines()[-1])


@SAVING
def test_14_a_full_disk_costs_the_checkpoint_and_not_the_run(label, whole_runs, tokens, tmp_path):
    """A limit on the size of files stands for the full disk."""
    last = {RESUME: "newest.pt", PREEMPTION: "previous.pt"}[label]
    checkpoints = copy_run(whole_runs[label], tmp_path, label, last)
    checkpoint = torch.load(checkpoints / last, weights_only=True)
    torch.save({**checkpoint, "step": 4}, checkpoints / last)
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--resume", "--checkpoint-dir", checkpoints)
    run = subprocess.run(
        [sys.executable, BY_LABEL[label].path, *map(str, flags)], capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"# WARNING: \S+\.pt could not be written \(", run.stdout) and "step : 6 |" in run.stdout
    assert {path.name for path in checkpoints.iterdir()} - {"lock"} == {last}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_15_a_signal_saves_and_ends_well(number, whole_runs, tokens, tmp_path):
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--checkpoint-dir", tmp_path / "checkpoints")
    slow = ("import sys, time; sys.path.insert(0, 'tests'); from conftest import rung; module = rung('15'); "
            "forward = module.GPT.forward; "
            "module.GPT.forward = lambda *args: time.sleep(0.2) or forward(*args); module.main(sys.argv[1:])")
    with subprocess.Popen([sys.executable, "-c", slow, *map(str, flags)], stdout=subprocess.PIPE, cwd=ROOT,
                          text=True) as run:
        for line in run.stdout:
            if line.startswith("step : 3"):
                break
        run.send_signal(number)
        rest = run.stdout.read()
    assert run.returncode == 0
    stopped = int(re.search(r"# stopped by a signal after step (\d); rerun with --resume to continue", rest)[1])
    assert 3 <= stopped < 6
    assert torch.load(tmp_path / "checkpoints" / "newest.pt", weights_only=True)["step"] == stopped
    assert long_run(tokens, tmp_path, PREEMPTION, "--resume").returncode == 0
    assert_same_run(tmp_path, whole_runs[PREEMPTION], PREEMPTION)


def test_15_a_second_run_in_one_folder_is_refused(tokens, tmp_path):
    from filelock import FileLock

    with FileLock(tmp_path / "checkpoints" / "lock"):
        run = long_run(tokens, tmp_path, PREEMPTION)
    assert run.returncode == 1 and "another run is using it; give another" in run.stderr
    assert run.stderr.count("\n") == 1 and not list((tmp_path / "checkpoints").glob("*.pt"))


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
    assert "steps done before: 2" in (tmp_path / "killed" / log).read_text()
    assert losses(tmp_path / "killed" / log) == losses(tmp_path / "whole" / log)
    ours, truth = (torch.load(tmp_path / name / "rank1.pt", weights_only=True) for name in ("killed", "whole"))
    assert all(torch.equal(ours[key], truth[key]) for key in truth)


@pytest.mark.slow
def test_15_restarts_that_cannot_work_are_refused(tokens, tmp_path):
    run = run_command(*TWO_RANKS, "--max-restarts=1", BY_LABEL[PREEMPTION].path, *beyond_flags(tokens, tmp_path, 1),
                      "--checkpoint-dir", tmp_path / "checkpoints", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert run.returncode != 0
    assert "error: --max-restarts: needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.stderr


@pytest.mark.parametrize("dtype, saved", [(torch.float32, False), (torch.float16, True)])
def test_15_lost_weights_are_not_saved(dtype, saved, tmp_path, tokens):
    """A norm that is not finite: the weights are lost, unless it was float16's scaler that skipped the step."""
    module = rung(PREEMPTION)
    module.autocast_dtype = lambda device: dtype
    clip = module.nn.utils.clip_grad_norm_
    try:
        module.nn.utils.clip_grad_norm_ = lambda *args: clip(*args) * float("inf")
        train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2, "--checkpoint-every", 2,
              "--checkpoint-dir", tmp_path / "checkpoints")
    finally:
        module.nn.utils.clip_grad_norm_ = clip
    assert (tmp_path / "checkpoints" / "newest.pt").exists() == saved


def test_16_the_same_gradients(tmp_path, tokens):
    flags = ("-B", 2, "--total-batch", 128, "--checkpoint-every", 0, "--val-every", 0)
    before, step_before = first_gradients(
        tmp_path / "before", tokens, *flags, "--checkpoint-dir", tmp_path / "15", label=PREEMPTION)
    after, step_after = first_gradients(
        tmp_path / "after", tokens, *flags, "--checkpoint-dir", tmp_path / "16", label=RECOMPUTE)
    assert step_after["loss"] == step_before["loss"]
    for expected, actual in zip(before, after, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("flags, recomputed", [((), 2), (("--recompute-blocks", 1), 1), (("--recompute-blocks", 0), 0)])
def test_16_blocks_run_twice(flags, recomputed, tmp_path, tokens):
    """Each block once in the forward pass, the checkpointed ones again in the backward pass, none in validation."""
    module = rung(RECOMPUTE)
    forward, calls = module.Block.forward, []
    module.Block.forward = lambda self, x: calls.append(self.training) or forward(self, x)
    log = train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2, "--val-every", 1,
                "--val-sequences", 1, "--checkpoint-every", 0, "--checkpoint-dir", tmp_path / "checkpoints", *flags)
    assert calls == ([True] * (2 + recomputed) + [False] * 2) * 2  # also after the first validation
    assert f"# recomputed blocks: {recomputed} of 2" in log.read_text()


@pytest.mark.slow
def test_16_memory_falls(tmp_path, tokens):
    """The peak of the whole process, measured from outside, with and without."""
    peaks = []
    for blocks in (0, 6):
        run = run_command(
            sys.executable, BY_LABEL[RECOMPUTE].path, "--model", "small", "--device", "cpu", "--data", tokens,
            "--log-dir", tmp_path, "-B", 16, "-T", 128, "--total-batch", 2048, "--steps", 1, "--val-every", 0,
            "--checkpoint-every", 0, "--checkpoint-dir", tmp_path, "--compile-mode", "none",
            "--recompute-blocks", blocks,
        )
        assert run.returncode == 0, run.stderr
        peaks.append(float(re.search(r"peak memory: (\S+) GB", run.stdout)[1]))
    # At least 8 tensors of (B, T, C), 2 bytes each, in each of the 5 blocks whose activations are not there.
    assert peaks[1] < peaks[0] - 5 * 8 * (16 * 128 * 384) * 2 / 1e9, peaks


@pytest.mark.parametrize("label, flags, reason", [
    (VALIDATION, ["--val-every", -1], "--val-every -1: out of range; give at least 0"),
    (VALIDATION, ["--val-sequences", -1], "--val-sequences -1: out of range; give at least 0"),
    (RESUME, ["--checkpoint-every", -1], "--checkpoint-every -1: out of range; give at least 0"),
    (RECOMPUTE, ["--recompute-blocks", -1], "--recompute-blocks -1: out of range; give at least 0"),
])
def test_wrong_values(label, flags, reason, tmp_path, tokens):
    with pytest.raises(SystemExit, match=f"error: {reason}"):
        train(rung(label), tmp_path, tokens, *flags)
