"""Run the rungs as a user would, in child processes, and measure the machine in the same run.

They run one after another, or several at once where only their losses count. A rung that fails, runs out of memory or
takes too long is reported, and the others still run.
Ctrl-C stops the children and everything they started; finished results are kept.
"""
import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock
import psutil
from rich.progress import Progress

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.machine_check import NO_TORCHRUN, compile_problem, nvidia_problem
from ladder.measure.processes import Job, Outcome, run_jobs
from ladder.records.logs import STEP_LINE, read_log
from ladder.rungs.list import BY_LABEL, BY_NAME, ROOT, load_script

# of torchrun: without an address it looks its host's name up, and hangs where that has none
ONE_MACHINE = ["--standalone", "--local-addr=127.0.0.1"]
QUICK_DATA = Path("data/bytes")


def quick(args):
    """The arguments of `run --quick`, whose text it prepares; flags that are given count.

    In a small model the output layer takes most of a step, and on most CPUs no rung makes it faster: so the tokens are
    bytes. On a long sequence attention takes most of the rest, which rung 6 makes faster on any machine.
    """
    if not QUICK_DATA.exists():
        prepare = [sys.executable, ROOT / "data" / "prepare.py", "--tokenizer", "bytes", "--out", QUICK_DATA]
        if subprocess.run(prepare).returncode:
            raise UserError("--quick: data/prepare.py could not prepare its text; see its message above")
    args.rungs = "0,5,6"
    args.flags = [*f"--model 2x4x128 -B 1 -T 4096 --steps 20 --data {QUICK_DATA}".split(), *args.flags]
    return args


def split_flags(flags, *names):
    """(the values of the flags called `names`, all other flags)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name)
    values, rest = parser.parse_known_args(flags)
    return [value for value in vars(values).values() if value is not None], rest


@cache
def defaults(rung):
    """{name: default} of the flags of a rung."""
    return vars(load_script(rung).parse_args([]))


def own_flags(rung, flags, log_dir):
    """`flags` as a rung's script takes them; a measurement neither finds nor leaves a checkpoint."""
    names = defaults(rung)
    if "compile_mode" not in names:
        _, flags = split_flags(flags, "--compile-mode")
    if "checkpoint_every" in names:
        flags = ["--checkpoint-every", "0", "--checkpoint-dir", str(log_dir / "checkpoints" / rung.name), *flags]
    return flags


def command_for(rung, flags, log_dir, processes=2, script=None):
    """The command line of a rung, or of a peer's `script` (words), which takes the rung's flags."""
    start = [sys.executable]
    if rung.torchrun:
        start += ["-m", "torch.distributed.run", *ONE_MACHINE, f"--nproc_per_node={processes}"]
    words = map(str, script or [rung.path])
    return [*start, *words, *own_flags(rung, flags, log_dir), "--log-dir", str(log_dir)]


def settings_of(rung, flags):
    """What a rung's script makes of the flags; it exits with an error if they are wrong."""
    return load_script(rung).parse_args(own_flags(rung, flags, Path()))


def eager_flags(rungs, flags, device, console):
    """`flags`, with --compile-mode none where torch cannot compile for the device; says so."""
    compiled = any("compile_mode" in defaults(rung) for rung in rungs)
    if not compiled or split_flags(flags, "--compile-mode")[0]:
        return flags
    problem = compile_problem(device)
    if problem is None:
        return flags
    console.print(f"rungs 5 and up get --compile-mode none: {problem}", soft_wrap=True)
    return [*flags, "--compile-mode", "none"]


def check_flags(rungs, flags):
    """The settings of the first rung, whose script checks the data, before anything is written."""
    problem = None if split_flags(flags, "--device")[0] == ["cpu"] else nvidia_problem()
    if problem:  # a CPU would be measured unasked
        raise UserError(f"--device: torch cannot use the NVIDIA GPU: {problem}; or --device cpu")
    if any(split_flags(flags, "--log-dir", "--save")[0]):
        raise UserError("--log-dir, --save: not allowed here; logs go to --logs, and no model is saved")
    settings = [settings_of(rung, flags) for rung in rungs][0]
    script = load_script(rungs[0])
    _, meta = script.load_tokens(settings.data, "train", settings.B * settings.T + 1)
    script.model_config(settings, meta["vocab_size"])
    return settings


def check_together(args, rungs):
    """Refuse flags of `run` that say different things, and what cannot start on Windows."""
    if sys.platform == "win32" and any(rung.torchrun for rung in rungs):
        raise UserError(f"--rungs {args.rungs}: torchrun {NO_TORCHRUN}")
    for flag, given in (("--peers", args.peers), ("--repeat", args.repeat > 1), ("--at-once", args.at_once > 1),
                        ("--logs", args.logs)):
        if given and args.max_batch:
            raise UserError(f"{flag}: not with --max-batch; leave it out")


def plan(rungs, flags, log_dir, repeat=1, peers=None, processes=2):
    """The jobs of each round; `peers` are of find_peers. Several, so that drift in machine speed affects all alike.

    Each round then has a random order, by its number, so that --resume plans the same.
    """
    scripts = [(rung.name, rung, None) for rung in rungs]
    scripts += [(name, BY_LABEL["10"], words) for name, words in (peers or {}).items()]  # each is another rung 10
    rounds = []
    for number in range(1, repeat + 1):
        folder = log_dir / f"round_{number}" if repeat > 1 else log_dir
        jobs = [Job(name, command_for(rung, flags, folder, processes, words), folder) for name, rung, words in scripts]
        if repeat > 1:
            random.Random(number).shuffle(jobs)
        rounds.append(jobs)
    return rounds


def compiles(job):
    """Whether there is something for torch to compile in a job; each peer is another rung 10."""
    rung = BY_NAME.get(job.name, BY_LABEL["10"])
    return "compile_mode" in defaults(rung) and split_flags(job.command, "--compile-mode")[0] != ["none"]


def is_finished(log):
    try:
        return read_log(log).complete
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
    """Measure the machine and write its rates, its names and `more` to folder/machine.json.

    If the file exists, only higher rates replace its own: a shared machine is not always at its best.
    """
    path = folder / "machine.json"
    measured = json.loads(run_module("ladder.measure.device_rates", "--device", device)) | more
    machine = json.loads(path.read_text(encoding="utf-8")) if path.exists() else measured
    for name, rate in measured["rates"].items():
        machine["rates"][name] = max(rate, machine["rates"].get(name, 0))
    machine["bytes_per_second"] = max(measured["bytes_per_second"], machine.get("bytes_per_second", 0))
    write_whole(path, json.dumps(machine, indent=2) + "\n")


def left_over(folder):
    """The id of a process that still writes logs there, of a run that was killed; None without one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            for flag, log_dir in itertools.pairwise(words):
                if flag == "--log-dir" and Path(process.cwd(), log_dir).resolve().is_relative_to(folder.resolve()):
                    return process.pid
    return None


@contextlib.contextmanager
def locked(folder, resume, flag="--logs"):
    """Make and lock the folder that `flag` names; UserError if it is in use, cannot be written to, or holds a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume and any(path.name != "lock" for path in folder.iterdir()):
            way = ", or --resume to continue the run in it" if flag == "--logs" else ""
            raise UserError(f"{flag} {folder}: is not empty; give a new folder{way}")
        lock = filelock.FileLock(folder / "lock").acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"{flag} {folder}: another run is using it; wait for its end, or give another") from None
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}; give a folder that can be written to") from None
    with lock:
        process = left_over(folder)
        if process:
            raise UserError(f"{flag} {folder}: a script of a killed run still writes there; wait for its end, or end "
                            f"process {process}")
        yield


@dataclass
class Runner:
    """Runs the jobs of one folder and records how each ended; as a context, it shows a progress bar."""

    device: str
    log_dir: Path
    seconds: float  # that a job may take
    console: object
    resume: bool = False  # skip what is finished
    n_jobs: int = 0  # how many there probably are
    outcomes: list = field(default_factory=list)

    def __enter__(self):
        self.progress = Progress(console=self.console, speed_estimate_period=3600)  # a job takes minutes
        self.bar = self.progress.add_task("")
        self.progress.start()
        return self

    def __exit__(self, *_):
        self.progress.stop()

    def failed(self):
        return [outcome for outcome in self.outcomes if outcome.status != "ok"]

    def measure_machine(self, **more):
        """Called before and after the jobs, since rates drift; `more` is added to machine.json."""
        self.progress.update(self.bar, description="the machine's matrix-product rates")
        write_machine(self.log_dir, self.device, **more)

    def run(self, jobs, at_once=1):
        """Run the jobs, `at_once` at a time; those that an earlier run has finished count as ok."""
        left = self.unfinished(jobs)
        self.outcomes += [Outcome(job.name, "ok") for job in jobs if job not in left]
        run_jobs(left, self.seconds, self.device, at_once, self.finish, self.show)

    def unfinished(self, jobs):
        """The jobs without those that an earlier run has finished."""
        return [job for job in jobs if not (self.resume and is_finished(job.log))]

    def compile_first(self, jobs, at_once):
        """Run the jobs for two steps, `at_once` at a time, so that torch's cache then has what they compile.

        How these runs end does not matter: the jobs themselves will tell.
        """
        self.progress.update(self.bar, description="two steps of each script, to compile it")
        with TemporaryDirectory(ignore_cleanup_errors=True) as name:
            more = ["--steps", "2", "--log-dir", name]  # of a flag given twice, the last counts
            short = [replace(job, command=[*job.command, *more], log_dir=Path(name))
                     for job in self.unfinished(jobs) if compiles(job)]
            run_jobs(short, self.seconds, self.device, at_once, lambda job, outcome: None)

    def show(self, running):
        """Show how many jobs have ended, and the last step of the newest one."""
        done = len(self.outcomes)
        self.n_jobs = max(self.n_jobs, done + len(running))
        for child in running[-1:]:
            match = STEP_LINE.match(child.lines[-1]) if child.lines else None
            step = f"step {match[1]} loss {match[2]} {match[3]} ms" if match else ""
            self.progress.update(self.bar, total=self.n_jobs, completed=done,
                                 description=f"{done + 1} of {self.n_jobs} {child.job.name} {step}")

    def finish(self, job, outcome):
        """Keep the outcome, and print one line about it."""
        say = self.progress.console.print
        self.outcomes.append(outcome)
        if outcome.status != "ok":
            say(f"{job.name}: {outcome.status}: {outcome.reason}", style="red")
            return
        run, name = read_log(job.log), (job.log_dir / job.name).relative_to(self.log_dir)
        say(f"{name}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {run.median_ms:,.1f} ms/step")
