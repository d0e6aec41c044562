"""What others published: the time of a GPT-2 (124M) training step on GPUs. To add a figure, add a row to the CSV.

A row with arrows is a ladder of changes, one on top of the other. T is 1024 and B as stated; the remark says what else
differs from these scripts. Numbers are the source's own; those marked † are computed here from what the source gives.
"""
from pathlib import Path

import pandas


def read_published():
    """The CSV as a DataFrame of strings, with "GPU", such as "8 × A100"; "card" is as in cards.py, if it is there."""
    rows = pandas.read_csv(Path(__file__).with_name("published.csv"), dtype=str, keep_default_na=False)
    rows["GPU"] = rows["card"].where(rows["cards"] == "1", rows["cards"] + " × " + rows["card"])
    return rows
