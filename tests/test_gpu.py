"""Rungs 35 to 38, one GPU's last milliseconds, without one: on a CPU, by Triton's interpreter, and as machine code.

That their compiled graphs are whole and what waits in them: test_fake_cuda.py.
"""
import collections
import contextlib
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, known_flags, losses, new_gpt, read_steps, run_command, rung, tiny, train, train_in_float32
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ladder.count.flops import flops_per_token

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton: pip install triton")


# ---- 35: the stream ----------------------------------------------------------------------------------------------

def stream(dtype, label="35"):
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


def test_35_the_stream_and_its_gradient_are_bfloat16():
    assert stream(torch.bfloat16) == {torch.bfloat16}
    assert stream(torch.bfloat16, label="10") == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_35_without_bfloat16_it_stays_float32(dtype):
    """float16 ends at 65,504."""
    assert stream(dtype) == {torch.float32}


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


def test_36_replayed_steps_are_those_of_rung_35(graphs, tmp_path, byte_tokens):
    """Three eager steps, then one captured step, replayed with new batches and learning rates. Without waiting."""
    module = rung("36")
    module.autocast_dtype, module.has_graphs = lambda device: torch.float32, lambda device: True
    log = train(module, tmp_path / "36", byte_tokens, *SHORT, "--save", tmp_path / "36.pt")
    truth = train_in_float32("35", tmp_path / "35", byte_tokens, *SHORT, "--save", tmp_path / "35.pt")
    assert [tape.replays for tape in graphs] == [5]
    assert "# CUDA graph: of a whole step, from step 4 on\n" in log.read_text()
    for key, tolerance in (("loss", 1e-4), ("norm", 1e-3), ("lr", 0)):
        ours, theirs = ([step[key] for step in read_steps(path)] for path in (log, truth))
        assert ours == pytest.approx(theirs, abs=tolerance)
    ours, theirs = (torch.load(tmp_path / f"{label}.pt", weights_only=True)["model"] for label in ("36", "35"))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=3e-5)


def test_36_in_float16_the_scaler_is_captured_too(graphs, tmp_path, byte_tokens):
    """A step whose gradients overflow changes no weight, and halves the scale."""
    module, scaler_class = rung("36"), torch.amp.GradScaler
    module.autocast_dtype, module.has_graphs = lambda device: torch.float16, lambda device: True
    scalers = []

    def with_huge_scale(*args, **kwargs):
        scalers.append(scaler_class(*args, init_scale=2.0**60, **kwargs))
        return scalers[-1]

    flags = ["-B", 1, "-T", 8, "--steps", 5, "--save", tmp_path / "model.pt"]
    with mock.patch("torch.amp.GradScaler", with_huge_scale):
        train(module, tmp_path, byte_tokens, *flags)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    torch.manual_seed(1337)
    start = new_gpt(module, vocab_size=257).state_dict()
    assert [tape.replays for tape in graphs] == [2] and scalers[0].get_scale() == 2.0**55
    assert all(torch.equal(trained[name], start[name]) for name in start)


def test_36_without_cuda_nothing_is_captured(graphs, tmp_path, byte_tokens):
    log = train(rung("36"), tmp_path, byte_tokens, *SHORT)
    assert graphs == [] and "# CUDA graph: none (no CUDA)\n" in log.read_text()


# ---- 37 and 38: the kernel ---------------------------------------------------------------------------------------

@needs_triton
@pytest.mark.parametrize("label", ["37", "38"])
def test_37_and_38_by_tritons_interpreter(label):
    """Which must be chosen before triton is imported: tests/interpreted.py, in a process of its own."""
    words = ["-n", "0", "-q", "-p", "no:cacheprovider", ROOT / "tests" / "interpreted.py", "-k", f"test_{label}"]
    done = run_command(sys.executable, "-m", "pytest", *words, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-3000:]


class KernelByHand:
    """What rung 38's kernel computes, in torch."""

    def __getitem__(self, grid):
        return self

    def __call__(self, logits, grads, targets, losses, vocab_size, n_columns, SCALE, **_):
        logits = logits.float()
        logits[:, vocab_size:] = -torch.inf
        losses.copy_(F.cross_entropy(logits, targets, reduction="none"))
        grads.copy_((logits.softmax(1) - F.one_hot(targets, n_columns)) * SCALE)


def test_38_the_three_products_are_float8s():
    """Against torch's own with numbers that are rounded alike: E4M3 up to the largest one, E5M2 as if that were 1."""
    module = rung("38")
    module.cross_entropy_kernel = KernelByHand()
    torch.manual_seed(0)
    x, weight, targets = 1e3 * torch.randn(48, 64), 1e-3 * torch.randn(384, 64), torch.randint(257, (48,))
    leaves = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    with mock.patch("torch._scaled_mm", wraps=torch._scaled_mm) as products:
        loss = module.OutputLayerLoss.apply(*leaves, targets, 257)
    assert products.call_count == 3
    (3 * loss).backward()
    rounded = [(t * (448 / t.abs().max())).to(torch.float8_e4m3fn).float() * (t.abs().max() / 448) for t in (x, weight)]
    logits, grads = (rounded[0] @ rounded[1].T).bfloat16(), torch.empty(48, 384, dtype=torch.float8_e5m2)
    losses_by_hand = torch.empty(48)
    KernelByHand()(logits, grads, targets, losses_by_hand, 257, 384, SCALE=57344.0)
    grads = grads.float() / 57344 * 3 / 48
    for ours, expected in ((loss, losses_by_hand.mean()), (leaves[0].grad, grads @ rounded[1]),
                           (leaves[1].grad, grads.T @ rounded[0])):
        assert (ours - expected).norm() < 0.01 * expected.norm()
    truth = [leaf.clone().requires_grad_() for leaf in (x, weight)]
    (3 * F.cross_entropy((truth[0] @ truth[1].T)[:, :257], targets)).backward()
    errors = [((one.grad - other.grad).norm() / other.grad.norm()).item()
              for one, other in zip(leaves, truth, strict=True)]
    assert all(0.01 < error < 0.1 for error in errors), errors


def test_38_the_output_layer_has_29_percent_of_the_flops():
    head = 6 * 50304 * 768
    total = flops_per_token("gpt2", 1024, causal=True) + 6 * (50304 - 50257) * 768
    assert round(100 * head / total) == 29


@pytest.mark.parametrize("label, cuda, capability, tokens, dtype, expected", [
    ("37", "13.0", (8, 0), 1000, torch.bfloat16, True), ("37", None, (9, 4), 1000, torch.bfloat16, True),
    ("37", "13.0", (7, 5), 1024, torch.float16, False), ("38", "13.0", (7, 5), 1024, torch.float16, False),
    ("38", "13.0", (9, 0), 1024, torch.bfloat16, True), ("38", "13.0", (8, 9), 1024, torch.bfloat16, True),
    ("38", "13.0", (8, 0), 1024, torch.bfloat16, False), ("38", None, (9, 4), 1024, torch.bfloat16, False),
    ("38", "13.0", (9, 0), 1000, torch.bfloat16, False),
])
def test_37_and_38_on_which_gpus(label, cuda, capability, tokens, dtype, expected, monkeypatch):
    """An AMD GPU has no torch.version.cuda. Nowhere without Triton, nor on a CPU."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    module = rung(label)
    module.triton = module.triton or "as if it were installed"
    args = module.parse_args(["-B", "1", "-T", str(tokens), "--device", "cpu"])
    assert not module.has_kernel(args, dtype)
    args.device = "cuda"
    assert module.has_kernel(args, dtype) == expected
    module.triton = None
    assert not module.has_kernel(args, dtype)


@pytest.mark.parametrize("label", ["37", "38"])
def test_37_on_a_cpu_the_loss_is_torchs_and_the_log_says_so(label, tmp_path, byte_tokens):
    ours, theirs = (train(rung(name), tmp_path / name, byte_tokens, *SHORT) for name in (label, "35"))
    assert losses(ours) == losses(theirs) and "as in rung 35 (" in ours.read_text()


@pytest.mark.parametrize("label", ["37", "38"])
def test_37_without_triton_it_still_runs(label, tmp_path, byte_tokens, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # its import fails
    module = rung(label)
    assert module.triton is None and not hasattr(module, "cross_entropy_kernel")
    assert len(losses(train(module, tmp_path, byte_tokens, *known_flags(module, B=1, T=8, steps=2)))) == 2


SIGNATURES = {  # of the kernel's tensors; the others are numbers
    "37": {"logits": "*bf16", "targets": "*i64", "losses": "*fp32"},
    "38": {"logits": "*bf16", "grads": "*fp8e5", "targets": "*i64", "losses": "*fp32"},
}


def compiled_kernel(label, capability):
    """The kernel as `train` launches it for GPT-2, compiled for a GPU; and its registers and bytes of stack."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = rung(label).cross_entropy_kernel
    numbers = {"vocab_size": "i32", "n_columns": "i32", "SCALE": "constexpr", "BLOCK": "constexpr"}
    signature = {name: (SIGNATURES[label] | numbers)[name] for name in kernel.arg_names}
    aligned = [i for i, name in enumerate(signature) if signature[name][0] == "*" or name == "n_columns"]
    constants = {name: value for name, value in {"SCALE": 57344.0, "BLOCK": 8192}.items() if name in signature}
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 16})


@needs_triton
@pytest.mark.parametrize("label, capability", [
    ("37", 80), ("37", 90), ("37", 100), ("37", 120), ("38", 89), ("38", 90), ("38", 100)])
def test_37_machine_code_has_wide_loads_and_spills_nothing(label, capability, tmp_path):
    """16 bytes at a time, but for the target's logit; two or three rows at once on each multiprocessor.

    More, 100 kB each, would not fit into an H100's L2 cache.
    """
    import triton

    compiled = compiled_kernel(label, capability)
    accesses = collections.Counter(re.findall(r"(ld|st)\.global\S*?\.((?:v\d\.)?b\d+)", compiled.asm["ptx"]))
    assert accesses["ld", "b16"] == 1 and accesses["ld", "v4.b32"] == 4 and accesses["st", "b16"] == 0
    cubin, tool = tmp_path / "kernel.cubin", Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    assert found["STACK"] == found["LOCAL"] == 0, "registers are spilled to memory"
    registers = 8 * math.ceil(found["REG"] / 8)  # of each of 16 * 32 threads
    assert 65536 // (512 * registers) in (2, 3), found
    assert compiled.metadata.shared <= 1024
