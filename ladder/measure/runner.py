"""Run the rungs as a user would, in child processes, and measure the machine in the same run.

They run one after another, or several at once where only their losses count. A rung that fails, runs out of memory or
takes too long is reported, and the others still run. Ctrl-C stops the children and everything they started; finished
results are kept.
"""
import argparse
import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

import filelock
import psutil
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure import allocator
from ladder.measure.rates import cpu_name
from ladder.count.memory import largest_fitting
from ladder.scripts.stages import BY_LABEL, ROOT, STAGES, load_script
from ladder.show.logs import PEER, PEER_FILE, STEP_LINE, read_log

MEMORY_SHARE = 0.9  # of the free memory: a child on a CPU that takes more is stopped before the machine starts to swap
NEVER = threading.Event()  # is never set
SIGKILL = 9  # which the kernel sends when memory runs out; Windows' signal module lacks the name


@dataclass
class Job:
    """One script to run once."""

    name: str
    command: list
    log_dir: Path
    env: dict = field(default_factory=dict)  # variables for it alone
    memory: float | None = None  # bytes it may hold on a CPU; None: MEMORY_SHARE of what is free when it starts


@dataclass
class Outcome:
    """How a job ended: "ok", "skipped", "failed", "out of memory" or "timed out"; `reason` says why."""

    name: str
    status: str
    reason: str = ""


def parse_rungs(text):
    """The stages of "0-2,ddp", without duplicates; raises UserError for anything that is not a rung."""
    labels, stages = list(BY_LABEL), []
    for part in text.replace(" ", "").split(","):
        ends = part.split("-")
        places = [labels.index(label) for label in ends if label in labels]
        if len(places) != len(ends) or len(ends) > 2 or places[0] > places[-1]:
            raise UserError(f"--rungs {text}: write for example 0-10 or 0,5,ddp; "
                            f"there are rungs {labels[0]} to {labels[-2]}, ddp between 10 and 11, and {labels[-1]}")
        stages += STAGES[places[0] : places[-1] + 1]
    return list(dict.fromkeys(stages))


def split_flags(flags, *names):
    """(the values of the flags called `names`, all other flags)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name)
    values, rest = parser.parse_known_args(flags)
    return [value for value in vars(values).values() if value is not None], rest


@functools.cache
def defaults(stage):
    """{name: default} of the flags of a rung."""
    return vars(load_script(stage).parse_settings([]))


def own_flags(stage, flags, log_dir):
    """`flags` as a rung's script takes them; a measurement neither finds nor leaves a checkpoint."""
    names = defaults(stage)
    if "compile_mode" not in names:
        _, flags = split_flags(flags, "--compile-mode")
    if "checkpoint_every" in names:
        flags = ["--checkpoint-every", "0", "--checkpoint-dir", str(log_dir / "checkpoints" / stage.name), *flags]
    return flags


def command_for(stage, flags, log_dir, processes=2):
    """The command line of a rung, or of the peer (None)."""
    script = stage.path if stage else ROOT / PEER_FILE
    start = [sys.executable]
    if stage and stage.torchrun:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*start, str(script), *own_flags(stage or BY_LABEL["10"], flags, log_dir), "--log-dir", str(log_dir)]


def check_flags(stages, flags):
    """Each script checks its own flags, and the first also the data, before anything is written; its settings."""
    if any(split_flags(flags, "--log-dir", "--save")[0]):
        raise UserError("--log-dir, --save: not allowed here; logs go to --logs, and no model is saved")
    settings = {stage: load_script(stage).parse_settings(own_flags(stage, flags, Path())) for stage in stages}
    first, script = settings[stages[0]], load_script(stages[0])
    _, meta = script.open_tokens(first.data, "train", first.B * first.T + 1)
    script.config_of(first, meta["vocab_size"])
    return first


def plan(stages, flags, log_dir, repeat=1, peers=False, processes=2):
    """The jobs, round by round, so that drift in machine speed affects all rungs alike."""
    return [
        Job(stage.name if stage else PEER, command_for(stage, flags, folder, processes), folder)
        for folder in ([log_dir / f"round_{number + 1}" for number in range(repeat)] if repeat > 1 else [log_dir])
        for stage in [*stages, *([None] if peers else [])]
    ]


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
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    psutil.wait_procs(tree, timeout=10)
    child.wait()


def holds_more(pid, limit):
    """Whether a process and its children hold more than `limit` bytes; pages that they share count once.

    The exact count walks through all pages: 5 times a second, it took a fifth of a core from the measured script. So it
    is made only when the quick count, in which shared pages count several times, is above the limit.
    """
    def total(count):
        held = 0
        for process in process_tree(pid):
            with contextlib.suppress(psutil.Error):  # it has just ended
                held += count(process)
        return held

    def exactly(process):
        info = process.memory_full_info()
        return getattr(info, "pss", info.rss)

    return total(lambda process: process.memory_info().rss) > limit and total(exactly) > limit


def peak_bytes(pid):
    """The most that one process of a tree has held until now; where the system does not record it, what it holds."""
    peaks = [0]
    for process in process_tree(pid):
        with contextlib.suppress(psutil.Error, OSError, TypeError):  # it has just ended
            status = Path(f"/proc/{process.pid}/status")
            kib = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.exists() else None
            peaks.append(1024 * int(kib[1]) if kib else process.memory_info().rss)
    return max(peaks)


def watch(child, seconds, limit, stopped, verdict, peaks):
    """Stop the child when its time is up, it holds more than `limit` bytes, or `stopped` is set; `verdict` gets why.

    `peaks` gets the most bytes that one of its processes has held, again and again.
    """
    deadline = time.monotonic() + seconds
    while child.poll() is None:
        peaks.append(peak_bytes(child.pid))
        if stopped.is_set():
            verdict.append(("stopped", ""))
        elif time.monotonic() > deadline:
            verdict.append(("timed out", f"no end after {seconds:g} s"))
        elif limit and holds_more(child.pid, limit):
            verdict.append(("out of memory", f"took more than {limit / 1e9:.1f} GB"))
        if verdict:
            stop(child)
            return
        time.sleep(0.5)


def free_memory():
    """How many bytes a child on a CPU may hold."""
    return MEMORY_SHARE * psutil.virtual_memory().available


def cached_graphs():
    """How many graphs torch's cache on disk holds; a run that adds none had its graphs compiled before."""
    return sum(1 for _ in Path(cache_dir(), "fxgraph").glob("*/*"))


def record(job, device, env, peak, cache):
    """Add to a job's log what only its environment and its process tell."""
    log = job.log_dir / f"{job.name}.log"
    words = [f"compile cache: {cache}"]
    if device == "cpu":
        threads = 1 if "torch.distributed.run" in job.command else torch.get_num_threads()  # torchrun's default
        threads = env.get("OMP_NUM_THREADS", threads)
        words = [f"machine: {cpu_name()} ({threads} threads)", f"allocator: {allocator.name_of(env)}",
                 f"process memory: {peak / 1e9:.2f} GB", *words]
    with contextlib.suppress(OSError):  # a full disk, of which the script has warned
        if log.exists():
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"# {' | '.join(words)}\n")


def run_job(job, seconds, device, on_line=lambda line: None, stopped=NEVER):
    """Run one job to its end; `on_line` gets its output. KeyboardInterrupt, and setting `stopped`, stop the child."""
    limit = (job.memory or free_memory()) if device == "cpu" else None  # a GPU refuses on its own
    env = os.environ | (allocator.keeping_freed_memory() if device == "cpu" else {}) | job.env
    graphs = cached_graphs()
    child = subprocess.Popen(
        job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=Path.cwd(),
        start_new_session=os.name == "posix", env=env,
    )
    verdict, peaks, last = [], [0], ""
    watcher = threading.Thread(target=watch, args=(child, seconds, limit, stopped, verdict, peaks), daemon=True)
    watcher.start()
    errors = []
    try:
        for line in child.stdout:
            last = line.strip() or last
            if line.startswith(("error:", "WARNING:")) or re.match(r"\w*(Error|Exception)\b", line):
                errors.append(line.strip())
            on_line(line)
        child.wait()
    except BaseException:
        stop(child)
        raise
    watcher.join()
    if verdict:
        return Outcome(job.name, *verdict[0])
    if child.returncode == 0:
        record(job, device, env, max(peaks), "cold" if cached_graphs() > graphs else "warm")
        return Outcome(job.name, "ok", "; ".join(errors))
    reason = errors[-1] if errors else last
    if "out of memory" in reason or child.returncode == -SIGKILL:
        return Outcome(job.name, "out of memory", reason)
    return Outcome(job.name, "failed", "; ".join(errors) or last or f"exit code {child.returncode}")


def is_finished(job):
    try:
        return read_log(job.log_dir / f"{job.name}.log").complete
    except UserError:
        return False


def run_module(name, *words):
    """What `python -m NAME` prints, in a child process, because a process that has used a GPU keeps memory there."""
    command = [sys.executable, "-m", name, *words]
    child = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        raise UserError(f"python -m {name} failed: {reason.splitlines()[-1]}")
    return child.stdout


def write_machine(folder, device, **more):
    """Measure the machine and write its matrix-product rates, its names and `more` to folder/machine.json.

    If the file exists, only higher rates replace its own: a shared machine is not always at its best.
    """
    path = folder / "machine.json"
    measured = json.loads(run_module("ladder.measure.rates", "--device", device)) | more
    machine = json.loads(path.read_text(encoding="utf-8")) if path.exists() else measured
    for name, rate in measured["rates"].items():
        machine["rates"][name] = max(rate, machine["rates"].get(name, 0))
    write_whole(path, json.dumps(machine, indent=2) + "\n")


@contextlib.contextmanager
def locked(folder, resume, flag="--logs"):
    """Lock the folder of a run; raises UserError when it is in use, or not empty without `resume`."""
    if not resume and folder.exists() and any(path.name != "lock" for path in folder.iterdir()):
        way = ", or --resume to continue the run in it" if flag == "--logs" else ""
        raise UserError(f"{flag} {folder}: is not empty; give a new folder{way}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / "lock", timeout=0):
            yield
    except filelock.Timeout:
        raise UserError(f"{folder}: another run is using it; wait for it to end, or give a different --logs") from None


@dataclass
class Runner:
    """Runs the jobs of one folder and records how each ended; as a context, it shows a progress bar.

    At the `deadline` the jobs in progress are stopped, and their logs deleted.
    """

    settings: object  # of the first rung: steps and device
    log_dir: Path
    seconds: float  # that a job may take
    console: object
    resume: bool = False  # skip what is finished
    deadline: float = math.inf  # of time.monotonic()
    n_jobs: int = 0  # how many there probably are
    outcomes: list = field(default_factory=list)
    steps: dict = field(default_factory=dict)  # {log: steps done} of the jobs in progress
    stopped: threading.Event = field(default_factory=threading.Event)  # by Ctrl-C

    def __enter__(self):
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"),
                   TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self.progress = Progress(*columns, console=self.console)
        self.bar = self.progress.add_task("machine", what="")
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def left(self):
        return self.deadline - time.monotonic()

    def failed(self):
        return [outcome for outcome in self.outcomes if outcome.status not in ("ok", "skipped")]

    def measure_machine(self, **more):
        """Called before and after the jobs, since rates drift; `more` is added to machine.json."""
        if self.left() > 0:
            self.progress.update(self.bar, description="machine", what="matrix-product rates")
            write_machine(self.log_dir, self.settings.device, **more)

    def run(self, jobs, at_once=1):
        """Run the jobs, `at_once` at a time with an equal share of the cores and the memory, up to the deadline."""
        if at_once > 1:
            threads, memory = max(1, torch.get_num_threads() // at_once), free_memory() / at_once
            jobs = [replace(job, env={"OMP_NUM_THREADS": str(threads)}, memory=memory) for job in jobs]
        with ThreadPoolExecutor(at_once) as pool:
            try:
                for future in [pool.submit(self.run_one, job) for job in jobs]:
                    while wait([future], timeout=0.5).not_done:
                        pass  # short waits, because Windows delivers Ctrl-C only between them
                    future.result()
            except BaseException:
                self.stopped.set()
                raise

    def run_one(self, job):
        if self.stopped.is_set() or self.left() < 1:
            return
        if self.resume and is_finished(job):
            self.outcomes.append(Outcome(job.name, "skipped", "finished before"))
            return
        try:
            self.show(job, "starting")
            outcome = run_job(job, min(self.seconds, self.left()), self.settings.device,
                              lambda line: self.show_step(job, line), self.stopped)
        except BaseException:
            self.stopped.set()  # before this thread takes the next job
            raise
        finally:
            self.steps.pop(job.log_dir / job.name, None)
        if outcome.status == "timed out" and self.left() < 1:
            (job.log_dir / f"{job.name}.log").unlink(missing_ok=True)
        elif not self.stopped.is_set():
            self.finish(job, outcome)

    def show(self, job, what, step=0):
        """Show how far the jobs are, and what `job` does if it is the one that began first."""
        self.steps[job.log_dir / job.name] = step
        done, steps = len(self.outcomes), self.settings.steps
        self.n_jobs = max(self.n_jobs, done + len(self.steps))
        self.progress.update(self.bar, total=self.n_jobs * steps,
                             completed=done * steps + sum(list(self.steps.values())))
        if job.log_dir / job.name == next(iter(list(self.steps))):
            self.progress.update(self.bar, description=f"{done + 1} of {self.n_jobs} {job.name}", what=what)

    def show_step(self, job, line):
        if match := STEP_LINE.match(line):
            steps = (split_flags(job.command, "--steps")[0] or [self.settings.steps])[0]
            self.show(job, f"step {match[1]}/{steps} loss {match[2]} {match[3]} ms", int(match[1]))

    def finish(self, job, outcome):
        """Keep the outcome, and print one line about it."""
        say, run = self.progress.console.print, None
        if outcome.status == "ok":
            try:
                run = read_log(job.log_dir / f"{job.name}.log")
            except UserError as error:  # for example a full disk, of which the script has warned
                outcome = Outcome(job.name, "failed", outcome.reason or str(error))
        self.outcomes.append(outcome)
        if run is None:
            say(f"{job.name}: {outcome.status}: {outcome.reason}", style="red", markup=False)
            return
        name = (job.log_dir / job.name).relative_to(self.log_dir)
        say(f"{name}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {run.median_ms:,.1f} ms/step", markup=False)
        if outcome.reason:
            say(f"  {outcome.reason}", style="yellow", markup=False)


def largest_batch(stage, flags, log_dir, seconds, processes, say, deadline=math.inf):
    """(largest B per process, tokens/sec at that B, why the next one did not run) of a rung.

    The search starts at the B that the memory model predicts, since every B costs a compilation. An attempt may take
    `seconds`, and the search ends at the `deadline` (of time.monotonic), whatever it has found by then.
    """
    settings = check_flags([stage], flags)
    _, flags = split_flags(flags, "-B", "--batch-size", "--steps", "--total-batch")
    ranks = processes if stage.torchrun else 1
    shares = ranks if settings.device == "cpu" else 1  # how many ranks share the memory
    available = MEMORY_SHARE * int(run_module("ladder.count.memory", settings.device)) / shares
    B = start = max(1, largest_fitting(settings.model, settings.T, [stage.label], available))

    def attempt(B):
        more = ["-B", str(B), "--steps", "3"]
        if hasattr(settings, "total_batch"):  # one micro-step: more of them take more time, not more memory
            more += ["--total-batch", str(B * settings.T * ranks)]
        job = Job(stage.name, command_for(stage, [*flags, *more], log_dir, processes), log_dir)
        outcome = run_job(job, min(seconds, deadline - time.monotonic()), settings.device)
        say(f"{stage.name}: B={B} {outcome.status}")
        speed = read_log(log_dir / f"{job.name}.log").tokens_per_second if outcome.status == "ok" else None
        return speed, outcome

    best, speed, failed, why = 0, None, None, ""
    while (failed is None or failed - best > max(1, best // 8)) and time.monotonic() < deadline:
        result, outcome = attempt(B)
        if result is None:
            failed, why = B, f"{outcome.status}: {outcome.reason}"
        else:
            best, speed = B, result
        if failed is None:
            B += max(1, B // 4) if B == start else B
        else:
            B = (best + failed) // 2
    return best, speed, why
