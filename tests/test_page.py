"""The tutorial page, in a real browser where there is one: lessons, what they measured, charts, also on a phone."""
import ast
import functools
import html
import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from log_files import write_log
from test_race import ADAMW, MUON, VAL_LOSSES, run_race

from ladder.count.cards import CARDS
from ladder.count.floor import floor_data
from ladder.count.published import read_published
from ladder.rungs.list import BY_LABEL, RUNGS
from ladder.show import page as page_module
from ladder.show.charts import KIND_COLORS
from ladder.show.drawings import drawings
from ladder.show.exercises import exercise_html, read_exercises, read_printed
from ladder.show.page import write_page
from ladder.show.report import build_report

PAGE = ROOT / "docs" / "index.html"
REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = pytest.mark.parametrize("width", [1400, 390])

# Three invented machines. Milliseconds and GB of each rung:
PROFILED = {"0": (9600, 4.41), "1": (8100, 3.6)}
PLAIN = {"0": (3200, 3.85), "1": (3000, 3.08), "2": (3010, 3.08), "3": (1280, 2.98), "10": (1024, 2.93),
         "ddp": (2560, 3.4)}
LONG = {"15": (1600, 2.15)}
# and of the first one a step by kind of work, and its floor.
PARTS = {"0": (4000, 900, 2500, 1000, 300, 700, 1, 99), "1": (3900, 800, 2000, 900, 200, 100, 2, 98)}
FLOORS = {"0": 4200, "1": 4100}


@pytest.fixture(scope="module", autouse=True)
def each_lesson_once():
    """Three pages are written here, with the same lessons: their diffs are made and colored once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "lesson_view", functools.cache(page_module.lesson_view))
        yield


def write_logs(folder, rungs, batch, model="gpt2"):
    """Logs of 12 steps, 5 of them warm-up, the others around the rung's milliseconds.

    The loss falls from 10 by 0.1 a step, and in rung 15 it is once NaN, which JSON does not have.
    """
    for label, (ms, memory) in rungs.items():
        name, ranks = BY_LABEL[label].name, 2 if label == "ddp" else 1
        times = [3 * ms] * 5 + [ms * (1 + share) for share in (0, -0.02, 0.02, -0.01, 0.01, -0.02, 0.02)]
        losses = ["nan" if (label, i) == ("15", 3) else 10 - i / 10 for i in range(1, 13)]
        header = f"# model: {model}\n# device: cpu\n# batch: {batch}\n# ranks: {ranks}\n"
        write_log(folder / f"{name}.log", times, losses, header,  # and what the runner adds to it
                  f"\nmedian : dt: {ms} ms | tokens/sec: 1 | steps 6-12\n# machine: AMD EPYC (2 threads) | allocator: "
                  f"mimalloc | process memory: {memory} GB\n")
    return folder


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    root = tmp_path_factory.mktemp("logs")
    folders = [write_logs(root / "profiled", PROFILED, "B=1 T=1024"), write_logs(root / "plain", PLAIN, "B=2 T=256"),
               write_logs(root / "long", LONG, "B=8 T=256", "small")]
    (root / "profiled" / "profile.json").write_text(json.dumps({
        "model": "gpt2", "B": 1, "T": 1024, "steps": 3, "name": "AMD EPYC", "device": "cpu", "torch": "2.13.0+cpu",
        "rates": {"float32": 1.8e11}, "rungs": [
            {"name": BY_LABEL[label].name, "step_ms": sum(parts), "plain_ms": sum(parts) - 50,
             "floor_ms": FLOORS[label], "parts_ms": dict(zip(KIND_COLORS, parts, strict=True))}
            for label, parts in PARTS.items()]}))
    return [build_report(folder) for folder in folders]


def text_of(markup):
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def lesson_of(entry):
    """The committed page's section for a rung."""
    text = PAGE.read_text(encoding="utf-8")
    return re.search(rf'<section class="lesson" id="rung-{entry.label}".*?</section>', text, re.S)[0]


def test_the_page_is_one_file_with_every_lesson_and_its_diff():
    assert PAGE.stat().st_size < 1_000_000
    for entry in RUNGS:
        section = lesson_of(entry)
        assert entry.file in section
        # without the lines that the diff takes away and adds, the two scripts are the same
        after = entry.path.read_text()
        before = entry.start.path.read_text() if entry.start else after
        left = []
        for source, css in ((before, "del"), (after, "ins")):
            lines = dict(enumerate(source.splitlines(), 1))
            for number, row in re.findall(rf"<tr class={css}><td>(\d+)<td[^>]*>(.*)", section):
                assert lines.pop(int(number)) == text_of(row)
            docstring_ends = ast.parse(source).body[0].end_lineno
            left.append([line for number, line in lines.items() if number > docstring_ends])
        assert left[0] == left[1]


def test_the_committed_page_is_up_to_date(tmp_path):
    """Made again from the scripts and logs, it is the same to the byte."""
    write_page([build_report(folder) for folder in REFERENCE], tmp_path / "index.html")
    same = (tmp_path / "index.html").read_bytes() == PAGE.read_bytes()
    assert same, "run python -m ladder page"


def test_previous_and_next_are_the_trees():
    """Of each lesson; and each rung has one link in the contents and one in the tree."""
    text = PAGE.read_text(encoding="utf-8")
    for entry in RUNGS:
        section = lesson_of(entry)
        ways = re.search('<nav class="ways".*?</nav>', section, re.S)[0].split("</div>")
        expected = [[start.label for start in entry.starts]] if entry.starts else []
        expected.append([other.label for other in RUNGS if entry in other.starts])
        assert [re.findall(r'href="#rung-(\w+)"', part) for part in ways[:-1]] == expected, entry.label
        assert "Starts from" not in section or section.count("Starts from") == 1  # with a link, above the text
    for place in ("contents", "tree"):
        links = re.findall(r'href="#rung-(\w+)"', re.search(rf'<nav id="{place}".*?</nav>', text, re.S)[0])
        assert links == [entry.label for entry in RUNGS]


def test_its_exercise_and_what_a_rung_prints_stand_in_its_lesson():
    exercises = read_exercises()
    for entry in RUNGS:
        section = lesson_of(entry)
        assert ('<div class="exercise">' in section) == (entry.label in exercises)
        assert entry.label not in exercises or exercise_html(exercises[entry.label]) in section
        printed = read_printed()[entry.label]
        lines = re.search(r'<details class="printed">.*?<pre[^>]*><code>(.*?)</code>', section, re.S)[1]
        assert text_of(lines).splitlines() == [*printed["first"], "…", *printed["last"]]


def test_a_long_curve_keeps_its_ends():
    steps = page_module.thinned({"title": "x", "steps": list(range(1, 4501))})["steps"]
    assert (steps[0], steps[-1]) == (1, 4500) and len(steps) <= page_module.MAX_POINTS + 1


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # a test may run as root
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(machines, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "index.html"
    write_page(machines[1:] + machines[:1], path)
    return path


@pytest.fixture
def open_page(chromium, file):
    """open_page(width) shows the page in a new window, which must neither complain nor fetch anything."""
    contexts, complaints = [], []

    def opened(width=1400, path=file, **options):
        phone = width < 600
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, is_mobile=phone,
                                             has_touch=phone, reduced_motion="reduce", **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "assert") else None)
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert all(complaint.startswith((file.parent.parent.as_uri(), "data:,")) for complaint in complaints), complaints


def in_sight(page, selector):
    return page.evaluate("""selector => { const box = document.querySelector(selector).getBoundingClientRect();
        return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; }""", selector)


def effect(page, label):
    """{row: [cells]} of what a lesson measured."""
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator(f"#rung-{label} .effect tr").all()]
    return {row[0].strip(): row[1:] for row in rows}


# [[kind, left, width], ...] of the bars inside of an element, in pixels.
BARS = """selector => [...document.querySelectorAll(selector + " .bar")].map(bar =>
    [...bar.querySelectorAll("i")].map(i => {
        const [box, whole] = [i.getBoundingClientRect(), bar.getBoundingClientRect()];
        return [i.dataset.kind || i.className, box.x - whole.x, box.width];
    }))"""


def test_the_picture_and_the_effects_are_the_profile(open_page):
    page = open_page()
    assert page.locator("#machine").input_value() == "plain"  # where the ladder gains most
    page.locator("#machine").select_option("profiled")
    for selector in ("#picture", "#rung-1 .effect"):
        bars = page.evaluate(BARS, selector)
        scale = bars[0][0][2] / PARTS["0"][0]  # pixels per millisecond
        for bar, label in zip(bars, PARTS, strict=True):
            assert [kind for kind, *_ in bar] == [*KIND_COLORS, "floor"]
            assert [size for *_, size in bar[:-1]] == pytest.approx([scale * ms for ms in PARTS[label]], abs=1)
            assert bar[-1][1] == pytest.approx(scale * FLOORS[label], abs=2)
    totals = page.locator("#picture .bar b")
    for expected in (["2,500", "2,000"], ["9,500", "8,000"]):  # this one alone, and all again
        page.locator(".legend button", has_text="attention").click()
        assert totals.all_inner_texts() == expected
    rows = effect(page, "1")
    assert rows["ms/step"] == ["9,600", "8,100", "−1,500"]
    assert rows["tokens/sec"] == ["107", "126", "×1.19"]
    assert rows["memory, GB"] == ["4.41", "3.60", "−0.81"]
    assert rows["loss at step 12"] == ["8.800", "8.800", ""]
    assert rows["attention"] == ["2,500", "2,000", "−500"]
    assert rows["matrix products"] == ["4,000", "3,900", ""]  # less than 2 % of a step
    page.locator("#picture .bar >> nth=1").locator("[data-kind=optimizer]").hover()
    assert page.locator("#tip .strong td").all_inner_texts() == ["optimizer", "100 ms, 1 %"]


def test_the_page_s_gains_are_those_of_the_readme():
    """By the paired test, not by whether spreads overlap."""
    report = build_report(ROOT / "logs" / "reference" / "nvidia_h100_80gb_hbm3_B16_T1024")
    rows = {row["label"]: row for row in page_module.rows_data(report)}
    starred = re.findall(r"^\| \[`(\w+)\.py`.*\d\*", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert [BY_LABEL[label].name for label, row in rows.items() if row["differs"]] == starred
    assert len(starred) == 5 and rows["0"]["p"] is None


def test_the_chosen_machine_is_the_whole_pages_and_remembered(open_page):
    page = open_page()
    page.select_option("#machine", "profiled")
    page.reload()
    assert page.locator("#machine").input_value() == "profiled"
    page.select_option("#machine", "plain")
    assert page.locator("#picture .bar b").all_inner_texts() == ["160", "171", "170", "400", "500", "400"]
    assert "3.1 times as many tokens" in page.locator("#picture").inner_text()
    assert effect(page, "3")["tokens/sec"] == ["170", "400", "×2.35"]
    assert effect(page, "10")["ms/step"] == ["1,024"]  # rung 9 was not measured
    assert "attention" not in effect(page, "3") and page.locator("#rung-3 .bar").count() == 0
    assert "Too few rounds" in page.locator("#rung-3 .effect").inner_text()
    assert "A step reads 1,024 tokens, in rung 10 512." in page.locator("#rung-ddp .effect").inner_text()
    # a lesson that this machine did not measure shows another, and says so
    measured = page.locator("#rung-15 .effect").inner_text()
    assert "Measured on AMD EPYC (2 cores, allocator: mimalloc), small, B=8 T=256" in measured
    assert effect(page, "15")["ms/step"] == ["1,600"]
    assert "Not on any machine yet" in page.locator("#rung-5 .effect").inner_text()


def test_the_chosen_card_has_its_counted_floors_and_published_figures(open_page):
    """Of each lesson; the lecture's steps are an A100's."""
    page = open_page()
    for card, published in (("A100", ["333", "300", "−33"]), ("T4", None), ("RTX 4090", None)):
        page.select_option("#card", card)
        rungs = {row["label"]: row["ms"][card] for row in floor_data([CARDS[card]], ["2", "3"])["rungs"]}
        rows = effect(page, "3")
        for name, part in (("floor, ms", "floor"), ("its matrix products alone", "products"),
                           ("its memory traffic alone", "traffic")):
            digits = 0 if rungs["3"]["floor"] >= 200 else 1
            assert rows[name][:2] == [f"{rungs[label][part]:,.{digits}f}" for label in ("2", "3")], (card, name)
        assert rows.get("published, ms") == published
        shown = [item.inner_text() for item in page.locator("#published li").all() if item.is_visible()]
        expected = [row["who"] for _, row in read_published().iterrows() if card.startswith(row["card"])]
        assert len(shown) == len(expected) and all(who in text for who, text in zip(expected, shown, strict=True))
    assert "floor, ms" not in effect(page, "ddp")  # counted for one card


def test_the_committed_page_begins_with_a_gpu_beside_its_own_floors(open_page, tmp_path_factory):
    """No step takes less than the least time of its card; beside another card's floors some would."""
    page = open_page(path=Path(shutil.copy(PAGE, tmp_path_factory.mktemp("committed"))))
    for label in map(str, range(1, 11)):
        rows = effect(page, label)
        steps, floors = ([float(text.replace(",", "")) for text in rows[name][:2]] for name in ("ms/step", "floor, ms"))
        assert all(0.5 * step < floor < step for step, floor in zip(steps, floors, strict=True)), label


@WIDTHS
def test_contents_and_machine_stay_in_sight(open_page, width):
    page = open_page(width)
    assert page.evaluate("scrollY") == 0 and in_sight(page, "h1")
    if width < 600:
        page.locator(".menu").tap()
        page.locator('#contents [href="#rung-6"]').tap()
        assert not in_sight(page, "#contents")
    else:
        page.locator('#contents [href="#rung-6"]').click()
        assert in_sight(page, "#contents")
    page.wait_for_function("document.querySelector('#contents [aria-current]')?.getAttribute('href') === '#rung-6'")
    assert in_sight(page, "#machine") and in_sight(page, "#title-6")
    page.reload()  # what the script adds above a place does not push it away
    page.wait_for_function("""() => { const box = document.querySelector("#title-6").getBoundingClientRect();
        return box.top >= 0 && box.bottom <= innerHeight; }""", timeout=30_000)


@WIDTHS
def test_the_tree_shows_branches_apart_and_leads_to_each_rung(open_page, width):
    page = open_page(width)
    dots = {row.locator("a").first.inner_text(): row.locator(".dot").bounding_box()["x"]
            for row in page.locator("#tree div").all()}
    assert dots["0"] < dots["11"] == dots["validation"] == dots["35"] < dots["25"] == dots["26"] < dots["fsdp"]
    page.locator('#tree [href="#rung-31"]').click()
    page.wait_for_function("""() => { const box = document.querySelector("#title-31").getBoundingClientRect();
        return box.top >= 0 && box.bottom <= innerHeight; }""")
    page.locator('#rung-31 .ways [href="#rung-30"]').click()
    page.wait_for_function("location.hash === '#rung-30'")


# For each drawing: [the smallest text's pixels, texts beyond the drawing's sides, pairs of texts that overlap].
TEXTS = """() => [...document.querySelectorAll("figure svg")].map(svg => {
    const texts = [...svg.querySelectorAll("text:not(.digit)")], whole = svg.getBoundingClientRect();
    const boxes = texts.map(text => text.getBoundingClientRect());
    const scale = whole.width / svg.viewBox.baseVal.width;
    const apart = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
    return [Math.min(...texts.map(text => scale * parseFloat(getComputedStyle(text).fontSize))),
        boxes.flatMap((box, i) =>
            box.left < whole.left - 1 || box.right > whole.right + 1 ? [texts[i].textContent] : []),
        boxes.flatMap((a, i) => boxes.slice(i + 1).flatMap((b, j) =>
            apart(a, b) ? [] : [texts[i].textContent + " / " + texts[i + 1 + j].textContent]))];
})"""


@WIDTHS
def test_the_texts_of_drawings_are_legible_and_apart(open_page, width):
    found = open_page(width).evaluate(TEXTS)
    assert len(found) == sum(map(len, drawings().values()))
    for smallest, beyond, overlapping in found:
        assert smallest >= 11.9 and beyond == [] and overlapping == []


def test_a_phone_never_scrolls_sideways(open_page):
    """Not even with everything open."""
    page = open_page(390)
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@WIDTHS
def test_charts_of_the_machines(open_page, width):
    page = open_page(width)
    section = page.locator(".machine").first
    ends = section.locator(".bar b")
    assert ends.all_inner_texts() == ["160", "171", "170", "400", "500", "400"]
    section.get_by_text("memory", exact=True).click()
    assert ends.first.inner_text() == "3.85"
    for by, last in (("step", "12"), ("seconds", "70.4")):  # 5 * 3 * 3.2 + 7 * 3.2
        section.get_by_text(f"loss by {by}").click()
        area = section.locator(".u-over")
        area.click(position={"x": area.bounding_box()["width"] - 1, "y": 100})  # the last point
        lines = section.locator(".u-series").all_inner_texts()
        assert [text.split() for text in lines[:2]] == [[by, last], ["baseline", "8.800"]]
        assert len(lines) == 1 + len(PLAIN)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_race_on_the_page(open_page, tmp_path_factory):
    """The validation losses as a chart, the standings as a table, and in each lesson what its rung reached."""
    folder = tmp_path_factory.mktemp("race")
    run_race(folder / "race", [ADAMW, MUON], 3, **VAL_LOSSES)
    write_page([build_report(folder / "race")], folder / "index.html")
    page = open_page(path=folder / "index.html")
    assert "Muon" in page.locator(".race .chart").inner_text()
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator(".race .scroll tbody tr").all()]
    assert [row[:2] for row in rows] == [["16 gradient checkpointing", "0.0012"], ["18 Muon", "0.0012, 0.004"]]
    assert rows[1][-3:] == ["2.8", "69 (41–82)", "1.25M"]
    assert effect(page, "18")["seconds to 6"] == ["2.8"]  # rung 17, before it, was not in the race
    assert effect(page, "16")["validation loss"] == ["6.000"]
