"""What is the least that a training step costs on a GPU? The floors of `python -m ladder floor`, counted.

    python -m ladder floor --gpu "RTX 3080" -B 4 --rungs 10         # counts another batch than the stored one
    python -m ladder.count.kernels --rungs 0,1                 # stores counts in ladder/count/floors.json

No GPU is needed: the rung's own `train` runs on fake tensors, which have shapes but no memory, and the FLOPs, bytes and
launches of every kernel are counted.

- Eager: each aten operation that is not a view is one kernel. It reads each of its inputs and writes each of its
  outputs once. FLOPs are those of torch.utils.flop_counter; a causal flash kernel does half of them.
- Compiled: Inductor lowers the graphs for CUDA (an A100's properties) and fuses them; code generation is replaced by
  counting. Each fused group is one kernel, which reads and writes what crosses the group's border.
- The fake tensors are on a CPU, so what CUDA does differently is patched in: its autocast computes softmax and
  LayerNorm in float32; AdamW and clipping work on many tensors per launch ("foreach").
"""
import argparse
import contextlib
import functools
import io
import json
import math
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from torch._inductor import ir, scheduler
from torch._inductor.compile_fx import compile_fx, compile_fx_inner, make_boxed_func
from torch._inductor.dependencies import WeakDep
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.utils import get_dtype_size
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ladder.count.floors import COUNTED, STORE, STORED, Kernel, counted_rungs, read_store
from ladder.count.flops import VOCAB_SIZE
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, RUNGS, load_script, parse_rungs

NO_KERNEL = ("_unsafe_view", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty")  # views, allocation
OVERWRITES = ("fill_", "zero_", "copy_", "ones_like", "zeros_like", "full_like")  # does not read its first argument
BYTES = {  # of operations that do not simply read their inputs and write their outputs
    "embedding": lambda args, out: size(args[1]) + 2 * size(out),  # only the rows that are looked up
    "nll_loss_forward": lambda args, out: 2 * size(args[1]),  # one logit of each row, and its index
    "nll_loss_backward": lambda args, out: size(out),
    "_fused_adamw_": lambda args, out: size(args) + size(args[0:1] + args[2:4]),  # gradients are not written
}
META = {"source": "zeros", "sha256": "", "tokenizer": "gpt2", "tokenizer_json": None, "vocab_size": VOCAB_SIZE,
        "end_of_text": VOCAB_SIZE - 1, "documents": 1}  # of the tokens that a step is counted on
CHUNK, BLOCKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)  # of a foreach launch: ATen/native/cuda/MultiTensorApply.cuh


# ---- eager: each operation is a kernel -------------------------------------------------------------------------------


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def size(tree):
    """Bytes of the tensors in a tree, each counted once; what expand() repeats is in memory once."""
    tensors = {id(tensor): tensor for tensor in tensors_in(tree)}.values()
    return sum(t.element_size() * math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride)
               for t in tensors)


def count_bytes(op, args, out):
    """Bytes that an aten operation reads and writes at least."""
    name = op.overloadpacket.__name__
    if name in BYTES:
        return BYTES[name](args, out)
    written = [value for argument, value in zip(op._schema.arguments, args, strict=False) if argument.is_write]
    return size(args[1:] if name in OVERWRITES else args) + size(written or out)


def count_flops(op, args, out):
    name = op.overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":  # causal in all rungs
        return flop_counter.sdpa_flop_count(*[t.shape for t in args[:3]]) // 2
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return flop_counter.sdpa_backward_flop_count(*[t.shape for t in args[:4]]) // 2
    formula = flop_counter.flop_registry.get(op.overloadpacket)
    return formula(*args, out_val=out) if formula else 0


def count_launches(op, args):
    """The least number of launches of an operation on lists of tensors; 1 for any other."""
    if not op.overloadpacket.__name__.startswith(("_foreach_", "_fused_")):
        return 1
    lists = [arg for arg in args[:5] if isinstance(arg, (list, tuple)) and tensors_in(arg)]
    chunks = sum(math.ceil(tensor.numel() / CHUNK) for tensor in lists[0])
    return max(math.ceil(chunks / BLOCKS), math.ceil(len(lists[0]) / TENSORS[len(lists) - 1]))


def kernel_of(op, args, out):
    flops, number_format = count_flops(op, args, out), ""
    if flops and tensors_in(args)[0].dtype == torch.float32:
        number_format = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    elif flops:
        number_format = "16 bits"
    return Kernel(number_format, flops, count_bytes(op, args, out), count_launches(op, args))


def is_kernel(op):
    views = any(result.alias_info and not result.alias_info.is_write for result in op._schema.returns)
    return op.namespace == "aten" and not views and op.overloadpacket.__name__ not in NO_KERNEL


class Recorder(TorchDispatchMode):
    """Records the kernels of what runs while it is `on`."""

    def __init__(self):
        super().__init__()
        self.on, self.kernels = False, Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if self.on and is_kernel(op):
            self.kernels[kernel_of(op, args, out)] += 1
        return out


# ---- compiled: Inductor's schedule -----------------------------------------------------------------------------------


class Scheduled(BaseException):
    """Ends a compilation when its kernels are known, before code is generated."""


def accesses(node, made, inside):
    """{(buffer, whether it is written): elements} of a part of a kernel; not of what the kernel makes for itself."""
    ranges = math.prod(int(n) for part in node.get_ranges() for n in part)
    found = Counter()
    for written, deps in ((False, node.read_writes.reads), (True, node.read_writes.writes)):
        for dep in deps:
            own = dep.name in inside or (dep.name in made and not written)
            if not own and not isinstance(dep, WeakDep):
                found[dep.name, written] += min(ranges, dep.numel_hint())
    return found


def fused_bytes(group, graph):
    """Bytes that a generated kernel reads and writes: each buffer once, and those that stay inside not at all."""
    nodes = set(group.get_nodes())
    made = {buffer.get_name(): buffer for node in nodes for buffer in node.get_outputs()}
    inside = {name for name, buffer in made.items()
              if {user.node for user in buffer.users if not user.is_weak} <= nodes}
    most = Counter()
    for node in nodes:
        most |= accesses(node, made, inside)
    return sum(get_dtype_size(graph.get_dtype(name)) * min(elements, int(graph.get_numel(name)))
               for (name, _), elements in most.items())


def is_overload(node, op):
    """Whether a node of the graph is this operation, or another overload of it: Inductor calls sort.stable for sort."""
    return getattr(node.target, "overloadpacket", None) is op.overloadpacket


def scheduled_kernels(graph):
    """The kernels that Inductor would generate or call for a lowered graph."""
    for node in graph.scheduler.nodes:
        call = getattr(node, "node", None)
        if isinstance(node, scheduler.NopKernelSchedulerNode) or isinstance(call, ir.MultiOutput):
            continue
        if not isinstance(node, scheduler.ExternKernelSchedulerNode):
            yield Kernel("", 0, fused_bytes(node, graph))
            continue
        origin = call.get_origin_node() or next(node for node in call.origins if is_overload(node, call.op_overload))
        args, out = torch.fx.node.map_arg((origin.args, origin), lambda value: value.meta["val"])
        yield kernel_of(origin.target, args, out)


def on_cuda(value, fake_mode):
    """A fake tensor, or a device, as it would be on a GPU; anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cuda:0")
    if not isinstance(value, torch.Tensor):
        return value
    with fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


def lower(graph_module, inputs, options):
    """The kernels of a forward or backward graph, lowered for CUDA. Changes the graph."""
    found = Counter()

    def stop(graph):
        graph.init_wrapper_code()
        graph._update_scheduler()
        found.update(scheduled_kernels(graph))
        raise Scheduled

    move = functools.partial(on_cuda, fake_mode=tensors_in(inputs)[0].fake_mode)
    for node in graph_module.graph.nodes:
        node.args, node.kwargs = tree_map(move, (node.args, node.kwargs))
        node.meta.update(tree_map(move, {"val": node.meta.get("val")}))
    with mock.patch("torch._inductor.graph.GraphLowering.codegen", stop), contextlib.suppress(Scheduled):
        compile_fx_inner(graph_module, tree_map(move, inputs), **options)
    return found


def compiler(recorder):
    """For torch.compile; what it compiles computes on fake tensors and records Inductor's kernels."""
    compile_function = torch.compile

    def lower_and_run(graph_module, inputs, **options):
        outputs = [node and node.meta["val"] for node in graph_module.graph.output_node().args[0]]
        with _disable_current_modes():
            kernels = lower(graph_module, inputs, options)

        def run(*args):
            if recorder.on:
                recorder.kernels.update(kernels)
            return [out if out is None else torch.empty_like(out) for out in outputs]

        return make_boxed_func(run)

    def compile_model(model, mode):
        compiled = compile_function(model.forward, backend=functools.partial(compile_fx, inner_compile=lower_and_run))

        def forward(*args):
            with _disable_current_modes():  # Dynamo does not trace under a mode
                return compiled(*args)

        model.forward = forward
        return model

    return compile_model


# ---- the rung's own train --------------------------------------------------------------------------------------------


def as_on_a_gpu():
    """{name: what replaces it} where a CPU's step, or torch for CPUs, differs from a GPU's."""
    def in_float32(function):
        """`function` as CUDA's autocast runs it: with its input cast to float32."""
        return lambda x, *args, **more: function(x.float() if torch.is_autocast_enabled("cpu") else x, *args, **more)

    getitem = torch.Tensor.__getitem__
    a100 = DeviceProperties(type="cuda", index=0, multi_processor_count=108, cc=80, major=8, warp_size=32,
                            regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048)
    return {
        "torch.Tensor.item": lambda tensor: 1.0,
        "torch.nn.Module._apply": lambda module, function, recurse=True: module,  # to(device): it is there
        "torch.cpu._is_avx512_bf16_supported": lambda: True,
        **{f"torch.nn.functional.{name}": in_float32(getattr(torch.nn.functional, name))
           for name in ("softmax", "layer_norm")},
        "torch.optim.adam._default_to_fused_or_foreach": lambda *args, **kwargs: (False, True),
        "torch.nn.utils.clip_grad._has_foreach_support": lambda tensors, device: True,
        "torch._inductor.config.fx_graph_cache": False,
        "torch._functorch.config.enable_autograd_cache": False,
        "torch._inductor.runtime.hints.DeviceProperties.create": lambda device: a100,
        "torch._inductor.scheduler.has_triton": lambda *args: True,
        "torch._inductor.compile_fx._check_triton_bf16_support": lambda graph: None,
        # Three methods that ask for the GPU itself, where the operations that they stand for do not.
        "torch.Tensor.__invert__": lambda tensor: torch.bitwise_not(tensor),
        "torch.Tensor.copy_": lambda tensor, other: torch.ops.aten.copy_(tensor, other),
        "torch.Tensor.__getitem__": lambda x, i: x.select(0, i) if x.is_cuda else getitem(x, i),
        "signal.signal": lambda number, handler: None,
    }


@contextlib.contextmanager
def recording(recorder):
    """What runs in this context runs on fake tensors, as on a GPU, and is recorded while the recorder is on."""
    precision = torch.get_float32_matmul_precision()
    with contextlib.ExitStack() as stack:
        for name, value in as_on_a_gpu().items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder)
        yield
    torch.set_float32_matmul_precision(precision)
    torch.compiler.reset()


def count(label, model, B, T, **more):
    """The kernels of a training step of the rung `label`: {Kernel: how many}; `more` settings of the script."""
    script, recorder = load_script(BY_LABEL[label]), Recorder()

    def after_step(log, step, *values, **notes):
        recorder.on = step == 1  # the second step is recorded; the first compiles, and makes the optimizer's states

    script.Log.step, script.Log.finish = after_step, lambda log, step: None
    script.load_tokens = lambda folder, split, n_needed: (np.zeros(n_needed, "<u2"), META)
    script.check_compiler = lambda device: None
    script.on_any_rank = lambda condition, device: condition
    settings = script.parse_args(["--device", "cpu"])
    with TemporaryDirectory(ignore_cleanup_errors=True) as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name)
        vars(settings).update(model=model, B=B, T=T, steps=2, data=folder, log_dir=folder, total_batch=B * T,
                              val_every=0, checkpoint_every=0, checkpoint_dir=folder, **more)
        with recording(recorder), mock.patch("torch.compile", compiler(recorder)):
            script.train(settings)
    return recorder.kernels


# ---- the command -----------------------------------------------------------------------------------------------------


def count_all(labels, setting, console):
    """{label: {Kernel: how many}} of rungs; `setting`: model, B and T. Says which rung it is at, in a pipe, too."""
    counted = {}
    for label in labels:
        console.print(f"counting {BY_LABEL[label].called}, some ten seconds", style="dim")
        counted[label] = count(label, **setting)
    return counted


def main(argv=None):
    parser = argparse.ArgumentParser(description="Count the kernels of GPT-2 (124M) at B=16 T=1024, and store them.")
    parser.add_argument("--rungs", required=True, help="of one card, without fp8, such as 0-10")
    args, console, rungs = parser.parse_args(argv), Console(highlight=False), read_store()
    code = code_of(RUNGS)
    for label, kernels in count_all(counted_rungs(parse_rungs(args.rungs), console), STORED, console).items():
        rungs[label] = {"lesson": code[BY_LABEL[label].name], "torch": torch.__version__, "kernels": kernels}
    lines = []
    for label in [label for label in COUNTED if label in rungs]:
        kernels = [[n, *kernel] for kernel, n in sorted(rungs[label]["kernels"].items())]
        lines.append(f" {json.dumps(label)}: {json.dumps(rungs[label] | {'kernels': kernels})}")
    write_whole(STORE, f"{json.dumps(STORED)[:-1]}, \"rungs\": {{\n" + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
