"""All that a machine can say about the ladder in a given time, the most important first.

The folders that a survey leaves can be committed as they are, in logs/reference/.
"""
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder.errors import UserError
from ladder.measure.runner import (
    check_flags,
    largest_batch,
    locked,
    parse_rungs,
    plan,
    run_ladder,
    run_module,
    split_flags,
    write_machine,
)
from ladder.measure.step_profile import profile_ladder
from ladder.scripts.memory import RUN_BY_DEFAULT, largest_fitting, recommend
from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import has_steps

ROUNDS = 3
JOB_SECONDS = 600
SHORT = 60  # minutes; in a shorter survey a CPU gets T=256, since at T=1024 its steps take seconds
ALIASES = {"-B": "--batch-size", "-T": "--seq-len"}


def with_defaults(flags, minutes):
    """`flags`, and what they leave open of the model, B, T and steps, chosen for the hungriest rung and the time."""
    if split_flags(flags, "--compile-mode", "--pretrained")[0]:
        raise UserError("--compile-mode, --pretrained: not for a survey; leave them out")
    settings = check_flags([BY_LABEL["10"]], flags)
    on_cpu, free = settings.device == "cpu", int(run_module("ladder.scripts.memory", settings.device))
    model, _, T = recommend(free, accelerator=not on_cpu)
    model = settings.model if "--model" in flags else model
    T = settings.T if {"-T", "--seq-len"} & set(flags) else min(T, 256) if on_cpu and minutes < SHORT else T
    B = 1 if on_cpu else max(1, min(64, largest_fitting(model, T, RUN_BY_DEFAULT, 0.8 * free)))
    chosen = {"--model": model, "-B": 2 ** (B.bit_length() - 1), "-T": T, "--steps": 5 if on_cpu else 30}
    given = {flag for flag in chosen if split_flags(flags, flag, *([ALIASES[flag]] if flag in ALIASES else []))[0]}
    return [*flags, *(str(word) for flag in chosen.keys() - given for word in (flag, chosen[flag]))]


def survey(minutes, out, flags, console):
    """Survey this machine for `minutes`, into folders in the new folder `out`; returns those that hold logs."""
    deadline = time.monotonic() + 60 * minutes
    flags = with_defaults(flags, minutes)
    ladder, beyond, rung_10 = parse_rungs("0-10"), parse_rungs("11-16"), BY_LABEL["10"]
    settings = check_flags([*ladder, *beyond], flags)
    unsized = split_flags(flags, "--steps")[1]

    def left():
        return deadline - time.monotonic()

    def run(jobs, folder):
        run_ladder(jobs, len(jobs), settings, None, folder, JOB_SECONDS, True, console, deadline)

    def run_beside(stages, what, more):
        folder = out / f"{name}_{what}"
        folder.mkdir()
        (folder / "machine.json").write_text((main / "machine.json").read_text())
        run(plan(stages, [*unsized, *more], folder), folder)

    def largest_batches():
        found = []
        for stage in parse_rungs("0,5,6,10"):
            with TemporaryDirectory() as scratch:  # its logs have other batches
                B, speed, why = largest_batch(stage, unsized, Path(scratch), left(), 1, console.print)
            if left() < 1:
                break  # it was the end of the survey that stopped the search
            found.append({"rung": stage.name, "B": B, "tokens_per_second": speed, "stopped_by": why})
        (main / "largest_batch.json").write_text(json.dumps(found, indent=1) + "\n")

    with locked(out, resume=False, flag="--out"):
        scratch = out / "machine"
        scratch.mkdir()
        write_machine(scratch, settings.device)
        device = json.loads((scratch / "machine.json").read_text())["name"]
        name = re.sub(r"\W+", "_", device.lower()).strip("_")
        main = scratch.rename(out / f"{name}_B{settings.B}_T{settings.T}")
        check = subprocess.run([sys.executable, "-m", "ladder", "check"], text=True, capture_output=True, check=False)
        (out / "check.txt").write_text(check.stdout, encoding="utf-8")
        console.print(check.stdout, markup=False)
        jobs = plan(ladder, flags, main, ROUNDS, peers=True)
        first = len(jobs) // ROUNDS
        parts = {
            "the ladder and transformers' GPT-2, first round": lambda: run(jobs[:first], main),
            "where the time of a step goes": lambda: profile_ladder(ladder, unsized, main, console, deadline=deadline),
            "the ladder, two more rounds": lambda: run(jobs[first:], main),
            "the largest batch": largest_batches,
            "the rungs beyond": lambda: run_beside(
                beyond, "beyond", ["--steps", "8", "--total-batch", str(4 * settings.B * settings.T)]),
            "CUDA graphs": lambda: run_beside(
                [rung_10], "cuda_graphs", ["--steps", "30", "--compile-mode", "reduce-overhead"]),
        }
        for title, work in parts.items():
            if settings.device == "cpu" and title in ("the largest batch", "CUDA graphs"):
                continue  # a larger batch only makes a longer step there
            if left() < 1:
                break
            console.print(f"{title}: {left() / 60:.1f} minutes left", style="bold", markup=False)
            try:
                work()
            except KeyboardInterrupt:
                console.print("stopped; what is finished stays")
                break
    for folder in [path for path in out.iterdir() if path.is_dir() and not has_steps(path)]:
        shutil.rmtree(folder)  # nothing came of it
    return sorted(path for path in out.iterdir() if path.is_dir())
