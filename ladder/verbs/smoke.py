"""`python -m ladder smoke`: does everything work here?"""
from pathlib import Path

from ladder.files import new_folder
from ladder.measure.trials import smoke


def add_flags(parser):
    flag = parser.add_argument
    flag("--device", help="(default: the accelerator if there is one)")
    flag("--model", help="(default: mini, on a CPU tiny)")
    flag("--data", help="(default: data/tokens, prepared if it is not there)")
    flag("--out", type=Path, metavar="FOLDER", help="a new folder (default: logs/smoke/DATE_TIME)")


def main(args, console):
    given = {"device": args.device, "model": args.model, "data": args.data}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    return smoke(flags, args.out or new_folder("logs/smoke"), console)
