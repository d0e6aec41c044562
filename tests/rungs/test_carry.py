"""python -m ladder propagate: a fix in one rung becomes the same fix in all later ones, as far as it goes."""
import shutil
import subprocess

import pytest
from load_script import builds_on

from ladder.errors import UserError
from ladder.rungs.carry import propagate
from ladder.rungs.check_laws import rung_violations
from ladder.rungs.list import BY_LABEL, RUNGS

BASELINE = BY_LABEL["0"]


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """The scripts under git."""
    folder = tmp_path_factory.mktemp("repository")
    for entry in RUNGS:
        (folder / entry.file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(entry.path, folder / entry.file)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "commit")
    return folder


@pytest.fixture
def repository(copies):
    """A copy of the scripts under git, to be fixed."""
    git(copies, "reset", "-q", "--hard")
    return copies


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=folder, check=True)


def edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


def file_of(stop):
    """The file that the text of a stop names first."""
    return stop.partition(":")[0]


def changed_in(folder):
    changed = subprocess.run(["git", "diff", "--name-only"], cwd=folder, capture_output=True, text=True)
    return {*changed.stdout.split()}


def replaced(entry, *changes):
    """A rung's committed text with a fix in it, outside of the docstring, by plain substitution: the truth."""
    _, docstring, body = entry.path.read_text().split('"""', 2)
    for old, new in changes:
        body = body.replace(old, new)
    return f'"""{docstring}"""{body}'


NATURAL_FIX = [  # of the baseline; the text is the same in all rungs, though beside or in lines that some change
    ("  # (n_tokens,)", "  # (n_tokens,), mapped"),  # distributed_validation, beside changed lines
    ('        self.line(f"# script: {SCRIPT.name}")\n', ""),
    ("class Block(", "def half(x):\n    return x / 2\n\n\nclass Block("),
    ("import os\nimport pickle\n", "import os\nimport pathlib\nimport pickle\n"),
    ("tokens from a token file", "tokens of a file"),  # prefetch and shuffled_windows
]


def test_a_fix_becomes_the_same_fix_in_all_later_rungs(repository):
    """Where it stops, the file shows the conflict; once it is solved there, the fix goes on from there."""
    edit(repository / "baseline.py", *NATURAL_FIX)
    (repository / BY_LABEL["10"].file).chmod(0o755)  # a file stays executable
    written, stops = propagate(BASELINE, repository)
    assert len(written) > 10 and {*written} == changed_in(repository) - {"baseline.py"} - {*map(file_of, stops)}
    n_stops = 0
    while stops:
        file, n_stops = file_of(stops[0]), n_stops + 1
        assert file not in written and "<<<<<<< " in (repository / file).read_text()
        assert stops[0].endswith(f"make it there by hand, then: python -m ladder propagate {file}")
        entry = next(entry for entry in RUNGS if entry.file == file)
        (repository / file).write_text(replaced(entry, *NATURAL_FIX))
        stops = stops[1:] + propagate(entry, repository)[1]
    for entry in RUNGS:
        assert (repository / entry.file).read_text() == replaced(entry, *NATURAL_FIX), entry.file
    assert 0 < n_stops < 5
    sources = {entry.file: (repository / entry.file).read_text() for entry in RUNGS}
    assert [text for entry in RUNGS[1:] for text in rung_violations(entry, sources)] == []
    assert (repository / BY_LABEL["10"].file).stat().st_mode & 0o777 == 0o755


def test_other_branches_get_a_fix_that_stops_in_one(repository):
    """shuffled_windows changes how a batch is found; its siblings do not wait for it."""
    fix = "(i % self.n_batches) * self.B * self.T", "i % self.n_batches * self.B * self.T"
    edit(repository / BY_LABEL["validation"].file, fix)
    written, stops = propagate(BY_LABEL["validation"], repository)
    waiting = [entry for entry in RUNGS if builds_on(entry.label, "shuffled_windows")]
    [stop] = [stop for stop in stops if file_of(stop) == waiting[0].file]
    assert f": the fix stops here, for {len(waiting) - 1} later rungs, too" in stop
    # long_run has its loader from the other branch. A script that is added later may stop the fix, too.
    elsewhere = [entry.label for entry in RUNGS if entry.file in map(file_of, stops)]
    assert list(written) == [entry.file for entry in RUNGS
                             if builds_on(entry.label, "muon") and not builds_on(entry.label, "long_run")
                             and not any(builds_on(entry.label, label) for label in elsewhere)]
    assert BY_LABEL["mup"].file in written
    edit(repository / waiting[2].file, ("share of activations that", "of the activations that"))
    solved = waiting[0].path.read_text().replace("divmod(w, self.n_windows)", "divmod(w, self.n_windows + 0)")
    (repository / waiting[0].file).write_text(solved)
    written, stops = propagate(waiting[0], repository)
    for entry in waiting[2:]:  # what was uncommitted there stays, and goes on
        assert "of the activations that" in (repository / entry.file).read_text()
    assert list(written) == [entry.file for entry in waiting[1:]] and stops == []


@pytest.mark.parametrize("label, fix", [
    ("prefetch", ("(i % self.n_batches) * self.B * self.T", "i % self.n_batches * self.B * self.T")),  # the first's
    ("swiglu", ("F.silu(self.gate_proj(x))", "F.silu(self.gate_proj.forward(x))")),  # the second's
    ("0", ("start from a model written by --save", "start from a model made by --save")),  # of both
    ("distributed_validation",
     ("range(first + rank, first + n_batches", "range(rank + first, first + n_batches")),  # of neither
    ("muon", ("rate for Muon\"", "rate of Muon\"")),  # in another, beside a flag that the other has not
])
@pytest.mark.slow
def test_what_starts_from_two_gets_a_fix_from_each_once(label, fix, repository):
    edit(repository / BY_LABEL[label].file, fix)
    propagate(BY_LABEL[label], repository)  # which may stop in a script that long_run does not build on
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
    (repository / "baseline.py").write_text(source.replace("import json\n", "import json\nimport pathlib\n"))
    git(repository, "rm", "-q", "--cached", RUNGS[-1].file)  # a new script is like that
    git(repository, "commit", "-qm", "commit")
    with pytest.raises(UserError, match=f"^{RUNGS[-1].file}: not committed, .*commit it first"):
        propagate(BASELINE, repository)
