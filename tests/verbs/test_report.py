"""python -m ladder report: what it shows, and that what is committed is what the logs say."""
import json
import re

import numpy as np
import PIL.Image
import pytest
from fake_race import ADAMW, MUON, VAL_LOSSES, run_race
from load_script import ROOT
from log_files import MEDIAN, write_log

import ladder.__main__ as tool
from experiments import race_docs
from experiments.growth import __main__ as growth
from ladder.count.cards import CARDS
from ladder.count.floors import TIMES_FLOOR, floors_on
from ladder.count.flops import mfu
from ladder.records.logs import RUNS
from ladder.records.machine import read_machine
from ladder.records.summary import build_report
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, BY_NAME, PEERS, rung_of
from ladder.show.documents import long_table, short_table, write_tables
from ladder.show.facts import floors_of, todays_rows
from ladder.show.plots import all_pictures, digest, draw, shown_in_docs

REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
BASELINE, TIED, FUSED = (BY_LABEL[label].name for label in ("0", "1", "10"))


@pytest.fixture(scope="module")
def reference():
    return [build_report(folder) for folder in REFERENCE]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_table_of_a_gpu_names_its_attention_kernel(device, tmp_path, call):
    write_log(tmp_path / f"{BASELINE}.log")
    machine = {"rates": {"bfloat16": 1e15}, "device": device, "attention": "CUDNN_ATTENTION"}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    assert ("CUDNN_ATTENTION" in call("report", tmp_path)[1]) == (device == "cuda")


@pytest.mark.parametrize("device, batch, shown", [
    ("NVIDIA H100 80GB HBM3", "B=16 T=1024", True), ("NVIDIA H100 80GB HBM3", "B=8 T=1024", False),
    ("EPYC (2 threads)", "B=16 T=1024", False)])
def test_floors_are_shown_only_for_the_card_and_batch_that_they_were_counted_for(device, batch, shown, tmp_path):
    """An H100's of rung 10: 23.5 ms."""
    write_log(tmp_path / f"{FUSED}.log", header=f"# model: gpt2\n# device: {device}\n# batch: {batch} | steps: 3\n")
    floors = floors_of(build_report(tmp_path))
    assert round(floors["10"], 1) == 23.5 if shown else floors == {}


def test_a_script_that_computes_something_else_since_its_record_is_marked(tmp_path, call):
    """By its name of today or of then; not one that is as it was, nor one whose code the record does not know."""
    old = {FUSED: "0" * 16, "rung_18_muon": "0" * 16, BASELINE: code_of([BY_LABEL["0"]])[BASELINE]}
    for name in (*old, TIED):
        write_log(tmp_path / f"{name}.log")
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"float32": 1e12}, "code": old}))
    report = build_report(tmp_path)
    assert [row.name for row in report.rows if row.older_code] == [FUSED, BY_LABEL["muon"].name]
    for text in (short_table(report), long_table(report), call("report", tmp_path)[1]):
        assert text.count("‡") == 3  # the caption's, too
    (tmp_path / "machine.json").unlink()
    assert "‡" not in call("report", tmp_path)[1]


def test_csv_and_json_have_every_number_of_a_row(tmp_path, capsys):
    for number, ms in ((1, 40), (2, 50)):
        write_log(tmp_path / f"round_{number}" / f"{BASELINE}.log", ms=[ms] * 3)
    row = build_report(tmp_path).rows[0]
    assert tool.main(["report", str(tmp_path), "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert report["rows"] == [pytest.approx(row._asdict())]
    assert tool.main(["report", str(tmp_path), "--csv"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.startswith("machine,name,title,ms,ms_low,")
    assert line.startswith(f"{tmp_path.name},baseline,baseline,45.0,40.0,50.0,2,")


def test_csv_and_json_have_the_effects_of_a_race(tmp_path, capsys):
    """The ratio of the times, not its logarithm; nothing for the first row, which has none before it."""
    run_race(tmp_path, [ADAMW, MUON], 3, **VAL_LOSSES)
    row = build_report(tmp_path).race.race_table.loc[MUON.name]
    assert tool.main(["report", str(tmp_path), "--json"]) == 0
    [[first, muon]] = [report["rows"] for report in json.loads(capsys.readouterr().out)]
    assert (muon["name"], muon["max_lr"], muon["muon_lr"]) == (MUON.name, *row.rates)
    assert [muon[key] for key in ("change", "change_low_99", "change_high_99", "change_p", "times")] == pytest.approx(
        [row.change.mean, row.change.low, row.change.high, row.change.p, 1.1])
    assert first["change"] is None and first["muon_lr"] is None and first["val_loss"] == 6.0
    assert tool.main(["report", str(tmp_path), "--csv"]) == 0
    heading, _, line = capsys.readouterr().out.splitlines()
    assert heading.split(",") == ["machine", *muon] and line.startswith(f"{tmp_path.name},{MUON.name},")


def test_without_folders_plots_show_the_newest_run_and_the_page_the_reference_machines(tmp_path, monkeypatch, call):
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ladder.records.logs.REFERENCE", tmp_path / "reference")
    monkeypatch.setattr("ladder.verbs.page.write_page", lambda reports, path: made.extend(one.name for one in reports))
    for name in ("an_epyc", "a_t4"):
        write_log(tmp_path / "reference" / name / f"{BASELINE}.log")
    write_log(RUNS / "mine" / f"{BASELINE}.log", tail=MEDIAN)
    (RUNS / "mine" / "machine.json").write_text('{"rates": {"x": 1}}')
    assert call("report", "--png", tmp_path / "png")[0] == 0
    report = build_report(RUNS / "mine")
    drawn = {path.name: PIL.Image.open(path).text["Digest"] for path in (tmp_path / "png").iterdir()}
    assert drawn and drawn == {name: digest(picture) for name, picture in all_pictures([report]).items()}
    (tmp_path / "page.html").touch()
    assert call("page", "--out", tmp_path / "page.html")[0] == 0
    assert made == ["a_t4", "an_epyc"]


def test_the_reference_logs_are_possible(reference):
    for report in [report for report in reference if not report.race]:
        gone = read_machine(ROOT / "logs" / "reference" / report.name).get("titles", {})  # rungs of then
        assert not report.skipped
        for run in (run for runs in report.runs.values() for run in runs):
            assert run.complete and run.name in {*BY_NAME, *PEERS, *gone}
            assert not report.machine or 0 < mfu(run, report.machine["rates"], run.tokens_per_second) < 1


def test_what_a_step_takes_of_its_floor_is_what_the_records_and_the_lecture_say(reference):
    floors = floors_on(CARDS["A100"])
    ratios = [rung.lecture_ms / floors[rung.label] for rung in BY_NAME.values() if rung.lecture_ms]
    for report in reference:
        floors = floors_of(report)
        ratios += [row.ms / floors[rung_of(row.name).label] for row in todays_rows(report)
                   if rung_of(row.name).label in floors]
    assert (min(ratios), max(ratios)) == pytest.approx(TIMES_FLOOR, abs=1e-4)


def test_every_generated_table_is_up_to_date(tmp_path, reference):
    """All that `report --readme` rewrites is what the committed logs say. The races: test_race.py."""
    for folder in ("docs", "beyond"):
        (tmp_path / folder).mkdir()
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "beyond" / "README.md"]
    marked = [path.relative_to(ROOT) for path in paths
              if re.search("^<!-- (ladder|scripts):begin -->", path.read_text(encoding="utf-8"), re.M)]
    for file in marked:
        text = (ROOT / file).read_text(encoding="utf-8")
        text = re.sub(r"(?ms)(^<!-- (?:ladder|scripts):begin -->\n).*?^(<!-- )", r"\1\2", text)
        (tmp_path / file).write_text(text, encoding="utf-8")
    write_tables(reference, tmp_path)
    assert len(marked) == 3
    for file in marked:
        same = (tmp_path / file).read_text(encoding="utf-8") == (ROOT / file).read_text(encoding="utf-8")
        assert same, f"{file}: run python -m ladder report --readme"


def test_every_picture_is_shown_and_up_to_date(reference):
    """A picture's file has the digest of its data."""
    pictures, shown = all_pictures(reference), shown_in_docs(ROOT)
    assert {path.name for path in ROOT.glob("docs/*.png")} == shown
    record = (ROOT / "docs" / "growth.csv").read_text(encoding="utf-8")
    drawn = pictures | dict.fromkeys((growth.LENGTH, growth.MEMORY), record)
    for name in shown - {race_docs.RACES}:
        same = PIL.Image.open(ROOT / "docs" / name).text["Digest"] == digest(drawn[name])
        assert same, f"docs/{name}: run python -m ladder report --readme, or experiments.growth for growth_*.png"


@pytest.mark.parametrize("kind", ["loss", "step", "profile"])
def test_a_drawing_has_the_numbers_of_its_picture(kind, reference):
    """Each curve over the panel's x; each bar in its row, its parts end to end, with its spread and its floor."""
    profiled = next(report for report in reference if report.profile)
    picture = all_pictures([profiled])[f"{profiled.name}_{kind}.png"]
    for axes, panel in zip(draw(picture).axes, picture.panels, strict=True):
        for line, curve in zip(axes.lines, panel.curves, strict=True):
            assert [*line.get_xdata()] == curve.x and [*line.get_ydata()] == curve.losses
        parts = [(place, sum(bar.parts[:i]), part) for place, bar in enumerate(panel.bars)
                 for i, part in enumerate(bar.parts)]
        drawn = [(one.get_y() + one.get_height() / 2, one.get_x(), one.get_width()) for one in axes.patches]
        assert np.allclose(drawn, parts)
        ends = [segment[:, 0].tolist() for lines in axes.collections for segment in lines.get_segments()]
        assert all([*bar.spread] in ends for bar in panel.bars if bar.spread)
        assert all([bar.floor] * 2 in ends for bar in panel.bars if bar.floor)
