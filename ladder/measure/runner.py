"""Run the rungs as a user would, in child processes, and measure the machine in the same run.

They run one after another, or several at once where only their losses count. A rung that fails, runs out of memory or
takes too long is reported, and the others still run.
Ctrl-C stops the children and everything they started; finished results are kept.
"""
import contextlib
import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import Progress

from ladder import formats
from ladder.errors import UserError
from ladder.measure.processes import Job, Outcome, run_jobs
from ladder.measure.run_folder import write_machine
from ladder.measure.script_flags import command_for, defaults, split_flags
from ladder.records.logs import STEP_LINE, read_log
from ladder.rungs.list import BY_LABEL, BY_NAME


def plan(rungs, flags, log_dir, repeat=1, peers=None, processes=2):
    """The jobs of each round; `peers` are of find_peers. Several, so that drift in machine speed affects all alike.

    Each round then has a random order, by its number, so that --resume plans the same.
    """
    scripts = [(rung.name, rung, None) for rung in rungs]
    scripts += [(name, BY_LABEL["10"], words) for name, words in (peers or {}).items()]  # each is another rung 10
    rounds = []
    for number in range(1, repeat + 1):
        folder = log_dir / f"round_{number}" if repeat > 1 else log_dir
        rounds.append([Job(name, command_for(rung, flags, folder, processes, script), folder)
                       for name, rung, script in scripts])
        if repeat > 1:
            random.Random(number).shuffle(rounds[-1])
    return rounds


def compiles(job):
    """Whether there is something for torch to compile in a job; each peer is another rung 10."""
    rung = BY_NAME.get(job.name, BY_LABEL["10"])
    return "compile_mode" in defaults(rung) and split_flags(job.command, "--compile-mode")[0] != ["none"]


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

    def run_rounds(self, rounds, at_once, **about):
        """Run the jobs of several rounds between two measurements of the machine, since rates drift.

        `at_once` of the scripts compile at once, before the first round; machine.json gets what `about` says.
        """
        with self:
            if not self.resume:
                self.measure_machine(**about)
            if at_once > 1:
                self.compile_first(rounds[0], at_once)
            for jobs in rounds:
                self.run(jobs)
            self.measure_machine()

    def measure_machine(self, **about):
        self.progress.update(self.bar, description="the machine's matrix-product rates")
        write_machine(self.log_dir, self.device, **about)

    def run(self, jobs, at_once=1):
        """Run the jobs, `at_once` at a time; those that an earlier run has finished count as ok."""
        left = [job for job in jobs if not self.is_finished(job)]
        self.outcomes += [Outcome(job.name, "ok") for job in jobs if job not in left]
        run_jobs(left, self.seconds, self.device, at_once, self.finish, self.show)

    def is_finished(self, job):
        """Whether an earlier run has finished it."""
        with contextlib.suppress(UserError):
            return self.resume and read_log(job.log).complete
        return False

    def compile_first(self, jobs, at_once):
        """Run the jobs for two steps, `at_once` at a time, so that torch's cache then has what they compile.

        How these runs end does not matter: the jobs themselves will tell.
        """
        variable = "TORCHINDUCTOR_COMPILE_THREADS"  # else each starts as many processes to compile as there are cores
        threads = {variable: os.environ.get(variable, str(max(1, os.cpu_count() // at_once)))}
        self.progress.update(self.bar, description="two steps of each script, to compile it")
        with TemporaryDirectory(ignore_cleanup_errors=True) as name:
            short = ["--steps", "2", "--log-dir", name]  # of a flag given twice, the last counts
            jobs = [replace(job, command=[*job.command, *short], log_dir=Path(name), env=job.env | threads)
                    for job in jobs if compiles(job) and not self.is_finished(job)]
            run_jobs(jobs, self.seconds, self.device, at_once, lambda job, outcome: None)

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
        try:
            run = read_log(job.log) if outcome.status == "ok" else None
        except UserError:
            outcome = replace(outcome, status="failed", reason=f"it wrote no step to {job.log}")
        self.outcomes.append(Outcome(job.name, "ok") if job.is_try else outcome)
        if outcome.status != "ok":
            say(f"{job.name}: {outcome.status}: {outcome.reason}", style="" if job.is_try else "red")
            return
        name = (job.log_dir / job.name).relative_to(self.log_dir)
        say(f"{name}: loss {formats.loss(run.losses[0])} -> {formats.loss(run.losses[-1])}, "
            f"{formats.ms(run.median_ms)} ms/step")
