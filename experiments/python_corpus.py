"""A corpus that every machine carries: the source of Python's standard library, without its tests, as one .jsonl file.

    python -m experiments.python_corpus python.jsonl
    python data/prepare.py --text python.jsonl --out data/python
    python -m experiments.python_corpus docstrings.jsonl --docstrings     # thousands of short documents

Docstrings are those of the standard library and of the installed packages, so they depend on their versions.
"""
import argparse
import ast
import json
import random
import sysconfig
import tokenize
from pathlib import Path


PACKAGES, TESTS = {"site-packages", "dist-packages"}, {"test", "tests", "idle_test"}


def sources(folder, left_out=PACKAGES | TESTS):
    """Yields the text of each .py file, in the order of their names, except below folders called as in `left_out`."""
    for path in sorted(folder.rglob("*.py")):
        if not left_out & set(path.relative_to(folder).parts):
            try:
                with tokenize.open(path) as file:  # in the encoding that the file declares
                    yield file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # templates of lib2to3 and the like


def docstrings(seed=1337, shortest=100):
    """The docstrings of all modules, classes and functions, each once, shuffled; those of a few words left out."""
    texts = {}
    for folder in map(Path, (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))):
        for text in sources(folder, TESTS | (PACKAGES if folder == Path(sysconfig.get_path("stdlib")) else set())):
            try:
                nodes = ast.walk(ast.parse(text))
            except (SyntaxError, ValueError):
                continue
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            texts |= dict.fromkeys(ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds))
    texts = [text for text in texts if len(text) >= shortest]
    random.Random(seed).shuffle(texts)
    return texts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    parser.add_argument("--docstrings", action="store_true", help="docstrings instead of source")
    args = parser.parse_args()
    with open(args.out, "w", encoding="utf-8") as out:
        for text in docstrings() if args.docstrings else sources(Path(sysconfig.get_path("stdlib"))):
            out.write(json.dumps({"text": text.encode(errors="replace").decode()}) + "\n")
