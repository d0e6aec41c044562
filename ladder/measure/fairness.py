"""What makes a comparison of training recipes fair: both train with the same data, tokens and validations."""
import argparse

from ladder.errors import UserError
from ladder.measure.script_flags import check_file, check_flags, defaults, settings_of, split_flags
from ladder.records.logs import read_log
from ladder.rungs.list import BY_NAME, load_script, today

# A comparison is unfair where these differ.
MUST_AGREE = {"data": "--data", "T": "-T", "tokens": "tokens a step (-B, --total-batch)", "steps": "--steps",
              "val_every": "--val-every", "val_sequences": "--val-sequences"}


def known_flags(rung, flags):
    """The words of the flags that a script has; others are for other scripts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    load_script(rung).add_flags(parser)
    unknown, known = parser.parse_known_args(flags)[1], []
    for word in flags:
        if unknown and word == unknown[0]:
            unknown.pop(0)
        else:
            known.append(word)
    return known


def refuse_unlike(facts):
    """Refuse {script: {what: value}} that are not all alike, by name."""
    (first, wanted), *others = facts.items()
    for name, its_facts in others:
        for what, value in its_facts.items():
            if value != wanted[what]:
                raise UserError(f"{MUST_AGREE.get(what, what)}: {name} has {value} and {first} {wanted[what]}, which "
                                "is not a fair comparison; give both the same")


def check_scripts(scripts):
    """Refuse a file with another script's name, and what has no validation loss, or no learning rate."""
    names = [rung.name for rung in scripts]
    for rung in scripts:
        if names.count(rung.name) > 1:
            raise UserError(f"{rung.title}: two of these scripts have this name; leave one out, or rename it")
        if not rung.label:
            check_file(rung.path)
            if today(rung.name) in BY_NAME:  # also by a name of before
                raise UserError(f"{rung.path}: a script of the ladder has this name; rename it")
        if not {"val_every", "max_lr"} <= defaults(rung).keys():
            raise UserError(f"{rung.file}: has no --val-every or --max-lr; use a script of beyond/modern/ or a copy")


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
        its_settings = vars(settings_of(rung, words))
        its_settings["tokens"] = its_settings.get("total_batch") or its_settings["B"] * its_settings["T"]
        facts[rung.title] = {name: str(its_settings[name]) for name in MUST_AGREE}
    refuse_unlike(facts)
    if not settings.val_every:
        raise UserError("--val-every 0: a comparison needs validation losses; give a number of steps above 0")
    return settings


def check_logs(logs):
    """Refuse runs that did not do the same, whatever their flags were."""
    facts = {}
    for path in logs:
        try:
            run = read_log(path)
        except UserError:  # it ended before its first step
            continue
        facts[path.stem] = {"data": run.data, "T": run.T, "tokens": run.tokens_per_step,
                            "validation": run.headers.get("validation")}
    if facts:
        refuse_unlike(facts)
