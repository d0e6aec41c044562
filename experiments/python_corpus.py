"""A corpus that every machine carries: the source of Python's standard library, without its tests, as one .jsonl file.

    python -m experiments.python_corpus python.jsonl
    python data/prepare.py --text python.jsonl --out data/python
"""
import argparse
import json
import sysconfig
import tokenize
from pathlib import Path


def sources(folder):
    """Yields the text of each .py file, in the order of their names; installed packages and tests are left out."""
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(path.relative_to(folder).parts):
            try:
                with tokenize.open(path) as file:  # in the encoding that the file declares
                    yield file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # templates of lib2to3 and the like


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the .jsonl file to write")
    with open(parser.parse_args().out, "w", encoding="utf-8") as out:
        for text in sources(Path(sysconfig.get_path("stdlib"))):
            out.write(json.dumps({"text": text}) + "\n")
