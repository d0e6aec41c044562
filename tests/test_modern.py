"""From GPT-2 to a modern transformer: each rung shown on the thing itself, and against torch's and transformers'."""
import re
import sys

import pytest
import torch
from conftest import run_command, rung
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.stages import BY_LABEL

RECOMPUTE, CHUNKED = "16", "17"


def output_layer(n_tokens=50, n_embd=32, vocab_size=1000, n_rows=1024):
    """(x, weight, targets) of an output layer whose last rows are padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_tokens, n_embd, generator=generator, requires_grad=True)
    weight = (0.3 * torch.randn(n_rows, n_embd, generator=generator)).requires_grad_()
    return x, weight, torch.randint(0, vocab_size, (n_tokens,), generator=generator)


def loss_and_gradients(loss, *leaves, scale=1.0):
    """The loss, and the gradients of `scale` times the loss, divided by `scale`."""
    return loss.detach(), *(gradient / scale for gradient in torch.autograd.grad(scale * loss, leaves))


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 4096])
def test_17_loss_and_gradients_are_those_of_the_full_logits(chunk):
    """Against float64. The last chunk may be smaller; padding gets no gradient at all."""
    x, weight, targets = output_layer()
    found = loss_and_gradients(rung(CHUNKED).ChunkedCrossEntropy.apply(x, weight, targets, 1000, chunk), x, weight)
    logits = (x.double() @ weight.double().T)[:, :1000]
    expected = loss_and_gradients(F.cross_entropy(logits, targets), x, weight)
    for ours, truth in zip(found, expected, strict=True):
        assert (ours - truth).norm() <= 1e-6 * truth.norm()
    assert found[2][1000:].abs().max() == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_17_under_autocast(dtype, tolerance):
    """As close to float32 as the type is (8 and 11 bits), with float16's scaled loss, too."""
    x, weight, targets = output_layer()
    chunked = rung(CHUNKED).ChunkedCrossEntropy.apply
    expected = loss_and_gradients(chunked(x, weight, targets, 1000, 20), x, weight)
    with torch.autocast("cpu", dtype):
        loss = chunked(x, weight, targets, 1000, 20)
    assert loss.dtype == torch.float32
    for ours, truth in zip(loss_and_gradients(loss, x, weight, scale=65536.0), expected, strict=True):
        assert ours.dtype == torch.float32 and (ours - truth).norm() <= tolerance * truth.norm()


def test_17_float16_keeps_small_probabilities():
    """Divided by the number of tokens they would fall below float16's smallest number, 6e-8."""
    n_tokens, n_rows = 512, 8192
    x, weight = torch.zeros(n_tokens, 4, requires_grad=True), torch.zeros(n_rows, 4, requires_grad=True)
    with torch.no_grad():
        x.fill_(1.0)
    assert 1 / n_rows / n_tokens < 2.0**-21
    with torch.autocast("cpu", torch.float16):
        loss = rung(CHUNKED).ChunkedCrossEntropy.apply(x, weight, torch.zeros(n_tokens, dtype=int), n_rows, 100)
    assert torch.allclose(torch.autograd.grad(loss, weight)[0][1:], torch.tensor(1 / n_rows), rtol=1e-3)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.numel = max(self.numel, part.numel())
        return result


def tiny(label):
    """A fresh tiny model of a rung, and a batch for it: inputs and targets (4, 32)."""
    module = rung(label)
    torch.manual_seed(0)
    return module.GPT(module.MODELS["tiny"]), *torch.randint(0, 50257, (2, 4, 32))


@pytest.mark.parametrize("label", [RECOMPUTE, CHUNKED])
def test_17_no_tensor_has_the_logits_of_all_tokens(label):
    """From the first operation of the forward pass to the last of the backward pass."""
    model, x, y = tiny(label)
    model.loss_chunk = 16
    with Largest() as largest:
        model(x, y).backward()
    if label == RECOMPUTE:
        assert largest.numel >= 4 * 32 * 50257
    else:
        assert largest.numel == model.lm_head.weight.numel() < 4 * 32 * 50257


def test_17_validation_computes_no_gradients(monkeypatch):
    """One product per chunk, not three."""
    model, x, y = tiny(CHUNKED)
    expected = model(x, y)
    products = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: products.append(1) or linear(*args))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *args: products.append(1))
    with torch.no_grad():
        loss = rung(CHUNKED).ChunkedCrossEntropy.apply(
            *(part.detach() for part in output_layer()[:2]), output_layer()[2], 1000, 25)
        assert products == [1, 1] and loss.isfinite()
        monkeypatch.undo()
        assert torch.allclose(model.eval()(x, y), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_17_compiled_in_one_graph(dtype):
    """With the whole model around it, as `train` compiles it."""
    model, x, y = tiny(CHUNKED)
    model.loss_chunk = 50
    counters.clear()
    found = []
    for forward in (model, torch.compile(model, backend="aot_eager")):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = forward(x, y)
        found.append(loss_and_gradients(loss, *model.parameters()))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for eager, compiled in zip(*found, strict=True):
        assert torch.allclose(eager, compiled, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_17_memory_falls(tmp_path, tokens):
    """The peak of the whole process, measured from outside, with all 2,048 tokens at once and with 256."""
    peaks = []
    for chunk in (0, 256):
        run = run_command(
            sys.executable, BY_LABEL[CHUNKED].path, "--model", "small", "--device", "cpu", "--data", tokens,
            "--log-dir", tmp_path, "-B", 16, "-T", 128, "--total-batch", 2048, "--steps", 1, "--val-every", 0,
            "--checkpoint-every", 0, "--checkpoint-dir", tmp_path, "--compile-mode", "none", "--loss-chunk", chunk,
        )
        assert run.returncode == 0, run.stderr
        peaks.append(float(re.search(r"peak memory: (\S+) GB", run.stdout)[1]))
    # Of the 1,792 tokens' logits at least the log-softmax is there no more, 4 bytes each.
    assert peaks[1] < peaks[0] - 1792 * 50304 * 4 / 1e9, peaks
