"""The folder of a run: its lock, its machine.json with what the machine can do, and how the run is continued."""
import contextlib
import itertools
import json
from pathlib import Path

import filelock
import psutil

from ladder.errors import UserError
from ladder.files import read_json, write_whole
from ladder.measure.processes import run_module
from ladder.measure.script_flags import split_flags
from ladder.records.logs import newest_run
from ladder.records.machine import read_machine
from ladder.records.summary import older_code


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
        raise UserError(f"{flag} {folder}: another run is using it; wait until it ends, or name another one") from None
    except OSError as error:
        raise UserError(f"{flag} {folder}: {error.strerror}; give a folder that can be written to") from None
    with lock:
        process = next(writing_to(folder), None)
        if process:
            raise UserError(f"{flag} {folder}: a script of a killed run still writes there; wait until it ends, or end "
                            f"process {process.pid}")
        yield


def writing_to(folder):
    """Yields the processes that write logs there."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            for word, log_dir in itertools.pairwise(process.cmdline()):
                if word == "--log-dir" and Path(process.cwd(), log_dir).resolve().is_relative_to(folder.resolve()):
                    yield process


def write_machine(folder, device, **more):
    """Measure the machine and write its rates, its names and `more` to folder/machine.json.

    If the file exists, only higher rates replace its own: a shared machine is not always at its best.
    """
    path = folder / "machine.json"
    measured = json.loads(run_module("ladder.measure.device_rates", "--device", device)) | more
    machine = read_json(path) or measured
    rates = machine.setdefault("rates", {})
    for name, rate in measured["rates"].items():
        rates[name] = max(rate, rates.get(name, 0))
    machine["bytes_per_second"] = max(measured["bytes_per_second"], machine.get("bytes_per_second", 0))
    write_whole(path, json.dumps(machine, indent=2) + "\n")


def as_started(args):
    """The arguments that the run to --resume was started with, as its machine.json has them."""
    _, words = split_flags(args.argv, "--logs")
    if words != ["run", "--resume"]:
        raise UserError("--resume: continues a run with the flags it was started with; leave the others out")
    folder = args.logs or newest_run(wanted=Path.exists)
    arguments = read_machine(folder).get("arguments")
    if arguments is None:
        raise UserError(f"--resume: {folder} holds no run of python -m ladder run; start one without --resume")
    started = args.parse(arguments)
    started.resume, started.logs = True, folder
    return started


def refuse_changed(rungs, folder):
    """Refuse to continue a run of rungs whose steps have changed since: its rounds would be of two scripts."""
    machine = read_machine(folder)
    for rung in rungs:
        if older_code(rung.name, machine):
            raise UserError(f"--resume: {rung.file} has changed since this run began; restore it, or start a new run")
