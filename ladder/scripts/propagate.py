"""Carry a fix made in one rung through all later ones.

The fix is the uncommitted change of FILE, except its docstring. It goes from rung to rung along the tree: git merges it
with what the rung itself changes, line by line, and where both changed the same lines, word by word. Nothing is written
unless every merge succeeds and the ladder's law still holds.
"""
import json
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.scripts.laws import plumbing, violations
from ladder.scripts.lessons import split_docstring
from ladder.scripts.stages import BY_LABEL, ROOT, STAGES

CONFLICT = re.compile(r"^<{7} [^\n]*\n(.*?)^\|{7} [^\n]*\n(.*?)^={7}\n(.*?)^>{7} [^\n]*\n", re.MULTILINE | re.DOTALL)
WORD = re.compile(r"\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\w+|\n|[^\S\n]+|.")  # a number, with its exponent, is one


class Conflict(Exception):
    """Texts that do not merge; its text is what git shows of them."""


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


def merge_lines(texts, names):
    """git's merge of (ours, base, theirs), and how many conflicts are in it; `names` are what it calls the three."""
    with TemporaryDirectory() as folder:
        paths = [Path(folder, side) for side in ("ours", "base", "theirs")]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text, encoding="utf-8", newline="")
        labels = [word for name in names for word in ("-L", name)]
        done = git("merge-file", "-p", "--diff3", *labels, *map(str, paths))
    return done.stdout, done.returncode


def merge_words(texts):
    """The same for the words of three texts: one word to a line. Raises Conflict."""
    lines = ["".join(f"{json.dumps(word)}\n" for word in WORD.findall(text)) for text in texts]
    merged, n_conflicts = merge_lines(lines, ("ours", "base", "theirs"))
    if n_conflicts:
        raise Conflict
    return "".join(map(json.loads, merged.splitlines()))


def merge(ours, base, theirs, names=("ours", "base", "theirs")):
    """`ours` with what changes `base` to `theirs`; raises Conflict, also where the result would not be Python."""
    by_line, _ = merge_lines((ours, base, theirs), names)
    try:
        merged = CONFLICT.sub(lambda conflict: merge_words(conflict.groups()), by_line)
        compile(merged, "merged", "exec")
    except (Conflict, SyntaxError) as error:
        hunks = "\n".join(conflict[0] for conflict in CONFLICT.finditer(by_line))
        raise Conflict(hunks or f"git merges it, but not to Python: {error.msg}: {error.text}") from None
    return merged


def rungs_after(stage, until=None):
    """The rungs that start from `stage`, directly or not, up to and including `until`."""
    found = [stage]
    for rung in STAGES:
        if until not in found[1:] and BY_LABEL.get(rung.before) in found:
            found.append(rung)
    return found[1:]


def propagate(stage, root=ROOT, until=None):
    """Carry the uncommitted change of a rung through all that start from it, or up to and including `until`.

    Returns {file: [lines that were merged word by word]} of the files written.
    """
    later = rungs_after(stage, until)
    if not later or until not in (None, later[-1]):
        raise UserError(f"{stage.file}: no rung comes after it" + (f" up to --until {until.label}" if until else ""))
    old = {rung.file: committed(rung.file, root) for rung in (stage, *later)}
    new = {rung.file: (root / rung.file).read_text(encoding="utf-8") for rung in STAGES}
    if dirty := [rung.file for rung in later if new[rung.file] != old[rung.file]]:
        raise UserError(f"{dirty[-1]} has uncommitted changes: commit or stash them first, so that nothing is lost; "
                        f"if they are this fix, continue from there: python -m ladder propagate {dirty[-1]}")
    if split(stage.file, old[stage.file])[1] == split(stage.file, new[stage.file])[1]:
        raise UserError(f"{stage.file} has no uncommitted change outside its docstring: make the fix there first")

    written = {}
    for rung in later:
        before = BY_LABEL[rung.before]
        docstring, ours = split(rung.file, old[rung.file])
        base, theirs = (split(before.file, sources[before.file])[1] for sources in (old, new))
        try:
            merged = merge(ours, base, theirs, (rung.file, f"{before.file} before the fix", f"{before.file} with it"))
        except Conflict as conflict:
            way = f"carry it up to there with --until {before.label}, " if before != stage else ""
            raise UserError(f"{rung.file}: the fix conflicts with what this rung changes, and nothing was written; "
                            f"{way}make it in {rung.file} by hand, then python -m ladder propagate {rung.file}\n"
                            f"{conflict}") from None
        if merged != ours:
            new[rung.file] = docstring + merged
            known = {line.strip() for line in (ours + theirs).splitlines()}
            written[rung.file] = [line.strip() for line in merged.splitlines() if line.strip() not in known]
    not_yet = {rung.file for rung in rungs_after(stage)} - old.keys()
    if broken := list(violations({file: text for file, text in new.items() if file not in not_yet})):
        raise UserError(f"nothing was written; the result would break the ladder's law: {broken[0]}")

    for file in written:
        mode = (root / file).stat().st_mode
        write_whole(root / file, new[file])
        (root / file).chmod(mode)
    return written
