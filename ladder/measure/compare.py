"""`python -m ladder compare`: training recipes, each a rung or a file of your own; or two logs, step by step.

What loads torch is imported where it is used: two logs need none.
"""
import os
import shutil
import sys
from pathlib import Path

from ladder.errors import UserError
from ladder.files import new_folder
from ladder.rungs.list import BY_NAME, ROOT, Rung, find_rung
from ladder.show.contest import CSV, read_csv, read_logs, write_csv
from ladder.show.logs import read_log

FOLDERS = Path("logs/compare")
SMALL = ["--model", "4x4x128", "-B", "16", "-T", "64", "--steps", "200", "--val-every", "20", "--val-sequences", "256",
         "--compile-mode", "none"]  # unless flags say otherwise: a run takes seconds on a CPU
MOST_TRIES = 24
SAME = {"data": "--data", "T": "-T", "tokens": "tokens a step (-B, --total-batch)", "steps": "--steps",
        "val_every": "--val-every", "val_sequences": "--val-sequences"}  # a comparison is unfair where these differ


def add_flags(parser):
    flag = parser.add_argument
    flag("what", nargs="+", metavar="WHAT", help="rungs or files: the first, and what is compared with it; or a folder "
         "of such a comparison, to show it again; or two logs")
    flag("--seeds", type=int, default=5, metavar="N", help="that are tested (default: %(default)s)")
    flag("--tries", type=int, default=MOST_TRIES, metavar="N", help="of learning rates for each, at most; 0: take "
         "those that the flags or the scripts name (default: %(default)s)")
    flag("--jobs", type=int, metavar="N",
         help="scripts at a time while only losses count (default: 2 on a CPU, else 1)")
    flag("--time-limit", type=float, default=3600, metavar="SECONDS", help="for each run (default: %(default)s)")
    flag("--logs", type=Path, metavar="FOLDER", help=f"a new folder (default: {FOLDERS}/DATE_TIME)")
    flag("--resume", action="store_true", help="continue the newest comparison of these arguments, or --logs")
    flag("--gpu", metavar="CARD", help="of logs that name none, to find impossible times")


def main(args, console):
    words = [Path(word) for word in args.what]
    if len(words) == 2 and all(word.suffix == ".log" for word in words):
        from ladder.count.cards import find_card
        from ladder.show.compare import print_comparison

        print_comparison(*map(read_log, words), console, args.gpu and find_card(args.gpu))
        return 0
    if len(words) == 1 and (words[0] / CSV).exists():
        return show(words[0], console)
    if len(words) == 1:
        raise UserError(f"compare {words[0]}: give two rungs or files, two logs, or the folder of a comparison")
    return compare_recipes(args, console)


def show(folder, console):
    """The table and the sentences of a comparison, from its record."""
    from ladder.show.verdict import print_verdict

    print_verdict(read_csv(folder / CSV), console)
    return 0


# ---- what is compared ------------------------------------------------------------------------------------------------


def script_of(word):
    """The Rung that a word names: one of the ladder, or any other file, which has no label."""
    path = Path(word)
    if path.suffix != ".py":
        return find_rung(word)
    known = BY_NAME.get(path.stem)
    return known if known and known.path == path.resolve() else Rung("", str(path.resolve()), path.name)


def copied(scripts, folder):
    """The scripts, files as copies in the folder: each run is then of the same script, under a name of its own."""
    copies = []
    for rung in scripts:
        if not rung.label:
            name = rung.name
            while name in [*BY_NAME, *(one.name for one in copies)]:
                name += "_yours"
            folder.mkdir(parents=True, exist_ok=True)
            copy = shutil.copyfile(rung.path, folder / f"{name}.py")
            rung = Rung("", str(copy.resolve()), rung.title)
        copies.append(rung)
    return copies


def check_scripts(scripts):
    """Refuse what has no validation loss, or no learning rate."""
    from ladder.measure.exercise import check_file
    from ladder.measure.runner import defaults

    for rung in scripts:
        if not rung.label:
            check_file(rung.path)
        if not {"val_every", "max_lr"} <= defaults(rung).keys():
            raise UserError(f"{rung.file}: has no --val-every or --max-lr; take validation, 18 to 24, or a copy of one")


def refuse_unlike(facts):
    """Refuse {script: {what: value}} that are not all alike, by name."""
    (first, wanted), *others = facts.items()
    for name, found in others:
        for what, value in found.items():
            if value != wanted[what]:
                raise UserError(f"{SAME.get(what, what)}: {name} has {value} and {first} {wanted[what]}, which is not "
                                "a fair comparison; give both the same")


def check_fair(scripts, flags):
    """The settings of the first script. Refuses flags that no script has, or with which they do not do the same."""
    from ladder.measure.contest import known_flags
    from ladder.measure.runner import check_flags, settings_of, split_flags

    if split_flags(flags, "--seed")[0]:
        raise UserError("--seed: a comparison sets it itself, for the search and each round; leave it out")
    known = {rung: known_flags(rung, flags) for rung in scripts}
    unknown = [word for word in flags if word.startswith("-") and not any(word in words for words in known.values())]
    if unknown:
        raise UserError(f"{unknown[0]}: none of these scripts has this flag; --help of a script lists them")
    settings = check_flags(scripts[:1], known[scripts[0]])
    facts = {}
    for rung, words in known.items():
        own = vars(settings_of(rung, words))
        own["tokens"] = own.get("total_batch") or own["B"] * own["T"]
        facts[rung.title] = {name: str(own[name]) for name in SAME}
    refuse_unlike(facts)
    if not settings.val_every:
        raise UserError("--val-every 0: validation losses are compared; give the steps from one to the next")
    return settings


def check_logs(logs):
    """Refuse runs that did not do the same, whatever their flags were."""
    facts = {}
    for path in logs:
        try:
            run = read_log(path)
        except UserError:  # it ended before its first step
            continue
        facts[path.stem] = {"--data": run.data, "T": run.T, "tokens": run.tokens_per_step,
                            "validation": run.headers.get("validation")}
    if facts:
        refuse_unlike(facts)


# ---- the contest -----------------------------------------------------------------------------------------------------


def newest_of(about):
    """The newest folder with a comparison of this kind."""
    from ladder.measure.contest import read_about

    for folder in sorted(FOLDERS.glob("*"), reverse=True):
        if about.items() <= read_about(folder).items():
            return folder
    raise UserError(f"--resume: {FOLDERS} holds no comparison of these arguments; start it without --resume")


def keep(scripts, folder):
    """Write the record of what has ended."""
    record, _ = read_logs(folder, [rung.name for rung in scripts])
    if len(record.points):
        write_csv(record, folder / CSV)


def compare_recipes(args, console):
    scripts = [script_of(word) for word in args.what]
    beside = [str(rung.path.parent) for rung in scripts if not rung.label]  # modules that a file may import
    sys.path += beside
    check_scripts(scripts)
    text = "bytes" if (ROOT / "data" / "bytes" / "meta.json").exists() else "tokens"  # bytes take a third of the time
    flags = [*SMALL, "--data", f"data/{text}", *args.flags]
    settings = check_fair(scripts, flags)
    at_once = args.jobs or (2 if settings.device == "cpu" else 1)
    about = {"what": args.what, "seeds": args.seeds, "tries": args.tries, "flags": flags}
    folder = args.logs or (newest_of(about) if args.resume else new_folder(FOLDERS))
    from ladder.measure.contest import Contest, hold
    from ladder.measure.runner import locked
    from ladder.show.plots import save
    from ladder.show.verdict import verdict_picture

    with locked(folder, args.resume):
        scripts = copied(scripts, folder / "scripts")
        contest = Contest(scripts, flags, folder, args.seeds, at_once=at_once, most_tries=args.tries, check=check_logs,
                          env={"PYTHONPATH": os.pathsep.join([*beside, os.environ.get("PYTHONPATH", "")])})
        try:
            runner = hold(contest, about, settings.device, args.time_limit, console)
        except KeyboardInterrupt:
            console.print("stopped; the same command with --resume continues")
            return 130
        finally:
            keep(scripts, folder)
    record = read_csv(folder / CSV)
    if not record.names:
        raise UserError(f"{folder}: no run ended with a validation loss; see its logs")
    save(verdict_picture(record), folder / "compare.png")
    show(folder, console)
    console.print(f"{folder}: {CSV}, compare.png; python -m ladder compare {folder} shows this again", soft_wrap=True)
    return 1 if runner.failed() else 0
