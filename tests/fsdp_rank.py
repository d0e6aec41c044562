"""One rank of an FSDP test: fsdp_run.py's own main(), once for each line of a file, in one process group.

    torchrun ... tests/fsdp_rank.py FOLDER    # FOLDER/runs.json: {name: [dtype, [flags]]}

Each run writes FOLDER/NAME/rank<n>.json: what this rank held and sent in the last step, in bytes. DIE_RANK, DIE_BATCH
and DIE_ONCE are those of ddp_rank.py. To import torch costs more than to train, so one start serves several tests.
"""
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import rung
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

folder, rank = Path(sys.argv[1]), int(os.environ.get("RANK", 0))
start, end = dist.init_process_group, dist.destroy_process_group
dist.init_process_group = lambda backend: dist.is_initialized() or start(backend)
dist.destroy_process_group = lambda: None


def local_bytes(tensors):
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors if t is not None)


class Collectives(TorchDispatchMode):
    """The bytes of the whole buffer that each collective gathers or reduces, larger ones than 100 bytes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # look at what it does with the local tensors
        result = function(*args, **(kwargs or {}))
        name = function._opname
        whole = {
            "_allgather_base_": lambda: args[0], "_reduce_scatter_base_": lambda: args[1],
            "all_gather_into_tensor": lambda: result, "reduce_scatter_tensor": lambda: args[0],
            "allreduce_": lambda: args[0][0], "all_reduce": lambda: args[0],
        }
        if function.namespace in ("c10d", "_c10d_functional") and name in whole:
            n_bytes = whole[name]().nbytes
            if n_bytes > 100:
                self.seen.append((name.strip("_").replace("allgather_base", "all_gather_into_tensor").replace(
                    "reduce_scatter_base", "reduce_scatter_tensor"), n_bytes))
        return result


def died_before():
    marker = os.environ.get("DIE_ONCE")
    died = marker is not None and os.path.exists(marker)
    if marker:
        Path(marker).touch()
    return died


def run(name, dtype, flags):
    script, measured, batches = rung("fsdp"), {}, []
    script.autocast_dtype = lambda device: getattr(torch, dtype)
    batch = script.DataLoaderLite.batch

    def dying_batch(self, i):
        batches.append(i)
        now = str(rank), str(len(batches))
        if now == (os.environ.get("DIE_RANK"), os.environ.get("DIE_BATCH")) and not died_before():
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(self, i)

    def before_step(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is not None for p in parameters):  # not AdamW's step within Muon's
            measured["parameters"], measured["gradients"] = (
                local_bytes(parameters), local_bytes([p.grad for p in parameters]))

    def after_step(optimizer, args, kwargs):
        measured["optimizer"] = local_bytes(t for state in optimizer.state.values() for t in state.values())
        measured["collectives"], collectives.seen = collectives.seen, []

    script.DataLoaderLite.batch = dying_batch
    hooks = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]
    with Collectives() as collectives:
        script.main([*flags, "--log-dir", str(folder / name), "--checkpoint-dir", str(folder / name / "checkpoints")])
    for hook in hooks:
        hook.remove()
    (folder / name / f"rank{rank}.json").write_text(json.dumps(measured))


for each, (kind, own_flags) in json.loads((folder / "runs.json").read_text()).items():
    run(each, kind, own_flags)
end()
