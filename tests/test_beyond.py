"""The rungs beyond speed: each capability shown on the thing itself."""
import sys

import pytest
import torch
from conftest import losses, read_steps, run_command, rung, train
from test_ddp import RANK, TWO_RANKS
from torch.optim.optimizer import register_optimizer_step_pre_hook

GRAD_ACCUM = 12
FLOAT32 = torch.float32


def first_gradients(folder, tokens, *flags):
    """The gradients that the first optimizer step of a float32 run of rung 11 finds, before AdamW."""
    module = rung(GRAD_ACCUM)
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
