"""python -m ladder diff: the change, and its effect here and there."""
from log_files import write_log

from ladder import formats
from ladder.records.logs import RUNS
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL


def test_diff_shows_the_change_and_its_effect_in_the_records_and_in_the_reader_s_own_newest_run(call, tmp_path,
                                                                                                monkeypatch):
    """That the text and the change are whole: test_html_page.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ladder.records.logs.REFERENCE", tmp_path / "records")
    for folder, times in ((tmp_path / "records" / "an_epyc", (90.0, 30.0)), (RUNS / "mine", (60.0, 40.0))):
        for label, ms in zip("56", times, strict=True):
            write_log(folder / f"{BY_LABEL[label].name}.log", ms=[ms] * 3)
        (folder / "machine.json").write_text('{"rates": {"float32": 1e12}}')
    records, _, own = call("diff", "06")[1].partition("Your newest run, mine")
    for part in ("Rung 6, flash attention", "+ y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                 "- att = F.softmax(att, dim=-1)"):
        assert part in records
    assert "90.0 -> 30.0 ms/step (3.00 x" in records.partition("Measured, ")[2]
    assert "60.0 -> 40.0 ms/step (1.50 x" in own
    assert "+ " in call("diff", "ddp", "2_prefetch.py")[1] and "@@" not in call("diff", "0")[1]


def test_a_script_with_two_parents_has_the_table_s_p(call, tmp_path, monkeypatch):
    """Holm's, over all that the records timed, not that of this pair alone."""
    monkeypatch.setattr("ladder.records.logs.REFERENCE", tmp_path)
    for label, times in (("checkpoints", [100] * 5), ("preemption", [90, 100, 110, 95, 104]),
                         ("chunked_cross_entropy", [100] * 5), ("long_run", [96, 98, 97, 99, 94])):
        for number, ms in enumerate(times, 1):
            write_log(tmp_path / "a" / f"round_{number}" / f"{BY_LABEL[label].name}.log", ms=[ms] * 3)
    [row] = [row for row in build_report(tmp_path / "a").rows if row.name == BY_LABEL["long_run"].name]
    assert f"{formats.p_is(row.p_before)})" in call("diff", "long_run")[1]
