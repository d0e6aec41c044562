"""python -m ladder: measure the ladder on this machine, and show it.

    check       what this machine has, and what each rung will gain from it
    smoke       does everything work here? every script, for four steps
    run         run the rungs one after the other, then show the table
    profile     where the time of a step goes, rung by rung
    survey      all of this in a given time, for machines that you use only once
    report      the table, plots and the tutorial page, from logs
    compare     two logs, step by step
    diff        one lesson: the text, the change, the measured effect
    floor       the least a step can cost on any GPU, counted; no GPU is needed
    propagate   carry a fix through all later rungs
"""
import argparse
import codecs
import math
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from ladder.errors import UserError
from ladder.scripts.stages import BY_LABEL, BY_NAME, ROOT, STAGES
from ladder.show.logs import has_steps

RUNS, PROFILES, SURVEYS = Path("logs/ladder"), Path("logs/profile"), Path("logs/survey")  # one subfolder per run
REFERENCE = ROOT / "logs" / "reference"
PLAIN = {"✓": "+", "✗": "x", "–": "-", "×": "x"}  # for terminals whose encoding lacks them
console = Console(highlight=False)
messages = Console(highlight=False, stderr=True)  # what is not the answer itself: stdout belongs to --json and --csv


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_number(text):
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def add_check(verbs):
    check = verbs.add_parser("check", help="what this machine has, and what each rung will gain from it")
    check.add_argument("--gpus", type=positive, metavar="N", help="instead: the largest model on 1 to N GPUs, on paper")
    check.add_argument("--memory", type=positive_number, metavar="GB", action="append",
                       help="of each, in 1e9 bytes; can be repeated (default: 16, 24, 40, 80)")


def add_run(verbs):
    run = verbs.add_parser("run", help="run the rungs, then show the table; unknown flags go to the scripts")
    run.add_argument("--rungs", default="0-10", help="for example 0,5,ddp or 11-15 (default: %(default)s)")
    run.add_argument("--repeat", type=positive, default=1, metavar="N", help="N interleaved rounds, to see the noise")
    run.add_argument("--peers", action="store_true", help="add transformers' own GPT-2 with everything switched on")
    run.add_argument("--resume", action="store_true", help="continue the newest run, or --logs, as it was started")
    instead = run.add_mutually_exclusive_group()
    instead.add_argument("--race", type=positive, metavar="SEEDS", help="instead: find each rung's learning rates, "
                         "then compare over this many seeds the tokens and seconds to a validation loss (from rung 13)")
    instead.add_argument("--max-batch", action="store_true", help="instead: find the largest -B of each rung")
    run.add_argument("--race-jobs", type=positive, default=1, metavar="N", help="run N scripts of a race at a time, "
                     "each on its share of the cores; the timing at its end always runs one (default: %(default)s)")
    run.add_argument("--time-limit", type=float, default=3600, metavar="SECONDS", help="for each rung (default: 3600)")
    run.add_argument("--processes", type=positive, default=2, help="of ddp, fsdp and dcp (default: %(default)s)")
    run.add_argument("--logs", type=Path, metavar="FOLDER", help=f"a new folder (default: {RUNS}/DATE_TIME)")


def add_profile(verbs):
    profile = verbs.add_parser("profile", help="where the time of a step goes; unknown flags go to the scripts")
    profile.add_argument("--rungs", default="0-10", help="of 0 to 10 (default: %(default)s)")
    profile.add_argument("--repeat", type=positive, default=3, metavar="N",
                         help="N rounds, preferably odd: the median round counts (default: %(default)s)")
    profile.add_argument("--logs", type=Path, metavar="FOLDER",
                         help=f"of a run, to be shown with it (default: {PROFILES}/DATE_TIME)")


def add_survey(verbs):
    survey = verbs.add_parser("survey", help="measure all of this in a given time; unknown flags go to the scripts")
    survey.add_argument("--minutes", type=positive_number, default=10, help="(default: %(default)s)")
    survey.add_argument("--out", type=Path, metavar="FOLDER", help=f"a new folder (default: {SURVEYS}/DATE_TIME)")


def add_smoke(verbs):
    smoke = verbs.add_parser("smoke", help="does everything work here? every script, for four steps")
    for flag, text in (("--device", "the accelerator if there is one"), ("--model", "mini, on a CPU tiny"),
                       ("--data", "data/tokens, prepared if it is not there")):
        smoke.add_argument(flag, help=f"(default: {text})")
    smoke.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder (default: logs/smoke/DATE_TIME)")


def add_report(verbs):
    report = verbs.add_parser(
        "report", help="the table, plots and the page", description="Without LOG_FOLDER, --html and --readme show "
        "logs/reference/, and everything else shows your newest run; with --readme, everything shows logs/reference/.")
    report.add_argument("folders", nargs="*", type=Path, metavar="LOG_FOLDER", help="a run, or a reference machine")
    report.add_argument("--logs", action="append", default=[], type=Path, metavar="FOLDER", help="the same")
    report.add_argument("--png", type=Path, metavar="FOLDER", help="write the plots there")
    report.add_argument("--html", type=Path, metavar="FILE", help="write the tutorial page")
    report.add_argument("--readme", action="store_true", help="rewrite the tables and pictures of README.md and docs/")
    report.add_argument("--json", action="store_true", help="print JSON instead of the table")
    report.add_argument("--csv", action="store_true", help="print CSV instead of the table")


def add_floor(verbs):
    floor = verbs.add_parser("floor", help="the least a step can cost on any GPU, counted; no GPU is needed")
    floor.add_argument("--gpu", nargs="+", action="extend", metavar="CARD", help="A100, 'RTX 4090' …, or one by its "
                       "numbers, NAME:FLOAT32,TF32,16BIT,GB in TFLOP/s and GB/s (default: A100)")
    floor.add_argument("--rungs", default="0-10", help="of 0 to 10 (default: %(default)s)")
    floor.add_argument("--model", default="gpt2", help="(default: %(default)s)")
    floor.add_argument("-B", type=positive, default=16, help="sequences per step (default: %(default)s)")
    floor.add_argument("-T", type=positive, default=1024, help="tokens per sequence (default: %(default)s)")
    floor.add_argument("--save", action="store_true", help="count anew what ladder/count/floors.json stores")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="python -m ladder", description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for add in (add_check, add_run, add_profile, add_survey, add_smoke, add_floor, add_report):
        add(verbs)
    compare = verbs.add_parser("compare", help="two logs, step by step")
    compare.add_argument("logs", nargs=2, type=Path, metavar="LOG")
    diff = verbs.add_parser("diff", help="one lesson: N, or two rungs A B")
    diff.add_argument("rungs", nargs="+", metavar="N")
    propagate = verbs.add_parser("propagate", help="carry the uncommitted fix in a rung through all later rungs")
    propagate.add_argument("rung", help="its file, or N")
    propagate.add_argument("--until", metavar="RUNG", help="the last rung to carry it to (default: the ladder's last)")

    argv = sys.argv[1:] if argv is None else list(argv)
    args, rest = parser.parse_known_args(argv)
    if rest and args.verb not in ("run", "profile", "survey"):
        verbs.choices[args.verb].error(f"unknown: {' '.join(rest)}")
    args.flags, args.argv = rest, argv
    return args


def check(args):
    from ladder.measure.check import BAD, GOOD, check_machine

    if args.gpus or args.memory:
        return print_cards(args.gpus or 8, args.memory or [16, 24, 40, 80])
    findings, command = check_machine()
    colours = {GOOD: "green", BAD: "red"}
    for finding in findings:
        console.print(f"[{colours.get(finding.mark, 'yellow')}]{finding.mark}[/] [bold]{finding.what}[/]: ", end="")
        console.print(finding.detail, markup=False)
    console.print(f"\nFor this machine:\n    {command}", markup=False)
    return 0


def print_cards(gpus, memories):
    """What 1 to `gpus` GPUs hold on paper, independent of this machine."""
    from rich.table import Table

    from ladder.measure.check import plan_cards

    table = Table(title="The largest model that trains at B=1, T=1024 in 90 % of the memory, on paper")
    for heading in ("GPUs", "", "largest\n--model"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GB\na GPU", "GB sent\na step", "at most, 1e9\nparameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for cards in plan_cards(gpus, memories):
        if last not in (None, cards.memory):
            table.add_section()
        last = cards.memory
        way = "FSDP" if cards.sharded else "DDP" if cards.ranks > 1 else "one"
        table.add_row(f"{cards.ranks} x {cards.memory:g} GB", way, cards.model or "none", f"{cards.needed:.1f}",
                      f"{cards.sent:.1f}", f"{cards.most / 1e9:.1f}")
    console.print(table)
    console.print("DDP: rung 24; FSDP: beyond/fsdp_run.py. Sent: by each GPU, in a step of one micro-step; FSDP sends "
                  "most of it again in each further one.\nAt most: as wide as gpt2-xl (1600), and as deep as fits.",
                  markup=False)
    return 0


def newest_run(wanted=has_steps):
    """The folder of the newest run that is `wanted`; runs killed before their first step have nothing to show."""
    runs = sorted(RUNS.glob("*/machine.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in runs:
        if wanted(path.parent):
            return path.parent
    raise UserError(f"{RUNS} holds no run: start one with python -m ladder run")


def as_started(args):
    """The arguments that the run to --resume was started with."""
    from ladder.show.machine import read_machine

    if set(args.argv) - {"run", "--resume", "--logs", str(args.logs), f"--logs={args.logs}"}:
        raise UserError("--resume: continues a run with the flags it was started with; leave the others out")
    folder = args.logs or newest_run(wanted=Path.exists)
    arguments = read_machine(folder).get("arguments")
    if arguments is None:
        raise UserError(f"--resume: {folder} holds no run of python -m ladder run; start one without --resume")
    started = parse_args(arguments)
    started.logs, started.resume = folder, True
    return started


def stop_at_signals():
    for number in (signal.SIGINT, signal.SIGTERM):  # shells start background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)


def now():
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def show(report):
    """Print a report, with the profile and the race of its folder, if any."""
    from ladder.show.profile import print_profile
    from ladder.show.tables import print_table
    from ladder.judge.standings import print_race

    print_table(report, console)
    if report.profile:
        print_profile(report.profile, console)
    if report.sweep:
        print_race(report, console)


def run(args):
    from ladder.measure.race import check_race
    from ladder.measure.runner import Runner, check_flags, locked, parse_rungs

    stop_at_signals()
    args = as_started(args) if args.resume else args
    stages = parse_rungs(args.rungs)
    if args.time_limit <= 0:
        raise UserError(f"--time-limit {args.time_limit:g}: must be more than 0")
    if (args.race or args.max_batch) and (args.repeat > 1 or args.peers):
        raise UserError(f"{'--peers' if args.peers else '--repeat'}: not with --race or --max-batch; leave it out")
    if args.race_jobs > 1 and not args.race:
        raise UserError("--race-jobs: only with --race; leave it out")
    settings = check_flags(stages, args.flags)
    if args.max_batch:
        return max_batch(args, stages)
    if args.race:
        check_race(stages, settings, args.flags)
    logs, interrupted = args.logs or RUNS / now(), False
    runner = Runner(settings, logs, args.time_limit, console, args.resume)
    with locked(logs, args.resume):
        try:
            measure(args, stages, runner)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            started = has_steps(logs) or args.resume or any(logs.glob("sweep/*/*.log"))
            if not started:  # nothing to show or resume: it must not be found as the newest run
                shutil.rmtree(logs, ignore_errors=True)  # (Windows keeps the lock)
    if interrupted and started:
        print_stop(args, stages, logs)
    print_outcomes(runner, logs)
    return 130 if interrupted else 1 if runner.failed() else 0


def measure(args, stages, runner):
    """Run the jobs of `run`, between two measurements of the machine."""
    from ladder.measure.race import describe_race, n_jobs, race
    from ladder.measure.runner import plan

    if args.race:
        console.print(describe_race(stages, args.race), markup=False)
        runner.n_jobs = n_jobs(stages, args.race)
    else:
        jobs = plan(stages, args.flags, runner.log_dir, args.repeat, args.peers, args.processes)
        runner.n_jobs = len(jobs)
    with runner:
        if not args.resume:
            runner.measure_machine(arguments=args.argv)
        if args.race:
            race(stages, args.flags, runner.log_dir, args.race, runner.run, args.processes, args.race_jobs)
        else:
            runner.run(jobs)
        runner.measure_machine()


def print_stop(args, stages, logs):
    """After Ctrl-C: how to resume, and how far the search of a race is."""
    from ladder.measure.race import search_progress

    if args.race and not has_steps(logs):
        console.print(search_progress(stages, logs), markup=False)
    console.print(f"stopped; python -m ladder run --resume --logs {logs} continues", markup=False)


def print_outcomes(runner, logs):
    """The table, and what failed."""
    from ladder.show.report import build_report

    if has_steps(logs):
        show(build_report(logs))
        console.print(f"logs: {logs}", markup=False)
    elif not any(logs.glob("sweep/*/*.log")):
        console.print("no rung finished a step, so there is no table")
    if failed := runner.failed():
        console.print(f"{len(failed)} of {runner.n_jobs} runs did not finish:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.name}: {outcome.status}: {outcome.reason}", markup=False)


def profile(args):
    from ladder.measure.runner import locked, parse_rungs
    from ladder.measure.step_profile import check_profile, profile_ladder
    from ladder.show.plots import profile_picture, save
    from ladder.show.profile import print_profile, read_profile

    stop_at_signals()
    folder = args.logs or PROFILES / now()
    stages = parse_rungs(args.rungs)
    check_profile(stages, args.flags, folder)  # before creating the folder
    with locked(folder, resume=True):
        failed = profile_ladder(stages, args.flags, folder, console, args.repeat)
    if found := read_profile(folder):
        print_profile(found, console)
        save(profile_picture(found), folder / "profile.png")
        console.print(f"{folder}/profile.json, profile.png", markup=False)
    return 1 if failed else 0


def survey(args):
    from ladder.measure.survey import survey
    from ladder.show.report import build_report

    stop_at_signals()
    out = args.out or SURVEYS / now()
    folders = survey(args.minutes, out, args.flags, console)
    for folder in folders:
        show(build_report(folder))
    console.print(f"To add this machine: copy the folders of {out} to logs/reference", markup=False)
    return 0 if folders else 1


def smoke(args):
    from ladder.measure.smoke import smoke

    stop_at_signals()
    flags = {"--device": args.device, "--model": args.model, "--data": args.data}
    words = [word for flag, value in flags.items() if value for word in (flag, value)]
    return smoke(words, args.out or Path("logs/smoke") / now(), console)


def max_batch(args, stages):
    from rich.table import Table

    from ladder.measure.runner import largest_batch

    table = Table("rung", "largest B", "tokens/s", "what stopped the next one", title="The largest batch")
    nothing_ran = False
    for stage in stages:
        with tempfile.TemporaryDirectory() as folder:
            best, speed, why = largest_batch(stage, args.flags, Path(folder), args.time_limit, args.processes,
                                             lambda line: console.print(line, style="dim", markup=False))
        table.add_row(stage.title, str(best), f"{speed:,.0f}" if speed else "–", escape(why))
        nothing_ran |= best == 0
    console.print(table)
    return 1 if nothing_ran else 0


def reference_folders():
    folders = sorted(path for path in REFERENCE.iterdir() if path.is_dir()) if REFERENCE.is_dir() else []
    if not folders:
        raise UserError(f"{REFERENCE} holds no folder of logs")
    return folders


def report(args):
    from ladder.show.report import build_report
    from ladder.show.tables import as_csv, as_json, write_tables

    def read(default):
        return [build_report(folder) for folder in [*args.folders, *args.logs] or default()]

    published = read(reference_folders) if args.readme or args.html else []
    if args.readme or args.html and not (args.png or args.json or args.csv):
        reports = published
    else:
        reports = read(lambda: [newest_run()])
    if not (args.readme or args.html or args.png or args.json or args.csv):
        for one in reports:
            show(one)
        return 0
    for reason in dict.fromkeys(reason for one in [*published, *reports] for reason in one.skipped):
        messages.print(f"! skipped: {reason}", markup=False)  # which a table says itself
    if args.readme:
        from ladder.show.plots import shown_in_docs, write_plots

        write_tables(published)
        messages.print("README.md, docs/*.md: tables rewritten")
        write_plots(published, ROOT / "docs", shown_in_docs(ROOT).__contains__)
    if args.png:
        from ladder.show.plots import write_plots

        for path in write_plots(reports, args.png):
            messages.print(str(path), markup=False)
    if args.html:
        from ladder.show.page import write_page

        write_page(published, args.html)
        messages.print(f"{args.html}: {args.html.stat().st_size / 1e6:.2f} MB")
    if args.json:
        print(as_json(reports))
    elif args.csv:
        print(as_csv(reports), end="")
    return 0


def compare(args):
    from ladder.judge.compare import print_comparison
    from ladder.show.logs import read_log

    print_comparison(*[read_log(path) for path in args.logs], console)
    return 0


def find_rung(word):
    """The stage called "7", "07" or "ddp", or by its file's name."""
    stage = BY_LABEL.get(word.lstrip("0") or "0") or BY_NAME.get(Path(word).stem)
    if stage is None:
        raise UserError(f"no rung {word}: there are 0 to {STAGES[-3].label}, ddp, fsdp and dcp, or their file names")
    return stage


def diff(args):
    from ladder.scripts.lessons import print_lesson, read_lesson

    if len(args.rungs) > 2:
        raise UserError("diff takes one rung, or two")
    stage = find_rung(args.rungs[-1])
    before = find_rung(args.rungs[0]) if len(args.rungs) == 2 else BY_LABEL.get(stage.before)
    old, new = (rung and rung.path.read_text(encoding="utf-8") for rung in (before, stage))
    print_lesson(read_lesson(old, new), console)
    print_effect(before, stage)
    return 0


def print_effect(before, stage):
    """Below the diff: the measured effect on the reference machines."""
    from ladder.show.report import build_report, within_noise
    from ladder.show.tables import conditions

    def times(row):
        return f"{row.ms:,.0f} ({row.ms_low:,.0f}–{row.ms_high:,.0f})"

    for folder in reference_folders() if before and REFERENCE.is_dir() else []:
        reference = build_report(folder)
        rows = {row.name: row for row in reference.rows}
        if not {before.name, stage.name} <= rows.keys():
            continue
        old, new = rows[before.name], rows[stage.name]
        console.print(f"\nMeasured: {conditions(reference)}", style="bold", markup=False)
        memory = f", {old.peak_memory_gb:.2f} -> {new.peak_memory_gb:.2f} GB" if new.peak_memory_gb else ""
        ratio = f"{new.tokens_per_second / old.tokens_per_second:.2f} x the tokens/sec"
        noise = ", within the noise: the spreads overlap" if within_noise(old, new) else ""
        console.print(
            f"  {times(old)} -> {times(new)} ms/step ({ratio}{noise}){memory}, "
            f"loss at step {new.last_step}: {old.last_loss:.3f} -> {new.last_loss:.3f}", markup=False, soft_wrap=True,
        )


def floor(args):
    from ladder.measure.runner import parse_rungs
    from ladder.count.cards import find_card
    from ladder.count.floor import check_setting, kernels_of, row_of, save_store
    from ladder.show.floors import print_floors

    cards = [find_card(name) for name in args.gpu or ["A100"]]
    labels = [stage.label for stage in parse_rungs(args.rungs)]
    check_setting(labels, args.model, args.B, args.T, args.save)
    counted = {}
    for label in labels:
        with messages.status(f"counting rung {label}"):
            counted[label] = kernels_of(label, args.model, args.B, args.T, stored=not args.save)
    if args.save:
        save_store(counted)
    print_floors([row_of(label, kernels, cards) for label, kernels in counted.items()], cards,
                 f"{args.model}, B={args.B} T={args.T}", console)
    return 0


def propagate(args):
    from ladder.scripts.propagate import propagate

    stage, until = find_rung(args.rung), args.until and find_rung(args.until)
    written = propagate(stage, until=until)
    console.print(f"the fix in {stage.file} is now in {len(written)} later rungs:", markup=False)
    for name, merged in written.items():
        console.print(f"  {name}", markup=False)
        for line in merged:
            console.print(f"    merged within this line, please check: {line}", markup=False, soft_wrap=True)
    if until and until != STAGES[-1]:
        following = STAGES[STAGES.index(until) + 1].file
        console.print(f"next: python -m ladder propagate {until.file}, or make the fix in {following} by hand and "
                      f"propagate that", markup=False, soft_wrap=True)
    return 0


def plain(error):
    """Replaces characters that the terminal's encoding lacks; an error handler for codecs."""
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end


def main(argv=None):
    codecs.register_error("plain", plain)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="plain")
    args = parse_args(argv)
    sys.argv[0] = f"python -m ladder {args.verb}"  # what the scripts' own parsers call themselves in an error
    verbs = {"check": check, "run": run, "profile": profile, "survey": survey, "report": report, "compare": compare,
             "diff": diff, "floor": floor, "propagate": propagate, "smoke": smoke}
    try:
        return verbs[args.verb](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
