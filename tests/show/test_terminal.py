"""Tables in a terminal: a narrow one leaves whole columns out, and explains only what it shows."""
import io
import re
from dataclasses import replace

import pytest
from load_script import ROOT
from rich.console import Console

from ladder.records.summary import build_report
from ladder.rungs.lessons import Lesson
from ladder.show.columns import columns_of
from ladder.show.lesson_text import print_lesson
from ladder.show.print_report import print_report
from ladder.show.terminal import print_table

TEXTS = [{"the one change": "DistributedDataParallel, 2 ranks", "ms/step": "1,234", "× previous": "1.003*",
          "loss @24": "6.545"},
         {"the one change": "fused AdamW, selective decay", "ms/step": "56.7", "× previous": "0.99", "loss @24": "nan"}]


def printed(width, show, *args, **more):
    console = Console(file=io.StringIO(), width=width)
    show(*args, console, **more)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [200, *range(50, 80)])
def test_a_table_loses_columns_never_letters(width):
    explains = {"× previous": "* is significant", "loss @24": "of step 24"}
    out = printed(width, print_table, TEXTS, columns_of(TEXTS, ["× previous"], explains), title="a")
    shown = [heading for heading in TEXTS[0] if heading in out.partition("A wider")[0]]
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    assert {"the one change", "ms/step"} <= {*shown} and (len(shown) == 4 or "× previous" not in shown)
    for heading in shown[1:]:
        assert all(re.search(rf"(?<!\S){re.escape(text)}(?!\S)", out) for text in (row[heading] for row in TEXTS))
    assert ("is significant" in out) == ("× previous" in shown) and ("of step" in out) == ("loss @24" in shown)
    assert ("A wider terminal" in out) == (len(shown) < 4)


def test_a_name_wider_than_the_terminal_is_folded():
    texts = [{"script": 62 * "x", "p": "0.5"}]
    out = printed(40, print_table, texts, columns_of(texts), title="a")
    assert out.partition("A wider")[0].count("x") == 62 and "…" not in out and "A wider terminal also shows p." in out


def test_words_begin_in_one_place_and_numbers_end_in_one():
    texts = [{"rung": "a", "why": "out of memory", "B": "8"}, {"rung": "b", "why": "slow", "B": "16"}]
    columns = [replace(column, has_words=column.heading == "why") for column in columns_of(texts)]
    first, second = printed(60, print_table, texts, columns, title="").splitlines()[-3:-1]
    assert first.index("out") == second.index("slow") and len(first.rstrip()) == len(second.rstrip())


@pytest.mark.parametrize("name, mark", [("nvidia_h200_B16_T1024", "2 rounds: too few to claim a gain"),
                                        ("nvidia_h100_80gb_hbm3_B16_T1024", "")])
def test_what_qualifies_a_table_stands_above_it(name, mark):
    report = build_report(ROOT / "logs" / "reference" / name)
    above, rule, _ = printed(150, lambda console: print_report(report, console)).partition("──")
    assert rule and mark in above and ("too few to claim a gain" in above) == bool(mark)
    assert ("! 10 rungs" in above) == bool(mark)


def test_a_lesson_keeps_the_lines_of_its_code_and_the_items_of_its_lists():
    body = ("Until the end\n--steps counts, by\n-0.1 each:\n\n- one\n  item\n- two\n\n"
            "    python a.py --steps 1,000\n    python b.py")
    out = printed(24, print_lesson, Lesson("title", body, []))
    assert [line.rstrip() for line in out.split("\n") if line] == [
        "title", "Until the end --steps", "counts, by -0.1 each:", "- one item", "- two",
        "    python a.py --steps 1,000", "    python b.py"]
