"""`python -m ladder run`: the rungs, between two measurements of the machine, and the table at the end."""
import sys
from pathlib import Path

from ladder.errors import UserError
from ladder.files import new_folder
from ladder.measure.max_batch import fit_batch, largest_batch
from ladder.measure.peer import find_peers
from ladder.measure.problems import NO_TORCHRUN
from ladder.measure.run_folder import as_started, locked, refuse_changed
from ladder.measure.runner import Runner, plan
from ladder.measure.script_flags import check_flags, eager_flags, prepare_quick
from ladder.records.logs import RUNS
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, parse_rungs
from ladder.show.print_report import print_end, print_largest
from ladder.show.terminal import AMOUNT, COUNT


def add_flags(parser):
    flag = parser.add_mutually_exclusive_group().add_argument
    flag("--rungs", default="0-10", help="rungs to run, such as 0,5,ddp or muon,gpu/ (default: %(default)s)")
    flag("--quick", action="store_true", help="a short demonstration: rungs 0, 5 and 6 with a small model")
    flag = parser.add_argument
    flag("--repeat", type=COUNT, default=1, metavar="N", help="rounds, each in a new order (default: %(default)s)")
    flag("--at-once", type=COUNT, default=1, metavar="N",
         help="compile N rungs at a time before the run; training stays one after another (default: %(default)s)")
    flag("--peers", nargs="?", const=True, type=Path, metavar="FOLDER", help="also run transformers' GPT-2 in "
         "its fastest configuration and, if in FOLDER, model.py of github.com/karpathy/nanoGPT and train_gpt2.py of "
         "github.com/karpathy/build-nanogpt")
    flag("--resume", action="store_true", help="continue the newest run, or the one in --logs")
    flag("--max-batch", action="store_true", help="only find the largest -B that fits, for each rung")
    flag("--time-limit", type=AMOUNT, default=3600, metavar="SECONDS", help="limit per rung (default: %(default)s)")
    flag("--processes", type=COUNT, default=2, metavar="N", help="for ddp and several_cards/ (default: %(default)s)")
    flag("--logs", type=Path, metavar="FOLDER", help="new folder for the logs (default: logs/ladder/DATE_TIME)")


def check_together(args, rungs):
    """Refuse flags that say different things, and what cannot start on Windows."""
    if sys.platform == "win32" and any(rung.torchrun for rung in rungs):
        raise UserError(f"--rungs {args.rungs}: torchrun {NO_TORCHRUN}")
    for name, default in (("peers", None), ("repeat", 1), ("at_once", 1), ("logs", None)):
        if args.max_batch and vars(args)[name] != default:
            raise UserError(f"--{name.replace('_', '-')}: cannot be combined with --max-batch; leave it out")


def decide(args, console):
    """What a command means here: its rungs, the scripts' flags, the -B among them that it chose, peers, device."""
    rungs = parse_rungs("0,5,6" if args.quick else args.rungs)
    check_together(args, rungs)
    flags = [*prepare_quick(), *args.flags] if args.quick else args.flags
    peers, settings = find_peers(args.peers), check_flags(rungs, flags)
    flags = eager_flags(rungs + [BY_LABEL["10"]] * bool(peers), flags, settings.device, console)  # a peer is a rung 10
    fitting, batch = (rungs, []) if args.max_batch else fit_batch(rungs, flags, settings, console)
    return fitting, [*flags, *batch], batch, peers, settings.device


def main(args, console):
    args = as_started(args) if args.resume else args
    rungs, flags, batch, peers, device = decide(args, console)
    if args.max_batch:
        largest = {rung: largest_batch(rung, flags, args.time_limit, args.processes, console) for rung in rungs}
        print_largest(largest, console)
        return int(not all(B for B, *_ in largest.values()))
    if args.resume:
        refuse_changed(rungs, args.logs)
    arguments = [word for word in args.argv if word != "--"]  # behind it, --rungs would be a script's flag
    arguments += ["--rungs", ",".join(rung.label for rung in rungs), *batch] if batch else []
    logs = args.logs or new_folder(RUNS)
    rounds = plan(rungs, flags, logs, args.repeat, peers, args.processes)
    runner = Runner(device, logs, args.time_limit, console, args.resume, sum(map(len, rounds)))
    try:
        with locked(logs, args.resume):
            runner.run_rounds(rounds, args.at_once, arguments=arguments, code=code_of(rungs))
        code = int(bool(runner.failed()))
    except KeyboardInterrupt:
        code = 130
        console.print(f"stopped; python -m ladder run --resume --logs {logs} continues", soft_wrap=True)
    print_end(runner, console, args.quick)
    return code
