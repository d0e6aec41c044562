"""Two logs step by step: the same losses or not, faster or not, and when neither can be said."""
import subprocess
import sys

import pytest
from conftest import ROOT
from log_files import MEDIAN, write_log

from ladder.rungs.list import BY_LABEL
from ladder.show.compare import compare
from ladder.show.impossible import impossible
from ladder.show.logs import read_log

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
    ("16", "11", NEARLY, "The same losses"),  # in either order
    ("13", "14", (10, 9, 7), "NOT the same losses"), ("4", "5", (10, 9, float("nan")), "NOT the same losses"),
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
