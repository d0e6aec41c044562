"""`python -m ladder compare`: training recipes, each a rung or a file of your own; or two logs, step by step."""
from pathlib import Path

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.records.logs import read_log
from ladder.records.recipes import CSV, DIFFERENCES, FOLDERS, MOST_TRIES, SEEDS, by_seed, read_csv
from ladder.rungs.list import rung_named
from ladder.show.print_report import print_comparison
from ladder.show.terminal import AMOUNT, COUNT
from ladder.show.verdict import print_verdict


def add_flags(parser):
    flag = parser.add_argument
    flag("what", nargs="+", metavar="WHAT", help="two or more rungs or scripts (the first is the one that the others "
         "are compared with), or the folder of an earlier comparison, or two log files")
    flag("--seeds", type=COUNT, default=SEEDS, metavar="N",
         help="number of test seeds, and of search seeds (default: %(default)s)")
    flag("--tries", type=int, default=MOST_TRIES, metavar="N", help="at most N trials in each script's search for "
         "learning rates; 0: no search, use the rates of the flags or of the scripts (default: %(default)s)")
    flag("--jobs", type=COUNT, metavar="N",
         help="number of scripts to run at the same time, except for timing (default: 2 on a CPU, else 1)")
    flag("--time-limit", type=AMOUNT, default=3600, metavar="SECONDS", help="limit per run (default: %(default)s)")
    flag("--logs", type=Path, metavar="FOLDER", help=f"new folder for the logs (default: {FOLDERS}/DATE_TIME)")
    flag("--resume", action="store_true",
         help="continue the newest comparison with these arguments, or the one in --logs")


def main(args, console):
    words = [Path(word) for word in args.what]
    n_logs = sum(word.suffix == ".log" for word in words)
    are_logs = n_logs == len(words) == 2
    is_folder = len(words) == 1 and (words[0] / CSV).exists()
    if args.flags and (are_logs or is_folder):
        raise UserError(f"compare {' '.join(args.flags)}: no script runs here that takes flags; leave them out")
    if are_logs:
        return print_comparison(*map(read_log, words), console)
    if is_folder:
        return print_verdict(finished(words[0]), console)
    if n_logs or len(words) == 1 or any(word.is_dir() and not rung_named(str(word)) for word in words):
        raise UserError(f"compare {' '.join(args.what)}: give two rungs or scripts, two logs, or one folder of a "
                        "comparison (report shows runs)")
    return compare_recipes(args, console)


def finished(folder):
    """The Record of a comparison."""
    record = read_csv(folder / CSV)
    if not record.names:
        raise UserError(f"{folder}: has no finished round to show; rerun its command with --resume, or see its logs")
    return record


def compare_recipes(args, console):
    from ladder.measure.contest import hold_comparison  # loads torch, which two logs do not need
    from ladder.show.plots import recipes_picture, save

    if args.tries < 0:
        raise UserError(f"--tries {args.tries}: give 1 or more, or 0 for no search")
    folder, runner = hold_comparison(args, console)
    if runner is None:
        console.print("stopped; the same command with --resume continues")
        return 130
    record = finished(folder)
    write_whole(folder / DIFFERENCES, by_seed(record).to_csv(index=False))
    save(recipes_picture(record), folder / "compare.png")
    print_verdict(record, console)
    console.print(f"{folder}: {CSV}, {DIFFERENCES}, compare.png; python -m ladder compare {folder} shows this again",
                  soft_wrap=True)
    return 1 if runner.failed() else 0
