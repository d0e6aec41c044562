"""python -m ladder diff: the docstring, the difference, and what was measured. That it is whole: test_page.py."""
import ladder.__main__ as tool


def test_diff_shows_text_change_and_effect(capsys, monkeypatch):
    def diff(*words):
        assert tool.main(["diff", *words]) == 0
        return capsys.readouterr().out

    monkeypatch.setattr("ladder.show.terminal.console.width", 200)
    output = diff("06")
    assert "Rung 6, flash attention" in output
    assert "+         y = F.scaled_dot_product_attention(q, k, v, is_causal=True)" in output
    assert "-         att = F.softmax(att, dim=-1)" in output
    assert "Measured, " in output and "ms/step" in output
    assert "+ " in diff("ddp", "rung_12_prefetch.py") and "@@" not in diff("0")
