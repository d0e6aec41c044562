"""`python -m ladder page`: write the tutorial page."""
import webbrowser
from pathlib import Path

from ladder import formats
from ladder.records.logs import reference_folders
from ladder.records.summary import build_report
from ladder.show.html_page import PAGE, write_page


def add_flags(parser):
    parser.add_argument("folders", nargs="*", type=Path, metavar="LOG_FOLDER",
                        help="log folders to show (default: all reference machines in logs/reference)")
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE",
                        help="file to write (default: docs/index.html)")
    parser.add_argument("--no-browser", action="store_true", help="do not open the page")


def main(args, console):
    write_page([build_report(folder) for folder in args.folders or reference_folders()], args.out)
    if not args.no_browser:
        webbrowser.open(args.out.resolve().as_uri())
    console.print(f"{args.out}: {formats.millions(args.out.stat().st_size)} MB", soft_wrap=True)
