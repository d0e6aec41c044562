"""A lesson: the docstring of a rung, its difference to the rung before, what it computes, its exercise."""
import ast
import difflib
import functools
import hashlib
import itertools
import re
import tokenize
from dataclasses import dataclass, field

from ladder.rungs.check_laws import first_line, name_of
from ladder.rungs.list import BANNER, BY_LABEL, ROOT

WORD = re.compile(r"\w+|\s+|.")
SECTION = r"(?:Gain|Cost|Beware|Sources?):"
NOT_COMPUTED = {"add_flags", "model_config", "GPTConfig", "DataLoaderLite", "get_lr", "set_learning_rates",
                "last_step_at_max_lr", "init_ranks", "batches_per_step", "check_compiler", "catch_signals",
                "on_any_rank", "Checkpoints", "Best", "evaluate",
                "SCRIPT", "DEVICES", "DEFAULT_B", "PRECISION", "MAY_CHANGE"}  # these change no kernel of a step
FULL_LINE = 100  # characters: a docstring's line that ends a sentence and has room for the next word ends a paragraph


@dataclass
class Line:
    """A line of the old script ("-"), of the new one ("+"), or of both (" ", numbered as in the new one)."""

    sign: str
    number: int
    text: str
    marks: list = field(default_factory=list)  # (start, end) of the characters that the change touched


@dataclass
class Lesson:
    """The docstring's parts, and the hunks of the difference: lists of Lines."""

    title: str
    body: str
    hunks: list

    def count(self, sign):
        return sum(line.sign == sign for hunk in self.hunks for line in hunk)


@functools.cache
def split_docstring(source):
    """(docstring, body lines, number of the body's first line) of a script; a reader's need not have a docstring."""
    tree = ast.parse(source)
    docstring = ast.get_docstring(tree) or ""
    end = tree.body[0].end_lineno if docstring else 0
    return docstring, source.splitlines()[end:], end + 1


def mark_words(old, new):
    """Mark the words that differ in two versions of a line; none if most of the line differs."""
    before, after = WORD.findall(old.text), WORD.findall(new.text)
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    if matcher.ratio() < 0.4:
        return
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        for line, words, first, last in ((old, before, i1, i2), (new, after, j1, j2)):
            if tag != "equal" and last > first:
                start = len("".join(words[:first]))
                line.marks.append((start, start + len("".join(words[first:last]))))


def diff_hunks(old, new, old_first, new_first):
    """The hunks of two lists of lines whose first lines have the given numbers."""
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes():
        hunk = []
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                hunk += [Line(" ", new_first + j, new[j]) for j in range(j1, j2)]
                continue
            removed = [Line("-", old_first + i, old[i]) for i in range(i1, i2)]
            added = [Line("+", new_first + j, new[j]) for j in range(j1, j2)]
            for pair in zip(removed, added, strict=False):
                mark_words(*pair)
            hunk += removed + added
        yield hunk


def read_lesson(before, after):
    """The lesson between two scripts' sources; `before` is None for the first rung, which has no diff."""
    docstring, new, new_first = split_docstring(after)
    title, _, body = docstring.partition("\n")
    hunks = []
    if before is not None:
        _, old, old_first = split_docstring(before)
        hunks = list(diff_hunks(old, new, old_first, new_first))
    return Lesson(title, body.strip("\n"), hunks)


def part_paragraphs(body):
    """A docstring's text with an empty line after every paragraph, also where the script has none."""
    lines = []
    for line, following in itertools.pairwise([*body.split("\n"), ""]):
        lines.append(line)
        word = following.split(" ")[0]  # "" in an indented line
        ends = line.endswith((".", ":", ")")) and len(line) + 1 + len(word) <= FULL_LINE
        if re.match(SECTION, following) or (ends and word and line[0] not in " *-"):
            lines.append("")
    return "\n".join(lines)


def read_exercises(path=ROOT / "docs" / "exercises.md"):
    """{label: Markdown} of the lessons that the file has an exercise for."""
    heading = r"(?m)^## (?:`?(\w+)`?\. )?.*$"  # "## 6. Flash attention", "## `muon`. Muon"
    _, *texts = re.split(heading, path.read_text(encoding="utf-8"))
    return {label: text.strip() for label, text in zip(texts[::2], texts[1::2], strict=True) if label in BY_LABEL}


def code_of(rungs):
    """{name: hash of what a step computes} of rungs."""
    return {rung.name: step_hash(rung.path.read_text(encoding="utf-8")) for rung in rungs}


def step_hash(source):
    """A hash of what a step of a script computes: its model, its optimizer, their constants, `train`'s loop.

    Docstrings, comments and line breaks do not count. Any version of Python gives the same hash.
    """
    tree, lines = ast.parse(source.partition("\n" + BANNER)[0]), source.splitlines()
    for kind, _, (row, start), *_ in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if kind == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:start]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            first, last = node.body[0].lineno - 1, node.body[0].end_lineno
            lines[first:last] = [""] * (last - first)
    kept = ""
    for node in tree.body:
        name = name_of(node, lines)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)) and name not in NOT_COMPUTED:
            loops = [part.end_lineno for part in node.body if isinstance(part, ast.For)] if name == "train" else []
            kept += "".join(lines[first_line(node) - 1 : max(loops, default=node.end_lineno)])
    return hashlib.sha256("".join(kept.split()).encode()).hexdigest()[:16]
