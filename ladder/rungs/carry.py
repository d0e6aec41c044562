"""Carry a fix made in one rung through all later ones, as far as it goes.

The fix is the uncommitted change of a rung's file, except its docstring. It goes from rung to rung along the tree: git
merges it, line by line, with what the rung itself changes, and what is uncommitted there goes along. Where both changed
the same lines, the rung's file gets git's conflict markers; where the result would break the ladder's law, it stays as
it is. The rungs that start from there wait: make the fix there by hand, and carry it on from there. A rung that starts
from two gets the fix from both, for each definition from the one that has it.

To insert a script into a chain, first commit an unchanged copy of the script before it, and let the next one start from
the copy. Then make the change there, and carry it on.
"""
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder.errors import UserError
from ladder.rungs.check_laws import definitions, foreign, pieces, plumbing, rung_violations
from ladder.rungs.lessons import split_docstring
from ladder.rungs.list import ROOT, RUNGS


def git(*words, folder=None):
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, encoding="utf-8")


def committed(file, root):
    done = git("show", f"HEAD:./{file}", folder=root)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1]
        raise UserError(f"{file}: not committed, so there is no change to carry; git commit it first ({why})")
    return done.stdout


def split(file, source):
    """(The docstring, everything below it) of a script."""
    try:
        end = split_docstring(source)[2] - 1
        plumbing(source)
    except SyntaxError as error:
        raise UserError(f"{file}: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{file}: {error}, the one between lesson and plumbing") from None
    lines = source.splitlines(keepends=True)
    return "".join(lines[:end]), "".join(lines[end:])


def merge(ours, base, theirs, names):
    """(`ours` with what changes `base` to `theirs`, whether they conflict); `names` are what git calls the three."""
    with TemporaryDirectory() as folder:
        words = []
        for side, text, name in zip("abc", (ours, base, theirs), names, strict=True):
            Path(folder, side).write_text(text, encoding="utf-8", newline="")
            words += ["-L", name]
        done = git("merge-file", "-p", *words, "a", "b", "c", folder=folder)
    return done.stdout, done.returncode != 0


def rungs_after(rung):
    """The rungs that start from `rung`, directly or not."""
    rungs = [rung]
    for later in RUNGS:
        if {*later.starts} & {*rungs}:
            rungs.append(later)
    return rungs[1:]


def not_from(rung, start, old):
    """The definitions that a rung has from the other of the two that it starts from; what both have is the first's."""
    if len(rung.starts) == 1:
        return set()
    ours, first, second = (definitions(old[script.file]) for script in (rung, *rung.starts))
    of_first = {name for name, text in ours.items() if text == first.get(name)}
    of_second = {name for name, text in ours.items() if text == second.get(name)} - of_first
    return of_second if start is rung.start else of_first


def body_with(source, donor, names):
    """A script's text below the docstring, with the definitions of these names as in another script."""
    donated = pieces(donor)
    return "".join(donated.get(name, text) if name in names else text for name, text in pieces(source).items())


def carry(rung, old, new):
    """(the text of `rung` with what has changed in the rungs that it starts from, why the fix stops here or "").

    Where it conflicts, the text has git's markers; where it would break the law, it is as it was.
    """
    text = new[rung.file]
    for start in rung.starts:
        docstring, ours = split(rung.file, text)
        not_its = not_from(rung, start, old)
        base, theirs = (body_with(source[start.file], text, not_its) for source in (old, new))
        names = rung.file, f"{start.file} before the fix", f"{start.file} with it"
        merged, conflict = merge(ours, base, theirs, names)
        text = docstring + merged
        if conflict:
            return text, "it conflicts with what this rung changes, as git's markers there show"
    try:
        broken = list(rung_violations(rung, new | {rung.file: text}))
    except SyntaxError as error:
        broken = [f"not Python: {error.msg}: {(error.text or '').strip()}"]
    if broken:
        return new[rung.file], f"the result would break the ladder's law: {broken[0]}"
    return text, ""


def propagate(rung, root=ROOT):
    """Carry the uncommitted change of a rung to all that start from it, as far as it goes.

    Returns the files that have it now, and a text for each rung where it stops: those that start from there wait, too.
    """
    later = rungs_after(rung)
    starts = {start for script in later for start in script.starts}  # of one that starts from two, the other, too
    old = {script.file: committed(script.file, root) for script in {rung, *later, *starts}}
    new = {script.file: (root / script.file).read_text(encoding="utf-8") for script in RUNGS}
    if split(rung.file, old[rung.file])[1] == split(rung.file, new[rung.file])[1]:
        raise UserError(f"{rung.file} has no uncommitted change outside its docstring: make the fix there first")
    for broken in rung_violations(rung, new) if rung.starts else foreign(new):
        raise UserError(f"nothing was written; the fix breaks the ladder's law: {broken}")
    written, stops = [], []
    for script in later:
        text, why = carry(script, old, new)
        if text != new[script.file]:
            (root / script.file).write_text(text, encoding="utf-8", newline="\n")
        if why:  # what starts from here sees no change
            stops.append(f"{script.file}: the fix stops here, for {len(rungs_after(script))} later rungs, too: {why}; "
                         f"make it there by hand, then: python -m ladder propagate {script.file}")
        elif text != new[script.file]:
            new[script.file] = text
            written.append(script.file)
    return written, stops
