"""The tutorial page: made from invented machines, then read, and looked at in a real browser where there is one."""
import html
import json
import re
import shutil

import pytest
from fake_race import ADAMW, MUON, VAL_LOSSES, run_race
from load_script import ROOT
from log_files import write_log
from run_tool import is_one_error
from test_documents import anchors_of

from ladder.count.cards import CARDS
from ladder.count.floors import floors_on, stored_floors
from ladder.records.summary import build_report
from ladder.rungs.lessons import split_docstring
from ladder.rungs.list import BY_LABEL, RUNGS
from ladder.show import html_page
from ladder.show.charts import KIND_COLORS
from ladder.rungs.lessons import read_exercises
from ladder.show.html_page import PAGE, write_page
from ladder.verbs import page as page_verb

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
PICTURES = [*html_page.HERE.glob("pictures/*.svg")]

# Two invented machines. Milliseconds and GB of each rung:
PROFILED = {"0": (9600, 4.41), "1": (8100, 3.6)}
PLAIN = {"0": (3200, 3.85), "1": (3000, 3.08), "3": (1280, 2.98), "10": (1024, 2.93), "ddp": (2560, 3.4)}
# and of the first one a step by kind of work, and its floor.
PARTS = {"0": (4000, 900, 2500, 1000, 300, 700, 1, 99), "1": (3900, 800, 2000, 900, 200, 100, 2, 98)}
FLOORS = {"0": 4200, "1": 4100}


def write_logs(folder, rungs, batch):
    """Logs of 12 steps, 5 of them warm-up; the loss falls from 10 by 0.1 a step, and rung 10's ends as NaN."""
    for label, (ms, memory) in rungs.items():
        losses = [10 - i / 10 for i in range(1, 12)] + ["nan" if label == "10" else 8.8]
        header = (f"# model: gpt2\n# device: NVIDIA A100-SXM4-40GB\n# batch: {batch}\n"
                  f"# ranks: {2 if label == 'ddp' else 1}\n")
        write_log(folder / f"{BY_LABEL[label].name}.log", [3 * ms] * 5 + [ms] * 7, losses, header,
                  f"\nmedian : dt: {ms} ms | tokens/sec: 1 | peak memory: {memory} GB | steps 6-12\n")
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The page of the two machines and of a race."""
    root = tmp_path_factory.mktemp("page")
    folders = [write_logs(root / "profiled", PROFILED, "B=1 T=1024"), write_logs(root / "plain", PLAIN, "B=16 T=1024")]
    (root / "profiled" / "profile.json").write_text(json.dumps({
        "model": "gpt2", "B": 1, "T": 1024, "steps": 3, "name": "a CPU", "device": "cpu", "torch": "2.13.0+cpu",
        "rates": {"float32": 1.8e11}, "rungs": [
            {"name": BY_LABEL[label].name, "step_ms": sum(parts), "plain_ms": sum(parts) - 50,
             "products_ms": FLOORS[label], "parts_ms": dict(zip(KIND_COLORS, parts, strict=True))}
            for label, parts in PARTS.items()]}))
    run_race(root / "race", [ADAMW, MUON], 3, **VAL_LOSSES)
    path = root / "some" / "where" / "index.html"
    write_page([build_report(folder) for folder in (*folders, root / "race")], path)
    return path


@pytest.fixture(scope="module")
def text(file):
    return file.read_text(encoding="utf-8")


def lesson_of(text, label):
    return re.search(rf'<section class="lesson" id="rung-{label}".*?</section>', text, re.S)[0]


def plain(markup):
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


# ---- what is written -------------------------------------------------------------------------------------------------

def test_the_committed_page_has_each_lesson():
    lessons = re.findall(r'<section class="lesson" id="rung-(\w+)"', PAGE.read_text(encoding="utf-8"))
    assert lessons == [rung.label for rung in RUNGS], "run python -m ladder page"


def body_of(rung):
    return split_docstring(rung.path.read_text(encoding="utf-8"))[1]


def test_each_diff_makes_the_script_from_the_one_before(text):
    """Its hunks, applied like a patch."""
    shown = 0
    for rung in RUNGS[1:]:
        found = re.search(r'<details class="diff".*?<code>(.*?)</code></pre>', lesson_of(text, rung.label), re.S)
        if not found:
            assert f"python -m ladder diff {rung.start.label} {rung.label}</code>" in lesson_of(text, rung.label)
            continue
        made, left = [], body_of(rung.start)
        for hunk in re.split("<b>.*?</b>", found[1])[1:]:
            rows = [(row[0], row[1:]) for row in plain(hunk).split("\n")[:-1]]
            old, new = ([code for sign, code in rows if sign in signs] for signs in (" -", " +"))
            at = next(i for i in range(len(left)) if left[i : i + len(old)] == old)
            made, left = made + left[:at] + new, left[at + len(old) :]
        assert made + left == body_of(rung), rung.label
        shown += 1
    assert shown == len(RUNGS) - 3  # all but the baseline, and two long ones


def test_a_line_marks_the_words_that_changed(text):
    assert "<span class=k>return</span>" in text and "<span class=c># " in text
    assert re.search(r"<ins>\+ .*<mark>F</mark>.<mark>scaled_dot_product_attention</mark>", lesson_of(text, "6"))
    assert "<b>CausalSelfAttention.forward</b>" in lesson_of(text, "6")
    assert text.count("<figure>\n<svg") == len(PICTURES) == text.count("<figcaption>\n<p>")


def test_predict_do_and_only_then_the_change(text):
    """An exercise stands before its diff, which is folded; without an exercise the diff is open."""
    exercises = read_exercises()
    assert {"1", "6", "9", "gradient_accumulation"} <= exercises.keys()
    for rung in RUNGS[1:]:
        lesson = lesson_of(text, rung.label)
        opened = '<details class="diff" open>' in lesson
        assert opened == ('<details class="diff"' in lesson and rung.label not in exercises), rung.label
        if rung.label in exercises:
            places = [lesson.index(part) for part in ("Predict.", "<summary>Answer", "Do.", "Check.", "Our change")]
            assert places == sorted(places) and lesson.count("Check.") == 1 and "&lt;details" not in lesson


def test_links_lead_somewhere(text):
    text = text.partition("<script>")[0]
    targets = set(re.findall(r'href="([^"]+)"', text))
    here, ids = {link for link in targets if link[0] == "#"}, set(re.findall(r'\bid="([^"]+)"', text))
    assert {link[1:] for link in here} <= ids
    files = {link.removeprefix(ROOT.as_uri()) for link in targets if link.startswith("file:")}
    assert len(files) > 50
    for link in files:
        file, _, anchor = link.removeprefix("/").partition("#")
        assert (ROOT / file).exists() and (not file.endswith(".md") or anchor in {"", *anchors_of(ROOT / file)}), link
    contents = re.search('<nav id="contents".*?</nav>', text, re.S)[0]
    depths = re.findall(r'#rung-(\w+)" class=.*?--depth:(\d)', contents)
    assert [label for label, _ in depths] == [rung.label for rung in RUNGS]
    assert {"0": "0", "10": "0", "zero_init": "1", "fp8": "2", "long_run": "2", "fsdp": "3"}.items() <= {*depths}
    for rung in RUNGS:
        lesson = lesson_of(text, rung.label)
        ways = re.search('<nav class="ways".*?</nav>|$', lesson, re.S)[0]
        assert re.findall(r"#rung-(\w+)", ways) == [other.label for other in RUNGS if rung in other.starts]
        starts = re.findall(r"#rung-(\w+)", re.search('<p class="from">.*?</p>', lesson, re.S)[0])
        assert starts == [other.label for other in rung.starts] and "Starts from" not in lesson


def tables_of(text, label):
    """The rows of a lesson's tables, each {column: text}."""
    effect = lesson_of(text, label).split('<div class="effect">')[1]
    for found in re.findall("<table.*?</table>", effect, re.S):
        columns, *rows = [re.split("<t[dh][^>]*>", row.strip())[1:] for row in found.split("<tr>")[1:]]
        columns[-1] = columns[-1].split("\n")[0]
        for row in rows:
            yield {html.unescape(column): html.unescape(cell.split("\n")[0])
                   for column, cell in zip(columns, row, strict=True)}


def test_a_lesson_tells_what_its_rung_did(text):
    by_name = {row["measured on"]: row for row in tables_of(text, "1")}
    assert list(by_name) == ["plain", "profiled"]  # first the machine where the ladder gains most
    assert by_name["profiled"] == {"measured on": "profiled", "ms/step": "9,600 → 8,100", "× previous": "1.19?",
                                   "MFU": "–", "GB": "4.41 → 3.60", "loss": "8.800 at step 12"}
    [alone] = tables_of(text, "3")  # rung 2 was not measured
    assert (alone["ms/step"], alone["× previous"], alone["GB"]) == ("1,280", "–", "2.98")
    assert [row["loss"] for row in tables_of(text, "10")] == ["nan at step 12"]
    assert [row["ms/step"] for row in tables_of(text, "ddp")] == ["1,024 → 2,560"]
    [raced] = tables_of(text, "muon")
    assert raced == {"race": "text, tiny", "validation loss (range)": "3.967 (3.900–4.000)",
                     "change from the previous row": "−2.033 (−2.909 to −1.158)",  # scipy's, of three pairs
                     "p of the loss": "0.0019"}  # three seeds get no star
    machines = text.split('<section id="machines">')[1]
    assert "<td>8,100<td>" in machines and "! no measured matrix-product rates" in machines
    assert "The race on" in text and "<td>1,250,000" in text
    assert "Not measured on any of these machines" in lesson_of(text, "ngram_embeddings")
    assert "<h3>Rung 1, weight tying: <span>the input embedding and the output" in lesson_of(text, "1")


def test_a_lesson_has_its_counted_floor_and_the_lecture(text):
    rows = stored_floors([CARDS["H100"], CARDS["A100"]])
    old, new = rows["5"], rows["6"]
    h100, a100 = ([f"{row['ms'][card]['floor']:.1f}" for row in (old, new)] for card in ("H100", "A100"))
    lesson = lesson_of(text, "6")
    assert f": {h100[0]} → {h100[1]} ms on an H100, {a100[0]} → {a100[1]} ms on an A100" in lesson
    assert f"{old['gb']:.0f} → {new['gb']:.0f} GB of memory traffic in {old['launches']} → {new['launches']}" in lesson
    assert "lecture for one A100: 130 → 96 ms." in lesson
    assert "Published" not in lesson_of(text, "8") and "Computed" not in lesson_of(text, "ddp")


def test_page_opens_what_it_makes(tmp_path, monkeypatch, call):
    opened = []
    monkeypatch.setattr(page_verb, "build_report", lambda folder: folder)
    assert is_one_error(call("page", "--out", tmp_path), "is a folder")
    monkeypatch.setattr(page_verb, "write_page", lambda reports, path: path.write_text("a page"))
    monkeypatch.setattr(page_verb.webbrowser, "open", opened.append)
    call("page", "--out", tmp_path / "a.html", "--no-browser")
    assert not opened
    call("page", "--out", tmp_path / "a.html")
    assert opened == [(tmp_path / "a.html").as_uri()]


# ---- what is seen ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # a test may run as root
        yield browser
        browser.close()


@pytest.fixture(scope="module", params=[1400, 390])
def page(chromium, file, request):
    """The page in a window or on a phone, which must neither complain nor fetch anything."""
    width, complaints = request.param, []
    phone = width < 600
    context = chromium.new_context(viewport={"width": width, "height": 900}, is_mobile=phone, has_touch=phone,
                                   reduced_motion="reduce")
    page = context.new_page()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "assert") else None)
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert all(complaint.startswith((file.as_uri(), "data:,")) for complaint in complaints), complaints


def in_sight(page, selector):
    return page.evaluate("""selector => { const box = document.querySelector(selector).getBoundingClientRect();
        return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight && box.right <= innerWidth; }""", selector)


# [[left, width], ...] of the pieces of each bar below an element, in pixels.
BARS = """selector => [...document.querySelectorAll(selector + " .bar")].map(bar =>
    [...bar.querySelectorAll("i")].map(i => {
        const [box, whole] = [i.getBoundingClientRect(), bar.getBoundingClientRect()];
        return [box.x - whole.x, box.width];
    }))"""


@pytest.mark.slow
def test_bars_are_as_long_as_what_they_show(page):
    steps, profile = page.evaluate(BARS, ".steps"), page.evaluate(BARS, ".profile")
    scale = steps[0][0][1] / PLAIN["0"][0]  # pixels per millisecond
    floors = floors_on(CARDS["A100"])
    for bar, label in zip(steps, ("0", "1", "3", "10"), strict=True):
        assert bar[0][1] == pytest.approx(scale * PLAIN[label][0], abs=1)
        assert bar[1][0] == pytest.approx(scale * floors[label], abs=2)
    scale = profile[0][0][1] / PARTS["0"][0]
    for bar, label in zip(profile, PARTS, strict=True):
        assert [size for _, size in bar[:-1]] == pytest.approx([scale * ms for ms in PARTS[label]], abs=1)
        assert bar[-1][0] == pytest.approx(scale * FLOORS[label], abs=2)
    assert page.locator(".bar b").all_inner_texts() == ["3,200", "3,000", "1,280", "1,024", "9,500", "8,000"]


@pytest.mark.slow
def test_contents_lead_to_a_lesson_and_show_where_the_reader_is(page):
    link = '#contents [href="#rung-cuda_graphs"]'
    assert in_sight(page, "h1") and in_sight(page, ".path .first")
    if page.viewport_size["width"] < 600:
        page.locator("aside button").tap()
        page.locator(link).tap()
        assert not in_sight(page, "#contents")
    else:
        page.locator(link).click()
    current = "document.querySelector('#contents [aria-current]')?.getAttribute('href')"
    page.wait_for_function(f"{current} === '#rung-cuda_graphs'")
    assert in_sight(page, "#rung-cuda_graphs h3")
    page.evaluate("location.hash = '#rung-0'")
    page.wait_for_function("document.querySelector('#contents [aria-current]').getAttribute('href') === '#rung-0'")
    if page.viewport_size["width"] < 600:
        page.locator("aside button").tap()
    page.wait_for_function("""link => { const box = document.querySelector(link).getBoundingClientRect();
        return box.top > 0 && box.bottom < innerHeight; }""", arg='#contents [href="#rung-0"]')


# For each picture: [the smallest text's pixels, texts beyond its sides, pairs of texts that overlap].
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


@pytest.mark.slow
def test_the_texts_of_pictures_are_legible_and_apart(page):
    found = page.evaluate(TEXTS)
    assert len(found) == len(PICTURES)
    for smallest, beyond, overlapping in found:
        assert smallest >= 11.9 and beyond == [] and overlapping == []


@pytest.mark.slow
def test_nothing_scrolls_sideways_with_everything_open(page):
    folded = page.locator(".diff:not([open])")
    assert folded.count() > 10
    page.locator("#open").click()
    assert folded.count() == 0
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
