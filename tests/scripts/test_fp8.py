"""`fp8`: float8 products on a CPU, which has torch's kernel for them, against torchao's and against bfloat16."""
import argparse
from unittest import mock

import pytest
import torch
import torchao.float8
from load_script import new_gpt, rung
from run_script import train
from torch._dynamo.utils import counters


@pytest.fixture
def fp8(monkeypatch):
    """The rung on a CPU that it takes for a GPU of capability 8.9."""
    module = rung("fp8")
    use_float8 = module.use_float8
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    module.use_float8 = lambda model, args: use_float8(model, argparse.Namespace(**{**vars(args), "device": "cuda"}))
    return module


def args_of(module, *flags):
    return module.parse_args(["-B", "4", "--device", "cpu", *map(str, flags)])


def float8_layers(model):
    return {name for name, part in model.named_modules() if getattr(part, "in_float8", False)}


@pytest.mark.parametrize("size", ["tiny", "gpt2", "gpt2-xl"])
def test_fp8_layers_are_those_of_torchaos_filter(size, fp8):
    """And they take 48 % of the arithmetic of the linear layers in gpt2, 95 % in gpt2-xl."""
    with torch.device("meta"):
        model, expected = new_gpt(fp8, size), new_gpt(fp8, size)
    pays = torchao.float8._auto_filter_for_recipe("tensorwise", filter_fqns=["lm_head"])
    linear = {name: part for name, part in expected.named_modules() if isinstance(part, torch.nn.Linear)}
    chosen = {name for name, part in linear.items() if pays(part, name)}
    assert fp8.use_float8(model, args_of(fp8)) == len(chosen)
    assert float8_layers(model) == chosen
    share = sum(linear[name].weight.numel() for name in chosen) / sum(part.weight.numel() for part in linear.values())
    assert round(100 * share) == {"gpt2": 48, "gpt2-xl": 95}.get(size, round(100 * share))


def test_fp8_the_parameters_are_the_same_ones(fp8):
    """So DDP, both optimizers and checkpoints find what they found before."""
    model = new_gpt(fp8)
    before = dict(model.named_parameters())
    assert fp8.use_float8(model, args_of(fp8, "--float8-from", 1)) == len(float8_layers(model)) == 2 * 5
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert model.state_dict().keys() == new_gpt(rung("zero_init")).state_dict().keys()


@pytest.mark.parametrize("flags, cuda, capability", [
    ([], "13.0", (8, 6)),
    ([], None, (9, 4)),  # an AMD GPU: its kernels take other types of float8
    (["-B", 1, "-T", 1000], "13.0", (9, 0)),
    (["--float8-from", 0], "13.0", (12, 0)),
    (["--float8-from", 193], "13.0", (8, 9)),
])
def test_fp8_otherwise_the_model_stays_as_it_is(flags, cuda, capability, fp8, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    model = new_gpt(fp8)
    assert fp8.use_float8(model, args_of(fp8, "--float8-from", 1, *flags)) == 0
    assert not float8_layers(model)
    assert rung("fp8").use_float8(model, args_of(fp8, "--float8-from", 1)) == 0  # nor on a CPU


def test_fp8_the_three_products_are_torchaos():
    """torchao's emulation rounds as it does on a GPU and multiplies in bfloat16; so output and gradients agree."""
    module = rung("fp8")
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False))
    ours = module.Float8Linear(64, 96, bias=False)
    ours.weight.data.copy_(theirs[0].weight.data)
    ours.in_float8 = True
    theirs = torchao.float8.convert_to_float8_training(
        theirs, config=torchao.float8.Float8LinearConfig(emulate=True))
    found = []
    x, y_grad = 1e4 * torch.randn(2, 16, 64), 1e-7 * torch.randn(2, 16, 96)  # beyond the types' own range
    for model in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(leaf)
        y.backward(y_grad.to(y.dtype))
        weight = next(model.parameters())
        assert weight.dtype == weight.grad.dtype == torch.float32
        found.append((y.float(), leaf.grad, weight.grad))
    for mine, other in zip(*found, strict=True):
        assert (mine - other).norm() < 0.01 * other.norm()
    exact = x @ ours.weight.T
    assert 0.01 < (found[0][0] - exact).norm() / exact.norm() < 0.06  # and are rounded, unlike float32's


def test_fp8_only_the_forward_product_accumulates_fast(monkeypatch):
    product = mock.Mock(wraps=torch.nn.functional.scaled_mm)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", product)
    x, weight = (torch.randn(n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (32, 48))
    rung("fp8").Float8Product.apply(x, weight).sum().backward()
    assert [call.kwargs["use_fast_accum"] for call in product.call_args_list] == [True, False, False]


def test_fp8_compiled_in_one_graph(fp8):
    """As `train` runs it on a GPU."""
    torch.manual_seed(0)
    model, (x, y), found = new_gpt(fp8, "1x2x64", 257), torch.randint(0, 257, (2, 4, 32)), []
    for block in model.transformer.h:  # no weight is left at zero
        for linear in (block.attn.c_proj, block.mlp.down_proj):
            torch.nn.init.normal_(linear.weight, std=0.02)
    fp8.use_float8(model, args_of(fp8, "--float8-from", 1))
    counters.clear()
    for forward in (model, torch.compile(model, backend="eager")):
        with torch.autocast("cpu", torch.bfloat16):
            loss = forward(x, y)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    for eager, compiled in zip(*found, strict=True):
        # where the largest number differs in its last bit, so do the scale and all roundings
        assert (compiled - eager).norm() < 0.2 * eager.norm()
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-4)


def test_fp8_train_uses_it(fp8, tmp_path, byte_tokens):
    """A CPU's own product of E5M2 numbers is slow; here these multiply the same numbers in float32."""
    fp8.float8_product = lambda a, fa, b, fb, fast=False: ((a.float() @ b.float()) * (fa * fb)).bfloat16()
    fp8.autocast_dtype = lambda device: torch.bfloat16
    log = train(fp8, tmp_path, byte_tokens, "-B", 1, "-T", 16, "--steps", 2, "--float8-from", 1)
    assert "# float8: 10 layers (0: " in log.read_text()
