"""run --race: the search for learning rates, the seeds, the timing, and the standings, on known losses and for real."""
import _thread
import io
import math
import signal
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import test_ladder_tool
from rich.console import Console

from ladder.errors import UserError
from ladder.measure import race as race_module
from ladder.measure import runner as runner_module
from ladder.measure.race import MOST_RATES, default_rates, describe_race, n_jobs, race, search, search_progress
from ladder.measure.runner import Job, Runner
from ladder.scripts.stages import BY_LABEL, BY_NAME
from ladder.show.logs import read_log
from ladder.show.plots import write_plots
from ladder.show.report import build_report
from ladder.show.tables import write_tables
from ladder.judge.standings import (
    best_of,
    last_val_loss,
    paired_p,
    print_race,
    race_curves,
    race_texts,
    read_sweep,
    show_rates,
    standings,
    steps_to,
)

call = test_ladder_tool.call  # the fixture
ADAMW, CHUNKED, MUON, TRAPEZOID = (BY_LABEL[label] for label in ("16", "17", "18", "19"))
STEPS = (10, 20, 30, 40)  # of the validations
MS = {MUON.name: 110.0}  # a step of the others takes 100
BEST = {ADAMW.name: (1.2e-3,), MUON.name: (1.2e-3, 4e-3)}  # learning rates


def write_log(job, val_losses, ms):
    """A log as the script of the job writes it, with these validation losses."""
    job.log_dir.mkdir(parents=True, exist_ok=True)
    lines = [f"# script: {job.name}.py", "# model: tiny | parameters: 1,250,000", "# device: cpu (2 threads)",
             "# total batch: 64 tokens in 1 micro-steps", "# batch: B=2 T=32 | steps: 40 | seed: 1", "# data: text"]
    for step in range(1, 41):
        lines.append(f"step : {step} | loss: 5.0 | dt: {ms} ms | tokens/sec: 1")
        if step in STEPS:
            lines.append(f"val : step {step} | loss: {val_losses[STEPS.index(step)]} | time: 0.1 s")
    lines.append(f"median : dt: {ms} ms | tokens/sec: 1 | peak memory: 1.00 GB | steps 6-40")
    (job.log_dir / f"{job.name}.log").write_text("\n".join(lines) + "\n")


def flag_of(job, flag):
    """The last value of a flag in a job's command, the one that counts; None without."""
    places = [i for i, word in enumerate(job.command) if word == flag]
    return job.command[places[-1] + 1] if places else None


def rates_of(job):
    """The learning rates of a job, as its flags have them: AdamW's, and Muon's if it has Muon."""
    return tuple(flag_of(job, flag) for flag in default_rates(BY_NAME[job.name]))


def run_race(folder, best, stages, seeds=2, slow=(), timing=True, **values):
    """Drive a race whose runs end the better, the closer log2 of each rate is to that of `best[name]`; its jobs.

    In the folders `slow` the machine takes 1.2 times as long. Without `timing` the race stops before it.
    """
    done = []

    def run(jobs, at_once=1):
        for job in jobs:
            end = 4 + sum(abs(math.log2(float(rate) / middle))
                          for rate, middle in zip(rates_of(job), best[job.name], strict=True))
            if timing or "timing" not in job.log_dir.parts:
                write_log(job, values.get(job.name, lambda end, job: (9, 8, 7, end))(end, job),
                          MS.get(job.name, 100.0) * (1.2 if {*slow} & {*job.log_dir.parts} else 1))
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
def test_the_search_goes_on_until_the_best_has_a_neighbour_on_each_side(tmp_path, best, tried):
    jobs = run_race(tmp_path, {ADAMW.name: (best,)}, [ADAMW])
    assert searched(jobs, ADAMW) == [(rate,) for rate in tried]
    rounds = part_of(jobs, "round")
    assert [rates_of(job) for job in rounds] == [(f"{best:g}",)] * 2
    assert [(job.log_dir.name, flag_of(job, "--seed")) for job in rounds] == [("round_1", "1337"), ("round_2", "1338")]
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


def test_a_tie_is_broken_the_same_way_in_any_order():
    """The search has the rates in the order of its runs, the standings sorted."""
    losses = {(2.0,): 5.0, (4.0,): 5.0, (8.0,): 6.0}
    assert best_of(losses) == best_of(dict(reversed(losses.items()))) == (4.0,)


def test_the_search_of_a_rung_that_learns_nothing_ends(tmp_path):
    """Equal losses: no rate is better than the highest, and the standings choose what the search has chosen."""
    flat = {ADAMW.name: lambda end, job: (9, 8, 7, 6)}
    jobs = run_race(tmp_path / "flat", {ADAMW.name: (1,)}, [ADAMW], **flat)
    assert len(searched(jobs, ADAMW)) == MOST_RATES
    _, [racer] = standings(build_report(tmp_path / "flat"))
    assert {rates_of(job) for job in part_of(jobs, "round")} == {(show_rates(racer.rates),)}


def test_each_search_begins_at_the_best_of_the_one_before(tmp_path):
    """Rung 17 has rung 16's losses, so it gets its rate; Muon's first search begins at its default."""
    stages = [ADAMW, CHUNKED, MUON, TRAPEZOID]
    best = {ADAMW.name: (1.2e-3,), CHUNKED.name: (1.2e-3,), MUON.name: (1.2e-3, 4e-3), TRAPEZOID.name: (2.4e-3, 4e-3)}
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
    assert read_sweep(tmp_path)[MUON.name][1.2e-3, 4e-3] == 4.0 and len(read_sweep(tmp_path)[ADAMW.name]) == 4


@pytest.mark.parametrize("rate, best", [("0.0024", "0.0012"), ("0.0012", "0.0006")])
def test_a_run_that_diverges_is_never_the_best(tmp_path, rate, best):
    def losses(end, job):
        return (9, 8, 7, "nan" if flag_of(job, "--max-lr") == rate else end)

    jobs = run_race(tmp_path, {ADAMW.name: (2e-3,)}, [ADAMW], **{ADAMW.name: losses})
    assert {rates_of(job) for job in part_of(jobs, "round")} == {(best,)}
    with pytest.raises(UserError, match="no run of beyond/rung_16.* ended with a loss"):
        run_race(tmp_path / "all", {ADAMW.name: (1,)}, [ADAMW], **{ADAMW.name: lambda end, job: (9, 8, 7, "inf")})


def test_a_run_that_broke_off_has_no_last_loss(tmp_path):
    run_race(tmp_path, {ADAMW.name: (1.2e-3,)}, [ADAMW])
    path = tmp_path / "round_1" / f"{ADAMW.name}.log"
    assert last_val_loss(path) == 4
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))  # after its last validation
    assert last_val_loss(path) == math.inf


@pytest.mark.parametrize("val_losses, loss, steps", [
    ((9, 8, 7, 6), 7.5, 25), ((9, 8, 7, 6), 7, 30), ((9, 8, 7, 6), 9.5, 10), ((9, 8, 7, 6), 5.9, math.inf),
    ((9, 6, 8, 5), 7, 10 + 10 * 2 / 3), (("nan", "nan", 7, 6), 6.75, 32.5),
])
def test_steps_to_a_loss(tmp_path, val_losses, loss, steps):
    job = Job(ADAMW.name, [], tmp_path)
    write_log(job, val_losses, 100.0)
    assert steps_to(read_log(job.log_dir / f"{job.name}.log"), loss) == pytest.approx(steps)


# Three seeds of AdamW end at 6.1, 6.0 and 5.9; Muon passes 6.0 at steps 15, 25 and 30.
ROUNDS = {
    ADAMW.name: {"round_1": (9, 8, 7, 6.1), "round_2": (9, 8, 7, 6.0), "round_3": (9, 8, 7, 5.9)},
    MUON.name: {"round_1": (7, 5, 4, 3.9), "round_2": (8, 7, 5, 4), "round_3": (8, 7, 6, 4)},
}
VAL_LOSSES = {name: lambda end, job: ROUNDS[job.name].get(job.log_dir.name, (9, 8, 7, end)) for name in ROUNDS}


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
    assert "6.00 is the median of the validation losses that rung 16 ends with" in caption
    assert "of 4 to 8 tries" in caption and "median of 3 seeds" in caption and "measured 3 times" in caption
    for width in (80, 140):
        console = Console(width=width, file=io.StringIO())
        print_race(report, console)
        output = console.file.getvalue()
        assert "18 Muon" in output and "0.0012" in output and "69" in output and "…" not in output
        assert max(map(len, output.splitlines())) <= width
        assert ("69 (41–82)" in output) == (width == 140)
    (tmp_path / "docs").mkdir()
    for file, name in {"README": "ladder", "docs/results": "ladder", "docs/race": "race",
                       "docs/floors": "published"}.items():
        (tmp_path / f"{file}.md").write_text(f"<!-- {name}:begin -->\n<!-- {name}:end -->")
    write_tables([report], tmp_path)
    text = (tmp_path / "docs" / "race.md").read_text()
    assert text.index("race:begin") < text.index("(../beyond/rung_18_muon.py)") < text.index("race:end")
    assert all("rung_18" not in (tmp_path / file).read_text()
               for file in ("README.md", "docs/results.md"))


def test_with_two_seeds_the_first_rung_reaches_the_target_with_both(tmp_path):
    run_race(tmp_path, BEST, [ADAMW, MUON], 2, **VAL_LOSSES)
    report = build_report(tmp_path)
    target, [first, second] = standings(report)
    assert target == 6.1 and first.tokens[2] == 40 * 64  # and not 6.05, which one of them never reaches
    run_race(tmp_path / "up", BEST, [ADAMW], **{ADAMW.name: lambda end, job: (9, 8, 7, 6.104)})
    assert standings(build_report(tmp_path / "up"))[0] == 6.11
    shares = [text.split()[0] for text in race_texts(report)[0]["% of rung 16's"]]
    assert shares == ["100", f"{100 * second.seconds[0] / first.seconds[0]:.0f}"]


def test_a_race_that_was_stopped_counts_what_came_to_its_end(tmp_path):
    """A second round that broke off, before its first validation or after; and a first one that did."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, **VAL_LOSSES)
    whole = (tmp_path / "round_2" / f"{MUON.name}.log").read_text()
    for n_lines in (8, 30):
        (tmp_path / "round_2" / f"{MUON.name}.log").write_text("".join(whole.splitlines(keepends=True)[:n_lines]))
        report = build_report(tmp_path)
        target, [_, muon] = standings(report)
        assert target == 6.0 and muon.tokens == (22.5 * 64, 15 * 64, 30 * 64)
        for (_, steps, seconds, losses), ms in zip(race_curves(report), (100, 110), strict=True):
            assert seconds == pytest.approx([ms * step / 1000 for step in steps]) and len(losses) == len(steps) == 4
        assert race_texts(report)
    for number in (1, 2, 3):
        for path in (tmp_path / f"round_{number}").glob("*.log"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    assert build_report(tmp_path).sweep == {}  # nothing to compare yet


def test_the_caption_says_where_a_search_is_doubtful(tmp_path):
    """Nothing of a good one; a best rate at the edge, rates that differ less than the seeds, a race of 40 steps."""
    best = BEST

    def caption(name, best=best, **values):
        run_race(tmp_path / name, best, [ADAMW], 2, **values)
        return race_texts(build_report(tmp_path / name))[1]

    assert "40 steps are too few to choose a learning rate, take 50 or more" in caption("short")
    assert "ended" not in caption("short again") and "flat" not in caption("short once more")
    assert "rung 16's search ended after 12 tries, so 0.6144 may not be" in caption("edge", {ADAMW.name: (1e6,)})
    seeds = {"round_1": (9, 8, 7, 5), "round_2": (9, 8, 7, 9)}  # further apart than the four rates
    noisy = caption("flat", **{ADAMW.name: lambda end, job: seeds.get(job.log_dir.name, (9, 8, 7, end))})
    assert "rung 16's search is flat: its rates differ by no more than its seeds do" in noisy and "ended" not in noisy


def test_the_plan_of_a_race_and_how_far_its_search_is(tmp_path):
    stages = [ADAMW, CHUNKED, MUON]
    plan = describe_race(stages, 3)
    assert n_jobs(stages, 3) == 26 and "at least 26 runs: 8 or more to find the learning rates of 2 rungs" in plan
    assert "3 seeds and 3 timings of 3 rungs" in plan
    assert "begins with --max-lr 0.0006 (rung 16) and --muon-lr 0.002 (rung 18)" in plan
    assert "finished 0 of at least 8 runs (rung 16: 0, rung 18: 0)" in search_progress(stages, tmp_path)
    for rate, losses in ((0.0006, (9, 8, 7, 6)), (0.0012, (9, 8, 7, 6))):
        write_log(Job(ADAMW.name, [], tmp_path / "sweep" / f"{rate:g}"), losses, 100.0)
    path = tmp_path / "sweep" / "0.0012" / f"{ADAMW.name}.log"
    path.write_text(path.read_text()[:600])  # the one that Ctrl-C has stopped
    assert "finished 1 of at least 8 runs (rung 16: 1, rung 18: 0)" in search_progress(stages, tmp_path)


def test_the_timing_counts_for_seconds_and_the_rounds_only_where_it_is_missing(tmp_path):
    """A rung that has not been timed alone is not compared with one that has: then no timing counts."""
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, ["timing"], **VAL_LOSSES)
    report = build_report(tmp_path)
    _, racers = standings(report)
    assert [racer.ms for racer in racers] == [row.ms for row in report.rows] == pytest.approx([120, 132])
    assert racers[1].seconds == pytest.approx((3.3, 1.98, 3.96)) and racers[1].val_loss == (4, 3.9, 4)
    assert [curve[2][-1] for curve in race_curves(report)] == pytest.approx([4.8, 5.28])
    for number in (1, 2, 3):
        path = tmp_path / "timing" / f"round_{number}" / f"{MUON.name}.log"
        path.write_text(path.read_text()[:600])  # killed
    report = build_report(tmp_path)
    assert report.timing == {} and [racer.ms for racer in standings(report)[1]] == [100, 110]
    assert "ms/step, that of the same runs" in race_texts(report)[1]


def test_a_paired_t_test(tmp_path):
    """Student's distribution with 4 degrees of freedom has a closed form; the pairs are found by their round."""
    before = {f"round_{n}": loss for n, loss in enumerate((6.10, 6.00, 5.90, 6.05, 5.97))}
    after = {f"round_{n}": before[f"round_{n}"] - gain for n, gain in enumerate((0.10, 0.02, 0.06, -0.01, 0.05))}
    t = 0.044 / math.sqrt(sum((gain - 0.044) ** 2 for gain in (0.10, 0.02, 0.06, -0.01, 0.05)) / 4 / 5)
    q = t * t / (1 + t * t / 4)
    p = 1 - 0.75 * math.sqrt(q) * (1 - q / 12)
    assert 0.05 < p < 0.1 and paired_p(after, before) == pytest.approx(p)
    assert paired_p(dict(reversed(after.items())), before) == pytest.approx(p) == paired_p(after | {"more": 1}, before)
    assert paired_p({"round_1": 1}, before) is None is paired_p(before, before)  # one seed; the same losses
    assert paired_p({n: loss - 0.5 for n, loss in before.items()}, before) < 1e-9


def test_the_standings_say_what_is_beyond_chance(tmp_path):
    """Not for the first rung, nor for one with the same losses; a run that never got there counts as its length."""
    stages, best = [ADAMW, CHUNKED, MUON], BEST | {CHUNKED.name: BEST[ADAMW.name]}
    ends = {stage.name: {f"round_{n + 1}": end + 0.01 * n for n in range(5)}
            for stage, end in zip(stages, (6, 6, 5.9), strict=True)}
    ends[MUON.name]["round_5"] -= 0.001  # else all differences are the same
    values = {name: lambda end, job: (9, 8, 7, ends[job.name].get(job.log_dir.name, end)) for name in ends}
    run_race(tmp_path, best, stages, 5, **values)
    report = build_report(tmp_path)
    target, racers = standings(report)
    assert target == 6.02 and [(racer.p_loss, racer.p_tokens) for racer in racers[:2]] == [(None, None)] * 2
    gains = [0.1] * 4 + [0.101]
    mean, sd = sum(gains) / 5, math.sqrt(sum((gain - sum(gains) / 5) ** 2 for gain in gains) / 4)
    q = (t := mean / sd * math.sqrt(5)) * t / (1 + t * t / 4)
    assert racers[2].p_loss == pytest.approx(1 - 0.75 * math.sqrt(q) * (1 - q / 12), abs=1e-9)
    assert 0 < racers[2].p_tokens < 0.01 and racers[1].tokens[2] == math.inf
    texts, caption = race_texts(report)
    assert list(texts["p"]) == ["–", "–", "<0.001*"] and "* marks p < 0.01" in caption
    assert list(texts["p "])[:2] == ["–", "–"] and texts["p "][2].endswith("*")
    run_race(tmp_path / "one", best, stages, 1)
    texts, caption = race_texts(build_report(tmp_path / "one"))
    assert {*texts["p"], *texts["p "]} == {"–"} and "t-test" not in caption


def test_losses_and_tokens_have_a_p_each(tmp_path):
    """Here the ends are alike, and one rung is at the target long before."""
    ends = {f"round_{n}": 6 + 0.01 * n for n in range(1, 6)}

    def early(end, job):
        n = int(job.log_dir.name[-1]) if job.log_dir.name in ends else 0
        return (9, 5 + 0.1 * n, 7, ends[job.log_dir.name] + 0.001 * (n % 2)) if n else (9, 8, 7, end)

    run_race(tmp_path, BEST, [ADAMW, MUON], 5, **{
        ADAMW.name: lambda end, job: (9, 8, 7, ends.get(job.log_dir.name, end)), MUON.name: early})
    report = build_report(tmp_path)
    target, racers = standings(report)
    lengths = [{run.path.parent.name: min(steps_to(run, target), 40) for run in report.runs[stage.name]}
               for stage in (ADAMW, MUON)]
    assert racers[1].p_tokens == pytest.approx(paired_p(*reversed(lengths))) and racers[1].p_tokens < 0.01
    assert racers[1].p_loss > 0.05


def test_medians_of_rounds_and_first_steps_of_timings(tmp_path):
    """Of curves, and of memory; one seed far off, or the first, must not decide."""
    ends = {"round_1": 6.0, "round_2": 6.1, "round_3": 9.0}
    run_race(tmp_path, BEST, [ADAMW], 3, **{ADAMW.name: lambda end, job: (9, 8, 7, ends.get(job.log_dir.name, end))})
    for folder, GB, first in [*((f"round_{n}", GB, 9000) for n, GB in ((1, 1), (2, 2), (3, 9))),
                              *((f"timing/round_{n}", 5, 3000) for n in (1, 2, 3))]:
        path = tmp_path / folder / f"{ADAMW.name}.log"
        path.write_text(path.read_text().replace("memory: 1.00 GB", f"memory: {GB}.00 GB").replace(
            "step : 1 | loss: 5.0 | dt: 100.0 ms", f"step : 1 | loss: 5.0 | dt: {first} ms"))
    report = build_report(tmp_path)
    assert report.rows[0].peak_memory_gb == standings(report)[1][0].peak_memory_gb == 2
    assert report.rows[0].first_step_s == 3
    (_, _, _, losses), = race_curves(report)
    assert losses == [9, 8, 7, 6.1]


def test_a_search_as_wide_as_its_seeds_are_apart_is_flat(tmp_path):
    run_race(tmp_path / "one", BEST, [ADAMW], 2)
    found = read_sweep(tmp_path / "one")[ADAMW.name].values()
    ends = {"round_1": 6.0, "round_2": 6.0 + max(found) - min(found)}
    run_race(tmp_path / "two", BEST, [ADAMW], 2, **{
        ADAMW.name: lambda end, job: (9, 8, 7, ends.get(job.log_dir.name, end))})
    assert "search is flat" in race_texts(build_report(tmp_path / "two"))[1]


def test_the_pictures_of_a_race(tmp_path):
    """Also where a rung never gets to the target."""
    values = VAL_LOSSES | {MUON.name: lambda end, job: (9, 9, 9, end + 5)}
    run_race(tmp_path, BEST, [ADAMW, MUON], 3, **values)
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
    started = time.monotonic()
    with make_runner(tmp_path) as runner, pytest.raises(KeyboardInterrupt):
        runner.run(jobs, 2)
    assert time.monotonic() - started < 20 and not files[2].exists() and not runner.outcomes
    for file in files[:2]:
        pid, threads = file.read_text().split()
        assert threads == "3" and not psutil.pid_exists(int(pid))


@pytest.mark.slow
def test_a_race_for_real(tokens, tmp_path, call, monkeypatch):
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
