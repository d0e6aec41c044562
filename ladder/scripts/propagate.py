"""Carry a fix made in one rung through the later ones, definition by definition.

The fix is the uncommitted change of FILE, except its docstring. It goes from rung to rung: each is merged with the
change to the one before it. A definition that the rung itself did not change is replaced; one that it did change is
merged line by line, and word by word where both changed the same lines. Everything below the banner counts as one
definition. Nothing is written unless every merge succeeds and the ladder's law still holds.
"""
import difflib
import itertools
import re
import subprocess

from ladder.errors import UserError
from ladder.scripts.laws import pieces, plumbing, violations
from ladder.scripts.lessons import split_docstring
from ladder.scripts.stages import BY_LABEL, ROOT, STAGES

WORD = re.compile(r"\d[\w.]*(?:(?<=[eE])[-+]\d+)?|\w+|\s+|.")  # a number is one word, with its signed exponent
BELOW = "what is below the banner"


class Conflict(Exception):
    """Both sides changed the same lines; `args` are their (first, end) in the base, in ours and in theirs."""


def committed(file, root):
    try:
        done = subprocess.run(["git", "show", f"HEAD:./{file}"], cwd=root, capture_output=True, encoding="utf-8")
    except FileNotFoundError:
        raise UserError("git is not installed: propagate compares with its last commit") from None
    if done.returncode:
        raise UserError(f"git has no committed {file} to compare with: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def split(file, source):
    """(The docstring's lines, {name: text} of the rest) of a script; everything below the banner is one text."""
    try:
        n_docstring, below = split_docstring(source)[2] - 1, plumbing(source)
    except SyntaxError as error:
        raise UserError(f"{file}: line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise UserError(f"{file}: {error}, the one between lesson and plumbing") from None
    lesson = pieces(source.removesuffix(below))
    return source.splitlines(keepends=True)[:n_docstring], lesson | {BELOW: below}


def merge(base, ours, theirs, gap=0):
    """`ours` with the changes from `base` to `theirs`, all lists of lines; raises Conflict.

    Changes of the two sides may touch, but not overlap. With gap=1, as for words, one between them must be unchanged.
    """
    sides = ours, theirs
    edits = sorted(
        (i1, i2, side, j1, j2) for side, text in enumerate(sides)
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, base, text, autojunk=False).get_opcodes()
        if tag != "equal"
    )
    groups = []  # [first, end] in the base, [edits that overlap]
    for first, end, *edit in edits:
        if groups and (first < groups[-1][1] + gap or [first, end] == groups[-1][:2]):
            groups[-1][1] = max(groups[-1][1], end)
        else:
            groups.append([first, end, []])
        groups[-1][2].append((first, end, *edit))
    merged, done = [], 0
    for first, end, group in groups:
        spans = {}  # by side: where it has what it makes of base[first:end]
        for i1, i2, side, j1, j2 in group:
            spans[side] = spans.get(side, (j1 - i1 + first,))[0], j2 - i2 + end
        made = [sides[side][slice(*span)] for side, span in sorted(spans.items())]
        if made[0] != made[-1]:  # both sides changed it, differently
            conflict = Conflict((first, end), spans[0], spans[1])
            if gap:
                raise conflict
            try:
                words = [WORD.findall("".join(lines)) for lines in (base[first:end], *made)]
                made[0] = "".join(merge(*words, gap=1)).splitlines(keepends=True)
            except Conflict:
                raise conflict from None
        merged += base[done:first] + made[0]
        done = end
    return merged + base[done:]


def carry(old, new, own):
    """(the lesson `own` with the change from `old` to `new`, [(name, Conflict), ...]); lessons are {name: text}."""
    names, merged, conflicts = list(own), {}, []
    for before, name in itertools.pairwise(["", *new]):
        if name not in names:
            place = names.index(before) + 1 if before else 0
            while "." not in name and "." in "".join(names[place : place + 1]):  # not into the middle of a class
                place += 1
            names.insert(place, name)
    for name in names:
        texts = [f"{lesson.get(name, '').rstrip()}\n".splitlines(keepends=True) for lesson in (old, own, new)]
        try:  # what one side added or removed must be unchanged on the other
            merged[name] = "".join(merge(*texts, gap=["\n"] in texts)).rstrip()
        except Conflict as conflict:
            conflicts.append((name, conflict))
    follows, following = dict(itertools.pairwise([*own, ""])), ""
    for name in reversed([name for name in names if merged.get(name)]):
        blank = "\n\n" if "." in following else "\n\n\n"  # where a definition was added or removed; else as it was
        merged[name] += own[name][len(own[name].rstrip()) :] if follows.get(name) == following else blank
        following = name
    return {name: merged.get(name, "") for name in names}, conflicts


def explain(file, before, name, spans, lessons, n_above):
    """A conflict in words: the lines of the rung `file`, and what the fix does to those of the rung before."""
    old, own, new = (
        "\n".join(f"    | {line}" for line in lesson.get(name, "").splitlines()[slice(*span)]) or "    | (nothing)"
        for lesson, span in zip(lessons, spans, strict=True)
    )
    above = itertools.takewhile(lambda other: other != name, lessons[1])
    line = n_above + sum(lessons[1][other].count("\n") for other in above) + spans[1][0] + 1
    return f"{file}, line {line}, in {name}:\n{own}\n  {before} had, before the fix:\n{old}\n  and with it:\n{new}"


def propagate(stage, root=ROOT, until=None):
    """Carry the uncommitted change of a rung through all later ones, or up to and including `until`.

    Returns {file: [lines that were merged word by word]} of the files written.
    """
    last = STAGES.index(until or STAGES[-1])
    reached, later = {stage.label}, []
    for rung in STAGES[STAGES.index(stage) + 1 : last + 1]:
        if rung.before in reached:  # not those of another branch
            reached.add(rung.label)
            later.append(rung)
    if not later:
        raise UserError(f"{stage.file}: no rung comes after it" + (f" up to --until {until.label}" if until else ""))
    old = {rung.file: committed(rung.file, root) for rung in (stage, *later)}
    new = {rung.file: (root / rung.file).read_text(encoding="utf-8") for rung in STAGES[: last + 1]}
    if dirty := [rung.file for rung in later if new[rung.file] != old[rung.file]]:
        raise UserError(f"{dirty[-1]} has uncommitted changes: commit or stash them first, so that nothing is lost; "
                        f"if they are this fix, continue from there: python -m ladder propagate {dirty[-1]}")
    if split(stage.file, old[stage.file])[1] == split(stage.file, new[stage.file])[1]:
        raise UserError(f"{stage.file} has no uncommitted change outside its docstring: make the fix there first")

    written = {}
    for rung in later:
        file, before = rung.file, BY_LABEL[rung.before].file
        base, fixed = split(before, old[before])[1], split(before, new[before])[1]
        docstring, own = split(file, old[file])
        lesson, conflicts = carry(base, fixed, own)
        if conflicts:
            way = f"carry it up to there with --until {rung.before}, " if before != stage.file else ""
            raise UserError("\n".join([
                f"{file}: the fix conflicts with what this rung changes, and nothing was written; "
                f"{way}make it in {file} by hand, then python -m ladder propagate {file}",
                *(explain(file, before, name, conflict.args, (base, own, fixed), len(docstring))
                  for name, conflict in conflicts)]))
        new[file] = "".join([*docstring, *lesson.values()])
        if new[file] != old[file]:
            known = {line.strip() for line in (old[file] + new[before]).splitlines()}
            written[file] = [line.strip() for line in new[file].splitlines() if line.strip() not in known]
    try:
        broken = list(violations(new))
    except SyntaxError as error:
        broken = [f"line {error.lineno}: {error.msg}"]
    if broken:
        raise UserError(f"nothing was written; the result would break the ladder's law: {broken[0]}")

    for name in written:
        partial = root / f"{name}.partial"
        partial.write_text(new[name], encoding="utf-8")
        partial.chmod((root / name).stat().st_mode)
    for name in written:
        (root / f"{name}.partial").replace(root / name)
    return written
