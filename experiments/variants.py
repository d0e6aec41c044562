"""Variants of a rung: other ideas, or a rung's change undone, compared with it by `python -m ladder compare`.

    python -m experiments.variants --model mini -B 8 -T 128 --steps 120 --val-every 60 --data data/tokens
    python -m experiments.variants --patches evidence --base 15 --data data/bytes --model 12x2x64 -B 8 -T 64 \
        --total-batch 512 --steps 300 --val-every 150 --checkpoint-every 0

Each is a patch of a script, zero_init's or the one that --base names, in patches/variants/ or the folder that
--patches names there. Other flags go to `compare`, and from there to the scripts.
"""
import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ladder.__main__ import main as ladder
from ladder.errors import UserError
from ladder.rungs.list import BY_LABEL

PATCHES = Path(__file__).parent / "patches"


def patches(kind):
    """The patches in patches/<kind>/; the first line of each says what it is."""
    found = sorted((PATCHES / kind).glob("*.patch"))
    if not found:
        kinds = ", ".join(sorted(path.name for path in PATCHES.iterdir()))
        raise UserError(f"--patches {kind}: no patches of this name; give one of {kinds}")
    return found


def write_variant(patch, folder, base):
    """A rung's script with a patch, in `folder` under the patch's name; returns it as a rung."""
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--patches", default="variants", help="their folder (default: %(default)s)")
    parser.add_argument("--base", choices=BY_LABEL, metavar="LABEL", default="zero_init",
                        help="the rung that they change (default: %(default)s, the last of the race)")
    args, flags = parser.parse_known_args(argv)
    folder = Path("logs/variants", args.patches)
    found = patches(args.patches)
    folder.mkdir(parents=True, exist_ok=True)
    return ladder(["compare", args.base, *(write_variant(patch, folder, BY_LABEL[args.base]).file for patch in found),
                   *flags])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
