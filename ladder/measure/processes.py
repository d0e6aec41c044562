"""Jobs: scripts in child processes, followed to their ends, and what only a process tells, added to its log."""
import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from ladder.count.memory import free_memory
from ladder.errors import UserError
from ladder.measure import allocator
from ladder.measure.this_machine import cpu_name
from ladder.rungs.list import ROOT

MEMORY_SHARE = 0.9  # of the free memory: a child on a CPU that takes more is stopped before the machine starts to swap
# A line of a child's output; torchrun's own, about its child, says nothing.
COMPLAINT = re.compile(r"(\[rank\d+\]: )?(?!.*ChildFailedError)(error:|[\w.]*(Error|Exception)\b)")
COMPILER = re.compile(r"(.*-)?((g|c|clang)\+\+|cc1plus|collect2|as|ld)(-\d+)?")
OUT_OF_MEMORY = "out of memory|CUBLAS_STATUS_ALLOC_FAILED"
SIGKILL = 9  # which the kernel sends when memory runs out; Windows' signal module lacks the name
KILLED_RANK = re.compile(r"traceback : Signal 9 \(SIGKILL\)")  # so torchrun reports it


@dataclass
class Job:
    """One script to run once."""

    name: str
    command: list
    log_dir: Path
    env: dict = field(default_factory=dict)  # variables for it alone
    is_try: bool = False  # of learning rates, which may be too high: that it fails is a result, too
    memory: float | None = None  # bytes it may hold on a CPU; None: MEMORY_SHARE of what is free when it starts

    @property
    def log(self):
        return self.log_dir / f"{self.name}.log"


@dataclass
class Outcome:
    """How a job ended: "ok", "failed", "out of memory" or "timed out"; `reason` says why."""

    name: str
    status: str
    reason: str = ""
    lines: list = field(default_factory=list)  # its output
    seconds: float = 0.0


def process_tree(pid):
    """A process and everything it started."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_alive(process):
    """Whether a process has not ended; in a container perhaps nobody reaps one that has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(child, seen=()):
    """Kill a child, everything it started, and the `seen` of what it left behind: torchrun's ranks outlive its death.

    A compiler may end by itself, in ten seconds.
    """
    tree = process_tree(child.pid) if child.poll() is None else []  # else its number may be another process's by now
    tree = {*tree, *seen}  # psutil kills none that has only taken a number over
    for spared in (COMPILER, None):  # killed while it links, it leaves a broken library in torch's cache
        for process in filter(is_alive, tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                if spared is None or not spared.fullmatch(process.name()):
                    process.kill()
        deadline = time.monotonic() + 10
        while any(map(is_alive, tree)) and time.monotonic() < deadline:
            time.sleep(0.02)
    child.wait()


def record(job, env, peak):
    """Add to the log of a job on a CPU what only its environment and its process tell."""
    alone = "torch.distributed.run" not in job.command or "--nproc_per_node=1" in job.command
    threads = torch.get_num_threads() if alone else 1  # torchrun's default for several
    threads = env.get("OMP_NUM_THREADS", threads)
    words = [f"machine: {cpu_name()} ({threads} threads)", f"allocator: {allocator.allocator_name(env)}",
             f"process memory: {peak / 1e9:.2f} GB"]
    if job.log.exists():
        with open(job.log, "a", encoding="utf-8") as file:
            file.write(f"# {' | '.join(words)}\n")


def judge(code, lines):
    """The status and the reason of an exit code, after this output."""
    if code == 0:
        return "ok", ""
    complaints = [line.strip() for line in lines if COMPLAINT.match(line)]
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    final = complaints[-1] if complaints else last
    killed_rank = next((line.strip() for line in lines if KILLED_RANK.search(line)), "")
    if killed_rank or re.search(OUT_OF_MEMORY, final):
        return "out of memory", killed_rank or final
    if code < 0:  # a signal, of which the script itself can say nothing
        complaints.append(f"ended by {signal.Signals(-code).name}")
    return "out of memory" if code == -SIGKILL else "failed", "; ".join(complaints) or last


class Child:
    """A job while it runs: its process, and the `lines` that it has printed so far."""

    def __init__(self, job, seconds, device, file):
        self.job, self.seconds, self.device, self.started = job, seconds, device, time.monotonic()
        self.lines, self.rest, self.peak = [], "", 0
        self.seen = set()  # all processes of it so far
        self.limit, self.env = math.inf, os.environ | job.env  # a GPU refuses on its own
        if device == "cpu":
            self.limit = job.memory or MEMORY_SHARE * free_memory("cpu")
            self.env = os.environ | allocator.keeping_freed_memory() | job.env
        with open(file, "wb") as output:
            self.process = subprocess.Popen(job.command, stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=subprocess.STDOUT, env=self.env,
                                            start_new_session=os.name == "posix")
        self.output = open(file, encoding="utf-8", errors="replace")

    def poll(self):
        """Its Outcome, None while it runs. Stops it where it takes more time or memory than it may."""
        code, seconds = self.process.poll(), time.monotonic() - self.started
        held = self.look_at_processes() if code is None else 0
        self.read_output()
        if code is not None:
            status, reason = judge(code, [*self.lines, self.rest])
        elif seconds > self.seconds:
            status, reason = "timed out", f"no end after {self.seconds:g} s"
        elif held > self.limit:
            status, reason = "out of memory", f"took more than {self.limit / 1e9:.1f} GB"
        else:
            return None
        self.stop()
        if status == "ok" and self.device == "cpu":
            record(self.job, self.env, self.peak)
        return Outcome(self.job.name, status, reason, self.lines, seconds)

    def look_at_processes(self):
        """Remember its processes and the peak of the largest; the bytes that they hold together.

        What the kernel counts as shared is left out: pages of files, such as torch's libraries, which it can drop.
        """
        tree, held = process_tree(self.process.pid), 0
        self.seen.update(tree)
        for process in tree:
            with contextlib.suppress(psutil.Error):  # for example when it has just ended
                memory = process.memory_info()
                held += memory.rss - getattr(memory, "shared", 0)
                self.peak = max(self.peak, memory.rss)  # freed memory is kept, so this does not fall
        return held

    def read_output(self):
        *lines, self.rest = (self.rest + self.output.read()).split("\n")
        self.lines += lines

    def stop(self):
        stop(self.process, self.seen)
        self.output.close()


def run_jobs(jobs, seconds, device, at_once, ended, show=lambda running: None):
    """Run the jobs, `at_once` at a time: ended(job, outcome) after each, show(the children) four times a second.

    Ctrl-C and other exceptions stop all that run.
    """
    running, n_started = [], 0
    with TemporaryDirectory() as folder:
        try:
            while jobs or running:
                while jobs and len(running) < at_once:
                    running.append(Child(jobs.pop(0), seconds, device, Path(folder, str(n_started))))
                    n_started += 1
                for child in list(running):
                    outcome = child.poll()
                    if outcome:
                        running.remove(child)
                        ended(child.job, outcome)
                show(running)
                time.sleep(0.25)
        finally:
            for child in running:
                child.stop()


def run_job(job, seconds, device):
    outcomes = []
    run_jobs([job], seconds, device, 1, lambda _, outcome: outcomes.append(outcome))
    return outcomes[0]


def run_module(name, *words):
    """What `python -m NAME` prints, in a child process, because a process that has used a GPU keeps memory there."""
    command = [sys.executable, "-m", name, *words]
    child = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        raise UserError(f"python -m {name} failed: {reason.splitlines()[-1]}")
    return child.stdout
