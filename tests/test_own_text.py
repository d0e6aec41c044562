"""Rungs for a text of one's own: each shown on the thing itself."""
import sys

import pytest
import torch
from conftest import losses, run_command, rung, train
from test_ddp import RANK, TWO_RANKS
from torch._dynamo.utils import counters

from ladder.scripts.stages import BY_LABEL

DROPOUT = "28"
COMPILED = pytest.mark.parametrize("mode", ["none", pytest.param("default", marks=pytest.mark.slow)])
SHORT = ("-B", 1, "-T", 16, "--total-batch", 32, "--steps", 4, "--val-every", 0, "--checkpoint-every", 2)


def lively(module, dropout=0.0):
    """A tiny model in training whose residual branches are not zero, as they are at first from rung 24 on."""
    torch.manual_seed(0)
    model = module.GPT(module.MODELS["tiny"])
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.1)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = dropout
    return model


def gradients(forward, model, *batch):
    """Of the loss of a batch: (the loss, the gradients of all parameters as one vector)."""
    model.zero_grad()
    loss = forward(*batch)
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def assert_equal(ours, truth):
    assert ours.keys() == truth.keys() and all(torch.equal(ours[name], truth[name]) for name in truth)


@torch.no_grad()
def test_28_where_and_how_much():
    """After the embedding and at the end of each branch, a share of the entries is zero and the others are scaled."""
    model, ends, dropped = lively(rung(DROPOUT), dropout=0.25), [], []
    for end in (model.transformer.wte, *(end for block in model.transformer.h for end in (block.attn, block.mlp))):
        end.register_forward_hook(lambda part, inputs, output: ends.append(output))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.register_forward_hook(lambda part, inputs, output: dropped.append((inputs[0], output)))
    model(torch.randint(50257, (4, 128)))
    for end, (x, output) in zip(ends, dropped, strict=True):
        kept = output != 0
        assert x is end and torch.allclose(output[kept], x[kept] / 0.75)
        assert kept.float().mean() == pytest.approx(0.75, abs=0.01)  # of 32,768 entries: 4 standard deviations
    assert len(ends) == 5


def masks(folder, tokens, rank, ranks, *flags):
    """What a rank of `ranks` drops after the embedding, batch by batch, as bytes; the ranks run one after another."""
    module, seen = rung(DROPOUT), []
    new_model = module.new_model

    def hooked_model(*args):
        model = new_model(*args)
        model.dropout.register_forward_hook(lambda part, inputs, output: seen.append((output == 0).numpy().tobytes()))
        return model

    module.new_model, module.init_ranks = hooked_model, lambda settings: (rank, ranks)
    train(module, folder, tokens, *SHORT, "--total-batch", 64, "--steps", 2, *flags)
    return seen


def test_28_masks_are_those_of_the_batch(tmp_path, tokens):
    """All micro-steps, steps, ranks and seeds differ; two ranks drop what one process drops in the same batches."""
    alone = masks(tmp_path / "alone", tokens, 0, 1)
    two = [masks(tmp_path / str(rank), tokens, rank, 2) for rank in (0, 1)]
    assert len(alone) == len(set(alone)) == 2 * 4
    assert [mask for both in zip(*two, strict=True) for mask in both] == alone
    assert masks(tmp_path / "seed", tokens, 0, 1, "--seed", 7)[0] not in alone


@pytest.mark.slow
def test_28_two_ranks_equal_one_process(tmp_path, tokens):
    """With the same B they have the same masks, so DDP has nothing to hide behind; in float32."""
    def flags(folder):
        return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", 2, "-T", 32,
                "--steps", 6, "--compile-mode", "none", "--total-batch", 256, "--checkpoint-dir", folder]

    two = run_command(*TWO_RANKS, RANK, tmp_path, DROPOUT, *flags(tmp_path / "two"))
    one = run_command(sys.executable, RANK, tmp_path, DROPOUT, *flags(tmp_path / "one"))
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    rank0, rank1, alone = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1, "alone"))
    for name in alone:
        assert torch.equal(rank0[name], rank1[name])
        assert torch.allclose(rank0[name], alone[name], rtol=0, atol=2e-5), name


@COMPILED
def test_28_a_resumed_run_drops_what_the_whole_run_drops(mode, tmp_path, tokens):
    """Bit by bit, losses and weights; also if the whole run has validated between. A different --dropout is refused."""
    flags = (*SHORT, "--save", tmp_path / "whole.pt", "--val-every", 1, "--val-sequences", 1)
    whole = train(rung(DROPOUT), tmp_path / "whole", tokens, *flags, compile_mode=mode)
    module, halves = rung(DROPOUT), (*SHORT, "--save", tmp_path / "halves.pt")
    module.get_lr = lambda step, *others, get_lr=module.get_lr: get_lr(step, *others) if step < 4 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(module, tmp_path / "halves", tokens, *halves, compile_mode=mode)
    with pytest.raises(SystemExit, match="has dropout 0.1, not 0.2; make them equal"):
        train(rung(DROPOUT), tmp_path / "halves", tokens, *halves, "--resume", "--dropout", 0.2)
    log = train(rung(DROPOUT), tmp_path / "halves", tokens, *halves, "--resume", compile_mode=mode)
    assert "steps done before: 2" in log.read_text()
    assert losses(log) == losses(whole) and len(losses(whole)) == 4
    assert_equal(weights(tmp_path / "halves.pt"), weights(tmp_path / "whole.pt"))


@COMPILED
def test_28_recomputed_blocks_drop_the_same(mode):
    """The gradients are those without recomputation; compiled, up to the rounding of fused products."""
    model, found = lively(rung(DROPOUT), dropout=0.2), []
    x, y = torch.randint(50257, (2, 2, 32), generator=torch.Generator().manual_seed(1))
    for blocks in (0, 2):
        model.recompute_blocks = blocks
        torch.manual_seed(5)
        found.append(gradients(torch.compile(model) if mode == "default" else model, model, x, y))
        torch.compiler.reset()
    (loss, kept), (same_loss, recomputed) = found
    assert same_loss == loss
    assert torch.allclose(recomputed, kept, rtol=0, atol=1e-6 * kept.abs().max() * (mode == "default"))
    torch.manual_seed(6)
    assert (gradients(model, model, x, y)[1] - kept).norm() > 0.1 * kept.norm()  # the masks matter


def test_28_validation_drops_nothing(tokens):
    module = rung(DROPOUT)
    loader = module.DataLoaderLite(tokens, 1, 32, "cpu", "val")
    found = [module.evaluate(lively(module, p), loader, 4, torch.float32, 0, 1) for p in (0.0, 0.5, 0.5)]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_28_validation_recompiles_nothing(tmp_path, tokens):
    """model.eval() and model.train() between two steps leave the one compiled graph in use."""
    counters.clear()
    train(rung(DROPOUT), tmp_path, tokens, *SHORT, "--val-every", 1, "--val-sequences", 1, compile_mode="default")
    assert counters["stats"]["unique_graphs"] == 2  # compile_model's trial, and the model


@COMPILED
def test_28_without_dropout_it_is_the_rung_before(mode, tmp_path, tokens):
    logs = [train(rung(label), tmp_path / label, tokens, *SHORT, "--save", tmp_path / f"{label}.pt", *more,
                  compile_mode=mode)
            for label, *more in ((BY_LABEL[DROPOUT].before,), (DROPOUT, "--dropout", 0))]
    assert losses(logs[0]) == losses(logs[1])
    assert_equal(*(weights(path) for path in sorted(tmp_path.glob("*.pt"))))


@pytest.mark.parametrize("value, reason", [
    (1, "1.0: zeroes everything; give less than 1"), (30, "30.0: zeroes everything; give less than 1"),
    (-0.1, "-0.1: out of range; give at least 0"), ("nan", "nan: out of range"),
])
def test_28_not_a_share(value, reason, tmp_path, tokens):
    with pytest.raises(SystemExit, match=f"error: --dropout {reason}"):
        train(rung(DROPOUT), tmp_path, tokens, *SHORT, "--dropout", value)
