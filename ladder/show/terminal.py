"""The terminal: what writes to it, a table of short texts, and the kinds of numbers that a user writes."""
import argparse
import math
import os
import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

WRAPPED = 16  # characters that are left of a column of words, which wraps
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


def table_of(texts, title, wraps, style, most):
    """A rich table: the columns at the places `wraps` fold where it is narrow, and none needs more than `most`."""
    table = Table(title=title, box=box.SIMPLE_HEAD, **style)
    for place, heading in enumerate(texts):
        cells, folded = texts[heading], textwrap.fill(heading, 14, break_long_words=False)
        least = max(map(len, [*folded.split("\n"), *cells]))
        if place in wraps:
            longest_word = max(len(word) for text in [heading, *cells] for word in text.split())
            least = max(longest_word, min(WRAPPED, cells.str.len().max()))
        table.add_column(folded, justify="right" if place else "left", overflow="fold",
                         no_wrap=place not in wraps, min_width=min(least, most))
    for row in texts.itertuples(index=False):
        table.add_row(*row)
    return table


def print_texts(texts, console, title, caption="", explains=None, first_to_go=(), wraps=(0,), **style):
    """A DataFrame of strings under its headings: the first column are words, the others numbers.

    A table that is too wide loses columns, never letters: those whose heading starts with one of `first_to_go`, in this
    order, then from the right; before that the columns at the places `wraps` take several lines. Of `explains`,
    {heading: sentence}, the caption gets those of the columns that are shown.
    """
    shown, left_out = texts, []
    while True:
        table = table_of(shown, title, wraps, style, console.width - 4)
        least = console.measure(table, options=console.options.update(width=1000)).minimum
        if least <= console.width or len(shown.columns) == 1:
            break
        others = list(shown)[1:]
        starts = [heading for start in first_to_go for heading in others if heading.startswith(start)]
        left_out.append([*starts, others[-1]][0])
        shown = shown.drop(columns=left_out[-1])
    console.print(table)
    sentences = [caption, *((explains or {}).get(heading, "") for heading in shown)]
    if left_out:
        sentences.append(f"A wider terminal also shows {', '.join(' '.join(name.split()) for name in left_out)}")
    text = " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)
    if text:
        console.print(text, style="dim italic")
