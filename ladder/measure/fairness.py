"""What makes a comparison of training recipes fair: both train with the same data, tokens and validations."""
import os
import shutil
import sys
from pathlib import Path

from ladder.errors import UserError
from ladder.files import new_folder
from ladder.measure.contest import MUST_AGREE, Contest, known_flags, open_contest, read_about, refuse_unlike
from ladder.measure.exercise import check_file
from ladder.measure.run_folder import locked
from ladder.measure.script_flags import check_flags, defaults, settings_of, split_flags
from ladder.records.recipes import CSV, FOLDERS, read_logs, write_csv
from ladder.rungs.list import BY_NAME, Rung, find_rung

SMALL = ["--model", "4x4x128", "-B", "16", "-T", "64", "--steps", "200", "--val-every", "20", "--val-sequences", "256",
         "--compile-mode", "none"]  # unless flags say otherwise: a run takes seconds on a CPU


def script_of(word):
    """The Rung that a word names: one of the ladder, or any other file, which has no label."""
    path = Path(word)
    if path.suffix != ".py":
        return find_rung(word)
    known = BY_NAME.get(path.stem)
    return known if known and known.path == path.resolve() else Rung("", str(path.resolve()), word)


def copied(scripts, folder):
    """The scripts, files as copies in the folder: each run is then of the same script, under a name of its own."""
    copies = []
    for rung in scripts:
        if not rung.label:
            name = rung.name
            while name in [*BY_NAME, *(one.name for one in copies)]:
                name += "_yours"
            copy = folder / f"{name}.py"
            if not copy.exists():
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(rung.path, copy)
            elif copy.read_bytes() != rung.path.read_bytes():
                raise UserError(f"{rung.path}: differs from {copy}, its copy that ran; give a new folder")
            rung = Rung("", str(copy.resolve()), rung.title)
        copies.append(rung)
    return copies


def check_scripts(scripts):
    """Refuse what has no validation loss, or no learning rate."""
    for rung in scripts:
        if not rung.label:
            check_file(rung.path)
        if not {"val_every", "max_lr"} <= defaults(rung).keys():
            raise UserError(f"{rung.file}: has no --val-every or --max-lr; take a script of beyond/modern/ or a copy")


def check_fair(scripts, flags):
    """The settings of the first script. Refuses flags that no script has, or with which they do not do the same."""
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
        facts[rung.title] = {name: str(own[name]) for name in MUST_AGREE}
    refuse_unlike(facts)
    if not settings.val_every:
        raise UserError("--val-every 0: validation losses are compared; give the steps from one to the next")
    return settings


def newest_of(about):
    """The newest folder with a comparison of this kind."""
    for folder in sorted(FOLDERS.glob("*"), reverse=True):
        if about.items() <= read_about(folder).items():
            return folder
    raise UserError(f"--resume: {FOLDERS} holds no comparison of these arguments; start it without --resume")


def hold_comparison(args, console):
    """Hold the contest that these arguments describe: (its folder, its runner or None where it was stopped)."""
    scripts = [script_of(word) for word in args.what]
    beside = [str(rung.path.parent) for rung in scripts if not rung.label]  # modules that a file may import
    sys.path += beside
    check_scripts(scripts)
    data = "data/bytes" if Path("data/bytes/meta.json").exists() else "data/tokens"  # bytes take a third of the time
    flags = [*SMALL, "--data", data, *args.flags]
    settings = check_fair(scripts, flags)
    at_once = args.jobs or (2 if settings.device == "cpu" else 1)
    about = {"what": args.what, "seeds": args.seeds, "tries": args.tries, "flags": flags}
    folder = args.logs or (newest_of(about) if args.resume else new_folder(FOLDERS))
    with locked(folder, args.resume):
        scripts = copied(scripts, folder / "scripts")
        path = os.pathsep.join([*beside, os.environ.get("PYTHONPATH", "")])
        contest = Contest(scripts, flags, folder, args.seeds, at_once=at_once, most_tries=args.tries,
                          against_first=True, env={"PYTHONPATH": path})
        open_contest(contest, about, settings.device, args.time_limit, console)
        try:
            with contest.runner:
                contest.hold()
            return folder, contest.runner
        except KeyboardInterrupt:
            return folder, None
        finally:
            record, _ = read_logs(folder, [rung.name for rung in scripts])
            if len(record.points):
                write_csv(record, folder / CSV)
