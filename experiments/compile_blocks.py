"""Compile one block instead of twelve? The first step with an empty cache, and the steps after it, in turns.

    python -m experiments.compile_blocks -T 512 [--rounds 5]

Copies of rung 10, each run in a process of its own, in an order drawn anew each round: as it is; each block compiled
by itself, which torch does once for all; and with head and loss compiled as well. All from the same data/tokens.
"""
import argparse
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.exercises import edited
from ladder.measure.allocator import keeping_freed_memory
from ladder.rungs.list import ROOT

WHOLE = "        step_model = torch.compile(model, mode=args.compile_mode)\n"
BLOCKS = """        for block in model.transformer.h:
            block.compile(mode=args.compile_mode)
"""
HEAD = "        model.head = torch.compile(model.head, mode=args.compile_mode)\n"
CALL = """        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)  # (B, T, n_rows)
"""
METHOD = """        return self.head(x, targets)

    def head(self, x, targets):
        idx, (B, T) = x, x.shape[:2]
"""
VARIANTS = {
    "whole": [],
    "blocks": [(WHOLE, BLOCKS)],
    "blocks, head and loss": [(WHOLE, BLOCKS + HEAD), (CALL, METHOD + CALL)],
}


def milliseconds(script, flags, cache):
    """The ms of each step of a run."""
    environment = os.environ | keeping_freed_memory() | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, script, "--device", "cpu", "-B", "1", *flags, "--log-dir", script.parent]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return [float(ms) for ms in re.findall(r"^step .* dt: ([\d.]+) ms", done.stdout, re.MULTILINE)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-T", default="512")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    flags, first, later = ["-T", args.T, "--steps", "6"], {}, {name: [] for name in VARIANTS}
    with TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):  # the first fills the caches
            for name in random.Random(number).sample(list(VARIANTS), len(VARIANTS)):
                script = Path(folder, f"{name.replace(', ', '_').replace(' ', '_')}.py")
                script.write_text(edited("10", *VARIANTS[name]), encoding="utf-8")
                ms = milliseconds(script, flags, Path(folder, script.stem))
                if number == 0:
                    first[name] = ms[0]
                    continue
                later[name].append(statistics.median(ms[2:]))
                print(f"round {number}, {name}: {later[name][-1]:.0f} ms", flush=True)
    for name, medians in later.items():
        ratios = [one / whole for one, whole in zip(medians, later["whole"], strict=True)]
        print(f"T={args.T} {name}: first step {first[name] / 1000:.1f} s, then {statistics.median(medians):.0f} ms "
              f"({min(medians):.0f} to {max(medians):.0f}), times the whole {' '.join(f'{r:.3f}' for r in ratios)}")


if __name__ == "__main__":
    main()
