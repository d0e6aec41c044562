"""The terminal: what writes to it, a table of short texts, and the kinds of numbers that a user writes."""
import argparse
import math
import os
import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

from ladder.show.columns import texts_of

WRAPPED = 18  # characters that are left of a column of words, which wraps
console = Console(highlight=False, markup=False)
messages = Console(highlight=False, markup=False, stderr=True)  # not the answer: stdout belongs to --json and --csv


class Stream:
    """A stream that may go away (head, a closed terminal) without ending what the tool does."""

    def __init__(self, stream):
        self.stream = stream
        if hasattr(stream, "reconfigure"):  # not in a notebook
            stream.reconfigure(errors="replace")  # the encoding of a file may lack × and –

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def above_zero(kind):
    """An argument's type: numbers of a kind, int or float, above 0."""
    def number(text):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError("must be more than 0")
        return value
    return number


COUNT, AMOUNT = above_zero(int), above_zero(float)


def table_of(texts, columns, title, width, style):
    """A rich table of {heading: texts}: its first column, and others of words, fold where it is narrow."""
    table = Table(title=title, box=box.SIMPLE_HEAD, **style)
    for place, column in enumerate(columns):
        cells, heading = texts[column.heading], textwrap.fill(column.heading, 14, break_long_words=False)
        folds = place == 0 or column.has_words
        least = max(map(len, [*heading.split("\n"), *cells]))
        if folds:
            longest_word = max(len(word) for text in [column.heading, *cells] for word in text.split())
            least = max(longest_word, min(WRAPPED, max(map(len, cells))))
        table.add_column(heading, justify="left" if folds else "right", overflow="fold", no_wrap=not folds,
                         min_width=min(least, width - 4))
    for row in zip(*(texts[column.heading] for column in columns), strict=True):
        table.add_row(*row)
    return table


def print_table(rows, columns, console, title, caption="", **style):
    """What columns show of rows; the caption also explains the columns. `style` is rich's.

    A table that is too wide loses columns, never letters; before that its words take several lines.
    """
    texts, left_out = texts_of(rows, columns), []
    shown = [column for column in columns if column.heading in texts]
    while True:
        table = table_of(texts, shown, title, console.width, style)
        least = console.measure(table, options=console.options.update(width=1000)).minimum
        if least <= console.width or len(shown) == 1:
            break
        left_out.append(min(reversed(shown[1:]), key=lambda column: column.goes))
        shown.remove(left_out[-1])
    console.print(table)
    sentences = [caption, *(column.explains for column in shown)]
    if left_out:
        names = ", ".join(column.heading for column in left_out)
        sentences.append(f"A wider terminal also shows {names}")
    text = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
    if text:
        console.print(text, style="dim italic")
