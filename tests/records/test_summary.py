"""A folder of logs as a table: medians, spreads, gains, and what a report warns of."""
import json
import shutil

import numpy as np
import pytest
from log_files import MEDIAN, write_log
from scipy.stats import ttest_1samp

from ladder import formats
from ladder.count.flops import flops_per_token
from ladder.records.summary import build_report, warnings
from ladder.rungs.list import BY_LABEL, PEER

BASELINE, TIED = BY_LABEL["0"].name, BY_LABEL["1"].name


def rounds(folder, *logs, name=BASELINE):
    """The row of rung `name` in the report on these rounds: each the arguments of write_log."""
    for number, arguments in enumerate(logs, 1):
        write_log(folder / f"round_{number}" / f"{name}.log", **arguments)
    return build_report(folder).rows[0]


def test_a_row_is_the_median_of_its_rounds_or_of_the_steps_of_one(tmp_path):
    """Of one the middle half of the counted steps. Of three medians, their spread the lowest and highest.

    As complete and as long as the least of them.
    """
    ms, losses = [4000, 900, 10, 20, 30, 40, 50], [9, 8, 7, 6, 5, 4, 4.5]
    row = rounds(tmp_path / "one", {"ms": ms, "losses": losses, "tail": MEDIAN})
    assert (row.ms_low, row.ms, row.ms_high) == (20, 30, 40)
    assert (row.last_loss, row.first_step_s, row.rounds) == (4.5, 4.0, 1)

    def one(first, ms, last, GB):
        return {"ms": (first, 70, ms), "losses": (9, 8, last), "tail": MEDIAN.replace("1.00 GB", f"{GB} GB")}

    row = rounds(tmp_path / "three", one(3000, 80, 4.0, 3.0), one(5000, 50, 4.1, 2.5), one(9000, 40, 6.0, 2.0))
    assert (row.ms_low, row.ms, row.ms_high, row.rounds) == (40, 50, 80, 3)
    assert (row.last_loss, row.first_step_s, row.peak_memory_gb) == (4.1, 5.0, 2.5)
    row = rounds(tmp_path / "short", {"ms": (100, 50)})
    assert (row.last_step, row.complete) == (2, False)


def test_a_round_that_was_stopped_does_not_count(tmp_path):
    """Its median may be that of the step that compiles; and only its end tells the allocator."""
    header = "# device: cpu\n"
    for number in (1, 2):
        write_log(tmp_path / f"round_{number}" / f"{BASELINE}.log", header=header,
                  tail=MEDIAN + "# machine: EPYC (2 threads) | allocator: mimalloc\n")
    stopped = write_log(tmp_path / "round_3" / f"{BASELINE}.log", ms=[40_000], header=header)
    report = build_report(tmp_path)
    assert report.rows[0].rounds == 2 and report.rows[0].ms_high < 1000 and str(stopped) in report.skipped[0]
    stopped.rename(tmp_path / "round_1" / f"{TIED}.log")
    report = build_report(tmp_path)
    assert len(report.rows) == 2 and "allocators" not in " ".join(warnings(report))


def test_a_loss_that_is_not_a_number_shows(tmp_path, call):
    row = rounds(tmp_path, {"losses": (9, 8, "nan")}, {"losses": (9, 8, "inf")})
    assert row.last_loss is None and " nan " in call("report", tmp_path)[1]
    json.loads(call("report", tmp_path, "--json")[1], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_mfu_and_ratios_follow_from_tokens_and_times(tmp_path):
    header = "# model: gpt2\n# batch: B=4 T=1024 | steps: 3\n"
    for name, ms in ((BASELINE, 100), (TIED, 50), (PEER, 25)):
        write_log(tmp_path / f"{name}.log", ms=[ms] * 3, header=header)
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"float32": 1e15, "bfloat16": 2e15}}))
    base, tied, peer = build_report(tmp_path).rows
    assert (base.tokens_per_second, tied.tokens_per_second) == (40960, 81920)
    assert (base.times_before, tied.times_before, tied.times_baseline, peer.times_before, peer.times_baseline) == (
        None, 2, 2, None, 4)
    assert tied.mfu == pytest.approx(flops_per_token("gpt2", 1024) * 81920 / 2e15)
    assert tied.mfu_causal == pytest.approx(flops_per_token("gpt2", 1024, causal=True) * 81920 / 2e15)


@pytest.mark.parametrize("devices, refused", [
    (("H200", "T4"), True), (("EPYC (2 threads)", "Xeon (2 threads)"), True),
    (("EPYC (2 threads)", "EPYC (1 threads)"), False),
    (("EPYC (2 threads)", "cpu"), False)])  # a script alone does not name it, nor does one that was stopped
def test_different_machines_are_not_mixed(devices, refused, tmp_path, call):
    """Neither in the logs of two rungs nor in two rounds of one."""
    for first, second in ((BASELINE, TIED), (f"round_1/{BASELINE}", f"round_2/{BASELINE}")):
        folder = tmp_path / first.partition("/")[0]
        for name, device in zip((first, second), devices, strict=True):
            write_log(folder / f"{name}.log", header=f"# device: {device}\n# batch: B=1 T=8\n")
        code, _, error = call("report", folder)
        assert code == refused and error.startswith("error: ") == refused and ("different device" in error) == refused


HEADER = "# model: gpt2\n# device: {} | allocator: {}\n# batch: B={} T={} | steps: {}\n"


@pytest.mark.parametrize("device, B, T, first, ms, steps, warning", [
    ("EPYC (2 threads)", 6, 1024, 100, 100, 20, None),
    ("EPYC (2 threads)", 6, 1024, 100, 100, 19, "did not finish"),
    ("EPYC (2 threads)", 6, 1024, 4.5, 4.5, 20, "impossible"),  # its MFU is above 100 %
    ("NVIDIA A100", 6, 1024, 340, 340, 149, "fewer than 150 steps"),
    ("NVIDIA A100", 6, 1024, 340, 340, 150, None),
    ("NVIDIA H200", 1, 64, 20_000, 20, 150, "or 3 s"),  # the first step compiles
    ("NVIDIA H200", 1, 64, 20, 20.2, 150, None),
])
def test_each_doubt_about_a_run_is_named(device, B, T, first, ms, steps, warning, tmp_path):
    """Impossible speeds, too little of a GPU, an unfinished run: each alone, and named."""
    planned = 20 if "EPYC" in device else steps
    header = HEADER.format(device, "torch", B, T, planned)
    write_log(tmp_path / f"{BASELINE}.log", ms=[first, *[ms] * (steps - 1)], header=header,
              tail=MEDIAN.replace("3-3", f"{steps - 9}-{planned}"))
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 119e12}}))
    found = list(warnings(build_report(tmp_path)))
    assert len(found) == (warning is not None) and all(warning in text and "baseline" in text for text in found), found


def test_rounds_that_do_not_compare_are_named(tmp_path, call):
    """A rung with one round and few steps beside one with two; and two logs of one script are no rounds."""
    for folder, names in (("round_1", (BASELINE, TIED)), ("round_2", (BASELINE,))):
        for name in names:
            write_log(tmp_path / folder / f"{name}.log")
    found = " ".join(warnings(build_report(tmp_path)))
    assert "different numbers of rounds" in found and "fewer than 10 steps count" in found
    header = f"# script: {TIED}.py\n# batch: B=4 T=1024 | steps: 3\n"
    write_log(tmp_path / "round_1" / "before.log", header=header)
    write_log(tmp_path / "round_1" / f"{TIED}.log", header=header)
    code, _, error = call("report", tmp_path)
    assert code == 1 and error.startswith("error: ") and "are of the same script" in error


def test_a_report_names_its_allocators_and_warns_of_several(tmp_path, call):
    for script, name in ((BASELINE, "malloc"), (TIED, "tcmalloc")):
        write_log(tmp_path / f"{script}.log", header=HEADER.format("EPYC", name, 6, 1024, 20))
    shown = call("report", tmp_path)[1]
    assert "(malloc, tcmalloc)" in shown and "EPYC (allocator: malloc and tcmalloc)" in shown


def test_a_report_knows_what_any_of_its_logs_says(tmp_path, call):
    """The first has no header. A GPU's allocator is torch's, which no other log contradicts."""
    write_log(tmp_path / f"{BASELINE}.log", header="")
    write_log(tmp_path / f"{TIED}.log", header="# model: gpt2\n# device: NVIDIA T4\n# batch: B=6 T=64 | steps: 3\n")
    shown = call("report", tmp_path)[1]
    assert "NVIDIA T4, gpt2, B=6 T=64, unknown data" in shown and "allocator" not in shown


@pytest.mark.parametrize("damage, code, said", [
    ({"machine.json": {"device": "cuda"}}, 0, "no measured matrix-product rates"),
    ({"profile.json": {"model": "gpt2", "rungs": []}}, 1, "profile.json is damaged (it lacks name)"),
    ({f"{TIED}.log": "# ranks: two\nstep : 1 | loss: 9 | dt: 1 ms\n"}, 0, "weight tying"),
])
def test_a_record_that_lacks_a_part_is_shown_without_it_or_named(damage, code, said, tmp_path, call):
    write_log(tmp_path / f"{BASELINE}.log")
    for name, content in damage.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    answer = call("report", tmp_path)
    assert answer[0] == code and said in " ".join(answer[1:])


def test_a_gain_is_named_where_a_paired_test_over_five_rounds_says_so(tmp_path, monkeypatch, call):
    """Four rungs, while the machine drifts by a tenth: the third gains 3 % in every round, others by chance only."""
    labels = "gradient_accumulation", "prefetch", "distributed_validation", "checkpoints"
    drift = 100, 110, 104, 98, 107
    names = [BY_LABEL[label].name for label in labels]
    ratios = (
        (1, 1, 1, 1, 1), (0.98, 1.02, 1, 1.03, 0.97), (0.96, 0.975, 0.97, 0.965, 0.972), (0.9, 1.05, 0.95, 1.1, 1),
    )
    factors = np.cumprod(ratios, axis=0)
    for number, base in enumerate(drift, 1):
        for name, own in zip(names, factors, strict=True):
            write_log(tmp_path / "machine" / f"round_{number}" / f"{name}.log", ms=[base * own[number - 1]] * 8,
                      header="# batch: B=4 T=1024 | steps: 8\n", tail=MEDIAN)
    report = build_report(tmp_path / "machine")
    p = [row.p_before for row in report.rows]
    alone = ttest_1samp(np.log(ratios[2]), 0).pvalue
    assert p == [None, 1, pytest.approx(3 * alone), 1] and p[2] < 0.01  # the smallest of a table's three
    shown = call("report", tmp_path / "machine")[1]
    assert "1.03*" in shown and shown.count("*") == 2  # the other explains it
    monkeypatch.setattr("ladder.records.logs.REFERENCE", tmp_path)
    assert "no significant difference: p = 1)" in call("diff", "prefetch")[1]
    assert f"tokens/sec; {formats.p_is(3 * alone)})" in call("diff", "distributed_validation")[1]  # the table's
    apart = ttest_1samp(np.log(factors[2]), 0).pvalue  # of two rungs that are not neighbors, so not the table's
    found = call("diff", "gradient_accumulation", "distributed_validation")[1]
    assert f"no significant difference: {formats.p_is(apart)})" in found
    shutil.rmtree(tmp_path / "machine" / "round_5")
    assert all(row.p_before is None for row in build_report(tmp_path / "machine").rows)
    assert "1.03?" in call("report", tmp_path / "machine")[1]
    assert "too few rounds" in call("diff", "distributed_validation")[1]
