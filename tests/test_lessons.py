"""python -m ladder diff: a lesson is the docstring, the whole difference, and what was measured."""
import io
import itertools

import pytest
from rich.console import Console

import ladder.__main__ as tool
from ladder.scripts.lessons import print_lesson, read_lesson
from ladder.scripts.stages import BY_LABEL, STAGES


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.label)
def test_lessons_are_the_diff(stage):
    """A lesson's rows are lines of the two files, all new ones among them, and the marks lie inside the lines."""
    before, after = BY_LABEL[stage.before].path.read_text(), stage.path.read_text()
    lesson = read_lesson(before, after)
    new, old = after.splitlines(), before.splitlines()
    assert lesson.title in after and lesson.added + lesson.removed > 0
    for left, right in itertools.chain.from_iterable(lesson.hunks):
        assert left is None or old[left.number - 1] == left.text
        assert right is None or new[right.number - 1] == right.text
        for line in (left, right):
            assert line is None or all(0 <= a < b <= len(line.text) for a, b in line.marks)
    shown = {right.text for hunk in lesson.hunks for _, right in hunk if right is not None and right.changed}
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
    assert "Measured: " in output and "ms/step" in output
    assert "+ " in diff("ddp", "rung_12_prefetch.py") and "@@" not in diff("0")
    for wrong in (["99"], ["x"], ["1", "2", "3"]):
        assert tool.main(["diff", *wrong]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1


def test_diff_fills_the_lines_of_a_narrow_terminal():
    """A line ends where the next word would no longer fit; code keeps its lines."""
    for label, code in (("20", None), ("16", "    python beyond/rung_16_gradient_checkpointing.py -B 16 --recompute")):
        before, after = (BY_LABEL[name].path.read_text(encoding="utf-8") for name in (BY_LABEL[label].before, label))
        console = Console(width=80, record=True, file=io.StringIO())
        print_lesson(read_lesson(before, after), console)
        text = console.export_text().split("@@")[0]
        for line, following in itertools.pairwise(text.splitlines()):
            if line[:1].strip() and following[:1].strip():  # not code
                assert len(line.rstrip()) + 1 + len(following.split()[0]) > 80
        assert code is None or code in text
