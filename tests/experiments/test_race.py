"""A race: the search for learning rates, the seeds, the timing, the standings; on known losses, and for real."""
import json
import math
import re
from dataclasses import replace
from itertools import pairwise

import PIL.Image
import pandas
import pytest
from load_script import ROOT
from run_tool import flags
from scipy.stats import ttest_rel

from experiments import race as race_module
from experiments import race_docs
from experiments.race import keep
from ladder.errors import UserError
from ladder.measure.contest import Contest
from ladder.measure.learning_rates import SEED, default_rates, tuning_seeds
from ladder.records.recipes import read_csv, read_logs, write_csv
from ladder.records.logs import stage_of
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, BY_NAME
from ladder.show.charts import curves
from ladder.show.plots import digest, save
from ladder.show.standings import how_sure, race_texts

ADAMW, MUON, TRAPEZOID = (BY_LABEL[label] for label in ("gradient_checkpointing", "muon", "trapezoid_lr"))
ORDER = [ADAMW.name, MUON.name, "an_idea"]
STEPS = (10, 20, 30, 40)  # of the validations
MS = {MUON.name: 110.0}  # a step of the others takes 100
BEST = {ADAMW.name: (1.2e-3,), MUON.name: (1.2e-3, 4e-3), TRAPEZOID.name: (2.4e-3, 4e-3)}  # of the parabolas
VAL_LOSSES = {ADAMW.name: [6.1, 6.0, 5.9], MUON.name: [(7, 5, 4, 3.9), (8, 7, 5, 4), (8, 7, 6, 4)]}
HEADER = """# script: {0.name}.py
# model: tiny | parameters: 1,250,000
# device: cpu (2 threads)
# total batch: 64 tokens in 1 micro-steps
# batch: B=2 T=32 | steps: 40 | seed: {1}
# data: text
"""


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


def run_race(folder, entries, seeds=2, best=BEST, slow=(), search_steps=None, tries=3, **val_losses):
    """Drive a race whose runs end the better, the closer log2 of each rate is to that of `best[name]`; its jobs.

    A seed of the search finds AdamW's rate the lower, the higher it is; their mean is `best`.
    `val_losses` are those of each round, or a function of (the loss of the search, the job) for all runs. In the
    folders `slow` the machine takes 1.2 times as long.
    """
    done = []

    def run(jobs, at_once=1):
        assert at_once == (1 if jobs and "timing" in jobs[0].log_dir.parts else 2)  # only the timings run alone
        for job in jobs:
            pairs = zip(rates_of(job), best[job.name], strict=True)
            end = 4 + sum(math.log2(float(rate) / middle) ** 2 for rate, middle in pairs)
            if part_of([job], "sweep"):
                middle = sum(tuning_seeds(seeds)) / seeds
                end += 0.2 * (int(flag_of(job, "--seed")) - middle) * math.log2(float(rates_of(job)[0]) / 3e-4)
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
    write_csv(record, folder / "race.csv")
    return done


def part_of(jobs, part):
    """The jobs in the folders sweep, timing, or round."""
    return [job for job in jobs if part in job.log_dir.parts
            or part == "round" and job.log_dir.name.startswith(part) and "timing" not in job.log_dir.parts]


def searched(jobs, entry):
    return [rates_of(job) for job in part_of(jobs, "sweep") if job.name == entry.name]


def test_each_tested_seed_has_a_seed_of_the_search_and_the_rates_that_it_found(tmp_path):
    """A slope k in the loss moves the lowest point of (x - b)^2 by -k / 2 octaves: 0.1 down and up."""
    entries = [ADAMW, MUON, TRAPEZOID]
    jobs = run_race(tmp_path, entries, tries=24)
    assert {(flag_of(job, "--seed"), flag_of(job, "--val-every")) for job in part_of(jobs, "sweep")} == {
        ("1337", "40"), ("1336", "40")}
    rounds, names = part_of(jobs, "round"), [entry.name for entry in entries]
    assert [job.name for job in rounds] == [*names, *names[::-1]]
    assert [int(flag_of(job, "--seed")) for job in rounds] == [1338] * 3 + [1339] * 3
    for job in rounds:
        moved = 2 ** (-0.05 if flag_of(job, "--seed") == "1338" else 0.05)
        first, *others = map(float, rates_of(job))
        assert first == pytest.approx(BEST[job.name][0] * moved, rel=1e-3) and tuple(others) == BEST[job.name][1:]
    record, _ = read_logs(tmp_path)
    assert record.own_searches and {*record.tested.seed} == {SEED, SEED + 1}
    assert record.sweep[MUON.name][1.2e-3, 4e-3] == pytest.approx(4.0)
    rates = build_report(tmp_path).race.table.rates
    assert [rates[name] for name in names] == [pytest.approx(BEST[name], rel=1e-3) for name in names]


def test_neighbors_are_timed_next_to_each_other_in_the_order_abba(tmp_path):
    jobs = part_of(run_race(tmp_path, [ADAMW, MUON, TRAPEZOID]), "timing")
    assert {(flag_of(job, "--steps"), flag_of(job, "--val-every"), flag_of(job, "--seed")) for job in jobs} == {
        ("30", "0", "1338")}
    names = [job.name for job in jobs]
    abba = [name for a, b in pairwise([ADAMW.name, MUON.name, TRAPEZOID.name]) for name in (a, b, b, a)]
    assert names == 3 * abba
    assert [len(list(folder.iterdir())) for folder in tmp_path.glob("timing/*")] == [2] * 12


def test_each_rung_gets_as_many_tries_as_the_longest_search_took(tmp_path):
    """Also one with a single rate; and none more than it may have."""
    jobs = run_race(tmp_path, [ADAMW, MUON, TRAPEZOID], tries=24)
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
    jobs = run_race(tmp_path, [ADAMW], tries=24, **lost)
    [(kept,)] = {rates_of(job) for job in part_of(jobs, "round")}
    assert 5e-4 < float(kept) < 7e-4
    jobs = run_race(tmp_path, [ADAMW], tries=24)
    assert part_of(jobs, "sweep") == [] and {rates_of(job) for job in part_of(jobs, "round")} == {(kept,)}
    with pytest.raises(UserError, match="no run of beyond/.*/6_gradient.* ended with a loss"):
        run_race(tmp_path / "all", [ADAMW], **{ADAMW.name: lambda end, job: "inf"})


def test_standings_are_means_of_the_losses_and_medians_of_the_times(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, slow=["round_3"], **VAL_LOSSES)
    report = build_report(tmp_path)
    first, second = report.race.table.itertuples()
    assert (first.val_loss, first.val_low, first.val_high) == (6.0, 5.9, 6.1)
    assert (second.val_loss, second.val_low, second.val_high) == pytest.approx((11.9 / 3, 3.9, 4))
    assert (first.ms, first.ms_low, first.ms_high) == (100, 100, 120)  # one round of six was slow
    assert math.exp(second.times.mean) == pytest.approx(1.1)  # of both, so that the ratio holds
    curve = [*curves(report)][1]
    assert (curve["title"], curve["steps"]) == ("Muon", [*STEPS])
    assert curve["loss"] == pytest.approx([23 / 3, 19 / 3, 5, 11.9 / 3])
    assert (curve["low"][0], curve["high"][0]) == (7, 8)
    texts, caption = race_texts(report)
    assert list(texts["val loss (range)"]) == ["6.000 (5.900–6.100)", "3.967 (3.900–4.000)"]
    assert "3 seeds" in caption and "3 tries" in caption and "6 rounds" in caption


def test_a_race_that_was_stopped_counts_what_came_to_its_end(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES)
    assert keep(tmp_path, ORDER) == [] and (tmp_path / "race.png").exists()
    cut(tmp_path / "round_2" / f"{MUON.name}.log", 30)
    cut(tmp_path / "timing" / "round_3" / f"{MUON.name}.log", 10)
    assert ["round_2" in reason or "round_3" in reason for reason in keep(tmp_path, ORDER)] == [True, True]
    muon = build_report(tmp_path).race.table.loc[MUON.name]
    assert muon.val_loss == pytest.approx(3.95) and muon.change is None and muon.times.pairs == 5
    for path in tmp_path.glob("round_*/*.log"):
        cut(path, 8)
    assert read_logs(tmp_path)[0].names == []  # nothing to compare yet


def test_times_are_only_those_of_runs_alone(tmp_path):
    """Runs of the rounds share the machine."""
    run_race(tmp_path, [ADAMW, MUON], 3, slow=["timing"], **VAL_LOSSES)
    assert [*build_report(tmp_path).race.table.ms] == pytest.approx([120, 132])
    for path in tmp_path.glob("timing/*/*.log"):
        cut(path, 20)
    keep(tmp_path, ORDER)
    report = build_report(tmp_path)
    texts, caption = race_texts(report)
    assert report.race.table.ms.isna().all() and "not timed" in caption
    assert not any("ms" in heading for heading in texts)


def test_a_rung_is_compared_with_the_row_before(tmp_path):
    """Not with the first, and by Holm over the race. A single seed has nothing to compare, three get no star."""
    entries = [ADAMW, MUON, TRAPEZOID]
    ends = {ADAMW.name: [6.0, 6.01, 6.02, 6.0, 6.03], MUON.name: [5.0, 5.01, 5.03, 5.02, 5.01],
            TRAPEZOID.name: [5.01, 5.0, 5.02, 5.01, 5.02]}
    run_race(tmp_path, entries, 5, **ends)
    first, muon, trapezoid = build_report(tmp_path).race.table.change
    pairs = [ttest_rel(ends[b.name], ends[a.name]) for a, b in ((ADAMW, MUON), (MUON, TRAPEZOID))]
    assert first is None and muon.p == pytest.approx(2 * pairs[0].pvalue)
    assert trapezoid.p == pytest.approx(pairs[1].pvalue)
    for effect, pair in zip((muon, trapezoid), pairs, strict=True):  # two tests of 0.5 % each
        assert (effect.low, effect.high) == pytest.approx(pair.confidence_interval(0.995))
    texts, _ = race_texts(build_report(tmp_path))
    assert list(texts["p"])[:2] == ["–", "<0.001*"] and "*" not in texts["p"][2]
    assert texts["− the row before (99 %)"][1].startswith("−0.998 (−1.0")
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
    write_csv(record, tmp_path / "race.csv")
    report = build_report(tmp_path)
    muon, (texts, caption) = report.race.table.loc[MUON.name], race_texts(report)
    assert (muon.val_loss, muon.val_low) == pytest.approx((3.015, 3.0)) and texts["p"][1] == "<0.001"
    assert "4 seeds without 1337, the search's, too few for a star" in caption


def test_a_rung_that_diverges_with_a_seed_is_not_tested(tmp_path):
    """The mean over the other seeds would flatter it."""
    run_race(tmp_path, [ADAMW, MUON], 5, **{MUON.name: [3.0, 3.0, 3.01, 3.02, 3.03]})
    (tmp_path / "round_2" / f"{MUON.name}.log").unlink()
    keep(tmp_path, ORDER)
    assert build_report(tmp_path).race.table.change[MUON.name] is None


def test_a_star_that_a_check_removed_is_marked(tmp_path):
    ends = {ADAMW.name: [6.0, 6.01, 6.02, 6.0, 6.03], MUON.name: [5.0, 5.01, 5.03, 5.02, 5.01]}
    run_race(tmp_path, [ADAMW, MUON], 5, **ends)
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {}, "refuted": {MUON.name: "not with other rates"}}))
    texts, caption = race_texts(build_report(tmp_path))
    assert texts["p"][1] == "<0.001*†" and caption.endswith("† not with other rates.")


@pytest.mark.parametrize("tries, seeds, said", [(3, 2, "include only a part of the luck"), (3, 1, "leave out the luck"),
                                                (0, 2, "apply to these learning rates only")])
def test_it_is_said_whether_p_holds_the_luck_of_the_search(tries, seeds, said, tmp_path):
    """It does not where one pair of rates serves all seeds, as in older races."""
    run_race(tmp_path, [ADAMW, MUON], 4, tries=tries, **{MUON.name: [5.0, 5.01, 5.03, 5.02]})
    record, _ = read_logs(tmp_path)
    search = record.points.part == "search"
    left = record.points[~search | record.points.seed.isin(range(1338 - 2 * seeds, 1338))]
    assert said in how_sure(replace(record, points=left))


def test_the_record_says_what_the_logs_do(tmp_path):
    """Also of a script outside of the ladder; a file of given rates has no search."""
    run_race(tmp_path, [ADAMW, MUON], 3, tries=24, **VAL_LOSSES)
    for path in tmp_path.rglob(f"{MUON.name}.log"):
        (path.parent / "an_idea.log").write_text(path.read_text().replace(path.stem, "an_idea"))
    rates = json.loads((tmp_path / "rates.json").read_text())
    (tmp_path / "rates.json").write_text(json.dumps(rates | {"an_idea": rates[MUON.name]}))
    cut(tmp_path / "sweep" / "0.0012_0.002" / "1336" / "an_idea.log", 1)
    keep(tmp_path, ORDER)
    record, known = read_csv(tmp_path / "race.csv"), read_logs(tmp_path, ORDER)[0]
    pandas.testing.assert_frame_equal(record.points, known.points, check_dtype=False)
    assert record.facts == known.facts and record.sweep["an_idea"][1.2e-3, 2e-3] == math.inf
    table = build_report(tmp_path).race.table
    assert table.val_loss["an_idea"] == table.val_loss[MUON.name] and table.rates["an_idea"] == table.rates[MUON.name]
    write_csv(replace(record, points=record.points[record.points.part != "search"]), tmp_path / "race.csv")
    assert "too few for a star; learning rates not searched;" in race_texts(build_report(tmp_path))[1]


def test_the_picture_of_races_has_the_effects_and_their_intervals(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES)
    report = build_report(tmp_path)
    report.setting["data"] = "text (bytes tokens)"
    record = report.race
    older, newer = (replace(report, race=replace(record, facts=facts))
                    for facts in (record.facts, {"model": "tiny"}))
    larger = replace(newer, name="b", setting=report.setting | {"model": "x9x9"})
    pictures = race_docs.pictures([newer, older, larger])
    for name, picture in pictures.items():
        save(picture, tmp_path / name)
    panels = pictures["races.png"]["panels"]
    assert [panel["heading"] for panel in panels] == [
        f"text\n(bytes tokens)\n{model}" for model in ("tiny", "x9x9")]
    effect = report.race.table.change[MUON.name]
    for [bar] in (panel["bars"] for panel in panels):  # nothing stands before the first row
        assert (bar["parts"], bar["low"], bar["high"]) == ([effect.mean], effect.low, effect.high)


def test_the_table_of_older_races_has_the_losses_of_some_rungs(tmp_path):
    """The first one's, those of the newer races' last one, and of the rungs that no newer race has."""
    run_race(tmp_path, [ADAMW, MUON, TRAPEZOID], 3, **VAL_LOSSES | {TRAPEZOID.name: [5.0, 5.1, 5.2]})
    older = build_report(tmp_path)
    first, muon, trapezoid = (stage_of(name) for name in older.race.table.name)
    record = older.race
    newer = replace(older, race=replace(record, points=record.points[record.points.rung != TRAPEZOID.name]))
    lines = race_docs.older_table([older], [newer]).splitlines()
    assert lines[2] == f"| text | seeds | `{first.label}` | `{muon.label}` | `{trapezoid.label}` |"
    assert lines[-1].endswith(" | 3 | 6.000 (5.900–6.100) | 3.967 (3.900–4.000) | 5.100 (5.000–5.200) |")
    heading = race_docs.older_table([older], [older]).splitlines()[2]
    assert heading == f"| text | seeds | `{first.label}` | `{trapezoid.label}` |"


def test_what_docs_shows_of_races_is_up_to_date(tmp_path):
    races = race_docs.races_of(path.parent for path in sorted(ROOT.glob("logs/reference/*/race.csv")))
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
def test_a_race_for_real(byte_tokens, tmp_path, call, monkeypatch):
    """The same command resumes, and repeats nothing of the three parts; with others the folder is refused."""
    monkeypatch.setattr(race_module, "TIMINGS", 1)
    logs, name = tmp_path / "race", ADAMW.name
    words = [str(logs), "--seeds", "1", "--jobs", "2", "--tries", "3", "--rungs", ADAMW.label, *flags(byte_tokens),
             "--total-batch", "32", "--val-every", "2", "--val-sequences", "2", "--compile-mode", "none",
             "--warmup-steps", "0"]
    assert race_module.main(words) == 0
    assert {*build_report(logs).race.tested.step} == {2, 4}
    assert "1 seed, too few for a star; 3 tries of learning rates" in " ".join(call("report", logs)[1].split())
    gone = [logs / "round_1" / f"{name}.log", logs / "timing" / "round_2" / f"{name}.log"]
    for path in gone:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert race_module.main(words) == 0 and all(path.exists() for path in gone)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    with pytest.raises(UserError, match="holds a comparison of other flags"):
        race_module.main([*words, "--steps", "5"])
