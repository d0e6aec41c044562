"""The tutorial page, in a real browser where there is one: every lesson, its diff, its numbers, and the switches."""
import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ROOT

from ladder.report import build_report
from ladder.stages import STAGES

PAGE = ROOT / "docs" / "index.html"
REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


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


class Browser:
    """Chromium over its own debugging protocol."""

    def __init__(self, folder, width):
        from websocket import create_connection

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync",
             "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        port_file = Path(folder) / "DevToolsActivePort"
        deadline = time.monotonic() + 30
        while not port_file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10))
        url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        self.socket = create_connection(url, timeout=60)
        self.number, self.errors = 0, []
        for domain in ("Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")
        phone = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=phone)

    def send(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"]["exceptionDetails"]["text"])
            if message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] in ("error", "assert"):
                self.errors.append(str(message["params"]["args"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.errors.append(message["params"]["entry"]["text"])
            if message.get("id") == self.number:
                return message.get("result", {})

    def run(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=[1400, 390])
def browser(request, tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    pytest.importorskip("websocket")
    browser = Browser(tmp_path / "profile", request.param)
    browser.width = request.param
    browser.send("Page.navigate", url=PAGE.as_uri())
    for _ in range(100):
        if browser.run("document.readyState === 'complete' && typeof Bokeh !== 'undefined' && "
                       "Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle"):
            break
        time.sleep(0.1)
    yield browser
    browser.close()


def test_in_a_browser(browser):
    assert browser.run("document.querySelectorAll('section.lesson').length") == len(STAGES)
    # every lesson but the baseline's shows a diff, and exactly one of its two forms
    shown = browser.run("""[...document.querySelectorAll('section.lesson')].map(s =>
        [...s.querySelectorAll('.wide, .narrow')].filter(d => d.offsetHeight > 0).map(d => d.className).join())""")
    form = "scroll wide" if browser.width > 1000 else "scroll narrow"
    assert shown == [""] + [form] * (len(STAGES) - 1)
    numbers = browser.run(
        "[...document.querySelectorAll('section.lesson')].map(s => s.querySelectorAll('.effect').length)"
    )
    names = [{row.name for row in build_report(folder).rows} for folder in REFERENCE]
    assert numbers == [sum(stage.name in name for name in names) for stage in STAGES]
    # nothing is wider than the window
    assert browser.run("document.documentElement.scrollWidth") <= browser.width
    # the charts are drawn, one at a time, and the radio buttons switch them
    drawn = "[...document.querySelector('.machine').querySelectorAll('.chart')].map(c => c.offsetHeight > 100)"
    assert browser.run(drawn) == [True, False, False, False]
    browser.run("document.querySelectorAll('.machine input')[1].click()")
    time.sleep(0.5)
    assert browser.run(drawn) == [False, True, False, False]
    # a curve can be switched off and on
    toggled = browser.run("""(() => {
        const legend = [...Bokeh.documents[0].all_models].find(m => m.type === 'Legend');
        const line = legend.items[0].renderers[0]; const before = line.visible; line.visible = !before;
        return [before, line.visible, legend.click_policy]; })()""")
    assert toggled == [True, False, "hide"]
    assert browser.errors == []
