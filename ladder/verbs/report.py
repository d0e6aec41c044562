"""`python -m ladder report`: the table of a run or of a reference machine, from its logs."""
from pathlib import Path

from ladder.errors import UserError
from ladder.records.logs import newest_run, reference_folders
from ladder.records.summary import build_report
from ladder.rungs.list import ROOT
from ladder.show.documents import as_csv, as_json, write_tables
from ladder.show.print_report import print_report
from ladder.show.terminal import messages


def add_flags(parser):
    flag = parser.add_argument
    flag("folders", nargs="*", type=Path, metavar="LOG_FOLDER", help="log folders to show (default: your newest "
         "run)")
    flag("--png", type=Path, metavar="FOLDER", help="write the plots to FOLDER")
    flag("--readme", action="store_true",
         help="rewrite the tables and plots in README.md, beyond/README.md and docs/ from logs/reference")
    flag = parser.add_mutually_exclusive_group().add_argument
    flag("--json", action="store_true", help="print JSON instead of the table")
    flag("--csv", action="store_true", help="print CSV instead of the table")


def main(args, console):
    if args.readme and args.folders:
        raise UserError("--readme: shows all of logs/reference; leave the folders out")
    folders = args.folders or (reference_folders() if args.readme else [newest_run()])
    reports = [build_report(folder) for folder in folders]
    if not (args.readme or args.png or args.json or args.csv):
        for report in reports:
            print_report(report, console)
        return
    for reason in dict.fromkeys(reason for report in reports for reason in report.skipped):
        messages.print(f"! skipped: {reason}", soft_wrap=True)  # which a table says itself
    if args.readme or args.png:
        from ladder.show.plots import all_pictures, save, shown_in_docs

        pictures = all_pictures(reports)
        if args.readme:
            write_tables(reports)
            for name in pictures.keys() & shown_in_docs(ROOT):
                save(pictures[name], ROOT / "docs" / name)
            messages.print("README.md, beyond/README.md, docs/: tables and pictures rewritten")
        if args.png:
            args.png.mkdir(parents=True, exist_ok=True)
            for name, picture in pictures.items():
                save(picture, args.png / name)
                messages.print(str(args.png / name))
    if args.json:
        print(as_json(reports))
    elif args.csv:
        print(as_csv(reports), end="")
