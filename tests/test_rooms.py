"""The tool's house: which room may import from which, and one name for one thing."""
import ast
from collections import Counter

from load_script import ROOT

MAY_IMPORT = {"rungs": (), "count": ("rungs",), "records": ("rungs", "count"), "show": ("rungs", "count", "records"),
              "measure": ("rungs", "count", "records"), "verbs": ("rungs", "count", "records", "show", "measure")}
FILES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.glob("ladder/**/*.py")}
FOR_ALL = ("errors", "files", "formats")
MODULES = [path for path in FILES if not path.stem.startswith("__")]


def imported(tree):
    """The modules of a file's imports: ladder.rungs.list of `from ladder.rungs.list import RUNGS`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from [f"ladder.{alias.name}" for alias in node.names] if node.module == "ladder" else [node.module]


def test_imports_go_downwards():
    upwards = []
    for path, tree in FILES.items():
        room = path.parent.name
        allowed = (*MAY_IMPORT[room], room, *FOR_ALL) if room in MAY_IMPORT else ("errors",)  # for every room
        if path.name == "__main__.py":
            allowed = ("errors", "show", "verbs")
        upwards += [(path.name, module) for module in imported(tree)
                    if module.split(".")[0] == "ladder" and module.split(".")[1] not in allowed
                    or module.split(".")[0] in ("experiments", "tests")]
    assert upwards == []


def test_a_name_has_one_meaning():
    """No two files have one name, and no two functions, classes or constants."""
    nodes = [node for tree in FILES.values() for node in tree.body]
    defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    defined += [name.id for node in nodes if isinstance(node, ast.Assign) for target in node.targets
                for name in ast.walk(target) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
    for names in ([path.stem for path in MODULES], defined):
        twice = {name for name, n in Counter(names).items() if n > 1}
        # All verbs have the first two; peer.py is also a script, which needs ROOT before it can import.
        assert twice - {"main", "add_flags", "ROOT"} == set()
