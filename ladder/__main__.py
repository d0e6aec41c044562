"""python -m ladder: measure the ladder on this machine, and show it."""
import argparse
import math
import os
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from ladder.count.floor import STORED
from ladder.count.flops import SHAPES
from ladder.errors import UserError
from ladder.rungs.choose import find_rung, parse_rungs
from ladder.rungs.list import ROOT

RUNS = Path("logs/ladder")  # one subfolder per run
REFERENCE = ROOT / "logs" / "reference"
console = Console(highlight=False, markup=False)
messages = Console(highlight=False, markup=False, stderr=True)  # not the answer: stdout belongs to --json and --csv


def new_folder(inside):
    return Path(inside) / time.strftime("%Y-%m-%d_%H-%M-%S")


def newest_run(wanted=None):
    """The folder of the newest run that is `wanted`: by default that has a step, without which nothing can be shown."""
    from ladder.show.logs import has_steps

    wanted = wanted or has_steps
    for path in sorted(RUNS.glob("*/machine.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        if wanted(path.parent):
            return path.parent
    raise UserError(f"{RUNS} holds no run: start one with python -m ladder run")


def reference_folders():
    folders = sorted(path for path in REFERENCE.glob("*") if path.is_dir())
    if not folders:
        raise UserError(f"{REFERENCE} holds no folder of logs")
    return folders


# Each verb is a function; its flags are below.

def check(args):
    """what this machine has, and what each rung will gain from it"""
    from ladder.measure.check import print_check

    return print_check(console)


def smoke(args):
    """does everything work here? every script, for four steps"""
    from ladder.measure.smoke import smoke

    given = {"device": args.device, "model": args.model, "data": args.data}
    flags = [f"--{name}={value}" for name, value in given.items() if value]
    return smoke(flags, args.out or new_folder("logs/smoke"), console)


def run(args):
    """run the rungs one after the other, then show the table; unknown flags go to the scripts"""
    from ladder.measure.run import run

    args = as_started(args) if args.resume else args
    return run(args, args.logs or new_folder(RUNS), console)


def as_started(args):
    """The arguments that the run to --resume was started with."""
    from ladder.show.machine import read_machine

    apart = {"resume": True, "logs": args.logs, "argv": args.argv}
    if vars(args) != vars(parse_args(["run"])) | apart:
        raise UserError("--resume: continues a run with the flags it was started with; leave the others out")
    folder = args.logs or newest_run(wanted=Path.exists)
    arguments = read_machine(folder).get("arguments")
    if arguments is None:
        raise UserError(f"--resume: {folder} holds no run of python -m ladder run; start one without --resume")
    again = parse_args(arguments)
    again.resume, again.logs = True, folder
    return again


def profile(args):
    """where the time of a step goes, rung by rung; unknown flags go to the scripts"""
    from ladder.measure.step_profile import profile_and_show

    return profile_and_show(parse_rungs(args.rungs), args.flags, args.logs or new_folder("logs/profile"), console,
                            args.repeat)


def report(args):
    """the table, plots and the tutorial page, from logs

    Without LOG_FOLDER it shows your newest run; with --html or --readme logs/reference/.
    """
    from ladder.show.outputs import write_reports

    write_reports(args, newest_run, reference_folders, console, messages)


def compare(args):
    """two logs, step by step"""
    from ladder.count.cards import find_card
    from ladder.show.compare import print_comparison
    from ladder.show.logs import read_log

    one, other = args.logs
    print_comparison(read_log(one), read_log(other), console, args.gpu and find_card(args.gpu))


def diff(args):
    """one lesson: the text, the change, the measured effect; give a rung, or two"""
    from ladder.rungs.lessons import print_lesson, read_lesson
    from ladder.show.outputs import print_effect

    if len(args.rungs) > 2:
        raise UserError("diff takes one rung, or two")
    rung = find_rung(args.rungs[-1])
    before = find_rung(args.rungs[0]) if len(args.rungs) == 2 else rung.start
    old = before.path.read_text(encoding="utf-8") if before else None
    print_lesson(read_lesson(old, rung.path.read_text(encoding="utf-8")), console)
    if before and REFERENCE.is_dir():
        print_effect(before, rung, reference_folders(), console)


def try_(args):
    """an exercise: your script in the place of a rung; unknown flags go to the scripts

    Runs the tests of lesson N on FILE and shows a hint for each that is red. Once all pass: both scripts in turns, and
    what each changes in the rung before. docs/exercises.md has the exercises.
    """
    from ladder.measure.exercise import try_file

    return try_file(find_rung(args.rung), args.file, args.rounds, args.flags, new_folder("logs/try"), console)


def floor(args):
    """the least a step can cost on any GPU, counted; no GPU is needed

    With another --model, -B or -T than the stored counts have, they are counted anew: some seconds for each rung.
    """
    from ladder.count.cards import find_card
    from ladder.count.memory import BLOCK_SIZE
    from ladder.count.floor import counted_rungs, stored_kernels
    from ladder.show.floors import print_floors

    cards = [find_card(name) for name in args.gpu or ["A100"]]
    labels = counted_rungs(parse_rungs(args.rungs), console)
    setting = {"model": args.model, "B": args.B, "T": args.T}
    if args.T > BLOCK_SIZE:
        raise UserError(f"-T {args.T}: the model takes {BLOCK_SIZE} tokens; give a smaller -T")
    if setting == STORED:
        kernels = stored_kernels(labels)
    else:
        from ladder.count.kernels import count_all

        kernels = count_all(labels, setting, console)
    print_floors(kernels, cards, setting, console)


def propagate(args):
    """carry the uncommitted fix in a rung through all later rungs, as far as it goes"""
    from ladder.rungs.propagate import main

    return main(args, console)


def above_zero(kind):
    """An argument's type: numbers of a kind, int or float, above 0."""
    def number(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError("must be more than 0")
        return value
    return number


COUNT, AMOUNT = above_zero(int), above_zero(float)
FOLDER = {"type": Path, "metavar": "FOLDER"}
PARSER = argparse.ArgumentParser(prog="python -m ladder", description=__doc__)
VERBS = PARSER.add_subparsers(dest="verb", required=True, metavar="VERB")


def verb(function):
    """Add a verb, whose help is the first line of the function's docstring; returns what adds its flags."""
    title, _, more = function.__doc__.partition("\n")
    parser = VERBS.add_parser(function.__name__.rstrip("_"), help=title, description=more or title)
    parser.set_defaults(do=function)
    return parser.add_argument


verb(check)
flag = verb(smoke)
flag("--device", help="(default: the accelerator if there is one)")
flag("--model", help="(default: mini, on a CPU tiny)")
flag("--data", help="(default: data/tokens, prepared if it is not there)")
flag("--out", **FOLDER, help="a new folder (default: logs/smoke/DATE_TIME)")
flag = verb(run)
flag("--rungs", default="0-10", help="for example 0,5,ddp or 11-15 (default: %(default)s)")
flag("--repeat", type=COUNT, default=1, metavar="N", help="N rounds, each in an order of its own, to see the noise")
flag("--at-once", type=COUNT, default=1, metavar="N",
     help="start and compile N rungs at once; they still train one after another (default: %(default)s)")
flag("--peers", nargs="?", const=True, **FOLDER, help="add transformers' own GPT-2 with everything switched on, and "
     "from FOLDER model.py of github.com/karpathy/nanoGPT and train_gpt2.py of github.com/karpathy/build-nanogpt")
flag("--resume", action="store_true", help="continue the newest run, or --logs, as it was started")
flag("--max-batch", action="store_true", help="instead: find the largest -B of each rung")
flag("--time-limit", type=AMOUNT, default=3600, metavar="SECONDS", help="for each rung (default: %(default)s)")
flag("--processes", type=COUNT, default=2, help="of ddp, 33, fsdp and dcp (default: %(default)s)")
flag("--logs", **FOLDER, help="a new folder (default: logs/ladder/DATE_TIME)")
flag = verb(profile)
flag("--rungs", default="0-10", help="of 0 to 10 (default: %(default)s)")
flag("--repeat", type=COUNT, default=3, metavar="N",
     help="N rounds, preferably odd: the median round counts (default: %(default)s)")
flag("--logs", **FOLDER, help="of a run, to be shown with it (default: logs/profile/DATE_TIME)")
flag = verb(report)
flag("folders", nargs="*", type=Path, metavar="LOG_FOLDER", help="a run, or a reference machine")
flag("--logs", action="append", default=[], **FOLDER, help="the same")
flag("--png", **FOLDER, help="write the plots there")
flag("--html", type=Path, metavar="FILE", help="write the tutorial page")
flag("--gpu", metavar="CARD", help="of logs that name none, to find impossible times")
flag("--readme", action="store_true", help="rewrite the tables and pictures of README.md and docs/")
flag = VERBS.choices["report"].add_mutually_exclusive_group().add_argument
flag("--json", action="store_true", help="print JSON instead of the table")
flag("--csv", action="store_true", help="print CSV instead of the table")
flag = verb(compare)
flag("logs", nargs=2, type=Path, metavar="LOG")
flag("--gpu", metavar="CARD", help="of logs that name none, to find impossible times")
flag = verb(diff)
flag("rungs", nargs="+", metavar="N")
flag = verb(try_)
flag("rung", metavar="N", help="of the lesson, or its file")
flag("file", type=Path, metavar="FILE", help="your script: a copy of the rung before, with the change made")
flag("--rounds", type=COUNT, metavar="ROUNDS", help="of both scripts, in turns (default: 3, once the tests pass)")
flag = verb(floor)
flag("--gpu", nargs="+", action="extend", metavar="CARD", help="A100, 'RTX 4090' …, or one by its numbers, "
     "NAME:FLOAT32,TF32,16BIT,GB in TFLOP/s and GB/s (default: A100)")
flag("--rungs", default="0-10", help="for example 0-31 (default: %(default)s)")
flag("--model", default=STORED["model"], choices=SHAPES, help="(default: %(default)s)")
flag("-B", type=COUNT, default=STORED["B"], help="(default: %(default)s)")
flag("-T", type=COUNT, default=STORED["T"], help="(default: %(default)s, the most)")
flag = verb(propagate)
flag("rung", help="its file, or N")


def parse_args(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    args, rest = PARSER.parse_known_args(argv)
    if rest and args.do not in (run, profile, try_):  # which pass them on to the scripts
        VERBS.choices[args.verb].error(f"unknown: {' '.join(rest)}")
    args.flags, args.argv = [word for word in rest if word != "--"], argv
    return args


def hang_up(number, frame):
    """The terminal is gone: nothing can be printed any more, and what the tool has started must end."""
    sys.stdout = sys.stderr = open(os.devnull, "w")
    raise KeyboardInterrupt


def main(argv=None):
    args = parse_args(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # shells start background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, hang_up)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # the encoding of a file may lack × and –
            stream.reconfigure(errors="replace")
    sys.argv[0] = f"python -m ladder {args.verb}"  # what the scripts' own parsers call themselves in an error
    try:
        return args.do(args) or 0
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
