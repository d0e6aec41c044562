"""The folder of a run: its lock, and its machine.json with what the machine can do."""
import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import filelock
import psutil

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.rungs.list import ROOT


@contextlib.contextmanager
def locked(folder, resume, flag="--logs"):
    """Make and lock the folder that `flag` names; UserError if it is in use, cannot be written to, or holds a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not resume and any(path.name != "lock" for path in folder.iterdir()):
            way = ", or --resume to continue the run in it" if flag == "--logs" else ""
            raise UserError(f"{flag} {folder}: is not empty; give a new folder{way}")
        lock = filelock.FileLock(folder / "lock").acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(f"{flag} {folder}: another run is using it; wait for its end, or give another") from None
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}; give a folder that can be written to") from None
    with lock:
        process = left_over(folder)
        if process:
            raise UserError(f"{flag} {folder}: a script of a killed run still writes there; wait for its end, or end "
                            f"process {process}")
        yield


def left_over(folder):
    """The id of a process that still writes logs there, of a run that was killed; None without one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            for flag, log_dir in itertools.pairwise(words):
                if flag == "--log-dir" and Path(process.cwd(), log_dir).resolve().is_relative_to(folder.resolve()):
                    return process.pid
    return None


def run_module(name, *words):
    """What `python -m NAME` prints, in a child process, because a process that has used a GPU keeps memory there."""
    command = [sys.executable, "-m", name, *words]
    child = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    if child.returncode:
        reason = child.stderr.strip() or f"exit code {child.returncode}"
        raise UserError(f"python -m {name} failed: {reason.splitlines()[-1]}")
    return child.stdout


def write_machine(folder, device, **more):
    """Measure the machine and write its rates, its names and `more` to folder/machine.json.

    If the file exists, only higher rates replace its own: a shared machine is not always at its best.
    """
    path = folder / "machine.json"
    measured = json.loads(run_module("ladder.measure.device_rates", "--device", device)) | more
    machine = json.loads(path.read_text(encoding="utf-8")) if path.exists() else measured
    for name, rate in measured["rates"].items():
        machine["rates"][name] = max(rate, machine["rates"].get(name, 0))
    machine["bytes_per_second"] = max(measured["bytes_per_second"], machine.get("bytes_per_second", 0))
    write_whole(path, json.dumps(machine, indent=2) + "\n")
