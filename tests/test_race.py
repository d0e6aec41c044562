"""run --race: the search for learning rates, the seeds, the timing, the standings; on known losses, and for real."""
import _thread
import io
import math
import signal
import statistics
import sys
import threading
import time
from types import SimpleNamespace

import pandas
import psutil
import pytest
from rich.console import Console
from run_tool import call  # noqa: F401, the fixture

from ladder.errors import UserError
from ladder.judge.race_table import FILE, best_of, last_val_loss, read_logs, read_race, write_csv
from ladder.judge.standings import KEY, chances, print_race, race_curves, race_texts, show_rates, standings, steps_to
from ladder.measure import race as race_module
from ladder.measure import runner as runner_module
from ladder.measure.race import MOST_RATES, default_rates, describe_race, n_jobs, race, search, search_progress
from ladder.measure.runner import Job, Runner
from ladder.scripts.stages import BY_LABEL, BY_NAME
from ladder.show.logs import read_log
from ladder.show.plots import write_plots
from ladder.show.report import build_report

ADAMW, CHUNKED, MUON, TRAPEZOID = (BY_LABEL[label] for label in ("16", "17", "18", "19"))
STEPS = (10, 20, 30, 40)  # of the validations
MS = {MUON.name: 110.0}  # a step of the others takes 100
BEST = {ADAMW.name: (1.2e-3,), CHUNKED.name: (1.2e-3,), MUON.name: (1.2e-3, 4e-3)}  # learning rates
# Three seeds of AdamW end at 6.1, 6.0 and 5.9; Muon passes 6.0 at steps 15, 25 and 30.
VAL_LOSSES = {ADAMW.name: [6.1, 6.0, 5.9], MUON.name: [(7, 5, 4, 3.9), (8, 7, 5, 4), (8, 7, 6, 4)]}


def flag_of(job, flag):
    """The last value of a flag in a job's command, the one that counts; None without."""
    places = [i for i, word in enumerate(job.command) if word == flag]
    return job.command[places[-1] + 1] if places else None


HEADER = """# script: {0.name}.py
# model: tiny | parameters: 1,250,000
# device: cpu (2 threads)
# total batch: 64 tokens in 1 micro-steps
# batch: B=2 T=32 | steps: 40 | seed: {1}
# data: text
"""


def write_log(job, val_losses, ms=100.0):
    """A log as the script of the job writes it, with these validation losses or, after others, this last one."""
    val_losses = val_losses if isinstance(val_losses, tuple) else (9, 8, 7, val_losses)
    lines = [HEADER.format(job, flag_of(job, "--seed"))]
    for step in range(1, 41):
        lines.append(f"step : {step} | loss: 5.0 | dt: {ms} ms | tokens/sec: 1\n")
        if step in STEPS:
            lines.append(f"val : step {step} | loss: {val_losses[STEPS.index(step)]} | time: 0.1 s\n")
    lines.append(f"median : dt: {ms} ms | tokens/sec: 1 | peak memory: 1.00 GB | steps 6-40\n")
    job.log_dir.mkdir(parents=True, exist_ok=True)
    (job.log_dir / f"{job.name}.log").write_text("".join(lines))


def cut(path, n_lines):
    """Leave the first lines of a log, as a run that was killed does."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:n_lines]))


def rates_of(job):
    """The learning rates of a job, as its flags have them: AdamW's, and Muon's if it has Muon."""
    return tuple(flag_of(job, flag) for flag in default_rates(BY_NAME[job.name]))


def run_race(folder, best, stages, seeds=2, slow=(), **val_losses):
    """Drive a race whose runs end the better, the closer log2 of each rate is to that of `best[name]`; its jobs.

    `val_losses` are those of each round, or a function of (the loss of the search, the job) for all runs. In the
    folders `slow` the machine takes 1.2 times as long.
    """
    done = []

    def run(jobs, at_once=1):
        for job in jobs:
            end, own = 4 + sum(abs(math.log2(float(rate) / middle)) for rate, middle in
                               zip(rates_of(job), best[job.name], strict=True)), val_losses.get(job.name)
            if callable(own):
                end = own(end, job)
            elif own and job in part_of([job], "round"):
                end = own[int(job.log_dir.name.removeprefix("round_")) - 1]
            write_log(job, end, MS.get(job.name, 100.0) * (1.2 if {*slow} & {*job.log_dir.parts} else 1))
            done.append(job)

    race(stages, ["--model", "tiny", "--steps", "40", "--seed", "7"], folder, seeds, run)
    return done


def part_of(jobs, part):
    """The jobs in the folders sweep, timing, or round."""
    return [job for job in jobs if part in job.log_dir.parts
            or part == "round" and job.log_dir.name.startswith(part) and "timing" not in job.log_dir.parts]


def searched(jobs, stage):
    return [rates_of(job) for job in part_of(jobs, "sweep") if job.name == stage.name]


@pytest.mark.parametrize("best, tried", [
    (6e-4, ["0.0006", "0.0003", "0.0012"]),
    (1.2e-3, ["0.0006", "0.0003", "0.0012", "0.0024"]),  # the best must not be the first or the last
    (1.5e-4, ["0.0006", "0.0003", "0.0012", "0.00015", "7.5e-05"]),
    (4.8e-3, ["0.0006", "0.0003", "0.0012", "0.0024", "0.0048", "0.0096"]),
])
def test_the_search_goes_on_until_the_best_has_a_neighbor_on_each_side(tmp_path, best, tried):
    jobs = run_race(tmp_path, {ADAMW.name: (best,)}, [ADAMW], 3)
    assert searched(jobs, ADAMW) == [(rate,) for rate in tried]
    rounds = part_of(jobs, "round")
    assert [rates_of(job) for job in rounds] == [(f"{best:g}",)] * 3
    assert [(job.log_dir.name, flag_of(job, "--seed")) for job in rounds] == [
        ("round_1", "1337"), ("round_2", "1338"), ("round_3", "1339")]
    assert {flag_of(job, "--seed") for job in part_of(jobs, "sweep")} == {"1337"}
    assert {flag_of(job, "--val-every") for job in part_of(jobs, "sweep")} == {"40"}  # after the last step only


@pytest.mark.parametrize("start", [(1.2e-3, 4e-3), (4.8e-3, 6.4e-2), (9.6e-3, 2e-3), (4.8e-3, 8e-3)])
def test_the_search_finds_both_rates_from_a_bad_start(start):
    """On a tilted bowl, where the best of one rate depends on the other; no rates are tried twice."""
    def try_rates(new):
        tried.extend(new)
        steps = {(a, m): (math.log2(a / 4.8e-3), math.log2(m / 8e-3)) for a, m in new}
        return {rates: u * u + v * v + u * v / 2 for rates, (u, v) in steps.items()}

    tried = []
    assert search(MUON, start, try_rates) == pytest.approx((4.8e-3, 8e-3))
    assert tried[0] == start and len(set(tried)) == len(tried) <= MOST_RATES
    assert len(tried) == 5 or start != (4.8e-3, 8e-3)  # from the minimum it goes nowhere
    far = (start[0] / 1024, start[1])
    tried.clear()
    assert search(MUON, far, try_rates) in tried and len(tried) == MOST_RATES


def test_a_tie_is_broken_the_same_way_in_any_order(tmp_path):
    """Also by the standings. And the search of a rung that learns nothing ends."""
    losses = {(2.0,): 5.0, (4.0,): 5.0, (8.0,): 6.0}
    assert best_of(losses) == best_of(dict(reversed(losses.items()))) == (4.0,)
    jobs = run_race(tmp_path, BEST, [ADAMW], **{ADAMW.name: lambda end, job: 6})
    assert len(searched(jobs, ADAMW)) == MOST_RATES
    _, [racer] = standings(build_report(tmp_path))
    assert {rates_of(job) for job in part_of(jobs, "round")} == {(show_rates(racer.rates),)}


def test_each_search_begins_at_the_best_of_the_one_before(tmp_path):
    """Rung 17 has rung 16's losses, so it gets its rate; Muon's first search begins at its default."""
    stages, best = [ADAMW, CHUNKED, MUON, TRAPEZOID], BEST | {TRAPEZOID.name: (2.4e-3, 4e-3)}
    jobs = run_race(tmp_path, best, stages)
    assert searched(jobs, CHUNKED) == [] and searched(jobs, MUON)[0] == ("0.0012", "0.002")
    assert searched(jobs, MUON)[1:] == [
        ("0.0006", "0.002"), ("0.0024", "0.002"), ("0.0012", "0.001"), ("0.0012", "0.004"),
        ("0.0006", "0.004"), ("0.0024", "0.004"), ("0.0012", "0.008")]
    assert searched(jobs, TRAPEZOID)[0] == ("0.0012", "0.004")
    for part, number in (("round", 2), ("timing", 3)):
        assert [job.name for job in part_of(jobs, part)] == [stage.name for stage in stages] * number  # interleaved
        assert {(job.name, rates_of(job)) for job in part_of(jobs, part)} == {
            (name, tuple(f"{rate:g}" for rate in rates)) for name, rates in best.items()}
    assert {(flag_of(job, "--steps"), flag_of(job, "--val-every")) for job in part_of(jobs, "timing")} == {("30", "0")}
    assert (tmp_path / "sweep" / "0.0012_0.004" / f"{MUON.name}.log").exists()
    sweep = read_logs(tmp_path).sweep
    assert sweep[MUON.name][1.2e-3, 4e-3] == 4.0 and len(sweep[ADAMW.name]) == 4
    assert [racer.rates for racer in standings(build_report(tmp_path))[1]] == [*best.values()]


@pytest.mark.parametrize("rate, best", [("0.0024", "0.0012"), ("0.0012", "0.0006")])
def test_a_run_that_diverges_is_never_the_best(tmp_path, rate, best):
    jobs = run_race(tmp_path, {ADAMW.name: (2e-3,)}, [ADAMW], **{
        ADAMW.name: lambda end, job: "nan" if flag_of(job, "--max-lr") == rate else end})
    assert {rates_of(job) for job in part_of(jobs, "round")} == {(best,)}
    with pytest.raises(UserError, match="no run of beyond/rung_16.* ended with a loss"):
        run_race(tmp_path / "all", {ADAMW.name: (1,)}, [ADAMW], **{ADAMW.name: lambda end, job: "inf"})
    path = tmp_path / "round_1" / f"{ADAMW.name}.log"
    assert last_val_loss(path) == 4 + math.log2(2e-3 / float(best))
    cut(path, -2)  # after its last validation
    assert last_val_loss(path) == math.inf


@pytest.mark.parametrize("val_losses, loss, steps", [
    ((9, 8, 7, 6), 7.5, 25), ((9, 8, 7, 6), 7, 30), ((9, 8, 7, 6), 9.5, 10), ((9, 8, 7, 6), 5.9, math.inf),
    ((9, 6, 8, 5), 7, 10 + 10 * 2 / 3), ((math.inf, math.inf, 7, 6), 6.75, 32.5), ((math.inf, 7, 7, 6), 7.5, 20),
])
def test_steps_to_a_loss(val_losses, loss, steps):
    assert steps_to(pandas.DataFrame({"step": STEPS, "val_loss": val_losses}), loss) == pytest.approx(steps)


def test_the_standings(tmp_path):
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, ["round_3"], **VAL_LOSSES)
    report = build_report(tmp_path)
    target, [first, second] = standings(report)
    assert target == 6.0 and (first.rates, second.rates) == ((0.0012,), (0.0012, 0.004))
    assert first.val_loss == (6.0, 5.9, 6.1) and first.tokens[0] == 40 * 64 and first.tokens[2] == math.inf
    assert first.tokens[1] == pytest.approx(64 * (30 + 10 / 1.1))
    assert second.val_loss == (4, 3.9, 4) and second.tokens == (25 * 64, 15 * 64, 30 * 64)
    assert second.seconds == pytest.approx((2.75, 1.65, 3.3))  # as fast in all rounds, whatever the machine did
    texts, caption = race_texts(report)
    assert list(texts["% of rung 16's"]) == ["100 (98–never)", "69 (41–82)"]
    assert list(texts["learning rates"]) == ["0.0012", "0.0012, 0.004"]
    assert list(texts["the one change"])[1] == f"[Muon]({MUON.file})"
    for part in ("6.00, the median", "rung 16 ends with", "4 to 8 tries", "3 seeds", "measured 3 times"):
        assert part in caption
    for width in (80, 140):
        console = Console(width=width, file=io.StringIO())
        print_race(report, console)
        output = console.file.getvalue()
        assert "18 Muon" in output and "0.0012" in output and "69" in output and "…" not in output
        assert max(map(len, output.splitlines())) <= width
        assert ("69 (41–82)" in output) == (width == 140)


@pytest.mark.parametrize("ends, target", [([6.1, 6.0], 6.1), ([6.104] * 2, 6.11), ([1.1] * 2, 1.1)])
def test_the_target_is_the_median_rounded_up(ends, target, tmp_path):
    """Of two seeds the higher, so that both reach it. 100 * 1.1 is a little more than 110 in floating point."""
    run_race(tmp_path, BEST, [ADAMW], **{ADAMW.name: ends})
    found, [racer] = standings(build_report(tmp_path))
    assert found == target and racer.tokens[2] < math.inf


def test_a_race_that_was_stopped_counts_what_came_to_its_end(tmp_path):
    """A second round that broke off, before its first validation or after; and a first one that did."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, **VAL_LOSSES)
    for n_lines in (30, 8):
        cut(tmp_path / "round_2" / f"{MUON.name}.log", n_lines)
        report = build_report(tmp_path)
        target, [_, muon] = standings(report)
        assert target == 6.0 and muon.tokens == (22.5 * 64, 15 * 64, 30 * 64) and race_texts(report)
        assert [f"round_2/{MUON.name}.log" in reason for reason in report.skipped] == [True]
        for (_, steps, seconds, losses), ms in zip(race_curves(report), (100, 110), strict=True):
            assert seconds == pytest.approx([ms * step / 1000 for step in steps]) and len(losses) == len(steps) == 4
    for path in tmp_path.glob("round_*/*.log"):
        cut(path, 8)
    assert read_race(tmp_path) is None  # nothing to compare yet


def test_the_caption_says_where_a_search_is_doubtful(tmp_path):
    """Nothing of a good one; a best rate at the edge, rates that differ less than the seeds, a race of 40 steps."""
    def caption(name, best=BEST, **val_losses):
        run_race(tmp_path / name, best, [ADAMW], 2, **val_losses)
        return race_texts(build_report(tmp_path / name))[1]

    good = caption("good")
    assert "40 steps are too few to choose a learning rate, take 50 or more" in good
    assert "ended" not in good and "flat" not in good
    assert "rung 16's search ended after 12 tries, so 0.6144 may not be" in caption("edge", {ADAMW.name: (1e6,)})
    tried = read_logs(tmp_path / "good").sweep[ADAMW.name].values()
    width = max(tried) - min(tried)
    assert "rung 16's search is flat" in caption("flat", **{ADAMW.name: [6.0, 6.0 + width]})
    assert "flat" not in caption("not flat", **{ADAMW.name: [6.0, 5.99 + width]})


def test_the_plan_of_a_race_and_how_far_its_search_is(tmp_path):
    stages = [ADAMW, CHUNKED, MUON]
    plan = describe_race(stages, 3)
    assert n_jobs(stages, 3) == 26 and "at least 26 runs: 8 or more to find the learning rates of 2 rungs" in plan
    assert "3 seeds and 3 timings of 3 rungs" in plan
    assert "begins with --max-lr 0.0006 (rung 16) and --muon-lr 0.002 (rung 18)" in plan
    assert "finished 0 of at least 8 runs (rung 16: 0, rung 18: 0)" in search_progress(stages, tmp_path)
    for rate in ("0.0006", "0.0012"):
        write_log(Job(ADAMW.name, ["--seed", "1337"], tmp_path / "sweep" / rate), 6)
    cut(tmp_path / "sweep" / "0.0012" / f"{ADAMW.name}.log", 20)  # the one that Ctrl-C has stopped
    assert "finished 1 of at least 8 runs (rung 16: 1, rung 18: 0)" in search_progress(stages, tmp_path)


def test_the_timing_counts_for_seconds_and_the_rounds_only_where_it_is_missing(tmp_path):
    """A rung that has not been timed alone is not compared with one that has: then no timing counts."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, ["timing"], **VAL_LOSSES)
    odd = tmp_path / "timing" / "round_1" / f"{ADAMW.name}.log"  # the median of the three does not mind
    odd.write_text(odd.read_text().replace("dt: 120.0 ms", "dt: 12.0 ms"))
    report = build_report(tmp_path)
    _, racers = standings(report)
    assert [racer.ms for racer in racers] == [row.ms for row in report.rows] == pytest.approx([120, 132])
    assert racers[1].seconds == pytest.approx((3.3, 1.98, 3.96)) and racers[1].val_loss == (4, 3.9, 4)
    assert [curve[2][-1] for curve in race_curves(report)] == pytest.approx([4.8, 5.28])
    for path in tmp_path.glob(f"timing/*/{MUON.name}.log"):
        cut(path, 20)
    report = build_report(tmp_path)
    assert report.timing == {} and [racer.ms for racer in standings(report)[1]] == [100, 110]
    assert "ms/step that of the same runs" in race_texts(report)[1]


def by_seed(**ends):
    """A Series by rung and seed, as `chances` takes it, of {rung: {seed: number}}."""
    ends = {(name, seed): value for name, values in ends.items() for seed, value in values.items()}
    return pandas.Series(ends.values(), pandas.MultiIndex.from_tuples(ends, names=["rung", "seed"]), dtype=float)


def test_a_paired_t_test():
    """Student's distribution with 4 degrees of freedom has a closed form; the pairs are found by their seed."""
    before = dict(enumerate((6.10, 6.00, 5.90, 6.05, 5.97)))
    gains = dict(enumerate((0.10, 0.02, 0.06, -0.01, 0.05)))
    t = 0.044 / math.sqrt(sum((gain - 0.044) ** 2 for gain in gains.values()) / 4 / 5)
    q = t * t / (1 + t * t / 4)
    p = 1 - 0.75 * math.sqrt(q) * (1 - q / 12)
    after = {n: before[n] - gain for n, gain in gains.items()}
    assert 0.05 < p < 0.1
    for values in (after, dict(reversed(after.items())), after | {5: 1}):
        none, found = chances(by_seed(a=before, b=values))
        assert math.isnan(none) and found == pytest.approx(p)
    assert math.isnan(chances(by_seed(a=before, b={1: 1}))[1])  # one seed
    assert math.isnan(chances(by_seed(a=before, b=before))[1])
    assert chances(by_seed(a=before, b={n: loss - 0.5 for n, loss in before.items()}))[1] < 1e-9


def test_the_standings_say_what_is_beyond_chance(tmp_path):
    """Not for the first rung, nor for one with the same losses; a run that never got there counts as its length."""
    stages = [ADAMW, CHUNKED, MUON]
    ends = {stage.name: [end + 0.01 * n for n in range(5)] for stage, end in zip(stages, (6, 6, 5.9), strict=True)}
    ends[CHUNKED.name][0] += 0.001  # the losses of rung 16 up to rounding
    ends[MUON.name][4] -= 0.001
    run_race(tmp_path, BEST, stages, 5, **ends)
    report = build_report(tmp_path)
    target, racers = standings(report)
    assert target == 6.02 and all(math.isnan(p) for racer in racers[:2] for p in (racer.p_loss, racer.p_tokens))
    gains = [before - after for before, after in zip(ends[CHUNKED.name], ends[MUON.name], strict=True)]
    t = statistics.mean(gains) / statistics.stdev(gains) * math.sqrt(5)
    q = t * t / (1 + t * t / 4)
    assert racers[2].p_loss == pytest.approx(1 - 0.75 * math.sqrt(q) * (1 - q / 12), abs=1e-9)
    assert 0 < racers[2].p_tokens < 0.01 and racers[1].tokens[2] == math.inf
    texts, caption = race_texts(report)
    assert list(texts["p of the loss"]) == ["–", "–", "<0.001*"] and "* marks p < 0.01" in KEY
    assert list(texts["p of the tokens"])[:2] == ["–", "–"] and texts["p of the tokens"][2].endswith("*")
    run_race(tmp_path / "one", BEST, stages, 1)
    texts, caption = race_texts(build_report(tmp_path / "one"))
    assert {*texts["p of the loss"], *texts["p of the tokens"]} == {"–"} and "t-test" not in caption


def test_a_rung_is_compared_with_the_row_before(tmp_path):
    """Not with the first: the third is as good as the second, and both are far ahead."""
    ends = {ADAMW.name: [6.0, 6.01, 6.02], MUON.name: [5.0, 5.01, 5.03], TRAPEZOID.name: [5.01, 5.0, 5.02]}
    run_race(tmp_path, BEST | {TRAPEZOID.name: BEST[MUON.name]}, [ADAMW, MUON, TRAPEZOID], 3, **ends)
    _, [_, muon, trapezoid] = standings(build_report(tmp_path))
    assert muon.p_loss < 0.001 and trapezoid.p_loss > 0.1


def test_losses_and_tokens_have_a_p_each(tmp_path):
    """Here the ends are alike, and one rung is at the target long before."""
    ends = [6.01, 6.02, 6.03, 6.04, 6.05]
    early = [(9, 5 + 0.1 * n, 7, end + 0.001 * (n % 2)) for n, end in enumerate(ends)]
    run_race(tmp_path, BEST, [ADAMW, MUON], 5, **{ADAMW.name: ends, MUON.name: early})
    target, [_, muon] = standings(build_report(tmp_path))
    steps = {ADAMW.name: [30 + 10 * (7 - target) / (7 - end) if end <= target else 40 for end in ends],
             MUON.name: [10 + 10 * (9 - target) / (4 - 0.1 * n) for n in range(5)]}
    expected = chances(by_seed(**{name: dict(enumerate(values)) for name, values in steps.items()}))[1]
    assert muon.p_tokens == pytest.approx(expected) and muon.p_tokens < 0.01 and muon.p_loss > 0.05


def test_medians_of_rounds_and_first_steps_of_timings(tmp_path):
    """Of curves, and of memory; one seed far off, or the first, must not decide."""
    run_race(tmp_path, BEST, [ADAMW], 3, **{ADAMW.name: [6.0, 6.1, 9.0]})
    for folder, GB, first in [*((f"round_{n}", GB, 9000) for n, GB in ((1, 1), (2, 2), (3, 9))),
                              *((f"timing/round_{n}", 5, 3000) for n in (1, 2, 3))]:
        path = tmp_path / folder / f"{ADAMW.name}.log"
        path.write_text(path.read_text().replace("memory: 1.00 GB", f"memory: {GB}.00 GB").replace(
            "step : 1 | loss: 5.0 | dt: 100.0 ms", f"step : 1 | loss: 5.0 | dt: {first} ms"))
    report = build_report(tmp_path)
    assert report.rows[0].peak_memory_gb == standings(report)[1][0].peak_memory_gb == 2
    assert report.rows[0].first_step_s == 3
    assert list(race_curves(report)) == [(ADAMW.name, [*STEPS], [1.0, 2.0, 3.0, 4.0], [9, 8, 7, 6.1])]


def test_the_record_says_what_the_logs_do(tmp_path):
    """All that the report shows, without the logs."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, **VAL_LOSSES)
    (tmp_path / "record").mkdir()
    (tmp_path / FILE).rename(tmp_path / "record" / FILE)
    by_logs, by_csv = build_report(tmp_path), build_report(tmp_path / "record")
    assert by_csv.race.facts == by_logs.race.facts and by_csv.race.facts["model"] == "tiny"
    for shown in (standings, race_texts, lambda report: [*race_curves(report)], lambda report: report.rows):
        assert repr(shown(by_csv)) == repr(shown(by_logs))
    assert by_csv.sweep == by_logs.sweep and by_csv.setting == by_logs.setting


def test_a_script_outside_of_the_ladder_races_too(tmp_path):
    """As experiments.variants has them. One of its search's runs failed."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, **VAL_LOSSES)
    for path in tmp_path.rglob(f"{MUON.name}.log"):
        (path.parent / "an_idea.log").write_text(path.read_text().replace(path.stem, "an_idea"))
    cut(tmp_path / "sweep" / "0.0024_0.002" / "an_idea.log", 1)
    write_csv(read_logs(tmp_path), tmp_path / FILE)
    (tmp_path / "sweep").rename(tmp_path / "gone")
    _, [_, muon, idea] = standings(build_report(tmp_path))
    assert idea.name == "an_idea" and idea[2:5] == muon[2:5] and idea.rates == (1.2e-3, 4e-3)
    assert read_race(tmp_path).sweep["an_idea"][2.4e-3, 2e-3] == math.inf


@pytest.mark.parametrize("old, new", [
    ("val_loss", "loss_val"), (",40,", ",forty,"), ("part,", "# part,"), ("data", "\xff"),
])
def test_a_damaged_record_is_one_error(old, new, tmp_path, call):  # noqa: F811
    run_race(tmp_path, BEST, [ADAMW])
    text = (tmp_path / FILE).read_text().replace(old, new)
    (tmp_path / "sweep").rename(tmp_path / "gone")
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    code, _, error = call("report", tmp_path)
    assert code == 1 and error.count("\n") == 1 and f"{FILE}" in error, error


def test_the_pictures_of_a_race(tmp_path):
    """Also where a rung never gets to the target."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, **VAL_LOSSES | {MUON.name: [(9, 9, 9, 9)] * 3})
    run_race(tmp_path / "shorter", BEST, [ADAMW], 3)
    paths = write_plots([build_report(tmp_path), build_report(tmp_path / "shorter")], tmp_path / "png")
    assert [path.name for path in paths] == [f"{tmp_path.name}_race.png", "shorter_race.png", "races.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def make_runner(folder):
    return Runner(SimpleNamespace(steps=40, device="cpu"), folder, 60, Console(file=io.StringIO()))


def test_two_jobs_at_once_share_the_cores_and_the_memory(tmp_path, monkeypatch):
    """The barrier lets only two pass together; one at a time keeps the machine as it is."""
    barrier, seen = threading.Barrier(2), []

    def run_job(job, *_):
        barrier.wait(timeout=10)
        seen.append(job)
        write_log(job, (9, 8, 7, 6), 100.0)
        return runner_module.Outcome(job.name, "ok")

    monkeypatch.setattr(runner_module, "run_job", run_job)
    monkeypatch.setattr(runner_module, "free_memory", lambda device: 1000)
    monkeypatch.setattr(runner_module.torch, "get_num_threads", lambda: 5)
    jobs = [Job(ADAMW.name, [], tmp_path / f"round_{n}") for n in range(4)]
    with make_runner(tmp_path) as runner:
        runner.run(jobs, 2)
        assert [outcome.status for outcome in runner.outcomes] == ["ok"] * 4
        assert [(job.env, job.memory) for job in seen] == [({"OMP_NUM_THREADS": "2"}, 450)] * 4
        barrier = threading.Barrier(1)
        runner.run(jobs[:1])
        assert (seen[-1].env, seen[-1].memory) == ({}, None)


def test_ctrl_c_stops_all_that_run_at_once(tmp_path, monkeypatch, request):
    """And the jobs that wait for their turn do not start. Each has its share of the cores."""
    monkeypatch.setattr(runner_module.torch, "get_num_threads", lambda: 6)
    script = ("import os, sys, time; time.sleep(0.1)\n"
              "open(sys.argv[1], 'w').write(f'{os.getpid()} {os.environ[\"OMP_NUM_THREADS\"]}'); time.sleep(60)")
    files = [tmp_path / f"pid_{n}" for n in range(3)]
    jobs = [Job("sleeper", [sys.executable, "-c", script, str(file)], tmp_path / file.name) for file in files]

    def interrupt():
        while not all(file.exists() and file.read_text() for file in files[:2]):
            time.sleep(0.02)
        _thread.interrupt_main()

    # a script that ran in this process before may have left its own handler
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    threading.Thread(target=interrupt, daemon=True).start()
    with make_runner(tmp_path) as runner, pytest.raises(KeyboardInterrupt):
        runner.run(jobs, 2)
    assert not files[2].exists() and not runner.outcomes
    for file in files[:2]:
        pid, threads = file.read_text().split()
        assert threads == "3" and not psutil.pid_exists(int(pid))


@pytest.mark.slow
def test_a_race_for_real(tokens, tmp_path, call, monkeypatch):  # noqa: F811
    """With two scripts at once the losses are those of one at a time; --resume repeats nothing of the three parts."""
    monkeypatch.setattr(race_module, "MOST_RATES", 3)
    monkeypatch.setattr(race_module, "TIMINGS", 2)
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "-B", 2, "-T", 16, "--total-batch", 32,
             "--steps", 4, "--val-every", 2, "--val-sequences", 2, "--compile-mode", "none", "--warmup-steps", 0]
    logs, name = tmp_path / "race", ADAMW.name
    code, output, error = call("run", "--race", 1, "--race-jobs", 2, "--rungs", "16", "--logs", logs, *words)
    assert code == 0 and "To the same validation loss" in output, output + error
    report = build_report(logs)
    target, [racer] = standings(report)
    assert len(report.sweep[name]) == 3 and racer.rates == best_of(report.sweep[name])
    [run] = report.runs[name]
    searched = read_log(logs / "sweep" / show_rates(racer.rates, "_") / f"{name}.log")
    assert (searched.val_steps, run.val_steps) == ([4], [2, 4]) and searched.val_losses == run.val_losses[-1:]
    assert len(report.timing[name]) == 2 and not any(timed.val_steps for timed in report.timing[name])
    assert 0 <= target - run.val_losses[-1] <= 0.01
    assert call("run", "--rungs", "16", "--logs", tmp_path / "one", *words, "--max-lr", show_rates(racer.rates))[0] == 0
    assert read_log(tmp_path / "one" / f"{name}.log").val_losses == pytest.approx(run.val_losses, abs=1e-4)
    gone = [logs / "round_1" / f"{name}.log", logs / "timing" / "round_2" / f"{name}.log"]
    for path in gone:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert call("run", "--resume", "--logs", logs)[0] == 0 and all(path.exists() for path in gone)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_only_the_timings_run_one_at_a_time(tmp_path):
    seen = set()

    def run(jobs, at_once=1):
        for job in jobs:
            write_log(job, 6)
            seen.add(("timing" in job.log_dir.parts, at_once))

    race([ADAMW], ["--model", "tiny", "--steps", "40"], tmp_path, 2, run, at_once=2)
    assert seen == {(False, 2), (True, 1)}
