"""The table of a machine's rungs: its numbers, what it warns of, and where it goes."""
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from load_script import ROOT
from log_files import MEDIAN, write_log
from scipy.stats import ttest_1samp

import ladder.__main__ as tool
from experiments import race_docs
from experiments.growth import __main__ as growth
from ladder import formats
from ladder.count.flops import flops_per_token, mfu
from ladder.records.logs import PEER, PEERS, RUNS
from ladder.records.machine import read_machine
from ladder.records.summary import build_report, check_comparable, warnings
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, BY_NAME
from ladder.show.columns import times_before
from ladder.show.documents import long_table, short_table, write_tables
from ladder.show.facts import floors_of
from ladder.show.plots import all_pictures, digest, draw, heading, pictures_of, shown_in_docs

REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
BASELINE, TIED, FUSED = (BY_LABEL[label].name for label in ("0", "1", "10"))


@pytest.fixture(scope="module")
def reference():
    return [build_report(folder) for folder in REFERENCE]


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


def test_what_is_wrong_with_many_rungs_is_one_line(tmp_path):
    """Of a GPU: too few steps, and logs of children that waited for their turn."""
    for label in ("0", "1", "2"):
        header = HEADER.format("NVIDIA A100", "torch", 6, 1024, 3)
        write_log(tmp_path / "round_1" / f"{BY_LABEL[label].name}.log", header=header, tail=MEDIAN)
        (tmp_path / "round_1" / f"{BY_LABEL[str(int(label) + 4)].name}.log").write_text("# script: waits\n")
    found = list(warnings(build_report(tmp_path)))
    assert sum("150 steps" in text for text in found) == 1 and any("3 rungs: fewer" in text for text in found)
    skipped = [text for text in found if text.startswith("skipped: ")]
    assert len(skipped) == 1 and skipped[0].count(".log") == 3 and "no step line" in skipped[0]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_table_of_a_gpu_names_its_attention_kernel(device, tmp_path, call):
    write_log(tmp_path / f"{BASELINE}.log")
    machine = {"rates": {"bfloat16": 1e15}, "device": device, "attention": "CUDNN_ATTENTION"}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    assert ("CUDNN_ATTENTION" in call("report", tmp_path)[1]) == (device == "cuda")


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


@pytest.mark.parametrize("device, batch, shown", [
    ("NVIDIA H100 80GB HBM3", "B=16 T=1024", True), ("NVIDIA H100 80GB HBM3", "B=8 T=1024", False),
    ("EPYC (2 threads)", "B=16 T=1024", False)])
def test_floors_are_shown_only_for_the_card_and_batch_that_they_were_counted_for(device, batch, shown, tmp_path):
    """An H100's of rung 10: 23.5 ms."""
    write_log(tmp_path / f"{FUSED}.log", header=f"# model: gpt2\n# device: {device}\n# batch: {batch} | steps: 3\n")
    floors = floors_of(build_report(tmp_path))
    assert round(floors["10"], 1) == 23.5 if shown else floors == {}


def test_the_documents_tables_leave_out_a_script_that_the_record_names_otherwise(tmp_path):
    """As a peer that ran with a mask which it no longer has; `report` shows it."""
    for name in (FUSED, "peer_transformers"):
        write_log(tmp_path / f"{name}.log")
    titles = {"peer_transformers": "transformers, with a mask"}
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"float32": 1e12}, "titles": titles}))
    report = build_report(tmp_path)
    assert len(report.rows) == 2
    for table in (short_table(report), long_table(report)):
        assert table.count("| [") == 1 and "mask" not in table


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
    row = rounds(tmp_path, {"ms": [40] * 3}, {"ms": [50] * 3})
    assert tool.main(["report", str(tmp_path), "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert report["rows"] == [pytest.approx(row._asdict())]
    assert tool.main(["report", str(tmp_path), "--csv"]) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.startswith("machine,name,title,ms,ms_low,")
    assert line.startswith(f"{tmp_path.name},baseline,baseline,45.0,40.0,50.0,2,")


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
        check_comparable(report.runs, report.name)
        gone = read_machine(ROOT / "logs" / "reference" / report.name).get("titles", {})  # rungs of then
        assert not report.skipped
        for run in (run for runs in report.runs.values() for run in runs):
            assert run.complete and run.name in {*BY_NAME, *PEERS, *gone}
            assert not report.machine or 0 < mfu(run, report.machine["rates"], run.tokens_per_second) < 1


@pytest.mark.parametrize("ratio, p, text", [
    (1.134, 0.001, "1.13*"), (1.134, 0.01, "1.13"), (1.134, None, "1.13?"), (None, None, "–"),
    (1.0034, 0.004, "1.003*"), (0.9966, 0.004, "0.997*"), (1.0034, 0.2, "1.003"),
])
def test_a_ratio_has_the_mark_of_its_test(ratio, p, text):
    """A significant ratio is never shown as 1.00."""
    assert times_before(SimpleNamespace(times_before=ratio, p_before=p)) == text


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
    picture = next(pictures_of(report)[kind] for report in reference if report.profile)
    for axes, panel in zip(draw(picture).axes, picture["panels"], strict=True):
        curves, bars = panel.get("curves", []), panel.get("bars", [])
        for line, curve in zip(axes.lines, curves, strict=True):
            assert [*line.get_xdata()] == curve[panel["x"]] and [*line.get_ydata()] == curve["loss"]
        rows = panel.get("rows") or [heading(bar) for bar in bars]
        parts = [(rows.index(heading(bar)), sum(bar["parts"][:i]), part)
                 for bar in bars for i, part in enumerate(bar["parts"])]
        drawn = [(one.get_y() + one.get_height() / 2, one.get_x(), one.get_width()) for one in axes.patches]
        assert np.allclose(drawn, parts)
        ends = [segment[:, 0].tolist() for lines in axes.collections for segment in lines.get_segments()]
        assert all([bar["low"], bar["high"]] in ends for bar in bars if "high" in bar)
        assert all([bar["floor"]] * 2 in ends for bar in bars if "floor" in bar)
