"""Is the laptop recipe ahead of nanoGPT's quick start? The same text, the same seconds, the same cores.

    git clone https://github.com/karpathy/nanoGPT && python nanoGPT/data/shakespeare_char/prepare.py
    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.nanogpt nanoGPT

nanoGPT's README trains 4 layers of width 128 for 2,000 steps of 12 x 64 characters on a CPU. Here its train.py does
so, with other learning rates too (decaying to a tenth of the highest, as in its config). The budget is 2,000 times its
median step. The recipe of docs/own_text.md gets as many steps as fit into that, and its two learning rates are
searched. The time to compile is not part of it. Both are then trained with three seeds, and the loss is
the mean over the last tenth of Tiny Shakespeare, in nats per character, in windows of the T that each was trained with.

The times are taken first, on all cores, alternating. All other runs, whose times do not matter, go two at a time on one
thread each. Finished runs are not repeated.
"""
import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import torch

from experiments.runs import finished
from ladder.rungs.list import BY_LABEL

NANO_STEPS = 2000
NANO_RATES = [1e-3, 2e-3, 4e-3, 8e-3]
QUICK_START = (  # of nanoGPT's README, but for the learning rate
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    f"--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters={NANO_STEPS} --lr_decay_iters={NANO_STEPS} "
    "--dropout=0.0 --always_save_checkpoint=True").split()
OURS = "--model 4x4x128 -B 6 -T 256 --warmup-steps 10 --val-sequences 0 --dropout 0".split()  # docs/own_text.md
OUR_RATES = [(0.01, 0.005), (0.005, 0.005), (0.02, 0.005), (0.01, 0.0025), (0.01, 0.01)]  # AdamW's, Muon's: a cross
SEEDS = [1337, 1338, 1339]


def nano(folder, out, rate, seed, steps=NANO_STEPS):
    """Run nanoGPT's train.py, with a seed; {"loss", "ms"}."""
    result = out / "result.json"
    if not result.exists():
        out.mkdir(parents=True, exist_ok=True)
        program = (folder / "train.py").read_text(encoding="utf-8")
        program = program.replace("torch.manual_seed(1337", f"torch.manual_seed({seed}")
        flags = [*QUICK_START, f"--learning_rate={rate}", f"--min_lr={rate / 10}", f"--out_dir={out}",
                 f"--max_iters={steps}"]
        run = subprocess.run([sys.executable, "-c", program, *flags], cwd=folder, capture_output=True, text=True)
        if run.returncode:
            sys.exit(f"error: {folder}/train.py: {run.stderr.strip().splitlines()[-1]}; is this a prepared checkout?")
        times = [float(ms) for ms in re.findall(r"time ([\d.]+)ms", run.stdout)]
        loss = whole_loss(folder, out / "ckpt.pt") if steps == NANO_STEPS else None
        result.write_text(json.dumps({"loss": loss, "ms": statistics.median(times[5:])}))
    return json.loads(result.read_text())


@torch.no_grad()
def whole_loss(folder, checkpoint):
    """nanoGPT's mean loss (nats per character) over all of its val.bin."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    saved = torch.load(checkpoint, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).eval()
    model.load_state_dict(saved["model"])
    T = saved["model_args"]["block_size"]
    ids = torch.from_numpy(np.fromfile(folder / "data/shakespeare_char/val.bin", dtype=np.uint16).astype(np.int64))
    n = (len(ids) - 1) // T * T
    x, y = ids[:n].view(-1, T), ids[1 : n + 1].view(-1, T)  # (n_windows, T) each
    losses = [model(*pair)[1].item() * len(pair[0]) for pair in zip(x.split(64), y.split(64), strict=True)]
    return sum(losses) / len(x)


def ours(data, out, steps, rates, seed):
    """The log of a run of the recipe."""
    flags = [*OURS, "--data", data, "--steps", steps, "--val-every", steps, "--max-lr", rates[0], "--muon-lr", rates[1],
             "--seed", seed]
    return finished(BY_LABEL["documents_apart"], flags, out)


def steps_in_its_time(nano_ms, our_ms):
    """How many of our steps fit into nanoGPT's 2,000."""
    return int(NANO_STEPS * nano_ms / our_ms)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT with its shakespeare_char prepared")
    parser.add_argument("--data", type=Path, default=Path("data/bytes"), help="default: %(default)s")
    args = parser.parse_args()
    folder, data, out = args.nanogpt.resolve(), args.data.resolve(), Path("logs/nanogpt").resolve()

    rounds = []
    for i in range(3):
        run = ours(data, out / f"time/ours_{i}", 200, (0.01, 0.01), 1337)
        rounds.append((nano(folder, out / f"time/nano_{i}", 1e-3, 1337, 200)["ms"], run.median_ms))
    nano_ms, our_ms = (statistics.median(each) for each in zip(*rounds, strict=True))
    steps = steps_in_its_time(nano_ms, our_ms)
    print(f"ms/step in three rounds: nanoGPT {[each[0] for each in rounds]}, ours {[each[1] for each in rounds]}")
    print(f"{NANO_STEPS * nano_ms / 1000:.0f} s: {NANO_STEPS} steps of 768 characters, {steps} of ours of 1536",
          flush=True)

    os.environ["OMP_NUM_THREADS"] = "1"
    with ThreadPool(2) as pool:
        def theirs_of(pairs):
            return [run["loss"] for run in
                    pool.starmap(nano, [(folder, out / f"nano_{rate:g}_{seed}", rate, seed) for rate, seed in pairs])]

        def ours_of(pairs):
            jobs = [(data, out / "ours_{:g}_{:g}_{}".format(*rates, seed), steps, rates, seed) for rates, seed in pairs]
            return [run.val_losses[-1] for run in pool.starmap(ours, jobs)]

        for name, rates, losses_of in (("nanoGPT", NANO_RATES, theirs_of), ("ours", OUR_RATES, ours_of)):
            found = dict(zip(rates, losses_of([(rate, SEEDS[0]) for rate in rates]), strict=True))
            print(f"{name}, by learning rate:", {str(rate): round(loss, 3) for rate, loss in found.items()}, flush=True)
            best = min(found, key=found.get)
            losses = losses_of([(best, seed) for seed in SEEDS])
            print(f"{name}: {statistics.median(losses):.3f} nats per character ({min(losses):.3f}-{max(losses):.3f})")


if __name__ == "__main__":
    main()
