"""The tutorial page: one static file with every lesson, its diff, its measured effect, and charts to hover over.

Jinja fills `page.html.j2`, Pygments colours the code, Bokeh draws the charts; everything is inside the file.
"""
import html
import itertools
import re

import jinja2
from bokeh.embed import components
from bokeh.models import ColumnDataSource, HoverTool, Legend, LegendItem, Range1d
from bokeh.palettes import Turbo256
from bokeh.plotting import figure
from bokeh.resources import Resources
from pygments import lex
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES

from ladder.errors import UserError
from ladder.lessons import in_diff_order, read_lesson
from ladder.logs import PEER
from ladder.report import describe, table_of, warnings
from ladder.stages import BY_LABEL, ROOT, STAGES

TEXT_COLOUR = "#7b8794"  # readable on white and on black


def colour_line(line):
    """A Line as HTML: Pygments' classes for the syntax, <mark> for the changed words."""
    edges = sorted({0, len(line.text), *itertools.chain.from_iterable(line.marks)})
    parts, start = [], 0
    for token, value in lex(line.text, PythonLexer(stripnl=False, ensurenl=False)):
        value = value.rstrip("\n")
        end = start + len(value)
        cuts = [start, *(edge for edge in edges if start < edge < end), end]
        for one, other in itertools.pairwise(cuts):
            text = html.escape(line.text[one:other])
            css = STANDARD_TYPES.get(token, "")
            text = f'<span class="{css}">{text}</span>' if css else text
            marked = any(first <= one and other <= last for first, last in line.marks)
            parts.append(f"<mark>{text}</mark>" if marked else text)
        start = end
    return "".join(parts)


def lesson_view(lesson):
    """The hunks for the template: rows of the side-by-side table, and lines of the unified one, as HTML."""
    def side(line):
        return {"number": line.number, "html": colour_line(line), "changed": line.changed} if line else None

    return [
        {
            "rows": [(side(left), side(right)) for left, right in hunk],
            "lines": [(sign, line.number, colour_line(line)) for sign, line in in_diff_order(hunk)],
        }
        for hunk in lesson.hunks
    ]


def colours_of(report):
    rungs = [row.name for row in report.rows if row.name != PEER]
    step = 230 / max(1, len(rungs) - 1)
    return {name: Turbo256[15 + int(i * step)] for i, name in enumerate(rungs)} | {PEER: "#999999"}


def plain(chart):
    """Transparent, so that it stands on a light and on a dark page."""
    chart.background_fill_color = chart.border_fill_color = None
    chart.outline_line_color = None
    chart.toolbar.logo = None
    for axis in chart.axis:
        axis.axis_label_text_color = axis.major_label_text_color = TEXT_COLOUR
        axis.axis_line_color = axis.major_tick_line_color = TEXT_COLOUR
        axis.minor_tick_line_color = None
    chart.grid.grid_line_color = TEXT_COLOUR
    chart.grid.grid_line_alpha = 0.2
    return chart


def bar_chart(report, values, label, tooltips):
    """One bar per rung, the first on top."""
    rows = [row for row in report.rows if values(row) is not None]
    colours = colours_of(report)
    source = ColumnDataSource({
        "title": [row.title for row in rows],
        "value": [values(row) for row in rows],
        "colour": [colours[row.name] for row in rows],
        "ms": [row.ms for row in rows],
        "times": [row.times_baseline or float("nan") for row in rows],
        "mfu": [f"{row.mfu:.1%}" if row.mfu else "not measured" for row in rows],
    })
    titles = [row.title for row in reversed(rows)]
    chart = figure(y_range=titles, height=60 + 30 * len(rows), x_axis_label=label, sizing_mode="stretch_width",
                   tools="", toolbar_location=None)
    chart.x_range = Range1d(0, 1.05 * max(map(values, rows)))
    chart.hbar(y="title", right="value", height=0.7, color="colour", source=source)
    chart.add_tools(HoverTool(tooltips=[("", "@title"), *tooltips]))
    chart.ygrid.visible = False
    return plain(chart)


def loss_chart(report, by_seconds):
    """The loss of each rung; a click on the legend switches a curve on and off."""
    label = "seconds of training, compilation included" if by_seconds else "step"
    chart = figure(height=460, sizing_mode="stretch_width", x_axis_label=label, y_axis_label="loss (nats)",
                   tools="pan,box_zoom,reset")
    colours, items = colours_of(report), []
    for row in report.rows:
        run = report.runs[row.name][0]
        seconds = list(itertools.accumulate(ms / 1000 for ms in run.ms))
        source = ColumnDataSource({"step": run.steps, "seconds": seconds, "loss": run.losses, "ms": run.ms})
        line = chart.line("seconds" if by_seconds else "step", "loss", source=source, color=colours[row.name],
                          line_width=2)
        chart.add_tools(HoverTool(renderers=[line], tooltips=[
            ("", row.title), ("step", "@step"), ("loss", "@loss{0.0000}"), ("ms", "@ms{0.0}"),
            ("seconds", "@seconds{0.0}"),
        ], visible=False))
        items.append(LegendItem(label=row.title, renderers=[line]))
        if run.val_steps:
            marks = ColumnDataSource({
                "step": run.val_steps, "seconds": [run.seconds_at(step) for step in run.val_steps],
                "loss": run.val_losses,
            })
            dots = chart.scatter("seconds" if by_seconds else "step", "loss", source=marks, size=7,
                                 color=colours[row.name], line_color=TEXT_COLOUR)
            chart.add_tools(HoverTool(renderers=[dots], visible=False, tooltips=[
                ("", f"{row.title}: validation"), ("step", "@step"), ("loss", "@loss{0.0000}"),
            ]))
            items.append(LegendItem(label=f"{row.title}: validation", renderers=[dots]))
    legend = Legend(items=items, click_policy="hide", ncols=2, label_text_color=TEXT_COLOUR,
                    label_text_font_size="11px",
                    background_fill_alpha=0, border_line_alpha=0, spacing=0, padding=0)
    chart.add_layout(legend, "below")
    chart.height += 26 * ((len(items) + 1) // 2)
    return plain(chart)


def machine_view(report):
    """The charts (as names into the page's scripts) and the table of one reference machine."""
    charts = {
        "speed": bar_chart(report, lambda row: row.tokens_per_second, "tokens/sec", [
            ("tokens/sec", "@value{0,0}"), ("ms/step", "@ms{0,0.0}"), ("× baseline", "@times{0.00}"), ("MFU", "@mfu")]),
        "loss by step": loss_chart(report, by_seconds=False),
        "loss by seconds": loss_chart(report, by_seconds=True),
    }
    if any(row.peak_memory_gb is not None for row in report.rows):
        charts["memory"] = bar_chart(report, lambda row: row.peak_memory_gb, "peak GB", [("GB", "@value{0.00}")])
    table = table_of(report)
    return {
        "name": report.name, "describe": describe(report), "charts": charts, "columns": list(table),
        "rows": table.to_numpy(), "warnings": list(warnings(report)),
    }


def effects(reports, stage, start):
    """What a rung did on each machine, against the rung `start` (None for the first) where that was measured, too."""
    for report in reports:
        rows = {row.name: row for row in report.rows}
        row = rows.get(stage.name)
        if row is None:
            continue
        yield {
            "machine": report.name, "ms": row.ms, "memory": row.peak_memory_gb, "loss": row.last_loss,
            "step": row.last_step, "mfu": row.mfu, "times": row.times_before, "before": start and rows.get(start.name),
        }


def write_page(reports, path):
    """Write the page of all lessons and the given reports to `path`."""
    lessons = []
    for stage in STAGES:
        start = BY_LABEL.get(stage.before)
        lesson = read_lesson(start and start.path.read_text(), stage.path.read_text())
        lessons.append({
            "stage": stage, "before": start, "lesson": lesson,
            "paragraphs": re.split(r"\n\n|\n(?=(?:Gain|Cost|Beware):)", lesson.body), "hunks": lesson_view(lesson),
            "effects": list(effects(reports, stage, start)),
        })
    machines = [machine_view(report) for report in reports]
    flat = {f"{i}:{kind}": chart for i, machine in enumerate(machines) for kind, chart in machine["charts"].items()}
    script, divs = components(flat)
    for i, machine in enumerate(machines):
        machine["charts"] = {kind: divs[f"{i}:{kind}"] for kind in machine["charts"]}

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "ladder"), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    light = HtmlFormatter(style="default").get_style_defs(".code")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".code")
    text = environment.get_template("page.html.j2").render(
        lessons=lessons, machines=machines, script=script, light=light, dark=dark,
        bokeh=Resources(mode="inline", components=["bokeh"]).render(),
    )
    if path.is_dir():
        raise UserError(f"--html {path} is a folder: name a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
