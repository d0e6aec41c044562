"""One job: a script in a child process, followed to its end, and what only its process tells, added to its log."""
import contextlib
import math
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ladder.count.memory import free_memory
from ladder.measure import allocator
from ladder.measure.rates import cpu_name

MEMORY_SHARE = 0.9  # of the free memory: a child on a CPU that takes more is stopped before the machine starts to swap
COMPLAINT = re.compile(r"(\[rank\d+\]: )?(error:|WARNING:|\w*(Error|Exception)\b)")  # a line of a child's output
SIGKILL = 9  # which the kernel sends when memory runs out; Windows' signal module lacks the name


@dataclass
class Job:
    """One script to run once."""

    name: str
    command: list
    log_dir: Path
    env: dict = field(default_factory=dict)  # variables for it alone
    memory: float | None = None  # bytes it may hold on a CPU; None: MEMORY_SHARE of what is free when it starts

    @property
    def log(self):
        return self.log_dir / f"{self.name}.log"


@dataclass
class Outcome:
    """How a job ended: "ok", "failed", "out of memory", "timed out" or "stopped"; `reason` says why."""

    name: str
    status: str
    reason: str = ""


def process_tree(pid):
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def stop(child):
    """Kill a child and everything it started."""
    tree = process_tree(child.pid)
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(tree, timeout=10)
    child.wait()


def memory_of(pid):
    """(bytes that a process and everything it started hold, bytes of the one that has most in memory).

    The first leaves out what the kernel counts as shared: pages of files, such as torch's libraries, which it can drop.
    """
    held, largest = 0, 0
    for process in process_tree(pid):
        with contextlib.suppress(psutil.Error):  # for example when it has just ended
            info = process.memory_info()
            held += info.rss - getattr(info, "shared", 0)
            largest = max(largest, info.rss)
    return held, largest


def watch(child, seconds, limit, stopped):
    """Follow a child, and stop it after `seconds`, above `limit` bytes, or when the event `stopped` is set.

    Returns the status and reason of its Outcome, None if it ended by itself, and the most bytes that one of its
    processes was seen to hold: freed memory is kept, so this does not fall.
    """
    deadline, peak = time.monotonic() + seconds, 0
    while child.poll() is None:
        held, largest = memory_of(child.pid)
        peak = max(peak, largest)
        if stopped and stopped.is_set():
            verdict = "stopped", ""
        elif time.monotonic() > deadline:
            verdict = "timed out", f"no end after {seconds:g} s"
        elif held > limit:
            verdict = "out of memory", f"took more than {limit / 1e9:.1f} GB"
        else:
            time.sleep(0.5)
            continue
        stop(child)
        return verdict, peak
    return None, peak


def cached_graphs():
    """How many graphs torch's cache on disk holds; a run that adds none had its graphs compiled before."""
    return sum(1 for _ in Path(cache_dir(), "fxgraph").glob("*/*"))


def record(job, device, env, peak, cache):
    """Add to a job's log what only its environment and its process tell."""
    words = [f"compile cache: {cache}"]
    if device == "cpu":
        threads = 1 if "torch.distributed.run" in job.command else torch.get_num_threads()  # torchrun's default
        threads = env.get("OMP_NUM_THREADS", threads)
        words = [f"machine: {cpu_name()} ({threads} threads)", f"allocator: {allocator.name_of(env)}",
                 f"process memory: {peak / 1e9:.2f} GB", *words]
    with contextlib.suppress(OSError):  # a full disk, of which the script has warned
        if job.log.exists():
            with open(job.log, "a", encoding="utf-8") as file:
                file.write(f"# {' | '.join(words)}\n")


def run_job(job, seconds, device, on_line=lambda line: None, stopped=None):
    """Run one job to its end; `on_line` gets its output. KeyboardInterrupt, and setting `stopped`, stop the child."""
    limit, env = math.inf, os.environ | job.env  # a GPU refuses on its own
    if device == "cpu":
        limit = job.memory or MEMORY_SHARE * free_memory("cpu")
        env = os.environ | allocator.keeping_freed_memory() | job.env
    graphs, errors, last = cached_graphs(), [], ""
    child = subprocess.Popen(job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                             env=env, start_new_session=os.name == "posix")
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch, child, seconds, limit, stopped)
        try:
            for line in child.stdout:
                last = line.strip() or last
                if COMPLAINT.match(line):
                    errors.append(line.strip())
                on_line(line)
        except BaseException:
            stop(child)
            raise
    verdict, peak = watching.result()
    if verdict:
        return Outcome(job.name, *verdict)
    if child.returncode == 0:
        record(job, device, env, peak, "cold" if cached_graphs() > graphs else "warm")
        return Outcome(job.name, "ok", "; ".join(errors))
    final = errors[-1] if errors else last
    if child.returncode == -SIGKILL or "out of memory" in final:
        return Outcome(job.name, "out of memory", final)
    return Outcome(job.name, "failed", "; ".join(errors) or last or f"exit code {child.returncode}")
