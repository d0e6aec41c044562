"""The plain form of what users read: one thought a statement, short lines, no clever expressions.

Of every training script, sample.py, evaluate.py, convert.py and data/*.py; ruff reads the whole repository.
"""
import ast
import subprocess
import sys

import pytest
from conftest import ROOT

COLUMNS = 100
NODES_A_STATEMENT = 12.5  # nanoGPT's model.py has 12.7, its train.py 9.5

FOLDERS = ROOT, ROOT / "beyond", ROOT / "beyond" / "gpu", ROOT / "data"
FILES = [path for folder in FOLDERS for path in sorted(folder.glob("*.py"))]
OTHER_FILES = [path for folder in ("ladder", "tests", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]


def nodes_a_statement(tree):
    """How much a statement does on average: the nodes of the syntax tree for each of its statements."""
    nodes = list(ast.walk(tree))
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    return len(nodes) / len(statements)


def is_truth(node):
    """Whether an expression is plainly a boolean: a comparison, a `not`, a call like is_file(), exists() or any()."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return name.startswith("is_") or name in ("exists", "isinstance", "any", "all")
    return False


def trouble_with(node):
    """What is not plain about a node of the syntax tree, or None."""
    if isinstance(node, ast.NamedExpr):
        return "a walrus"
    if isinstance(node, ast.IfExp):
        parts = [node.test, node.body, node.orelse]
        if any(isinstance(inner, ast.IfExp) for part in parts for inner in ast.walk(part)):
            return "a conditional expression within another"
        if node.end_lineno > node.lineno:
            return "a conditional expression over several lines"
    if isinstance(node, ast.Compare) and any(is_truth(part) for part in [node.left, *node.comparators]):
        return "a comparison of booleans"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.GeneratorExp):
        if any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
            return "a generator unpacked into names"
    if isinstance(node, ast.ExceptHandler):
        caught = [] if node.type is None else [ast.unparse(part) for part in ast.walk(node.type)]
        if not caught or "Exception" in caught or "BaseException" in caught:
            return "a broad except"
    return None


def places(source):
    """What is not plain in a file, each with the number of its line."""
    found = [(number, f"{len(line)} columns") for number, line in enumerate(source.splitlines(), 1)
             if len(line) > COLUMNS]
    for node in ast.walk(ast.parse(source)):
        trouble = trouble_with(node)
        if trouble:
            found.append((node.lineno, trouble))
    return sorted(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_script_is_plain(path):
    source = path.read_text(encoding="utf-8")
    assert places(source) == []
    assert nodes_a_statement(ast.parse(source)) <= NODES_A_STATEMENT


def test_lines_elsewhere_have_at_most_120_columns():
    lines = {f"{path.relative_to(ROOT)}:{number}": len(line) for path in OTHER_FILES
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)}
    assert {place: columns for place, columns in lines.items() if columns > 120} == {}


def test_ruff_finds_nothing():
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", ROOT],
                           capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
