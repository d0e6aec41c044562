"""The terminal: what writes to it, a table of short texts, and the kinds of numbers that a user writes."""
import argparse
import math
import os
import textwrap

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDE = 130  # characters of a terminal wide enough for all columns
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


def print_texts(texts, console, title, caption=None, min_width=None, first_to_go=(), **style):
    """A DataFrame of strings under its headings: the first column are words, the others numbers.

    With a `min_width` of the first column only that one wraps. A table that is too wide loses columns, never letters:
    those whose heading starts with one of `first_to_go`, in this order.
    """
    def table_of(texts):
        table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, **style)
        first, *others = texts
        table.add_column(first, min_width=min_width, max_width=28 if first_to_go else None, overflow="fold")
        for heading in others:
            words = textwrap.fill(heading, 14, break_long_words=False) if first_to_go else heading
            table.add_column(words, justify="right", no_wrap=bool(min_width or first_to_go))
        for row in texts.itertuples(index=False):
            table.add_row(*row)
        return table

    unlimited = console.options.update(max_width=10_000)
    for start in first_to_go:
        if Measurement.get(console, unlimited, table_of(texts)).maximum > console.width:
            texts = texts.drop(columns=[heading for heading in texts if heading.startswith(start)])
    console.print(table_of(texts))
