"""From GPT-2 to a modern transformer: each rung shown on the thing itself, and against torch's and transformers'."""
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT, converted, data_with, load_module, losses, new_gpt, record_run, run_command, rung, train)
from safetensors.torch import save_file
from test_beyond import Crash, peak_of
from test_ddp import RANK, TWO_RANKS
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from data import vocabulary
from ladder.scripts.stages import BY_LABEL

RECOMPUTE, CHUNKED, MUON, TRAPEZOID, ROPE, SWIGLU, ZERO_INIT = "16", "17", "18", "19", "20", "23", "24"
LAST = "25"  # fsdp and dcp shard the model of 24: test_fsdp.py


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


def test_17_float16_does_not_overflow_when_all_targets_are_equal():
    """The gradient of that target's row is a sum over the whole chunk: here 4,096 * 20, beyond float16's 65,504."""
    x = torch.full((4096, 4), 20.0, requires_grad=True)
    weight = torch.zeros(128, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = rung(CHUNKED).ChunkedCrossEntropy.apply(x, weight, torch.zeros(4096, dtype=int), 128, 4096)
    expected = torch.full((128, 4), 20 / 128) - 20 * (torch.arange(128) == 0)[:, None]
    assert torch.allclose(torch.autograd.grad(loss, weight)[0], expected, rtol=1e-3)


def graphs_of(forward, *leaves):
    """The graphs of a compiled function's forward and backward pass: [(name of the operation, its FakeTensor)]."""
    found = []

    def look(graph, inputs):
        found.extend((str(node.target), node.meta.get("val")) for node in graph.graph.nodes if node.op != "placeholder")
        return make_boxed_func(graph.forward)

    torch.autograd.grad(torch.compile(forward, backend=aot_autograd(fw_compiler=look))(), leaves)
    return found


def test_17_one_16_bit_gradient_of_the_logits():
    """Cast once for both products, and no float32 copy is written to subtract 1 at the targets."""
    x, weight, targets = output_layer()

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return rung_17.ChunkedCrossEntropy.apply(x, weight, targets, 1000, 50)

    rung_17 = rung(CHUNKED)
    of_logits = [(name, value) for name, value in graphs_of(loss, x, weight)
                 if isinstance(value, torch.Tensor) and value.numel() == 50 * 1024]
    assert of_logits and not any("index_put" in name or "scatter_" in name and value.dtype == torch.float32
                                 for name, value in of_logits if "slice" not in name)
    assert len([name for name, value in of_logits if "_to_copy" in name and value.dtype == torch.bfloat16]) == 1


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
    return new_gpt(module), *torch.randint(0, 50257, (2, 4, 32))


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


@pytest.mark.parametrize("label", [CHUNKED, "30", "fsdp"])
def test_17_the_flag_is_the_chunk(label, tokens):
    module, chunks = rung(label), []
    real = module.ChunkedCrossEntropy
    module.ChunkedCrossEntropy = SimpleNamespace(apply=lambda *args: chunks.append(args[-1]) or real.apply(*args))
    for flag in ("24", "0"):
        words = ["--model", "tiny", "-B", "2", "-T", "32", "--device", "cpu", "--loss-chunk", flag]
        settings = module.parse_settings(words)
        loader = module.DataLoaderLite(tokens, 2, 32, "cpu")
        module.build_model(settings, loader)(*loader.batch(0))
    assert chunks == [24, 2 * 32]


@pytest.mark.parametrize("share", [0, 1])
def test_19_the_whole_run_may_decay_or_none_of_it(share, tmp_path, tokens):
    log = train(rung("19"), tmp_path, tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2, "--val-every", 0,
                "--warmup-steps", 0, "--decay-share", share)
    rates = [float(rate) for rate in re.findall(r"lr: (\S+)", log.read_text())]
    assert rates[1] == pytest.approx(rates[0] / (1 + share))


def test_17_validation_computes_no_gradients(monkeypatch):
    """One product per chunk, not three, and no buffer for a sum of gradients."""
    model, x, y = tiny(CHUNKED)
    expected = model(x, y)
    products = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: products.append(1) or linear(*args))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda *args: products.append(1))
    monkeypatch.setattr(torch, "zeros_like", lambda *args, **more: pytest.fail("a buffer"))
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
def test_17_compiled_by_inductor():
    """The last chunk is smaller. Inductor 2.13 ignores alpha in `add_(a @ b, alpha=...)`, and the graph hides it."""
    x, weight, targets = output_layer()
    chunked = rung(CHUNKED).ChunkedCrossEntropy.apply
    eager, compiled = (loss_and_gradients(loss(x, weight, targets, 1000, 20), x, weight)
                       for loss in (chunked, torch.compile(chunked)))
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(eager, compiled, strict=True))


@pytest.mark.slow
def test_17_memory_falls(tmp_path, tokens):
    """The peak of the whole process, with all 2,048 tokens at once and with 256."""
    peaks = [peak_of(CHUNKED, tmp_path, tokens, "--loss-chunk", chunk) for chunk in (0, 256)]
    # Of the 1,792 tokens' logits at least the log-softmax is there no more, 4 bytes each.
    assert peaks[1] < peaks[0] - 1792 * 50304 * 4 / 1e9, peaks


def matrices_of(shape, singular_values, n=3):
    """`n` random matrices of this shape with these singular values, and their singular vectors: [(matrix, U, V^T)]."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator, dtype=torch.float64), full_matrices=False)
        yield (u @ torch.diag(singular_values) @ vt).float(), u, vt


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 256)])
def test_18_the_update_is_orthogonal(shape, monkeypatch):
    """The same singular vectors, and every singular value in the band of the iteration, whatever it was before."""
    module = rung(MUON)
    monkeypatch.setattr(module, "autocast_dtype", lambda device: torch.float32)  # on any CPU
    orthogonalize = module.orthogonalize
    for matrix, u, vt in matrices_of(shape, torch.logspace(0, -1.5, 64, dtype=torch.float64)):
        update = orthogonalize(1e-3 * matrix[None])[0]
        assert update.shape == shape and update.dtype == torch.float32
        values = u.T @ update.double() @ vt.T
        assert 0.67 < values.diagonal().min() and values.diagonal().max() < 1.15
        assert (values - torch.diag(values.diagonal())).abs().max() < 1e-3
        assert torch.allclose(update.square().mean().sqrt(), torch.tensor(max(shape) ** -0.5), rtol=0.2)
    assert orthogonalize(torch.zeros(1, *shape)).abs().max() == 0  # and not NaN


def muon_and_torch(dtype, steps=3):
    """{name: (weight, weight as torch's optimizers leave it, learning rate)} after steps with the same gradients."""
    module = rung(MUON)
    module.autocast_dtype = lambda device: dtype
    torch.manual_seed(0)
    ours, theirs = new_gpt(module), new_gpt(module)
    theirs.load_state_dict(ours.state_dict())
    optimizer = ours.configure_optimizers(weight_decay=0.1)
    rates = [2e-3, 1e-3, 1e-3]
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    parts = {"matrix": {}, "embedding": {}, "vector": {}}
    for name, parameter in theirs.named_parameters():
        kind = "vector" if parameter.dim() == 1 else "matrix" if ".h." in name else "embedding"
        parts[kind][name] = parameter
    muon = torch.optim.Muon(parts["matrix"].values(), lr=2e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": parts["embedding"].values(), "weight_decay": 0.1}, {"params": parts["vector"].values()}],
        lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        for name, parameter in theirs.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            ours.get_parameter(name).grad = parameter.grad.clone()
        for one in (optimizer, muon, adamw):
            one.step()
    return {name: (ours.get_parameter(name), parameter, 2e-3 if name in parts["matrix"] else 1e-3)
            for name, parameter in theirs.named_parameters()}


@pytest.mark.parametrize("dtype, share", [(torch.float32, 0.05), (torch.bfloat16, 0.1)])
def test_18_updates_are_those_of_torch_muon_and_adamw(dtype, share):
    """torch.optim.Muon iterates in bfloat16: equal to a few percent of an update, whose numbers are about 0.2 * lr."""
    compared = muon_and_torch(dtype)
    assert len(compared) == 2 + 2 * 12 + 2
    for name, (ours, theirs, lr) in compared.items():
        matrix = ours.dim() == 2 and ".h." in name
        error = (ours - theirs).detach().square().mean().sqrt()
        assert error < (share * 0.2 * lr if matrix else 1e-6), name


class Operations(TorchDispatchMode):
    """Counts the operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_18_products_in_16_bits_only_where_the_hardware_multiplies_them(monkeypatch):
    for supported, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda supported=supported: supported)
        assert rung(MUON).orthogonalize(torch.ones(1, 2, 4)).dtype == dtype


def test_18_as_many_operations_at_any_depth():
    """Matrices of equal shape share them, and on a GPU the kernels. Of large models only a few layers do."""
    module, counts = rung(MUON), []
    for n_layer in (1, 2, 12):
        model = module.GPT(module.GPTConfig(vocab_size=64, n_layer=n_layer, n_head=2, n_embd=16))
        optimizer = model.configure_optimizers(weight_decay=0.1)
        for _ in range(2):  # the first step creates the momenta
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            with Operations() as operations:
                optimizer.step()
        counts.append(operations.count)
    assert counts[0] == counts[1] == counts[2] > 100, counts


def test_18_stacks_of_a_large_model_are_small():
    """In gpt2-xl a few matrices at a time: in float32 up to 0.4 GB."""
    module, stacks = rung(MUON), []
    with torch.device("meta"):
        model = new_gpt(module, "gpt2-xl")
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        module.orthogonalize = lambda stack: stacks.append(stack.shape) or stack
        optimizer = model.configure_optimizers(weight_decay=0.1)
        del optimizer.param_groups[1:]
        optimizer.step()
    assert sum(shape[0] for shape in stacks) == 4 * 48
    assert max(shape.numel() for shape in stacks) <= 1e8, max(shape.numel() for shape in stacks)


def test_18_the_flags_arrive(tmp_path, tokens):
    """--muon-lr is the rate of the blocks' matrices, --max-lr that of the others and of the log."""
    module = rung(MUON)
    run = record_run(module, tmp_path, tokens, "-B", 1, "-T", 8, "--total-batch", 8, "--steps", 2, "--val-every", 0,
                     "--warmup-steps", 2, "--max-lr", 0.002, "--muon-lr", 0.01)
    rates = [[group["lr"] for group in groups] for groups in run.groups]
    assert rates == [pytest.approx([0.005, 0.001, 0.001]), pytest.approx([0.01, 0.002, 0.002])]
    assert [step["lr"] for step in run.steps] == [0.001, 0.002]


RESUMED = ("-B", 1, "-T", 16, "--total-batch", 32, "--steps", 6, "--checkpoint-every", 2, "--val-every", 0)


@pytest.mark.parametrize("label", [MUON, pytest.param(LAST, marks=pytest.mark.slow)])
def test_18_a_crashed_run_resumes_bit_by_bit(label, tmp_path, tokens):
    """The momenta and AdamW's moments come back; a different --muon-lr is refused."""
    whole = train(rung(label), tmp_path / "whole", tokens, *RESUMED, "--save", tmp_path / "whole.pt")
    module = rung(label)
    forward, calls = module.GPT.forward, []

    def crashing_forward(self, *args):
        calls.append(args)
        if len(calls) > 10:  # five steps of two micro-steps
            raise Crash
        return forward(self, *args)

    module.GPT.forward = crashing_forward
    with pytest.raises(Crash):
        train(module, tmp_path / "crashed", tokens, *RESUMED)
    more = ("--resume", "--save", tmp_path / "crashed.pt")
    with pytest.raises(SystemExit, match="has muon_lr 0.002, not 0.01; "):
        train(rung(label), tmp_path / "crashed", tokens, *RESUMED, *more, "--muon-lr", 0.01)
    crashed = train(rung(label), tmp_path / "crashed", tokens, *RESUMED, *more)
    assert "# resumed after step 4 of 6" in crashed.read_text()
    assert losses(crashed) == losses(whole) and len(losses(whole)) == 6
    ours, truth = (torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"] for name in ("crashed", "whole"))
    assert all(torch.equal(ours[name], truth[name]) for name in truth)


@pytest.mark.slow
@pytest.mark.parametrize("label", [MUON, LAST, "31"])
def test_18_two_ranks_equal_one_process(label, tmp_path, tokens):
    """2 ranks x 2 micro-steps x B=2 against one process with B=8, float32: as for DDP itself."""
    def flags(folder, B):
        return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", folder, "-B", B, "-T", 32,
                "--steps", 6, "--compile-mode", "none", "--total-batch", 256, "--checkpoint-dir", folder]

    two = run_command(*TWO_RANKS, RANK, tmp_path, label, *flags(tmp_path / "two", 2))
    one = run_command(sys.executable, RANK, tmp_path, label, *flags(tmp_path / "one", 8))
    assert two.returncode == 0 and one.returncode == 0, two.stderr + one.stderr
    name = f"{BY_LABEL[label].name}.log"
    assert losses(tmp_path / "two" / name) == pytest.approx(losses(tmp_path / "one" / name), abs=1e-4)
    rank0, rank1, alone = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1, "alone"))
    for name in alone:
        assert torch.equal(rank0[name], rank1[name])
        assert torch.allclose(rank0[name], alone[name], rtol=0, atol=2e-5), name


@pytest.mark.parametrize("max_steps, max_lr, warmup_steps, decay_share, expected", [
    (10, 1.0, 2, 0.4, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),  # and 0 after the last
    (4, 0.3, 0, 0.5, [0.3, 0.3, 0.3, 0.15]),
    (4, 1.0, 2, 0.0, [0.5, 1, 1, 1]),  # no decay
    (5, 1.0, 5, 1.0, [0.2, 0.4, 0.6, 0.4, 0.2]),  # rise and fall meet: a triangle
    (2, 1.0, 4, 0.4, [0.25, 0.5]),  # the run ends inside the warm-up
    (4, 1.0, 1, 2.0, [0.5, 0.375, 0.25, 0.125]),  # the decay had begun before the run
    (3, 0.0, 1, 0.4, [0, 0, 0]),
])
def test_19_schedule_in_closed_form(max_steps, max_lr, warmup_steps, decay_share, expected):
    get_lr = rung(TRAPEZOID).get_lr
    found = [get_lr(step, max_steps, max_lr, warmup_steps, decay_share) for step in range(1, max_steps + 1)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_19_before_the_decay_the_length_of_the_run_does_not_matter():
    get_lr = rung(TRAPEZOID).get_lr
    short, long = ([get_lr(step, steps, 1.0, 5, 0.4) for step in range(1, 61)] for steps in (100, 1000))
    assert short == long


@pytest.mark.parametrize("label", [TRAPEZOID, "fsdp"])
def test_19_a_run_stopped_before_the_decay_may_get_another_end(label, tmp_path, tokens):
    """12 steps, stopped after 4 and resumed for 8, are 8 from the start. Not once the decay has begun, in either."""
    flags = ("-B", 1, "-T", 16, "--total-batch", 16, "--val-every", 0, "--checkpoint-every", 4, "--decay-share", 0.5)
    whole = train(rung(label), tmp_path / "whole", tokens, *flags, "--steps", 8)
    module, stopped = rung(label), tmp_path / "stopped"
    module.get_lr = lambda step, *others, get_lr=module.get_lr: get_lr(step, *others) if step < 5 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(module, stopped, tokens, *flags, "--steps", 12)
    for more, other in ((("--steps", 7), "steps 12, not 7"), (("--decay-share", 0.8), "decay_share 0.5, not 0.8")):
        with pytest.raises(SystemExit, match=f"has {other}; "):
            train(rung(label), stopped, tokens, *flags, "--steps", 12, "--resume", *more)
    resumed = train(rung(label), stopped, tokens, *flags, "--steps", 8, "--resume")
    text = resumed.read_text()
    assert losses(resumed) == losses(whole) and text.endswith("| steps 5-8\n")
    assert "| steps: 8 |" in text and "| steps: 12 |" not in text
    with pytest.raises(SystemExit, match="has steps 8, not 12; "):
        train(rung(label), stopped, tokens, *flags, "--steps", 12, "--resume")


def test_19_the_flags_arrive(tmp_path, tokens):
    """At both rates."""
    flags = ("-B", 1, "-T", 8, "--total-batch", 8, "--val-every", 0, "--steps", 4, "--warmup-steps", 2)
    rates = ("--max-lr", 0.001, "--muon-lr", 0.002, "--decay-share", 0.5)
    run = record_run(rung(TRAPEZOID), tmp_path, tokens, *flags, *rates)
    shape = [0.5, 1, 1, 0.5]
    assert [groups[0]["lr"] for groups in run.groups] == pytest.approx([0.002 * part for part in shape])
    assert [groups[1]["lr"] for groups in run.groups] == pytest.approx([0.001 * part for part in shape])


def test_20_scores_depend_on_distance_alone():
    """One query and one key at all positions: the scores are the same along every diagonal, and differ between them."""
    module, T, hs = rung(ROPE), 64, 32
    q, k = torch.randn(2, 1, 1, 1, hs, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = (part.double() for part in module.rotary_angles(T, hs))
    q, k = (module.rotate(vector.expand(1, 1, T, hs), cos, sin)[0, 0] for vector in (q, k))
    scores = q @ k.T
    of_distance = [scores.diagonal(-distance) for distance in range(T)]
    for same in of_distance:
        assert torch.allclose(same, same[0].expand_as(same), rtol=0, atol=1e-4)  # the angles are in float32
    assert torch.stack([same[0] for same in of_distance]).std() > 0.1
    assert torch.allclose(q.norm(dim=-1), q[0].norm().expand(T))  # a rotation changes no length


def test_20_the_rotation_is_that_of_transformers():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    module, T, nh, hs = rung(ROPE), 300, 3, 32
    config = Qwen3Config(hidden_size=nh * hs, num_attention_heads=nh, head_dim=hs,
                         rope_parameters={"rope_type": "default", "rope_theta": 10_000})
    q, k = torch.randn(2, 2, nh, T, hs, generator=torch.Generator().manual_seed(0))
    expected = apply_rotary_pos_emb(q, k, *Qwen3RotaryEmbedding(config)(q, torch.arange(T)[None]))
    angles = module.rotary_angles(T, hs)
    for ours, theirs in zip((module.rotate(q, *angles), module.rotate(k, *angles)), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_20_angles_are_in_float32(dtype):
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        cos, sin = rung(ROPE).rotary_angles(1024, 64)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (1024, 32)
    assert cos[1000, 0].item() == pytest.approx(math.cos(1000), abs=1e-5)
    assert sin[1000, 16].item() == pytest.approx(math.sin(10.0), abs=1e-5)  # 10,000 ** -0.5 radians per token


@pytest.mark.parametrize("label", [ROPE, LAST])
def test_20_compiled_steps_compute_no_angles(label):
    """Inductor would compute them anew for every element of queries and keys, in every block and direction."""
    model, x, y = tiny(label)
    names = [name for name, _ in graphs_of(lambda: model(x, y), *model.parameters())]
    assert any("mm" in name for name in names)
    assert not any(name.startswith(("aten.cos", "aten.sin", "aten.pow.Scalar")) for name in names)


@pytest.mark.parametrize("label", [ROPE, LAST])
def test_20_the_angles_are_in_no_checkpoint_and_on_every_device(label):
    module = rung(label)
    with torch.device("meta"):
        model = new_gpt(module)
    assert not {"cos", "sin"} & model.state_dict().keys()
    assert {name: buffer.shape for name, buffer in model.named_buffers()} == {"cos": (1024, 16), "sin": (1024, 16)}
    assert model.cos.device.type == "meta"


def test_20_positions_come_from_the_rotation_alone():
    """No parameter for positions; without the rotation the model sees a set of tokens before the last."""
    module = rung(ROPE)
    torch.manual_seed(0)
    model = new_gpt(module)
    assert "wpe" not in model.transformer
    ids = torch.randint(0, 50257, (1, 8))
    swapped = ids[:, [1, 0, *range(2, 8)]]
    with torch.no_grad():
        assert not torch.allclose(model(ids)[:, -1], model(swapped)[:, -1], atol=1e-6)
        module.rotate = lambda x, cos, sin: x
        torch.nn.init.zeros_(model.transformer.h[0].attn.c_proj.weight)  # only the second block still mixes tokens
        assert torch.allclose(model(ids)[:, -1], model(swapped)[:, -1], atol=1e-6)


@pytest.mark.parametrize("label", ["20", "21", "22"])
def test_20_weights_of_gpt2_are_refused(label, hf_folder, tmp_path):
    with pytest.raises(SystemExit, match="has no place for its transformer|it lacks transformer|Error in|size"):
        converted(hf_folder, label, tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("label", ["21", LAST])
def test_21_norms_are_those_of_transformers(label):
    """Every norm of the model, with gains that are not 1."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    module = rung(label)
    norms = [part for part in new_gpt(module).modules() if "Norm" in type(part).__name__]
    assert len(norms) == (2 * 4 if label != "21" else 2 * 2) + 1  # in two blocks, and at the end
    for ours in norms:
        width = ours.weight.numel()
        theirs = Qwen3RMSNorm(width, eps=1e-6)
        torch.nn.init.normal_(ours.weight, mean=1.0)
        theirs.load_state_dict(ours.state_dict())
        x = torch.randn(2, 3, width) * torch.tensor([1e-4, 1.0, 1e4])[:, None]  # eps matters for the smallest
        assert torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", ["21", LAST])
def test_21_no_biases(label):
    model = tiny(label)[0]
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    rungs_before = tiny("20")[0]
    shifts = sum(p.numel() for name, p in rungs_before.named_parameters() if name.endswith("bias"))
    assert shifts == 2 * 11 * 64 + 64  # what the docstring says


@pytest.mark.parametrize("label", ["21", "22", LAST])
def test_22_queries_and_keys_have_length_one(label, monkeypatch):
    """Their root mean square, as the attention kernel gets them, whatever the weights; without the norm it grows."""
    model, x, _ = tiny(label)
    attention, seen = F.scaled_dot_product_attention, []

    def see(q, k, v, **more):
        seen.extend(vector.detach().square().mean(-1).sqrt() for vector in (q, k))
        return attention(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", see)
    for block in model.transformer.h:
        torch.nn.init.normal_(block.attn.c_attn.weight, std=10.0)
    model(x)
    assert len(seen) == 4 and seen[0].shape == (4, 2, 32)  # queries and keys of two blocks: (B, nh, T)
    lengths = torch.stack(seen)
    if label == "21":
        assert lengths.mean() > 10
    else:
        assert torch.allclose(lengths, torch.ones(()), rtol=1e-4)


def test_22_starts_from_the_weights_of_21():
    before, after = (tiny(label)[0].state_dict() for label in ("21", "22"))
    assert after.keys() - before.keys() == {f"transformer.h.{i}.attn.{part}_norm.weight" for i in "01" for part in "qk"}
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_22_norms_are_in_float32_under_autocast(dtype):
    """torch warns about a norm whose input and gain have different types."""
    model, x, y = tiny("22")
    types = []
    for part in model.modules():
        if isinstance(part, torch.nn.RMSNorm):
            part.register_forward_hook(lambda norm, args, output: types.append((args[0].dtype, output.dtype)))
    expected = model(x, y)
    with torch.autocast("cpu", dtype):
        loss = model(x, y)
    assert set(types) == {(torch.float32, torch.float32)}
    assert torch.allclose(loss, expected, rtol=0, atol=0.02)


def test_23_the_mlp_is_that_of_transformers():
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

    module = rung(SWIGLU)
    ours = module.MLP(module.GPTConfig(n_embd=64))
    theirs = Qwen3MLP(Qwen3Config(hidden_size=64, intermediate_size=192))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 64)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size, hidden", [
    ("tiny", 192), ("small", 1024), ("gpt2", 2048), ("gpt2-medium", 2752), ("gpt2-large", 3456), ("gpt2-xl", 4288),
])
def test_23_as_many_parameters_as_before(size, hidden):
    """Equal where 8/3 * C is a multiple of 64; at most one such step more."""
    counts = []
    for label in ("22", SWIGLU):
        module = rung(label)
        with torch.device("meta"):
            model = new_gpt(module, size)
        mlp, n_embd = model.transformer.h[0].mlp, model.config.n_embd
        counts.append(sum(p.numel() for p in mlp.parameters()))
    assert mlp.up_proj.weight.shape == (hidden, n_embd) and hidden % 64 == 0
    assert 0 <= counts[1] - counts[0] < 3 * 64 * n_embd
    assert (counts[0] == counts[1]) is (size in ("small", "gpt2"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A randomly initialized transformers Qwen3 of the tiny model's shape; no weight is left at a trivial value."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=192, vocab_size=50257, max_position_embeddings=128, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("hf") / "qwen3-random"
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("label", [SWIGLU, LAST])
@torch.no_grad()
def test_23_logits_and_loss_are_those_of_qwen3(label, qwen3, tmp_path):
    """transformers' Qwen3ForCausalLM is the truth, as its GPT-2 was for rung 0."""
    from transformers import Qwen3ForCausalLM

    x, y = torch.randint(0, 50257, (2, 2, 128), generator=torch.Generator().manual_seed(0))
    expected = Qwen3ForCausalLM.from_pretrained(qwen3).eval()(x).logits
    assert expected.std() > 0.1
    model = converted(qwen3, label, tmp_path / "model.pt")
    assert torch.allclose(model(x), expected, rtol=0, atol=1e-4)
    assert torch.allclose(model(x, y), F.cross_entropy(expected.flatten(0, 1), y.flatten()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("change, reason", [
    ({"num_key_value_heads": 1}, "its num_key_value_heads is 1; the scripts have 2"),
    ({"head_dim": 64}, "its head_dim is 64; the scripts have 32"),
    ({"intermediate_size": 256}, "its intermediate_size is 256; the scripts have 192"),
    ({"rms_norm_eps": 1e-5}, "its rms_norm_eps is 1e-05; the scripts have 1e-06"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}}, "its rope_parameters is .*1000000"),
    ({"tie_word_embeddings": False}, "its tie_word_embeddings is False; the scripts have True"),
    ({"attention_bias": True}, "its attention_bias is True; the scripts have False"),
])
def test_23_other_shapes_are_refused(change, reason, qwen3, tmp_path):
    """By their configuration: an 8B model is not loaded to find that out."""
    config = json.loads((qwen3 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}: .*{reason}") as stop:
        converted(tmp_path, SWIGLU, tmp_path / "model.pt")
    assert "\n" not in stop.value.code


@pytest.mark.parametrize("label", ["0", "10", "22"])
def test_23_a_qwen3_is_no_model_of_earlier_rungs(label, qwen3, tmp_path, capfd):
    """Without the tables of missing weights with which transformers loads it as a GPT-2."""
    with pytest.raises(SystemExit, match=f"^error: {qwen3}: .*a Qwen3; it fits rung 23 and later, not [^\n]*$"):
        converted(qwen3, label, tmp_path / "model.pt")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("label", ["30", "31"])
def test_30_starts_from_a_qwen3(label, qwen3, tmp_path):
    """What rungs 30 and 31 add to it starts at zero, so they compute the same."""
    x = torch.randint(0, 50257, (1, 32))
    with torch.no_grad():
        expected = converted(qwen3, LAST, tmp_path / "24.pt")(x)
        assert torch.equal(converted(qwen3, label, tmp_path / f"{label}.pt")(x), expected)


def test_23_gpt2_and_damaged_folders_are_refused(hf_folder, qwen3, tmp_path):
    with pytest.raises(SystemExit, match="^error: .*a GPT-2; it fits rungs 0 to 19, not beyond/rung_23"):
        converted(hf_folder, SWIGLU, tmp_path / "model.pt")

    def refusal(folder):
        with pytest.raises(SystemExit, match=f"^error: {folder}: cannot be loaded") as stop:
            converted(folder, SWIGLU, tmp_path / "model.pt")
        return stop.value.code

    assert "cannot be loaded (" in refusal(tmp_path / "nowhere")
    (tmp_path / "config.json").write_bytes((qwen3 / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((qwen3 / "model.safetensors").read_bytes()[:1000])
    assert "cannot be loaded (" in refusal(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert "(it lacks weights)" in refusal(tmp_path)


@pytest.mark.parametrize("label", [SWIGLU, LAST])
def test_23_out_and_in_again(label, tmp_path, tokens):
    """Trained here, exported, read by transformers, and read again."""
    from transformers import AutoModelForCausalLM

    module = rung(label)
    train(module, tmp_path, tokens, *RESUMED, "--steps", 3, "--save", tmp_path / "model.pt")
    load_module(ROOT / "convert.py").main([str(tmp_path / "model.pt"), str(tmp_path / "hf")])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    x = torch.randint(0, 50257, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(theirs(x).logits, model(x), rtol=0, atol=1e-4)
        assert torch.equal(converted(tmp_path / "hf", label, tmp_path / "back.pt")(x), model(x))
    log = train(module, tmp_path / "further", tokens, *RESUMED, "--pretrained", tmp_path / "back.pt")
    assert "back.pt | parameters: " in log.read_text()


def test_24_every_block_starts_as_the_identity():
    model, x, _ = tiny(ZERO_INIT)
    inputs, outputs = [], []
    for block in model.transformer.h:
        block.register_forward_hook(lambda part, args, output: inputs.append(args[0]) or outputs.append(output))
    model(x)
    assert len(inputs) == 2 and all(map(torch.equal, inputs, outputs))


def test_24_only_the_projections_differ_from_23_and_they_learn():
    before, after = tiny(SWIGLU)[0], tiny(ZERO_INIT)[0]
    for name, parameter in after.named_parameters():
        if name.endswith(("attn.c_proj.weight", "mlp.down_proj.weight")):
            assert parameter.abs().max() == 0
        else:
            assert torch.equal(parameter, before.get_parameter(name))
    _, x, y = tiny(ZERO_INIT)
    start = {name: parameter.detach().clone() for name, parameter in after.named_parameters()}
    optimizer = after.configure_optimizers(weight_decay=0.0)
    for step in (1, 2):
        optimizer.zero_grad()
        after(x, y).backward()
        still = {name for name, parameter in after.named_parameters() if parameter.grad.abs().max() == 0}
        behind = {name for name in start if ".h." in name and not name.endswith(("c_proj.weight", "down_proj.weight"))}
        assert still == (behind if step == 1 else set())
        optimizer.step()
    assert not any(torch.equal(start[name], parameter) for name, parameter in after.named_parameters())


@pytest.mark.parametrize("label", ["19", "20", "24"])
def test_rope_has_no_table_of_positions(label, tmp_path):
    """From rung 20 on only the angles grow with T. The vocabulary is the data's, the shape any."""
    folder = data_with(vocabulary.of_bytes(), "To be, or not to be? " * 999, tmp_path / "data")
    train(rung(label), tmp_path, folder, "--model", "1x2x32", "-B", 1, "--steps", 1, "--val-every", 0, "-T", 1100,
          "--save", tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert any(1100 in weight.shape for weight in saved["model"].values()) == (label == "19")
    assert saved["config"] == {"block_size": 1100, "vocab_size": 257, "n_layer": 1, "n_head": 2, "n_embd": 32}
    assert (saved["tokenizer"], saved["end_of_text"]) == ("bytes", 256)
    assert vocabulary.restore("bytes", saved["tokenizer_json"], 256).decode([84, 111, 256]) == "To"
