"""Does a batch that grows pay? Rung 24 reads the same tokens in steps of 512, of 1,024, or of 512, 1,024 and 2,048.

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.growing_batch logs/growing_batch --data data/bytes --model 4x4x128 -B 8 -T 64 \
        --val-sequences 1024 --checkpoint-every 0

The setting and the learning rates of the race, two seeds. The batch that grows spends a third of the tokens on each
size. Finished runs are not repeated.
"""
import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.variants import BASE, write_variant
from ladder.errors import UserError
from ladder.measure.runner import Job, Runner, check_flags, command_for
from ladder.show.logs import read_log

GROWING = {"growing": ("512, 1,024, 2,048 tokens per step", [
    ("        for micro_step in range(micro_steps):\n            i = (step - 1) * micro_steps + micro_step\n",
     "        micro_steps, before = (1, step - 1) if step <= 400 else ("
     "(2, 2 * step - 402) if step <= 600 else (4, 4 * step - 1604))\n"
     "        for micro_step in range(micro_steps):\n            i = before + micro_step\n"),
])}
SEEDS = 1337, 1338
RATES = ["--max-lr", "0.0012", "--muon-lr", "0.002"]  # rung 24's in the race, in steps of 1,024 tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    args, flags = parser.parse_known_args()
    flags += ["--recompute-blocks", "0", *RATES]
    settings = check_flags([BASE], [*flags, "--total-batch", "512"])
    args.logs.mkdir(parents=True, exist_ok=True)
    kinds = {"512": (BASE, 512, 1200), "1,024": (BASE, 1024, 600),
             "512, 1,024, 2,048": (write_variant("growing", args.logs, GROWING), 512, 700)}
    paths, jobs = {}, []
    for seed in SEEDS:
        for kind, (stage, total_batch, steps) in kinds.items():
            folder = args.logs / kind.replace(", ", "_").replace(",", "") / f"seed_{seed}"
            more = ["--total-batch", str(total_batch), "--steps", str(steps), "--val-every", str(steps // 2),
                    "--seed", str(seed)]
            jobs.append(Job(stage.name, command_for(stage, [*flags, *more], folder), folder))
            paths.setdefault(kind, []).append(folder / f"{stage.name}.log")
    with Runner(settings, args.logs, 7200, Console(), resume=True, n_jobs=len(jobs)) as runner:
        runner.run(jobs, 2)
    for kind, logs in paths.items():
        print(f"{kind} tokens per step: {', '.join(f'{read_log(path).val_losses[-1]:.3f}' for path in logs)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
