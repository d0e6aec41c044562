"""`sampled_softmax`: the sampled softmax against the full one, of logits that differ by several nats."""
from types import SimpleNamespace

import pytest
import torch
from load_script import new_gpt, rung, tiny
from torch.nn import functional as F


def with_large_logits(model):
    """The same model with an output layer of which no two tokens have about the same probability."""
    torch.nn.init.normal_(model.lm_head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def test_sampled_softmax_with_every_row_the_loss_is_the_full_one():
    """Its gradients, too. 257 tokens are fewer than 48 positions and 1,024 others; also where each is a target."""
    model = with_large_logits(tiny("sampled_softmax"))
    for start, T in ((0, 24), (97, 160)):
        x = torch.arange(start, start + 2 * T).view(2, T) % 257
        y = (x * 5 + 3) % 257
        found, full = model.train()(x, y), F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        assert torch.allclose(found, full, rtol=1e-5, atol=0) and full > 6  # nats
        for one, other in zip(gradients(model, found), gradients(model, full), strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)
    assert len(y.unique()) == 257


@pytest.mark.parametrize("targets", [[3, 3, 3, 5, 0], [1, 2, 3, 4, 9]])
@torch.no_grad()
def test_sampled_softmax_the_softmaxs_sum_is_right_on_average(targets):
    """Of 12 tokens 8 are drawn in each step. All positions have the same hidden vector, so that exp(loss) is the sum
    times a constant, and its mean over the draws that of the full softmax."""
    module = rung("sampled_softmax")
    module.EXTRA_ROWS, targets = 3, torch.tensor(targets)
    model = new_gpt(module, "1x1x32", vocab_size=12)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    x = torch.randn(32, generator=torch.Generator().manual_seed(3)).repeat(5, 1)
    full = F.cross_entropy((x @ model.lm_head.weight.T)[:, :12], targets).exp()
    torch.manual_seed(4)
    sums = torch.stack([model.sampled_loss(x, targets).exp() for _ in range(2000)])
    assert sums.std() > 0.05 * full  # it does depend on the draw
    assert abs(sums.mean() - full) < 4 * sums.std() / 2000**0.5 < 0.05 * full


def test_sampled_softmax_a_compiled_step_is_the_eager_one():
    """With the same draws; and batches of many and of few different targets take the same graph."""
    module = rung("sampled_softmax")
    module.EXTRA_ROWS = 40
    torch.manual_seed(0)
    model = with_large_logits(new_gpt(module, "1x1x32", vocab_size=257))
    compiled = torch.compile(model, backend="eager")  # test_smoke.py lowers it
    x = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for y in (x.roll(-1), x // 64):
            losses = []
            for forward in (model, compiled):
                torch.manual_seed(6)
                losses.append(forward(x, y))
            assert torch.allclose(*losses, rtol=1e-5, atol=0)
            assert losses[0] != model(x, y)  # another draw
            for one, other in zip(*(gradients(model, loss) for loss in losses), strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_sampled_softmax_validation_uses_every_row():
    """The loss of `zero_init`, where training has an estimate; and training goes on with the estimate."""
    module = rung("sampled_softmax")
    module.EXTRA_ROWS = 16
    torch.manual_seed(0)
    model, full = with_large_logits(new_gpt(module, vocab_size=257)), with_large_logits(tiny("zero_init"))
    x = torch.randint(0, 257, (1, 24), generator=torch.Generator().manual_seed(7))
    loader = SimpleNamespace(batch=lambda i: (x, x.roll(i + 1)))
    found, expected = (part.evaluate(each, loader, 2, torch.autocast("cpu", enabled=False), "cpu")
                       for part, each in ((module, model), (rung("zero_init"), full)))
    assert found == expected and model.training
    assert abs(model(x, x.roll(1)) - full(x, x.roll(1))) > 1e-3
