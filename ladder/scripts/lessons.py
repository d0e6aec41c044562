"""A lesson: the docstring of a rung, and the difference to the rung before, down to the changed words."""
import ast
import difflib
import itertools
import re
from dataclasses import dataclass, field

from ladder.errors import UserError

CONTEXT = 3  # unchanged lines around a change
WORD = re.compile(r"\w+|\s+|.")
LABEL = r"(?:Gain|Cost|Beware|Sources?):"
FULL_LINE = 120  # characters: a docstring's line that ends a sentence and has room for the next word ends a paragraph


@dataclass
class Line:
    """One line of one file; `marks` are the (start, end) ranges of characters that the change touched."""

    number: int
    text: str
    changed: bool = False
    marks: list = field(default_factory=list)


@dataclass
class Lesson:
    """The docstring's parts and the hunks: lists of (left Line or None, right Line or None)."""

    title: str
    body: str
    hunks: list
    added: int
    removed: int


def split_docstring(source):
    """(docstring, body lines, number of the body's first line) of a script."""
    tree = ast.parse(source)
    if ast.get_docstring(tree) is None:
        raise UserError("a rung must start with its docstring, the lesson; this one does not")
    end = tree.body[0].end_lineno
    return ast.get_docstring(tree), source.splitlines()[end:], end + 1


def mark_words(left, right):
    """Mark the words that differ in two versions of a line; none if most of the line differs."""
    old, new = WORD.findall(left.text), WORD.findall(right.text)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    if matcher.ratio() < 0.4:
        return
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            for line, words, first, last in ((left, old, i1, i2), (right, new, j1, j2)):
                start = sum(map(len, words[:first]))
                if last > first:
                    line.marks.append((start, start + sum(map(len, words[first:last]))))


def diff_hunks(old, new, old_first=1, new_first=1):
    """Hunks of paired lines of two lists of lines whose first lines have the given numbers."""
    hunks = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
        rows = []
        for tag, i1, i2, j1, j2 in group:
            left = [Line(old_first + i, old[i], tag != "equal") for i in range(i1, i2)]
            right = [Line(new_first + j, new[j], tag != "equal") for j in range(j1, j2)]
            if tag == "replace":
                for one, other in zip(left, right, strict=False):
                    mark_words(one, other)
            height = max(len(left), len(right))
            left += [None] * (height - len(left))
            right += [None] * (height - len(right))
            rows += zip(left, right, strict=True)
        hunks.append(rows)
    return hunks


def read_lesson(before, after):
    """The lesson between two scripts' sources; `before` is None for the first rung, which has no diff."""
    docstring, new, new_first = split_docstring(after)
    title, _, body = docstring.partition("\n")
    hunks = []
    if before is not None:
        _, old, old_first = split_docstring(before)
        hunks = diff_hunks(old, new, old_first, new_first)
    rows = [row for hunk in hunks for row in hunk]
    added = sum(right is not None and right.changed for _, right in rows)
    removed = sum(left is not None and left.changed for left, _ in rows)
    return Lesson(title, body.strip("\n"), hunks, added, removed)


def in_diff_order(hunk):
    """A hunk's rows in the order of a unified diff: (sign, Line), each block's removed lines before its added ones."""
    removed, added = [], []
    for left, right in [*hunk, (None, None)]:
        unchanged = left is not None and not left.changed
        if unchanged or (left is None and right is None):
            yield from [("-", line) for line in removed]
            yield from [("+", line) for line in added]
            removed, added = [], []
            if unchanged:
                yield " ", right
            continue
        removed += [left] if left is not None else []
        added += [right] if right is not None else []


def part_paragraphs(body):
    """A docstring's text with an empty line after every paragraph, also where the script has none."""
    lines = []
    for line, following in itertools.pairwise([*body.split("\n"), ""]):
        lines.append(line)
        word = following.split(" ")[0]  # "" in an indented line
        ends = line.endswith((".", ":", ")")) and len(line) + 1 + len(word) <= FULL_LINE
        if re.match(LABEL, following) or (ends and word and line[0] not in " *-"):
            lines.append("")
    return "\n".join(lines)


def print_lesson(lesson, console):
    """The lesson in a terminal: the text, then the unified diff in colour."""
    from rich.syntax import Syntax

    console.print(lesson.title, style="bold", markup=False, highlight=False)
    console.print()
    for paragraph in re.split("\n{2,}", part_paragraphs(lesson.body)):
        text = paragraph if re.search("(?m)^[ *-]", paragraph) else paragraph.replace("\n", " ")  # code and lists as is
        console.print(f"{text}\n", markup=False, highlight=False, width=min(console.width, FULL_LINE))
    painter = Syntax("", "python", theme="ansi_dark", background_color="default")
    styles = {" ": ("", ""), "-": ("on #4a2222", "bold on #8a3030"), "+": ("on #1d3d26", "bold on #2f7a45")}
    for hunk in lesson.hunks:
        first = next(line for row in hunk for line in row if line is not None)
        console.print(f"@@ line {first.number} @@", style="cyan", markup=False, highlight=False)
        for sign, line in in_diff_order(hunk):
            text = painter.highlight(line.text)
            text.rstrip()
            background, mark = styles[sign]
            text.stylize(background)
            for start, end in line.marks:
                text.stylize(mark, start, end)
            console.print(sign, text, sep=" ", highlight=False, soft_wrap=True)
