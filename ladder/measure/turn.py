"""A script that starts beside others and trains when it has the device for itself: a child of `run --at-once`.

    python -m ladder.measure.turn twice SCRIPT [the script's flags]

"twice" runs it twice in one process: the first run, of two steps, only compiles, so that compiling takes no time of the
others. Where there is nothing to compile, or an earlier round has left its graphs on disk, "once" will do. The last run
builds the model and says that it waits, as its log begins; it goes on when a line comes on stdin.
"""
import builtins
import gc
import runpy
import sys
from functools import partial
from tempfile import TemporaryDirectory

WAITS = "waits for its turn"
BEGINS = "# script: "  # a log's first line, when the model is on its device


def run(script, *flags):
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def compile_first(script, flags):
    """Two steps, after which the compiled graphs are on disk and the memory is free again."""
    import torch

    with TemporaryDirectory() as folder:
        run(script, *flags, "--steps", "2", "--log-dir", folder)
    torch.compiler.reset()  # CUDA graphs hold memory
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def print_in_turn(write, text="", *values, **more):
    """print, which waits where a log begins."""
    if str(text).startswith(BEGINS):
        write(WAITS, flush=True)
        if not sys.stdin.readline():
            sys.exit("error: nobody is left to give the turn")
    write(text, *values, **more)


def main(how, script, *flags):
    if how == "twice":
        compile_first(script, flags)
    builtins.print = partial(print_in_turn, print)
    run(script, *flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
