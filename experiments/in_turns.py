"""Five rounds of the ladder on a GPU that is at hand for minutes: only the first start of a run is waited for.

    python -m experiments.in_turns ladder logs/h100 --rounds 5
    python -m experiments.in_turns beyond logs/h100_beyond --rounds 5

`python -m ladder run --repeat 5` starts 55 processes, and on a fast GPU a start takes longer than the steps. Here each
rung has one process for all rounds. All start, and compile in a first run of two steps, at the same time; then they
train in turns, round by round; while one trains, the next only builds its model. The logs are the scripts' own, in
folders as `ladder run` writes them; several sets (`ladder,beyond`) are measured one after another.
"""
import argparse
import gc
import itertools
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import torch

from ladder.errors import UserError
from ladder.measure.runner import write_machine
from ladder.scripts.stages import BY_LABEL, LADDER, load_script
from ladder.show.logs import PEER

WARM, TRAIN = "warm", "train"  # what is said to a child
TIMED, READY = "timed", "ready"  # what it says: it has the GPU; it has done what it was told
TRIES = 6  # of a first run that finds the GPU's memory taken by the others

KINDS = ("ladder", "beyond", "large", "last")
STEP = ["--val-every", "0", "--steps", "10"]
LONG = ["--total-batch", "65536", "--checkpoint-every", "0"]  # of the rungs of a long run
LARGE = ["--model", "gpt2-large", "-B", "8", "-T", "1024", "--val-every", "0", "--steps", "12"]
LAST = {  # variants of rung 10: what the batch's size and CUDA graphs change
    "B4": ["-B", "4", "-T", "1024", "--steps", "60"],
    "B32": ["-B", "32", "-T", "1024", "--steps", "24"],
    "graphs": ["-B", "16", "-T", "1024", "--steps", "30", "--compile-mode", "reduce-overhead"],
    "graphs_B4": ["-B", "4", "-T", "1024", "--steps", "60", "--compile-mode", "reduce-overhead"],
}


def runs_of(kind, flags):
    """[(subfolder, the rung's label, its flags)]: one child each."""
    if kind == "ladder":
        words = ["-B", "16", "-T", "1024", "--steps", "24", *flags]
        return [("", label, words) for label in [*(stage.label for stage in LADDER), PEER]]
    if kind == "beyond":
        step = ["-B", "16", "-T", "1024", *STEP, *flags]
        long = [("gpt2", label, [*step, *LONG]) for label in ("15", "16", "17", "long_run")]
        return [*long, *(("gpt2", label, step) for label in ("validation", *map(str, range(18, 26))))]
    if kind == "large":
        return [("large", label, [*LARGE, *flags]) for label in ("24", "25")]
    return [(name, "10", [*words, *flags]) for name, words in LAST.items()]


# ---- the child ------------------------------------------------------------------------------------------------------

def script_of(label):
    """The module whose `train` is the rung's, or the peer's."""
    if label != PEER:
        return load_script(BY_LABEL[label])
    from ladder.measure import peer_transformers

    peer_transformers.rung_10.new_model = peer_transformers.Peer
    peer_transformers.rung_10.SCRIPT = Path(peer_transformers.__file__)
    return peer_transformers.rung_10


def free_cache():
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(script, flags, folder, steps=()):
    script.train(script.parse_args([*flags, *steps, "--log-dir", str(folder)]))
    free_cache()


def train_alone(script, flags, folder, turn):
    """Train, with the GPU for itself, by the lock `turn`, from the log's start on, when the model is ready."""
    log_class = script.Log

    def log(*values, **more):
        turn.acquire()
        print(TIMED, flush=True)
        return log_class(*values, **more)

    script.Log = log
    try:
        train(script, flags, folder)
    finally:
        script.Log = log_class
        turn.release(force=True)


def warm(script, flags, folder):
    """The first run of a rung that compiles; again where the others have all the memory."""
    if not hasattr(script.parse_args([]), "compile_mode"):
        return None
    for attempt in range(TRIES):
        try:
            return train(script, flags, folder, ["--steps", "2"])
        except (RuntimeError, SystemExit):  # torch.compile wraps the error, check_compiler exits
            if attempt == TRIES - 1:
                raise
        free_cache()
        time.sleep(3)


def child(label, lock, flags):
    """Read "warm FOLDER" and "train FOLDER" lines, do as they say, and answer each."""
    script, turn = script_of(label), filelock.FileLock(lock)
    for line in sys.stdin:
        what, folder = line.split(maxsplit=1)
        if what == WARM:
            warm(script, flags, Path(folder.strip()))
        else:
            train_alone(script, flags, Path(folder.strip()), turn)
        print(READY, flush=True)


# ---- the parent -----------------------------------------------------------------------------------------------------

class Child:
    """A rung's process. `alive` until it ends or fails; its output goes to a file of the scratch folder."""

    def __init__(self, subfolder, label, flags, scratch):
        self.subfolder, self.label, self.alive, self.timed = subfolder, label, True, threading.Event()
        self.name = f"{subfolder or 'ladder'} {label}"
        self.turn = threading.Thread()
        self.output = scratch / f"{self.name.replace(' ', '_')}.txt"
        command = [sys.executable, "-m", "experiments.in_turns", "--child", label, str(scratch / "turn"), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=open(self.output, "w", encoding="utf-8"))

    def ask(self, what, folder):
        """Say what to do, and wait until it is done; the process's lines go to its output file."""
        try:
            self.process.stdin.write(f"{what} {folder}\n")
            self.process.stdin.flush()
        except OSError:
            self.alive = False
            self.timed.set()
            return
        with open(self.output, "a", encoding="utf-8") as file:
            for line in self.process.stdout:
                if line.strip() == TIMED:
                    self.timed.set()
                elif line.strip() == READY:
                    return
                else:
                    file.write(line)
        self.alive = False
        self.timed.set()

    def stop(self):
        self.process.kill()
        self.process.wait()


def median_line(output):
    lines = [line for line in output.read_text(encoding="utf-8").splitlines() if line.startswith("median")]
    return lines[-1] if lines else ""


def take_turn(child, number, out, started):
    """One run of a child, and a line about it."""
    child.ask(TRAIN, out / child.subfolder / f"round_{number}")
    end = median_line(child.output) if child.alive else f"failed; see {child.output}"
    print(f"{time.monotonic() - started:4.0f} s  round {number}  {child.name:16} {end}", flush=True)


def start_turn(child, number, out, started):
    """Start it, and wait until the child has the GPU: the next one builds its model meanwhile."""
    if child.turn.ident:
        child.turn.join()
    child.timed.clear()
    child.turn = threading.Thread(target=take_turn, args=(child, number, out, started))
    child.turn.start()
    child.timed.wait()


def measure(kinds, out, rounds, flags):
    """Start a child for each run, warm all at once, then let them train in turns. Returns how many failed."""
    scratch, started = out / "output", time.monotonic()
    if scratch.exists():
        raise UserError(f"{out} holds a run; give a new folder")
    scratch.mkdir(parents=True)
    sets = [[Child(*run, scratch) for run in runs_of(kind, flags)] for kind in kinds]
    children = [child for one in sets for child in one]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        write_machine(out, device, arguments=sys.argv[1:], kept_busy=True)  # one rung follows another without a pause
        threads = [threading.Thread(target=child.ask, args=(WARM, scratch / "warm" / child.name.replace(" ", "_")))
                   for child in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cold = [child.name for child in children if not child.alive]
        print(f"all are warm after {time.monotonic() - started:.0f} s; failed: {cold}", flush=True)
        for one in sets:
            for number, child in itertools.product(range(1, rounds + 1), one):
                if child.alive:
                    start_turn(child, number, out, started)
            for child in one:
                child.turn.join() if child.turn.ident else None
        write_machine(out, device)
    finally:
        for child in children:
            child.stop()
    return sum(not child.alive for child in children)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", help=f"of {', '.join(KINDS)}, with commas between")
    parser.add_argument("out", type=Path, help="a new folder; all other flags go to the scripts")
    parser.add_argument("--rounds", type=int, default=5)
    args, rest = parser.parse_known_args()
    kinds = args.kinds.split(",")
    if not set(kinds) <= set(KINDS):
        parser.error(f"{args.kinds}: the kinds are {', '.join(KINDS)}")
    return measure(kinds, args.out, args.rounds, rest) > 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:4], sys.argv[4:])
        sys.exit()
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
