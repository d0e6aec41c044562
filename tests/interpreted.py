"""The kernels of rungs 37 and 38 by Triton's interpreter, on a CPU: TRITON_INTERPRET=1, set before triton is imported.

    TRITON_INTERPRET=1 python -m pytest -n 0 tests/interpreted.py       # test_gpu.py runs this
"""
import pytest
import torch
from conftest import rung, tiny
from torch.nn import functional as F


def exact(logits, targets, vocab_size):
    """The losses and their gradients, in float64."""
    logits = logits.double().requires_grad_()
    found = F.cross_entropy(logits[:, :vocab_size], targets, reduction="none")
    found.sum().backward()
    return found.detach(), logits.grad


@pytest.mark.parametrize("rows, vocab_size, n_columns", [
    (5, 257, 384), (3, 256, 256), (2, 8200, 8320), (2, 9000, 9088)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_37_losses_and_gradients_are_those_of_cross_entropy(rows, vocab_size, n_columns, dtype):
    """Padded columns, odd numbers of rows, logits of one block and of two; a target in the last column."""
    torch.manual_seed(0)
    logits = (5 * torch.randn(rows, n_columns)).to(dtype)
    logits[-1, vocab_size - 2] = 40.0  # what comes before it counts almost nothing
    targets = torch.randint(vocab_size, (rows,))
    targets[0] = vocab_size - 1
    expected, expected_grads = exact(logits, targets, vocab_size)
    grads, found = logits.clone(), torch.empty(rows)
    rung("37").cross_entropy_kernel[(rows,)](grads, targets, found, vocab_size, n_columns, BLOCK=8192)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8
    torch.testing.assert_close(grads.double(), expected_grads, rtol=0, atol=tolerance)
    assert not grads[:, vocab_size:].any()


def small_head(module, model_dtype=torch.float32, vocab_size=257):
    """Loss and gradients of an output layer of 384 rows: the rung's, and in float64, of a loss that is scaled by 3."""
    torch.manual_seed(0)
    x, weight = torch.randn(48, 64), 0.5 * torch.randn(384, 64)
    targets, found = torch.randint(vocab_size, (48,)), []
    for dtype in (model_dtype, torch.float64):
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, weight)]
        if dtype == torch.float64:
            loss = F.cross_entropy((leaves[0] @ leaves[1].T)[:, :vocab_size], targets)
        else:
            loss = module.OutputLayerLoss.apply(*leaves, targets, vocab_size)
        (3 * loss).backward()
        found.append([loss.detach().double(), *(leaf.grad.double() for leaf in leaves)])
    return found


def test_37_output_layer_and_loss_in_one():
    for ours, expected in zip(*small_head(rung("37")), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def compare_with_rung_35(label, error):
    """As `train` runs it on a GPU, under autocast; the model calls the kernel, and only with targets."""
    (x, y), found = torch.randint(257, (2, 2, 16)), []
    for name in ("35", label):
        model = tiny(name)
        model.loss_kernel = name == label
        with torch.autocast("cpu", torch.bfloat16):
            logits, loss = model(x), model(x, y)
        loss.backward()
        found.append((logits, loss, model.lm_head.weight.grad, model.transformer.h[0].attn.c_attn.weight.grad))
    (logits, loss, head, first), (its_logits, its_loss, its_head, its_first) = found
    assert torch.equal(its_logits, logits) and its_loss.item() == pytest.approx(loss.item(), abs=error / 10)
    assert (its_head - head).norm() < error * head.norm() and (its_first - first).norm() < error * first.norm()


def test_37_the_model_has_the_gradients_of_rung_35():
    compare_with_rung_35("37", error=0.02)


def test_38_the_model_has_the_gradients_of_rung_35_but_for_the_rounding():
    compare_with_rung_35("38", error=0.1)


def test_38_the_gradients_are_scaled_to_the_range_of_e5m2_and_written_elsewhere():
    """Here in float32: where a mantissa carries over, the interpreter rounds to half of an E5M2 number."""
    torch.manual_seed(0)
    logits, targets = (5 * torch.randn(5, 384)).bfloat16(), torch.randint(257, (5,))
    before, grads, found = logits.clone(), torch.empty(5, 384), torch.empty(5)
    kernel = rung("38").cross_entropy_kernel
    kernel[(5,)](logits, grads, targets, found, 257, 384, SCALE=57344.0, BLOCK=8192)
    expected, expected_grads = exact(logits, targets, 257)
    assert torch.equal(logits, before)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads.double(), 57344 * expected_grads, rtol=1e-5, atol=0.02)
