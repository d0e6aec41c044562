"""chunked_cross_entropy, which keeps no logits of a whole batch: in 16 bits and compiled. More: test_exercises.py."""
import pytest
import torch
from load_script import rung, tiny
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

def output_layer(n_tokens=50, n_embd=32, vocab_size=1000, n_rows=1024):
    """(x, weight, targets) of an output layer whose last rows are padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_tokens, n_embd, generator=generator, requires_grad=True)
    weight = (0.3 * torch.randn(n_rows, n_embd, generator=generator)).requires_grad_()
    return x, weight, torch.randint(0, vocab_size, (n_tokens,), generator=generator)


def chunked(*args):
    """ChunkedCrossEntropy of (x, weight, targets, vocab_size, chunk)."""
    return rung("chunked_cross_entropy").ChunkedCrossEntropy.apply(*args)


def loss_and_gradients(loss, *leaves, scale=1.0):
    """The loss, and the gradients of `scale` times the loss, divided by `scale`."""
    return loss.detach(), *(gradient / scale for gradient in torch.autograd.grad(scale * loss, leaves))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_chunked_cross_entropy_under_autocast(dtype, tolerance):
    """As close to float32 as the type is (8 and 11 bits), with float16's scaled loss, too."""
    x, weight, targets = output_layer()
    expected = loss_and_gradients(chunked(x, weight, targets, 1000, 20), x, weight)
    with torch.autocast("cpu", dtype):
        loss = chunked(x, weight, targets, 1000, 20)
    assert loss.dtype == torch.float32
    for ours, truth in zip(loss_and_gradients(loss, x, weight, scale=65536.0), expected, strict=True):
        assert ours.dtype == torch.float32 and (ours - truth).norm() <= tolerance * truth.norm()


@pytest.mark.parametrize("x, n_rows, chunk", [(1.0, 8192, 256), (20.0, 128, 4096)])
def test_chunked_cross_entropy_float16_neither_vanishes_nor_overflows(x, n_rows, chunk):
    """Of probabilities divided by the number of tokens nothing would be left: float16's smallest number is 6e-8.

    If all targets are equal, the gradient of their row is a sum over the whole chunk, here 81,920: it ends at 65,504.
    """
    inputs, weight = (torch.full((n, 4), value, requires_grad=True) for n, value in ((4096, x), (n_rows, 0.0)))
    with torch.autocast("cpu", torch.float16):
        loss = chunked(inputs, weight, torch.zeros(4096, dtype=int), n_rows, chunk)
    expected = torch.full((n_rows, 4), x / n_rows) - x * (torch.arange(n_rows) == 0)[:, None]
    assert torch.allclose(torch.autograd.grad(loss, weight)[0], expected, rtol=1e-3)


def test_chunked_cross_entropy_validation_computes_no_gradients():
    """One product per chunk, not three; the loss is the same."""
    x, weight, targets = output_layer()
    expected = chunked(x, weight, targets, 1000, 25)
    with torch.no_grad(), FlopCounterMode(display=False) as flops:
        assert torch.equal(chunked(x.detach(), weight, targets, 1000, 25), expected)
    assert flops.get_total_flops() == 2 * 50 * 32 * 1024


@pytest.mark.slow
def test_chunked_cross_entropy_compiled_in_one_graph():
    """The last chunk is smaller. Inductor 2.13 ignores alpha in `add_(a @ b, alpha=...)`, and the graph hides it."""
    model = tiny("chunked_cross_entropy")
    x, y = torch.randint(0, 257, (2, 4, 32))
    model.loss_chunk = 50
    counters.clear()
    eager, compiled = (loss_and_gradients(forward(x, y), *model.parameters())
                       for forward in (model, torch.compile(model)))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(eager, compiled, strict=True))
