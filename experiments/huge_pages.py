"""Do huge pages make a step on a CPU faster? Rung 10 and transformers' GPT-2, each with and without, in turn.

    python -m experiments.huge_pages logs/huge_pages --steps 8 -B 1 -T 1024

A step allocates and frees gigabytes, and the kernel hands them out in pages of 4 KB, each zeroed at its first touch.
With THP_MEM_ALLOC_ENABLE=1 torch asks for pages of 2 MB instead. Linux alone.
"""
import argparse
import resource
import statistics
import sys
from pathlib import Path

from ladder.errors import UserError
from ladder.logs import PEER, read_log
from ladder.runner import Job, check_flags, command_for, run_job
from ladder.stages import BY_LABEL

ENVIRONMENTS = {"4 KB pages": [], "2 MB pages": ["env", "THP_MEM_ALLOC_ENABLE=1"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = parser.parse_known_args()
    check_flags([BY_LABEL["10"]], flags)
    found = {}  # (script, pages): [(ms/step, share of the kernel in the processor time), ...]
    for number in range(args.rounds):
        for stage in (BY_LABEL["10"], None):
            for pages, prefix in ENVIRONMENTS.items():
                folder = args.logs / pages.replace(" ", "_") / f"round_{number + 1}"
                name = stage.name if stage else PEER
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                outcome = run_job(Job(name, [*prefix, *command_for(stage, flags, folder)], folder), 1200, "cpu")
                if outcome.status != "ok":
                    raise UserError(f"{name}: {outcome.status}: {outcome.reason}")
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                kernel, program = after.ru_stime - before.ru_stime, after.ru_utime - before.ru_utime
                ms = read_log(folder / f"{name}.log").median_ms
                found.setdefault((name, pages), []).append((ms, kernel / (kernel + program)))
                print(f"round {number + 1}, {name}, {pages}: {ms:,.1f} ms/step", flush=True)
    for (name, pages), rounds in found.items():
        ms, shares = zip(*rounds, strict=True)
        print(f"{name}, {pages}: {statistics.median(ms):,.1f} ms/step ({min(ms):,.1f} to {max(ms):,.1f}), "
              f"{statistics.median(shares):.1%} of the processor time in the kernel")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
