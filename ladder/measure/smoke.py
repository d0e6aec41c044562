"""Does everything work on this machine? Every script for four steps of a small model, several at a time.

Also what scripts do only elsewhere or when asked: ranks, float16, the other place for the batches, no compilation, CUDA
graphs, resuming, sampling from and exporting the trained model. A trial that fails is shown and the others still run;
losses that must be equal are compared. The times mean nothing: the trials share the machine.
"""
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import distributions
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from ladder.files import write_whole
from ladder.measure.rates import describe, rung_10
from ladder.measure.runner import Job, defaults, locked, run_job
from ladder.count.memory import free_memory
from ladder.scripts.stages import BY_LABEL, ROOT, STAGES, load_script
from ladder.show.logs import STEP_LINE

STEPS, SECONDS = 4, 600  # of a trial: its training steps, the time that it may take (beside others, on slow cores)
SAME = 0.05  # nats: how close losses stay where only the place or the order of the arithmetic changes
PATCHES = {  # the function that a script asks about its device, and a different answer
    "float16": ("autocast_dtype", torch.float16),  # a T4's
    "pinned": ("free_memory", 0),
    "on-device": ("free_memory", math.inf),
}
LACKS = ("no effect", "not possible here", "no bfloat16", "has no DDP")  # in scripts' words
BROKEN = ("failed", "out of memory", "timed out")


@dataclass
class Trial(Job):
    """A command, and how it ended: "ok", "failed", "not here" (the machine lacks what it needs), …"""

    first: int = 0  # the first step that it must log; 0: it does not train
    like: str = ""  # the trial that must have the same losses
    within: float = SAME
    then: list = field(default_factory=list)  # trials that use the model that this one trains
    status: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    losses: dict = field(default_factory=dict)  # {step: loss}
    lacks: list = field(default_factory=list)  # what it did without, in its own words


def training(settings, scratch, label, how="", like="", within=SAME, **changes):
    """The trial of a rung as it is, or run as `how` says. `settings`: baseline.py's; `scratch`: for what it writes."""
    stage, name, on_cpu, B = BY_LABEL[label], f"{label}-{how}".strip("-"), settings.device == "cpu", 4
    ranks, T = (2, 64) if on_cpu else (1, 256)
    flags = dict(model=settings.model, device=settings.device, data=settings.data, B=B, T=T, steps=STEPS,
                 total_batch=2 * B * T, loss_chunk=T, recompute_blocks=1, val_every=2, val_sequences=2,
                 checkpoint_every=STEPS // 2,
                 float8_from=1, log_dir=scratch / name, checkpoint_dir=scratch / name, save=scratch / name / "model.pt")
    start = ["-m", "ladder.measure.smoke", how, label] if how in PATCHES else [str(stage.path)]
    if how == "torchrun":
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *start]
        flags["B"] = B // ranks  # a step has the same tokens as in one process
    words = [word for key, value in (flags | changes).items() if key in defaults(stage)
             for word in ("-" * min(len(key), 2) + key.replace("_", "-"), str(value))]
    return Trial(name, [sys.executable, *start, *words], scratch / name, first=1, like=like, within=within)


def resuming(trial):
    """The trial that resumes another one from its last checkpoint but one."""
    return Trial(f"{trial.name}-resume", [*trial.command, "--resume"], trial.log_dir, first=STEPS // 2 + 1,
                 like=trial.name)


def using(trial, device, exports):
    """The trials that use the model that another one has saved."""
    uses = {"sample": ["--device", device, "--max-new-tokens", "8"], "convert": [str(trial.log_dir / "converted")]}
    return [Trial(f"{trial.name}-{use}", [sys.executable, str(ROOT / f"{use}.py"), str(trial.log_dir / "model.pt"),
                                          *words], trial.log_dir)
            for use, words in uses.items() if use == "sample" or exports]


def own_text(settings, scratch):
    """docs/own_text.md in small: a trial that prepares a text in bytes, then those that train and use a model of it."""
    folder = scratch / "own-text"
    train = training(settings, scratch, "29", "own-text", data=folder / "data", model="2x2x64", compile_mode="none")
    words = {"data/prepare.py": ["--text", ROOT / "CONTRIBUTING.md", "--tokenizer", "bytes", "--out", folder / "data"],
             "evaluate.py": [train.log_dir / "model.pt", "--data", folder / "data", "--device", settings.device]}
    prepare, evaluate = (
        Trial(f"own-text-{Path(file).stem}", [sys.executable, str(ROOT / file), *map(str, flags)], folder)
        for file, flags in words.items())
    prepare.then += [train, *using(train, settings.device, exports=True), evaluate]
    return prepare


def plan(settings, scratch):
    """All trials for a device: each rung from the command line, then what scripts do elsewhere or when asked."""
    def train(label, *how, **changes):
        return training(settings, scratch, label, *how, **changes)

    device, trials = settings.device, [Trial("check", [sys.executable, "-m", "ladder", "check"], scratch / "check")]
    forms = {(stage.exports_to, stage.tied): stage for stage in STAGES}.values()  # of models: the last of each
    skips = rung_10.autocast_dtype(device) is torch.float16  # its scaler skips the first steps, so losses differ
    for stage in STAGES:
        same = SAME if stage.torchrun else stage.same_losses  # without torchrun it is the rung before
        same = None if skips and "autocast_dtype" in stage.may_change else same
        trial = train(stage.label, like=stage.before, within=same) if same else train(stage.label)
        trial.then += using(trial, device, stage.exports_to) if stage in forms else []
        trial.then += [resuming(trial)] if stage.label in ("24", "27") else []
        trials.append(trial)
    for stage in STAGES:
        if stage.torchrun or stage.label == "24" or stage.label in ("25", "29") and device == "cuda":
            trial = train(stage.label, "torchrun", like=stage.label)
            trial.then += [resuming(trial)] if stage.torchrun and "--checkpoint-dir" in trial.command else []
            trials.append(trial)
    trials += [train(label, "float16") for label in ("3", "10")] + [train("24", "float16", like="24")]
    trials += [train(label, "on-device" if device == "cpu" else "pinned", like=label) for label in ("24", "26")]
    trials += [train("24", "eager", like="24", compile_mode="none"), own_text(settings, scratch)]
    if device == "cuda":
        trials += [train("10", "graphs", like="10", compile_mode="reduce-overhead")]
    return trials


class Smoke:
    """Runs trials, several at a time, and reports in the terminal and in the folder `out` how each ended."""

    def __init__(self, trials, out, device, console):
        self.trials, self.out, self.device, self.console = trials, out, device, console
        self.n_trials = sum(1 + len(trial.then) for trial in trials)
        self.done, self.stopped, self.lock, self.started = [], threading.Event(), threading.RLock(), time.monotonic()

    def say(self, text):
        with self.lock, open(self.out / "summary.txt", "a", encoding="utf-8") as file:
            file.write(text + "\n")
            self.console.print(text, markup=False, soft_wrap=True)

    def run(self, workers):
        """Run all trials; KeyboardInterrupt stops them and everything that they have started."""
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(self.run_with_uses, trial) for trial in self.trials]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self.stopped.set()
                while not all([future.cancel() or future.done() for future in futures]):
                    for process in psutil.Process().children(recursive=True):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                    time.sleep(0.1)
                raise

    def run_with_uses(self, trial):
        """Run a trial, then those that use its model, and delete what it wrote."""
        self.run_one(trial)
        for each in trial.then:
            if trial.status == "ok":
                self.run_one(each)
            else:
                each.reason = f"{trial.name}: {trial.status}"
                self.show(each, [])
        shutil.rmtree(trial.log_dir, ignore_errors=True)

    def run_one(self, trial):
        if self.stopped.is_set():
            return
        trial.log_dir.mkdir(parents=True, exist_ok=True)
        if "--resume" in trial.command:
            newest = max(trial.log_dir.glob("step_*"), key=lambda path: path.name)
            shutil.rmtree(newest) if newest.is_dir() else newest.unlink()  # else nothing is left to do
        lines, started = [], time.monotonic()
        with open(self.out / f"{trial.name}.txt", "w", encoding="utf-8") as file:
            def keep(line):
                lines.append(line)
                print(line, end="", file=file, flush=True)

            outcome = run_job(trial, SECONDS, self.device, keep)
        trial.seconds = time.monotonic() - started
        lines = list(takewhile(lambda line: "failed (exitcode:" not in line, lines))  # torchrun's report says nothing
        judge(trial, outcome, lines)
        self.show(trial, lines)

    def show(self, trial, lines):
        """The line of a trial that has ended; if it is broken, also the end of its output."""
        if self.stopped.is_set():
            return
        with self.lock:
            self.done.append(trial)
            words = trial.reason
            if trial.status == "ok" and trial.losses:
                words = "loss " + " ".join(f"{loss:.3f}" for loss in trial.losses.values())
            count = f"{len(self.done):3}/{self.n_trials}"
            self.say(f"{count} {trial.name:24} {trial.status:8} {trial.seconds:4.0f} s  {words}".rstrip())
            for line in lines[-8:] if trial.status in BROKEN else []:
                self.say(f"        | {line.rstrip()}")

    def finish(self):
        """Say what failed, what disagrees and what the machine lacks; returns the exit code."""
        broken = [f"{trial.name}: {trial.reason}" for trial in self.done if trial.status in BROKEN]
        gaps, apart = compare(self.done)
        self.say(f"\n{len(self.done)} trials in {time.monotonic() - self.started:.0f} s, {len(broken)} failed.\n"
                 f"{len(gaps)} must have the same losses as another, {len(apart)} disagree; the largest difference is "
                 f"{max(gaps, default=0):.4f}.")
        lacks = dict.fromkeys(lack for trial in self.done for lack in trial.lacks)
        for title, found in (("failed", broken), ("disagrees", apart), ("not on this machine (no failure)", lacks)):
            for line in found:
                self.say(f"{title}: {line}")
        return 1 if broken or apart else 0


def judge(trial, outcome, lines):
    """Write into a trial how it ended."""
    trial.status, trial.reason = outcome.status, outcome.reason
    if outcome.status == "failed" and "rror" not in outcome.reason and lines:  # the end of torchrun's report
        trial.reason = lines[-1].strip()
    trial.losses = {int(found[1]): float(found[2]) for found in map(STEP_LINE.match, lines) if found}
    header = [part for line in lines if line.startswith("# ") for part in line.strip("# \n").split(" | ")]
    trial.lacks = [part for part in header if any(words in part for words in LACKS)]
    steps = list(range(trial.first, STEPS + 1)) if trial.first else []
    if trial.status == "ok" and list(trial.losses) != steps:
        trial.status, trial.reason = "failed", f"it logged the steps {list(trial.losses)}, not {steps}"
    refusal = trial.reason.split("; error: ")[0]  # each rank has said it
    if trial.status == "failed" and refusal.startswith("error: ") and any(words in refusal for words in LACKS):
        trial.status, trial.reason, trial.lacks = "not here", refusal, [refusal]


def compare(trials):
    """(how far each trial is from the one that it must match, a sentence about each that is too far off)."""
    by_name, gaps, apart = {trial.name: trial for trial in trials if trial.status == "ok"}, [], []
    for trial in by_name.values():
        if other := by_name.get(trial.like):
            gap, step = max((abs(loss - other.losses[step]), step) for step, loss in trial.losses.items())
            gaps.append(gap)
            if gap > trial.within:
                apart.append(f"{trial.name} and {other.name}: loss {trial.losses[step]:.3f} and "
                             f"{other.losses[step]:.3f} at step {step}, more than {trial.within} apart")
    return gaps, apart


def write_summary(path, trials, machine):
    """Write the machine, all versions and all trials as JSON, for whoever gets the folder."""
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    packages = {package.metadata["Name"]: package.version for package in distributions()}
    shown = ("name", "command", "status", "reason", "seconds", "losses", "lacks")
    found = {"machine": machine, "commit": git.stdout.strip(), "packages": packages,
             "trials": [{key: getattr(trial, key) for key in shown} for trial in trials]}
    write_whole(path, json.dumps(found, indent=1) + "\n")


def smoke(flags, out, console):
    """Try everything on this machine, into the new folder `out`; returns the exit code."""
    baseline, cores = load_script(BY_LABEL["0"]), os.cpu_count()
    settings = baseline.parse_settings(flags)
    if "--model" not in flags:
        settings.model = "tiny" if settings.device == "cpu" else "mini"
    baseline.open_tokens(settings.data, "train", 4096)  # prepared now, once
    workers = max(2, min(8, cores // 2))
    if settings.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        workers = int(max(1, min(workers, free_memory(settings.device) // 2e9)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, cores // workers)))
    with locked(out, resume=False, flag="--out"), TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        run = Smoke(plan(settings, Path(scratch)), out, settings.device, console)
        machine = describe(settings.device)
        run.say(f"{run.n_trials} trials on {machine['name']}, torch {machine['torch']}, {workers} at a time")
        try:
            run.run(workers)
            code = run.finish()
        except KeyboardInterrupt:
            run.say("stopped")
            code = 130
        write_summary(out / "summary.json", run.done, machine)
    console.print(f"all output is in {out}", markup=False)
    return code


def main(how, label, *flags):
    """Run a script that gets a different answer about its device: python -m ladder.measure.smoke float16 24 FLAGS..."""
    script, (name, answer) = load_script(BY_LABEL[label]), PATCHES[how]
    setattr(script, name, lambda device: answer)
    script.train(script.parse_settings(flags))


if __name__ == "__main__":
    main(*sys.argv[1:])
