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


def is_odd(node):
    """Whether a node of the syntax tree is a walrus, a conditional expression within another or over several lines, a
    comparison of booleans, a generator unpacked into names, or a broad except."""
    match node:
        case ast.NamedExpr() | ast.Assign(targets=[ast.Tuple() | ast.List()], value=ast.GeneratorExp()):
            return True
        case ast.IfExp():
            return node.end_lineno > node.lineno or sum(isinstance(part, ast.IfExp) for part in ast.walk(node)) > 1
        case ast.Compare():
            return any(isinstance(part, ast.Compare) for part in [node.left, *node.comparators])
        case ast.ExceptHandler():
            caught = {ast.unparse(part) for part in ast.walk(node.type)} if node.type else {"Exception"}
            return bool(caught & {"Exception", "BaseException"})
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_script_is_plain(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    assert [ast.unparse(node) for node in nodes if is_odd(node)] == []
    assert len(nodes) / sum(isinstance(node, ast.stmt) for node in nodes) <= NODES_A_STATEMENT


@pytest.mark.parametrize("words", [
    [], ["--isolated", "--select", "E501", "--line-length", "120", "ladder", "tests", "experiments"]])
def test_ruff_finds_nothing(words):
    """Nor a line of more than 100 columns in the scripts, of more than 120 elsewhere."""
    found = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "concise", *words],
                           cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
