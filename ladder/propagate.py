"""Carry a fix made in one rung through all later ones: git's three-way merge, all or nothing.

The fix is what the working tree's FILE has more than the last commit's, outside of the docstring. It goes from rung to
rung: each is merged with the change of the one before it. Nothing is written before every merge has succeeded without
a conflict and the ladder's law still holds.
"""
import subprocess
import tempfile
from pathlib import Path

from ladder.errors import UserError
from ladder.laws import violations
from ladder.lessons import split_docstring
from ladder.stages import BY_LABEL, ROOT, STAGES


def git(*words, root=ROOT):
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("git is not installed: propagate merges with it") from None
    return done


def committed(file, root):
    done = git("show", f"HEAD:./{file}", root=root)
    if done.returncode:
        raise UserError(f"git has no committed {file} to compare with: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout


def with_docstring_of(source, docstring_source):
    """`source` under the docstring of another script: so that docstrings take no part in the merge."""
    *_, first = split_docstring(docstring_source)
    *_, body_first = split_docstring(source)
    head = docstring_source.splitlines(keepends=True)[: first - 1]
    return "".join(head + source.splitlines(keepends=True)[body_first - 1 :])


def merge(ours, base, theirs):
    """(merged text, number of conflicts) of `ours` with the change from `base` to `theirs`."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("this", "before", "fixed")]
        for path, text in zip(paths, (ours, base, theirs), strict=True):
            path.write_text(text)
        done = git("merge-file", "-p", "-L", "this rung", "-L", "before the fix", "-L", "the fix", *map(str, paths))
    if done.returncode < 0 or done.returncode > 127:
        raise UserError(f"git merge-file failed: {done.stderr.strip()}")
    return done.stdout, done.returncode


def conflict_places(text):
    return [number for number, line in enumerate(text.splitlines(), 1) if line.startswith("<<<<<<< ")]


def propagate(file, root=ROOT):
    """Carry the uncommitted change of `file` through all later rungs. Returns the files written."""
    files = [stage.file for stage in STAGES]
    path = (Path(root) / file).resolve()
    file = path.relative_to(Path(root).resolve()).as_posix() if path.is_relative_to(Path(root).resolve()) else file
    if file not in files:
        raise UserError(f"{file} is not a rung of the ladder; rungs are {files[0]} ... {files[-1]}")
    later = {}  # the rungs built on `file`: the rung that each starts from
    for stage in STAGES[1:]:
        if (before := BY_LABEL[stage.before].file) == file or before in later:
            later[stage.file] = before
    if not later:
        raise UserError(f"{file} is the last rung: there is nothing to carry a fix to")
    old = {name: committed(name, root) for name in [file, *later]}
    new = {name: (Path(root) / name).read_text() for name in files}
    dirty = [name for name in later if new[name] != old[name]]
    if dirty:
        raise UserError(f"{dirty[0]} has uncommitted changes: commit or stash them first, so that nothing is lost")
    try:
        unchanged = with_docstring_of(old[file], new[file]) == new[file]
    except SyntaxError as error:
        raise UserError(f"{file}: line {error.lineno}: {error.msg}") from None
    if unchanged:
        raise UserError(f"{file} has no uncommitted change outside its docstring: make the fix there first")

    for name, before in later.items():
        own, fixed = old[name], new[before]
        merged, n_conflicts = merge(with_docstring_of(own, fixed), with_docstring_of(old[before], fixed), fixed)
        if n_conflicts:
            shift = split_docstring(own)[2] - split_docstring(fixed)[2]
            places = ", ".join(str(place + shift) for place in conflict_places(merged))
            raise UserError(f"nothing was changed; the fix conflicts with the lesson of {name}: line {places}")
        new[name] = with_docstring_of(merged, own)
    broken = list(violations(new))
    if broken:
        raise UserError(f"nothing was changed; the result would break the ladder's law: {broken[0]}")

    written = [name for name in later if new[name] != old[name]]
    for name in written:
        partial = Path(root) / f"{name}.partial"
        partial.write_text(new[name])
        partial.chmod((Path(root) / name).stat().st_mode)
    for name in written:
        (Path(root) / f"{name}.partial").replace(Path(root) / name)
    return written
