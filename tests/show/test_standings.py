"""The table of a race whose losses and times are known."""
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from fake_race import ADAMW, MUON, STEPS, TRAPEZOID, VAL_LOSSES, record_of, run_race
from scipy.stats import ttest_rel

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


def race_of(folder, losses, ms=None, first_seed=1338):
    """The Report of a race that ended with these losses."""
    record = record_of(losses, ms)
    record.points.loc[record.points.part == "round", "seed"] += first_seed - 1338
    write_csv(record, folder / "race.csv")
    return build_report(folder)


def test_times_are_only_those_of_runs_alone(tmp_path):
    """Runs of the rounds share the machine."""
    losses = {ADAMW.name: [6, 6.1], MUON.name: [5, 5.1]}  # in 100 ms a step
    assert [*race_of(tmp_path, losses, {ADAMW.name: [120], MUON.name: [132]}).race.race_table.ms] == [120, 132]
    report = race_of(tmp_path, losses)
    assert report.race.race_table.ms.isna().all() and "not timed" in race_caption(report)
    assert not any("ms" in heading for heading in race_texts(report))


def test_a_rung_is_compared_with_the_row_before(tmp_path):
    """Not with the first, and by Holm over the race. A single seed has nothing to compare, three get no star."""
    ends = {ADAMW.name: [6.0, 6.01, 6.02, 6.0, 6.03], MUON.name: [5.0, 5.01, 5.03, 5.02, 5.01],
            TRAPEZOID.name: [5.01, 5.0, 5.02, 5.01, 5.02]}
    report = race_of(tmp_path, ends)
    first, muon, trapezoid = report.race.race_table.change
    pairs = [ttest_rel(after, before) for before, after in pairwise(ends.values())]
    assert first is None and muon.p == pytest.approx(2 * pairs[0].pvalue)
    assert trapezoid.p == pytest.approx(pairs[1].pvalue)
    for effect, pair in zip((muon, trapezoid), pairs, strict=True):  # two tests of 0.5 % each
        assert (effect.low, effect.high) == pytest.approx(pair.confidence_interval(0.995))
    texts = race_texts(report)
    assert list(texts["p"])[:2] == ["–", "<0.001*"] and "*" not in texts["p"][2]
    assert texts["change from the previous row"][1].startswith("−0.998 (−1.0")
    few = race_of(tmp_path, {name: losses[:3] for name, losses in ends.items()})
    assert race_texts(few)["p"][1] == "<0.001" and "3 seeds, too few for a star" in race_caption(few)
    assert "p" not in race_texts(race_of(tmp_path, {name: losses[:1] for name, losses in ends.items()}))


def test_a_seed_that_chose_the_rates_is_not_tested(tmp_path):
    """Older races have it among their rounds."""
    losses = {ADAMW.name: [6.0] * 5, MUON.name: [1.0, 3.0, 3.01, 3.02, 3.03]}
    report = race_of(tmp_path, losses, first_seed=1337)
    muon, texts = report.race.race_table.loc[MUON.name], race_texts(report)
    assert (muon.val_loss, muon.val_low) == pytest.approx((3.015, 3.0)) and texts["p"][1] == "<0.001"
    assert "4 seeds without 1337, the search's, too few for a star" in race_caption(report)


def test_a_rung_that_diverges_with_a_seed_is_not_tested(tmp_path):
    """The mean over the other seeds would flatter it."""
    losses = {ADAMW.name: [6.0] * 5, MUON.name: [3.0, 3.0, 3.01, 3.02, math.inf]}
    assert race_of(tmp_path, losses).race.race_table.change[MUON.name] is None
    losses[MUON.name].pop()
    assert race_of(tmp_path, losses).race.race_table.change[MUON.name] is None


@pytest.mark.parametrize("tries, seeds, said", [(3, 2, "include only a part of the luck"), (3, 1, "leave out the luck"),
                                                (0, 2, "apply to these learning rates only")])
def test_it_is_said_whether_p_holds_the_luck_of_the_search(tries, seeds, said, tmp_path):
    """It does not where one pair of rates serves all seeds, as in older races."""
    run_race(tmp_path, [ADAMW, MUON], 4, tries=tries, **{MUON.name: [5.0, 5.01, 5.03, 5.02]})
    record, _ = read_logs(tmp_path)
    search = record.points.part == "search"
    left = record.points[~search | record.points.seed.isin(range(1338 - 2 * seeds, 1338))]
    assert said in how_sure(replace(record, points=left))
