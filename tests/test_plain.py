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

FILES = [path for folder in (ROOT, ROOT / "beyond", ROOT / "data") for path in sorted(folder.glob("*.py"))]
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


@pytest.mark.parametrize("line, trouble", [
    (f"x = {'1' * 97}", "101 columns"),
    ("print(n := 1)", "a walrus"),
    ("x = 1 if a else (2 if b else 3)", "a conditional expression within another"),
    ("x = (1 if a\n     else 2)", "a conditional expression over several lines"),
    ("x = path.is_file() != wanted", "a comparison of booleans"),
    ("x = wanted == (a is None)", "a comparison of booleans"),
    ("x = (not a) == b", "a comparison of booleans"),
    ("a, b = (int(word) for word in words)", "a generator unpacked into names"),
    ("try:\n    f()\nexcept (OSError, Exception):\n    pass", "a broad except"),
    ("try:\n    f()\nexcept:\n    pass", "a broad except"),
])
def test_what_is_not_plain_is_noticed(line, trouble):
    assert [what for _, what in places(line)] == [trouble]


def test_what_is_plain_is_not_taken_for_trouble():
    assert places(f"x = {'1' * 96}\nn = 1 if a < b <= c else 2\na, b = [int(word) for word in words]\n"
                  "try:\n    f()\nexcept (OSError, KeyError):\n    pass\n") == []
    assert nodes_a_statement(ast.parse("x = 1")) == 5  # Module, Assign, Name, Store, Constant


def test_lines_elsewhere_have_at_most_120_columns():
    lines = {f"{path.relative_to(ROOT)}:{number}": len(line) for path in OTHER_FILES
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)}
    assert {place: columns for place, columns in lines.items() if columns > 120} == {}


def test_ruff_finds_nothing():
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", ROOT],
                           capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
