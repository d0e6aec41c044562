"""run --race: the search for learning rates, the seeds, and the standings, on logs with known losses and for real."""
import io
import math

import pytest
from rich.console import Console
from test_ladder_tool import ladder

from ladder.errors import UserError
from ladder.measure.race import describe_race, n_jobs, race, rate_flag, search_progress
from ladder.measure.runner import Job
from ladder.scripts.stages import BY_LABEL, BY_NAME
from ladder.show.logs import read_log
from ladder.show.report import build_report, write_tables
from ladder.show.standings import (
    best_of,
    last_val_loss,
    print_race,
    race_curves,
    race_texts,
    read_sweep,
    standings,
    steps_to,
)

ADAMW, CHUNKED, MUON = (BY_LABEL[label] for label in ("16", "17", "18"))
STEPS = (10, 20, 30, 40)  # of the validations
MS = {MUON.name: 110.0}  # a step of the others takes 100


def write_log(job, val_losses, ms):
    """A log as the script of the job writes it, with these validation losses."""
    job.log_dir.mkdir(parents=True, exist_ok=True)
    lines = [f"# script: {job.name}.py", "# model: tiny | parameters: 1", "# device: cpu (2 threads)",
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


def run_race(folder, best, stages, seeds=2, slow=None, **values):
    """Drive a race whose runs end the better, the closer log2(rate) is to that of `best[name]`; the jobs, in order.

    In the round `slow` the machine takes 1.2 times as long.
    """
    done = []

    def run(jobs):
        for job in jobs:
            rate = float(flag_of(job, rate_flag(BY_NAME[job.name])[0]))
            end = 4 + abs(math.log2(rate / best[job.name]))
            write_log(job, values.get(job.name, lambda end, job: (9, 8, 7, end))(end, job),
                      MS.get(job.name, 100.0) * (1.2 if job.log_dir.name == slow else 1))
            done.append(job)

    race(stages, ["--model", "tiny", "--seed", "7"], folder, seeds, run)
    return done


def searched(jobs, stage):
    flag, _ = rate_flag(stage)
    return [flag_of(job, flag) for job in jobs if job.name == stage.name and "sweep" in job.log_dir.parts]


@pytest.mark.parametrize("best, tried", [
    (1.2e-3, ["0.0006", "0.0012", "0.0024", "0.0048"]),
    (6e-4, ["0.0006", "0.0012", "0.0024", "0.0048", "0.0003"]),  # the best must not be the first or the last
    (1.5e-4, ["0.0006", "0.0012", "0.0024", "0.0048", "0.0003", "0.00015", "7.5e-05"]),
    (9.6e-3, ["0.0006", "0.0012", "0.0024", "0.0048", "0.0096", "0.0192"]),
])
def test_the_search_goes_on_until_the_best_has_a_neighbour_on_each_side(tmp_path, best, tried):
    jobs = run_race(tmp_path, {ADAMW.name: best}, [ADAMW])
    assert searched(jobs, ADAMW) == tried
    rounds = jobs[len(tried) :]
    assert [flag_of(job, "--max-lr") for job in rounds] == [f"{best:g}"] * 2
    assert [(job.log_dir.name, flag_of(job, "--seed")) for job in rounds] == [("round_1", "1337"), ("round_2", "1338")]
    assert {flag_of(job, "--seed") for job in jobs[: len(tried)]} == {"1337"}


def test_a_tie_is_broken_the_same_way_in_any_order():
    """The search has the rates in the order of its runs, the standings sorted."""
    assert best_of({2.0: 5.0, 4.0: 5.0, 8.0: 6.0}) == best_of({8.0: 6.0, 4.0: 5.0, 2.0: 5.0}) == 4.0


def test_the_search_of_a_rung_that_learns_nothing_ends(tmp_path):
    """Equal losses: no rate is better than the highest, and the standings choose what the search has chosen."""
    flat = {ADAMW.name: lambda end, job: (9, 8, 7, 6)}
    jobs = run_race(tmp_path / "flat", {ADAMW.name: 1}, [ADAMW], **flat)
    assert len(searched(jobs, ADAMW)) == 10
    _, [racer] = standings(build_report(tmp_path / "flat"))
    assert {flag_of(job, "--max-lr") for job in jobs[-2:]} == {racer.rate} == {searched(jobs, ADAMW)[-1]}


def test_muon_gets_the_adamw_rate_of_the_first_rung_and_17_the_rate_of_16(tmp_path):
    stages = [ADAMW, CHUNKED, MUON]
    jobs = run_race(tmp_path, {ADAMW.name: 2.4e-3, CHUNKED.name: 2.4e-3, MUON.name: 4e-3}, stages)
    assert len(jobs) == n_jobs(stages, 2) == 4 + 4 + 2 * 3
    assert searched(jobs, CHUNKED) == [] and searched(jobs, MUON) == ["0.002", "0.004", "0.008", "0.016"]
    assert [job.name for job in jobs[8:]] == [stage.name for stage in stages] * 2  # interleaved
    rates = {job.name: (flag_of(job, "--max-lr"), flag_of(job, "--muon-lr")) for job in jobs[8:]}
    assert rates == {ADAMW.name: ("0.0024", None), CHUNKED.name: ("0.0024", None), MUON.name: ("0.0024", "0.004")}
    assert {flag_of(job, "--max-lr") for job in jobs[4:8]} == {"0.0024"}
    sweep = read_sweep(tmp_path)
    assert sweep[MUON.name] == {0.002: 5.0, 0.004: 4.0, 0.008: 5.0, 0.016: 6.0}


@pytest.mark.parametrize("rate, best", [("0.0024", "0.0012"), ("0.0048", "0.0024")])
def test_a_run_that_diverges_is_never_the_best(tmp_path, rate, best):
    def losses(end, job):
        return (9, 8, 7, "nan" if flag_of(job, "--max-lr") == rate else end)

    jobs = run_race(tmp_path, {ADAMW.name: 2e-3}, [ADAMW], **{ADAMW.name: losses})
    assert [flag_of(job, "--max-lr") for job in jobs[-2:]] == [best] * 2
    with pytest.raises(UserError, match="no run of beyond/rung_16.* ended with a loss"):
        run_race(tmp_path / "all", {ADAMW.name: 1}, [ADAMW], **{ADAMW.name: lambda end, job: (9, 8, 7, "inf")})


def test_a_run_that_broke_off_has_no_last_loss(tmp_path):
    run_race(tmp_path, {ADAMW.name: 1.2e-3}, [ADAMW])
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
    run_race(tmp_path, {ADAMW.name: 1.2e-3, MUON.name: 4e-3}, [ADAMW, MUON], 3, "round_3", **VAL_LOSSES)
    report = build_report(tmp_path)
    target, [first, second] = standings(report)
    assert target == 6.0 and (first.rate, second.rate) == ("0.0012", "0.004")
    assert first.val_loss == (6.0, 5.9, 6.1) and first.tokens[0] == 40 * 64 and first.tokens[2] == math.inf
    assert first.tokens[1] == pytest.approx(64 * (30 + 10 / 1.1))
    assert second.val_loss == (4, 3.9, 4) and second.tokens == (25 * 64, 15 * 64, 30 * 64)
    assert second.seconds == pytest.approx((2.75, 1.65, 3.3))  # as fast in all rounds, whatever the machine did
    texts, caption = race_texts(report)
    assert list(texts["of rung 16's"]) == ["100%", "69%"]
    assert "6.00 is the median of the validation losses that rung 16 ends with" in caption
    assert "best of 4 learning rates" in caption and "median of 3 seeds" in caption
    for width in (80, 140):
        console = Console(width=width, file=io.StringIO())
        print_race(report, console)
        output = console.file.getvalue()
        assert "18 Muon" in output and "69%" in output and "…" not in output
        assert ("1.6–3.3" in output) == (width == 140)
    (tmp_path / "docs").mkdir()
    for file, name in {"README": "ladder", "docs/results": "ladder", "docs/long_runs": "beyond",
                       "docs/race": "race"}.items():
        (tmp_path / f"{file}.md").write_text(f"<!-- {name}:begin -->\n<!-- {name}:end -->")
    write_tables([report], tmp_path)
    text = (tmp_path / "docs" / "race.md").read_text()
    assert text.index("race:begin") < text.index("(../beyond/rung_18_muon.py)") < text.index("race:end")
    assert all("rung_18" not in (tmp_path / file).read_text()
               for file in ("README.md", "docs/results.md", "docs/long_runs.md"))


def test_with_two_seeds_the_first_rung_reaches_the_target_with_both(tmp_path):
    run_race(tmp_path, {ADAMW.name: 1.2e-3, MUON.name: 4e-3}, [ADAMW, MUON], 2, **VAL_LOSSES)
    report = build_report(tmp_path)
    target, [first, second] = standings(report)
    assert target == 6.1 and first.tokens[2] == 40 * 64  # and not 6.05, which one of them never reaches
    run_race(tmp_path / "up", {ADAMW.name: 1.2e-3}, [ADAMW], **{ADAMW.name: lambda end, job: (9, 8, 7, 6.104)})
    assert standings(build_report(tmp_path / "up"))[0] == 6.11
    assert list(race_texts(report)[0]["of rung 16's"]) == ["100%", f"{second.seconds[0] / first.seconds[0]:.0%}"]


def test_a_race_that_was_stopped_counts_what_came_to_its_end(tmp_path):
    """A second round that broke off, before its first validation or after; and a first one that did."""
    run_race(tmp_path, {ADAMW.name: 1.2e-3, MUON.name: 4e-3}, [ADAMW, MUON], 3, **VAL_LOSSES)
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
    best = {ADAMW.name: 1.2e-3}

    def caption(name, best=best, **values):
        run_race(tmp_path / name, best, [ADAMW], 2, **values)
        return race_texts(build_report(tmp_path / name))[1]

    assert "40 steps are too few to choose a learning rate, take 50 or more" in caption("short")
    assert "edge" not in caption("short again") and "flat" not in caption("short once more")
    assert "rung 16's best rate, 0.3072, is at the edge" in caption("edge", {ADAMW.name: 1e6})
    seeds = {"round_1": (9, 8, 7, 5), "round_2": (9, 8, 7, 9)}  # further apart than the four rates
    noisy = caption("flat", **{ADAMW.name: lambda end, job: seeds.get(job.log_dir.name, (9, 8, 7, end))})
    assert "rung 16's search is flat: its rates differ by no more than its seeds do" in noisy and "edge" not in noisy


def test_the_plan_of_a_race_and_how_far_its_search_is(tmp_path):
    stages = [ADAMW, CHUNKED, MUON]
    plan = describe_race(stages, 3)
    assert "at least 17 runs: 4 learning rates or more for each of 2 rungs, then 3 seeds of 3 rungs" in plan
    assert "--max-lr 0.0006 to 0.0048 (rung 16); --muon-lr 0.002 to 0.016 (rung 18)" in plan
    assert "finished 0 of at least 8 runs (rung 16: 0, rung 18: 0)" in search_progress(stages, tmp_path)
    for rate, losses in ((0.0006, (9, 8, 7, 6)), (0.0012, (9, 8, 7, 6))):
        write_log(Job(ADAMW.name, [], tmp_path / "sweep" / f"{rate:g}"), losses, 100.0)
    path = tmp_path / "sweep" / "0.0012" / f"{ADAMW.name}.log"
    path.write_text(path.read_text()[:600])  # the one that Ctrl-C has stopped
    assert "finished 1 of at least 8 runs (rung 16: 1, rung 18: 0)" in search_progress(stages, tmp_path)


@pytest.mark.slow
def test_a_race_for_real(tokens, tmp_path):
    """It ends with the standings, the seed of the search runs as it ran there, and --resume repeats no search."""
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "-B", 2, "-T", 16, "--total-batch", 32,
             "--steps", 4, "--val-every", 2, "--val-sequences", 2, "--compile-mode", "none", "--warmup-steps", 0]
    logs = tmp_path / "race"
    done = ladder("run", "--race", 1, "--rungs", "16", "--logs", logs, *words, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "To the same validation loss" in done.stdout
    report = build_report(logs)
    target, racers = standings(report)
    for racer in racers:
        losses = report.sweep[racer.name]
        assert len(losses) >= 4 and min(losses) < float(racer.rate) < max(losses)
        [run] = report.runs[racer.name]
        assert run.val_losses == read_log(logs / "sweep" / racer.rate / f"{racer.name}.log").val_losses
    assert 0 <= target - report.runs[racers[0].name][0].val_losses[-1] <= 0.01
    kept = {path: path.stat().st_mtime_ns for path in logs.glob("sweep/*/*.log")}
    (logs / "round_1" / f"{ADAMW.name}.log").unlink()
    again = ladder("run", "--resume", "--logs", logs)
    assert again.returncode == 0 and (logs / "round_1" / f"{ADAMW.name}.log").exists()
    assert {path: path.stat().st_mtime_ns for path in logs.glob("sweep/*/*.log")} == kept
