"""Run rungs' `train` on fake CUDA tensors, without a GPU, and print for each what test_fake_cuda.py asserts, as JSON.

    python tests/fake_cuda.py FOLDER none|aot_eager|ddp|sm_NN WORD...

A WORD is LABEL, in bfloat16, LABEL:float16, or LABEL:recompute, which recomputes one block.

FakeTensorMode computes shapes, types and devices, and no numbers. So a tensor on the wrong device raises, and each copy
between host and device, and each `.item()` there, is seen. A C++ library registers a device guard for CUDA that does
nothing, so that a build of torch without CUDA slices, copies and runs the autograd engine on such tensors. What needs
numbers is replaced: the gradient scaler's kernels, files, the counting of `frequency_prior`. `ddp` is
aot_eager where torch splits the graph as it does for a model in DDP: at each MB of gradients.

With sm_75 (a T4) to sm_120 (an RTX 5090) Inductor lowers the graphs to Triton, and Triton, if it is installed, compiles
each kernel to machine code for that GPU, which tells how much of its shared memory a block takes.
"""
import ast
import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

GUARD = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
namespace at {
struct FakeHooks : CUDAHooksInterface {
  FakeHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
}
namespace c10::impl {
struct FakeCuda : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return {DeviceType::CUDA, 0}; }
  Device getDevice() const override { return {DeviceType::CUDA, 0}; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, getDevice()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, FakeCuda)
}
"""


def register_guard():
    """Compile the library, once for each installed torch, and load it: before torch asks what CUDA there is."""
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    version = hashlib.sha256(f"{GUARD}{torch_folder}{sys.version}".encode()).hexdigest()[:12]
    library = Path(tempfile.gettempdir()) / f"fake_cuda_{version}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            source, built = Path(folder, "guard.cpp"), Path(folder, library.name)
            source.write_text(GUARD)
            subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", f"-I{torch_folder}/include", source, "-o", built,
                            f"-L{torch_folder}/lib", "-ltorch_cpu", "-lc10"], check=True)
            built.replace(library)
    ctypes.CDLL(f"{torch_folder}/lib/libtorch_cpu.so", mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


register_guard()
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from load_script import known_flags, rung  # noqa: E402
from token_folders import tokens_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.amp import grad_scaler  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils.weak import WeakIdKeyDictionary  # noqa: E402

from ladder.rungs.list import BY_LABEL  # noqa: E402

PINNED = WeakIdKeyDictionary()
B, T = 2, 128
N_MICRO_STEPS = 2
LOSS_KERNEL = re.compile("softmax_online|log_softmax_backward")  # reads all logits; the former's also attention's
LOAD_16_BITS = re.compile(r"ld\.global\S*\.b16")
CARDS = {  # by compute capability: multiprocessors, threads on each, bytes of shared memory that a block may take
    75: (40, 1024, 65536), 80: (108, 2048, 166912), 90: (132, 2048, 232448), 100: (148, 2048, 232448),
    120: (170, 1536, 101376),
}


class Watch(TorchDispatchMode):
    """Counts where the host waits for the device in `script`: {(step, in the timed part of train, what): times}.

    Notes in which types the loss computes its log-probabilities.
    """

    supports_higher_order_operators = True

    def __init__(self, script):
        super().__init__()
        self.script, self.step, self.waits = script, 1, Counter()
        self.losses_in = set()  # the types of the log-probabilities
        train = next(node for node in ast.parse(script.read_text()).body if getattr(node, "name", "") == "train")
        loop = next(node for node in train.body if isinstance(node, ast.For) and ast.unparse(node.target) == "step")
        last = next(node for node in loop.body if ast.unparse(node).startswith("dt = "))
        self.timed = range(loop.body[0].lineno, last.lineno + 1)

    def frames(self, file):
        """(function, line) of each frame in a file, the innermost first."""
        frame = inspect.currentframe()
        while frame:
            if frame.f_code.co_filename == str(file):
                yield frame.f_code.co_name, frame.f_lineno
            frame = frame.f_back

    def number(self, tensor):
        """Of .item(), bool(), float(): no fake tensor has one. The scaler finds nothing infinite; else 1."""
        scaling = any(self.frames(grad_scaler.__file__)) or "step" in dict(self.frames(self.script))
        return 0.0 if scaling and tensor.device.type == "cuda" else 1.0

    def wait(self, what):
        timed = any(name == "train" and line in self.timed for name, line in self.frames(self.script))
        self.waits[self.step, timed, what] += 1

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op.overloadpacket._qualified_op_name if hasattr(op, "overloadpacket") else str(op)
        if name == "aten::_local_scalar_dense":
            if "__init__" in dict(self.frames(inspect.getfile(torch.optim.Adam))):
                return True  # the learning rate is valid
            if args[0].device.type == "cuda":
                self.wait("item")
            return args[0].dtype.is_floating_point and self.number(args[0])
        if name in ("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive"):
            self.wait(name)
        if name in ("aten::_to_copy", "aten::copy_"):
            source, target = (args[0], kwargs.get("device")) if name == "aten::_to_copy" else (args[1], args[0].device)
            target = torch.device(target or source.device).type
            blocking = not (kwargs.get("non_blocking") or len(args) > 2 and args[2])
            if source.device.type != target and (blocking or target == "cuda" and source not in PINNED):
                self.wait("copy to the device" if target == "cuda" else "copy to the host")
        if op is torch.ops.aten._fused_adamw_.tensor_lr:  # which fake tensors do not have
            assert {tensor.device.type for tensor in (*args[0], *args[1], kwargs["lr"])} == {"cuda"}
            return None
        if name == "aten::_amp_update_scale_":
            return args[0]
        if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            assert {tensor.device.type for tensor in (*args[0], *args[1:3])} == {"cuda"}
            return None
        out = op(*args, **kwargs)
        if name == "aten::_log_softmax":
            self.losses_in.add(str(out.dtype))
        return out


def pin(tensor):
    pinned = torch.empty_like(tensor)
    PINNED[pinned] = True
    return pinned


def new_replicator(self, tensor):  # of the scaler; torch's own asks for a real device
    self.master, self._per_device_tensors = tensor, {}


def move(self, function, recurse=True):
    """nn.Module._apply that makes new parameters, tied ones once: fake tensors cannot be swapped in place."""
    moved = {}
    for module in self.modules():
        for name, p in module._parameters.items():
            if p is not None:
                moved[id(p)] = moved.get(id(p)) or (p, nn.Parameter(function(p).detach(), p.requires_grad))
                module._parameters[name] = moved[id(p)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else function(buffer)
    return self


def compiler(backend, mode, watch, graphs, kernels):
    """A torch.compile that traces, and runs the graphs, forward and backward, on fake tensors."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx

    real = torch.compile

    def run_on_fakes(graph_module, inputs, **options):
        graphs.append(graph_module)
        if backend.startswith("sm_"):
            kernels.extend(machine_code(graph_module, inputs, options, capability(backend)))

        def run(*args):
            with mode, watch:
                return graph_module(*args)

        return make_boxed_func(run)

    chosen = functools.partial(compile_fx, inner_compile=run_on_fakes)
    if not backend.startswith("sm_"):
        chosen = aot_autograd(fw_compiler=run_on_fakes, bw_compiler=run_on_fakes,
                              partition_fn=min_cut_rematerialization_partition)

    def compile(model, **_):
        compiled = real(model, backend=chosen)

        def call(*args, **kwargs):
            with _disable_current_modes():
                return compiled(*args, **kwargs)

        if isinstance(model, nn.Module):
            call.parameters = model.parameters
        return model if model is torch.sin else call  # the scripts' probe of the compiler

    return compile


# ---- down to machine code --------------------------------------------------------------------------------------------


def capability(backend):
    return int(backend.removeprefix("sm_")) if backend.startswith("sm_") else 90


def properties(cc):
    multiprocessors, threads, shared = CARDS[cc]
    return SimpleNamespace(
        name="a fake", major=cc // 10, minor=cc % 10, multi_processor_count=multiprocessors, total_memory=10**11,
        warp_size=32, regs_per_multiprocessor=65536, max_threads_per_multi_processor=threads,
        max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=shared,
        L2_cache_size=40 * 2**20, gcnArchName="", is_integrated=0)


class Lowered(BaseException):
    """Ends a compilation when its code is generated, before it is run."""


def machine_code(graph_module, inputs, options, cc):
    """Yield (name, what went wrong, "" if nothing did, PTX) of each Triton kernel of a graph.

    And of each tensor that the graph allocates ("its shape", "", "").
    """
    import triton
    from torch._inductor.compile_fx import compile_fx_inner
    from triton.backends.compiler import GPUTarget

    generated = []

    def stop(graph):
        generated.append(graph.codegen()[0].value)
        raise Lowered

    with mock.patch("torch._inductor.graph.GraphLowering._compile_to_module", stop), contextlib.suppress(Lowered):
        compile_fx_inner(graph_module, inputs, **options)
    for shape in re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", generated[0]):
        yield shape, "", ""
    for name, tuner in triton_kernels(generated[0]):
        for config in tuner.configs:
            meta = tuner._create_compile_meta(config)
            source = triton.compiler.ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
            try:
                compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32),
                                          options=tuner._create_compile_options(config, meta))
            except Exception as error:  # any: of Triton, LLVM or ptxas
                yield name, f"{type(error).__name__}: {error}"[:300], ""
            else:
                taken, there, why = compiled.metadata.shared, CARDS[cc][2], ""
                if taken > there:
                    why = f"asks for {taken} bytes of shared memory, of {there}"
                elif name.startswith("triton_tem_") and "mma" not in compiled.asm["ptx"]:
                    why = "multiplies matrices without tensor cores"
                yield name, why, compiled.asm["ptx"]


def triton_kernels(code):
    """(name, CachingAutotuner) of the kernels in generated code."""
    found = []

    class Compiler:  # in place of AsyncCompile
        def triton(self, name, source, **_):
            path = Path(tempfile.mkdtemp(dir=folder)) / "kernel.py"
            path.write_text(source)  # Triton reads a kernel's source from its file
            spec = importlib.util.spec_from_file_location(path.parent.name, path)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found.append((name, getattr(module, name)))

    with tempfile.TemporaryDirectory() as folder, mock.patch("torch._inductor.async_compile.AsyncCompile", Compiler):
        exec(code.partition("async_compile.wait(")[0], {})
        yield from found


def attention_of(cc):
    """scaled_dot_product_attention with the kernel that CUDA chooses on a card in 16 bits."""
    aten, explicit = torch.ops.aten, torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                  enable_gqa=False):
        bias, how = None, (True, dropout_p, is_causal)  # True: with what the backward pass needs
        if attn_mask is not None:
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
            bias = bias.expand(*q.shape[:3], k.shape[2])
        if cc in (90, 100, 103):  # where torch prefers cuDNN's
            return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, *how, scale=scale)[0]
        if cc >= 80 and bias is None:
            return aten._scaled_dot_product_flash_attention(q, k, v, *how[1:], scale=scale)[0]
        if enable_gqa:  # which the memory-efficient kernel refuses
            return explicit(q, k, v, attn_mask, *how[1:], scale=scale, enable_gqa=True)
        return aten._scaled_dot_product_efficient_attention(q, k, v, bias, *how, scale=scale)[0]

    return attention


def as_card(cc):
    """What Inductor and Triton ask of a GPU of a compute capability: {name: answer}."""
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Driver(CudaDriver):
        def __init__(self):
            pass

        def get_current_target(self):
            return GPUTarget("cuda", cc, 32)

        def get_active_torch_device(self):
            return torch.device("cuda", 0)

    import triton
    triton.runtime.driver.set_active(Driver())
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    DeviceProperties.create.cache_clear()
    interface = "torch._dynamo.device_interface.CudaInterface."
    return {
        # A build for CPUs would compute explicit attention here.
        "torch.nn.functional.scaled_dot_product_attention": attention_of(cc),
        "torch.cuda.get_device_properties": lambda *_: properties(cc),
        f"{interface}get_device_properties": lambda *_: properties(cc),
        f"{interface}Worker.get_device_properties": lambda *_: properties(cc),
        f"{interface}get_compute_capability": lambda *_: cc,
        f"{interface}is_available": lambda: True, f"{interface}is_triton_capable": lambda *_: True,
        f"{interface}raise_if_triton_unavailable": nothing,
        f"{interface}current_device": lambda: 0, f"{interface}device_count": lambda: 1,
        "torch._inductor.runtime.triton_helpers.set_driver_to_gpu": nothing,
        "torch._inductor.config.compile_threads": 1, "torch._inductor.config.fx_graph_cache": False,
        "torch._inductor.config.joint_graph_constant_folding": False,  # it computes constants on the GPU
        "torch._inductor.config.shape_padding": False,  # it measures products on the GPU
    }


# ---- a rung's train --------------------------------------------------------------------------------------------------


def nothing(*_, **__):
    pass


class FakeStream:
    wait_stream = nothing


class FakeGraph:
    replay = nothing


def fake_cuda(float16, cc):
    """What the scripts and torch ask of a GPU: {name: answer}."""
    return {
        "torch.cuda.is_available": lambda: True, "torch.cuda.synchronize": nothing,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.is_bf16_supported": lambda *_, **__: not float16, "torch.cuda.is_initialized": lambda: True,
        "torch.cuda._lazy_init": nothing, "torch.cuda.mem_get_info": lambda *_: (10**10, 10**11),
        "torch.cuda.max_memory_allocated": lambda *_: 1, "torch.cuda.manual_seed_all": nothing,
        "torch.cuda.manual_seed": nothing, "torch.cuda._is_in_bad_fork": lambda: False,
        "torch.cuda.get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "torch.cuda.set_rng_state": nothing,
        "torch.cuda.get_device_properties": lambda *_: properties(75 if float16 else cc),
        "torch.cuda.is_current_stream_capturing": lambda: False, "torch.cuda._exchange_device": lambda *_: 0,
        "torch.cuda._maybe_exchange_device": lambda *_: 0, "torch.cuda.default_generators": (torch.Generator(),),
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.amp.grad_scaler._MultiDeviceReplicator.__init__": new_replicator,
        "torch.optim.adam._default_to_fused_or_foreach": lambda *_, **__: (False, True),  # as for real CUDA tensors
        "torch.nn.utils.clip_grad._has_foreach_support": lambda tensors, device: True,
        "torch._functorch.config.graphsafe_rng_functionalization": False,  # it clones the GPU's generator
        "torch._functorch.config.enable_autograd_cache": False,
        "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init": True,
        "torch.nn.Module._apply": move, "torch.Tensor.pin_memory": pin,
        "torch.cuda.Stream": FakeStream, "torch.cuda.CUDAGraph": FakeGraph,
        "torch.cuda.graph": lambda graph, stream: contextlib.nullcontext(),
    }


def zeros_on_the_host(tokens, n_rows):
    assert not getattr(tokens, "is_cuda", False)  # NumPy counts them
    return torch.zeros(n_rows, dtype=torch.float64)


def run(label, how, folder, backend):
    """Train two steps of a rung, perhaps with a block recomputed or in float16; what happened in the second."""
    script, watch, graphs, kernels = rung(label), Watch(BY_LABEL[label].path), [], []
    recompute, float16 = how == "recompute", how == "float16"
    script.DEVICES = ["cuda", "cpu"]
    words = known_flags(  # two steps of two micro-steps, with a validation after the second
        script, B=B, T=T, steps=2, model="1x2x64", device="cuda", data=folder / "data", log_dir=folder / "logs",
        compile_mode="none" if backend == "none" else "default", total_batch=N_MICRO_STEPS * B * T, val_every=2,
        val_sequences=2, checkpoint_every=1, float8_from=0,
        checkpoint_dir=folder / f"{label}_{how}", loss_chunk=T, recompute_blocks=int(recompute))
    log_step = script.Log.step

    def count_step(self, *args, **more):
        log_step(self, *args, **more)
        watch.step += 1

    script.Log.step, script.save_model = count_step, nothing
    if hasattr(script, "Checkpoints"):
        script.Checkpoints.save = nothing
    if hasattr(script, "GraphedStep"):
        script.GraphedStep.WARM_UP = 1  # the second step is captured: in it nothing may wait
        script.GraphedStep.run_on_stream = lambda self: self.step()
    if hasattr(script, "count_log_frequencies"):
        script.count_log_frequencies = zeros_on_the_host
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as stack:
        answers = fake_cuda(float16, capability(backend))
        if backend != "none":
            answers["torch.compile"] = compiler(backend, mode, watch, graphs, kernels)
        if backend.startswith("sm_"):
            answers |= as_card(capability(backend))
        if backend == "ddp":
            ddp = "torch.nn.parallel.DistributedDataParallel"
            active = SimpleNamespace(bucket_bytes_cap=2**20)
            answers[f"{ddp}._get_active_ddp_module"] = lambda: active
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        settings = script.parse_args(words)
        stack.enter_context(mode)
        stack.enter_context(watch)
        script.train(settings)
    operations = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    return {
        "label": label, "float16": float16, "steps": watch.step - 1, "graphs": len(graphs),
        "waits": {what: n for (step, timed, what), n in watch.waits.items() if step == 2 and timed},
        "breaks": dict(torch._dynamo.utils.counters["graph_break"]),
        "rng": [name for name in operations if "rng_state" in name],
        "kernels": sum(bool(ptx) for _, _, ptx in kernels), "failed": [(name, why) for name, why, _ in kernels if why],
        "of_logits": [name for name, _, ptx in kernels if ptx and LOSS_KERNEL.search(name)],
        "narrow": [name for name, _, ptx in kernels if LOSS_KERNEL.search(name) and LOAD_16_BITS.search(ptx)],
        "logits": sum(math.prod(map(int, re.findall(r"\d+", shape))) >= B * T * 50257 for shape, _, ptx in kernels
                      if shape[0].isdigit()),
        "losses_in": sorted(watch.losses_in),
        "fused": sorted({name for name in operations if "_attention.default" in name}),
    }


if __name__ == "__main__":
    folder, backend, *words = sys.argv[1:]
    ids = np.random.default_rng(0).integers(0, 50257, 20_000)
    ids[::37] = 50256  # short documents
    tokens_of(Path(folder) / "data", ids, ids[:4_000], documents=500)
    for word in words:
        label, _, how = word.partition(":")
        print(json.dumps(run(label, how, Path(folder), backend)), flush=True)
