"""The kernels of one training step of a rung: FLOPs, bytes and launches of each, counted without a GPU.

The rung's own `train` runs on fake tensors, which have shapes but no memory:

- Eager: each aten operation that is not a view is one kernel. It reads each of its inputs and writes each of its
  outputs once. FLOPs are those of torch.utils.flop_counter; a causal flash kernel does half of them.
- Compiled: Inductor lowers the graphs for CUDA (an A100's properties) and fuses them; code generation is replaced by
  counting. Each fused group is one kernel, which reads and writes what crosses the group's border.
- The fake tensors are on a CPU, so what CUDA does differently is patched in: its autocast keeps softmax, LayerNorm and
  the loss in float32; AdamW and clipping work on many tensors per launch ("foreach").
"""
import contextlib
import copy
import functools
import math
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import torch
from torch._inductor import ir, scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, make_boxed_func
from torch._inductor.dependencies import WeakDep
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_dtype_size
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ladder.count.flops import VOCAB_SIZE
from ladder.scripts.stages import BY_LABEL, load_script

LOWERED = {}  # the kernels of each graph: rungs 7 to 10 have the same
NO_KERNEL = ("_unsafe_view", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty")  # views, allocation
WRITE_ONLY = ("fill_", "zero_", "copy_", "ones_like", "zeros_like", "full_like", "nll_loss_backward")
CHUNK, BLOCKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)  # of a foreach launch: ATen/native/cuda/MultiTensorApply.cuh


@dataclass(frozen=True)
class Kernel:
    """One operation on the GPU; `launches` is more than 1 where its tensors do not fit into one launch."""

    number_format: str  # of a matrix product; "" if it is none
    flops: int
    bytes: int
    launches: int = 1


# ---- one kernel ------------------------------------------------------------------------------------------------------


def tensors_in(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size(tensor):
    """Bytes of a tensor; what expand() repeats is in memory once."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(n for n, stride in extents if stride)


def count_bytes(op, args, out):
    """Bytes that an aten operation reads and writes at least."""
    name, arguments = op.overloadpacket.__name__, op._schema.arguments
    outputs = sum(map(size, tensors_in(out)))
    inputs = sum(map(size, {id(t): t for t in tensors_in(args)}.values()))
    written = [value for argument, value in zip(arguments, args, strict=False)
               if argument.alias_info and argument.alias_info.is_write]
    if name == "_fused_adamw_":
        return inputs + sum(map(size, tensors_in(args[0:1] + args[2:4])))  # gradients are not written
    if name == "embedding":
        return size(args[1]) + 2 * outputs  # only the rows that are looked up
    if name == "nll_loss_forward":
        return 2 * size(args[1])  # one logit of each row, and its index
    if name in WRITE_ONLY:
        return outputs + (size(args[1]) if name == "copy_" else 0)
    if written:
        return inputs + sum(map(size, tensors_in(written)))
    return inputs + outputs


def count_flops(op, args, out):
    name = op.overloadpacket.__name__
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        backward = name.endswith("backward")
        count = flop_counter.sdpa_backward_flop_count if backward else flop_counter.sdpa_flop_count
        causal = args[7] if backward else args[4] if len(args) > 4 else False
        return count(*[t.shape for t in args[: 4 if backward else 3]]) // (2 if causal else 1)
    formula = flop_counter.flop_registry.get(op.overloadpacket)
    return formula(*args, out_val=out) if formula else 0


def count_launches(op, args):
    """The least number of launches of an operation on lists of tensors; 1 for any other."""
    if not op.overloadpacket.__name__.startswith(("_foreach_", "_fused_")):
        return 1
    lists = [arg for arg in args[:5] if isinstance(arg, (list, tuple)) and tensors_in(arg)]
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in lists[0])
    return max(math.ceil(chunks / BLOCKS), math.ceil(len(lists[0]) / TENSORS[len(lists) - 1]))


def format_of(tensor):
    if tensor.dtype == torch.float32:
        return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "16 bits"


def kernel_of(op, args, out):
    flops = count_flops(op, args, out)
    number_format = format_of(tensors_in(args)[0]) if flops else ""
    return Kernel(number_format, flops, count_bytes(op, args, out), count_launches(op, args))


def is_kernel(op):
    views = any(result.alias_info and not result.alias_info.is_write for result in op._schema.returns)
    return op.namespace == "aten" and not views and op.overloadpacket.__name__ not in NO_KERNEL


# ---- eager: every operation is seen ----------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Records the kernels of what runs while it is `on`."""

    def __init__(self):
        super().__init__()
        self.on, self.kernels = False, []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if self.on and is_kernel(op):
            self.kernels.append(kernel_of(op, args, out))
        return out

    @contextlib.contextmanager
    def paused(self):
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


# ---- compiled: Inductor's schedule -----------------------------------------------------------------------------------


class Scheduled(BaseException):
    """Ends a compilation when its kernels are known, before code is generated."""


def fused_bytes(group, graph):
    """Bytes that a generated kernel reads and writes: each buffer once, and those that stay inside not at all."""
    nodes = set(group.get_nodes())
    made = {buffer.get_name(): buffer for node in nodes for buffer in node.get_outputs()}
    inside = {name for name, buffer in made.items()
              if {user.node for user in buffer.users if not user.is_weak} <= nodes}
    most = Counter()  # {(buffer, written): elements}
    for node in nodes:
        ranges = math.prod(int(n) for part in node.get_ranges() for n in part)
        seen = Counter()
        for written, deps in ((False, node.read_writes.reads), (True, node.read_writes.writes)):
            for dep in deps:
                if dep.name not in inside and not isinstance(dep, WeakDep) and (written or dep.name not in made):
                    seen[dep.name, written] += min(ranges, dep.numel_hint())
        most |= seen
    return sum(get_dtype_size(graph.get_dtype(name)) * min(elements, int(graph.get_numel(name)))
               for (name, _), elements in most.items())


def scheduled_kernels(graph):
    """The kernels that Inductor would generate or call for a lowered graph."""
    for node in graph.scheduler.nodes:
        call = getattr(node, "node", None)
        if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(call, ir.MultiOutput):
            continue
        if not isinstance(node, scheduler.ExternKernelSchedulerNode):
            yield Kernel("", 0, fused_bytes(node, graph))
            continue
        origin = call.get_origin_node() or next(node for node in call.origins if node.target is call.op_overload)
        args, out = torch.fx.node.map_arg((origin.args, origin), lambda value: value.meta["val"])
        yield kernel_of(origin.target, args, out)


def on_cuda(tree, fake_mode):
    """Fake tensors as they would be on a GPU."""
    def move(value):
        if not isinstance(value, torch.Tensor):
            return value
        with fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")

    return torch.utils._pytree.tree_map(move, tree)


def lower(graph_module, inputs, options):
    """The kernels of a forward or backward graph, lowered for CUDA. Changes the graph."""
    found = []

    def stop(graph):
        graph.init_wrapper_code()
        graph._update_scheduler()
        found.extend(scheduled_kernels(graph))
        raise Scheduled

    fake_mode = next(value.fake_mode for value in tensors_in(inputs))
    for node in graph_module.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", torch.device("cuda:0"))
        if "val" in node.meta:
            node.meta["val"] = on_cuda(node.meta["val"], fake_mode)
    with mock.patch("torch._inductor.graph.GraphLowering.codegen", stop), contextlib.suppress(Scheduled):
        compile_fx_inner(graph_module, on_cuda(inputs, fake_mode), **options)
    return found


def compiler(recorder):
    """A stand-in for torch.compile: what it returns computes on fake tensors and records Inductor's kernels."""
    compile_by_dynamo = torch.compile

    def inner(graph_module, inputs, **options):
        graph = graph_module.code, str([(t.shape, t.stride(), t.dtype) for t in tensors_in(inputs)])
        with recorder.paused():
            forward = copy.deepcopy(graph_module).forward
            kernels = LOWERED[graph] = LOWERED.get(graph) or lower(graph_module, inputs, options)

        def run(*args):
            recorder.kernels += kernels if recorder.on else []
            with recorder.paused():
                return forward(*args)

        return make_boxed_func(run)

    def compile_counted(model, **options):
        compiled = compile_by_dynamo(model, backend=functools.partial(compile_fx, inner_compile=inner))

        def call(*args):
            with _disable_current_modes():  # Dynamo does not trace under a mode
                return compiled(*args)

        return call if isinstance(model, torch.nn.Module) else model  # not the trial compilation of compile_model

    return compile_counted


# ---- the rung's own train --------------------------------------------------------------------------------------------


def in_float32(function):
    """`function` as CUDA's autocast runs it: with its input cast to float32."""
    def call(x, *args, **kwargs):
        return function(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **kwargs)

    return call


def patches(recorder):
    """(name, value) of the patches that make a CPU's step a GPU's, on fake tensors."""
    a100 = DeviceProperties(type="cuda", index=0, multi_processor_count=108, cc=80, major=8, warp_size=32,
                            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048)
    return [
        ("torch.Tensor.item", lambda tensor: 1.0),
        ("torch.cpu._is_avx512_bf16_supported", lambda: True),
        *[(f"torch.nn.functional.{name}", in_float32(getattr(torch.nn.functional, name)))
          for name in ("softmax", "layer_norm", "cross_entropy")],
        ("torch.optim.adam._default_to_fused_or_foreach", lambda *args, **kwargs: (False, True)),
        ("torch.nn.utils.clip_grad._has_foreach_support", lambda tensors, device: True),
        ("torch.compile", compiler(recorder)),
        ("torch._inductor.config.fx_graph_cache", False),
        ("torch._functorch.config.enable_autograd_cache", False),
        ("torch._inductor.runtime.hints.DeviceProperties.create", lambda device: a100),
        ("torch._inductor.scheduler.has_triton", lambda *args: True),
        ("torch._inductor.compile_fx._check_triton_bf16_support", lambda graph: None),
        # Two methods that ask for the GPU itself, where the operations that they stand for do not.
        ("torch.Tensor.__invert__", lambda tensor: torch.bitwise_not(tensor)),
        ("torch.Tensor.copy_", lambda tensor, other: torch.ops.aten.copy_(tensor, other)),
    ]


def stand_ins(recorder):
    """A loader without data, and a log that turns the recorder on after the first step, off after the second."""
    class Loader:
        meta, tokens, n_batches = {"vocab_size": VOCAB_SIZE}, (), 1

        def __init__(self, folder, B, T):
            self.shape = B, T

        def batch(self, i):
            return torch.zeros(self.shape, dtype=torch.int64), torch.zeros(self.shape, dtype=torch.int64)

    class Log:
        def __init__(self, *args, **notes):
            pass

        def step(self, step, *values, **more):
            recorder.on = step == 1

        def line(self, text):
            pass

        def finish(self, step):
            pass

    return Loader, Log


def count(label, model, B, T, **more):
    """The kernels of a training step of the rung `label`, as a list of Kernel; `more` settings of the script."""
    script, recorder = load_script(BY_LABEL[label]), Recorder()
    script.DataLoaderLite, script.Log = stand_ins(recorder)
    script.GPT.to = lambda self, device: self
    flags = {"--model": model, "-B": B, "-T": T, "--steps": 2, "--device": "cpu"}
    settings = script.parse_settings([str(word) for flag in flags.items() for word in flag])
    vars(settings).update(more)
    precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        for name, value in patches(recorder):
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        script.train(settings)
    torch.set_float32_matmul_precision(precision)
    torch.compiler.reset()
    return recorder.kernels
