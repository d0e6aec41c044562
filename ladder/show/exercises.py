"""What a reader does with a lesson: its exercise, and the lines that its script prints first and last."""
import json
import re

from markdown_it import MarkdownIt

from ladder.rungs.list import BY_LABEL, ROOT

EXERCISES = ROOT / "docs" / "exercises.md"
PRINTED = ROOT / "docs" / "first_and_last.json"  # by python -m ladder.measure.first_and_last
HEADING = re.compile(r"(?m)^## (?:(\w+)\. )?.*$")  # of a lesson: "## 6. Flash attention"
ANSWER = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>", re.S)


def read_exercises(path=EXERCISES):
    """{label: Markdown} of the lessons that the file has an exercise for; {} without the file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    headings = list(HEADING.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    return {heading[1]: text[heading.end() : end].strip() for heading, end in zip(headings, ends, strict=True)
            if heading[1] in BY_LABEL}


def exercise_html(text):
    """An exercise as HTML; its answers are folded away. Other HTML is shown as it is written."""
    markdown = MarkdownIt("commonmark", {"html": False, "typographer": True}).enable(["table", "smartquotes"])
    parts = ANSWER.split(text)  # Markdown, summary, answer, Markdown, summary, answer, …, Markdown
    html = markdown.render(parts[0])
    for summary, answer, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        html += (f"<details><summary>{markdown.renderInline(summary)}</summary>\n{markdown.render(answer)}</details>\n"
                 + markdown.render(rest))
    html = html.replace("<table>", '<div class="scroll" tabindex="0"><table class="numbers">')
    return html.replace("</table>", "</table></div>").replace("<pre>", '<pre tabindex="0">')


def read_printed(path=PRINTED):
    """{label: {"command": …, "machine": …, "first": [lines], "last": [lines]}} of the rungs; {} without the file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
