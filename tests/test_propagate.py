"""python -m ladder propagate: a fix in one rung becomes the same fix in all later ones, or nothing is touched."""
import os
import random
import shutil
import subprocess

import pytest
from conftest import ROOT

import ladder.__main__ as tool
from ladder.errors import UserError
from ladder.scripts import propagate as propagating
from ladder.scripts.laws import pieces, violations
from ladder.scripts.propagate import Conflict, merge, propagate
from ladder.scripts.stages import BY_LABEL, STAGES

BASELINE = BY_LABEL["0"]


@pytest.fixture
def repository(tmp_path):
    """A copy of the scripts under git, to be fixed."""
    (tmp_path / "beyond").mkdir()
    for stage in STAGES:
        shutil.copy(stage.path, tmp_path / stage.file)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=folder, check=True)


def commit(folder):
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "commit")


def edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)


def snapshot(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py*")}


def replaced(stage, *changes):
    """A rung's committed text with a fix in it, outside of the docstring, by plain substitution: the truth."""
    _, docstring, body = stage.path.read_text().split('"""', 2)
    for old, new in changes:
        body = body.replace(old, new)
    return f'"""{docstring}"""{body}'


NATURAL_FIXES = {  # of the baseline; what each changes is the same text in all rungs, though not the same line
    "a comment in the loader": [("        self.tokens,", "        # of one split\n        self.tokens,")],
    "the log line, which rungs 8 and 9 change": [("log.step(step, loss.item(), dt", "log.step(step, float(loss), dt")],
    "beside a line that rung 2 changes": [("manual_seed(settings.seed)\n", "manual_seed(settings.seed)  # weights\n")],
    "the docstring of a class": [("itself and the tokens before it", "itself and those before it")],
    "the plumbing": [("tokens[:10**8].max()", "tokens[:10**9].max()")],
    "a new import": [("import os\nimport re\n", "import os\nimport platform\nimport re\n")],
    "all of these at once": [
        ("log.finish(step)", "log.finish(step=step)"),
        ("tokens from a token file", "tokens of a file"),  # rungs 12 and 26 change other words of this line
        ("self.lm_head = nn.Linear(", "self.lm_head = torch.nn.Linear("),  # and rung 7 of this one
        ("class Block(", "def half(x):\n    return x / 2\n\n\nclass Block("),
        ("        assert config.n_embd % config.n_head == 0\n", ""),
    ],
}


@pytest.mark.parametrize("changes", NATURAL_FIXES.values(), ids=NATURAL_FIXES)
def test_a_natural_fix_is_carried_to_all_later_rungs(changes, repository):
    edit(repository / "baseline.py", *changes)
    assert list(propagate(BASELINE, repository)) == [stage.file for stage in STAGES[1:]]
    for stage in STAGES:
        assert (repository / stage.file).read_text() == replaced(stage, *changes), stage.file
    assert list(violations({stage.file: (repository / stage.file).read_text() for stage in STAGES})) == []
    assert not list(repository.rglob("*.partial"))


def test_the_loss_line_is_carried_through_what_rungs_change_in_it_up_to_where_it_moves(repository):
    """Indented, renamed: a later rung's line is its own but for the fix, and named to the user; 11 moves it."""
    edit(repository / "baseline.py", ("loss = model(x, y)", "loss = model(x, targets=y)"))
    before = snapshot(repository)
    with pytest.raises(UserError, match="(?s)rung_11_gradient_accumulation.py: the fix conflicts.*--until ddp"):
        propagate(BASELINE, repository)
    assert snapshot(repository) == before
    written = propagate(BASELINE, repository, until=BY_LABEL["ddp"])
    assert list(written) == [stage.file for stage in STAGES[1:12]]
    for stage in STAGES[1:12]:
        own = "step_model(x, y)" if STAGES.index(stage) >= 5 else "loss = model(x, y)"
        assert (repository / stage.file).read_text() == replaced(stage, (own, own.replace("y)", "targets=y)")))
    assert written["speedup_05_compile.py"] == ["loss = step_model(x, targets=y)"]
    assert sum(map(len, written.values())) == 1  # elsewhere the line is that of the rung before, or indented


def test_a_method_goes_to_the_end_of_its_class(repository):
    """Not behind the function that a rung has put there, and a function not into the class that it made longer."""
    end = "        return chunk[:-1].view(self.B, self.T), chunk[1:].view(self.B, self.T)\n"
    method, function = "    def reset(self):\n        return 0\n", "def half(x):\n    return x\n"
    edit(repository / "baseline.py", (end, f"{end}\n{method}\n\n{function}"))
    propagate(BASELINE, repository)
    for stage in STAGES:
        names = list(pieces((repository / stage.file).read_text()))
        assert names[names.index("DataLoaderLite.reset") - 1] == "DataLoaderLite.batch"
        assert names[names.index("DataLoaderLite.reset") + 1] == "half"
        text = (repository / stage.file).read_text()
        assert f"\n\n{method}\n\n{function}\n\n" in text
        assert text.replace(f"\n{method}", "").replace(f"\n{function}\n", "") == stage.path.read_text()


def test_propagate_starts_at_the_rung_that_was_fixed(repository):
    edit(repository / "speedup_08_adamw_clip.py", ('norm=f"{norm.item():.4f}"', 'norm=f"{norm.item():.5f}"'))
    later = [stage.file for stage in STAGES[STAGES.index(BY_LABEL["9"]) :]]
    (repository / later[0]).chmod(0o755)  # a file stays executable
    assert list(propagate(BY_LABEL["8"], repository)) == later
    assert (repository / later[0]).stat().st_mode & 0o777 == 0o755
    assert all("norm.item():.5f" in (repository / file).read_text() for file in later)


def test_another_branch_is_left_alone(repository):
    """Rungs 30 and 31 start from 24, as 26 does."""
    edit(repository / "beyond/rung_27_best_checkpoint.py", ("0 < self.settings.patience", "1 < self.settings.patience"))
    assert list(propagate(BY_LABEL["27"], repository)) == [BY_LABEL["28"].file, BY_LABEL["29"].file]


def test_a_fix_of_the_plumbing_belongs_into_the_baseline(repository):
    edit(repository / "speedup_08_adamw_clip.py", ("tokens[:10**8].max()", "tokens[:10**9].max()"))
    before = snapshot(repository)
    with pytest.raises(UserError, match="nothing was written.*open_tokens differs"):
        propagate(BY_LABEL["8"], repository)
    assert snapshot(repository) == before


def test_a_conflict_is_shown_and_nothing_is_written(repository):
    changes = ("F.softmax(att, dim=-1)", "att.softmax(dim=-1)"), ("tokens[:10**8].max()", "tokens[:10**9].max()")
    edit(repository / "baseline.py", *changes)
    before = snapshot(repository)
    with pytest.raises(UserError) as error:
        propagate(BASELINE, repository)
    lines = (ROOT / "speedup_06_flash_attn.py").read_text().splitlines()
    number, line = next((n, line) for n, line in enumerate(lines, 1) if "F.scaled_dot_product_attention(" in line)
    assert str(error.value).splitlines() == [
        "speedup_06_flash_attn.py: the fix conflicts with what this rung changes, and nothing was written; carry it up "
        "to there with --until 5, make it in speedup_06_flash_attn.py by hand, then python -m ladder propagate "
        "speedup_06_flash_attn.py",
        f"speedup_06_flash_attn.py, line {number}, in CausalSelfAttention.forward:",
        f"    | {line}",
        "  speedup_05_compile.py had, before the fix:",
        "    |         att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # (B, nh, T, T)",
        '    |         att = att.masked_fill(~self.mask[:T, :T], float("-inf"))',
        "    |         att = F.softmax(att, dim=-1)",
        "    |         y = att @ v  # (B, nh, T, T) @ (B, nh, T, hs) -> (B, nh, T, hs)",
        "  and with it:",
        "    |         att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))  # (B, nh, T, T)",
        '    |         att = att.masked_fill(~self.mask[:T, :T], float("-inf"))',
        "    |         att = att.softmax(dim=-1)",
        "    |         y = att @ v  # (B, nh, T, T) @ (B, nh, T, hs) -> (B, nh, T, hs)",
    ]
    assert snapshot(repository) == before

    # As the message says: up to there, then by hand, then on from there. All this uncommitted.
    assert list(propagate(BASELINE, repository, until=BY_LABEL["5"])) == [stage.file for stage in STAGES[1:6]]
    with pytest.raises(UserError, match="speedup_06_flash_attn.py: the fix conflicts"):
        propagate(BY_LABEL["5"], repository)
    with pytest.raises(UserError, match="uncommitted changes.*continue from there: .* propagate speedup_05_compile.py"):
        propagate(BASELINE, repository)
    edit(repository / "speedup_06_flash_attn.py", changes[1])
    assert list(propagate(BY_LABEL["6"], repository)) == [stage.file for stage in STAGES[7:]]
    for stage in STAGES:
        assert (repository / stage.file).read_text() == replaced(stage, *changes)


def test_a_definition_that_goes_conflicts_with_a_change_of_it(repository):
    """To rename a class is to remove its methods: what rung 4 adds to one of them must not be left behind."""
    edit(repository / "baseline.py", ("class MLP(", "class Feed("), ("self.mlp = MLP(", "self.mlp = Feed("))
    before = snapshot(repository)
    with pytest.raises(UserError, match=r"(?s)speedup_04_residual_scaling.py: .* in MLP.__init__:\n") as error:
        propagate(BASELINE, repository)
    assert str(error.value).endswith("  and with it:\n    | (nothing)")
    assert snapshot(repository) == before


def test_until_needs_a_later_rung(repository):
    edit(repository / "speedup_05_compile.py", ("import json\n", "import json\nimport platform\n"))
    for until in ("5", "3"):
        with pytest.raises(UserError, match="speedup_05_compile.py: no rung comes after it up to --until"):
            propagate(BY_LABEL["5"], repository, until=BY_LABEL[until])


def test_the_hand_made_part_must_obey_the_law(repository):
    """What rung 6 may not change, it cannot fix in its own way while the rungs before it have another fix."""
    edit(repository / "baseline.py", ("B, T = idx.shape\n", "B, T = idx.size()\n"))
    propagate(BASELINE, repository, until=BY_LABEL["5"])
    edit(repository / "speedup_06_flash_attn.py", ("B, T = idx.shape\n", "(B, T) = idx.shape\n"))
    with pytest.raises(UserError, match="nothing was written.*speedup_06_flash_attn.py: GPT.forward differs"):
        propagate(BY_LABEL["6"], repository)


def test_propagate_refuses_what_it_cannot_do_safely(repository, monkeypatch):
    with pytest.raises(UserError, match="no uncommitted change"):
        propagate(BASELINE, repository)
    edit(repository / "baseline.py", ("as plainly as possible", "plainly"))  # the docstring alone
    with pytest.raises(UserError, match="no uncommitted change"):
        propagate(BASELINE, repository)
    with pytest.raises(UserError, match="no rung comes after it"):
        propagate(STAGES[-1], repository)
    edit(repository / "speedup_03_bf16_autocast.py", ("import json\n", "import json\nimport platform\n"))
    with pytest.raises(UserError, match="speedup_03_bf16_autocast.py has uncommitted changes"):
        propagate(BASELINE, repository)
    git(repository, "checkout", "-q", "speedup_03_bf16_autocast.py")
    before = snapshot(repository)
    for old, new, reason in (
        ("import json\n", "import json(\n", "baseline.py: line "),
        ("# ---- the same in every rung", "# ---- the same", "baseline.py: needs exactly one banner line"),
        ('"""Rung 0', "import json  # ", "must start with its docstring"),
    ):
        broken = before["baseline.py"].replace(old, new)
        (repository / "baseline.py").write_text(broken.split('"""', 1)[1] if "Rung" in old else broken)
        with pytest.raises(UserError, match=reason):
            propagate(BASELINE, repository)
    (repository / "baseline.py").write_text(before["baseline.py"])
    assert snapshot(repository) == before
    monkeypatch.setenv("PATH", os.fspath(repository))
    with pytest.raises(UserError, match="git is not installed"):
        propagate(BASELINE, repository)
    monkeypatch.undo()
    shutil.rmtree(repository / ".git")
    with pytest.raises(UserError, match="git has no committed baseline.py"):
        propagate(BASELINE, repository)


def test_the_verb_takes_labels_and_files_and_says_what_is_next(monkeypatch, capsys):
    calls = []

    def propagate(stage, until):
        calls.append((stage.label, until and until.label))
        return {"speedup_01_weight_tying.py": [], "speedup_02_tf32.py": ["x = [1]"]}

    monkeypatch.setattr(propagating, "propagate", propagate)
    monkeypatch.setattr(tool.console, "width", 200)
    assert tool.main(["propagate", "baseline.py", "--until", "2"]) == 0
    shown = capsys.readouterr().out
    assert "baseline.py is now in 2 later rungs" in shown and "speedup_03_bf16_autocast.py by hand" in shown
    assert "please check: x = [1]\n" in shown
    assert tool.main(["propagate", "10"]) == 0 and "next" not in capsys.readouterr().out
    assert calls == [("0", "2"), ("10", None)]
    assert tool.main(["propagate", "baseline.py", "--until", "x"]) == 1
    assert "no rung x" in capsys.readouterr().err


def test_merge_agrees_with_git_wherever_git_merges(tmp_path):
    """Random edits of unique lines: the same text, or git sees a conflict (it takes changes that touch for one)."""
    names = [tmp_path / name for name in ("ours", "base", "theirs")]
    clean = 0
    for seed in range(60):
        rng = random.Random(seed)
        base = [f"line {i}\n" for i in range(14)]
        sides = []
        for side in ("ours", "theirs"):
            text = list(base)
            for place in sorted(rng.sample(range(14), 3), reverse=True):
                new = [f"{side} {place} {i}\n" for i in range(rng.randrange(3))]
                text[place : place + rng.randrange(2)] = new
            sides.append(text)
        for path, text in zip(names, (sides[0], base, sides[1]), strict=True):
            path.write_text("".join(text))
        done = subprocess.run(["git", "merge-file", "-p", *names], capture_output=True, text=True)
        if done.returncode == 0:
            clean += 1
            assert "".join(merge(base, *sides)) == done.stdout
    assert clean > 10


@pytest.mark.parametrize("base, ours, theirs, merged", [
    ("a\nb\n", "a\nB\n", "A\nb\n", "A\nB\n"),  # lines that touch
    ("f(a, b)\n", "f(a, b, c)\n", "g(a, b)\n", "g(a, b, c)\n"),  # words of one line
    ("f(a)\n", "if x:\n    f(a)\n", "f(b)\n", "if x:\n    f(b)\n"),
    ("a\n", "b\n", "b\n", "b\n"),  # the same on both sides
    ("lr=3e-4\n", "lr=6e-4\n", "lr=3e-5\n", None),  # both changed the number
    ("x = a\n", "x = b\n", "x = c\n", None),
    ("a\n", "a\nb\n", "a\nc\n", None),  # at the same place: in which order?
    ("a\nb\n", "b\n", "A\nb\n", None),  # removed here, changed there
])
def test_merge_of_small_texts(base, ours, theirs, merged):
    for one, other in ((ours, theirs), (theirs, ours)):
        texts = [text.splitlines(keepends=True) for text in (base, one, other)]
        if merged is None:
            with pytest.raises(Conflict):
                merge(*texts)
        else:
            assert "".join(merge(*texts)) == merged
