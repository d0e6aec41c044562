"""A race: the search for learning rates, the seeds, the timing, the standings; on known losses, and for real."""
import json
import math
import re
from dataclasses import replace

import pandas
import PIL.Image
import pytest
from fake_race import ADAMW, MUON, ORDER, VAL_LOSSES, cut, run_race
from load_script import ROOT
from run_tool import flags, run_jobs_here

from experiments import race as race_module
from experiments import race_docs
from experiments.race import keep
from ladder.errors import UserError
from ladder.measure import runner
from ladder.records.recipes import read_csv, read_logs, write_csv
from ladder.records.summary import build_report
from ladder.show.plots import digest
from ladder.show.standings import race_caption


def test_a_race_that_was_stopped_counts_what_came_to_its_end(tmp_path):
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES)
    assert keep(tmp_path, ORDER) == [] and (tmp_path / "race.png").exists()
    cut(tmp_path / "round_2" / f"{MUON.name}.log", 30)
    cut(tmp_path / "timing" / "round_3" / f"{MUON.name}.log", 10)
    assert ["round_2" in reason or "round_3" in reason for reason in keep(tmp_path, ORDER)] == [True, True]
    muon = build_report(tmp_path).race.race_table.loc[MUON.name]
    assert muon.val_loss == pytest.approx(3.95) and muon.change is None and muon.times.pairs == 5
    for path in tmp_path.glob("round_3/*.log"):
        path.unlink()
    keep(tmp_path, ORDER)
    report = build_report(tmp_path)
    assert report.race.planned == 3 and "2 of 3 seeds" in race_caption(report)
    for path in tmp_path.glob("round_*/*.log"):
        cut(path, 8)
    assert read_logs(tmp_path)[0].names == []  # nothing to compare yet


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
    assert record.facts == known.facts
    assert record.tried("an_idea").set_index(["max_lr", "muon_lr"]).val_loss[1.2e-3, 2e-3] == math.inf
    table = build_report(tmp_path).race.race_table
    assert table.val_loss["an_idea"] == table.val_loss[MUON.name] and table.rates["an_idea"] == table.rates[MUON.name]
    write_csv(replace(record, points=record.points[record.points.part != "search"]), tmp_path / "race.csv")
    assert "too few for a star; learning rates not searched;" in race_caption(build_report(tmp_path))


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
    with monkeypatch.context() as here:  # what is resumed runs in processes of its own
        here.setattr(runner, "run_jobs", run_jobs_here)
        assert race_module.main(words) == 0
    assert {*build_report(logs).race.tested.step} == {2, 4}
    assert "1 seed, too few for a star; 3 tries of learning rates" in " ".join(call("report", logs)[1].split())
    gone = [logs / "round_1" / f"{name}.log", logs / "timing" / "round_2" / f"{name}.log"]
    for path in gone:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert race_module.main(words) == 0 and all(path.exists() for path in gone)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    with pytest.raises(UserError, match="holds a comparison with other flags"):
        race_module.main([*words, "--steps", "5"])
