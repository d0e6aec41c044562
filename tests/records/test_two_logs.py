"""Two logs step by step: the same losses or not, faster or not."""
import pytest
from log_files import MEDIAN, write_log

from ladder.records.logs import read_log
from ladder.records.two_logs import compare
from ladder.rungs.list import BY_LABEL

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
    """compared(one, other): the sentences about two logs, each the arguments of write_log."""
    def compared(*logs):
        return compare(*(read_log(write_log(tmp_path / f"{side}.log", **log))
                         for side, log in zip("ab", logs, strict=True)))[1]

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
    ("10", "ddp", NEARLY, "may change them"), ("3", "4", (10, 9, 8), "The same losses, though"),
    ("3", "4", (10, 9, 8.00001), "up to 0.000010"), ("0", "0", (10, 9, 8.00001), "NOT the same losses: up to 0.000010"),
])
def test_losses_may_differ_as_far_as_the_rungs_between_allow(one, other, losses, verdict, compared):
    sentence = compared(of_rung(one), of_rung(other, losses))[0]
    assert verdict in sentence and ("NOT" in verdict) == ("NOT" in sentence)


@pytest.mark.parametrize("label, verdict", [("8", "The same losses"), ("9", "different steps"),
                                            ("muon", "different steps")])
def test_a_schedule_depends_on_the_number_of_steps(label, verdict, compared):
    logs = [of_rung(label) | {"header": f"# script: {BY_LABEL[label].file}\n# batch: B=4 T=64 | steps: {steps}\n"}
            for steps in (3, 30)]
    assert verdict in " ".join(compared(*logs))


@pytest.mark.parametrize("change, losses, verdict", [
    ({"device": "H200"}, NEARLY, "The same losses"), ({"device": "H200"}, (10, 9, 7), "NOT the same losses"),
    ({}, NEARLY, "NOT the same losses")])
def test_two_devices_round_differently(change, losses, verdict, compared):
    header = HEADER.format(**USUAL | change)
    logs = [of_rung("0") | {"header": HEADER.format(**USUAL)}, of_rung("0", losses) | {"header": header}]
    assert verdict in " ".join(compared(*logs))


def test_the_first_step_apart_is_named(compared):
    assert "Before step 3 they were at most 0.0000" in compared(of_rung("0"), of_rung("0", (10, 9, 7)))[0]
    assert "from the first step on" in compared(of_rung("0"), of_rung("0", (11, 9, 8)))[0]


@pytest.mark.parametrize("one, other, faster, verdict", [
    (SLOW, FAST, "1.99", "takes 5 rounds"), (FAST, SLOW, "0.50", "takes 5 rounds"),
    ([500, *[50] * 17], [1000, *[100] * 17], "0.50", "too few steps"),
    ([500, *[50] * 18], [1000, *[100] * 18], "0.50", "takes 5 rounds"),
])
def test_two_single_runs_never_make_a_gain(one, other, faster, verdict, compared):
    """However far apart; and each needs ten steps after the warm-up, which is the first half."""
    sentence = compared({"ms": one}, {"ms": other})[-1]
    assert verdict in sentence and f"has {faster} times the tokens/sec" in sentence


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
    text = " ".join(compared(one, other))
    assert losses in text and speed in text and ("Different " in text) == bool(named)
    assert not named or f"Different {named}." in text


@pytest.mark.parametrize("one, other, different", [
    ("malloc", "tcmalloc", "malloc against tcmalloc"), (None, "tcmalloc", "unknown against tcmalloc"),
    ("malloc", "malloc", None)])
def test_different_allocators_are_named(one, other, different, compared):
    headers = [HEADER.format(**USUAL | {"device": "EPYC (2 threads)", "allocator": name}) for name in (one, other)]
    logs = [{"ms": ms, "header": header.replace(" | allocator: None", "")}
            for ms, header in zip((SLOW, FAST), headers, strict=True)]
    text = " ".join(compared(*logs))
    assert (f"Different allocator: {different}." in text) == bool(different) == ("may be the allocator's" in text)
