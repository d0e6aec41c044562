"""The tutorial page: one static file with each lesson, its exercise, its diff, and what it did on each machine.

Jinja fills `page.html.j2` with what page_text.py makes of lessons, and with measurements. Nothing is fetched and
nothing is drawn in the browser. Links to files of the repository start with "../", as docs/index.html needs them.
"""
import os
import re
from dataclasses import replace
from pathlib import Path

import jinja2

from ladder import formats
from ladder.count.cards import CARDS
from ladder.count.floors import STORED, stored_floors
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.records.summary import warnings
from ladder.rungs.lessons import read_exercises, read_lesson
from ladder.rungs.list import BY_LABEL, BY_NAME, ROOT, RUNGS
from ladder.show.charts import KIND_COLORS, profile_bars, step_bars
from ladder.show.columns import STARS, all_columns, mfu_of, texts_of, times_before
from ladder.show.facts import data_of, fastest, few_rounds, floors_of, gain, remarks_of, where
from ladder.show.page_text import blocks_of, exercise_html, hunk_html, picture, prose
from ladder.show.standings import BRACKETS, FOR_ALL, between, race_caption, race_columns, p_of, refuted_in
from ladder.show.tree import EVENINGS, EXERCISES, PAGE_PARTS, after, depth, evening

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "index.html"
COUNTED_FOR = ("H100", "A100")
LARGE = 200  # rows: a longer diff is the terminal's
# What the page says above a lesson, with a link.
STARTS_FROM = re.compile(r"\s*Starts from (?:rung \w+|\w+\.py)(?: and \w+\.py)?\.")


def figures_of(key):
    """The figures of a rung's label or a part's id: 6.svg and 6-growth.svg are rung 6's."""
    paths = [path for path in HERE.glob("pictures/*.svg") if path.stem.partition("-")[0] == key]
    return "".join(map(picture, sorted(paths)))


def lesson_view(rung):
    """All that the template shows of a rung except its measurements."""
    start, source = rung.start, rung.path.read_text(encoding="utf-8")
    before = start and start.path.read_text(encoding="utf-8")
    lesson = read_lesson(before, source)
    is_long = sum(map(len, lesson.hunks)) > LARGE
    blocks = {"-": blocks_of(before), "+": blocks_of(source)} if start else {}
    diff = "".join(hunk_html(hunk, blocks) for hunk in lesson.hunks)
    head, _, tail = STARTS_FROM.sub("", lesson.title).partition(": ")
    exercise = read_exercises().get(rung.label)
    return {"rung": rung, "head": head, "tail": tail, "after": after(rung), "evening": evening(rung),
            "prose": prose(STARTS_FROM.sub("", lesson.body).strip("\n")), "pictures": figures_of(rung.label),
            "exercise": exercise and exercise_html(exercise), "diff": None if is_long else diff,
            "added": lesson.count("+"), "removed": lesson.count("-")}


def pair(rung):
    """The rung that it is compared with, if there is one, and itself."""
    return [*rung.starts[:1], rung]


def from_to(texts):
    """What a change did to a value: "60 → 41"; one text where nothing changed."""
    return " → ".join(dict.fromkeys(texts))


def measured_rows(rung, reports):
    """What a rung's change did on the machines that ran it, each {column: text}."""
    for report in reports:
        by_name = {row.name: row for row in report.rows}
        if rung.name in by_name:
            row, rows = by_name[rung.name], [by_name[other.name] for other in pair(rung) if other.name in by_name]
            yield {"measured on": report.name.replace("_", " ") + ", older code" * row.older_code,
                   "ms/step": from_to(formats.ms(row.ms) for row in rows), "× previous": times_before(row),
                   "MFU": from_to(map(mfu_of, rows)),
                   "GB": from_to(formats.gigabytes(row.peak_memory_gb) for row in rows),
                   "loss": f"{from_to(formats.loss(row.last_loss) for row in rows)} at step {row.last_step}"}


def race_rows(rung, reports):
    """What a rung reached in the races that had it, each {column: text}."""
    for report in reports:
        if report.race and rung.name in report.race.race_table.index:
            row = report.race.race_table.loc[rung.name]
            yield {"race": f"{data_of(report)}, {report.setting['model']}",
                   "validation loss (range)": formats.with_spread(row.val_loss, row.val_low, row.val_high,
                                                                  formats.loss),
                   "change from the previous row": between(row.change, formats.difference),
                   "p of the loss": p_of(row.change, rung.name in refuted_in(report))}


def floor_sentence(rung, floors):
    """The least that a rung's step costs, and what the lecture published of it; "" where neither is in `floors`."""
    if rung.label not in floors:
        return ""
    rows = [floors[other.label] for other in pair(rung) if other.label in floors]
    least = [f"{from_to(formats.ms(row['ms'][card]['floor']) for row in rows)} ms on an {card}" for card in COUNTED_FOR]
    moved, launches = (from_to(formats.number(row[key]) for row in rows) for key in ("gb", "launches"))
    text = (f"Computed minimum of a step at B={STORED['B']} T={STORED['T']}: {', '.join(least)}, with {moved} GB of "
            f"memory traffic in {launches} kernel launches.")
    if rung.lecture_ms:
        published = from_to(str(other.lecture_ms) for other in pair(rung) if other.lecture_ms)
        text += f" Published in Karpathy’s lecture for one A100: {published} ms."
    return text


def effect_view(rung, reports, floors):
    tables = [*measured_rows(rung, reports)], [*race_rows(rung, reports)]
    return {"tables": [rows for rows in tables if rows], "floor": floor_sentence(rung, floors)}


def table_view(rows, columns):
    """(the rows of a table, each {heading: text}; the sentences that explain its columns)."""
    texts = texts_of(rows, columns)
    rows = [dict(zip(texts, cells, strict=True)) for cells in zip(*texts.values(), strict=True)]
    return rows, [f"{column.explains}." for column in columns if column.explains and column.heading in texts]


def machine_view(report):
    view = {"id": report.name, "race": bool(report.race), "warnings": list(warnings(report)),
            "name": " — ".join(filter(None, [where(report), few_rounds(report)]))}
    if report.race:
        rows, explained = table_view([*report.race.race_table.itertuples()], race_columns(report))
        return view | {"rows": rows, "describe": " ".join([race_caption(report), *explained, BRACKETS, FOR_ALL])}
    rows, explained = table_view(report.rows, all_columns(report))
    describe = " ".join([fastest(report), *explained]).strip() + remarks_of(report)
    return view | {"rows": rows, "describe": describe}


def first_chart(reports, bars_of):
    """(which machine, its bars in percent of the longest) of the first report that has any; None without one."""
    for report in reports:
        bars = bars_of(report)
        if bars:
            percent = 100 / max(max(sum(bar.parts), bar.floor) for bar in bars)
            return where(report), [replace(bar, parts=[percent * part for part in bar.parts],
                                           floor=percent * bar.floor) for bar in bars]
    return None


def write_page(reports, path):
    """Write the page of all lessons and the given reports to `path`."""
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; name a file")
    # First the machine where the ladder gains the most; those without it by the number of their rungs.
    reports = sorted(reports, reverse=True, key=lambda report: (gain(report), len(report.runs.keys() & BY_NAME)))
    floors = stored_floors([CARDS[name] for name in COUNTED_FOR])
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template("page.html.j2").render(
        parts=[(part, prose(part.intro), figures_of(part.id), part.rungs) for part in PAGE_PARTS], depth=depth,
        lessons={rung.label: lesson_view(rung) for rung in RUNGS},
        effects={rung.label: effect_view(rung, reports, floors) for rung in RUNGS},
        steps=first_chart(reports, lambda report: step_bars(report, floors_of(report))),
        profile=first_chart(reports, lambda report: profile_bars(report.profile)),
        machines=list(map(machine_view, reports)), kinds=KIND_COLORS, stars=STARS,
        path=[(name, [BY_LABEL[label] for label in labels], EXERCISES[name]) for name, labels in EVENINGS.items()],
        style=(HERE / "page.css").read_text(encoding="utf-8"), script=(HERE / "page.js").read_text(encoding="utf-8"))
    path.parent.mkdir(parents=True, exist_ok=True)
    is_inside = path.resolve().is_relative_to(ROOT)
    to_root = Path(os.path.relpath(ROOT, path.resolve().parent)).as_posix() if is_inside else ROOT.as_uri()
    write_whole(path, text.replace('href="../', f'href="{to_root}/'))
