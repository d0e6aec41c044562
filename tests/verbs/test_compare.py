"""Two logs step by step: the same losses or not, faster or not. Recipes: the rule on known answers, what is refused."""
import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy
import pandas
import pytest
from load_script import ROOT
from log_files import MEDIAN, write_log
from rich.console import Console
from run_tool import flags, is_one_error
from scipy.stats import ttest_1samp

from ladder.errors import UserError
from ladder.measure import fairness
from ladder.measure.contest import Contest, known_flags
from ladder.measure.learning_rates import Search
from ladder.records.impossible import impossible
from ladder.records.logs import read_log
from ladder.records.recipes import COLUMNS, TUNING_SEEDS, Record, by_seed, doubts, standings
from ladder.records.significance import holm, holm_effects, paired_effect
from ladder.records.two_logs import compare
from ladder.rungs.list import BY_LABEL
from ladder.show.plots import save
from ladder.show.verdict import print_verdict, verdict_of, verdict_picture

HEADER = """\
# script: baseline.py
# model: gpt2
# device: {device} | allocator: {allocator}
# batch: B={B} T=1024 | steps: 20 | seed: 1
# ranks: {ranks}
# data: a
"""
USUAL = {"device": "T4", "allocator": "torch", "B": 4, "ranks": 1}
FAST, SLOW = [50, 51, 52, 50] * 5, [100, 101, 102, 100] * 5


@pytest.fixture
def compared(tmp_path):
    """compared(one, other): the Comparison of two logs, each the arguments of write_log."""
    def compared(*logs):
        return compare(*(read_log(write_log(tmp_path / f"{side}.log", **log))
                         for side, log in zip("ab", logs, strict=True)))

    return compared


def of_rung(label, losses=(10, 9, 8)):
    return {"header": f"# script: {BY_LABEL[label].file}\n", "losses": losses, "tail": MEDIAN}


NEARLY = (10.0001, 9.001, 8.0)


@pytest.mark.parametrize("one, other, losses, verdict", [
    ("0", "0", (10, 9, 8), "The same losses"), ("0", "0", (10, 9, 8.0001), "NOT the same losses"),
    ("0", "0", (10.000001, 9.000001, 8.000001), "The same losses"),  # a unit of the last digit
    ("1", "2", NEARLY, "The same losses"), ("1", "3", NEARLY, "The same losses"),
    ("gradient_checkpointing", "gradient_accumulation", NEARLY, "The same losses"),  # in either order
    ("distributed_validation", "checkpoints", (10, 9, 7), "NOT the same losses"),
    ("4", "5", (10, 9, float("nan")), "NOT the same losses"),
    ("0", "1", NEARLY, "may change them"), ("3", "4", NEARLY, "may change them"),
    ("10", "ddp", NEARLY, "may change them"),
])
def test_losses_may_differ_as_far_as_the_rungs_between_allow(one, other, losses, verdict, compared):
    sentence = compared(of_rung(one), of_rung(other, losses)).sentences[0]
    assert verdict in sentence and ("NOT" in verdict) == ("NOT" in sentence)


@pytest.mark.parametrize("label, verdict", [("8", "The same losses"), ("9", "different steps")])
def test_a_schedule_depends_on_the_number_of_steps(label, verdict, compared):
    logs = [of_rung(label) | {"header": f"# script: {BY_LABEL[label].file}\n# batch: B=4 T=64 | steps: {steps}\n"}
            for steps in (3, 30)]
    assert verdict in " ".join(compared(*logs).sentences)


@pytest.mark.parametrize("change, losses, verdict", [
    ({"device": "H200"}, NEARLY, "The same losses"), ({"device": "H200"}, (10, 9, 7), "NOT the same losses"),
    ({}, NEARLY, "NOT the same losses")])
def test_two_devices_round_differently(change, losses, verdict, compared):
    header = HEADER.format(**USUAL | change)
    logs = [of_rung("0") | {"header": HEADER.format(**USUAL)}, of_rung("0", losses) | {"header": header}]
    assert verdict in " ".join(compared(*logs).sentences)


def test_the_first_step_apart_is_named(compared):
    assert "Before step 3 they were at most 0.0000" in compared(of_rung("0"), of_rung("0", (10, 9, 7))).sentences[0]
    assert "from the first step on" in compared(of_rung("0"), of_rung("0", (11, 9, 8))).sentences[0]


@pytest.mark.parametrize("one, other, faster, verdict", [
    (SLOW, FAST, 2, "takes 5 rounds"), (FAST, SLOW, 0.5, "takes 5 rounds"),
    ([500, *[50] * 17], [1000, *[100] * 17], 0.5, "too few steps"),
    ([500, *[50] * 18], [1000, *[100] * 18], 0.5, "takes 5 rounds"),
])
def test_two_single_runs_never_make_a_gain(one, other, faster, verdict, compared):
    """However far apart; and each needs ten steps after the warm-up, which is the first half."""
    result = compared({"ms": one}, {"ms": other})
    assert verdict in result.sentences[-1] and result.faster == pytest.approx(faster, rel=0.03)


@pytest.mark.parametrize("change, named, losses, speed", [
    ({}, None, "The same losses", "takes 5 rounds"),
    (("gpt2\n", "tiny\n"), "model: gpt2 against tiny", "do not compare", "does not measure"),
    ({"B": 8}, "B: 4 against 8", "do not compare", "4.00 times"),
    (("seed: 1", "seed: 2"), "seed: 1 against 2", "do not compare", "takes 5 rounds"),
    ({"device": "H200"}, "device: T4 against H200", "The same losses", "takes 5 rounds"),
    ({"ranks": 2}, "tokens per step: 4096 against 8192", "do not compare", "4.00 times"),
    ({"ranks": 2, "B": 2}, "B: 4 against 2", "of the same tokens", "2.00 times"),
])
def test_what_differs_is_named_and_not_judged(change, named, losses, speed, compared):
    """Of other work neither the speed nor the losses; of other data or seeds not the losses."""
    header = HEADER.format(**USUAL | (change if isinstance(change, dict) else {}))
    header = header.replace(*change) if isinstance(change, tuple) else header
    one, other = ({"ms": [ms] * 20, "header": text} for ms, text in ((100, HEADER.format(**USUAL)), (50, header)))
    text = " ".join(compared(one, other).sentences)
    assert losses in text and speed in text and ("Different " in text) == bool(named)
    assert not named or f"Different {named}." in text


@pytest.mark.parametrize("one, other, different", [
    ("malloc", "tcmalloc", "malloc against tcmalloc"), (None, "tcmalloc", "unknown against tcmalloc"),
    ("malloc", "malloc", None)])
def test_different_allocators_are_named(one, other, different, compared):
    headers = [HEADER.format(**USUAL | {"device": "EPYC (2 threads)", "allocator": name}) for name in (one, other)]
    logs = [{"ms": ms, "header": header.replace(" | allocator: None", "")}
            for ms, header in zip((SLOW, FAST), headers, strict=True)]
    text = " ".join(compared(*logs).sentences)
    assert (f"Different allocator: {different}." in text) == bool(different) == ("may be the allocator's" in text)


def test_the_table_has_each_common_step_and_a_median_without_the_warm_up(tmp_path, call):
    code, out, _ = call("compare", write_log(tmp_path / "a.log"), write_log(tmp_path / "b.log", ms=(50, 25, 20)))
    assert code == 0 and "2 9.000000 9.000000 +0.000000 50.00 25.00 2.00" in out
    assert "median +0.000000 50.00 22.50 2.25" in out  # without the first step, in which both warm up
    write_log(tmp_path / "a.log", tail=MEDIAN)  # warms up one step longer: only the third step is warm in both
    assert "median +0.000000 50.00 20.00 2.50" in call("compare", tmp_path / "a.log", tmp_path / "b.log")[1]


@pytest.mark.parametrize("header, ms, speed, found", [
    ("# batch: B=2 T=1024 | steps: 1\n", "177.00", "11.57", "they are tokens per millisecond"),
    ("# batch: B=2 T=1024 | steps: 1\n", "177.00", "11570.62", None),
    ("# batch: B=4 T=1024 | steps: 1\n", "177.00", "11570.62", "its header says 4,096"),
    ("# batch: B=4 T=1024 | steps: 1\n# ranks: 2\n", "93.10", "87991.41", None),
    ("", "177", "11.5", "no whole number"), ("", "177.00", "11570.62", None), ("", "4.17", "0.02", "no whole number"),
])
def test_tokens_per_second_that_are_something_else_are_called_so(header, ms, speed, found, tmp_path):
    """The earlier series logged tokens per millisecond; a log need not have a header."""
    (tmp_path / "a.log").write_text(f"{header}step : 1 | loss: 10.9 | dt: {ms} ms | tokens/sec: {speed}\n")
    sentences = impossible(read_log(tmp_path / "a.log"))
    assert len(sentences) == (found is not None) and all(found in sentence for sentence in sentences)


@pytest.mark.parametrize("device, gpu, ms, fast", [
    ("NVIDIA GeForce RTX 3080", None, 13.5, True), ("NVIDIA GeForce RTX 3080", None, 60, False),
    (None, "RTX 3080", 13.5, True), (None, None, 13.5, False), ("cpu", None, 13.5, False)])
def test_a_step_below_its_cards_arithmetic_is_called_impossible(device, gpu, ms, fast, tmp_path, call):
    header = "# model: gpt2\n" + (f"# device: {device}\n" if device else "") + "# batch: B=2 T=1024 | steps: 3\n"
    logs = [write_log(tmp_path / f"{side}.log", [ms] * 3, header=header) for side in "ab"]
    folder = write_log(tmp_path / "one" / "a.log", [ms] * 3, header=header).parent
    for words in (["compare", *logs], ["report", folder]):
        out = call(*words, *(["--gpu", gpu] if gpu else []))[1]
        assert ("matrix products alone take 22.0 ms" in " ".join(out.split())) == fast


def test_comparing_loads_no_torch(tmp_path):
    logs = [write_log(tmp_path / f"{side}.log") for side in "ab"]
    for words in (["compare", *logs], ["report", tmp_path], ["report", tmp_path, "--json"]):
        code = ("import sys; from ladder.__main__ import main; code = main(sys.argv[1:]); "
                "sys.exit(code or 'torch' in sys.modules)")
        done = subprocess.run([sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


# ---- recipes: the rule on known answers ------------------------------------------------------------------------------


def search_of(losses, start=(6e-4, 2e-3), most=24, tries=None):
    """A Search driven as a contest does: of losses(rates), one for each seed; with `tries` it goes on so far."""
    search = Search(start)
    for limit, finest in ((most, 1.0), (tries or 0, 0.0)):
        while points := search.wanted(limit, finest):
            for point in points:
                search.add(point, dict(enumerate(numpy.atleast_1d(losses(search.rates(point))))))
    return search


def parabola(lowest, bend=0.1):
    return lambda rates: sum(bend * math.log2(rate / best) ** 2 for rate, best in zip(rates, lowest, strict=True))


@pytest.mark.parametrize("start", [(6e-4, 2e-3), (9.6e-3, 2e-3), (4.8e-3, 8e-3)])
@pytest.mark.parametrize("lowest", [(1.1e-3, 5e-3), (4.8e-3, 8e-3), (5e-4, 1.3e-3)])
def test_the_search_finds_the_lowest_point_of_a_parabola(start, lowest):
    """Between the rates that it tries; none twice, and no more than allowed."""
    search = search_of(parabola(lowest), start)
    assert search.chosen(0) == pytest.approx(lowest, rel=2e-3) and len(search.losses) < 24
    assert max(abs(math.log2(a / b)) for a, b in zip(search.rates(search.best), lowest, strict=True)) <= 0.5
    further = search_of(parabola(lowest), start, tries=20)
    assert len({further.rates(point) for point in further.losses}) == 20
    assert further.chosen(0) == pytest.approx(lowest, rel=2e-3)


def test_the_search_ends_where_it_must():
    """At the edge of what it may try it takes the best try; a rate that diverges is no neighbor."""
    few = search_of(parabola((0.6, 2.0)), most=6)
    assert len(few.losses) == 6 and few.chosen(0) == few.rates(few.best)
    cliff = search_of(lambda rates: math.inf if rates[0] > 1e-3 else parabola((2e-3, 2e-3))(rates))
    assert 5e-4 < cliff.chosen(0)[0] < 1e-3


def simulated(random, shift=0.0, bend=0.1, noise=0.015, seeds=8):
    """The Effect of a contest of two recipes whose best losses differ by `shift`; each search has its own luck."""
    lowest = 6e-4 * 2 ** random.uniform(-1, 3), 2e-3 * 2 ** random.uniform(-1, 3)
    true = parabola(lowest, bend)

    def try_rates(rates):
        return true(rates) + noise * random.normal(size=seeds)

    searches = [search_of(try_rates) for _ in range(2)]
    tries = max(len(search.losses) for search in searches)
    for search in searches:
        while points := search.wanted(tries, 0.0):
            for point in points:
                search.add(point, dict(enumerate(try_rates(search.rates(point)))))
    before, after = ([true(search.chosen(seed)) + noise * random.normal() for seed in range(seeds)]
                     for search in searches)
    return paired_effect(before, [loss + shift for loss in after])


@pytest.mark.parametrize("bend, noise", [(0.1, 0.015), (0.03, 0.04)])
def test_p_is_uniform_for_equal_recipes_whose_rates_have_one_smooth_minimum(bend, noise):
    """Though each has its own search, also where seeds differ by far more than a factor of two in a rate costs.

    With one pair of rates for all seeds it is not.
    """
    ps = numpy.array([simulated(numpy.random.default_rng(seed), bend=bend, noise=noise).p for seed in range(800)])
    shares = [numpy.mean(ps < limit) for limit in (0.01, 0.05, 0.5)]
    assert shares == [pytest.approx(0.01, abs=0.011), pytest.approx(0.05, abs=0.023), pytest.approx(0.5, abs=0.06)]


def test_a_known_difference_is_found_and_its_interval_holds_it():
    found = [simulated(numpy.random.default_rng(seed), shift=0.1) for seed in range(300)]
    assert numpy.mean([effect.mean for effect in found]) == pytest.approx(0.1, abs=0.002)
    assert numpy.mean([effect.low < 0.1 < effect.high for effect in found]) == pytest.approx(0.99, abs=0.015)
    assert numpy.mean([effect.significant for effect in found]) > 0.95


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


# ---- recipes: what is said -------------------------------------------------------------------------------------------

BASE = [2.01, 2.00, 2.02, 1.99, 2.03]
FACTS = {"batch": "B=16 T=64", "data": "text (bytes tokens) | loaded"}


def record_of(losses, ms=None, steps=100):
    """A Record in which each script ends with these losses, a fall from 3.0, and takes these ms a step."""
    rows = []
    for name, ends in losses.items():
        whole = {"rung": name, "max_lr": 1e-3, "muon_lr": 2e-3, "parameters": 9e5, "ms": 100.0}
        for number, end in enumerate(ends):
            for step, loss in ((steps // 2, (3 + end) / 2), (steps, end)):
                rows.append(whole | {"part": "round", "round": number + 1, "seed": 1338 + number, "step": step,
                                     "tokens": 1024 * step, "val_loss": loss})
        for number, own in enumerate((ms or {}).get(name, [])):
            rows.append(whole | {"part": "timing", "round": number + 1, "seed": 1338, "step": 30, "tokens": 1,
                                 "ms": own})
    return Record(FACTS, pandas.DataFrame(rows, columns=[*COLUMNS]).astype({**COLUMNS, "val_loss": float}))


def shifted(*shifts):
    return [loss + shift for loss, shift in zip(BASE, shifts, strict=True)]


@pytest.mark.parametrize("losses, said", [
    (shifted(-0.05, -0.06, -0.05, -0.04, -0.05), "mine.py ends lower than zero_init: −0.050 nats (99 % interval −0.06"),
    (shifted(0.05, 0.06, 0.05, 0.04, 0.05), "mine.py ends higher than zero_init: +0.050 nats"),
    (shifted(-0.01, 0.02, 0.01, -0.02, 0.01), "No significant difference between mine.py and zero_init: +0.002 nats"),
    (shifted(-0.01, 0.02, 0.01, -0.02, 0.01), "Not excluded are differences of up to 0.036 nats."),
    (BASE, "the same losses as zero_init, to the last digit"),
    (BASE[:4], "mine.py finished 4 of 5 seeds; where some diverge"),
    ([*BASE[:4], math.inf], "or one that diverged; no interval"),
])
def test_one_sentence_says_what_a_comparison_found(losses, said):
    texts, _, [sentence, *_] = verdict_of(record_of({"7_zero_init": BASE, "mine": losses}))
    assert said in sentence and ("*" in texts["p"][1]) == ("ends lower" in said or "ends higher" in said)


def test_fewer_seeds_get_no_star():
    texts, _, [sentence, *_] = verdict_of(record_of({"7_zero_init": BASE[:4], "mine": [1, 1.01, 0.99, 1]}))
    assert "fewer than 5 seeds, too few to call it a difference" in sentence and texts["p"][1] == "<0.001"


def test_several_files_against_one_are_a_family():
    """p is Holm's over the files, each against the first, not against the one before."""
    losses = {"7_zero_init": BASE, "mine": shifted(-0.05, -0.04, -0.05, -0.06, -0.07),
              "other": shifted(-0.05, -0.03, -0.04, -0.06, -0.07)}
    texts, _, sentences = verdict_of(record_of(losses))
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
    effect = standings(record, against_first=True).times["mine"]
    assert effect.pairs == 5 and math.exp(effect.mean) == pytest.approx(1 / 1.1)


def test_a_sheet_has_each_seeds_difference(tmp_path):
    sheet = by_seed(record_of({"7_zero_init": BASE, "mine": shifted(-0.05, -0.06, -0.05, -0.04, -0.05)}), True)
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


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_a_narrow_terminal_loses_columns_and_no_letters(width):
    """Whatever is left out, names, differences and p stay."""
    drift = numpy.array([100, 200, 150, 120, 180])
    record = record_of({"7_zero_init": BASE, "learning_rates_of_mine": shifted(-0.05, -0.06, -0.05, -0.04, -0.05)},
                       {"7_zero_init": drift, "learning_rates_of_mine": drift})
    shown = printed(record, width)
    table = shown[shown.index("script") : shown.index("val loss: the")]
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


def test_the_picture_has_the_means_of_the_seeds(tmp_path):
    losses = {"7_zero_init": BASE, "mine": shifted(*[-0.5] * 5), "worse": BASE[:4]}
    picture = verdict_picture(record_of(losses))
    save(picture, tmp_path / "a.png")
    [panel] = picture["panels"]
    assert [curve["title"] for curve in panel["curves"]] == ["zero_init", "mine.py", "worse.py"]
    for curve, ends in zip(panel["curves"], losses.values(), strict=True):
        end = sum(ends) / len(ends)
        assert (curve["low"][1], curve["high"][1]) == (min(ends), max(ends)) and curve["steps"] == [50, 100]
        assert curve["loss"] == pytest.approx([(3 + end) / 2, end])


# ---- recipes: what is compared ---------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    """mine(old, new): a copy of `zero_init` with a change."""
    def write(old="", new="", name="mine.py"):
        source = BY_LABEL["zero_init"].path.read_text(encoding="utf-8")
        assert old in source
        path = tmp_path / name
        path.write_text(source.replace(old, new, 1), encoding="utf-8")
        return path

    return write


def test_a_file_is_no_rung_though_it_has_its_name(mine, tmp_path):
    copy = fairness.script_of(str(mine(name="7_zero_init.py")))
    rung = BY_LABEL["zero_init"]
    assert copy.label == "" and fairness.script_of(str(rung.path)) is rung is fairness.script_of("zero_init")
    one, other = fairness.copied([BY_LABEL["zero_init"], copy], tmp_path / "scripts")
    assert one is BY_LABEL["zero_init"] and other.name == "7_zero_init_yours"
    assert other.path.read_bytes() == copy.path.read_bytes()


def test_each_script_gets_the_flags_that_it_has(mine):
    flag = '    flag("--seed"'
    own = fairness.script_of(str(mine(flag, f'    flag("--idea", type=float, default=1.0)\n{flag}')))
    words = ["--steps", "3", "--idea", "3", "-B", "2", "--muon-lr=3"]
    assert known_flags(own, words) == words
    assert known_flags(BY_LABEL["zero_init"], words) == ["--steps", "3", "-B", "2", "--muon-lr=3"]
    assert known_flags(BY_LABEL["validation"], words) == ["--steps", "3", "-B", "2"]


@pytest.mark.parametrize("what, words, reasons", [
    (["zero_init", "10"], [], ["speedup_10_fused_adamw.py: has no --val-every"]),
    (["zero_init", "muon"], ["--seed", "3"], ["--seed: a comparison sets it itself"]),
    (["zero_init", "muon"], ["--ideas", "3"], ["--ideas: none of these scripts has this flag"]),
    (["zero_init", "muon"], ["--val-every", "0"], ["--val-every 0"]),
    (["zero_init", "nosuch"], [], ["no rung nosuch"]), (["zero_init", "nosuch.py"], [], ["nosuch.py: no such script"]),
    (["zero_init"], [], ["compare zero_init: give two"]),
    (["zero_init", "long_run"], ["--total-batch", "128"], ["tokens a step", "128 and zero-initialized projections 32"]),
])
def test_what_cannot_be_compared_is_refused_before_a_folder_is_made(what, words, reasons, tokens, tmp_path, call):
    answer = call("compare", *what, "--logs", tmp_path / "logs", *flags(tokens), *words)
    assert is_one_error(answer, *reasons) and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("old, new, reasons", [
    ('    args = parser.parse_args(argv)\n', '    args = parser.parse_args(argv)\n    args.T = 16\n',
     ["-T: mine.py has 16 and zero-initialized projections 32"]),
    ('    args = parser.parse_args(argv)\n', '    args = parser.parse_args(argv)\n    args.val_sequences = 1\n',
     ["--val-sequences: mine.py has 1"]),
    ('    args = parser.parse_args(argv)\n', '    args = parser.parse_args(argv)\n    args.data = Path("x")\n',
     ["--data: mine.py has x"]),
    ("def add_flags(parser):", "def add_flags(parser", ["line", "was never closed"]),
])
def test_an_unfair_file_is_refused_by_name(old, new, reasons, mine, tokens, tmp_path, call, monkeypatch):
    if "never" not in reasons[-1]:  # to try in a process of its own if it can be imported takes six seconds
        monkeypatch.setattr(fairness, "check_scripts", lambda scripts: None)
    answer = call("compare", "zero_init", mine(old, new), "--logs", tmp_path / "logs", *flags(tokens))
    assert is_one_error(answer, *reasons) and not (tmp_path / "logs").exists()


def test_the_newest_comparison_of_the_same_arguments_is_resumed(monkeypatch, tmp_path):
    monkeypatch.setattr(fairness, "FOLDERS", tmp_path)
    for day, seeds in (("01", 5), ("02", 5), ("03", 3)):
        (tmp_path / day).mkdir()
        (tmp_path / day / "contest.json").write_text(json.dumps({"scripts": [{"name": "a"}], "seeds": seeds}))
    assert fairness.newest_of({"seeds": 5}).name == "02"
    with pytest.raises(UserError, match="no comparison of these arguments"):
        fairness.newest_of({"seeds": 4})


def test_runs_that_did_not_do_the_same_are_refused_though_their_flags_say_so(tmp_path):
    logs = [write_log(tmp_path / f"{name}.log", header=f"# batch: B=4 T={T} | steps: 3\n# data: a\n")
            for name, T in (("one", 64), ("two", 32))]
    with pytest.raises(UserError, match="T: two has 32 and one 64"):
        fairness.check_logs(logs)
    fairness.check_logs([logs[0], tmp_path / "none.log"])


@pytest.mark.slow
def test_a_comparison_for_real(mine, byte_tokens, tmp_path, call, monkeypatch):
    """The same command resumes and repeats nothing; another one, or a changed file, is refused; the folder is shown."""
    monkeypatch.setattr(fairness, "Contest", partial(Contest, timings=1))
    logs, file = tmp_path / "logs", mine("import argparse", "import helper\nimport argparse")
    (tmp_path / "helper.py").write_text("")  # beside the file, whose copy runs
    words = ["compare", "zero_init", file, "--logs", logs, "--seeds", "3", "--tries", "2", *flags(byte_tokens),
             "--val-every", "2", "--val-sequences", "2"]
    code, out, error = call(*words)
    assert code == 0, error
    assert "mine.py ends with the same losses as zero_init, to the last digit, with every seed." in out
    n_search = 2 * 3  # two tries, a seed of the search for each that is tested
    assert (logs / "compare.png").exists() and len(list(logs.rglob("*.log"))) == 2 * (n_search + 3 + 2)
    assert len((logs / "differences.csv").read_text().splitlines()) == 1 + 3
    again = call("compare", logs)[1]
    assert "the same losses as zero_init" in again and "Doubtful: 4 steps are too few" in again
    gone = logs / "round_2" / "mine.log"
    gone.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert is_one_error(call(*words), "is not empty") and not gone.exists()
    assert call(*words, "--resume")[0] == 0 and gone.exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert is_one_error(call(*words, "--resume", "--max-lr", "0.1"), "of other flags")
    file.write_text(file.read_text() + "# changed\n")
    assert is_one_error(call(*words, "--resume"), "of other scripts")
    contest = json.loads((logs / "contest.json").read_text())
    assert contest["seeds"] == 3 and contest["scripts"][1]["title"] == "mine.py" and "commit" in contest
