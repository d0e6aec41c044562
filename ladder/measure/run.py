"""`python -m ladder run`: the rungs, between two measurements of the machine, and the table at the end."""
import shutil
import sys

from ladder.errors import UserError
from ladder.measure.check import NO_TORCHRUN
from ladder.measure.max_batch import print_largest
from ladder.measure.peers import find_peers
from ladder.measure.runner import (
    Runner, check_flags, check_same_machine, clocks_logged, eager_flags, locked, plan)
from ladder.rungs.choose import parse_rungs
from ladder.rungs.list import BY_LABEL
from ladder.show.logs import has_steps
from ladder.show.outputs import print_report
from ladder.show.report import build_report


def check_together(args, rungs):
    """Refuse flags of `run` that say different things, and what cannot start on Windows."""
    if sys.platform == "win32" and any(rung.torchrun for rung in rungs):
        raise UserError(f"--rungs {args.rungs}: torchrun {NO_TORCHRUN}")
    for flag, given in (("--peers", args.peers), ("--repeat", args.repeat > 1), ("--at-once", args.at_once > 1),
                        ("--logs", args.logs)):
        if given and args.max_batch:
            raise UserError(f"{flag}: not with --max-batch; leave it out")


def run(args, logs, console):
    """Do what the parsed `args` of `run` say, into the folder `logs`; returns the exit code."""
    rungs = parse_rungs(args.rungs)
    check_together(args, rungs)
    peers, settings = find_peers(args.peers), check_flags(rungs, args.flags)
    compiled = [*rungs, BY_LABEL["10"]] if peers else rungs  # each peer is another rung 10
    args.flags = eager_flags(compiled, args.flags, settings.device, console)
    if args.max_batch:
        return print_largest(rungs, args.flags, args.time_limit, args.processes, console)
    rounds = plan(rungs, args.flags, logs, args.repeat, peers, args.processes, args.at_once)
    runner = Runner(settings.device, logs, args.time_limit, console, args.resume, sum(map(len, rounds)))
    interrupted = False
    with locked(logs, args.resume):
        check_same_machine(logs, "--resume --logs")
        try:
            with runner, clocks_logged(logs, settings.device):  # between two measurements of the machine
                if not args.resume:
                    order = [[job.name for job in jobs] for jobs in rounds]
                    runner.measure_machine(arguments=args.argv, order=order)
                for jobs in rounds:
                    runner.run_in_turns(jobs, args.at_once)
                runner.measure_machine()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            kept = args.resume or any(logs.rglob("*.log"))
            if not kept:  # nothing to show or resume: it must not be found as the newest run
                shutil.rmtree(logs, ignore_errors=True)  # (Windows keeps the lock)
    if interrupted:
        again = f"python -m ladder run --resume --logs {logs} continues" if kept else "there is nothing to resume"
        console.print(f"stopped; {again}", soft_wrap=True)
    show_end(runner, console)
    if interrupted:
        return 130
    return 1 if runner.failed() else 0


def show_end(runner, console):
    """The table, and what failed."""
    if has_steps(runner.log_dir):
        print_report(build_report(runner.log_dir), console)
        console.print(f"logs: {runner.log_dir}")
    else:
        console.print("no rung finished a step, so there is no table")
    failed = runner.failed()
    if failed:
        console.print(f"{len(failed)} of {runner.n_jobs} runs did not finish:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.name}: {outcome.status}: {outcome.reason}")
