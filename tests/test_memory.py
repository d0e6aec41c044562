"""The lessons about memory: 16 recomputes blocks, 17 keeps no logits of a whole batch. Neither changes a result."""
from types import SimpleNamespace

import pytest
import torch
from conftest import Operations, new_gpt, run_command, rung, train, watch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn import functional as F

STEP = ("-B", 1, "-T", 16, "--total-batch", 16, "--steps", 2, "--checkpoint-every", 0, "--val-sequences", 1)


def test_16_the_same_gradients(tmp_path, byte_tokens):
    found = []
    for label, *flags in (("15",), ("16", "--recompute-blocks", 2)):
        with watch() as seen:
            train(rung(label), tmp_path / label, byte_tokens, *STEP, *flags)
        found.append(seen.gradients[0])
    assert all(map(torch.equal, *found)) and len(found[0]) > 20


@pytest.mark.parametrize("flags, recomputed", [((), 0), (("--recompute-blocks", 1), 1), (("--recompute-blocks", 9), 2)])
def test_16_blocks_run_twice(flags, recomputed, tmp_path, byte_tokens):
    """Each block once in the forward pass, the checkpointed ones again in the backward pass, none in validation."""
    module, calls = rung("16"), []
    forward = module.Block.forward
    module.Block.forward = lambda self, x: calls.append(self.training) or forward(self, x)
    log = train(module, tmp_path, byte_tokens, *STEP, "--val-every", 1, *flags)
    assert calls == ([True] * (2 + recomputed) + [False] * 2) * 2  # also after the first validation
    assert f"# recomputed blocks: {recomputed} of 2" in log.read_text()


def output_layer(n_tokens=50, n_embd=32, vocab_size=1000, n_rows=1024):
    """(x, weight, targets) of an output layer whose last rows are padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_tokens, n_embd, generator=generator, requires_grad=True)
    weight = (0.3 * torch.randn(n_rows, n_embd, generator=generator)).requires_grad_()
    return x, weight, torch.randint(0, vocab_size, (n_tokens,), generator=generator)


def chunked(*args):
    """ChunkedCrossEntropy of (x, weight, targets, vocab_size, chunk)."""
    return rung("17").ChunkedCrossEntropy.apply(*args)


def loss_and_gradients(loss, *leaves, scale=1.0):
    """The loss, and the gradients of `scale` times the loss, divided by `scale`."""
    return loss.detach(), *(gradient / scale for gradient in torch.autograd.grad(scale * loss, leaves))


@pytest.mark.parametrize("chunk", [1, 7, 25, 50, 4096])
def test_17_loss_and_gradients_are_those_of_the_full_logits(chunk):
    """Against float64. The last chunk may be smaller; padding gets no gradient at all."""
    x, weight, targets = output_layer()
    found = loss_and_gradients(chunked(x, weight, targets, 1000, chunk), x, weight)
    logits = (x.double() @ weight.double().T)[:, :1000]
    expected = loss_and_gradients(F.cross_entropy(logits, targets), x, weight)
    for ours, truth in zip(found, expected, strict=True):
        assert (ours - truth).norm() <= 1e-6 * truth.norm()
    assert found[2][1000:].abs().max() == 0


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_17_under_autocast(dtype, tolerance):
    """As close to float32 as the type is (8 and 11 bits), with float16's scaled loss, too."""
    x, weight, targets = output_layer()
    expected = loss_and_gradients(chunked(x, weight, targets, 1000, 20), x, weight)
    with torch.autocast("cpu", dtype):
        loss = chunked(x, weight, targets, 1000, 20)
    assert loss.dtype == torch.float32
    for ours, truth in zip(loss_and_gradients(loss, x, weight, scale=65536.0), expected, strict=True):
        assert ours.dtype == torch.float32 and (ours - truth).norm() <= tolerance * truth.norm()


def test_17_float16_keeps_small_probabilities():
    """Divided by the number of tokens they would fall below float16's smallest number, 6e-8."""
    n_tokens, n_rows = 512, 8192
    x, weight = torch.ones(n_tokens, 4, requires_grad=True), torch.zeros(n_rows, 4, requires_grad=True)
    assert 1 / n_rows / n_tokens < 2.0**-21
    with torch.autocast("cpu", torch.float16):
        loss = chunked(x, weight, torch.zeros(n_tokens, dtype=int), n_rows, 100)
    assert torch.allclose(torch.autograd.grad(loss, weight)[0][1:], torch.tensor(1 / n_rows), rtol=1e-3)


def test_17_float16_does_not_overflow_when_all_targets_are_equal():
    """The gradient of that target's row is a sum over the whole chunk: here 4,096 * 20, beyond float16's 65,504."""
    x = torch.full((4096, 4), 20.0, requires_grad=True)
    weight = torch.zeros(128, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = chunked(x, weight, torch.zeros(4096, dtype=int), 128, 4096)
    expected = torch.full((128, 4), 20 / 128) - 20 * (torch.arange(128) == 0)[:, None]
    assert torch.allclose(torch.autograd.grad(loss, weight)[0], expected, rtol=1e-3)


def test_17_one_16_bit_gradient_of_the_logits():
    """Cast once for both products, and no float32 copy is written to subtract 1 at the targets."""
    x, weight, targets = output_layer()
    apply, found = rung("17").ChunkedCrossEntropy.apply, []

    def look(graph, inputs):
        found.extend((str(node.target), node.meta.get("val")) for node in graph.graph.nodes if node.op != "placeholder")
        return make_boxed_func(graph.forward)

    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(lambda: apply(x, weight, targets, 1000, 50), backend=aot_autograd(fw_compiler=look))
        torch.autograd.grad(compiled(), (x, weight))
    of_logits = [(name, value) for name, value in found
                 if isinstance(value, torch.Tensor) and value.numel() == 50 * 1024]
    assert of_logits and not any("index_put" in name or "scatter_" in name and value.dtype == torch.float32
                                 for name, value in of_logits if "slice" not in name)
    assert len([name for name, value in of_logits if "_to_copy" in name and value.dtype == torch.bfloat16]) == 1


def tiny(label):
    """A fresh tiny model of a rung, and a batch for it: inputs and targets (4, 32)."""
    torch.manual_seed(0)
    return new_gpt(rung(label)), *torch.randint(0, 50257, (2, 4, 32))


@pytest.mark.parametrize("label", ["16", "17"])
def test_17_no_tensor_has_the_logits_of_all_tokens(label):
    """From the first operation of the forward pass to the last of the backward pass."""
    model, x, y = tiny(label)
    model.loss_chunk = 16
    with Operations() as largest:
        model(x, y).backward()
    expected = 4 * 32 * 50304 if label == "16" else model.lm_head.weight.numel()
    assert largest.numel == expected


@pytest.mark.parametrize("label", ["17", "28", "30", "fsdp"])
def test_17_the_flag_is_the_chunk(label, byte_tokens):
    module, chunks = rung(label), []
    real = module.ChunkedCrossEntropy
    module.ChunkedCrossEntropy = SimpleNamespace(apply=lambda *args: chunks.append(args[-1]) or real.apply(*args))
    for flag in ("24", "0"):
        words = ["--model", "tiny", "-B", "2", "-T", "32", "--device", "cpu", "--loss-chunk", flag]
        settings = module.parse_settings(words)
        loader = module.DataLoaderLite(byte_tokens, 2, 32, "cpu")
        module.build_model(settings, loader)(*loader.batch(0))
    assert chunks == [24, 2 * 32]


def test_17_validation_computes_no_gradients():
    """One product per chunk, not three, and no buffer for a sum of gradients; the loss is the same."""
    x, weight, targets = output_layer()
    expected = chunked(x, weight, targets, 1000, 25)
    with torch.no_grad(), Operations() as operations:
        assert torch.equal(chunked(x.detach(), weight, targets, 1000, 25), expected)
    aten = torch.ops.aten
    assert (operations.count[aten.mm], operations.count[aten.zeros_like]) == (2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_17_compiled_in_one_graph(dtype):
    """With the whole model around it, as `train` compiles it."""
    model, x, y = tiny("17")
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
    apply = rung("17").ChunkedCrossEntropy.apply
    eager, compiled = (loss_and_gradients(loss(x, weight, targets, 1000, 20), x, weight)
                       for loss in (apply, torch.compile(apply)))
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(eager, compiled, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("label, flag, plain, lean, saved", [
    # At least 8 tensors of (B, T, C), 2 bytes each, in each of the 5 blocks whose activations are not there.
    ("16", "--recompute-blocks", 0, 6, 5 * 8 * (16 * 128 * 384) * 2),
    # Of the 1,792 tokens' logits at least the log-softmax is there no more, 4 bytes each.
    ("17", "--loss-chunk", 0, 256, 1792 * 50304 * 4),
])
def test_memory_falls(label, flag, plain, lean, saved, tmp_path, tokens):
    """The peak of a whole process in which the small model takes a step of 2,048 tokens, with and without."""
    code = ("import sys; sys.path.insert(0, 'tests'); from conftest import main, peak_memory, rung; "
            "main(rung(sys.argv[1]), *sys.argv[2:]); print(peak_memory())")
    peaks = []
    for value in (plain, lean):
        run = run_command(
            "python", "-c", code, label, "--model", "small", "--device", "cpu", "--data", tokens, "--log-dir", tmp_path,
            "-B", 16, "-T", 128, "--total-batch", 2048, "--steps", 1, "--val-every", 0, "--checkpoint-every", 0,
            "--checkpoint-dir", tmp_path, "--compile-mode", "none", flag, value)
        assert run.returncode == 0, run.stderr
        peaks.append(float(run.stdout.splitlines()[-1]) * 2**20)
    assert peaks[1] < peaks[0] - saved, peaks
