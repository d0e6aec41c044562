"""Does everything work here? Every script for four steps of a small model, several at a time.

Also what scripts do only elsewhere or when asked: ranks, float16, the other place for the batches, no compilation, CUDA
graphs, resuming, sampling from and exporting the trained model. A trial that fails is shown and the others still run;
losses that must be equal are compared. The times mean nothing: the trials share the machine.
"""
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ladder.count.memory import free_memory
from ladder.measure.device_rates import rung_10
from ladder.measure.machine_check import check_machine, compile_problem
from ladder.measure.processes import Job, run_jobs
from ladder.measure.runner import ONE_MACHINE, check_flags, defaults, locked, settings_of, split_flags
from ladder.records.logs import STEP_LINE
from ladder.rungs.list import BY_LABEL, ROOT, RUNGS, load_script

STEPS, SECONDS = 4, 600  # of a trial: its training steps, the time that it may take (beside others, on slow cores)
SAME = 0.05  # nats: how close losses stay where only the place or the order of the arithmetic changes


@dataclass
class Trial(Job):
    """A command, and how it ended: "ok", "failed", "not run", …"""

    after: Job | None = None  # the trial whose files it uses
    first: int = 0  # the first step that it must log; 0: what it logs is not looked at
    like: str = ""  # the trial that must have the same losses
    within: float = SAME
    status: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    losses: dict = field(default_factory=dict)  # {step: loss}


def training(settings, scratch, label, how="", like="", within=SAME, **changes):
    """The trial of a rung as it is, or run as `how` says. `settings`: baseline.py's; `scratch`: for what it writes."""
    rung, name = BY_LABEL[label], f"{label}-{how}" if how else label
    folder = scratch / name
    B, T = 4, 64 if settings.device == "cpu" else 256
    flags = {
        "model": settings.model, "device": settings.device, "data": settings.data, "B": B, "T": T, "steps": STEPS,
        "total_batch": 2 * B * T, "loss_chunk": T, "recompute_blocks": 1, "val_every": 2, "val_sequences": 2,
        "checkpoint_every": STEPS // 2, "compile_mode": settings.compile_mode, "float8_from": 1,
        "log_dir": folder, "checkpoint_dir": folder, "save": folder / "model.pt",
    }
    start = [str(rung.path)]
    if how == "float16":
        start = ["-m", "ladder.measure.trials", label]
    if how == "torchrun":
        ranks = 2 if settings.device == "cpu" else min(2, max(1, torch.cuda.device_count()))
        start = ["-m", "torch.distributed.run", *ONE_MACHINE, f"--nproc_per_node={ranks}", *start]
        flags["B"] = B // ranks  # a step has the same tokens as in one process
    command = [sys.executable, *start]
    for setting, value in (flags | changes).items():
        if setting in defaults(rung):
            flag = f"-{setting}" if len(setting) == 1 else f"--{setting.replace('_', '-')}"
            command += [flag, str(value)]
    return Trial(name, command, folder, first=1, like=like, within=within)


def resuming(trial):
    """The trial that resumes another one from its last checkpoint but one."""
    return Trial(f"{trial.name}-resume", [*trial.command, "--resume"], trial.log_dir, after=trial,
                 first=STEPS // 2 + 1, like=trial.name)


def script(trial, file, *words):
    """The trial of a script that uses what the training `trial` has made."""
    command = [sys.executable, str(ROOT / file), *map(str, words)]
    return Trial(f"{trial.name}-{Path(file).stem}", command, trial.log_dir, after=trial)


def using(trial, device, exports):
    """The trials that use the model that another one has saved."""
    model = trial.log_dir / "model.pt"
    uses = [script(trial, "sample.py", model, "--device", device, "--max-new-tokens", 8)]
    return uses + ([script(trial, "convert.py", model, trial.log_dir / "converted")] if exports else [])


def own_text(settings, scratch):
    """docs/own_text.md in small: documents are prepared in bytes, a model of them is trained, and used.

    `documents_apart` goes on from a model whose attention matters already: without its mask, the loss would differ.
    """
    device, data, text = settings.device, scratch / "own-text", scratch / "documents.jsonl"
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()  # a text that nobody edits
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines if line), encoding="utf-8")
    train = partial(training, settings, scratch, data=data, model="2x2x64", dropout=0)
    start = train("dropout", "own-text", steps=200, muon_lr=0.02, max_lr=0.01, compile_mode="none")
    start.first = 0  # more steps than are looked at
    start.after = prepared = script(start, "data/prepare.py", "--text", text, "--tokenizer", "bytes", "--out", data)
    prepared.after = None
    eager = train("documents_apart", "own-text", pretrained=start.log_dir / "model.pt", compile_mode="none")
    compiled = train("documents_apart", "documents", eager.name, 0.01, pretrained=start.log_dir / "model.pt")
    eager.after = compiled.after = start
    return [prepared, start, eager, *([compiled] if settings.compile_mode != "none" else []),
            *using(eager, device, exports=True),
            script(eager, "evaluate.py", eager.log_dir / "model.pt", "--data", data, "--device", device)]


def plan_trials(settings, scratch):
    """All trials for a device.

    Each rung runs from the command line, and as scripts run elsewhere or when asked: that, and what it is compared
    with, comes first, since it has run least often, and a smoke test may be cut short.
    """
    train, device = partial(training, settings, scratch), settings.device
    trials = own_text(settings, scratch)
    trials += [train("3", "float16"), train("10", "float16"), train("zero_init", "float16", like="zero_init"),
               train("zero_init", "eager", like="zero_init", compile_mode="none"),
               train("long_run", "float16", like="long_run")]
    if device == "cuda" and settings.compile_mode != "none":
        trials.append(train("10", "graphs", like="10", compile_mode="reduce-overhead"))
    for rung in RUNGS:
        same = SAME if rung.torchrun else rung.same_losses  # without torchrun it is the rung before
        if "autocast_dtype" in rung.may_change and rung_10.autocast_dtype(device) is torch.float16:
            same = None  # float16's scaler skips the first steps
        trial = train(rung.label, like=rung.start.label, within=same) if same else train(rung.label)
        trials.append(trial)
        if rung in {(other.exports_to, other.tied): other for other in RUNGS}.values():  # the last of its kind
            trials += using(trial, device, rung.exports_to)
        if rung.label == "long_run":
            trials.append(resuming(trial))
        takes_ranks = rung.torchrun or rung.label == "long_run"
        if takes_ranks and device != "mps" and sys.platform != "win32":  # which have no DDP, no torchrun
            ranks = train(rung.label, "torchrun", like=rung.label)
            trials.append(ranks)
            if rung.torchrun and "--checkpoint-dir" in ranks.command:
                trials.append(resuming(ranks))
    likes = {trial.like for trial in trials}
    return sorted(trials, key=lambda trial: (trial.name not in likes, trial.name in BY_LABEL))


def prepare(trial):
    """Make a trial's folder; delete the newest checkpoint of what it resumes, else nothing is left to do."""
    trial.log_dir.mkdir(parents=True, exist_ok=True)
    if "--resume" in trial.command:
        newest = max(trial.log_dir.glob("step_*"), key=lambda path: path.name)
        shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    return trial


def judge(trial, outcome):
    """Write into a trial how it ended."""
    trial.status, trial.reason, trial.seconds = outcome.status, outcome.reason, outcome.seconds
    found = filter(None, map(STEP_LINE.match, outcome.lines))
    trial.losses = {int(step[1]): float(step[2]) for step in found}
    steps = list(range(trial.first, STEPS + 1))
    if trial.status == "ok" and trial.first and list(trial.losses) != steps:
        trial.status, trial.reason = "failed", f"it logged the steps {list(trial.losses)}, not {steps}"


def run_trials(trials, workers, out, device, say):
    """Run all trials, each after the one that it needs is ok. Their output goes into the folder `out`."""
    def ended(trial, outcome):
        judge(trial, outcome)
        (out / f"{trial.name}.txt").write_text("\n".join([*outcome.lines, ""]), encoding="utf-8")
        losses = "loss " + " ".join(f"{loss:.3f}" for loss in trial.losses.values()) if trial.first else ""
        n_done = sum(one.status != "not run" for one in trials)
        say(f"{n_done:3}/{len(trials)} {trial.name:24} {trial.status:8} {trial.seconds:4.0f} s  "
            f"{trial.reason or losses}".rstrip())

    while True:
        waiting = [trial for trial in trials if trial.status == "not run"]
        ready = [trial for trial in waiting if trial.after is None or trial.after.status == "ok"]
        if not ready:
            break
        run_jobs(list(map(prepare, ready)), SECONDS, device, workers, ended)
        left = [trial for trial in trials if trial.status == "not run"]
        needed = {trial.log_dir for trial in left} | {trial.after.log_dir for trial in left if trial.after}
        for folder in {trial.log_dir for trial in trials} - needed:
            shutil.rmtree(folder, ignore_errors=True)
    for trial in waiting:
        say(f"        {trial.name:24} not run: {trial.after.name} failed")


def summarize(trials, seconds, say):
    """Say what failed and what disagrees; whether anything did."""
    trials = [trial for trial in trials if trial.status != "not run"]
    failed = [f"failed: {trial.name}: {trial.reason}" for trial in trials if trial.status != "ok"]
    by_name = {trial.name: trial for trial in trials if trial.status == "ok"}
    largest, disagree = [], []
    for trial in [trial for trial in by_name.values() if trial.like in by_name]:
        other = by_name[trial.like]
        gaps = {step: abs(loss - other.losses[step]) for step, loss in trial.losses.items()}
        step = max(gaps, key=gaps.get)
        largest.append(gaps[step])
        if gaps[step] > trial.within:
            disagree.append(f"disagrees: {trial.name} and {other.name}: loss {trial.losses[step]:.3f} and "
                            f"{other.losses[step]:.3f} at step {step}, more than {trial.within} apart")
    say(f"\n{len(trials)} trials in {seconds:.0f} s, {len(failed)} failed.\n{len(largest)} must have the same losses "
        f"as another, {len(disagree)} disagree; the largest difference is {max(largest, default=0):.4f}.")
    for problem in [*failed, *disagree]:
        say(problem)
    return bool(failed or disagree)


def share_cores(device):
    """How many trials run at once; tells them, by the environment, how many cores each may use."""
    workers = max(2, min(8, os.cpu_count() // 2))
    if device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        workers = int(max(1, min(workers, free_memory(device) // 2e9)))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, os.cpu_count() // workers)))
    return workers


def smoke(flags, out, console):
    """Try everything on this machine, into the new folder `out`; returns the exit code."""
    if not split_flags(flags, "--model")[0]:
        flags = [*flags, "--model", "tiny" if settings_of(BY_LABEL["0"], flags).device == "cpu" else "mini"]
    settings = check_flags([BY_LABEL["0"]], flags)  # prepares the data now, once
    settings.compile_mode = "none" if compile_problem(settings.device) else "default"
    device, workers = settings.device, share_cores(settings.device)
    started = time.monotonic()
    say, console.record = partial(console.print, soft_wrap=True), True
    with locked(out, resume=False, flag="--out"), TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for finding in check_machine(device)[0]:
            say(f"{finding.mark} {finding.what}: {finding.detail}")
        trials = plan_trials(settings, Path(scratch))
        say(f"\n{len(trials)} trials, {workers} at a time")
        stopped = False
        try:
            run_trials(trials, workers, out, device, say)
        except KeyboardInterrupt:
            say("stopped")
            stopped = True
        failed = summarize(trials, time.monotonic() - started, say)
        console.save_text(out / "summary.txt")
        console.record = False
    console.print(f"all output is in {out}")
    return 130 if stopped else failed


def run_in_float16(label, *flags):
    """Run a script as on a T4: python -m ladder.measure.trials zero_init FLAGS..."""
    script = load_script(BY_LABEL[label])
    script.autocast_dtype = lambda device: torch.float16
    script.train(script.parse_args(flags))


if __name__ == "__main__":
    run_in_float16(*sys.argv[1:])
