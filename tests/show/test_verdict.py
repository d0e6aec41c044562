"""What is said of two recipes whose losses and times are known."""
import io
import math
from dataclasses import replace

import numpy
import pandas
import pytest
from fake_race import FACTS, record_of
from rich.console import Console
from scipy.stats import ttest_1samp

from ladder.records.recipes import TUNING_SEEDS, by_seed, doubts, recipe_table
from ladder.records.significance import holm, paired_effect
from ladder.show import verdict
from ladder.show.columns import texts_of
from ladder.show.plots import recipes_picture
from ladder.show.verdict import print_verdict

BASE = [2.01, 2.00, 2.02, 1.99, 2.03]


def shifted(*shifts):
    return [loss + shift for loss, shift in zip(BASE, shifts, strict=True)]


def verdict_of(record):
    """(the table's texts, what comes before it, the sentences)."""
    rows, columns, *said = verdict.verdict_of(record)
    return pandas.DataFrame(texts_of(rows, columns)), *said


@pytest.mark.parametrize("losses, said", [
    (shifted(-0.05, -0.06, -0.05, -0.04, -0.05), "mine.py ends lower than zero_init: −0.050 nats (99 % interval −0.06"),
    (shifted(0.05, 0.06, 0.05, 0.04, 0.05), "mine.py ends higher than zero_init: +0.050 nats"),
    (shifted(-0.01, 0.02, 0.01, -0.02, 0.01), "No significant difference between mine.py and zero_init: +0.002 nats"),
    (shifted(-0.01, 0.02, 0.01, -0.02, 0.01), "Not excluded are differences of up to 0.036 nats."),
    (shifted(-1e-5, 2e-5, 1e-5, -2e-5, 1e-5), "Not excluded are differences of up to 0.000036 nats."),
    (BASE, "the same losses as zero_init, to the last digit"),
    (BASE[:4], "mine.py finished 4 of 5 seeds, and the test needs all"),
    ([*BASE[:4], math.inf], "or one that diverged; no interval"),
])
def test_one_sentence_says_what_a_comparison_found(losses, said):
    texts, _, [sentence, *_] = verdict_of(record_of({"7_zero_init": BASE, "mine": losses}))
    assert said in sentence and ("*" in str(texts.get("p"))) == ("ends lower" in said or "ends higher" in said)


def test_a_comparison_that_was_stopped_has_no_p():
    """The number of seeds is fixed beforehand: who stops at the first small p finds one too often."""
    record = record_of({"7_zero_init": BASE, "mine": shifted(-0.05, -0.06, -0.05, -0.04, -0.05)})
    record.facts = FACTS | {"seeds": "8"}
    texts, before, [sentence, *_] = verdict_of(record)
    assert before == ["Only 5 of 8 seeds have finished, so there is no p; rerun the command with --resume."]
    assert "mine.py finished 5 of 8 seeds" in sentence and "p" not in texts and "p" not in by_seed(record)


def test_fewer_seeds_get_no_star():
    texts, _, [sentence, *_] = verdict_of(record_of({"7_zero_init": BASE[:4], "mine": [1, 1.01, 0.99, 1]}))
    assert "fewer than 5 seeds, too few to call it a difference" in sentence and texts["p"][1] == "<0.001"


def test_several_files_against_one_are_a_family():
    """p is Holm's over the files, each against the first, not against the one before."""
    losses = {"7_zero_init": BASE, "mine": shifted(-0.05, -0.04, -0.05, -0.06, -0.07),
              "other": shifted(-0.05, -0.03, -0.04, -0.06, -0.07)}
    record = record_of(losses)
    texts, _, sentences = verdict_of(record)
    assert [curve.title for curve in recipes_picture(record).panels[0].curves] == ["zero_init", "mine.py", "other.py"]
    raw = {name: paired_effect(BASE, losses[name]).p for name in ("mine", "other")}
    for name, p in holm(raw).items():
        row = texts[texts["script"] == f"{name}.py"].iloc[0]
        assert row["p"].rstrip("*") == ("<0.001" if p < 0.001 else f"{p:.2g}") and p > raw[name] * 0.999
    assert holm(raw)["mine"] == pytest.approx(2 * raw["mine"]) and "other.py ends lower than zero_init" in sentences[1]


def test_times_are_paired_by_round():
    """A drift of the machine that both have does not hide a tenth."""
    drift = numpy.array([100, 200, 150, 120, 180])
    record = record_of({"7_zero_init": BASE, "mine": shifted(*[-0.5] * 5)},
                       {"7_zero_init": drift, "mine": 1.1 * drift + [1, -1, 0, 1, -1]})
    texts, _, [sentence, *limits] = verdict_of(record)
    assert "A step takes 1.10 times as long (99 % interval 1.09 to 1.12, p < 0.001)" in sentence
    assert texts["ms / zero_init (99 %)"][1] == "1.10 (1.09 to 1.12)"
    assert texts["ms/step (range)"][0] == "150.0 (100.0–200.0)"
    assert any("0.90M parameters, 100 steps, 0.10M tokens of text (bytes tokens) in windows of 64" in text
               for text in limits)


def test_rounds_are_paired_by_their_names():
    """One script lacks round 1, the other round 7, while the machine slows by half: the gain stays a tenth."""
    drift, losses = 100 * numpy.linspace(1, 1.5, 7), {"7_zero_init": BASE, "mine": BASE}
    record = record_of(losses, {"7_zero_init": drift, "mine": drift / 1.1})
    timing, first, last = (record.points[column] == value for column, value in
                           (("part", "timing"), ("round", 1), ("round", 7)))
    one = record.points.rung == "mine"
    record.points = record.points[~(timing & (one & last | ~one & first))]
    effect = recipe_table(record, against_first=True).times["mine"]
    assert effect.pairs == 5 and math.exp(effect.mean) == pytest.approx(1 / 1.1)


def test_a_sheet_has_each_seeds_difference(tmp_path):
    sheet = by_seed(record_of({"7_zero_init": BASE, "mine": shifted(-0.05, -0.06, -0.05, -0.04, -0.05)}))
    assert sheet.seed.tolist() == [1338, 1339, 1340, 1341, 1342]
    assert sheet.difference.tolist() == pytest.approx([-0.05, -0.06, -0.05, -0.04, -0.05])
    assert sheet.p.tolist() == [pytest.approx(ttest_1samp(sheet.difference, 0).pvalue)] * 5


def test_more_parameters_are_named_and_doubts_come_first():
    record = record_of({"7_zero_init": BASE, "mine": BASE})
    record.points.loc[record.points.rung == "mine", "parameters"] = 900_012
    texts, before, _ = verdict_of(searched(record, "mine", CROSS | {(0.5, 1): 1.5}))
    assert texts["parameters"].tolist() == ["900,000", "900,012"]
    assert "mine.py are at the edge" in before[0] and "from zero_init's (mine.py +12)" in before[1]
    shown = printed(record, 80)
    assert shown.index("(mine.py +12)") < shown.index("Training recipes") < shown.index("the same losses")


def printed(record, width):
    console = Console(width=width, file=io.StringIO())
    print_verdict(record, console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 140])
def test_a_narrow_terminal_loses_columns_and_no_letters(width):
    """Whatever is left out, names, differences and p stay."""
    drift = numpy.array([100, 200, 150, 120, 180])
    record = record_of({"7_zero_init": BASE, "learning_rates_of_mine": shifted(-0.05, -0.06, -0.05, -0.04, -0.05)},
                       {"7_zero_init": drift, "learning_rates_of_mine": drift})
    shown = printed(record, width)
    table = shown[shown.index("script") : shown.index("In parentheses")]
    assert "…" not in shown and "learning_rates_of_mine.py" in table
    assert "−0.050 (−0.065 to −0.035)" in table and "<0.001*" in table
    assert ("150.0 (100.0–200.0)" in table) == (width >= 140)
    assert "learning_rates_of" in printed(record, 60)


CROSS = {(0.5, 1): 2.01, (1, 0.5): 2.01, (1, 1): 2.0, (1, 2): 2.01, (2, 1): 2.01}  # {rates: loss}, the middle the best


def searched(record, name, losses, seeds=TUNING_SEEDS):
    """Add a search's {(AdamW's rate, Muon's): last loss} to a record."""
    rows = [{"part": "search", "rung": name, "max_lr": one, "muon_lr": other, "seed": seed, "val_loss": loss}
            for (one, other), loss in losses.items() for seed in seeds]
    record.points = pandas.concat([record.points, pandas.DataFrame(rows)])
    return record


def test_a_script_that_finished_no_seed_is_named():
    """With the rates of its search all of its rounds diverged, or they are still to come."""
    texts, before, _ = verdict_of(searched(record_of({"7_zero_init": BASE}), "mine", CROSS))
    assert len(texts) == 1 and before[-1] == "mine.py finished 0 of 5 seeds."


@pytest.mark.parametrize("losses, said", [
    (CROSS | {(2, 1): 2.5}, []), (CROSS | {(2, 1): math.inf}, []),  # what diverges differs, too
    (CROSS, ["differ by no more than its seeds do"]),
    (CROSS | {(0.5, 1): 1.5}, ["are at the edge of the 5 tried"]),  # of one of the two rates
])
def test_rates_that_a_search_did_not_settle_are_doubted(losses, said):
    record = searched(record_of({"7_zero_init": BASE}), "7_zero_init", losses)
    assert [*doubts(record)] == [("7_zero_init", words) for words in said]


def test_what_would_go_unnoticed_is_that_of_the_script_whose_seeds_differ_most():
    losses = {"7_zero_init": BASE, "calm": shifted(-0.01, 0.01, 0, 0.01, 0),
              "wild": shifted(-0.3, 0.3, 0, 0.2, 0)}
    most = replace(paired_effect(BASE, losses["wild"]), family=2).detectable()
    assert any(f"finds a difference of {most:.2g} nats" in text for text in verdict_of(record_of(losses))[2])
