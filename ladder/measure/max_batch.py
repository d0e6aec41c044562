"""The largest batch of a rung: where the memory model says, and from there by trying; or what the model says alone."""
import tempfile
from pathlib import Path

from ladder.count.memory import largest_fitting
from ladder.errors import UserError
from ladder.measure.processes import MEMORY_SHARE, Job, run_job, run_module
from ladder.measure.script_flags import command_for, settings_of, split_flags
from ladder.records.logs import read_log

ENOUGH = 16  # sequences in a batch where no -B is given: what the tables of GPUs have


def fit_batch(rungs, flags, settings, console):
    """(the rungs that fit into a GPU's memory, ["-B", the largest that fits them all]); says so.

    Where a -B is given, and on a CPU, where a larger one only makes a step longer, all rungs and [].
    """
    if settings.device == "cpu" or split_flags(flags, "-B", "--batch-size")[0]:
        return rungs, []
    free = int(run_module("ladder.count.memory", settings.device))
    largest = {rung: largest_fitting(settings.model, settings.T, [rung.label], MEMORY_SHARE * free) for rung in rungs}
    fit = [rung for rung in rungs if largest[rung]]
    left_out = ", ".join(rung.called for rung in rungs if rung not in fit)
    if left_out:
        console.print(f"left out: {left_out}: -B 1 does not fit into {free / 1e9:.1f} GB of free memory",
                      soft_wrap=True)
    if not fit:
        raise UserError(f"-T {settings.T}: no rung fits into the memory; give a smaller -T or --model")
    B = str(min(ENOUGH, *(largest[rung] for rung in fit)))
    console.print(f"-B {B}: the largest that fits every rung, {ENOUGH} at most; -B sets another", soft_wrap=True)
    return fit, ["-B", B]


def largest_batch(rung, flags, seconds, processes, console):
    """(largest B per process, tokens/sec at that B, why the next one did not run) of a rung.

    The search starts at the B that the memory model predicts, since every B costs a compilation. An attempt may take
    `seconds`.
    """
    settings = settings_of(rung, flags)
    _, flags = split_flags(flags, "-B", "--batch-size", "--steps", "--total-batch")
    ranks = processes if rung.torchrun else 1
    shares = ranks if settings.device == "cpu" else 1  # how many ranks share the memory
    available = MEMORY_SHARE * int(run_module("ladder.count.memory", settings.device)) / shares
    B = max(1, largest_fitting(settings.model, settings.T, [rung.label], available))
    best, speed, failed, why = 0, None, None, ""
    while failed is None or failed - best > max(1, best // 8):
        size = ["-B", str(B), "--steps", "3"]
        if hasattr(settings, "total_batch"):  # one micro-step: more of them take more time, not more memory
            size += ["--total-batch", str(B * settings.T * ranks)]
        with tempfile.TemporaryDirectory() as folder:
            job = Job(rung.name, command_for(rung, [*flags, *size], Path(folder), processes), Path(folder))
            outcome = run_job(job, seconds, settings.device)
            console.print(f"{rung.name}: B={B} {outcome.status}", style="dim")
            if outcome.status == "ok":
                best, speed = B, read_log(job.log).tokens_per_second
            else:
                failed, why = B, f"{outcome.status}: {outcome.reason}"
        B = (best + failed) // 2 if failed else B + max(1, B // 4)
    return best, speed, why
