"""A script that starts beside others and trains when it has the device for itself: a child of `python -m ladder run`.

    python -m ladder.measure.turn compiled SCRIPT [the script's flags]

It is run twice in one process. The first run, of two steps, only compiles ("eager": there is none). The second builds
the model and says that it waits, as its log begins; it goes on when a line comes on stdin.
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


def print_in_turn(write, text="", *values, **more):
    """print, which waits where a log begins."""
    if str(text).startswith(BEGINS):
        write(WAITS, flush=True)
        if not sys.stdin.readline():
            sys.exit("error: nobody is left to give the turn")
        torch = sys.modules.get("torch")
        if torch and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # without the first run's
    write(text, *values, **more)


def main(how, script, *flags):
    if how == "compiled":
        compile_first(script, flags)
    builtins.print = partial(print_in_turn, print)
    run(script, *flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
