"""Run the rungs one after the other as a user would, in child processes, and measure the machine in the same run.

A rung that fails, runs out of memory or takes too long is shown as such, and the others still run. Ctrl-C stops the
child with everything that it started, and keeps what is finished.
"""
import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import filelock
import psutil
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ladder.errors import UserError
from ladder.logs import PEER, STEP_LINE, read_log
from ladder.memory import largest_fitting
from ladder.stages import BY_LABEL, ROOT, STAGES

MEMORY_SHARE = 0.9  # of the free memory: a child on a CPU that takes more is stopped before the machine starts to swap


@dataclass
class Job:
    """One script to run once."""

    name: str
    command: list
    log_dir: Path


@dataclass
class Outcome:
    """How a job ended: "ok", "skipped", "failed", "out of memory" or "timed out"; `reason` is its last word."""

    name: str
    status: str
    reason: str = ""


def parse_rungs(text):
    """The stages of "0-2,ddp", each once; raises UserError for anything that is not a rung."""
    labels, stages = list(BY_LABEL), []
    for part in text.replace(" ", "").split(","):
        ends = part.split("-")
        places = [labels.index(label) for label in ends if label in labels]
        if len(places) != len(ends) or len(ends) > 2 or places[0] > places[-1]:
            raise UserError(f"--rungs {text}: write for example 0-10 or 0,5,ddp; "
                            f"there are rungs {labels[0]} to {labels[-2]}, ddp between 10 and 11, and {labels[-1]}")
        stages += STAGES[places[0] : places[-1] + 1]
    return list(dict.fromkeys(stages))


def load_script(stage):
    """A rung's script as a module."""
    spec = importlib.util.spec_from_file_location(stage.name, stage.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def split_flags(flags, *names):
    """(the values of the flags called `names`, all other flags)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name)
    values, rest = parser.parse_known_args(flags)
    return [value for value in vars(values).values() if value is not None], rest


def own_flags(stage, flags, log_dir):
    """`flags` as the script of a rung takes them; a measurement meets no checkpoint, and leaves none behind."""
    names = {field.name for field in fields(load_script(stage).Settings)}
    if "compile_mode" not in names:
        _, flags = split_flags(flags, "--compile-mode")
    if "checkpoint_every" in names:
        flags = ["--checkpoint-every", "0", "--checkpoint-dir", str(log_dir / "checkpoints" / stage.name), *flags]
    return flags


def command_for(stage, flags, log_dir, processes=2):
    """The command line of a rung, or of the peer (None)."""
    script = stage.path if stage else ROOT / f"ladder/{PEER}.py"
    start = [sys.executable]
    if script.name in ("ddp_run.py", "fsdp_run.py", "fsdp_sharded_checkpoint.py"):
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*start, str(script), *own_flags(stage or BY_LABEL["10"], flags, log_dir), "--log-dir", str(log_dir)]


def check_flags(stages, flags):
    """Let each script itself refuse its flags, and the first the data, before anything is written; its Settings."""
    if any(split_flags(flags, "--log-dir", "--save")[0]):
        raise UserError("--log-dir, --save: not for the scripts here; logs go to --logs, and models are not kept")
    settings = [load_script(stage).parse_settings(own_flags(stage, flags, Path())) for stage in stages][0]
    load_script(stages[0]).open_tokens(settings.data, "train", settings.B * settings.T + 1)
    return settings


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
    """End a child and everything that it started."""
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

    Only where the quick count, shared pages several times, is above the limit, the exact one is made: it walks through
    all pages, and 5 times a second of that took a fifth of a core from the measured script.
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


def watch(child, seconds, limit, verdict):
    """Stop the child when its time is over or it holds more than `limit` bytes; the reason goes to `verdict`."""
    deadline = time.monotonic() + seconds
    while child.poll() is None:
        if time.monotonic() > deadline:
            verdict.append(("timed out", f"no end after {seconds:g} s"))
        elif limit and holds_more(child.pid, limit):
            verdict.append(("out of memory", f"took more than {limit / 1e9:.1f} GB"))
        if verdict:
            stop(child)
            return
        time.sleep(0.5)


def run_job(job, seconds, device, on_line=lambda line: None):
    """Run one job to its end; `on_line` sees its output. KeyboardInterrupt stops the child first."""
    limit = MEMORY_SHARE * psutil.virtual_memory().available if device == "cpu" else None  # a GPU refuses by itself
    child = subprocess.Popen(
        job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=Path.cwd(),
        start_new_session=os.name == "posix",
    )
    verdict, last = [], ""
    watcher = threading.Thread(target=watch, args=(child, seconds, limit, verdict), daemon=True)
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
        return Outcome(job.name, "ok", "; ".join(errors))
    reason = errors[-1] if errors else last
    if "out of memory" in reason or child.returncode == -signal.SIGKILL:
        return Outcome(job.name, "out of memory", reason)
    return Outcome(job.name, "failed", "; ".join(errors) or last or f"exit code {child.returncode}")


def is_finished(job):
    try:
        return read_log(job.log_dir / f"{job.name}.log").complete
    except UserError:
        return False


def run_module(name, *words):
    """What `python -m ladder.NAME` prints. A child, because a process that has touched a GPU keeps memory there."""
    command = [sys.executable, "-m", f"ladder.{name}", *words]
    child = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        raise UserError(f"python -m ladder.{name} failed: {reason.splitlines()[-1]}")
    return child.stdout


def write_machine(folder, device, **more):
    """Measure the machine and write its matrix-product rates, its names and `more` to folder/machine.json.

    Of a file that is there already it keeps the higher rates and all else: a shared machine is not always at its best.
    """
    path, partial = folder / "machine.json", folder / "machine.json.partial"
    measured = json.loads(run_module("rates", "--device", device)) | more
    machine = json.loads(path.read_text(encoding="utf-8")) if path.exists() else measured
    for name, rate in measured["rates"].items():
        machine["rates"][name] = max(rate, machine["rates"].get(name, 0))
    partial.write_text(json.dumps(machine, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


@contextlib.contextmanager
def locked(folder, resume, flag="--logs"):
    """Hold the folder of a run; raises UserError when it is in use, or not empty without `resume`."""
    if not resume and folder.exists() and any(path.name != "lock" for path in folder.iterdir()):
        way = ", or --resume to continue the run in it" if flag == "--logs" else ""
        raise UserError(f"{flag} {folder}: is not empty; give a new folder{way}")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / "lock", timeout=0):
            yield
    except filelock.Timeout:
        raise UserError(f"{folder}: another run is using it; wait for its end, or give another --logs") from None


def run_ladder(jobs, n_jobs, settings, arguments, log_dir, seconds, resume, console, deadline=math.inf):
    """Run all jobs with a progress bar; returns their outcomes. Stops early at Ctrl-C, with what is finished.

    `n_jobs` is how many there probably are: of some, which one comes next depends on the ones before.

    `arguments` are the command line, noted with the machine for --resume. A job may take `seconds`, and ends at the
    `deadline` (of time.monotonic); what it cuts short leaves no log.
    """
    outcomes = []
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        steps = settings.steps
        bar = progress.add_task("machine", total=n_jobs * steps, what="matrix-product rates")
        if not resume:
            write_machine(log_dir, settings.device, arguments=arguments)
        for number, job in enumerate(jobs):
            n_jobs = max(n_jobs, number + 1)
            progress.update(bar, description=f"{number + 1} of {n_jobs} {job.name}", completed=number * steps,
                            total=n_jobs * steps, what="starting")
            if resume and is_finished(job):
                outcomes.append(Outcome(job.name, "skipped", "finished before"))
                continue

            def show(line, number=number):
                if match := STEP_LINE.match(line):
                    done = number * steps + int(match[1])
                    progress.update(bar, completed=done, what=f"step {match[1]}/{steps} loss {match[2]} {match[3]} ms")

            if (left := deadline - time.monotonic()) < 1:
                break
            outcome = run_job(job, min(seconds, left), settings.device, show)
            outcomes.append(outcome)
            if outcome.status == "timed out" and left < seconds:
                (job.log_dir / f"{job.name}.log").unlink(missing_ok=True)
                break
            say = progress.console.print
            if outcome.status != "ok":
                say(f"{job.name}: {outcome.status}: {outcome.reason}", style="red", markup=False)
                continue
            try:
                run = read_log(job.log_dir / f"{job.name}.log")
            except UserError as error:  # a full disk, say, of which the script has warned
                outcomes[-1] = Outcome(job.name, "failed", outcome.reason or str(error))
                say(f"{job.name}: failed: {outcomes[-1].reason}", style="red", markup=False)
                continue
            name = (job.log_dir / job.name).relative_to(log_dir)
            say(f"{name}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {run.median_ms:,.1f} ms/step", markup=False)
            if outcome.reason:
                say(f"  {outcome.reason}", style="yellow", markup=False)
        if time.monotonic() < deadline:
            write_machine(log_dir, settings.device)
        progress.update(bar, completed=n_jobs * steps, what="done")
    return outcomes


def largest_batch(stage, flags, log_dir, seconds, processes, say):
    """(B, tokens/sec at B, why the next one did not run) for the largest B of a rung, per process.

    The search starts where the memory model says that the memory ends, since every B costs a compilation.
    """
    settings = check_flags([stage], flags)
    _, flags = split_flags(flags, "-B", "--batch-size", "--steps", "--total-batch")
    shares = processes if stage.label in ("ddp", "fsdp", "dcp") and settings.device == "cpu" else 1
    available = MEMORY_SHARE * int(run_module("memory", settings.device)) / shares
    B = start = max(1, largest_fitting(settings.model, settings.T, [stage.label], available))

    def attempt(B):
        more = ["-B", str(B), "--steps", "3"]
        if hasattr(settings, "total_batch"):  # one micro-step: more of them take more time, not more memory
            more += ["--total-batch", str(B * settings.T)]
        job = Job(stage.name, command_for(stage, [*flags, *more], log_dir, processes), log_dir)
        outcome = run_job(job, seconds, settings.device)
        say(f"{stage.name}: B={B} {outcome.status}")
        speed = read_log(log_dir / f"{job.name}.log").tokens_per_second if outcome.status == "ok" else None
        return speed, outcome

    best, speed, failed, why = 0, None, None, ""
    while failed is None or failed - best > max(1, best // 8):
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
