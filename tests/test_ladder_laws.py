"""The laws of the ladder: self-contained scripts, and between neighbours one idea and nothing else."""
import ast
import difflib
import sys

import pytest
from conftest import ROOT

from ladder.laws import changed_definitions, forbidden_changes, violations
from ladder.stages import STAGES

NEIGHBOURS = list(zip(STAGES, STAGES[1:], strict=False))
# DDP touches the start, the loader, the log and the end of the run.
LONGEST_LESSON = {
    "ddp_run.py": 60, "beyond/speedup_11_grad_accum.py": 48, "beyond/speedup_12_device_data.py": 70,
    "beyond/speedup_13_validation.py": 60, "beyond/speedup_14_checkpoint_resume.py": 160,
}


def without_docstring(source):
    return source.splitlines()[ast.parse(source).body[0].end_lineno :]


@pytest.mark.parametrize("before, after", NEIGHBOURS, ids=lambda stage: stage.name)
def test_neighbours_differ_only_where_the_rung_may_change(before, after):
    old, new = before.path.read_text(), after.path.read_text()
    assert forbidden_changes(old, new, after.may_change) == set()
    assert changed_definitions(old, new), "a rung that changes nothing"
    assert ast.get_docstring(ast.parse(old)) != ast.get_docstring(ast.parse(new))


@pytest.mark.parametrize("before, after", NEIGHBOURS, ids=lambda stage: stage.name)
def test_a_lesson_fits_on_a_screen(before, after):
    old, new = without_docstring(before.path.read_text()), without_docstring(after.path.read_text())
    changed = [line for line in difflib.unified_diff(old, new, n=0, lineterm="") if line[0] in "+-"][2:]
    assert len(changed) <= LONGEST_LESSON.get(after.file, 40), "\n".join(changed)


@pytest.mark.parametrize("line, stray_edit, name", [
    ("        return self.c_proj(x)  # (B, T, C)", "        return self.c_proj(x)", "MLP.forward"),
    ("    n_head: int = 12", "    n_head: int = 16", "GPTConfig"),
    ("import json", "import json, re", "imports"),
    ('DEFAULT_DATA = Path("data/tokens")', 'DEFAULT_DATA = Path("tokens")', "DEFAULT_DATA"),
    ("        main()", "        main([])", 'if __name__ == "__main__":'),
])
def test_the_law_notices_a_stray_edit(line, stray_edit, name):
    old = STAGES[0].path.read_text()
    assert old.count(line + "\n") == 1
    assert forbidden_changes(old, old.replace(line + "\n", stray_edit + "\n"), STAGES[1].may_change) == {name}


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_scripts_import_nothing_of_the_project(stage):
    allowed = set(sys.stdlib_module_names) | {"torch", "numpy", "tiktoken", "transformers"}
    tree = ast.parse(stage.path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= allowed


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_definitions_come_in_the_same_order(stage):
    tree = ast.parse(stage.path.read_text())
    names = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    order = ["GPTConfig", "CausalSelfAttention", "MLP", "Block", "GPT", "DataLoaderLite", "get_lr", "parse_args"]
    order += ["main"]
    assert [name for name in names if name in order] == [name for name in order if name in names]
    assert ast.get_docstring(tree) and names[-1] == "main"


def test_every_script_is_a_stage():
    scripts = {path.relative_to(ROOT).as_posix() for folder in (ROOT, ROOT / "beyond") for path in folder.glob("*.py")}
    assert scripts - {"sample.py", "export.py", "compress.py"} == {stage.file for stage in STAGES}


def test_the_whole_ladder_obeys():
    assert list(violations({stage.file: stage.path.read_text() for stage in STAGES})) == []
