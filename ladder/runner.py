"""Run the rungs one after the other as a user would, in child processes, and measure the machine in the same run.

A rung that fails, runs out of memory or takes too long is shown as such, and the others go on. Ctrl-C stops the child
with everything that it started, and keeps what is finished.
"""
import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ladder.errors import UserError
from ladder.logs import ORDER, PEER, STEP_LINE, read_log
from ladder.stages import LABELS, ROOT, STAGES

COMPILE_RUNG = next(number for number, stage in enumerate(STAGES) if stage.name == "speedup_05_compile")
CHECKPOINT_RUNG = next(number for number, stage in enumerate(STAGES) if stage.name == "speedup_14_checkpoint_resume")
GRAD_ACCUM_RUNG = next(number for number, stage in enumerate(STAGES) if stage.name == "speedup_11_grad_accum")
MEMORY_SHARE = 0.9  # of the free memory: a child that takes more is stopped before the machine starts to swap


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
    """Places in STAGES, [0, 1, 2, 11] from "0-2,ddp"; raises UserError for anything that is no rung."""
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+|ddp)\s*(?:-\s*(\d+)\s*)?", part)
        if not match:
            raise UserError(f"--rungs {text}: write for example 0-10 or 0,5,ddp")
        first, last = LABELS.get(match[1]), LABELS.get(match[2] or match[1])
        if first is None or last is None or first > last:
            raise UserError(f"--rungs {text}: there are rungs 0 to {STAGES[-1].label}, and ddp between 10 and 11")
        numbers += range(first, last + 1)
    return numbers


def without_flag(flags, name):
    """`flags` without `name VALUE` and `name=VALUE`."""
    kept, skip = [], False
    for flag in flags:
        if skip or flag == name or flag.startswith(name + "="):
            skip = flag == name and not skip
            continue
        kept.append(flag)
    return kept


def command_for(number, flags, log_dir, processes=2):
    """The command line of rung `number`, or of the peer (None)."""
    script = ROOT / f"ladder/{PEER}.py" if number is None else STAGES[number].path
    if number is not None and number < COMPILE_RUNG:
        flags = without_flag(flags, "--compile-mode")
    if number is not None and number >= CHECKPOINT_RUNG:
        flags = ["--checkpoint-every", "0", *flags]  # a measurement leaves none behind that the next would stumble on
    start = [sys.executable]
    if script.name == "ddp_run.py":
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return [*start, str(script), *flags, "--log-dir", str(log_dir)]


def plan(rungs, flags, log_dir, repeat=1, peers=False, processes=2):
    """The jobs, round by round, so that a machine's moods hit all rungs alike."""
    for flag in ("--log-dir", "--save"):
        if any(word == flag or word.startswith(flag + "=") for word in flags):
            raise UserError(f"{flag} is not for the scripts here: logs go to --logs, and models are not kept")
    jobs = []
    for round_number in range(1, repeat + 1):
        folder = log_dir / f"round_{round_number}" if repeat > 1 else log_dir
        for number in [*rungs, *([None] if peers else [])]:
            name = PEER if number is None else STAGES[number].name
            jobs.append(Job(name, command_for(number, flags, folder, processes), folder))
    return jobs


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


def watch(child, seconds, verdict):
    """Stop the child when its time is over or it takes too much memory; the reason goes to `verdict`."""
    deadline = time.monotonic() + seconds
    limit = MEMORY_SHARE * psutil.virtual_memory().available
    while child.poll() is None:
        used = 0
        for process in process_tree(child.pid):
            try:
                used += process.memory_info().rss
            except psutil.NoSuchProcess:
                pass
        if time.monotonic() > deadline:
            verdict.append(("timed out", f"no end after {seconds:g} s"))
        elif used > limit:
            verdict.append(("out of memory", f"took more than {limit / 1e9:.1f} GB"))
        if verdict:
            stop(child)
            return
        time.sleep(0.2)


def run_job(job, seconds, on_line=lambda line: None):
    """Run one job to its end; `on_line` sees its output. KeyboardInterrupt stops the child first."""
    child = subprocess.Popen(
        job.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=Path.cwd(),
        start_new_session=os.name == "posix",
    )
    verdict, last = [], ""
    watcher = threading.Thread(target=watch, args=(child, seconds, verdict), daemon=True)
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


def device_of(flags):
    """The device that the scripts will use."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    device = parser.parse_known_args(flags)[0].device
    if device:
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def load_script(stage):
    """A rung's script as a module."""
    spec = importlib.util.spec_from_file_location(stage.name, stage.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def check_flags(rungs, flags):
    """Let each script's own parse_args refuse its flags now, before anything is measured or deleted."""
    for number in rungs:
        parse_args = load_script(STAGES[number]).parse_args
        parse_args(without_flag(flags, "--compile-mode") if number < COMPILE_RUNG else flags)


def measure_machine(log_dir, settings):
    """Measure the matrix-product rates in a child and note them, with the flags, in machine.json."""
    child = subprocess.run(
        [sys.executable, "-m", "ladder.rates", "--device", device_of(settings["flags"])], cwd=ROOT, text=True,
        capture_output=True, check=False,
    )
    if child.returncode:
        raise UserError(f"the matrix-product rates could not be measured: {child.stderr.strip().splitlines()[-1]}")
    machine = {**json.loads(child.stdout), **settings}
    partial = log_dir / "machine.json.partial"
    partial.write_text(json.dumps(machine, indent=2) + "\n")
    partial.replace(log_dir / "machine.json")


def start_folder(log_dir, settings, resume):
    """Make the log folder ready: emptied of an older run's logs, or with --resume kept if its settings are the same."""
    machine = log_dir / "machine.json"
    logs = [*log_dir.glob("*.log"), *log_dir.glob("round_*/*.log")]
    logs = [path for path in logs if path.stem in ORDER]
    if not machine.exists():
        if logs:
            raise UserError(f"{log_dir} holds logs that this command did not write: give another folder with --logs")
        log_dir.mkdir(parents=True, exist_ok=True)
        return
    if resume:
        try:
            older = json.loads(machine.read_text())
            differing = [key for key, value in settings.items() if older.get(key) != value]
        except (ValueError, AttributeError):
            raise UserError(f"--resume: {machine} is damaged: run without --resume") from None
        if differing:
            key = differing[0]
            raise UserError(f"--resume: {log_dir} was made with {key} {older.get(key)}, not {settings[key]}: give the "
                            "same, or run without --resume")
        return
    for path in [*logs, machine]:
        path.unlink()


def steps_of(flags):
    match = re.search(r"--steps[ =](\d+)", " ".join(flags))
    return int(match[1]) if match else 50


def run_ladder(jobs, settings, log_dir, seconds, resume, console):
    """Run all jobs with a progress bar; returns their outcomes. Stops early at Ctrl-C, with what is finished.

    `settings` (flags, repeat, processes) are noted with the machine, and must be the same for --resume.
    """
    start_folder(log_dir, settings, resume)
    outcomes = []
    columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        steps = steps_of(settings["flags"])
        bar = progress.add_task("machine", total=len(jobs) * steps, what="matrix-product rates")
        if not (resume and (log_dir / "machine.json").exists()):
            measure_machine(log_dir, settings)
        for number, job in enumerate(jobs):
            progress.update(bar, description=f"{number + 1} of {len(jobs)} {job.name}", completed=number * steps,
                            what="starting")
            if resume and is_finished(job):
                outcomes.append(Outcome(job.name, "skipped", "finished before"))
                continue

            def show(line, number=number):
                if match := STEP_LINE.match(line):
                    done = number * steps + int(match[1])
                    progress.update(bar, completed=done, what=f"step {match[1]}/{steps} loss {match[2]} {match[3]} ms")

            outcome = run_job(job, seconds, show)
            outcomes.append(outcome)
            say = progress.console.print
            if outcome.status != "ok":
                say(f"{job.name}: {outcome.status}: {outcome.reason}", style="red", markup=False)
                continue
            run = read_log(job.log_dir / f"{job.name}.log")
            say(f"{job.name}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {run.median_ms:,.1f} ms/step")
            if outcome.reason:
                say(f"  {outcome.reason}", style="yellow", markup=False)
        progress.update(bar, completed=len(jobs) * steps, what="done")
    return outcomes


def largest_batch(number, flags, log_dir, seconds, say):
    """(B, tokens/sec at B, why the next one did not run) for the largest B that rung `number` can run."""
    flags = without_flag(without_flag(without_flag(flags, "-B"), "--batch-size"), "--steps")

    def attempt(B):
        more = ["-B", str(B), "--steps", "3"]
        if number >= GRAD_ACCUM_RUNG:  # one micro-step: more of them take more time, not more memory
            more += ["--total-batch", str(B * load_script(STAGES[number]).parse_args(flags).T)]
        job = Job(STAGES[number].name, command_for(number, [*flags, *more], log_dir), log_dir)
        outcome = run_job(job, seconds)
        say(f"{STAGES[number].name}: B={B} {outcome.status}")
        speed = read_log(log_dir / f"{job.name}.log").tokens_per_second if outcome.status == "ok" else None
        return speed, outcome

    best, speed, failed, why = 0, None, None, ""
    B = 1
    while failed is None or failed - best > max(1, best // 8):
        result, outcome = attempt(B)
        if result is None:
            failed, why = B, f"{outcome.status}: {outcome.reason}"
        else:
            best, speed = B, result
        B = best * 2 if failed is None else (best + failed) // 2
        if failed == 1:
            break
    return best, speed, why
