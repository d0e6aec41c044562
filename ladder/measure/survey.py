"""Measure as much of a machine as a given time allows, by the tool's other verbs, the most important first.

The folders that a survey writes become records as logs/reference/README.md says.
"""
import _thread
import re
import shutil
import threading
import time

from ladder.count.memory import recommend
from ladder.errors import UserError
from ladder.measure.runner import check_flags, is_finished, locked, run_module, settings_of, split_flags
from ladder.scripts.stages import BY_LABEL, LADDER
from ladder.show.chance import FEWEST_ROUNDS
from ladder.show.logs import has_steps
from ladder.show.machine import read_machine

SHORT = 60  # minutes; in a shorter survey a CPU gets T=256, since at T=1024 its steps take seconds
GPU_STEPS = 100  # half of them warm up, and a GPU needs 3 s for that


def with_defaults(flags, minutes):
    """`flags`, after others that choose model, B, T and steps for the available memory and time unless given."""
    if split_flags(flags, "--compile-mode", "--pretrained")[0]:
        raise UserError("--compile-mode, --pretrained: not for a survey; leave them out")
    rung_10 = BY_LABEL["10"]
    device = check_flags(LADDER, flags).device
    on_cpu, free = device == "cpu", int(run_module("ladder.count.memory", device))
    model, _, T = recommend(free, accelerator=not on_cpu)
    T = min(T, 256) if on_cpu and minutes < SHORT else T
    flags = ["--model", model, "-T", str(T), "--steps", str(5 if on_cpu else GPU_STEPS), *flags]
    settings = settings_of(rung_10, flags)
    _, B, _ = recommend(free, not on_cpu, [(settings.model, settings.T)])
    return ["-B", str(B), *flags]


def commands(settings, flags, minutes):
    """Yields (a folder's name, the words after `python -m ladder`) of what this device can do."""
    _, same = split_flags(flags, "--steps")
    rounds = FEWEST_ROUNDS if minutes >= SHORT else 3
    yield "ladder", ["run", "--repeat", str(rounds), "--peers", *flags]
    if settings.device != "mps":  # where torch.profiler sees nothing
        yield "ladder", ["profile", "--repeat", "1", *same]
    if settings.device != "cpu":  # where a larger batch only makes a longer step
        yield "", ["run", "--max-batch", "--rungs", "0,5,6,10", *same]
    tokens = str(4 * settings.B * settings.T)
    yield "beyond", ["run", "--rungs", "11-16", *same, "--steps", "8", "--total-batch", tokens]
    if settings.device == "cuda":
        yield "cuda_graphs", ["run", "--rungs", "10", *flags, "--compile-mode", "reduce-overhead"]


def name_folders(out, settings):
    """Name the folders after the machine; delete runs that the end cut short, and folders without a step."""
    for log in out.rglob("*.log"):
        if not is_finished(log):
            log.unlink()
    for folder in [path for path in out.iterdir() if path.is_dir()]:
        if not has_steps(folder):
            shutil.rmtree(folder)
            continue
        machine = re.sub(r"\W+", "_", read_machine(folder)["name"].lower()).strip("_")
        folder.rename(out / f"{machine}_{f'B{settings.B}_T{settings.T}' if folder.name == 'ladder' else folder.name}")


def survey(minutes, out, flags, do, console):
    """Survey this machine for `minutes`, into folders in the new folder `out`; returns the exit code.

    `do` does what the words of a command say. At the end of the time it gets a Ctrl-C, and keeps what has finished.
    """
    deadline = time.monotonic() + 60 * minutes
    flags = with_defaults(flags, minutes)
    settings = settings_of(BY_LABEL["10"], flags)
    console.record = True
    with locked(out, resume=False, flag="--out"):
        console.print(run_module("ladder", "check"), soft_wrap=True)
        timer = threading.Timer(deadline - time.monotonic(), _thread.interrupt_main)
        try:
            timer.start()
            for folder, words in commands(settings, flags, minutes):
                left = (deadline - time.monotonic()) / 60
                text = f"{left:.1f} minutes left: python -m ladder {' '.join(words)}"
                console.print(text, soft_wrap=True)
                if do([*words, *(["--logs", str(out / folder)] if folder else [])]) == 130:
                    break
        except KeyboardInterrupt:
            console.print("stopped; finished results are kept")
        finally:
            timer.cancel()
            console.save_text(out / "survey.txt")
            name_folders(out, settings)
    console.print(f"To add this machine: copy the folders of {out} to logs/reference")
    return 0 if any(out.rglob("*.log")) else 1
