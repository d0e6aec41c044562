"""A table of short texts in a terminal."""
from rich import box
from rich.table import Table

WIDE = 130  # characters of a terminal wide enough for all columns


def print_texts(texts, console, title, caption=None, min_width=None, **style):
    """A DataFrame of strings under its headings: the first column are words, the others numbers.

    With a `min_width` of the first column only that one wraps.
    """
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, **style)
    first, *others = texts
    table.add_column(first, min_width=min_width)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=min_width is not None)
    for row in texts.itertuples(index=False):
        table.add_row(*row)
    console.print(table)
