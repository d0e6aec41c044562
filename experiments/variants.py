"""Variants of a rung by the protocol of the race, each with its own search: other ideas, or a rung's change undone.

    python -m experiments.variants logs/variants --model mini -B 8 -T 128 --steps 120 --val-every 60
    python -m experiments.variants logs/evidence --seeds 5 --patches evidence --base 15 --data data/bytes \
        --model 12x2x64 -B 8 -T 64 --total-batch 512 --steps 300 --val-every 150 --val-sequences 256 --compile-mode none

Each is a patch of a rung's script, of rung 24's or the one that --base names, in patches/variants/ or the folder that
--patches names there. LOGS then holds what python -m experiments.race leaves, without timings; rerun the same command
to resume.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.race import Contest, n_jobs
from experiments.race_record import read_logs
from ladder.errors import UserError
from ladder.measure.runner import Runner, check_flags
from ladder.rungs.list import BY_LABEL
from ladder.show.logs import read_log
from ladder.show.standings import show_rates

PATCHES = Path(__file__).parent / "patches"


def patches(kind):
    """The patches in patches/<kind>/; the first line of each says what it is."""
    return sorted((PATCHES / kind).glob("*.patch"))


def write_variant(patch, folder, base):
    """A rung's script with a patch, in `folder` under the patch's name; returns it as a rung of a race."""
    path = folder / f"{patch.stem}.py"
    with tempfile.TemporaryDirectory() as copies:
        copy = Path(shutil.copy(base.path, copies))
        done = subprocess.run(
            ["git", "apply", "-C1", patch], cwd=copies, capture_output=True, text=True, check=False,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(Path(copies).parent)},  # no repository around it counts
        )
        if done.returncode:
            raise UserError(f"{patch}: does not fit {base.file}: {done.stderr.strip()}; make the change there and "
                            "write the patch anew, with git diff")
        shutil.move(copy, path)
    title = patch.read_text(encoding="utf-8").splitlines()[0]
    return replace(base, label=patch.stem, file=str(path.resolve()), title=title, same_losses=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--patches", default="variants", help="their folder (default: %(default)s)")
    parser.add_argument("--base", choices=BY_LABEL, metavar="LABEL", default="24",
                        help="the rung that they change (default: %(default)s, the last of the race)")
    args, flags = parser.parse_known_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    base = BY_LABEL[args.base]
    variants = [write_variant(patch, args.logs, base) for patch in patches(args.patches)]
    rungs = [replace(base, title=f"rung {base.label}"), *variants]
    settings = check_flags([base], flags)
    with Runner(settings.device, args.logs, 7200, Console(), resume=True, n_jobs=n_jobs(rungs, args.seeds)) as runner:
        Contest(rungs, flags, args.logs, args.seeds, runner.run).race(timed=False)
    found, _ = read_logs(args.logs)
    ends = found.part("round").groupby(["rung", "round"]).val_loss.last()
    for rung in rungs:
        for log in sorted(args.logs.glob(f"round_*/{rung.name}.log")):
            losses = read_log(log).losses
            print(f"{rung.title}: " + ", ".join(f"step {n} {losses[n - 1]:.2f}" for n in (1, 10, len(losses))))
        rates = ", ".join(f"{show_rates(rates)}: {loss:.3f}" for rates, loss in found.sweep[rung.name].items())
        print(f"{rung.title}: {' '.join(f'{loss:.3f}' for loss in ends[rung.name])} (search: {rates})")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
