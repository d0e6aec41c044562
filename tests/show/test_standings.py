"""The table of a race whose losses and times are known."""
import json
import math
from dataclasses import replace

import pytest
from fake_race import ADAMW, MUON, ORDER, STEPS, TRAPEZOID, VAL_LOSSES, cut, run_race
from scipy.stats import ttest_rel

from experiments.race import keep
from ladder.records.recipes import read_logs, write_csv
from ladder.records.summary import build_report
from ladder.show.columns import texts_of
from ladder.show.plots import loss_picture
from ladder.show.standings import how_sure, race_caption, race_columns


def race_texts(report):
    return texts_of([*report.race.race_table.itertuples()], race_columns(report))


def test_standings_are_means_of_the_losses_and_medians_of_the_times(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, slow=["round_3"], **VAL_LOSSES)
    report = build_report(tmp_path)
    first, second = report.race.race_table.itertuples()
    assert (first.val_loss, first.val_low, first.val_high) == (6.0, 5.9, 6.1)
    assert (second.val_loss, second.val_low, second.val_high) == pytest.approx((11.9 / 3, 3.9, 4))
    assert (first.ms, first.ms_low, first.ms_high) == (100, 100, 120)  # one round of six was slow
    assert math.exp(second.times.mean) == pytest.approx(1.1)  # of both, so that the ratio holds
    curve = loss_picture(report).panels[0].curves[1]
    assert (curve.title, curve.x) == ("Muon", [*STEPS])
    assert curve.losses == pytest.approx([23 / 3, 19 / 3, 5, 11.9 / 3])
    assert (curve.low[0], curve.high[0]) == (7, 8)
    texts = race_texts(report)
    assert list(texts["val loss (range)"]) == ["6.000 (5.900–6.100)", "3.967 (3.900–4.000)"]
    assert all(said in race_caption(report) for said in ("3 seeds", "3 tries", "6 rounds"))


def test_times_are_only_those_of_runs_alone(tmp_path):
    """Runs of the rounds share the machine."""
    run_race(tmp_path, [ADAMW, MUON], 3, slow=["timing"], **VAL_LOSSES)
    assert [*build_report(tmp_path).race.race_table.ms] == pytest.approx([120, 132])
    for path in tmp_path.glob("timing/*/*.log"):
        cut(path, 20)
    keep(tmp_path, ORDER)
    report = build_report(tmp_path)
    texts = race_texts(report)
    assert report.race.race_table.ms.isna().all() and "not timed" in race_caption(report)
    assert not any("ms" in heading for heading in texts)


def test_a_rung_is_compared_with_the_row_before(tmp_path):
    """Not with the first, and by Holm over the race. A single seed has nothing to compare, three get no star."""
    entries = [ADAMW, MUON, TRAPEZOID]
    ends = {ADAMW.name: [6.0, 6.01, 6.02, 6.0, 6.03], MUON.name: [5.0, 5.01, 5.03, 5.02, 5.01],
            TRAPEZOID.name: [5.01, 5.0, 5.02, 5.01, 5.02]}
    run_race(tmp_path, entries, 5, **ends)
    first, muon, trapezoid = build_report(tmp_path).race.race_table.change
    pairs = [ttest_rel(ends[b.name], ends[a.name]) for a, b in ((ADAMW, MUON), (MUON, TRAPEZOID))]
    assert first is None and muon.p == pytest.approx(2 * pairs[0].pvalue)
    assert trapezoid.p == pytest.approx(pairs[1].pvalue)
    for effect, pair in zip((muon, trapezoid), pairs, strict=True):  # two tests of 0.5 % each
        assert (effect.low, effect.high) == pytest.approx(pair.confidence_interval(0.995))
    texts = race_texts(build_report(tmp_path))
    assert list(texts["p"])[:2] == ["–", "<0.001*"] and "*" not in texts["p"][2]
    assert texts["− the row before (99 %)"][1].startswith("−0.998 (−1.0")
    few = {name: losses[:3] for name, losses in ends.items()}
    run_race(tmp_path / "few", entries, 3, **few)
    report = build_report(tmp_path / "few")
    assert race_texts(report)["p"][1] == "<0.001" and "3 seeds, too few for a star" in race_caption(report)
    run_race(tmp_path / "one", entries, 1)
    assert "p" not in race_texts(build_report(tmp_path / "one"))


def test_a_seed_that_chose_the_rates_is_not_tested(tmp_path):
    """Older races have it among their rounds."""
    run_race(tmp_path, [ADAMW, MUON], 5, **{MUON.name: [1.0, 3.0, 3.01, 3.02, 3.03]})
    record, _ = read_logs(tmp_path)
    record.points.loc[(record.points.part == "round"), "seed"] -= 1
    del record.facts["seeds"]  # which older races lack
    write_csv(record, tmp_path / "race.csv")
    report = build_report(tmp_path)
    muon, texts = report.race.race_table.loc[MUON.name], race_texts(report)
    assert (muon.val_loss, muon.val_low) == pytest.approx((3.015, 3.0)) and texts["p"][1] == "<0.001"
    assert "4 seeds without 1337, the search's, too few for a star" in race_caption(report)


def test_a_rung_that_diverges_with_a_seed_is_not_tested(tmp_path):
    """The mean over the other seeds would flatter it."""
    run_race(tmp_path, [ADAMW, MUON], 5, **{MUON.name: [3.0, 3.0, 3.01, 3.02, 3.03]})
    (tmp_path / "round_2" / f"{MUON.name}.log").unlink()
    keep(tmp_path, ORDER)
    assert build_report(tmp_path).race.race_table.change[MUON.name] is None


def test_a_star_that_a_check_removed_is_marked(tmp_path):
    ends = {ADAMW.name: [6.0, 6.01, 6.02, 6.0, 6.03], MUON.name: [5.0, 5.01, 5.03, 5.02, 5.01]}
    run_race(tmp_path, [ADAMW, MUON], 5, **ends)
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {}, "refuted": {MUON.name: "not with other rates"}}))
    report = build_report(tmp_path)
    assert race_texts(report)["p"][1] == "<0.001*†" and race_caption(report).endswith("† not with other rates.")


@pytest.mark.parametrize("tries, seeds, said", [(3, 2, "include only a part of the luck"), (3, 1, "leave out the luck"),
                                                (0, 2, "apply to these learning rates only")])
def test_it_is_said_whether_p_holds_the_luck_of_the_search(tries, seeds, said, tmp_path):
    """It does not where one pair of rates serves all seeds, as in older races."""
    run_race(tmp_path, [ADAMW, MUON], 4, tries=tries, **{MUON.name: [5.0, 5.01, 5.03, 5.02]})
    record, _ = read_logs(tmp_path)
    search = record.points.part == "search"
    left = record.points[~search | record.points.seed.isin(range(1338 - 2 * seeds, 1338))]
    assert said in how_sure(replace(record, points=left))
