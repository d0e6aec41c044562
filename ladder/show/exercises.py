"""The exercises of docs/exercises.md, each for the lesson that it belongs to."""
import re

from markdown_it import MarkdownIt

from ladder.rungs.list import BY_LABEL, ROOT

EXERCISES = ROOT / "docs" / "exercises.md"
HEADING = re.compile(r"(?m)^## (?:(\w+)\. )?.*$")  # of a lesson: "## 6. Flash attention"


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
    """An exercise as HTML, its answers folded as in the file; links start from docs/, where the file lies."""
    markdown = MarkdownIt("commonmark", {"typographer": True}).enable("smartquotes")
    page = markdown.render(text).replace('href="#', 'href="exercises.md#')
    return re.sub('href="(?!https?:)', 'href="../docs/', page).replace("<pre>", '<pre tabindex="0">')
