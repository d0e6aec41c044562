"""Which of the scripts lowers the validation loss, each compared with the one before it?

    python -m experiments.race logs/race --jobs 2 --rungs modern/ --data data/bytes \
        --model 4x4x128 -B 16 -T 64 --steps 600 --val-every 75 --val-sequences 1024

A faster step shows in its milliseconds, a better one only in the loss it reaches. All scripts train a model of the same
size, on the same data, with the same batch and number of steps, and are compared as `python -m ladder compare` does it
(the rule: ladder/measure/contest.py), each with the one before.

Rerun the same command to resume; with --untimed it ends before the timing, for which the machine must be idle. At its
end, or when it is stopped, race.csv has all that the logs say about the race, so that they can go; race.png shows the
effects, and python -m ladder report the standings.
"""
import argparse
import sys
from pathlib import Path

from rich.console import Console

from experiments.race_docs import races_picture
from ladder.errors import UserError
from ladder.measure.contest import CONTEST, MOST_TRIES, TIMINGS, Contest, open_contest
from ladder.measure.fairness import check_fair, check_scripts
from ladder.measure.run_folder import locked
from ladder.measure.script_flags import eager_flags
from ladder.records.recipes import RACE, SEEDS, read_logs, write_csv
from ladder.records.summary import build_report
from ladder.rungs.list import parse_rungs
from ladder.show.plots import save
from ladder.show.print_report import print_end


def keep(folder, names):
    """Write what has ended: race.csv and, with a round, race.png; why other logs do not count."""
    record, skipped = read_logs(folder, names)
    if len(record.points):
        write_csv(record, folder / RACE)
    report = record.names and build_report(folder)
    if report and report.race.race_table.change.notna().any():
        save(races_picture([report]), folder / "race.png")
    return skipped


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] + " Other flags go to the scripts.",
                                     allow_abbrev=False)  # or --seed would be --seeds
    parser.add_argument("logs", type=Path, help="folder for the logs; an unfinished race in it is continued")
    parser.add_argument("--rungs", required=True, help="scripts with a validation loss, such as modern/")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of test seeds (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="number of scripts to run at the same "
                        "time, except for timing (default: %(default)s)")
    parser.add_argument("--tries", type=int, default=MOST_TRIES, help="at most this many trials in each "
                        "search for learning rates (default: %(default)s)")
    parser.add_argument("--search-steps", type=int, help="steps of each trial (default: --steps)")
    parser.add_argument("--untimed", action="store_true", help="do not time the scripts")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds per run (default: %(default)s)")
    args, flags = parser.parse_known_args(argv)
    console, rungs = Console(highlight=False, markup=False), parse_rungs(args.rungs)
    check_scripts(rungs)
    settings = check_fair(rungs, flags)
    flags, names = eager_flags(rungs, flags, settings.device, console), [rung.name for rung in rungs]
    about = {"rungs": args.rungs, "seeds": args.seeds, "tries": args.tries, "search_steps": args.search_steps,
             "flags": flags}
    with locked(args.logs, resume=(args.logs / CONTEST).exists(), flag="LOGS"):
        contest = Contest(rungs, flags, args.logs, args.seeds, at_once=args.jobs, most_tries=args.tries,
                          search_steps=args.search_steps, timings=0 if args.untimed else TIMINGS)
        open_contest(contest, about, settings.device, args.time_limit, console)
        try:
            with contest.runner as runner:  # between two measurements of the machine
                runner.measure_machine(arguments=argv)
                contest.hold()
                runner.measure_machine()
        finally:
            for reason in keep(args.logs, names):
                console.print(f"! skipped: {reason}", soft_wrap=True)
    print_end(runner, console, quick=False)
    return 1 if runner.failed() else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; rerun the same command to resume")
