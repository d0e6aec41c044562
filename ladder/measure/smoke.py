"""`python -m ladder smoke`: does everything work here? Every script for four steps of a small model, several at a time.

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
from ladder.files import new_folder
from ladder.measure.check import check_machine, compile_problem
from ladder.measure.jobs import Job, run_jobs
from ladder.measure.rates import rung_10
from ladder.measure.runner import check_flags, defaults, locked, settings_of, split_flags
from ladder.rungs.list import BY_LABEL, ROOT, RUNGS, load_script
from ladder.show.logs import STEP_LINE

STEPS, SECONDS = 4, 600  # of a trial: its training steps, the time that it may take (beside others, on slow cores)
SAME = 0.05  # nats: how close losses stay where only the place or the order of the arithmetic changes


@dataclass
class Trial(Job):
    """A command, and how it ended: "ok", "failed", "not run", …"""

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
        start = ["-m", "ladder.measure.smoke", label]
    if how == "torchrun":
        ranks = 2 if settings.device == "cpu" else min(2, max(1, torch.cuda.device_count()))
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *start]
        flags["B"] = B // ranks  # a step has the same tokens as in one process
    command = [sys.executable, *start]
    for setting, value in (flags | changes).items():
        if setting in defaults(rung):
            flag = f"-{setting}" if len(setting) == 1 else f"--{setting.replace('_', '-')}"
            command += [flag, str(value)]
    return Trial(name, command, folder, first=1, like=like, within=within)


def resuming(trial):
    """The trial that resumes another one from its last checkpoint but one."""
    return Trial(f"{trial.name}-resume", [*trial.command, "--resume"], trial.log_dir, first=STEPS // 2 + 1,
                 like=trial.name)


def script(trial, file, *words):
    """The trial of a script that does not train, beside the training `trial`."""
    return Trial(f"{trial.name}-{Path(file).stem}", [sys.executable, str(ROOT / file), *map(str, words)], trial.log_dir)


def using(trial, device, exports):
    """The trials that use the model that another one has saved."""
    model = trial.log_dir / "model.pt"
    uses = [script(trial, "sample.py", model, "--device", device, "--max-new-tokens", 8)]
    return uses + ([script(trial, "convert.py", model, trial.log_dir / "converted")] if exports else [])


def own_text(settings, scratch):
    """docs/own_text.md in small: documents are prepared in bytes, a model of them is trained, and used.

    Rung 29 goes on from a model whose attention matters already: without its mask, the loss would differ.
    """
    device, data, text = settings.device, scratch / "own-text", scratch / "documents.jsonl"
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()  # a text that nobody edits
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines if line), encoding="utf-8")
    train = partial(training, settings, scratch, data=data, model="2x2x64", dropout=0)
    start = train("28", "own-text", steps=200, muon_lr=0.02, max_lr=0.01, compile_mode="none")
    start.first = 0  # more steps than are looked at
    eager = train("29", "own-text", pretrained=start.log_dir / "model.pt", compile_mode="none")
    compiled = train("29", "documents", eager.name, 0.01, pretrained=start.log_dir / "model.pt")
    return [script(eager, "data/prepare.py", "--text", text, "--tokenizer", "bytes", "--out", data), start, eager,
            *([compiled] if settings.compile_mode != "none" else []), *using(eager, device, exports=True),
            script(eager, "evaluate.py", eager.log_dir / "model.pt", "--data", data, "--device", device)]


def rung_chain(train, rung, device):
    """A rung from its command line; what uses its model, for the last rung of each kind of model; one resumes."""
    same = SAME if rung.torchrun else rung.same_losses  # without torchrun it is the rung before
    if "autocast_dtype" in rung.may_change and rung_10.autocast_dtype(device) is torch.float16:
        same = None  # float16's scaler skips the first steps
    trial = train(rung.label, like=rung.start.label, within=same) if same else train(rung.label)
    chain = [trial]
    if rung in {(other.exports_to, other.tied): other for other in RUNGS}.values():
        chain += using(trial, device, rung.exports_to)
    if rung.label == "long_run":
        chain.append(resuming(trial))
    return chain


def torchrun_chains(train, device):
    """The rungs that start as several ranks: none where torch has no DDP, or no torchrun."""
    if device == "mps" or sys.platform == "win32":
        return
    for rung in RUNGS:
        if not rung.torchrun and rung.label != "long_run":
            continue
        trial = train(rung.label, "torchrun", like=rung.label)
        resumes = rung.torchrun and "--checkpoint-dir" in trial.command
        yield [trial, resuming(trial)] if resumes else [trial]


def plan(settings, scratch):
    """All trials for a device, in lists: those of one list use the files of its first.

    Each rung runs from the command line, and as scripts run elsewhere or when asked: that, and what it is compared
    with, comes first, since it has run least often, and a smoke test may be cut short.
    """
    train, device = partial(training, settings, scratch), settings.device
    rungs = [rung_chain(train, rung, device) for rung in RUNGS]
    chains = [own_text(settings, scratch), *torchrun_chains(train, device)]
    chains += [
        [train("3", "float16")], [train("10", "float16")], [train("24", "float16", like="24")],
        [train("24", "eager", like="24", compile_mode="none")],
        [train("long_run", "float16", like="long_run")],
    ]
    if device == "cuda" and settings.compile_mode != "none":
        chains.append([train("10", "graphs", like="10", compile_mode="reduce-overhead")])
    likes = {trial.like for chain in chains for trial in chain}
    return sorted([*chains, *rungs], key=lambda chain: (chain[0].name not in likes, chain[0].name in BY_LABEL))


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


def run_chains(chains, workers, out, device, say, done):
    """Run lists of trials, the later ones of a list only if its first is ok; `done` gets them as they end.

    Their output goes into the folder `out`, and what else they wrote is deleted.
    """
    chain_of = {trial.name: chain for chain in chains for trial in chain}
    jobs = [prepare(chain[0]) for chain in chains]

    def ended(trial, outcome):
        judge(trial, outcome)
        (out / f"{trial.name}.txt").write_text("\n".join([*outcome.lines, ""]), encoding="utf-8")
        chain = chain_of[trial.name]
        rest = chain[chain.index(trial) + 1 :]
        if chain[0].status == "ok" and rest:
            jobs.insert(0, prepare(rest[0]))
            rest = []
        else:
            shutil.rmtree(trial.log_dir, ignore_errors=True)
        for one in [trial, *rest]:  # the rest does not run
            done.append(one)
            losses = "loss " + " ".join(f"{loss:.3f}" for loss in one.losses.values()) if one.first else ""
            say(f"{len(done):3}/{len(chain_of)} {one.name:24} {one.status:8} {one.seconds:4.0f} s  "
                f"{one.reason or losses}".rstrip())

    run_jobs(jobs, SECONDS, device, workers, ended)


def summarize(trials, seconds, say):
    """Say what failed and what disagrees; whether anything did."""
    failed = [f"failed: {trial.name}: {trial.reason}" for trial in trials if trial.status not in ("ok", "not run")]
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
    started, done = time.monotonic(), []
    say, console.record = partial(console.print, soft_wrap=True), True
    with locked(out, resume=False, flag="--out"), TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for finding in check_machine(device)[0]:
            say(f"{finding.mark} {finding.what}: {finding.detail}")
        chains = plan(settings, Path(scratch))
        say(f"\n{sum(map(len, chains))} trials, {workers} at a time")
        stopped = False
        try:
            run_chains(chains, workers, out, device, say, done)
        except KeyboardInterrupt:
            say("stopped")
            stopped = True
        failed = summarize(done, time.monotonic() - started, say)
        console.save_text(out / "summary.txt")
        console.record = False
    console.print(f"all output is in {out}")
    return 130 if stopped else failed


def add_flags(parser):
    flag = parser.add_argument
    flag("--device", help="(default: the accelerator if there is one)")
    flag("--model", help="(default: mini, on a CPU tiny)")
    flag("--data", help="(default: data/tokens, prepared if it is not there)")
    flag("--out", type=Path, metavar="FOLDER", help="a new folder (default: logs/smoke/DATE_TIME)")


def main(args, console):
    given = {"device": args.device, "model": args.model, "data": args.data}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    return smoke(flags, args.out or new_folder("logs/smoke"), console)


def run_in_float16(label, *flags):
    """Run a script as on a T4: python -m ladder.measure.smoke 24 FLAGS..."""
    script = load_script(BY_LABEL[label])
    script.autocast_dtype = lambda device: torch.float16
    script.train(script.parse_args(flags))


if __name__ == "__main__":
    run_in_float16(*sys.argv[1:])
