"""A race: the search for learning rates, the seeds, the timing, the standings; on known losses, and for real."""
import json
import math
import re
from dataclasses import replace

import PIL.Image
import pandas
import pytest
from conftest import ROOT
from run_tool import flags
from scipy.stats import ttest_rel

from experiments import race as race_module
from experiments import race_docs
from experiments.race import keep
from experiments.race_record import write_standings
from ladder.errors import UserError
from ladder.measure.contest import SEED, Contest, default_rates
from ladder.records.recipes import TUNING_SEEDS, read_csv, read_logs, steps_to
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, BY_NAME
from ladder.show.charts import curves
from ladder.show.plots import digest, save
from ladder.show.standings import race_texts

ADAMW, MUON, TRAPEZOID = (BY_LABEL[label] for label in ("gradient_checkpointing", "muon", "trapezoid_lr"))
ORDER = [ADAMW.name, MUON.name, "an_idea"]
STEPS = (10, 20, 30, 40)  # of the validations
MS = {MUON.name: 110.0}  # a step of the others takes 100
BEST = {ADAMW.name: (1.2e-3,), MUON.name: (1.2e-3, 4e-3), TRAPEZOID.name: (2.4e-3, 4e-3)}  # of the parabolas
# Three seeds of AdamW end at 6.1, 6.0 and 5.9; Muon passes 6.0 at steps 15, 25 and 30.
VAL_LOSSES = {ADAMW.name: [6.1, 6.0, 5.9], MUON.name: [(7, 5, 4, 3.9), (8, 7, 5, 4), (8, 7, 6, 4)]}
HEADER = """# script: {0.name}.py
# model: tiny | parameters: 1,250,000
# device: cpu (2 threads)
# total batch: 64 tokens in 1 micro-steps
# batch: B=2 T=32 | steps: 40 | seed: {1}
# data: text
"""


def standings(report):
    """(The target, a Racer for each rung) of a race."""
    return report.race.target, report.race.racers


def flag_of(job, flag):
    """The last value of a flag in a job's command, the one that counts; None without."""
    places = [i for i, word in enumerate(job.command) if word == flag]
    return job.command[places[-1] + 1] if places else None


def write_log(job, val_losses, ms=100.0):
    """A log with these validation losses or, after others, this last one. Three seeds take 1, 4 and 9 GB."""
    val_losses = val_losses if isinstance(val_losses, tuple) else (9, 8, 7, val_losses)
    seed = int(flag_of(job, "--seed"))
    lines = [HEADER.format(job, seed)]
    for step in range(1, 41):
        lines.append(f"step : {step} | loss: 5.0 | dt: {ms} ms | tokens/sec: 1\n")
        if step in STEPS:
            lines.append(f"val : step {step} | loss: {val_losses[STEPS.index(step)]} | time: 0.1 s\n")
    lines.append(f"median : dt: {ms} ms | tokens/sec: 1 | peak memory: {(seed - SEED + 1) ** 2} GB | steps 6-40\n")
    job.log_dir.mkdir(parents=True, exist_ok=True)
    job.log.write_text("".join(lines))


def cut(path, n_lines):
    """Leave the first lines of a log, as a run that was killed does."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:n_lines]))


def rates_of(job):
    """The learning rates of a job, as its flags have them: AdamW's, and Muon's if it has Muon."""
    return tuple(flag_of(job, flag) for flag in default_rates(BY_NAME[job.name]))


def run_race(folder, entries, seeds=2, best=BEST, slow=(), search_steps=None, tries=24, **val_losses):
    """Drive a race whose runs end the better, the closer log2 of each rate is to that of `best[name]`; its jobs.

    `val_losses` are those of each round, or a function of (the loss of the search, the job) for all runs. In the
    folders `slow` the machine takes 1.2 times as long.
    """
    done = []

    def run(jobs, at_once=1):
        assert at_once == (1 if jobs and "timing" in jobs[0].log_dir.parts else 2)  # only the timings run alone
        for job in jobs:
            pairs = zip(rates_of(job), best[job.name], strict=True)
            end = 4 + sum(math.log2(float(rate) / middle) ** 2 for rate, middle in pairs)
            if part_of([job], "sweep"):  # the mean over the seeds is right, each alone is not
                end += (int(flag_of(job, "--seed")) - 1336.5) * math.log2(float(rates_of(job)[0]) / 3e-4)
            own = val_losses.get(job.name)
            if callable(own):
                end = own(end, job)
            elif own and job in part_of([job], "round"):
                end = own[int(job.log_dir.name.removeprefix("round_")) - 1]
            write_log(job, end, MS.get(job.name, 100.0) * (1.2 if {*slow} & {*job.log_dir.parts} else 1))
            done.append(job)

    words = ["--model", "tiny", "--steps", "40"]
    Contest(entries, words, folder, seeds, run, at_once=2, most_tries=tries, search_steps=search_steps).hold()
    record, _ = read_logs(folder, [entry.name for entry in entries])
    write_standings(record, folder / "race.json")
    return done


def part_of(jobs, part):
    """The jobs in the folders sweep, timing, or round."""
    return [job for job in jobs if part in job.log_dir.parts
            or part == "round" and job.log_dir.name.startswith(part) and "timing" not in job.log_dir.parts]


def searched(jobs, entry):
    return [rates_of(job) for job in part_of(jobs, "sweep") if job.name == entry.name]


def test_the_tuning_seeds_are_never_tested_and_rounds_are_interleaved(tmp_path):
    entries = [ADAMW, MUON, TRAPEZOID]
    jobs = run_race(tmp_path, entries)
    assert {(flag_of(job, "--seed"), flag_of(job, "--val-every")) for job in part_of(jobs, "sweep")} == {
        (str(seed), "40") for seed in TUNING_SEEDS}
    names = [entry.name for entry in entries]
    for part, number, seeds in (("round", 2, [1338, 1339]), ("timing", 5, [1338])):
        some = part_of(jobs, part)
        assert [job.name for job in some] == [name for i in range(number) for name in names[:: -1 if i % 2 else 1]]
        assert sorted({int(flag_of(job, "--seed")) for job in some}) == seeds and not {*seeds} & {*TUNING_SEEDS}
        assert {(job.name, rates_of(job)) for job in some} == {
            (name, tuple(f"{rate:g}" for rate in rates)) for name, rates in BEST.items()}
    assert {(flag_of(job, "--steps"), flag_of(job, "--val-every")) for job in part_of(jobs, "timing")} == {("30", "0")}
    record, _ = read_logs(tmp_path)
    assert record.sweep[MUON.name][1.2e-3, 4e-3] == pytest.approx(4.0) and {*record.tested.seed} == {SEED, SEED + 1}
    assert [tuple(racer.rates) for racer in standings(build_report(tmp_path))[1]] == [*BEST.values()]


def test_each_rung_gets_as_many_tries_as_the_longest_search_took(tmp_path):
    """Also one with a single rate; and none more than it may have."""
    jobs = run_race(tmp_path, [ADAMW, MUON, TRAPEZOID])
    assert {len({*searched(jobs, entry)}) for entry in (ADAMW, MUON, TRAPEZOID)} == {18}
    jobs = run_race(tmp_path / "few", [ADAMW, MUON, TRAPEZOID], tries=6)
    assert [len({*searched(jobs, entry)}) for entry in (ADAMW, MUON, TRAPEZOID)] == [6, 6, 6]


def test_without_tries_the_rates_are_those_of_the_flags(tmp_path):
    jobs = run_race(tmp_path, [ADAMW, MUON], tries=0)
    assert part_of(jobs, "sweep") == [] and {rates_of(job) for job in jobs} == {("0.0006",), ("0.0006", "0.002")}


def test_a_search_may_be_shorter_than_the_rounds(tmp_path):
    jobs = run_race(tmp_path, [ADAMW], search_steps=20)
    for part, expected in (("sweep", ("20", "20")), ("round", ("40", None))):
        assert {(flag_of(job, "--steps"), flag_of(job, "--val-every")) for job in part_of(jobs, part)} == {expected}


def test_a_run_that_diverges_is_never_the_best_and_a_resumed_race_keeps_its_rates(tmp_path):
    """Though the run that had diverged would now be the best: rounds of both rates would be one rung's."""
    lost = {ADAMW.name: lambda end, job: "nan" if float(flag_of(job, "--max-lr")) > 7e-4 else end}
    jobs = run_race(tmp_path, [ADAMW], **lost)
    [(kept,)] = {rates_of(job) for job in part_of(jobs, "round")}
    assert 5e-4 < float(kept) < 7e-4
    jobs = run_race(tmp_path, [ADAMW])
    assert part_of(jobs, "sweep") == [] and {rates_of(job) for job in part_of(jobs, "round")} == {(kept,)}
    with pytest.raises(UserError, match="no run of beyond/.*/6_gradient.* ended with a loss"):
        run_race(tmp_path / "all", [ADAMW], **{ADAMW.name: lambda end, job: "inf"})


@pytest.mark.parametrize("val_losses, loss, steps", [
    ((9, 8, 7, 6), 7.5, 25), ((9, 8, 7, 6), 7, 30), ((9, 8, 7, 6), 9.5, 10), ((9, 8, 7, 6), 5.9, math.inf),
    ((9, 6, 8, 5), 7, 10 + 10 * 2 / 3), ((math.inf, 7, 7, 6), 7.5, 20),
])
def test_steps_to_a_loss_lie_between_two_validations(val_losses, loss, steps):
    assert steps_to(pandas.DataFrame({"step": STEPS, "val_loss": val_losses}), loss) == pytest.approx(steps)


def test_standings_are_medians_over_the_seeds_and_means_of_the_losses(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, slow=["round_3"], **VAL_LOSSES)
    report = build_report(tmp_path)
    target, [first, second] = standings(report)
    assert target == 6.0 and (first.rates, second.rates) == ([0.0012], [0.0012, 0.004])
    assert first.val_loss == [6.0, 5.9, 6.1] and first.tokens[0] == 40 * 64 and first.tokens[2] == math.inf
    assert first.tokens[1] == pytest.approx(64 * (30 + 10 / 1.1))
    assert second.val_loss == pytest.approx([11.9 / 3, 3.9, 4]) and second.tokens == [25 * 64, 15 * 64, 30 * 64]
    assert second.seconds == pytest.approx([2.75, 1.65, 3.3])  # as fast in all rounds, whatever the machine did
    assert report.race.rows[0]["peak_memory_gb"] == 4
    curve = [*curves(report)][1]
    assert (curve["title"], curve["steps"]) == ("Muon", [*STEPS])
    assert curve["seconds"] == pytest.approx([1.1, 2.2, 3.3, 4.4])
    assert curve["loss"] == pytest.approx([23 / 3, 19 / 3, 5, 11.9 / 3])
    texts, caption = race_texts(report)
    assert list(texts["% of gradient_checkpointing's"]) == ["100 (98–never)", "69 (41–82)"]
    assert list(texts["learning rates"]) == ["0.0012", "0.0012, 0.004"]
    assert "3 seeds, too few for a star; 18 tries" in caption and "timed 5 times, alone" in caption


@pytest.mark.parametrize("ends, target", [([6.1, 6.0], 6.1), ([6.104] * 2, 6.11), ([1.1] * 2, 1.1)])
def test_the_target_is_the_median_rounded_up(ends, target, tmp_path):
    """Of two seeds the higher, so that both reach it. 100 * 1.1 is a little more than 110 in floating point."""
    run_race(tmp_path, [ADAMW], **{ADAMW.name: ends})
    found, [racer] = standings(build_report(tmp_path))
    assert found == target and racer.tokens[2] < math.inf


def test_a_race_that_was_stopped_counts_what_came_to_its_end(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES)
    cut(tmp_path / "round_2" / f"{MUON.name}.log", 30)
    assert [f"round_2/{MUON.name}.log" in reason for reason in keep(tmp_path, ORDER)] == [True]
    target, [_, muon] = standings(build_report(tmp_path))
    assert target == 6.0 and muon.tokens == [22.5 * 64, 15 * 64, 30 * 64]
    assert (tmp_path / "race.csv").exists() and (tmp_path / "race.png").exists()
    for path in tmp_path.glob("round_*/*.log"):
        cut(path, 8)
    assert read_logs(tmp_path)[0].names == []  # nothing to compare yet


def test_the_timing_counts_for_seconds_and_the_rounds_only_where_it_is_missing(tmp_path):
    """A rung that has not been timed alone is not compared with one that has: then no timing counts."""
    run_race(tmp_path, [ADAMW, MUON], 3, slow=["timing"], **VAL_LOSSES)
    odd = tmp_path / "timing" / "round_1" / f"{ADAMW.name}.log"  # the median of the three does not mind
    odd.write_text(odd.read_text().replace("dt: 120.0 ms", "dt: 12.0 ms"))
    keep(tmp_path, ORDER)
    report = build_report(tmp_path)
    _, racers = standings(report)
    assert [racer.ms for racer in racers] == [row["ms"] for row in report.race.rows] == pytest.approx([120, 132])
    assert racers[1].seconds == pytest.approx([3.3, 1.98, 3.96])
    assert report.race.rows[0]["first_step_s"] == 0.12
    for path in tmp_path.glob(f"timing/*/{MUON.name}.log"):
        cut(path, 20)
    keep(tmp_path, ORDER)
    report = build_report(tmp_path)
    assert [racer.ms for racer in standings(report)[1]] == [100, 110]
    assert "ms/step of the same runs" in race_texts(report)[1]


def test_a_rung_is_compared_with_the_row_before(tmp_path):
    """Not with the first, and by Holm over the race. A single seed has nothing to compare, three get no star."""
    entries = [ADAMW, MUON, TRAPEZOID]
    ends = {ADAMW.name: [6.0, 6.01, 6.02, 6.0, 6.03], MUON.name: [5.0, 5.01, 5.03, 5.02, 5.01],
            TRAPEZOID.name: [5.01, 5.0, 5.02, 5.01, 5.02]}
    run_race(tmp_path, entries, 5, **ends)
    _, [first, muon, trapezoid] = standings(build_report(tmp_path))
    assert first.p_loss is first.change is None and not first.significant
    pairs = [ttest_rel(ends[b.name], ends[a.name]) for a, b in ((ADAMW, MUON), (MUON, TRAPEZOID))]
    assert muon.p_loss == pytest.approx(2 * pairs[0].pvalue) and trapezoid.p_loss == pytest.approx(pairs[1].pvalue)
    assert muon.change == pytest.approx([-0.998, *pairs[0].confidence_interval(0.95)])
    texts, _ = race_texts(build_report(tmp_path))
    assert list(texts["p"])[:2] == ["–", "<0.001*"] and "*" not in texts["p"][2]
    assert texts["change (95 %)"][1].startswith("−0.998 (−1.0")
    few = {name: losses[:3] for name, losses in ends.items()}
    run_race(tmp_path / "few", entries, 3, **few)
    texts, caption = race_texts(build_report(tmp_path / "few"))
    assert texts["p"][1] == "<0.001" and "3 seeds, too few for a star" in caption
    run_race(tmp_path / "one", entries, 1)
    assert {*race_texts(build_report(tmp_path / "one"))[0]["p"]} == {"–"}


def test_a_seed_that_chose_the_rates_is_not_tested(tmp_path):
    """Older races have it among their rounds."""
    run_race(tmp_path, [ADAMW, MUON], 5, **{MUON.name: [1.0, 3.0, 3.01, 3.02, 3.03]})
    record, _ = read_logs(tmp_path)
    record.points.loc[(record.points.part == "round"), "seed"] -= 1
    write_standings(record, tmp_path / "race.json")
    _, [_, muon] = standings(build_report(tmp_path))
    texts, caption = race_texts(build_report(tmp_path))
    assert muon.val_loss == pytest.approx([3.015, 3.0, 3.03]) and texts["p"][1] == "<0.001"
    assert "4 seeds without 1337, the search's, too few for a star" in caption


def test_a_rung_that_diverges_with_a_seed_is_not_tested(tmp_path):
    """The mean over the other seeds would flatter it."""
    run_race(tmp_path, [ADAMW, MUON], 5, **{MUON.name: [3.0, 3.0, 3.01, 3.02, 3.03]})
    (tmp_path / "round_2" / f"{MUON.name}.log").unlink()
    keep(tmp_path, ORDER)
    _, [_, muon] = standings(build_report(tmp_path))
    assert muon.p_loss is muon.change is None and not muon.significant


def test_the_record_says_what_the_logs_do(tmp_path):
    """Also of a script outside of the ladder; a file of given rates has no search."""
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES)
    for path in tmp_path.rglob(f"{MUON.name}.log"):
        (path.parent / "an_idea.log").write_text(path.read_text().replace(path.stem, "an_idea"))
    rates = json.loads((tmp_path / "rates.json").read_text())
    (tmp_path / "rates.json").write_text(json.dumps(rates | {"an_idea": rates[MUON.name]}))
    cut(tmp_path / "sweep" / "0.0012_0.002" / "1336" / "an_idea.log", 1)
    keep(tmp_path, ORDER)
    by_logs = (tmp_path / "race.json").read_text()
    record = read_csv(tmp_path / "race.csv")
    assert record.sweep["an_idea"][1.2e-3, 2e-3] == math.inf
    write_standings(record, tmp_path / "race.json")
    assert (tmp_path / "race.json").read_text() == by_logs
    _, [_, muon, idea] = standings(build_report(tmp_path))
    assert idea.name == "an_idea" and (idea.tokens, idea.rates) == (muon.tokens, [1.2e-3, 4e-3])
    record = replace(record, points=record.points[record.points.part != "search"])
    write_standings(record, tmp_path / "race.json")
    assert "too few for a star; rates given;" in race_texts(build_report(tmp_path))[1]


def test_the_pictures_of_a_race_in_which_a_rung_never_gets_to_the_target(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES | {MUON.name: [(9, 9, 9, 9)] * 3})
    report = build_report(tmp_path)
    report.setting["data"] = "text (bytes tokens)"
    older = replace(report, race=replace(report.race, facts=dict(report.race.facts)))
    del report.race.facts["total batch"]
    larger = replace(report, name="b", setting=report.setting | {"model": "x9x9"})
    pictures = race_docs.pictures([report, older, larger])
    for name, picture in pictures.items():
        save(picture, tmp_path / name)
    panels = pictures["races.png"]["panels"]
    assert [panel["heading"] for panel in panels] == [
        f"text\n(bytes tokens)\n{model}" for model in ("tiny", "x9x9")]
    for first, never in (panel["bars"] for panel in panels):
        assert first["parts"] == [100] and first["end"] == "100 %"
        assert never["pale"] and never["open"] and never["end"] == "not reached"


def test_the_table_of_older_races_has_the_losses_of_some_rungs(tmp_path):
    """The first one's, those of the newer races' last one, and of the rungs that no newer race has."""
    run_race(tmp_path, [ADAMW, MUON, TRAPEZOID], 3, **VAL_LOSSES | {TRAPEZOID.name: [5.0, 5.1, 5.2]})
    older = build_report(tmp_path)
    first, muon, trapezoid = older.race.racers
    newer = replace(older, race=replace(older.race, racers=[first, muon]))
    lines = race_docs.older_table([older], [newer]).splitlines()
    assert lines[2] == f"| text | seeds | `{first.label}` | `{muon.label}` | `{trapezoid.label}` |"
    assert lines[-1].endswith(" | 3 | 6.000 (5.900–6.100) | 3.967 (3.900–4.000) | 5.100 (5.000–5.200) |")
    newer = replace(older, race=replace(older.race, racers=[first, muon, trapezoid]))
    heading = race_docs.older_table([older], [newer]).splitlines()[2]
    assert heading == f"| text | seeds | `{first.label}` | `{trapezoid.label}` |"


def test_what_docs_shows_of_races_is_up_to_date(tmp_path):
    """Their standings are what the records say, and the table and the pictures what the standings say."""
    records = sorted(ROOT.glob("logs/reference/*/race.csv"))
    for path in records:
        write_standings(read_csv(path), tmp_path / "race.json")
        same = (tmp_path / "race.json").read_bytes() == path.with_name("race.json").read_bytes()
        assert same, f"{path}: run python -m experiments.race_docs"
    races = race_docs.races_of(path.parent for path in records)
    (tmp_path / "docs").mkdir()
    page = race_docs.PAGE
    text = (ROOT / page).read_text(encoding="utf-8")
    empty = re.sub(r"(?s)(<!-- race:begin -->\n).*(<!-- race:end)", r"\1\2", text)
    (tmp_path / page).write_text(empty, encoding="utf-8")
    race_docs.write_tables(races, tmp_path)
    assert (tmp_path / page).read_text(encoding="utf-8") == text, "run python -m experiments.race_docs"
    for name, picture in race_docs.pictures(races).items():
        assert PIL.Image.open(ROOT / "docs" / name).text["Digest"] == digest(picture), name


@pytest.mark.slow
def test_a_race_for_real(tokens, tmp_path, call, monkeypatch):
    """The same command resumes, and repeats nothing of the three parts; with others the folder is refused."""
    monkeypatch.setattr(race_module, "TIMINGS", 2)
    logs, name = tmp_path / "race", ADAMW.name
    words = [str(logs), "--seeds", "1", "--jobs", "2", "--tries", "3", "--rungs", ADAMW.label, *flags(tokens),
             "--total-batch", "32",
             "--val-every", "2", "--val-sequences", "2", "--compile-mode", "none", "--warmup-steps", "0"]
    assert race_module.main(words) == 0
    [racer] = build_report(logs).race.racers
    assert racer.steps == [2, 4] and "3 tries of rates; timed 2 times" in build_report(logs).race.caption
    assert "to the same validation loss" in call("report", logs)[1]
    gone = [logs / "round_1" / f"{name}.log", logs / "timing" / "round_2" / f"{name}.log"]
    for path in gone:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert race_module.main(words) == 0 and all(path.exists() for path in gone)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    with pytest.raises(UserError, match="holds a comparison of other flags"):
        race_module.main([*words, "--steps", "5"])
