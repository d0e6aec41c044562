"""Do the tests notice a wrong line? Random mutants of the code, each against the tests that belong to it.

    pip install mutmut==3.8.1 libcst==1.9.0                # whose operators these are
    python -m experiments.mutants /tmp/mutants experiments/mutants.csv

Ours is only what mutmut's operators are applied to: a mutant of a script is put into every script that has the same
definition, so that the laws, which compare definitions, do not find it for free; each line once, in the script where it
is new. What is only shown (docstrings, help, messages, annotations) is left out. Tests that read the scripts (the laws,
the plain form) are not asked.

The same command goes on where it was stopped, and prints the table by file at its end; `--again` tries the green ones
that have no remark anew, with all tests, the slow ones, too. Remarks are written by hand: "equivalent: why", "now red:
the test that was added", "not noticed: why that is left".
"""
import argparse
import csv
import difflib
import functools
import inspect
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

from ladder.rungs.laws import definitions
from ladder.rungs.list import BANNER, BY_LABEL, ROOT, RUNGS

SIZES = {"lessons": 150, "rest": 50, "tool": 50}
FILES = {"lessons": [], "rest": ["data/*.py", "sample.py", "evaluate.py", "convert.py"], "tool": ["ladder/**/*.py"]}
SCRIPTS = [rung.file for rung in RUNGS]
SHOWN = {"print", "exit", "SystemExit", "line", "warn", "error", "UserError"}  # calls whose strings are only read
SHOWN_ARGUMENTS = {"help", "metavar", "description", "epilog"}
SECONDS = 30  # of a processor, for a mutant that nothing notices
AGAIN_SECONDS = 600
NOT_ASKED = {"test_laws.py", "test_plain.py", "test_propagate.py", "test_lessons.py", "test_notebook.py",
             "test_page.py", "test_smoke.py"}
RUNS_SCRIPTS = re.compile(r"\b(rung|rungs_that_change|as_program|on_ranks|baseline|STAGES|BY_LABEL)\b")
COLUMNS = ["part", "file", "definition", "lines", "before", "after", "result", "test", "remark"]  # the last by hand


# ---- mutants ---------------------------------------------------------------------------------------------------------

def new_lines(before, after):
    """The numbers of the lines of `after` that are not in `before`, from 1 on."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return {number + 1 for tag, _, _, first, last in matcher.get_opcodes() if tag in ("insert", "replace")
            for number in range(first, last)}


def texts(part):
    """What is mutated: (file, definition or None for the whole file, its text, numbers of the lines that count)."""
    if part == "lessons":
        for rung in RUNGS:
            lesson = (ROOT / rung.file).read_text().partition("\n" + BANNER)[0]
            before = definitions(rung.start.path.read_text()) if rung.start else {}
            for name, text in definitions(lesson).items():
                if name != "imports":
                    yield rung.file, name, text, new_lines(before.get(name, "").partition("\n" + BANNER)[0], text)
    elif part == "rest":
        baseline = (ROOT / "baseline.py").read_text()
        first = baseline.partition("\n" + BANNER)[0].count("\n") + 1
        yield "baseline.py", None, baseline, range(first, baseline.count("\n") + 1)
    for pattern in FILES[part]:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text()
            yield path.relative_to(ROOT).as_posix(), None, text, range(1, text.count("\n") + 2)


def is_shown(node, parents):
    """Whether a node is only for readers: an annotation, help, a string of a message."""
    import libcst as cst

    is_text = isinstance(node, (cst.BaseString, cst.FormattedStringText))
    while node in parents:
        child, node = node, parents[node]
        if isinstance(node, (cst.Annotation, cst.ImportFrom, cst.Import)):
            return True
        if isinstance(node, cst.Arg) and node.keyword and node.keyword.value in SHOWN_ARGUMENTS:
            return True
        if is_text and isinstance(node, cst.Call) and called(node) in SHOWN and child is not node.func:
            return True
        if is_text and isinstance(node, cst.Raise):
            return True
    return False


def called(call):
    """The last part of the name of what is called."""
    function = getattr(call.func, "attr", call.func)
    return getattr(function, "value", None)


def only_changes_text(node, mutated):
    """Whether a call loses nothing but an argument that is only shown."""
    import libcst as cst

    if not isinstance(node, cst.Call) or not isinstance(mutated, cst.Call):
        return False
    lost = [arg for arg in node.args if not any(arg is other for other in mutated.args)]
    return any(arg.keyword and arg.keyword.value in SHOWN_ARGUMENTS for arg in lost) or (
        called(node) in SHOWN and any(isinstance(arg.value, cst.BaseString) for arg in lost))


def sites(part):
    """Every place of a part of the project that an operator changes: the mutants of each, as functions of nothing."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
    from mutmut.mutation.mutators import mutation_operators

    for file, name, text, counted in texts(part):
        indented = text.startswith(" ")
        try:
            wrapper = MetadataWrapper(cst.parse_module("class _:\n" * indented + text))
        except cst.ParserSyntaxError:  # the head of a class that has only methods
            continue
        parents, positions = (wrapper.resolve(provider) for provider in (ParentNodeProvider, PositionProvider))
        for node in positions:
            first, last = positions[node].start.line - indented, positions[node].end.line - indented
            if first not in counted or is_shown(node, parents):
                continue
            for kind, operator in mutation_operators:
                made = [] if not isinstance(node, kind) else [
                    other for other in operator(node) if not only_changes_text(node, other)]
                if made:
                    place = SimpleNamespace(part=part, file=file, definition=name, text=text, indented=indented,
                                            module=wrapper.module, node=node, mutants=made,
                                            lines=(start_of_statement(node, parents, positions) - indented, last))
                    yield place


def start_of_statement(node, parents, positions):
    import libcst as cst

    while not isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)) and node in parents:
        node = parents[node]
    return positions[node].start.line


def mutate(place, mutated):
    """A row of the table, and the definition's new text."""
    code = place.module.deep_replace(place.node, mutated).code
    text = code.partition("\n")[2] if place.indented else code
    old, new = place.text.splitlines(), text.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    changes = [change[1:] for change in matcher.get_opcodes() if change[0] != "equal"]
    before = " ⏎ ".join(line.strip() for a, b, _, _ in changes for line in old[a:b])
    after = " ⏎ ".join(line.strip() for _, _, a, b in changes for line in new[a:b])
    path = ROOT / place.file
    offset = 0
    if place.definition:  # from the lines of the definition to those of the file
        offset = path.read_text().partition(place.text)[0].count("\n")
    lines = f"{place.lines[0] + offset}-{place.lines[1] + offset}"
    row = {"part": place.part, "file": place.file, "definition": place.definition or "", "lines": lines,
           "before": before, "after": after}
    return row, text


def sample(part, seed):
    """The mutants of a part in random order, one of each place: (row, a function that makes its files)."""
    places = list(sites(part))
    draw = random.Random(seed)
    draw.shuffle(places)
    for place in places:
        row, text = mutate(place, draw.choice(place.mutants))
        if row["before"] != row["after"]:
            yield row, functools.partial(mutated_files, place, text)


def mutated_files(place, text):
    """{file: source}: this script, and every other one that has the same definition."""
    if place.file not in SCRIPTS:
        return {place.file: text}
    old, new = place.text, text
    if place.definition is None:  # the plumbing, the same in all
        old, new = BANNER + old.partition(BANNER)[2], BANNER + new.partition(BANNER)[2]
        return {file: (ROOT / file).read_text().replace(old, new) for file in SCRIPTS}
    changed = {}
    for file in SCRIPTS:
        source = (ROOT / file).read_text()
        lesson = source.partition("\n" + BANNER)[0]
        if definitions(lesson).get(place.definition) == old:
            head, _, tail = source.partition(old)
            changed[file] = head + new + tail
    return changed


# ---- the tests of a mutant -------------------------------------------------------------------------------------------

def files_for(row):
    """The test files that belong to a mutant: those that run scripts, or that name the module."""
    tests = {path.name: path.read_text() for path in sorted((ROOT / "tests").glob("test_*.py"))}
    if row["file"] in SCRIPTS:
        return [name for name, text in tests.items() if name not in NOT_ASKED and RUNS_SCRIPTS.search(text)]
    stem = Path(row["file"]).stem
    names = re.compile(rf"\b{row['file'].split('/')[-2] if stem == '__init__' else stem}\b")
    in_tool = row["part"] == "tool"
    found = [name for name, text in tests.items() if names.search(text) and (in_tool or name not in NOT_ASKED)]
    return sorted(found, key=lambda name: name != f"test_{stem}.py")


@functools.cache
def text_of(thing):
    return inspect.getsource(thing)


def labels_in(text):
    return set(re.findall(r'"(\d+|ddp|fsdp|dcp)"', text)) & BY_LABEL.keys()


class Choice:
    """A plugin of pytest: only the tests that belong to a mutant, those of its own rung first, then the quickest."""

    def __init__(self, row, files, costs, limit):
        self.label = next((rung.label for rung in RUNGS if rung.file == row["file"]), None)
        self.labels = {rung.label for rung in RUNGS if rung.file in files}
        self.costs, self.limit, self.used = costs, limit, {}
        self.words = [word for word in row["definition"].split(".") if not word.startswith("__")]

    def rank(self, item):
        """None for a test that has nothing to do with the mutant; 0 for those of the rung that it is new in."""
        if self.label is None:
            return 0
        source, file = text_of(item.function), text_of(item.module)
        numbers = re.match(r"test_(\d\d|ddp|fsdp|dcp)_", item.name)
        own = {numbers[1].removeprefix("0")} if numbers else set()
        values = item.callspec.params.values() if hasattr(item, "callspec") else []
        cases = {value for value in values if isinstance(value, str) and value in BY_LABEL}
        if cases and not cases & self.labels:
            return None
        mentioned, of_file = labels_in(source), labels_in(file)
        named = any(word in source for word in self.words)
        if self.label in cases or not cases and self.label in own | mentioned:
            return 0 if named or self.label in own else 1
        if (cases or own | mentioned) & self.labels:
            return 2 - named
        return 3 if not cases and not own | mentioned and of_file & self.labels else None

    def pytest_collection_modifyitems(self, items):
        ranks = {item: self.rank(item) for item in items}
        cost = {item: self.costs.get(item.nodeid, 1.0) for item in items}
        chosen, total = [], 0.0
        for item in sorted((item for item in items if ranks[item] is not None), key=lambda i: (ranks[i], cost[i])):
            total += cost[item]
            if total < self.limit or not chosen:
                chosen.append(item)
        items[:] = chosen

    @staticmethod
    def clock():
        return sum(os.times()[:4])

    def pytest_runtest_logstart(self, nodeid):
        self.used[nodeid] = -self.clock()

    def pytest_runtest_logfinish(self, nodeid):
        self.used[nodeid] += self.clock()

    def pytest_sessionfinish(self):
        Path("costs.json").write_text(json.dumps({name: cost for name, cost in self.used.items() if cost > 0}))


# ---- trials ----------------------------------------------------------------------------------------------------------

class Trial:
    """A mutant in a copy of the project, and pytest against it in a child of this process."""

    def __init__(self, row, files, copy, costs, limit):
        self.row, self.files, self.copy = row, files, copy
        for file, source in files.items():
            (copy / file).write_text(source)
        for name in ("output.txt", "costs.json"):
            (copy / name).unlink(missing_ok=True)
        self.began = time.time()
        self.pid = os.fork()
        if self.pid == 0:
            run_pytest(copy, files_for(row), Choice(row, files, costs, limit), [] if limit == SECONDS else ["-m", ""])

    def ended(self, seconds):
        """Whether the trial is over; its result is then in the row."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if not pid:
            if time.time() - self.began < seconds:
                return False
            stop(self.pid)
            self.row |= {"result": "timeout", "test": ""}
        else:
            code = os.waitstatus_to_exitcode(status)
            output = (self.copy / "output.txt").read_text(errors="replace")
            red = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
            passed = re.findall(r"(\d+) passed", output)
            self.row["result"] = {0: "green", 5: "no test"}.get(code, "red")
            self.row["test"] = red[0] if red else f"{passed[-1]} tests" if passed else output.strip()[-100:]
        for file in self.files:
            shutil.copy(ROOT / file, self.copy / file)
        return True


def stop(pid):
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            pass
    os.waitpid(pid, 0)


def run_pytest(copy, files, choice, words):
    """In a child, which has imported torch already: pytest in the copy."""
    os.chdir(copy)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("ladder", "experiments", "data"):
            del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    sys.argv = ["pytest"]
    import pytest

    code = 3
    try:
        words += ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb", "short", "--rootdir", str(copy)]
        words += ["-c", "pyproject.toml", "--basetemp", f"{copy}_tmp"]
        code = pytest.main([*(f"tests/{name}" for name in files), *words], plugins=[choice])
    finally:
        sys.stdout.flush()
        os._exit(int(code))


def copy_project(to):
    """A clone (a test names its commit), with what is not committed yet."""
    shutil.rmtree(to, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", ROOT, to], check=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, tracked.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    return to


def key(row):
    return tuple(row[name] for name in ("file", "definition", "before", "after"))


def try_mutants(args):
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = {}
    if args.csv.exists():
        with args.csv.open(newline="") as file:
            done = {key(row): row for row in csv.DictReader(file)}
    todo = []
    for part in args.parts:
        for n, (row, mutated) in enumerate(sample(part, args.seed)):
            if n == SIZES[part]:
                break
            old = done.get(key(row))
            if args.only and args.only not in " ".join(key(row)):
                continue
            is_open = old is not None and old["result"] in ("green", "no test") and not old["remark"]
            if old is None and not args.again or args.again and is_open:
                todo.append((row, mutated))
    random.Random(args.seed).shuffle(todo)  # so that whatever is finished is a sample of all parts
    print(f"{len(todo)} mutants to try")
    import pytest  # noqa: F401, children find all of these imported
    import tiktoken  # noqa: F401
    import torch._dynamo
    from transformers import GPT2LMHeadModel, Qwen3ForCausalLM  # noqa: F401

    torch.set_num_threads(1)
    free = [copy_project(args.folder.resolve() / f"copy_{n}") for n in range(args.workers)]
    costs = {}  # seconds of a processor that each test takes, as far as it has run
    learn(costs, args.folder / "costs.json", args.folder / "costs.json")
    running = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while todo or running:
        while todo and free:
            row, mutated = todo.pop(0)
            running.append(Trial(row, mutated(), free.pop(), costs, AGAIN_SECONDS if args.again else SECONDS))
        for trial in [trial for trial in running if trial.ended(args.timeout)]:
            learn(costs, trial.copy / "costs.json", args.folder / "costs.json")
            running.remove(trial)
            free.append(trial.copy)
            write(args.csv, trial.row, done)
            print(f"{len(todo) + len(running):4} left {time.time() - trial.began:4.0f} s {trial.row['result']:8} "
                  f"{trial.row['file']} {trial.row['before'][:60]} -> {trial.row['after'][:60]} {trial.row['test']}",
                  flush=True)
        time.sleep(0.1)
    print_table(done.values())


def learn(costs, path, all_costs):
    """Add what tests have cost to what is known."""
    if path.exists():
        costs |= json.loads(path.read_text())
        all_costs.write_text(json.dumps(costs))


def write(path, row, done):
    """Add a row, or put it in the place of the former one."""
    done[key(row)] = done.get(key(row), {}) | {name: row[name] for name in COLUMNS if name in row}
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows({name: value.get(name, "") for name in COLUMNS} for value in done.values())


def print_table(rows):
    """Of each file: mutants, those that a test noticed, those that change nothing, since noticed, not noticed."""
    counts = {}
    for row in rows:
        remark = row.get("remark") or ""
        kind = "red" if row["result"] in ("red", "timeout") else remark.partition(":")[0] or "not noticed"
        for place in (f"{row['part']:7} {row['file']}", f"{row['part']:7} all"):
            counts.setdefault(place, []).append(kind)
    print(f"{'':55} mutants    red equivalent now red not noticed")
    for place in sorted(counts):
        found = [counts[place].count(kind) for kind in ("red", "equivalent", "now red", "not noticed")]
        print(f"{place:55} {len(counts[place]):7} {found[0]:6} {found[1]:10} {found[2]:7} {found[3]:11}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for copies of the project")
    parser.add_argument("csv", type=Path, help="the table of mutants")
    parser.add_argument("--parts", nargs="+", choices=list(SIZES), default=["lessons", "rest"])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a mutant")
    parser.add_argument("--again", action="store_true", help="try the green ones anew, with all tests")
    parser.add_argument("--only", help="only mutants whose row contains this text")
    try_mutants(parser.parse_args())


if __name__ == "__main__":
    main()
