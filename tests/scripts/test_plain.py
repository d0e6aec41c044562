"""The plain form of what users read: one thought a statement, no clever expressions, short lines elsewhere, too.

Of every training script, sample.py, evaluate.py, convert.py and data/*.py; ruff reads the whole repository.
"""
import ast
import subprocess
import sys

import pytest
from load_script import ROOT

NODES_A_STATEMENT = 12.5  # nanoGPT's model.py has 12.7, its train.py 9.5

FILES = [path for pattern in ("*.py", "beyond/*/*.py", "data/*.py") for path in sorted(ROOT.glob(pattern))
         if path.name != "mine.py"]
OTHER_FILES = [path for folder in ("ladder", "tests", "experiments") for path in sorted((ROOT / folder).rglob("*.py"))]


def trouble_with(node):
    """What is not plain about a node of the syntax tree, or None."""
    if isinstance(node, ast.NamedExpr):
        return "a walrus"
    if isinstance(node, ast.IfExp):
        if sum(isinstance(inner, ast.IfExp) for inner in ast.walk(node)) > 1 or node.end_lineno > node.lineno:
            return "a conditional expression within another, or over several lines"
    if isinstance(node, ast.Compare) and any(isinstance(part, ast.Compare) for part in [node.left, *node.comparators]):
        return "a comparison of booleans"
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.GeneratorExp):
        if any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
            return "a generator unpacked into names"
    if isinstance(node, ast.ExceptHandler):
        caught = [] if node.type is None else [ast.unparse(part) for part in ast.walk(node.type)]
        if not caught or "Exception" in caught or "BaseException" in caught:
            return "a broad except"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_script_is_plain(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert [(node.lineno, trouble_with(node)) for node in nodes if trouble_with(node)] == []
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    assert len(nodes) / len(statements) <= NODES_A_STATEMENT


def test_lines_elsewhere_have_at_most_120_columns():
    lines = {f"{path.relative_to(ROOT)}:{number}": len(line) for path in OTHER_FILES
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)}
    assert {place: columns for place, columns in lines.items() if columns > 120} == {}


def test_ruff_finds_nothing():
    """Nor, in the scripts, a line of more than 100 columns."""
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", ROOT],
                           capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
