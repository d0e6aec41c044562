"""A script's flags and its command line: what a user's flags mean to each script, and which are refused."""
import argparse
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from ladder.errors import UserError
from ladder.measure.problems import compile_problem, nvidia_problem
from ladder.rungs.list import ROOT, load_script

# of torchrun: without an address it looks its host's name up, and hangs where that has none
ONE_MACHINE = ["--standalone", "--local-addr=127.0.0.1"]
QUICK_DATA = Path("data/bytes")
START_SECONDS = 60  # for a script to show its --help


def prepare_quick():
    """Prepare the text of `run --quick`, and return the scripts' flags for it.

    In a small model the output layer takes most of a step, and on most CPUs no rung makes it faster: so the tokens are
    bytes. On a long sequence attention takes most of the rest, which rung 6 makes faster on any machine.
    """
    if not QUICK_DATA.exists():
        prepare = [sys.executable, ROOT / "data" / "prepare.py", "--tokenizer", "bytes", "--out", QUICK_DATA]
        if subprocess.run(prepare).returncode:
            raise UserError("--quick: data/prepare.py could not prepare its text; see its message above")
    return f"--model 2x4x128 -B 1 -T 4096 --steps 20 --data {QUICK_DATA}".split()


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
    sys.argv[0] = rung.file  # what its parser calls itself in an error
    return load_script(rung).parse_args(own_flags(rung, flags, Path()))


def eager_flags(rungs, flags, device, console):
    """`flags`, with --compile-mode none where torch cannot compile for the device; says so."""
    is_free = not split_flags(flags, "--compile-mode")[0]
    may_compile = is_free and any("compile_mode" in defaults(rung) for rung in rungs)
    problem = compile_problem(device) if may_compile else None
    if problem is None:
        return flags
    console.print(f"rungs 5 and up get --compile-mode none: {problem}", soft_wrap=True)
    return [*flags, "--compile-mode", "none"]


def check_file(file):
    """Refuse what is no script, or does not start; its --help shows flags."""
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{file}: no such script; give a .py file, such as a copy of a rung")
    words = [sys.executable, "-B", file.resolve(), "--help"]  # -B: nothing of ours beside it
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"{file}: --help does not end within {START_SECONDS} s; correct it, and try again") from None
    if done.returncode or "[--" not in done.stdout:
        places = re.findall(rf'File "{re.escape(str(file.resolve()))}", (line \d+)', done.stderr)
        reasons = [*places[-1:], (done.stderr.strip() or "its --help shows no flags").splitlines()[-1]]
        raise UserError(f"{file}: does not start: {': '.join(reasons)}; correct it, and try again")


def check_flags(rungs, flags):
    """The settings of the first rung, whose script checks the data, before anything is written."""
    problem = None if split_flags(flags, "--device")[0] == ["cpu"] else nvidia_problem()
    if problem:  # a CPU would be measured unasked
        raise UserError(f"--device: torch cannot use the NVIDIA GPU: {problem}; or give --device cpu")
    if any(split_flags(flags, "--log-dir", "--save")[0]):
        raise UserError("--log-dir, --save: not allowed here; logs go to --logs, and no model is saved")
    settings = [settings_of(rung, flags) for rung in rungs][0]
    script = load_script(rungs[0])
    _, meta = script.load_tokens(settings.data, "train", settings.B * settings.T + 1)
    script.model_config(settings, meta["vocab_size"])
    return settings
