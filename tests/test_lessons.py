"""python -m ladder diff: a lesson is the docstring, the whole difference, and what was measured."""
import itertools

import pytest

import ladder.__main__ as tool
from ladder.scripts.lessons import read_lesson
from ladder.scripts.stages import BY_LABEL, STAGES


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.label)
def test_lessons_are_the_diff(stage):
    """A lesson's rows are lines of the two files, all new ones among them, and the marks lie inside the lines."""
    before, after = BY_LABEL[stage.before].path.read_text(), stage.path.read_text()
    lesson = read_lesson(before, after)
    new, old = after.splitlines(), before.splitlines()
    lines = list(itertools.chain.from_iterable(lesson.hunks))
    assert lesson.title in after and lesson.count("+") + lesson.count("-") > 0
    for line in lines:
        assert (old if line.sign == "-" else new)[line.number - 1] == line.text
        assert all(0 <= a < b <= len(line.text) for a, b in line.marks)
    shown = {line.text for line in lines if line.sign == "+"}
    body = after.split('"""', 2)[2]
    assert {line for line in body.splitlines() if line.strip()} - set(old) <= shown


def test_diff_shows_text_change_and_effect(capsys, monkeypatch):
    def diff(*words):
        assert tool.main(["diff", *words]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr(tool.console, "width", 200)
    output = diff("06")
    assert "Rung 6, flash attention" in output
    assert "+         y = F.scaled_dot_product_attention(q, k, v, is_causal=True)" in output
    assert "-         att = F.softmax(att, dim=-1)" in output
    assert "Measured, " in output and "ms/step" in output
    assert "+ " in diff("ddp", "rung_12_prefetch.py") and "@@" not in diff("0")
