"""A lesson in a terminal: its text, and differences in color."""
import re

from ladder.rungs.lessons import FULL_LINE, diff_hunks, part_paragraphs, split_docstring


def print_lesson(lesson, console):
    console.print(f"{lesson.title}\n", style="bold")
    for paragraph in re.split("\n{2,}", part_paragraphs(lesson.body)):
        is_code = paragraph.startswith("    ")
        if not is_code:
            paragraph = re.sub(r"\n(?!- |\d\. ) *", " ", paragraph)  # each item of a list begins a line
        console.print(f"{paragraph}\n", width=min(console.width, FULL_LINE), soft_wrap=is_code)
    print_hunks(lesson.hunks, console)


def print_hunks(hunks, console):
    """A unified diff in color."""
    from rich.syntax import Syntax

    painter = Syntax("", "python", theme="ansi_dark", background_color="default")
    styles = {" ": ("", ""), "-": ("on #4a2222", "bold on #8a3030"), "+": ("on #1d3d26", "bold on #2f7a45")}
    for hunk in hunks:
        console.print(f"@@ line {hunk[0].number} @@", style="cyan")
        for line in hunk:
            text = painter.highlight(line.text)
            text.rstrip()
            background, mark = styles[line.sign]
            text.stylize(background)
            for start, end in line.marks:
                text.stylize(mark, start, end)
            console.print(line.sign, text, soft_wrap=True)


def show_diffs(rung, file, console):
    """What a reader has changed in the rung before, and what the rung itself changes."""
    _, old, old_first = split_docstring(rung.start.path.read_text(encoding="utf-8"))
    titles = {file: f"{file.name}, against {rung.start.called}", rung.path: f"ours: {rung.file}"}
    for path, title in titles.items():
        console.print(f"\n{title}", style="bold")
        _, new, new_first = split_docstring(path.read_text(encoding="utf-8-sig"))
        print_hunks(diff_hunks(old, new, old_first, new_first), console)
