"""Paired tests: of a difference, of a family of differences, of speeds."""
import math
from dataclasses import replace

import numpy
import pytest
from log_files import write_log
from scipy.stats import ttest_1samp

from ladder.records.logs import read_log
from ladder.records.significance import holm, holm_effects, paired_effect, speed_p
from ladder.records.summary import rounds_of


@pytest.mark.parametrize("family", [1, 7])
def test_a_detectable_difference_is_found_four_times_in_five(family):
    """By the test of its family: Bonferroni's, as one true effect among nulls meets it in Holm's."""
    spread = numpy.array([-1.5, -1, -0.5, 0, 0, 0.5, 1, 1.5])
    effect = replace(paired_effect([0.0] * 8, spread / spread.std(ddof=1)), family=family)
    random = numpy.random.default_rng(1)
    drawn = random.normal(effect.detectable(), 1, size=(4000, 8))
    assert numpy.mean(ttest_1samp(drawn, 0, axis=1).pvalue < 0.01 / family) == pytest.approx(0.8, abs=0.025)


def test_the_intervals_of_a_family_hold_all_together():
    """Each of seven may miss in a seventh of 1 %, so that all hold at once in at least 99 families of a hundred."""
    drawn = numpy.random.default_rng(2).normal(size=(7, 8))
    found = holm_effects({row: paired_effect([0.0] * 8, values) for row, values in enumerate(drawn)})
    for row, values in enumerate(drawn):
        expected = ttest_1samp(values, 0).confidence_interval(1 - 0.01 / 7)
        assert (found[row].low, found[row].high) == pytest.approx(expected)


def test_an_effect_is_none_where_a_mean_would_mislead():
    assert paired_effect([1, 2], [1, 2]) is None and paired_effect([1, 2, 3], [1, 2, math.inf]) is None
    same, apart = paired_effect([1, 2, 3], [1, 2, 3]), paired_effect([1, 2, 3], [2, 3, 4])
    assert (same.mean, same.p, same.significant) == (0, 1, False)
    assert (apart.low, apart.mean, apart.high, apart.significant) == (1, 1, 1, False)  # three pairs get no star


@pytest.mark.parametrize("tokens, ms, p", [(2, 200, 1), (2, 100, 0)])
def test_p_compares_the_time_of_a_token_not_of_a_step(tokens, ms, p, tmp_path):
    """Twice the tokens in twice the time are no difference; in the same time they are one."""
    runs = [read_log(write_log(tmp_path / f"round_{number}" / f"{name}.log", ms=[time + noise] * 3,
                               header=f"# batch: B={B} T=64 | steps: 3\n"))
            for name, B, time, noises in (("a", 1, 100, (0, 1, 2, 1, 0)), ("b", tokens, ms, (1, 0, 1, 2, 0)))
            for number, noise in enumerate(noises)]
    assert (speed_p(rounds_of(runs), "a", "b") < 0.01) == (p == 0)


def test_rounds_are_paired_by_name(tmp_path):
    """Rounds 1 to 6 against 2 to 7 of a machine that gets slower: only the five that both have are compared."""
    runs = [read_log(write_log(tmp_path / f"round_{number}" / f"{name}.log", ms=[factor * 100 * 1.1**number] * 3))
            for name, numbers, factor in (("a", range(1, 7), 1), ("b", range(2, 8), 0.9)) for number in numbers]
    jitter = rounds_of(runs)
    jitter.loc[("b", "round_3"), "ms"] *= 1.01
    assert speed_p(jitter, "a", "b") < 1e-4
    assert speed_p(jitter.drop(("b", "round_3")), "a", "b") is None  # four are too few


@pytest.mark.parametrize("ps, corrected", [
    ({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}),  # as 2 * 0.03
    ({"a": 0.4, "b": 0.9, "c": 0.004}, {"c": 0.012, "a": 0.8, "b": 0.9}),
    ({"a": 0.7, "b": 0.6}, {"b": 1, "a": 1}), ({"a": 0.3}, {"a": 0.3}), ({}, {})])
def test_holm_multiplies_the_smallest_p_by_all_and_keeps_the_order(ps, corrected):
    assert holm(ps) == pytest.approx(corrected)
