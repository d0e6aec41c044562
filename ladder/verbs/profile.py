"""`python -m ladder profile`: where the time of a step goes."""
from pathlib import Path

from ladder.files import new_folder
from ladder.measure.profiler import check_profile, profile_ladder
from ladder.measure.run_folder import locked
from ladder.measure.script_flags import eager_flags
from ladder.records.step_profile import read_profile
from ladder.rungs.list import parse_rungs
from ladder.show.plots import profile_picture, save
from ladder.show.print_report import print_profile
from ladder.show.terminal import COUNT


def add_flags(parser):
    flag = parser.add_argument
    flag("--rungs", default="0-10", help="rungs from 0 to 10, such as 0,5,10 (default: %(default)s)")
    flag("--repeat", type=COUNT, default=3, metavar="N",
         help="number of rounds, preferably odd; the median one is shown (default: %(default)s)")
    flag("--traces", action="store_true", help="also write traces of each rung for ui.perfetto.dev")
    flag("--logs", type=Path, metavar="FOLDER", help="folder for the profile; give a run's folder to show "
         "both together (default: logs/profile/DATE_TIME)")


def main(args, console):
    rungs, flags, folder = parse_rungs(args.rungs), args.flags, args.logs or new_folder("logs/profile")
    settings = check_profile(rungs, flags, folder)  # before creating the folder
    flags = eager_flags(rungs, flags, settings.device, console)
    with locked(folder, resume=True):
        failed = profile_ladder(rungs, flags, settings, folder, console, args.repeat, args.traces)
    profile = read_profile(folder)
    if profile:
        print_profile(profile, console)
        save(profile_picture(profile), folder / "profile.png")
        console.print(f"{folder}/profile.json, profile.png")
    return 1 if failed else 0
