"""What do page faults cost a step on a CPU? Rung 10 with four ways to get memory from Linux, in turn.

    python -m experiments.memory_pages logs/memory_pages --model mini -B 8 -T 128 --steps 20

A step allocates and frees gigabytes. Freed tensors go back to the kernel, which zeroes every page of 4 KB again when
the next tensor touches it. Memory can instead be kept by the process, or come in pages of 2 MB, or both.
"""
import argparse
import re
import resource
import statistics
import sys
from pathlib import Path

from ladder.errors import UserError
from ladder.measure.runner import Job, check_flags, command_for, run_job
from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import read_log

KEPT = ["MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=100000000000"]  # mallopt(3): one heap, which never shrinks
ENVIRONMENTS = {
    "as it is": [],
    "memory kept": KEPT,
    "2 MB pages": ["THP_MEM_ALLOC_ENABLE=1"],  # torch asks for them
    "memory kept, 2 MB pages": [*KEPT, "GLIBC_TUNABLES=glibc.malloc.hugetlb=1"],  # malloc asks for them
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("--rounds", type=int, default=3)
    args, flags = parser.parse_known_args()
    stage = BY_LABEL["10"]
    check_flags([stage], flags)
    found = {name: [] for name in ENVIRONMENTS}
    for number in range(args.rounds):
        for name, variables in ENVIRONMENTS.items():
            folder = args.logs / re.sub(r"\W+", "_", name) / f"round_{number + 1}"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = ["env", "-u", "LD_PRELOAD", *variables, *command_for(stage, flags, folder)]
            outcome = run_job(Job(stage.name, command, folder), 1200, "cpu")
            if outcome.status != "ok":
                raise UserError(f"{name}: {outcome.status}: {outcome.reason}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            run = read_log(folder / f"{stage.name}.log")
            found[name].append((run.median_ms, run.peak_memory_gb, after.ru_minflt - before.ru_minflt))
            print(f"round {number + 1}, {name}: {run.median_ms:,.1f} ms/step", flush=True)
    for name, rounds in found.items():
        ms, peaks, faults = zip(*rounds, strict=True)
        print(f"{name}: {statistics.median(ms):,.1f} ms/step ({min(ms):,.1f} to {max(ms):,.1f}), {max(peaks):.2f} GB, "
              f"{statistics.median(faults):,.0f} page faults")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
