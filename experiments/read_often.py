"""What helps a text that is read often: weight decay, decay that falls, averaged weights?

    curl -sL https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt > ts.txt
    head -c 80000 ts.txt > small.txt
    python data/prepare.py --text small.txt --tokenizer bytes --out data/small
    python data/prepare.py --text ts.txt --tokenizer bytes --out data/shakespeare
    python -m experiments.python_corpus docstrings.jsonl --docstrings
    python data/prepare.py --text docstrings.jsonl --tokenizer bytes --out data/docstrings
    python -m experiments.read_often logs/read_often small shakespeare docstrings

Variants of rung 29 (patches/read_often/) with the model and steps of docs/own_text.md, on three texts: 72 kB, read 23
times, with dropout; 1 MB, read 3.6 times; 35 MB, a twentieth of it read. Each variant has its own learning rates:
those of TEXTS times a common factor, until the best lies between two others; then more seeds.
Runs have one thread each. Finished runs are not repeated.
"""
import argparse
import functools
import os
import statistics
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

from experiments.variants import PATCHES, write_variant
from ladder.scripts.stages import BY_LABEL
from ladder.show.chance import FEWEST_SEEDS, paired_p
from ladder.show.logs import read_log

FLAGS = "--model 4x4x128 -B 6 -T 256 --total-batch 1536 --checkpoint-every 0 --warmup-steps 20".split()
TEXTS = {  # dropout, steps, validation sequences, AdamW's and Muon's rate, their factor where a search begins
    "small": (0.2, 1100, 0, (0.01, 0.005), 4),
    "shakespeare": (0, 2300, 256, (0.01, 0.0025), 1),
    "docstrings": (0, 1100, 256, (0.01, 0.005), 1),
}
SEED = 1337  # of the search, and the first of the others


def val_loss(stage, text, factor, seed, logs):
    """The validation loss at the end of a run, which is trained unless its log is there."""
    dropout, steps, n_val, (adamw, muon), _ = TEXTS[text]
    folder = logs / text / f"{factor:g}_{seed}"
    path = folder / f"{stage.name}.log"
    if not path.exists() or not read_log(path).complete:
        flags = [*FLAGS, "--data", f"data/{text}", "--dropout", dropout, "--steps", steps, "--val-every", steps,
                 "--val-sequences", n_val, "--max-lr", f"{adamw * factor:g}", "--muon-lr", f"{muon * factor:g}",
                 "--seed", seed, "--log-dir", folder, "--checkpoint-dir", folder / "checkpoints"]
        subprocess.run([sys.executable, stage.path, *map(str, flags)], check=True, stdout=subprocess.DEVNULL)
    return read_log(path).val_losses[-1]


def search(loss_of, best):
    """{factor: loss} of the learning rates, from `best` on, until half and twice of the best are worse."""
    losses = {}
    while not {best / 2, best, best * 2} <= losses.keys():
        for factor in (best, best / 2, best * 2):
            if factor not in losses:
                losses[factor] = loss_of(factor)
        best = min(losses, key=losses.get)
    return losses


def try_variant(stage, text, seeds, logs):
    """(its search, the losses of all seeds with its best factor)."""
    losses = search(lambda factor: val_loss(stage, text, factor, SEED, logs), TEXTS[text][-1])
    best = min(losses, key=losses.get)
    return losses, [val_loss(stage, text, best, SEED + number, logs) for number in range(seeds)]


def show(text, name, first, found):
    """Print a variant's losses, and how far they are from those of rung 29, the first."""
    losses, ends = found
    less = ", ".join(f"{loss - other:+.3f}" for loss, other in zip(ends, first, strict=True))
    tried = ", ".join(f"{factor:g} {loss:.3f}" for factor, loss in sorted(losses.items()))
    print(f"{text}: {name}: {statistics.median(ends):.3f} ({min(ends):.3f} to {max(ends):.3f}), less rung 29's {less}, "
          f"p = {paired_p(ends, first, FEWEST_SEEDS)} (rates times {tried})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("texts", nargs="+", choices=TEXTS, metavar="TEXT", help=f"of {', '.join(TEXTS)}")
    parser.add_argument("--variants", nargs="*", default=["averaged", "decay_08", "falling_decay"],
                        help="patches beside rung 29 (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant's best rates (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    stages = {"rung 29": BY_LABEL["29"]}
    for name in args.variants:
        patch = PATCHES / "read_often" / f"{name}.patch"
        stages[patch.read_text(encoding="utf-8").splitlines()[0]] = write_variant(patch, args.logs, BY_LABEL["29"])
    with ThreadPool(args.jobs) as pool:
        for text in args.texts:
            one_text = functools.partial(try_variant, text=text, seeds=args.seeds, logs=args.logs)
            found = pool.imap(one_text, stages.values())
            first = None
            for name, one in zip(stages, found, strict=True):
                first = first or one[1]
                show(text, name, first, one)


if __name__ == "__main__":
    main()
