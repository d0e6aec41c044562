"""The tutorial page, in a real browser where there is one: every lesson, its diff, its numbers, and the switches."""
import re
import shutil

import pytest
from conftest import ROOT

from ladder.report import build_report
from ladder.stages import STAGES

PAGE = ROOT / "docs" / "index.html"
REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRAWN = "[...document.querySelector('.machine').querySelectorAll('.chart')].map(chart => chart.offsetHeight > 100)"


def test_the_page_is_one_file_with_every_lesson():
    text = PAGE.read_text(encoding="utf-8")
    assert PAGE.stat().st_size < 3_000_000
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(""", markup)  # nothing is fetched
    for number, stage in enumerate(STAGES):
        section = re.search(rf'<section class="lesson" id="rung-{stage.label}">(.*?)</section>', text, re.S)[1]
        assert stage.file in section
        if number:
            assert 'class="t ins"' in section and 'class="code split"' in section
        for folder in REFERENCE:
            rows = {row.name: row for row in build_report(folder).rows}
            if stage.name in rows:
                assert f"{rows[stage.name].ms:,.0f} ms/step" in section


def test_the_committed_page_is_up_to_date(tmp_path):
    """Made again from the scripts and logs, it is the same but for the charts' random identifiers."""
    from ladder.page import write_page

    write_page([build_report(folder) for folder in REFERENCE], tmp_path / "index.html")

    def lessons(path):
        return re.findall(r'<section class="lesson".*?</section>', path.read_text(encoding="utf-8"), re.S)

    assert len(lessons(PAGE)) == len(STAGES)
    assert lessons(tmp_path / "index.html") == lessons(PAGE), "run python -m ladder report --html docs/index.html"


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # a test may run as root
        yield browser
        browser.close()


@pytest.fixture(params=[1400, 390])
def page(request, chromium):
    """The page in a window of a computer's and of a phone's width; `page.errors` is what its console complains of."""
    page = chromium.new_page(viewport={"width": request.param, "height": 900}, is_mobile=request.param < 600)
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("console", lambda line: page.errors.append(line.text) if line.type in ("error", "assert") else None)
    page.on("requestfailed", lambda request: page.errors.append(request.url))
    page.goto(PAGE.as_uri())
    page.wait_for_function("window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle")
    yield page
    page.close()


def test_in_a_browser(page):
    width = page.viewport_size["width"]
    assert page.locator("section.lesson").count() == len(STAGES)
    # every lesson but the baseline's shows a diff, and exactly one of its two forms
    shown = page.evaluate("""[...document.querySelectorAll('section.lesson')].map(s =>
        [...s.querySelectorAll('.wide, .narrow')].filter(d => d.offsetHeight > 0).map(d => d.className).join())""")
    assert shown == [""] + ["scroll wide" if width > 1000 else "scroll narrow"] * (len(STAGES) - 1)
    names = [{row.name for row in build_report(folder).rows} for folder in REFERENCE]
    for stage in STAGES:
        effects = page.locator(f"#rung-{stage.label} .effect")
        assert effects.count() == sum(stage.name in name for name in names)
    # nothing is wider than the window
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # the charts are drawn, one at a time, and the radio buttons switch them
    assert page.evaluate(DRAWN) == [True, False, False, False]
    page.locator(".machine input").nth(1).click()
    page.wait_for_function(f"{DRAWN}[1]")
    assert page.evaluate(DRAWN) == [False, True, False, False]
    # a curve can be switched off and on
    toggled = page.evaluate("""(() => {
        const legend = [...Bokeh.documents[0].all_models].find(m => m.type === 'Legend');
        const line = legend.items[0].renderers[0]; const before = line.visible; line.visible = !before;
        return [before, line.visible, legend.click_policy]; })()""")
    assert toggled == [True, False, "hide"]
    assert page.errors == []
