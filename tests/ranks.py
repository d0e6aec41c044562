"""Distributed runs: on_ranks(n, …) trains on n ranks, forks of one process; what each rank does.

    torchrun ... tests/ranks.py FOLDER        # the same by torchrun; FOLDER/runs.json is of write_runs

Scripts' own train(), one run after the other in one process group. Each leaves FOLDER/NAME/rank<n>.json: a digest of
the parameters that this rank has in the end, how much was compiled and, of FSDP in bfloat16, what it held at most and
moved in the last step, in bytes. What is compiled runs as it was traced. In float16 the first gradient of rank 1
overflows. With DIE_RANK and DIE_BATCH that rank kills itself when it fetches its DIE_BATCH-th batch, once: the file
FOLDER/died tells.
"""
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict  # noqa: F401 - here, once for all forks
import torch.distributed.fsdp  # noqa: F401
from load_script import builds_on, known_flags, rung
from run_script import main, start_forkserver
from tensor_bytes import Watch
from torch._dynamo.utils import counters
from torch.multiprocessing import start_processes
from torch.optim.optimizer import register_optimizer_step_post_hook

GROUP_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0"}  # what torchrun tells a single process


def write_runs(folder, data, runs):
    """What each rank is to run in a folder: {name: (label, dtype, flags)}."""
    own = ["--model", "tiny", "--device", "cpu", "--data", data, "--compile-mode", "none"]
    runs = {name: (*kind, [str(word) for word in (*own, *flags)]) for name, (*kind, flags) in runs.items()}
    folder.mkdir(exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))


def on_ranks(n, folder, data, runs):
    """Make these runs on n ranks, one after the other. Each leaves FOLDER/NAME; what each rank printed is returned."""
    write_runs(folder, data, runs)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_forkserver()
    start_processes(forked_rank, (n, port, folder), nprocs=n, start_method="forkserver")
    return [(folder / f"printed_{rank}.txt").read_text() for rank in range(n)]


def forked_rank(rank, n, port, folder):
    """One of n ranks."""
    sys.stdout = open(folder / f"printed_{rank}.txt", "w", buffering=1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_PORT": port}
    os.environ.update(GROUP_OF_ONE | {name: str(number) for name, number in numbers.items()})
    try:
        run_all(folder)
    except SystemExit as stop:
        raise RuntimeError(f"error: {stop.code}") from stop


def run_one(folder, rank, name, label, dtype, flags):
    script, found, fetched, watch = rung(label), {}, [], Watch()
    script.autocast_dtype = lambda device: getattr(torch, dtype)
    sharded = builds_on(label, "fsdp")
    batch, unscale, compile_ = script.DataLoaderLite.batch, torch.amp.GradScaler.unscale_, torch.compile

    def dying_batch(self, i):
        if i not in getattr(self, "prefetched", ()):
            fetched.append(i)
        now = str(rank), str(len(fetched))
        if now == (os.environ.get("DIE_RANK"), os.environ.get("DIE_BATCH")) and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(self, i)

    def overflow(scaler, optimizer):
        if dtype == "float16" and rank == 1 and not found:
            optimizer.param_groups[0]["params"][0].grad.to_local()[0, 0] = torch.inf
        return unscale(scaler, optimizer)

    def after_step(optimizer, args, kwargs):
        if sharded:
            found["moved"], found["peak"] = watch.moved, watch.peak
            watch.moved, watch.peak = [], 0
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = b"".join(p.detach().numpy().tobytes() for p in parameters)
            found["digest"] = hashlib.sha256(numbers).hexdigest()

    script.DataLoaderLite.batch, torch.amp.GradScaler.unscale_ = dying_batch, overflow
    torch.compile = lambda function, mode=None: compile_(function, backend="eager")  # traced, not compiled
    hook = register_optimizer_step_post_hook(after_step)
    own = [*flags, *known_flags(script, log_dir=folder / name, checkpoint_dir=folder / name / "checkpoints")]
    torch.compiler.reset()
    counters.clear()
    with watch if sharded and dtype == "bfloat16" else contextlib.nullcontext():  # it takes time
        main(script, *own)
    found["graphs"], found["breaks"] = counters["stats"]["unique_graphs"], len(counters["graph_break"])
    hook.remove()
    torch.amp.GradScaler.unscale_, torch.compile = unscale, compile_
    (folder / name / f"rank{rank}.json").write_text(json.dumps(found))


def run_all(folder):
    """All runs of FOLDER/runs.json, in one process group, whose place the environment names."""
    start, end, rank = dist.init_process_group, dist.destroy_process_group, int(os.environ["RANK"])
    sleep, time.sleep = time.sleep, lambda seconds: None  # a script's last line, which waits for gloo
    dist.init_process_group = lambda *args, **how: dist.is_initialized() or start(*args, **how)
    dist.destroy_process_group = lambda: None
    for name, own in json.loads((folder / "runs.json").read_text()).items():
        run_one(folder, rank, name, *own)
    end()
    sleep(0.5)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
