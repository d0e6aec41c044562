"""Contests of which the losses are known: record_of() has their table, run_race() their logs, without training.

flag_of() and others read the jobs of run_race().
"""
import functools
import math
from types import SimpleNamespace
from unittest import mock

import pandas
from ladder.measure import contest, fairness, script_flags
from ladder.measure.learning_rates import SEED, rate_flags, tuning_seeds
from ladder.records.recipes import COLUMNS, Record, read_logs, write_csv
from ladder.rungs.list import BY_LABEL, BY_NAME, load_script

ADAMW, MUON, TRAPEZOID = (BY_LABEL[label] for label in ("gradient_checkpointing", "muon", "trapezoid_lr"))
ORDER = [ADAMW.name, MUON.name, "an_idea"]
STEPS = (10, 20, 30, 40)  # of the validations
MS = {MUON.name: 110.0}  # a step of the others takes 100
BEST = {ADAMW.name: (1.2e-3,), MUON.name: (1.2e-3, 4e-3), TRAPEZOID.name: (2.4e-3, 4e-3)}  # of the parabolas
VAL_LOSSES = {ADAMW.name: [6.1, 6.0, 5.9], MUON.name: [(7, 5, 4, 3.9), (8, 7, 5, 4), (8, 7, 6, 4)]}
HEADER = """# script: {0.name}.py
# model: tiny | parameters: 1,250,000
# device: cpu (2 threads)
# total batch: 64 tokens in 1 micro-steps
# batch: B=2 T=32 | steps: 40 | seed: {1}
# data: text
"""
FACTS = {"batch": "B=16 T=64", "data": "text (bytes tokens)"}
loaded = functools.cache(load_script)  # a race needs the flags of a script for each of its jobs


def record_of(losses, ms=None, steps=100):
    """A Record in which each script ends with these losses, a fall from 3.0, and takes these ms a step."""
    rows = []
    for name, ends in losses.items():
        whole = {"rung": name, "max_lr": 1e-3, "muon_lr": 2e-3, "parameters": 9e5, "ms": 100.0}
        for number, end in enumerate(ends):
            for step, loss in ((steps // 2, (3 + end) / 2), (steps, end)):
                rows.append(whole | {"part": "round", "round": number + 1, "seed": 1338 + number, "step": step,
                                     "tokens": 1024 * step, "val_loss": loss})
        for number, own in enumerate((ms or {}).get(name, [])):
            rows.append(whole | {"part": "timing", "round": number + 1, "seed": 1338, "step": 30, "tokens": 1,
                                 "ms": own})
    return Record(FACTS, pandas.DataFrame(rows, columns=[*COLUMNS]).astype({**COLUMNS, "val_loss": float}))


def flag_of(job, flag):
    """The last value of a flag in a job's command, the one that counts; None without."""
    places = [i for i, word in enumerate(job.command) if word == flag]
    return job.command[places[-1] + 1] if places else None


def write_log(job, val_losses, ms=100.0):
    """A log with these validation losses or, after others, this last one. Three seeds take 1, 4 and 9 GB."""
    val_losses = val_losses if isinstance(val_losses, tuple) else (9, 8, 7, val_losses)
    seed = int(flag_of(job, "--seed"))
    lines = [HEADER.format(job, seed)]
    for step in range(1, 41):
        lines.append(f"step : {step} | loss: 5.0 | dt: {ms} ms | tokens/sec: 1\n")
        if step in STEPS:
            lines.append(f"val : step {step} | loss: {val_losses[STEPS.index(step)]} | time: 0.1 s\n")
    lines.append(f"median : dt: {ms} ms | tokens/sec: 1 | peak memory: {(seed - SEED + 1) ** 2} GB | steps 6-40\n")
    job.log_dir.mkdir(parents=True, exist_ok=True)
    job.log.write_text("".join(lines))


def cut(path, n_lines):
    """Leave the first lines of a log, as a run that was killed does."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:n_lines]))


def rates_of(job):
    """The learning rates of a job, as its flags have them: AdamW's, and Muon's if it has Muon."""
    return tuple(flag_of(job, flag) for flag in rate_flags(BY_NAME[job.name]))


def run_race(folder, entries, seeds=2, best=BEST, slow=(), search_steps=None, tries=3, **val_losses):
    """Drive a race whose runs end the better, the closer log2 of each rate is to that of `best[name]`; its jobs.

    A seed of the search finds AdamW's rate the lower, the higher it is; their mean is `best`.
    `val_losses` are those of each round, or a function of (the loss of the search, the job) for all runs. In the
    folders `slow` the machine takes 1.2 times as long.
    """
    done = []

    def run(jobs, at_once=1):
        assert at_once == (1 if jobs and "timing" in jobs[0].log_dir.parts else 2)  # only the timings run alone
        for job in jobs:
            pairs = zip(rates_of(job), best[job.name], strict=True)
            end = 4 + sum(math.log2(float(rate) / middle) ** 2 for rate, middle in pairs)
            if part_of([job], "sweep"):
                middle = sum(tuning_seeds(seeds)) / seeds
                end += 0.2 * (int(flag_of(job, "--seed")) - middle) * math.log2(float(rates_of(job)[0]) / 3e-4)
            own = val_losses.get(job.name)
            if callable(own):
                end = own(end, job)
            elif own and job in part_of([job], "round"):
                end = own[int(job.log_dir.name.removeprefix("round_")) - 1]
            write_log(job, end, MS.get(job.name, 100.0) * (1.2 if {*slow} & {*job.log_dir.parts} else 1))
            done.append(job)

    words = ["--model", "tiny", "--steps", "40"]
    with mock.patch.object(fairness, "load_script", loaded), mock.patch.object(script_flags, "load_script", loaded):
        contest.Contest(entries, words, folder, seeds, SimpleNamespace(run=run), at_once=2, most_tries=tries,
                        search_steps=search_steps).hold()
    record, _ = read_logs(folder, [entry.name for entry in entries])
    write_csv(record, folder / "race.csv")
    return done


def part_of(jobs, part):
    """The jobs in the folders sweep, timing, or round."""
    return [job for job in jobs if part in job.log_dir.parts
            or part == "round" and job.log_dir.name.startswith(part) and "timing" not in job.log_dir.parts]


def searched(jobs, entry):
    return [rates_of(job) for job in part_of(jobs, "sweep") if job.name == entry.name]
