"""Measure the ladder on this machine, and show the results."""
import argparse
import importlib
import signal
import sys
from keyword import iskeyword

from ladder.errors import UserError
from ladder.show.terminal import Stream, console

# Each verb has a module in verbs/, whose `add_flags` adds its flags and whose `main` does what they say.
VERBS = {
    "run": "run the rungs one after the other and print a table of their speeds and losses",
    "report": "print the table of an earlier run or of a reference machine from its logs",
    "compare": "compare training recipes (rungs or your own scripts) over several seeds, or two logs step by step",
    "diff": "show one lesson: its text, its change to the code and the measured effect",
    "try": "test your solution to an exercise, then time it against ours",
    "page": "write the tutorial page and open it in the browser",
    "check": "show what this machine supports and which rungs will gain from it",
    "floor": "compute the minimum time of a training step on any GPU, without having one",
    "profile": "show where the time of a training step goes, by kind of work",
    "propagate": "carry an uncommitted fix in one script to all scripts that start from it",
}
PASS_FLAGS_ON = ("run", "compare", "try", "profile")
PASSED_ON = "Other flags, such as --model, -B or --data, are passed to the scripts."


def module_of(verb):
    return importlib.import_module(f"ladder.verbs.{verb}" + "_" * iskeyword(verb))


def parse_args(argv):
    """The parsed words of a command: `verb`, its flags, `argv`; `flags`, which go to the scripts; this function."""
    parser = argparse.ArgumentParser(prog="python -m ladder", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, title in VERBS.items():
        about = f"{title[0].upper()}{title[1:]}. {PASSED_ON * (verb in PASS_FLAGS_ON)}"
        subparser = verbs.add_parser(verb, help=title, description=about, allow_abbrev=False)
        if verb in argv[:1]:  # the others need not be imported
            module_of(verb).add_flags(subparser)
    args, rest = parser.parse_known_args(argv)
    if rest and args.verb not in PASS_FLAGS_ON:
        verbs.choices[args.verb].error(f"unknown: {' '.join(rest)}")
    args.flags, args.argv, args.parse = [word for word in rest if word != "--"], argv, parse_args
    return args


def main(argv=None):
    args = parse_args([*map(str, sys.argv[1:] if argv is None else argv)])
    for number in (signal.SIGINT, signal.SIGTERM):  # shells start background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, signal.default_int_handler)  # what the tool has started must end
    try:
        return module_of(args.verb).main(args, console) or 0
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.stdout, sys.stderr = Stream(sys.stdout), Stream(sys.stderr)
    sys.exit(main())
