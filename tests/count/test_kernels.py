"""The FLOPs and bytes of a step's kernels, eager and compiled, against closed forms."""
import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from ladder.count import kernels
from ladder.count.flops import SHAPES, flops_per_token

B, T = 2, 64
EAGER = {"compile_mode": "none"}
aten = torch.ops.aten


@pytest.fixture(scope="module")
def counted():
    """counted(label, **args): a step of the tiny model; each is counted once."""
    found = {}

    def counted(label, **args):
        if (label, *args) not in found:
            found[label, *args] = kernels.count(label, "tiny", B, T, **args)
        return found[label, *args]

    return counted


def flops(step):
    return sum(n * kernel.flops for kernel, n in step.items())


def test_explicit_attention_has_the_closed_forms_flops(counted):
    assert flops(counted("0")) == flops_per_token("tiny", T) * B * T


def test_causal_attention_has_half_the_flops_and_computes_the_scores_twice(counted):
    n_layer, _, n_embd = SHAPES["tiny"]
    recomputed = n_layer * n_embd * T  # of each token: the scores again, in the backward pass
    expected = (flops_per_token("tiny", T, causal=True) + recomputed) * B * T
    assert flops(counted("6", **EAGER)) == expected


@pytest.mark.parametrize("label, number_format", [("0", "float32"), ("2", "tf32"), ("3", "16 bits")])
def test_products_count_in_the_rungs_number_format(label, number_format, counted):
    assert {kernel.number_format for kernel in counted(label) if kernel.flops} == {number_format}
    assert torch.get_float32_matmul_precision() == "highest"  # what a script sets is undone


@pytest.mark.parametrize("op, shapes, expected", [
    (aten.add.Tensor, [(8, 4), (8, 4)], 3 * 128),
    (aten.add.Tensor, [(8, 4), (4,)], 2 * 128 + 16),  # a bias is read once
    (aten.mul_.Tensor, [(8, 4), (8, 4)], 3 * 128),  # in place: two reads, one write
    (aten.copy_.default, [(8, 4), (8, 4)], 2 * 128),
    (aten.mm.default, [(8, 4), (4, 2)], 4 * (32 + 8 + 16)),
    (aten.gelu.default, [(8, 4)], 2 * 128),
    (aten.ones_like.default, [(8, 4)], 128),
])
def test_bytes_of_an_operation(op, shapes, expected):
    with FakeTensorMode():
        args = [torch.empty(shape) for shape in shapes]
        assert kernels.count_bytes(op, args, op(*args)) == expected


def test_what_is_not_read_or_written_does_not_count():
    """Rows and logits that are not looked up, what expand() repeats, gradients that AdamW only reads."""
    with FakeTensorMode():
        table, ids, logits = torch.empty(50257, 8), torch.empty(16, dtype=torch.int64), torch.empty(16, 50257)
        lists = [[torch.empty(1000)] for _ in range(4)]
        for op, args, expected in (
            (aten.embedding.default, (table, ids), 8 * 16 + 2 * 512),
            (aten.nll_loss_forward.default, (logits, ids, None, 1, -100), 2 * 8 * 16),
            (aten._fused_adamw_.default, (*lists, [], []), 7 * 4000),
        ):
            assert kernels.count_bytes(op, args, torch.empty(16, 8)) == expected
        assert kernels.size(torch.empty(1, 4).expand(100, 4)) == 16
    views = aten.view.default, aten.t.default, aten._unsafe_view.default, aten.detach.default, aten.expand.default
    assert not any(map(kernels.is_kernel, views))
    assert all(map(kernels.is_kernel, (aten.clone.default, aten.mul_.Tensor, aten._fused_adamw_.default)))


def test_any_setting_can_be_counted(counted):
    assert kernels.count_all(["0"], {"model": "tiny", "B": B, "T": T}, Console()) == {"0": counted("0")}


def compiled_kernels(function, *shapes):
    """What `function`, compiled, launches on float32 tensors of these shapes."""
    module, recorder = torch.nn.Module(), kernels.Recorder()
    module.forward = function
    with kernels.recording(recorder):
        args = [torch.empty(shape) for shape in shapes]
        kernels.compiler(recorder)(module, mode="default")
        recorder.on = True
        module(*args)
    return recorder.kernels


@pytest.mark.parametrize("function, shapes, expected", [
    (lambda x, y: torch.relu(x * 2 + y).exp(), [(64, 128)] * 2, [3 * 32768]),  # what is fused stays inside
    (lambda x, y: (x @ y).exp(), [(64, 128), (128, 64)], [2 * 32768 + 16384, 2 * 16384]),  # a product is a call
    (lambda x, y: x[:4] + y, [(64, 128), (4, 128)], [3 * 2048]),  # of a slice only what is used
    (lambda x, _: x.sum(1), [(64, 64), (1,)], [16384 + 256]),
    (lambda x, _: (x - x.amax(1, keepdim=True)).exp(), [(64, 128), (1,)], [2 * 32768]),  # nor does the maximum leave
])
def test_bytes_of_compiled_kernels(function, shapes, expected):
    assert [kernel.bytes for kernel in compiled_kernels(function, *shapes).elements()] == expected


def most_alive(graph, numel):
    """How many buffers of so many elements exist at once, in the order that Inductor has scheduled."""
    nodes = graph.scheduler.nodes
    last_use = {dep.name: when for when, node in enumerate(nodes) for dep in node.read_writes.reads}
    ends, most = [], 0
    for when, node in enumerate(nodes):
        ends += [last_use[name] for name in node.get_buffer_names()
                 if graph.get_numel(name) == numel and last_use.get(name, when) > when]
        most = max(most, sum(end >= when for end in ends))
    return most


@pytest.mark.slow
def test_chunked_cross_entropy_the_logits_of_all_chunks_never_exist_at_once_when_compiled_for_a_gpu(monkeypatch):
    """Of two chunks only those of one, and their gradients: an H100's peak had those of all."""
    most, schedule = [], kernels.scheduled_kernels
    monkeypatch.setattr(kernels, "scheduled_kernels", lambda graph: (
        most.append(most_alive(graph, 4096 * 50304)) or schedule(graph)))
    kernels.count("chunked_cross_entropy", "1x2x64", 8, 1024, loss_chunk=4096)
    assert most == [2, 0]  # forward, backward
