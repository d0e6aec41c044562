"""`python -m ladder page`: one static file with the tree of rungs, and each lesson: text, exercise, diff and effect.

Jinja fills `page.html.j2`, markdown-it renders the docstrings, Pygments colors the code. In the browser `page.js`
draws the bars for the machine that the reader chooses, and uPlot the losses. Everything is inside the file, and the
same scripts and logs make the same file, one row to a line.
"""
import ast
import itertools
import json
import re
import textwrap
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String

from ladder.count.cards import CARDS, card_of
from ladder.count.floor import floor_data
from ladder.count.published import read_published
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.rungs.laws import first_line
from ladder.rungs.lessons import LABEL, Line, part_paragraphs, read_lesson, split_docstring
from ladder.rungs.list import BANNER, BY_LABEL, BY_NAME, ROOT, RUNGS
from ladder.show.chance import BEYOND_CHANCE
from ladder.show.charts import KIND_COLORS, curves, memory_bars, profile_bars, speed_bars
from ladder.show.drawings import drawings
from ladder.show.exercises import exercise_html, read_exercises, read_printed
from ladder.show.logs import reference_folders, stage_of
from ladder.show.report import Row, build_report, warnings
from ladder.show.standings import IN_A_LINK, KEY, race_texts, standings
from ladder.show.tables import HEADINGS, fastest, gain, shown_texts, where
from ladder.show.tree import after, tree_rows

HERE = Path(__file__).parent
CLASSES = {Keyword: "k", Operator.Word: "k", String: "s", Comment: "c", Number: "m", Name.Function: "f",
           Name.Class: "f", Name.Builtin: "b", Name.Decorator: "b"}  # the other tokens have the color of the text
# What the page says above a lesson, with a link.
STARTS_FROM = re.compile(r"\s*Starts from (?:rung \w+|\w+\.py)(?: and rung \w+)?\.")
LAST_LOSS = re.compile(r"step : (\d+) \| loss: (\S+)")
MAX_POINTS = 400  # of a loss curve; for longer runs only every second, third, ... step is drawn


def color_line(line):
    """A Line as HTML: spans for the syntax, <mark> for the changed words."""
    marked = {place for first, last in line.marks for place in range(first, last)}
    parts, start = [], 0
    for token, value in lex(line.text, PythonLexer(stripnl=False, ensurenl=False)):
        css = next((css for kind, css in CLASSES.items() if token in kind), None)
        places = range(start, start + len(value.rstrip("\n")))
        start = places.stop
        for mark, group in itertools.groupby(places, marked.__contains__):
            text = "".join(line.text[place] for place in group).replace("&", "&amp;").replace("<", "&lt;")
            text = f"<span class={css}>{text}</span>" if css else text
            parts.append(f"<mark>{text}</mark>" if mark else text)
    return "".join(parts)


def line_view(line):
    """A Line for the template: (class, number, depth of indentation, HTML)."""
    css = {"-": "del", "+": "ins", " ": ""}[line.sign]
    return css, line.number, len(line.text) - len(line.text.lstrip()), color_line(line)


def blocks_of(source):
    """(name, first line, last line) of each function, class and method of a script, the outer ones first."""
    return [(node.name, first_line(node), node.end_lineno) for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def hunk_view(hunk, blocks):
    """A hunk for the template: the definitions that it changes, such as "GPT.forward", and its rows.

    `blocks` are those of the script before ("-") and of this one ("+").
    """
    places = [".".join(name for name, first, last in blocks[line.sign] if first <= line.number <= last)
              for line in hunk if line.sign in blocks]
    return {"places": ", ".join(dict.fromkeys(filter(None, places))), "rows": map(line_view, hunk)}


def link_to_rung(found):
    """A link in place of "rung 6"; code, the other kind of text that is found, stays as it is."""
    return f'<a href="#rung-{found[2]}">{found[0]}</a>' if found[2] in BY_LABEL else found[0]


def prose(body):
    """A docstring's text as HTML: paragraphs, lists, code, and separate paragraphs for "Gain:" and the like."""
    text = part_paragraphs(body)
    # Fences around code, since after a list Markdown takes indented lines for more of the list; backticks around flags.
    text = re.sub(r"(?m)(?:^    .*\n?)+", lambda code: f"```\n{textwrap.dedent(code[0]).rstrip()}\n```\n", text)
    text = re.sub(r"(```(?s:.*?)```|`.*?`)|(?<!\w)(--[a-z-]+)", lambda found: found[1] or f"`{found[2]}`", text)
    markdown = MarkdownIt("zero", {"typographer": True}).enable(["backticks", "fence", "list", "smartquotes"])
    page = re.sub(f"<p>({LABEL})", r"<p><b>\1</b>", markdown.render(text))
    page = re.sub(r"(?s)(<pre>.*?</pre>|<code>.*?</code>)|\b[Rr]ung (\d+)\b", link_to_rung, page)
    return page.replace("<p><b>Source", '<p class="dim"><b>Source').replace("<pre>", '<pre tabindex="0">')


def printed_view(printed):
    """What a rung prints, for the template: the command, the machine, both losses, and the lines."""
    losses = [LAST_LOSS.match(line) for line in (printed["first"][-1], printed["last"][0])]
    return printed | {"losses": [(found[1], f"{float(found[2]):.2f}") for found in losses],
                      "lines": [*printed["first"], "…", *printed["last"]]}


def lesson_view(rung):
    """All that the template shows of a rung except its measurements."""
    source, start = rung.path.read_text(encoding="utf-8"), rung.start
    before = start and start.path.read_text(encoding="utf-8")
    lesson, code, hunks = read_lesson(before, source), [], []
    if start is None:  # there is nothing to compare with: show all of it, down to what all rungs share
        _, lines, first = split_docstring(source.split("\n" + BANNER)[0])
        code = [line_view(Line(" ", number, text)) for number, text in enumerate(lines, first)]
    else:
        blocks = {"-": blocks_of(before), "+": blocks_of(source)}
        hunks = [hunk_view(hunk, blocks) for hunk in lesson.hunks]
    head, _, tail = STARTS_FROM.sub("", lesson.title).partition(": ")
    exercise, printed = read_exercises().get(rung.label), read_printed().get(rung.label)
    return {"rung": rung, "before": start, "after": after(rung), "head": head, "tail": tail,
            "prose": prose(STARTS_FROM.sub("", lesson.body).strip("\n")), "lesson": lesson, "hunks": hunks,
            "code": code,
            "exercise": exercise and exercise_html(exercise), "printed": printed and printed_view(printed)}


def tree_view():
    """The rows of the tree for the template, each with the levels of its vertical lines.

    `above` are those at a row's heading; a section that several rows stand in has its title at the first.
    """
    titled = set()
    for row in tree_rows():
        own = row.depth - 1 if row.is_branch else row.depth
        first = row.rungs[0].start is None
        yield {"row": row, "title": None if row.section in titled else row.section.title,
               "above": [] if first else sorted({*row.passing, own})}
        titled.add(row.section)


def drawing_views():
    """{label of a rung or id of a section: [(SVG, caption as HTML), ...]}."""
    return {key: [(drawing.svg, prose(drawing.caption)) for drawing in some] for key, some in drawings().items()}


def rounded(data):
    """Data for page.js: floats with 7 significant digits, and null for NaN and infinity, which JSON does not have."""
    return json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.7g}"),
                      parse_constant=lambda _: None)


def thinned(curve):
    n = len(curve["steps"])
    kept = sorted({*range(0, n, -(-n // MAX_POINTS)), n - 1})  # the last one, too
    return {key: [value[i] for i in kept] if isinstance(value, list) else value for key, value in curve.items()}


def rows_data(report):
    """The measurements of each rung, and of a race its standing, for page.js."""
    target, racers = standings(report) if report.race else (None, [])
    standing = {racer.name: {"target": round(target, 2), "val": racer.val_loss[0], "tokens_to": racer.tokens[0],
                             "seconds_to": racer.seconds[0]} for racer in racers}
    for row in [Row(**row) for row in report.race.rows] if report.race else report.rows:
        yield {
            "label": stage_of(row.name).label, "tokens": row.tokens, "ms": row.ms,
            "low": row.ms_low, "high": row.ms_high, "speed": row.tokens_per_second,
            "mfu": row.mfu and 100 * row.mfu, "memory": row.peak_memory_gb, "loss": row.last_loss,
            "step": row.last_step, "p": row.p_before,
            "differs": row.p_before is not None and row.p_before < BEYOND_CHANCE,
        } | standing.get(row.name, {})


def race_view(report):
    """The standings of a race for the template, None without one."""
    if not report.race:
        return None
    texts, caption = race_texts(report)
    texts = texts.drop(columns=IN_A_LINK)
    return {"columns": [*texts], "table": texts.to_numpy(), "caption": f"{caption} {KEY}"}


def machine_view(report):
    """One machine: its table for the template, and the data of its charts for page.js."""
    texts = shown_texts(report)
    return {
        "id": report.name, "name": where(report), "describe": f"{fastest(report)} {HEADINGS}".strip(),
        "columns": list(texts), "table": texts.to_numpy(), "warnings": list(warnings(report)),
        "race": race_view(report),
        "data": rounded({
            "rows": list(rows_data(report)), "speed": list(speed_bars(report)), "memory": list(memory_bars(report)),
            "profile": list(profile_bars(report.profile)), "curves": list(map(thinned, curves(report)))}),
    }


def floors_view():
    """The counted floors of each rung on each card, and what Karpathy's lecture published, for page.js."""
    data = floor_data(CARDS.values())
    rungs = {row["label"]: {"gb": row["gb"], "launches": row["launches"], "ms": row["ms"],
                            "lecture": BY_LABEL[row["label"]].lecture_ms} for row in data["rungs"]}
    return {"B": data["B"], "T": data["T"], "rungs": rounded(rungs)}


def first_card(reports):
    """The card that the page begins with: the first machine's, so that its steps stand beside their own floors."""
    card = card_of(reports[0].setting["device"]) if reports else None
    return card.name if card else "A100"


def write_page(reports, path):
    """Write the page of all lessons and the given reports to `path`."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: name a file")
    # First the machine where the ladder gains the most; those without it by the number of their rungs.
    reports = sorted(reports, reverse=True, key=lambda report: (gain(report), len(report.runs.keys() & BY_NAME)))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    style, script, uplot = ((HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "uplot.js"))
    text = environment.get_template("page.html.j2").render(
        tree=list(tree_view()), lessons={rung.label: lesson_view(rung) for rung in RUNGS}, pictures=drawing_views(),
        machines=[machine_view(report) for report in reports],
        kinds=KIND_COLORS, cards=list(CARDS), chosen_card=first_card(reports), floors=floors_view(),
        published=read_published().to_dict("records"), style=style, script=script, uplot=uplot)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def add_flags(parser):
    parser.add_argument("folders", nargs="*", type=Path, metavar="LOG_FOLDER",
                        help="runs, or reference machines (default: all of logs/reference)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "index.html", metavar="FILE",
                        help="(default: docs/index.html)")


def main(args, console):
    write_page([build_report(folder) for folder in args.folders or reference_folders()], args.out)
    console.print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB", soft_wrap=True)
