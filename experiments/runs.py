"""A training run that an experiment asks for, and that is not repeated once its log is there."""
import subprocess
import sys

from ladder.records.logs import read_log


def finished(rung, flags, folder):
    """The log of a rung with these flags in `folder`, as records/logs.py reads it; trained unless it is complete."""
    path = folder / f"{rung.name}.log"
    if not path.exists() or not read_log(path).complete:
        words = [rung.path, *flags, "--log-dir", folder]
        subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return read_log(path)
