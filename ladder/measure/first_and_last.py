"""Run every rung as a reader tries it on a CPU, and keep the lines that it prints first and last, for the page.

    python -m ladder.measure.first_and_last            # all, into docs/first_and_last.json
    python -m ladder.measure.first_and_last 6 ddp      # only these anew

Times are left out: they are not what a reader compares with.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.rates import cpu_name
from ladder.rungs.choose import find_rung
from ladder.rungs.list import BY_LABEL, ROOT
from ladder.show.exercises import PRINTED, read_printed

FLAGS = "--model tiny -T 256"
TIME = re.compile(r"\b(dt: |tokens/sec: |time: |left: )[\d.:]+")
STEP = re.compile(r"step : \d+ ")


def command_of(rung):
    """How a reader starts the rung."""
    start = "torchrun --standalone --nproc_per_node=2" if rung.torchrun else "python"
    return f"{start} {rung.file} {FLAGS}"


def first_and_last(lines):
    """(the lines up to the first step, those from the last step on) of a log, without its times."""
    lines = [TIME.sub(r"\1…", line) for line in lines]
    steps = [i for i, line in enumerate(lines) if STEP.match(line)]
    return lines[: steps[0] + 1], lines[steps[-1] :]


def run(rung):
    """A rung's entry in the file: it runs in an empty folder that has the data, with its default flags."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"] if rung.torchrun else []
    with TemporaryDirectory() as folder:
        os.symlink(ROOT / "data", Path(folder, "data"))
        command = [sys.executable, *torchrun, str(rung.path), *FLAGS.split(), "--device", "cpu"]
        child = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        log = Path(folder, "logs", f"{rung.name}.log")
        if child.returncode:
            raise UserError(f"{rung.file} failed: {child.stderr.strip()}")
        first, last = first_and_last(log.read_text(encoding="utf-8").splitlines())
    return {"command": command_of(rung), "machine": cpu_name(), "first": first, "last": last}


def main(labels):
    rungs = [find_rung(label) for label in labels] or list(BY_LABEL.values())
    printed = read_printed()
    for rung in rungs:
        printed[rung.label] = run(rung)
        print(f"{rung.label}: {printed[rung.label]['last'][0]}", flush=True)
        in_order = {label: printed[label] for label in BY_LABEL if label in printed}
        write_whole(PRINTED, json.dumps(in_order, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
