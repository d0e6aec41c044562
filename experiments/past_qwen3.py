"""Ideas of the NanoGPT speedrun and of papers, one at a time on rung 24: fixed rates, one seed, three of rung 24.

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.past_qwen3 logs/past_qwen3 --data data/bytes --model 4x4x128 -B 4 -T 256 --total-batch 1024 \
        --steps 500 --val-every 250 --val-sequences 256 --max-lr 0.01 --muon-lr 0.0025

Each is a patch of rung 24's script in patches/past_qwen3/; where the idea allows it, what is new starts at zero. The
same command resumes. What such a trial favors goes into the race: both rates searched, five seeds.
"""
import argparse
import statistics
import sys
from pathlib import Path

from rich.console import Console

from experiments.race_record import last_val_loss
from experiments.variants import patches, write_variant
from ladder.errors import UserError
from ladder.measure.runner import Job, Runner, check_flags, command_for
from ladder.scripts.stages import BY_LABEL

BASE = BY_LABEL["24"]
SEEDS = 1337, 1338, 1339  # of rung 24 itself: how far chance goes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    args, flags = parser.parse_known_args()
    settings = check_flags([BASE], flags)
    if settings.recompute_blocks:
        raise UserError("--recompute-blocks: some of the patches are made for none; leave it out")
    args.logs.mkdir(parents=True, exist_ok=True)
    runs = [(BASE, seed) for seed in SEEDS]
    runs += [(write_variant(patch, args.logs, BASE), SEEDS[0]) for patch in patches("past_qwen3")]
    folders = {seed: args.logs / f"seed_{seed}" for seed in SEEDS}
    with Runner(settings.device, args.logs, 7200, Console(), resume=True, n_jobs=len(runs)) as runner:
        runner.run([Job(stage.name, command_for(stage, [*flags, "--seed", str(seed)], folders[seed]), folders[seed])
                    for stage, seed in runs])
    losses = [last_val_loss(folders[seed] / f"{stage.name}.log") for stage, seed in runs]
    base, trials = losses[: len(SEEDS)], losses[len(SEEDS) :]
    print(f"rung 24: {' '.join(f'{loss:.3f}' for loss in base)}")
    for loss, title in sorted(zip(trials, (stage.title for stage, _ in runs[len(SEEDS) :]), strict=True)):
        print(f"{loss:.3f} {loss - statistics.mean(base):+.3f} {title}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
