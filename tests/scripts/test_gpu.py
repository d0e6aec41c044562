"""The scripts of gpu/, one GPU's last milliseconds, without one: on a CPU.

That their compiled graphs are whole and what waits in them: test_fake_cuda.py.
"""
import contextlib
from unittest import mock

import pytest
import torch
from load_script import rung, tiny
from log_files import assert_same_losses
from run_script import train, train_in_float32
from saved_models import assert_same_weights, assert_untrained
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

MATRICES = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # whose transpose transformers has


# ---- 35: the stream ----------------------------------------------------------------------------------------------

def stream(label, dtype):
    """The types between the blocks, and of the stream's gradients there."""
    model, seen = tiny(label), []
    for block in model.transformer.h:
        block.register_forward_hook(lambda part, args, output: seen.append((args[0].dtype, output.dtype)))
        block.register_full_backward_hook(lambda part, grads, of_output: seen.append((grads[0].dtype,)))
    x, y = torch.randint(257, (2, 2, 16))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(x, y)
    loss.backward()
    assert loss.dtype == torch.float32 and {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return {found for pair in seen for found in pair}


@pytest.mark.parametrize("label, dtype, expected", [
    ("bf16_residual", torch.bfloat16, torch.bfloat16), ("10", torch.bfloat16, torch.float32),
    ("bf16_residual", torch.float16, torch.float32), ("bf16_residual", torch.float32, torch.float32)])
def test_bf16_residual_the_stream_and_its_gradient_are_bfloat16(label, dtype, expected):
    """Without bfloat16 it stays float32: float16 ends at 65,504."""
    assert stream(label, dtype) == {expected}


# ---- 36: the graph -----------------------------------------------------------------------------------------------

def storages(tree):
    return {leaf.untyped_storage()._cdata: leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


class Tape(TorchDispatchMode):
    """A CUDA graph on a CPU: operations, with the tensors and numbers that they had; a replay repeats them.

    As on a GPU, capturing computes nothing in the end: what it overwrites gets its numbers back.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.before, self.made, self.replays = [], {}, set(), 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert op is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                new = {key: (t, t.clone()) for key, t in storages(value).items() if key not in self.made}
                self.before = new | self.before
        out = op(*args, **kwargs)
        self.made |= storages(out).keys() - storages((args, kwargs)).keys()
        self.operations.append((op, args, kwargs, out))
        return out

    def restore(self):
        for tensor, numbers in self.before.values():
            tensor.copy_(numbers)

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for op, args, kwargs, out in self.operations:
            for old, new in zip(tree_leaves(out), tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def capture(tape, stream):
    gpu = torch.device("cuda")
    capturing = mock.Mock(is_capturing=lambda: True)
    with (mock.patch("torch.accelerator.current_accelerator", lambda check_available: gpu),
          mock.patch("torch.accelerator.current_stream", lambda: capturing), tape):
        yield
    with torch.no_grad():
        tape.restore()


@pytest.fixture
def graphs(monkeypatch):
    """The tapes that are made in place of CUDA graphs."""
    made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(Tape()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", capture)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return made


SHORT = ["-B", 2, "-T", 32, "--steps", 8, "--max-lr", 2e-3, "--warmup-steps", 2]


def test_cuda_graphs_replayed_steps_are_those_of_bf16_residual(graphs, tmp_path, byte_tokens):
    """Three eager steps, then one captured step, replayed with new batches and learning rates. Without waiting."""
    module = rung("cuda_graphs")
    module.autocast_dtype, module.has_graphs = lambda device: torch.float32, lambda device: True
    log = train(module, tmp_path / "36", byte_tokens, *SHORT, "--save", tmp_path / "36.pt")
    truth = train_in_float32("bf16_residual", tmp_path / "35", byte_tokens, *SHORT, "--save", tmp_path / "35.pt")
    assert [tape.replays for tape in graphs] == [5]
    assert "# CUDA graph: of a whole step, from step 4 on\n" in log.read_text()
    assert_same_losses(log, truth)
    assert_same_weights(tmp_path / "36.pt", tmp_path / "35.pt", atol=3e-5)


def test_cuda_graphs_in_float16_the_scaler_is_captured_too(graphs, tmp_path, byte_tokens, huge_scale):
    """A step whose gradients overflow changes no weight, and halves the scale."""
    module = rung("cuda_graphs")
    module.autocast_dtype, module.has_graphs = lambda device: torch.float16, lambda device: True
    train(module, tmp_path, byte_tokens, "-B", 1, "-T", 8, "--steps", 5, "--save", tmp_path / "model.pt")
    assert [tape.replays for tape in graphs] == [2] and huge_scale[0].get_scale() == 2.0**55
    assert_untrained(module, tmp_path / "model.pt")


# ---- heads of 128, no biases -------------------------------------------------------------------------------------

@torch.no_grad()
def test_heads_of_128_the_shapes():
    """Every named model whose width allows it; the same parameters, and the function of six heads in the script before.

    transformers' GPT-2 with six heads computes the same logits.
    """
    module, before = rung("heads_of_128"), rung("cuda_graphs")
    for name in module.MODELS:
        ours, theirs = (one.model_config(one.parse_args(["--model", name]), 257) for one in (module, before))
        assert (ours.n_layer, ours.n_embd) == (theirs.n_layer, theirs.n_embd)
        assert ours.n_embd % ours.n_head == 0
        assert ours.n_embd // ours.n_head == 128 or ours.n_head == theirs.n_head and ours.n_embd % 128
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(vocab_size=257, n_layer=1)).eval()
    assert model.config.n_head == 6
    other = GPT2LMHeadModel(GPT2Config(vocab_size=model.lm_head.out_features, n_layer=1, n_head=6)).eval()
    weights = {name: p.T if name.endswith(MATRICES) else p for name, p in model.state_dict().items()}
    other.load_state_dict(weights)
    ids = torch.randint(257, (1, 40))
    torch.testing.assert_close(model(ids), other(ids).logits[..., :257], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_no_biases_is_the_function_with_biases_of_zero():
    model, before, ids = tiny("no_biases"), tiny("heads_of_128"), torch.randint(257, (2, 16))
    for norm in (part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)):
        torch.nn.init.normal_(norm.weight, 1.0, 0.1)
    missing, unexpected = before.load_state_dict(model.state_dict(), strict=False)
    assert unexpected == [] and len(missing) == 2 * 6 + 1 and {name.rpartition(".")[2] for name in missing} == {"bias"}
    torch.testing.assert_close(model(ids), before(ids))
    for name in missing:
        torch.nn.init.ones_(before.get_parameter(name))
    assert not torch.allclose(model(ids), before(ids), atol=0.1)
