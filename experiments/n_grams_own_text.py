"""Do rung 31's n-grams pay for a text of one's own? Rung 29 with and without them, on texts of three sizes.

    python data/prepare.py --tokenizer bytes --out data/shakespeare      # small, docstrings: see own_text.py
    python -m experiments.n_grams_own_text data/small:0.2 data/shakespeare:0 data/docstrings:0

Behind the colon stands the dropout. Both scripts (the n-grams are patches/own_text/n_grams.patch) choose between two of
Muon's rates on each text; three seeds, two runs at a time on one thread each. Finished runs are not repeated.
"""
import argparse
import os
import statistics
from multiprocessing.pool import ThreadPool
from pathlib import Path

from experiments.own_text import SEEDS, val_losses
from experiments.variants import PATCHES, write_variant
from ladder.rungs.list import BY_LABEL

RATES = [(0.01, 0.0025), (0.01, 0.005)]  # AdamW's, Muon's


def compare(rung, name, data, dropout, out, pool):
    """Search the rate, run all seeds, print a row of the table."""
    def run(rates, seed):
        flags = ["--data", data, "--dropout", dropout, "--max-lr", rates[0], "--muon-lr", rates[1], "--seed", seed]
        return val_losses(rung, flags, out / data.name / f"{rung.name}_{rates[1]}_{seed}")

    searched = dict(zip(RATES, pool.starmap(run, [(rates, SEEDS[0]) for rates in RATES]), strict=True))
    best = min(searched, key=lambda rates: min(searched[rates]))
    runs = pool.starmap(run, [(best, seed) for seed in SEEDS])
    texts = [f"{statistics.median(x):.3f} ({min(x):.3f} to {max(x):.3f})"
             for x in ([min(losses) for losses in runs], [losses[-1] for losses in runs])]
    print(f"| {data.name}, dropout {dropout} | {name} | {best[1]:g} | {texts[0]} | {texts[1]} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="+", help="folders of token files, each with :DROPOUT")
    parser.add_argument("--out", type=Path, default=Path("logs/n_grams_own_text"), help="default: %(default)s")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.out.mkdir(parents=True, exist_ok=True)
    scripts = {"rung 29": BY_LABEL["29"],
               "with n-grams": write_variant(PATCHES / "own_text" / "n_grams.patch", args.out, BY_LABEL["29"])}
    print("| text | | Muon's rate | lowest loss | last loss |\n| --- | --- | --: | --: | --: |")
    with ThreadPool(2) as pool:
        for folder, _, dropout in (word.rpartition(":") for word in args.data):
            for name, rung in scripts.items():
                compare(rung, name, Path(folder), dropout, args.out, pool)
