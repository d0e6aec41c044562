"""Runs of scripts: in this process, on the tiny model, with a crash or a clock made to order, or as programs."""
import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import warnings
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from load_script import ROOT, known_flags, rung

from ladder.rungs.list import BY_LABEL

HANGUP = getattr(signal, "SIGHUP", signal.SIGTERM)  # which Windows lacks


@contextlib.contextmanager
def own_settings():
    """Undo what a script sets for its whole process: the precision of products, signal handlers."""
    precision = torch.get_float32_matmul_precision()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, HANGUP)}
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # a script's handler holds its model, and the lock of its folder


def main(module, *words):
    """Run a script as its command line would, and leave nothing of it behind in this process."""
    with own_settings():
        module.train(module.parse_args([str(word) for word in words]))


def train(module, folder, data, *flags, compile_mode="none"):
    """Train the tiny model of a rung on a CPU, and return the path of its log. `flags` may override all."""
    own = ["--model", "tiny", "--device", "cpu", "--data", data, "--log-dir", folder]
    own += known_flags(module, compile_mode=compile_mode, checkpoint_dir=folder / "checkpoints")
    main(module, *own, *flags)
    return folder / f"{Path(module.__file__).stem}.log"


def train_in_float32(label, folder, data, *flags):
    """Train a rung without autocast, so that results that differ in the order of sums agree to the last digits."""
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float32
    return train(module, folder, data, *flags)


class Crash(Exception):
    """What ends a run in the middle of a step."""


def crash_in_step(module, n):
    """Make runs of this script end in the n-th step, before it is logged."""
    step = module.Log.step

    def crash(log, number, *args, **more):
        if number == n:
            raise Crash
        step(log, number, *args, **more)

    module.Log.step = crash


class FakeClock:
    """A module `time` whose clock stands still, but for what the parts of a training step add to it."""

    def __init__(self, module):
        self.now = 0.0
        module.time = SimpleNamespace(perf_counter=lambda: self.now, sleep=lambda seconds: None)

    def slow(self, function, seconds):
        """`function`, taking so long on this clock."""

        def slowed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slowed


def as_program(label, *words):
    """A rung's script as a program, but in this process: to import torch takes longer than to train a tiny model.

    What a process has that ended: returncode, stdout, stderr. A traceback is not caught.
    """
    output, errors, code = io.StringIO(), io.StringIO(), 0
    words = [BY_LABEL[label].path, "--model", "tiny", "--device", "cpu", *words]
    with (own_settings(), mock.patch("sys.argv", [str(word) for word in words]), contextlib.redirect_stdout(output),
          contextlib.redirect_stderr(errors)):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:  # of a line Python prints it and exits with 1
            code = stop.code if isinstance(stop.code, int) else print(stop.code, file=sys.stderr) or 1
    return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr=errors.getvalue())


def start_forkserver():
    """Processes of the start method "forkserver" are forks of one that has imported torch, and in which nothing ran.

    A fork of a process that has trained may hang: it has the locks of threads that it does not have.
    """
    forkserver.set_forkserver_preload(["ranks"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])):
        forkserver.ensure_running()


def forked_program(output, label, *words):
    """A rung's script as a program in a fork of a process that has imported torch. Every warning is an error.

    It writes to this descriptor, the second end of an os.pipe() or of a pty.openpty(): then this is its terminal, and
    closing the first end a hangup.
    """
    start_forkserver()
    words = [str(word) for word in (BY_LABEL[label].path, "--model", "tiny", "--device", "cpu", *words)]
    output = Connection(output)  # of all that has a descriptor, this can be sent to another process
    process = get_context("forkserver").Process(target=_program, args=(output, words), daemon=True)
    process.start()
    output.close()
    return process


def _program(output, words):
    import fcntl  # not on Windows, where the exercises run without it
    import termios

    os.setsid()
    if os.isatty(output.fileno()):
        fcntl.ioctl(output.fileno(), termios.TIOCSCTTY, 0)
    for number in (0, 1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout, sys.stderr, sys.argv = open(1, "w"), open(2, "w", buffering=1), words
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", ResourceWarning)
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_command(*command, timeout=300, cwd=ROOT, **environment):
    """Run a program as a user would; returns the finished process with its text output."""
    from ladder.measure.processes import stop

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, cwd=cwd, env=environment)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:  # of time, or Ctrl-C: with it the ranks of a torchrun, which have sessions of their own
        stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
