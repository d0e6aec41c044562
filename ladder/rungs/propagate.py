"""Carry a fix made in one rung through all later ones, as far as it goes.

The fix is the uncommitted change of a rung's file, except its docstring. It goes from rung to rung along the tree: git
merges it with what the rung itself changes, line by line, and where both changed the same lines, word by word. A rung
where that is not possible, or where the result would break the ladder's law, stays as it is, as do those that start
from it: the fix is made there by hand, and carried on from there. A rung that starts from two gets the fix from both,
for each definition from the one that has it.
"""
import difflib
import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.rungs.laws import definitions, foreign, pieces, plumbing, rung_violations
from ladder.rungs.lessons import split_docstring
from ladder.rungs.list import ROOT, RUNGS

CONFLICT = re.compile(r"^<{7} [^\n]*\n(.*?)^\|{7} [^\n]*\n(.*?)^={7}\n(.*?)^>{7} [^\n]*\n", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\w+|\n|[^\S\n]+|.")  # a number, with its exponent, is one


class Conflict(Exception):
    """Where and why a fix does not go on, as the user reads it."""


def git(*words, folder=None):
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, encoding="utf-8")


def committed(file, root):
    done = git("show", f"HEAD:./{file}", folder=root)
    if done.returncode:
        raise UserError(f"git has no committed {file} to compare with: {done.stderr.strip().splitlines()[-1]}")
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


def merge_lines(ours, base, theirs, names=("ours", "base", "theirs")):
    """git's merge of three texts, with the conflicts in it; `names` are what it calls the three."""
    with TemporaryDirectory() as folder:
        words = []
        for side, text, name in zip("abc", (ours, base, theirs), names, strict=True):
            Path(folder, side).write_text(text, encoding="utf-8", newline="")
            words += ["-L", name]
        return git("merge-file", "-p", "--diff3", *words, "a", "b", "c", folder=folder).stdout


def merge_words(ours, base, theirs):
    """The merge of three texts word by word; None where they conflict. For git each word gets a line, as JSON."""
    lines = []
    for text in (ours, base, theirs):
        lines.append("".join(json.dumps(word) + "\n" for word in WORD.findall(text)))
    merged = merge_lines(*lines)
    if CONFLICT.search(merged):
        return None
    return "".join(json.loads(line) for line in merged.splitlines())


def line_in(ours, by_line, conflict):
    """How many lines of `ours` stand before a conflict of git's merge `by_line`."""
    with_ours = CONFLICT.sub(r"\1", by_line).splitlines()
    place = CONFLICT.sub(r"\1", by_line[: conflict.start()]).count("\n")
    matcher = difflib.SequenceMatcher(None, ours.splitlines(), with_ours, autojunk=False)
    last = [block for block in matcher.get_matching_blocks() if block.b <= place][-1]
    return last.a + min(place - last.b, last.size)


def merge(ours, base, theirs, names=("ours", "base", "theirs"), first_line=1):
    """`ours` with what changes `base` to `theirs`; raises Conflict, also where the result would not be Python.

    `first_line` is the number that the first line of `ours` has in its file.
    """
    by_line = merge_lines(ours, base, theirs, names)
    merged, end, hunks = "", 0, []
    for conflict in CONFLICT.finditer(by_line):
        words = merge_words(*conflict.groups())
        if words is None:
            hunks.append(f"line {first_line + line_in(ours, by_line, conflict)}:\n{conflict[0]}")
        else:
            merged += by_line[end : conflict.start()] + words
            end = conflict.end()
    if hunks:
        raise Conflict("it conflicts with what this rung changes\n" + "".join(hunks))
    merged += by_line[end:]
    try:
        compile(merged, "merged", "exec")
    except SyntaxError as error:
        raise Conflict(f"git merges it, but not to Python: {error.msg}: {(error.text or '').strip()}\n") from None
    return merged


def rungs_after(rung):
    """The rungs that start from `rung`, directly or not."""
    found = [rung]
    for rung in RUNGS:
        if any(start in found for start in rung.starts):
            found.append(rung)
    return found[1:]


def not_from(rung, start, old, new):
    """The definitions that a rung does not get from `start`, one of two rungs that it starts from.

    It has them from the other; or it has neither's, and the fix has come by the first of the two already.
    """
    if len(rung.starts) == 1:
        return set()
    ours, its = definitions(old[rung.file]), definitions(old[start.file])
    [other] = [one for one in rung.starts if one is not start]
    before, after = definitions(old[other.file]), definitions(new[other.file])
    names = {name for name, text in ours.items() if text != its.get(name) and text == before.get(name)}
    if start is not rung.start:
        names |= {name for name in ours if before.get(name) != after.get(name)}
    return names


def body_with(source, other, names):
    """A script's text below the docstring, with the definitions of these names as in another script."""
    theirs = pieces(other)
    return "".join(theirs.get(name, text) if name in names else text for name, text in pieces(source).items())


def carry(rung, old, new):
    """The text of `rung` with what has changed in the rungs that it starts from; raises Conflict."""
    text = old[rung.file]
    for start in rung.starts:
        docstring, ours = split(rung.file, text)
        not_its = not_from(rung, start, old, new)
        base, theirs = (body_with(source[start.file], text, not_its) for source in (old, new))
        names = rung.file, f"{start.file} before the fix", f"{start.file} with it"
        text = docstring + merge(ours, base, theirs, names, first_line=docstring.count("\n") + 1)
    for broken in rung_violations(rung, new | {rung.file: text}):
        raise Conflict(f"the result would break the ladder's law: {broken}\n")
    return text


def own_lines(merged, *sources):
    """The lines of a merged text that none of the others has."""
    known = {line.strip() for source in sources for line in source.splitlines()}
    return [line.strip() for line in merged.splitlines() if line.strip() not in known]


def check_start(rung, later, old, new):
    """Refuse a rung without a fix, one that breaks the law, and uncommitted changes that could be lost."""
    dirty = [rung.file for rung in later if new[rung.file] != old[rung.file]]
    if dirty:
        raise UserError(f"{dirty[-1]} has uncommitted changes: commit or stash them first, so that nothing is lost; "
                        f"if they are this fix, continue from there: python -m ladder propagate {dirty[-1]}")
    if split(rung.file, old[rung.file])[1] == split(rung.file, new[rung.file])[1]:
        raise UserError(f"{rung.file} has no uncommitted change outside its docstring: make the fix there first")
    for broken in rung_violations(rung, new) if rung.starts else foreign(new):
        raise UserError(f"nothing was written; the fix breaks the ladder's law: {broken}")


def propagate(rung, root=ROOT):
    """Carry the uncommitted change of a rung to all that start from it, as far as it goes.

    Returns {file: its lines that were merged word by word} of the files written, and a text for each rung where it
    stops: those that start from there wait, too.
    """
    later = rungs_after(rung)
    starts = {start for one in later for start in one.starts}  # of one that starts from two, the other, too
    old = {one.file: committed(one.file, root) for one in {rung, *later, *starts}}
    new = {one.file: (root / one.file).read_text(encoding="utf-8") for one in RUNGS}
    check_start(rung, later, old, new)
    written, stops, waiting = {}, [], set()
    for rung in later:
        if rung in waiting:  # it starts from one where the fix has stopped
            continue
        try:
            new[rung.file] = carry(rung, old, new)
        except Conflict as conflict:
            waiting.update(rungs_after(rung))
            stops.append(f"{rung.file}: the fix stops here, for {len(rungs_after(rung))} later rungs, too: {conflict}"
                         f"make it in {rung.file} by hand, then: python -m ladder propagate {rung.file}")
            continue
        if new[rung.file] != old[rung.file]:
            written[rung.file] = own_lines(
                new[rung.file], old[rung.file], *(new[start.file] for start in rung.starts))
    for file in written:
        mode = (root / file).stat().st_mode
        write_whole(root / file, new[file])
        (root / file).chmod(mode)
    return written, stops
