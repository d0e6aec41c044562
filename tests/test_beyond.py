"""The rungs beyond speed: each capability shown on the thing itself."""
import json
import re
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, losses, read_steps, run_command, rung, train
from test_ddp import RANK, TWO_RANKS
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

GRAD_ACCUM, DEVICE_DATA, VALIDATION, CHECKPOINT, RECOMPUTE = 12, 13, 14, 15, 16
FLOAT32 = torch.float32


def first_gradients(folder, tokens, *flags, number=GRAD_ACCUM):
    """The gradients that the first optimizer step of a float32 run finds, before AdamW."""
    module = rung(number)
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


def test_11_two_ranks_with_micro_batches_equal_one_process(tmp_path, tokens):
    """2 ranks x 2 micro-steps x B=2 against one process with B=8, float32: as for DDP itself."""
    def flags(folder, B):
        return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", B, "-T", 32,
                "--steps", 6, "--compile-mode", "none", "--total-batch", 256]

    for folder in ("two", "one"):
        (tmp_path / folder).mkdir()
    two = run_command(*TWO_RANKS, RANK, tmp_path / "two", GRAD_ACCUM, *flags(tmp_path / "two", 2))
    one = run_command(sys.executable, RANK, tmp_path / "one", GRAD_ACCUM, *flags(tmp_path / "one", 8))
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    assert "# total batch: 256 tokens in 2 micro-steps" in two.stdout
    assert "# total batch: 256 tokens in 1 micro-steps" in one.stdout
    name = "speedup_11_grad_accum.log"
    assert losses(tmp_path / "two" / name) == pytest.approx(losses(tmp_path / "one" / name), abs=1e-4)
    rank0, rank1 = (torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = torch.load(tmp_path / "one" / "rankalone.pt", weights_only=True)
    for name in alone:
        assert torch.equal(rank0[name], rank1[name])
        assert torch.allclose(rank0[name], alone[name], rtol=0, atol=6e-6), name


def test_11_gradients_cross_the_ranks_once_a_step(tmp_path, tokens, monkeypatch):
    """DDP's averaging is off in every micro-step but the last (counted in a group of one process)."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    module = rung(GRAD_ACCUM)
    synchronized = []

    class CountingDDP(module.DDP):
        def forward(self, *args):
            synchronized.append(self.require_backward_grad_sync)
            return super().forward(*args)

    module.DDP = CountingDDP
    train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 64, "--steps", 2)
    assert synchronized == [False, False, False, True] * 2


def test_11_compiled_on_two_ranks(tmp_path, tokens):
    """no_sync and torch.compile together: bfloat16, so the losses agree to its 0.2 %."""
    found = []
    for mode in ("default", "none"):
        run = run_command(
            *TWO_RANKS, "beyond/speedup_11_grad_accum.py", "--model", "tiny", "--device", "cpu", "--data", tokens,
            "--log-dir", tmp_path / mode, "-B", 1, "-T", 32, "--total-batch", 192, "--steps", 4, "--compile-mode", mode,
        )
        assert run.returncode == 0, run.stderr
        found.append(losses(tmp_path / mode / "speedup_11_grad_accum.log"))
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.parametrize("total", [0, -64, 100])
def test_11_total_batch_must_fit(total, tmp_path, tokens):
    flags = ["--data", str(tokens), "--log-dir", str(tmp_path), "--model", "tiny", "--device", "cpu"]
    flags += ["-B", "2", "-T", "32"]
    with pytest.raises(SystemExit, match="no multiple of B \\* T \\* ranks = 64"):
        rung(GRAD_ACCUM).main([*flags, "--total-batch", str(total)])


def batches(loader, n, prefetch=False):
    """The next n batches as lists; with `prefetch` each is read while the one before is still in use."""
    found = []
    for _ in range(n):
        x, y = loader.next_batch()
        if prefetch:
            loader.prefetch()
        found.append((x.tolist(), y.tolist()))
    return found


@pytest.mark.parametrize("path", ["mapped", "on the device", "pinned"])
@pytest.mark.parametrize("rank, world_size", [(0, 1), (1, 2)])
def test_12_same_batches_in_the_same_order(path, rank, world_size, tokens, monkeypatch):
    """More than two epochs of them, on each of the three ways to the device."""
    device = "cpu"
    module = rung(DEVICE_DATA)
    if path == "on the device":
        module.free_memory = lambda device: 1e12
    if path == "pinned":  # what a GPU would do, as far as a CPU can
        pinned = []
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
        module.free_memory = lambda device: 0
        device = "cuda"
    B, T = 8, 1024
    before = rung(GRAD_ACCUM).DataLoaderLite(tokens, B, T, rank, world_size)
    after = module.DataLoaderLite(tokens, B, T, rank, world_size, device)
    assert (after.on_device is not None) == (path == "on the device")
    n = 2 * before.batches_per_epoch + 1
    expected = batches(before, n)
    assert batches(after, n, prefetch=True) == expected
    assert before.position == after.position
    if path == "pinned":
        assert len(pinned) == n + 1


def tokens_of(folder, ids):
    """A data folder with these token ids as train and as val."""
    folder.mkdir()
    for split in ("train", "val"):
        np.array(ids, dtype="<u2").tofile(folder / f"{split}.bin")
    meta = {"source": "made up", "sha256": "", "tokenizer": "gpt2", "vocab_size": 50257}
    (folder / "meta.json").write_text(json.dumps({**meta, "train_tokens": len(ids), "val_tokens": len(ids)}))
    return folder


def test_12_large_ids_survive_the_way_through_int16(tmp_path):
    ids = [0, 1, 32767, 32768, 40000, 50256, 7, 8, 9]
    module = rung(DEVICE_DATA)
    module.free_memory = lambda device: 1e12
    x, y = module.DataLoaderLite(tokens_of(tmp_path / "tokens", ids), 2, 4).next_batch()
    assert x.flatten().tolist() == ids[:-1] and y.flatten().tolist() == ids[1:]
    assert x.dtype == torch.int64
    with pytest.raises(SystemExit, match="token 60000 is not in the vocabulary"):
        module.DataLoaderLite(tokens_of(tmp_path / "damaged", [1, 2, 60000]), 1, 2)


def test_12_trains_as_before_and_fetches_before_it_waits_for_the_device(tmp_path, tokens, monkeypatch):
    flags = ("-B", 1, "-T", 32, "--steps", 3)
    expected = losses(train(rung(GRAD_ACCUM), tmp_path / "before", tokens, *flags))
    module = rung(DEVICE_DATA)
    prefetch, events = module.DataLoaderLite.prefetch, []
    module.DataLoaderLite.prefetch = lambda self: events.append("prefetch") or prefetch(self)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: events.append("synchronize"))
    assert losses(train(module, tmp_path / "after", tokens, *flags)) == expected
    assert events == ["prefetch", "prefetch", "prefetch", "prefetch", "synchronize"] * 3


def test_12_the_wait_for_data_is_measured(tokens):
    """A loader that takes 20 ms for a batch: rung 11 waits for it, rung 12 has it already."""
    from ladder.data_wait import median_wait

    flags = ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32", "--steps", "4"]
    waits = []
    for number in (GRAD_ACCUM, DEVICE_DATA):
        module = rung(number)
        name = "read_batch" if number == DEVICE_DATA else "next_batch"
        read = getattr(module.DataLoaderLite, name)
        setattr(module.DataLoaderLite, name, lambda self, read=read: time.sleep(0.02) or read(self))
        waits.append(median_wait(module, flags))
    assert waits[0] >= 20 > 10 > waits[1] > 0  # ms


def val_lines(log):
    found = [re.fullmatch(r"val : step (\d+) \| loss: (\S+) \| time: (\S+) s", line)
             for line in log.read_text().splitlines() if line.startswith("val")]
    return [(int(line[1]), float(line[2])) for line in found]


def test_13_the_loss_is_that_of_val_bin(tmp_path, tokens):
    """The mean over all whole sequences of val.bin, computed here from the file and the saved weights."""
    module = rung(VALIDATION)
    module.autocast_dtype = lambda device: FLOAT32
    B, T = 4, 128
    tokens = tokens_of(tmp_path / "tokens", np.fromfile(tokens / "train.bin", dtype="<u2")[:4000])
    log = train(module, tmp_path, tokens, "-B", B, "-T", T, "--steps", 3, "--val-every", 2, "--val-sequences", 0,
                "--save", tmp_path / "model.pt")
    assert [step for step, _ in val_lines(log)] == [2, 3]  # and always after the last step
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(np.fromfile(tokens / "val.bin", dtype="<u2").astype(np.int64))
    n = (len(ids) - 1) // T
    total = 0.0
    for i in range(n):
        logits = model(ids[None, i * T : (i + 1) * T])[0][0].detach()
        total += F.cross_entropy(logits.double(), ids[i * T + 1 : (i + 1) * T + 1]).item()
    assert val_lines(log)[-1][1] == pytest.approx(total / n, abs=1e-5)
    assert f"# validation: every 2 steps, {n * T} of {len(ids)} tokens" in log.read_text()


def test_13_watching_changes_nothing(tmp_path, tokens):
    flags = ("-B", 1, "-T", 32, "--steps", 5)
    logs = [train(rung(VALIDATION), tmp_path / every, tokens, *flags, "--val-every", every) for every in ("0", "1")]
    assert losses(logs[0]) == losses(logs[1])
    assert val_lines(logs[0]) == [] and len(val_lines(logs[1])) == 5
    assert "# validation: never" in logs[0].read_text()


def beyond_flags(tokens, folder, B, *more):
    folder.mkdir(exist_ok=True)
    return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", B, "-T", 32,
            "--compile-mode", "none", "--total-batch", 128, *more]


def test_13_two_ranks_see_what_one_process_sees(tmp_path, tokens):
    more = ("--steps", 4, "--val-every", 2, "--val-sequences", 6)
    two = run_command(*TWO_RANKS, RANK, tmp_path, VALIDATION, *beyond_flags(tokens, tmp_path / "two", 2, *more))
    one = run_command(sys.executable, RANK, tmp_path, VALIDATION, *beyond_flags(tokens, tmp_path / "one", 4, *more))
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    ours, truth = (val_lines(tmp_path / name / "speedup_13_validation.log") for name in ("two", "one"))
    assert [step for step, _ in ours] == [2, 4]
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in truth], abs=1e-4)


def test_13_too_little_text_to_validate(tmp_path):
    folder = tokens_of(tmp_path / "tokens", range(100))
    meta = json.loads((folder / "meta.json").read_text())
    np.arange(10, dtype="<u2").tofile(folder / "val.bin")
    (folder / "meta.json").write_text(json.dumps({**meta, "val_tokens": 10}))
    with pytest.raises(SystemExit, match="10 val tokens in .* needs 33"):
        train(rung(VALIDATION), tmp_path, folder, "-B", 1, "-T", 32)


CHECKPOINTS = ("--steps", 6, "--checkpoint-every", 2, "--val-every", 3)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, tokens):
    """Six steps of rung 14 that nothing disturbed: (losses, weights)."""
    folder = tmp_path_factory.mktemp("whole")
    flags = beyond_flags(tokens, folder, 2, *CHECKPOINTS, "--save", folder / "model.pt")
    run = run_command(sys.executable, ROOT / "beyond/speedup_14_checkpoint_resume.py", *flags,
                      "--checkpoint-dir", folder / "checkpoints")
    assert run.returncode == 0, run.stderr
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000004.pt", "step_00000006.pt"]  # the last two
    return folder


def assert_same_run(folder, whole_run):
    """Bit by bit: the losses of all steps, each once, the validation losses, and the weights."""
    name = "speedup_14_checkpoint_resume.log"
    key = [(step["step"], step["loss"], step["norm"], step["lr"]) for step in read_steps(whole_run / name)]
    assert [(step["step"], step["loss"], step["norm"], step["lr"]) for step in read_steps(folder / name)] == key
    assert val_lines(folder / name) == val_lines(whole_run / name)
    ours, truth = (torch.load(path / "model.pt", weights_only=True)["model"] for path in (folder, whole_run))
    assert all(torch.equal(ours[key], truth[key]) for key in truth)


def resume(tokens, folder, *more):
    flags = beyond_flags(tokens, folder, 2, *CHECKPOINTS, "--save", folder / "model.pt")
    return run_command(sys.executable, ROOT / "beyond/speedup_14_checkpoint_resume.py", *flags,
                       "--checkpoint-dir", folder / "checkpoints", "--resume", *more)


def copy_checkpoints(whole_run, folder):
    (folder / "checkpoints").mkdir()
    for path in (whole_run / "checkpoints").iterdir():
        (folder / "checkpoints" / path.name).write_bytes(path.read_bytes())
    name = "speedup_14_checkpoint_resume.log"
    (folder / name).write_bytes((whole_run / name).read_bytes())
    return folder / "checkpoints" / "step_00000006.pt"


def test_14_fifty_kills_at_random_moments(tmp_path, tokens):
    """SIGKILL, also while a checkpoint is written: every run ends with the losses and weights of the whole one."""
    text = tokens_of(tmp_path / "tokens", np.fromfile(tokens / "train.bin", dtype="<u2")[:400])  # 24 steps an epoch
    flags = ["--model", "tiny", "--device", "cpu", "--data", text, "-B", 1, "-T", 16, "--total-batch", 16,
             "--compile-mode", "none", "--steps", 40, "--checkpoint-every", 1, "--val-every", 10, "--val-sequences", 1]
    run = run_command(sys.executable, ROOT / "tests/killed_runs.py", 50, tmp_path, *flags, timeout=900)
    assert run.returncode == 0, run.stderr
    counts = json.loads(run.stdout.splitlines()[-1])
    assert counts["kills"] >= 50 and counts["during_save"] >= 5, counts
    for number in range(1, counts["rounds"] + 1):
        assert_same_run(tmp_path / f"killed_{number}", tmp_path / "whole")


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip_a_byte, cut_in_half, empty])
def test_14_a_damaged_newest_checkpoint_falls_back(damage, whole_run, tokens, tmp_path):
    newest = copy_checkpoints(whole_run, tmp_path)
    damage(newest)
    run = resume(tokens, tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"WARNING: {newest} is damaged" in run.stderr and run.stderr.count("\n") == 1
    assert "steps done before: 4" in run.stdout
    assert_same_run(tmp_path, whole_run)


def test_14_nothing_but_damaged_checkpoints(whole_run, tokens, tmp_path):
    copy_checkpoints(whole_run, tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        cut_in_half(path)
    run = resume(tokens, tmp_path)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: --resume: no checkpoint in")
    assert "Traceback" not in run.stderr


def test_14_a_full_disk_keeps_the_checkpoints_before(whole_run, tokens, tmp_path):
    newest = copy_checkpoints(whole_run, tmp_path)
    newest.unlink()
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--resume", "--checkpoint-dir", tmp_path / "checkpoints")
    run = subprocess.run(
        [sys.executable, ROOT / "beyond/speedup_14_checkpoint_resume.py", *map(str, flags)],
        capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000)),
    )
    assert run.returncode == 0, run.stderr
    assert "# WARNING: no checkpoint at step 6 (" in run.stdout and "step : 6 |" in run.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000004.pt"]


def test_14_sigterm_saves_and_ends_well(whole_run, tokens, tmp_path):
    flags = beyond_flags(tokens, tmp_path, 2, *CHECKPOINTS, "--checkpoint-dir", tmp_path / "checkpoints")
    slow = ("import sys, time; sys.path.insert(0, 'tests'); from conftest import rung; module = rung(15); "
            "forward = module.GPT.forward; "
            "module.GPT.forward = lambda *args: time.sleep(0.2) or forward(*args); module.main(sys.argv[1:])")
    with subprocess.Popen([sys.executable, "-c", slow, *map(str, flags)], stdout=subprocess.PIPE, cwd=ROOT,
                          text=True) as run:
        for line in run.stdout:
            if line.startswith("step : 3"):
                break
        run.send_signal(signal.SIGTERM)
        rest = run.stdout.read()
    assert run.returncode == 0
    stopped = int(re.search(r"# stopped by SIGTERM after step (\d): go on with --resume", rest)[1])
    assert 3 <= stopped < 6
    assert (tmp_path / "checkpoints" / f"step_0000000{stopped}.pt").exists()
    assert resume(tokens, tmp_path).returncode == 0
    assert_same_run(tmp_path, whole_run)


def test_14_a_killed_rank_comes_back_by_itself(tokens, tmp_path):
    """torchrun --max-restarts: rank 1 kills itself at its 8th batch, once; the job ends as an undisturbed one."""
    more = ("--steps", 6, "--checkpoint-every", 2, "--resume")
    for name in ("killed", "whole"):
        folder = tmp_path / name
        flags = beyond_flags(tokens, folder, 1, *more, "--checkpoint-dir", folder / "checkpoints")
        dying = {"DIE_RANK": "1", "DIE_STEP": "8", "DIE_ONCE": str(folder / "died")} if name == "killed" else {}
        run = run_command(*TWO_RANKS, "--max-restarts=1", RANK, folder, CHECKPOINT, *flags, **dying,
                          TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        assert run.returncode == 0, run.stderr
    assert (tmp_path / "killed" / "died").exists()
    log = "speedup_14_checkpoint_resume.log"
    assert "steps done before: 2" in (tmp_path / "killed" / log).read_text()
    assert losses(tmp_path / "killed" / log) == losses(tmp_path / "whole" / log)
    ours, truth = (torch.load(tmp_path / name / "rank1.pt", weights_only=True) for name in ("killed", "whole"))
    assert all(torch.equal(ours[key], truth[key]) for key in truth)


def test_14_restarts_that_cannot_work_are_refused(tokens, tmp_path):
    run = run_command(*TWO_RANKS, "--max-restarts=1", ROOT / "beyond/speedup_14_checkpoint_resume.py",
                      *beyond_flags(tokens, tmp_path, 1), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert run.returncode != 0
    assert "error: --max-restarts works only with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.stderr


@pytest.mark.parametrize("first, then", [(1, 2), (2, 1)])
def test_14_another_number_of_ranks_goes_on(first, then, tokens, tmp_path):
    """Float32, the same total batch: the losses of one process that did all six steps."""
    log = "speedup_14_checkpoint_resume.log"

    def part(ranks, steps, folder):
        start = TWO_RANKS if ranks == 2 else [sys.executable]
        flags = beyond_flags(tokens, folder, 2, "--steps", 6, "--checkpoint-every", 2, "--resume")
        stop = {"DIE_RANK": "0" if ranks == 2 else "alone", "DIE_STEP": str(steps * (2 if ranks == 1 else 1) + 1)}
        return run_command(*start, RANK, folder, CHECKPOINT, *flags, "--checkpoint-dir", folder / "checkpoints",
                           **(stop if steps < 6 else {}))

    assert part(first, 4, tmp_path).returncode != 0  # killed as it fetches the fifth step's first batch
    run = part(then, 6, tmp_path)
    assert run.returncode == 0, run.stderr
    assert part(1, 6, tmp_path / "whole").returncode == 0
    assert "steps done before: 4" in run.stdout
    assert losses(tmp_path / log) == pytest.approx(losses(tmp_path / "whole" / log), abs=1e-4)


@pytest.mark.parametrize("flags, reason", [
    (["--steps", 7], "has --steps 6, this one 7"),
    (["--seed", 1], "has --seed 1337, this one 1"),
    (["-T", 16], "has -T 32, this one 16"),
    (["--total-batch", 64], "has --total-batch 128, this one 64"),
])
def test_14_a_different_run_is_not_resumed(flags, reason, whole_run, tokens, tmp_path):
    copy_checkpoints(whole_run, tmp_path)
    run = resume(tokens, tmp_path, *flags)
    assert run.returncode == 1 and reason in run.stderr and run.stderr.count("\n") == 1


def test_14_a_new_run_does_not_mix_with_an_older_one(whole_run, tokens, tmp_path):
    copy_checkpoints(whole_run, tmp_path)
    flags = ["--data", str(tokens), "--device", "cpu", "--checkpoint-dir", str(tmp_path / "checkpoints")]
    with pytest.raises(SystemExit, match="holds the checkpoints of a run: add --resume"):
        rung(CHECKPOINT).main(flags)


def test_14_a_finished_run_stays_finished(whole_run, tokens, tmp_path):
    copy_checkpoints(whole_run, tmp_path)
    run = resume(tokens, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "steps done before: 6" in run.stdout and "step : " not in run.stdout
    assert_same_run(tmp_path, whole_run)


def test_14_a_checkpoint_is_plain_and_holds_the_scaler(tmp_path, tokens):
    """float16, as on a T4: the scaler's state is there; and a checkpoint serves wherever a saved model does."""
    module = rung(CHECKPOINT)
    module.autocast_dtype = lambda device: torch.float16
    train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 2, "--checkpoint-every", 2, "--total-batch", 16,
          "--checkpoint-dir", tmp_path)
    checkpoint = torch.load(tmp_path / "step_00000002.pt", weights_only=True)
    assert {"script", "config", "model", "step", "tokenizer"} <= set(checkpoint)
    assert checkpoint["scaler"]["_growth_tracker"] == 2  # steps since the scale last changed
    model = module.GPT(module.GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])


class Crash(Exception):
    """What ends a run in the middle of a step."""


def test_14_scaler_and_random_numbers_go_on(tmp_path, tokens, monkeypatch):
    """float16, and a model that draws a random number in each step: after a crash both are as without it."""
    scaler = torch.amp.GradScaler  # a scale so small that no step is skipped: the tracker counts the steps
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **more: scaler(*args, **more, init_scale=64.0))

    def run(folder, crash_at=None, *more):
        module = rung(CHECKPOINT)
        module.autocast_dtype = lambda device: torch.float16
        forward, steps = module.GPT.forward, []

        def drawing_forward(self, *args):
            torch.rand(1)
            steps.append(None)
            if len(steps) == crash_at:
                raise Crash
            return forward(self, *args)

        module.GPT.forward = drawing_forward
        train(module, folder, tokens, "-B", 1, "-T", 16, "--steps", 4, "--checkpoint-every", 2, "--total-batch", 16,
              "--val-every", 0, "--checkpoint-dir", folder / "checkpoints", *more)

    run(tmp_path / "whole")
    with pytest.raises(Crash):
        run(tmp_path / "crashed", 3)
    run(tmp_path / "crashed", None, "--resume")
    whole, crashed = (torch.load(tmp_path / name / "checkpoints/step_00000004.pt", weights_only=True)
                      for name in ("whole", "crashed"))
    assert crashed["scaler"] == whole["scaler"] and whole["scaler"]["_growth_tracker"] == 4
    assert torch.equal(crashed["rng"], whole["rng"])


def test_14_lost_weights_are_not_saved(tmp_path, tokens):
    """A norm that is not a number: the loss of that step is still fine, the weights after it are not."""
    module = rung(CHECKPOINT)
    clip = module.nn.utils.clip_grad_norm_
    try:
        module.nn.utils.clip_grad_norm_ = lambda *args: clip(*args) * float("nan")
        log = train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 2, "--checkpoint-every", 2,
                    "--checkpoint-dir", tmp_path / "checkpoints")
    finally:
        module.nn.utils.clip_grad_norm_ = clip
    assert "# WARNING: no checkpoint at step 2 (the gradients' norm is nan)" in log.read_text()
    assert not (tmp_path / "checkpoints").exists()


def test_14_another_runs_log_is_not_taken_over(whole_run, tokens, tmp_path):
    copy_checkpoints(whole_run, tmp_path).unlink()
    (tmp_path / "speedup_14_checkpoint_resume.log").write_text("step : 1 | loss: 1.0 | another run's log\nstep : ")
    assert resume(tokens, tmp_path).returncode == 0
    assert_same_run(tmp_path, whole_run)


def test_15_the_same_gradients(tmp_path, tokens):
    flags = ("-B", 2, "--total-batch", 128, "--checkpoint-every", 0, "--val-every", 0)
    before, step_before = first_gradients(tmp_path / "before", tokens, *flags, number=CHECKPOINT)
    after, step_after = first_gradients(tmp_path / "after", tokens, *flags, number=RECOMPUTE)
    assert step_after["loss"] == step_before["loss"]
    for expected, actual in zip(before, after, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("flags, recomputed", [((), 2), (("--recompute-blocks", 1), 1), (("--recompute-blocks", 0), 0)])
def test_15_blocks_run_twice(flags, recomputed, tmp_path, tokens):
    """Each block once in the forward pass, the checkpointed ones again in the backward pass, none in validation."""
    module = rung(RECOMPUTE)
    forward, calls = module.Block.forward, []
    module.Block.forward = lambda self, x: calls.append(self.training) or forward(self, x)
    log = train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2, "--val-every", 1,
                "--val-sequences", 1, "--checkpoint-every", 0, *flags)
    assert calls == ([True] * (2 + recomputed) + [False] * 2) * 2  # also after the first validation
    assert f"# recomputed blocks: {recomputed} of 2" in log.read_text()


def test_15_memory_falls(tmp_path, tokens):
    """The peak of the whole process, measured from outside, with and without."""
    peaks = []
    for blocks in (0, 6):
        run = run_command(
            sys.executable, ROOT / "beyond/speedup_15_activation_checkpointing.py", "--model", "small",
            "--device", "cpu", "--data", tokens, "--log-dir", tmp_path, "-B", 16, "-T", 128, "--total-batch", 2048,
            "--steps", 1, "--val-every", 0, "--checkpoint-every", 0, "--compile-mode", "none",
            "--recompute-blocks", blocks,
        )
        assert run.returncode == 0, run.stderr
        peaks.append(float(re.search(r"peak memory: (\S+) GB", run.stdout)[1]))
    # At least 8 tensors of (B, T, C), 2 bytes each, in each of the 5 blocks whose activations are not there.
    assert peaks[1] < peaks[0] - 5 * 8 * (16 * 128 * 384) * 2 / 1e9, peaks


def test_15_compiled_on_two_ranks(tmp_path, tokens):
    found = []
    for mode in ("default", "none"):
        run = run_command(
            *TWO_RANKS, "beyond/speedup_15_activation_checkpointing.py", "--model", "tiny", "--device", "cpu", "--data",
            tokens, "--log-dir", tmp_path / mode, "-B", 1, "-T", 32, "--total-batch", 128, "--steps", 3,
            "--checkpoint-every", 0, "--compile-mode", mode,
        )
        assert run.returncode == 0, run.stderr
        found.append(losses(tmp_path / mode / "speedup_15_activation_checkpointing.log"))
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.parametrize("number, flags, reason", [
    (VALIDATION, ["--val-every", -1], "--val-every -1: must be at least 0"),
    (VALIDATION, ["--val-sequences", -1], "--val-sequences -1: must be at least 0"),
    (CHECKPOINT, ["--checkpoint-every", -1], "--checkpoint-every -1: must be at least 0"),
    (CHECKPOINT, ["--checkpoint-keep", 0], "--checkpoint-keep 0: must be at least 1"),
    (RECOMPUTE, ["--recompute-blocks", 3], "--recompute-blocks 3: this model has 2 blocks"),
])
def test_wrong_values(number, flags, reason, tmp_path, tokens):
    with pytest.raises(SystemExit, match=f"error: {reason}"):
        train(rung(number), tmp_path, tokens, *flags)
