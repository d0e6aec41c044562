"""Muon against its definition; muP's scales in closed form."""
from unittest import mock

import pytest
import torch
from load_script import new_gpt, rung, rungs_that_change, tiny
from torch.utils._python_dispatch import TorchDispatchMode


def matrices_of(shape, singular_values, n=3):
    """`n` random matrices of this shape with these singular values, and their singular vectors: [(matrix, U, V^T)]."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
        yield (u @ torch.diag(singular_values) @ vt).float(), u, vt


@pytest.mark.parametrize("label", rungs_that_change("orthogonalize")[1:])
@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 256)])
def test_muon_the_update_is_orthogonal(label, shape, monkeypatch):
    """The same singular vectors, and every singular value in the band of the iteration, whatever it was before.

    Of each matrix of a batch: a small gradient is updated as a large one.
    """
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # float32 on any CPU
    module, found = rung(label), [*matrices_of(shape, torch.logspace(0, -1.5, 64, dtype=torch.float64))]
    scales = 1.0, 1e-3, 1e-9
    batch = torch.stack([scale * matrix for scale, (matrix, _, _) in zip(scales, found, strict=True)])
    updates = module.orthogonalize(batch)
    assert updates.shape == (3, *shape) and updates.dtype == torch.float32
    for update, (_, u, vt) in zip(updates, found, strict=True):
        values = u.T @ update.double() @ vt.T
        assert 0.67 < values.diagonal().min() and values.diagonal().max() < 1.15
        assert (values - torch.diag(values.diagonal())).abs().max() < 1e-3
        assert torch.allclose(update.square().mean().sqrt(), torch.tensor(max(shape) ** -0.5), rtol=0.2)
    assert module.orthogonalize(torch.zeros(1, *shape)).abs().max() == 0  # and not NaN


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("label", rungs_that_change("orthogonalize")[1:])
def test_muon_float16_keeps_gradients_that_it_cannot_hold(label):
    """Near 1e-9, where float16 has only 0: the entries' root mean square is that of an orthogonal matrix, 1/√n."""
    gradients = 1e-9 * torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0))
    updates = rung(label).orthogonalize(gradients.as_subclass(OnGpu)).float()
    for update in updates:
        assert update.square().mean().sqrt().item() == pytest.approx(256**-0.5, rel=0.2)


@pytest.mark.parametrize("label", rungs_that_change("MuonAdamW")[1:])
def test_muon_three_steps_in_closed_form(label):
    """Momentum, Nesterov's, scale and decay, without the iteration: torch's Muon is as near as bfloat16."""
    module = rung(label)
    module.orthogonalize = lambda matrix: matrix
    model = new_gpt(module, vocab_size=257)
    optimizer = model.configure_optimizers(lr=0.5, muon_lr=0.25, weight_decay=0.125)
    [muon] = [group for group in optimizer.param_groups if group["name"] == "muon"]
    muon["lr"] = muon["max_lr"]
    expected, momenta = [p.detach().clone() for p in muon["params"]], [0.0] * len(muon["params"])
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        grads = [p.grad for p in muon["params"]]
        optimizer.step()
        for i, grad in enumerate(grads):
            momenta[i] = 0.95 * momenta[i] + 0.05 * grad
            update = 0.2 * max(grad.shape) ** 0.5 * (0.95 * momenta[i] + 0.05 * grad)
            expected[i] = (1 - 0.25 * 0.125) * expected[i] - 0.25 * update
    for p, truth in zip(muon["params"], expected, strict=True):
        torch.testing.assert_close(p.detach(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("supported, kind, dtype", [
    (False, torch.Tensor, torch.float32), (True, torch.Tensor, torch.bfloat16), (False, OnGpu, torch.float16)])
def test_muon_products_in_16_bits_only_where_the_hardware_multiplies_them(supported, kind, dtype, monkeypatch):
    product = mock.Mock(wraps=torch.baddbmm)
    monkeypatch.setattr(torch, "baddbmm", product)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    rung("muon").orthogonalize(torch.ones(1, 2, 4).as_subclass(kind))
    assert {call.args[0].dtype for call in product.call_args_list} == {dtype}


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    n = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.n += op.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("label", rungs_that_change("MuonAdamW", "orthogonalize")[1:])
def test_muon_matrices_of_one_shape_share_their_products(label):
    """5 iterations of 3 products for each shape, up to 16 layers."""
    model = new_gpt(rung(label), "5x2x32", vocab_size=257)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    shapes = {p.shape for p in model.transformer.h.parameters() if p.dim() == 2}
    with Products() as products:
        model.configure_optimizers(lr=0.1, muon_lr=0.1, weight_decay=0.1).step()
    assert products.n == 15 * len(shapes)


@pytest.mark.parametrize("shape", [(128, 128), (384, 128), (128, 384)])
def test_mup_a_wider_matrix_has_updates_of_the_same_norm(shape):
    """At a width of 128 they are `zero_init`'s. The norm of an orthogonal matrix is 1, so the factor is the norm."""
    def factor(label, wider):
        module = rung(label)
        grad = torch.randn([wider * side for side in shape])
        module.orthogonalize = lambda update: update / update.norm()
        return module.muon_update([grad], [torch.zeros_like(grad)]).norm().item()

    assert factor("mup", 1) == pytest.approx(factor("zero_init", 1), rel=1e-4)
    assert factor("mup", 2) == pytest.approx(0.2 * max(shape) ** 0.5, rel=1e-4)
    assert factor("zero_init", 2) == pytest.approx(0.2 * (2 * max(shape)) ** 0.5, rel=1e-4)


def logits_at_width(label, width):
    """Of a new model: a token's own logit, on average, and by how much four steps change the logits (deviation)."""
    ids = torch.randint(0, 257, (4, 16), generator=torch.Generator().manual_seed(0))
    model = tiny(label, f"2x2x{width}")
    optimizer = model.configure_optimizers(lr=0.01, muon_lr=0.01, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"]
    first = model(ids).detach()
    for _ in range(4):
        model(ids, ids.roll(-1, dims=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    own = first.gather(-1, ids[..., None])
    return own.mean().item(), (model(ids).detach() - first).std().item()


def test_mup_logits_change_as_much_at_any_width():
    """The coordinate check of Yang et al. 2022. A token's own logit: 0.02 n_embd in zero_init, times 128 / n_embd."""
    for label, growth in (("mup", 1), ("zero_init", 2)):
        narrow, wide = (logits_at_width(label, width) for width in (128, 256))
        assert (narrow[0], wide[0]) == pytest.approx((2.56, growth * 2.56), rel=0.03)
        assert (wide[1] < 1.1 * narrow[1]) if label == "mup" else (wide[1] > 1.2 * narrow[1])
