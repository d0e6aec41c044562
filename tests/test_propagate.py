"""python -m ladder propagate: a fix in one rung becomes the same fix in all later ones, as far as it goes."""
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from ladder.errors import UserError
from ladder.rungs.laws import violations
from ladder.rungs.propagate import Conflict, merge, propagate, rungs_after
from ladder.rungs.list import BY_LABEL, RUNGS

BASELINE = BY_LABEL["0"]


@pytest.fixture
def repository(tmp_path):
    """A copy of the scripts under git, to be fixed."""
    for entry in RUNGS:
        (tmp_path / entry.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(entry.path, tmp_path / entry.file)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "commit")
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=folder, check=True)


def edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


def snapshot(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py*")}


def replaced(entry, *changes):
    """A rung's committed text with a fix in it, outside of the docstring, by plain substitution: the truth."""
    _, docstring, body = entry.path.read_text().split('"""', 2)
    for old, new in changes:
        body = body.replace(old, new)
    return f'"""{docstring}"""{body}'


NATURAL_FIX = [  # of the baseline; the text is the same in all rungs, though beside or in lines that some change
    ("  # (n_tokens,)", "  # (n_tokens,), mapped"),  # rung 13, beside lines of 12 and 26
    ("manual_seed(args.seed)\n", "manual_seed(args.seed)  # weights\n"),  # above one of rung 2
    ('        self.line(f"# script: {SCRIPT.name}")\n', ""),
    ("class Block(", "def half(x):\n    return x / 2\n\n\nclass Block("),
    ("not math.isfinite(loss)", "math.isnan(loss)"),
    ("import os\nimport pickle\n", "import os\nimport pathlib\nimport pickle\n"),
    ("log.step(step, loss", "log.step(int(step), loss"),  # rungs 8 and 9
    ("tokens from a token file", "tokens of a file"),  # rungs 12 and 26
    ("self.lm_head = nn.Linear(", "self.lm_head = torch.nn.Linear("),  # rung 7
]


def test_a_natural_fix_is_carried_to_all_later_rungs(repository):
    edit(repository / "baseline.py", *NATURAL_FIX)
    (repository / RUNGS[-1].file).chmod(0o755)  # a file stays executable
    written, stops = propagate(BASELINE, repository)
    assert list(written) == [entry.file for entry in RUNGS[1:]] and stops == []
    for entry in RUNGS:
        assert (repository / entry.file).read_text() == replaced(entry, *NATURAL_FIX), entry.file
    assert list(violations({entry.file: (repository / entry.file).read_text() for entry in RUNGS})) == []
    assert (repository / RUNGS[-1].file).stat().st_mode & 0o777 == 0o755


def test_a_line_is_carried_through_what_rungs_change_in_it_up_to_where_it_moves(repository):
    """Indented, renamed: a later rung's line is its own but for the fix, and named to the user; 11 and 36 move it."""
    edit(repository / "baseline.py", ("loss = model(x, y)", "loss = model(x, targets=y)"))
    written, stops = propagate(BASELINE, repository)
    waiting = {label: rungs_after(BY_LABEL[label]) for label in ("11", "36")}
    stopped = [entry for label, after in waiting.items() for entry in (BY_LABEL[label], *after)]
    reached = [entry for entry in RUNGS[1:] if entry not in stopped]
    assert list(written) == [entry.file for entry in reached]
    for entry in reached:
        own = "step_model(x, y)" if RUNGS.index(entry) >= 5 else "loss = model(x, y)"
        assert (repository / entry.file).read_text() == replaced(entry, (own, own.replace("y)", "targets=y)")))
    for entry in stopped:  # long_run, too, though 24 has the fix
        assert (repository / entry.file).read_text() == entry.path.read_text()
    assert {file: lines for file, lines in written.items() if lines} == {
        "speedup_05_compile.py": ["loss = step_model(x, targets=y)"]}
    for (label, after), stop in zip(waiting.items(), stops, strict=True):
        assert stop.startswith(f"{BY_LABEL[label].file}: the fix stops here, for {len(after)} later rungs, too: ")


def test_only_what_starts_from_the_fixed_rung_is_touched(repository):
    """Rungs 30 and 31 start from 24, as 26 does."""
    edit(repository / BY_LABEL["27"].file, ("0 < self.steps_of_patience", "1 < self.steps_of_patience"))
    written, stops = propagate(BY_LABEL["27"], repository)
    assert list(written) == [BY_LABEL["28"].file, BY_LABEL["29"].file] and stops == []


def test_a_conflict_is_shown_with_its_place_and_the_rest_follows_the_fix_by_hand(repository):
    """All this uncommitted, as the messages say; what conflicts is not touched."""
    changes = ("F.softmax(att, dim=-1)", "att.softmax(dim=-1)"), ("not math.isfinite(loss)", "math.isnan(loss)")
    edit(repository / "baseline.py", *changes)
    written, [stop] = propagate(BASELINE, repository)
    assert list(written) == [entry.file for entry in RUNGS[1:6]]
    flash = BY_LABEL["6"]
    assert (repository / flash.file).read_text() == flash.path.read_text()
    first, line, mark, text, *shown, last = stop.splitlines()
    assert first.startswith("speedup_06_flash_attn.py: ") and stop.count("<<<<<<<") == 1 and mark.startswith("<<<<<<<")
    number = 1 + flash.path.read_text().splitlines().index(text)
    assert line == f"line {number}:" and "scores exist only in tiles" in text
    assert any("att.softmax(dim=-1)" in text for text in shown)
    assert last == f"make it in {flash.file} by hand, then: python -m ladder propagate {flash.file}"

    with pytest.raises(UserError, match="uncommitted changes.*continue from there: .* propagate speedup_05_compile.py"):
        propagate(BASELINE, repository)
    edit(repository / flash.file, changes[1])
    written, stops = propagate(flash, repository)
    assert list(written) == [entry.file for entry in RUNGS[7:]] and stops == []
    for entry in RUNGS:
        assert (repository / entry.file).read_text() == replaced(entry, *changes)


def test_other_branches_get_a_fix_that_stops_in_one(repository):
    """26 changes how a batch is found; 30, which starts from 24, too, does not wait for it, nor does 26 for 30."""
    fix = "(i % self.n_batches) * self.B * self.T", "i % self.n_batches * self.B * self.T"
    edit(repository / BY_LABEL["validation"].file, fix)
    written, [stop] = propagate(BY_LABEL["validation"], repository)
    waiting = [BY_LABEL[label] for label in ("26", "27", "28", "29")]
    assert stop.startswith(f"{waiting[0].file}: the fix stops here, for 3 later rungs, too")
    branch = [*map(str, range(18, 26)), "30", "31", "34"]  # long_run has its loader from the other branch
    assert list(written) == [BY_LABEL[label].file for label in branch]
    edit(repository / waiting[0].file, ("divmod(w, self.n_windows)", "divmod(w, self.n_windows + 0)"))
    written, stops = propagate(waiting[0], repository)  # by hand; 30 has its fix
    assert list(written) == [entry.file for entry in waiting[1:]] and stops == []


@pytest.mark.parametrize("label, fix", [
    ("12", ("(i % self.n_batches) * self.B * self.T", "i % self.n_batches * self.B * self.T")),  # 17's alone
    ("23", ("F.silu(self.gate_proj(x))", "F.silu(self.gate_proj.forward(x))")),  # 24's alone
    ("0", ("loads it\"", "reads it\"")),  # of both
    ("13", ("last = step == args.steps", "last = step >= args.steps")),  # in a definition that is neither's
    ("18", ("of the blocks' matrices\")", "of matrices\")")),  # in another, beside a flag that the other has not
])
def test_what_starts_from_two_gets_a_fix_from_each_once(label, fix, repository):
    edit(repository / BY_LABEL[label].file, fix)
    _, stops = propagate(BY_LABEL[label], repository)
    assert stops == []
    joined = BY_LABEL["long_run"]
    assert (repository / joined.file).read_text() == replaced(joined, fix)


def test_a_fix_stops_where_it_would_break_the_law(repository):
    """Rung 4 may change MLP.__init__, and has no Feed.__init__."""
    edit(repository / "baseline.py", ("class MLP(", "class Feed("), ("self.mlp = MLP(", "self.mlp = Feed("))
    written, [stop] = propagate(BASELINE, repository)
    assert list(written) == [entry.file for entry in RUNGS[1:4]]
    assert stop.startswith(BY_LABEL["4"].file) and "ladder's law" in stop and "Feed.__init__ differs" in stop
    edit(repository / "speedup_05_compile.py", ("class Log:", "# a comment\nclass Log:"))
    with pytest.raises(UserError, match="nothing was written; .*04.* -> speedup_05.*: set_aside differs"):
        propagate(BY_LABEL["5"], repository)


def test_propagate_refuses_what_it_cannot_do_safely(repository):
    with pytest.raises(UserError, match="no uncommitted change"):
        propagate(BASELINE, repository)
    source = (repository / "baseline.py").read_text()
    for broken, reason in (
        (source.replace("import json\n", "import json(\n"), "baseline.py: line "),
        (source.replace("# ---- the same in every rung", "# ---- the same"), "baseline.py: needs exactly one banner"),
    ):
        (repository / "baseline.py").write_text(broken)
        with pytest.raises(UserError, match=reason):
            propagate(BASELINE, repository)


def test_the_verb_names_what_to_check_and_what_to_do(repository):
    shutil.copytree(ROOT / "ladder", repository / "ladder")
    edit(repository / "speedup_03_bf16_autocast.py", ("loss = model(x, y)", "loss = model(x, targets=y)"))
    done = subprocess.run([sys.executable, "-m", "ladder", "propagate", "3"], cwd=repository, capture_output=True,
                          text=True)
    assert "is now in 27 later rungs" in done.stdout
    assert "please check: loss = step_model(x, targets=y)\n" in done.stdout
    assert done.returncode == 1
    for label in ("11", "36"):
        assert "python -m ladder propagate " + BY_LABEL[label].file + "\n" in done.stderr


@pytest.mark.parametrize("base, ours, theirs, merged", [
    ("a\nb\n", "a\nB\n", "A\nb\n", "A\nB\n"),  # lines that touch
    ("f(a, b)\n", "f(a, b, c)\n", "g(a, b)\n", "g(a, b, c)\n"),  # words of one line
    ("lr=3e-4\n", "lr=6e-4\n", "lr=3e-5\n", None),  # both changed the number
    ("a\n", "a\nb\n", "a\nc\n", None),  # at the same place: in which order?
    ("f(\na=1,\nb=2,\n)\n", "f(\nc=3,\na=1,\nb=2,\n)\n", "f(\na=1,\nb=2,\nc=4,\n)\n", None),  # no Python: c twice
])
def test_merge_of_small_texts(base, ours, theirs, merged):
    for one, other in ((ours, theirs), (theirs, ours)):
        if merged is None:
            with pytest.raises(Conflict, match="<<<<<<< ours|argument repeated"):
                merge(one, base, other)
        else:
            assert merge(one, base, other) == merged
