"""Measure as much of a machine as a given time allows, the most important first.

The folders that a survey writes can be committed to logs/reference/ as they are.
"""
import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from ladder.count.memory import RUN_BY_DEFAULT, largest_fitting, recommend
from ladder.errors import UserError
from ladder.measure.max_batch import largest_batch
from ladder.measure.runner import Runner, check_flags, locked, plan, run_module, settings_of, split_flags, write_machine
from ladder.measure.step_profile import profile_ladder
from ladder.scripts.choose import parse_rungs
from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import has_steps

LADDER, BEYOND = parse_rungs("0-10"), parse_rungs("11-16")
ROUNDS = 3
JOB_SECONDS = 600
SHORT = 60  # minutes; in a shorter survey a CPU gets T=256, since at T=1024 its steps take seconds
GPU_STEPS = 60  # half of them warm up, and a GPU needs 3 s for that


def with_defaults(flags, minutes):
    """`flags`, after others that choose model, B, T and steps for the available memory and time unless given."""
    if split_flags(flags, "--compile-mode", "--pretrained")[0]:
        raise UserError("--compile-mode, --pretrained: not for a survey; leave them out")
    rung_10 = BY_LABEL["10"]
    device = check_flags([rung_10], flags).device
    on_cpu, free = device == "cpu", int(run_module("ladder.count.memory", device))
    model, _, T = recommend(free, accelerator=not on_cpu)
    T = min(T, 256) if on_cpu and minutes < SHORT else T
    flags = ["--model", model, "-T", str(T), "--steps", str(5 if on_cpu else GPU_STEPS), *flags]
    settings = settings_of(rung_10, flags)
    B = 1 if on_cpu else largest_fitting(settings.model, settings.T, RUN_BY_DEFAULT, 0.8 * free)
    return ["-B", str(2 ** (max(1, min(64, B)).bit_length() - 1)), *flags]


@dataclass
class Survey:
    """What the parts of a survey have in common."""

    flags: list  # but for --steps, which some parts set themselves
    main: Path  # the folder of the ladder
    settings: object  # of its first rung
    deadline: float  # of time.monotonic()
    console: object

    def left(self):
        return self.deadline - time.monotonic()

    def run(self, jobs, folder):
        with Runner(self.settings, folder, JOB_SECONDS, self.console, True, self.deadline, len(jobs)) as runner:
            runner.run(jobs)
            runner.measure_machine()

    def run_apart(self, stages, what, steps, *more):
        """Run rungs that are not comparable with the ladder, in a separate folder."""
        folder = self.main.parent / f"{self.main.name.rpartition('_B')[0]}_{what}"
        folder.mkdir()
        shutil.copy(self.main / "machine.json", folder)
        self.run(plan(stages, [*self.flags, "--steps", str(steps), *more], folder), folder)

    def profile(self):
        rounds = ROUNDS if self.left() > 60 * SHORT / 2 else 1
        profile_ladder(LADDER, self.flags, self.settings, self.main, self.console, rounds, self.deadline)

    def largest_batches(self):
        found = []
        for stage in parse_rungs("0,5,6,10"):
            B, speed, why = largest_batch(stage, self.flags, JOB_SECONDS, 1, self.console.print, self.deadline)
            if self.left() < 1:
                break  # the end of the survey cut this search short
            found.append({"rung": stage.name, "B": B, "tokens_per_second": speed, "stopped_by": why})
        (self.main / "largest_batch.json").write_text(json.dumps(found, indent=1) + "\n")

    def parts(self):
        """Yields (title, function, its arguments) for what this device can do, the most important first."""
        device = self.settings.device
        jobs = plan(LADDER, [*self.flags, "--steps", str(self.settings.steps)], self.main, ROUNDS, peers=True)
        n = len(jobs) // ROUNDS
        yield "the ladder and transformers' GPT-2, first round", self.run, jobs[:n], self.main
        if device != "mps":  # where torch.profiler sees nothing
            yield "where the time of a step goes", self.profile
        yield "the ladder, two more rounds", self.run, jobs[n:], self.main
        if device != "cpu":  # where a larger batch only makes a longer step
            yield "the largest batch", self.largest_batches
        tokens = str(4 * self.settings.B * self.settings.T)
        yield "the rungs beyond", self.run_apart, BEYOND, "beyond", 8, "--total-batch", tokens
        if device == "cuda":
            graphs = ("--compile-mode", "reduce-overhead")
            yield "CUDA graphs", self.run_apart, [BY_LABEL["10"]], "cuda_graphs", GPU_STEPS, *graphs


def name_machine(out, settings, console):
    """Describe the machine in out/machine and out/check.txt; returns its name, for use in folder names."""
    scratch = out / "machine"
    scratch.mkdir()
    write_machine(scratch, settings.device)
    check = run_module("ladder", "check")
    (out / "check.txt").write_text(check, encoding="utf-8")
    console.print(check, markup=False)
    device = json.loads((scratch / "machine.json").read_text())["name"]
    return re.sub(r"\W+", "_", device.lower()).strip("_")


def survey(minutes, out, flags, console):
    """Survey this machine for `minutes`, into folders in the new folder `out`; returns those that hold logs."""
    deadline = time.monotonic() + 60 * minutes
    flags = with_defaults(flags, minutes)
    settings = check_flags([*LADDER, *BEYOND], flags)
    with locked(out, resume=False, flag="--out"):
        main = out / f"{name_machine(out, settings, console)}_B{settings.B}_T{settings.T}"
        (out / "machine").rename(main)
        this = Survey(split_flags(flags, "--steps")[1], main, settings, deadline, console)
        try:
            for title, work, *words in this.parts():
                if this.left() < 1:
                    break
                console.print(f"{title}: {this.left() / 60:.1f} minutes left", style="bold", markup=False)
                work(*words)
        except KeyboardInterrupt:
            console.print("stopped; finished results are kept")
    for folder in [path for path in out.iterdir() if path.is_dir() and not has_steps(path)]:
        shutil.rmtree(folder)  # nothing was measured
    return sorted(path for path in out.iterdir() if path.is_dir())
