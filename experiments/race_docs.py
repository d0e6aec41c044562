"""What do the races in logs/reference/ say? Writes the tables and the picture of PAGE.

    python -m experiments.race_docs
"""
import argparse

from ladder import formats
from ladder.records.recipes import RACE
from ladder.records.summary import build_report
from ladder.rungs.list import ORDER, ROOT, rung_of
from ladder.show.charts import Bar
from ladder.show.columns import Column, markdown, texts_of
from ladder.show.documents import write_between
from ladder.show.facts import batch_of, data_of, machine_of
from ladder.show.plots import Panel, Picture, heading, save
from ladder.show.standings import BRACKETS, FOR_ALL, between, label_of, race_caption, race_columns, refuted_in

PAGE = "docs/results.md"
RACES = "races.png"
SIGNIFICANT = "#31688e"
LINKED_SCRIPT = [Column("", lambda row: f"`{label_of(row.name)}`"),
                 Column("the one change", lambda row: f"[{rung_of(row.name).title}]({rung_of(row.name).file})")]


def race_name(report):
    """A race's text, its tokens, and the model."""
    return f"{data_of(report)}, {report.setting['model']}"


def races_of(folders):
    """The reports of races: those of the same kind of tokens together, today's and those of many rungs first."""
    races = [build_report(folder) for folder in folders]
    return sorted(races, key=lambda race: (
        data_of(race).partition(" (")[2], is_older(race), -len(race.race.race_table),
        race.setting["model"]))


def race_table(report):
    """Without times, which `report` shows: a race is about losses."""
    columns = [column for column in race_columns(report, LINKED_SCRIPT) if not column.heading.startswith("ms")]
    texts = texts_of([*report.race.race_table.itertuples()], columns)
    return (f"### {race_name(report)}\n\n{markdown(texts, 2)}\n\n"
            f"*{machine_of(report)}, {batch_of(report)}. {race_caption(report, times=False)}*")


def race_bar(row, refuted):
    """How a script's loss differs from the row before, and the interval."""
    rung, effect = rung_of(row.name), row.change
    color = SIGNIFICANT if effect.significant and row.name not in refuted else "silver"
    return Bar(rung.title, rung.label, [effect.mean], between(effect, formats.difference), (effect.low, effect.high),
               color=color)


def races_picture(reports):
    """The effects in races side by side, those of the same script in one row."""
    tables = [report.race.race_table for report in reports]
    tables = [table[table.change.notna()] for table in tables]
    names = sorted({name for table in tables for name in table.name}, key=[*ORDER, *names_of(tables)].index)
    rows = [heading(rung_of(name)) for name in names]
    panels = []
    for report, table in zip(reports, tables, strict=True):
        above = race_name(report).replace(" (", "\n(").replace(", ", "\n")
        bars = [race_bar(row, refuted_in(report)) for row in table.itertuples()]
        panels.append(Panel("nats; negative is better", bars, title=above))
    machines = "; ".join(dict.fromkeys(machine_of(report) for report in reports))
    caption = ("Means over the seeds. Lines: 99 % intervals that hold for all rows at once. Gray: not significant. "
               f"Trained on {machines}.")
    return Picture("How each script changes the validation loss", caption, 1.8 + 0.28 * len(rows), panels, rows)


def names_of(tables):
    return [name for table in tables for name in table.name]


def is_older(race):
    """Run on the long trunk, by a rule that has since been replaced."""
    return "total batch" in race.race.facts


def pictures(races):
    """{file name: picture} of PAGE, which shows the races by today's rule only."""
    return {RACES: races_picture([race for race in races if not is_older(race)])}


def write_tables(races, root=ROOT):
    """The page has only the races by today's rule; its text says what the older ones add."""
    newer = [race for race in races if not is_older(race)]
    key = [f"- {column.explains}." for column in race_columns(newer[0])
           if column.explains and not column.heading.startswith("ms")]
    key = "\n".join([*key, f"- {BRACKETS} {FOR_ALL}"])
    write_between(root / PAGE, "race", [*map(race_table, newer), key])


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    races = races_of(path.parent for path in sorted((ROOT / "logs" / "reference").glob(f"*/{RACE}")))
    write_tables(races)
    for name, picture in pictures(races).items():
        save(picture, ROOT / "docs" / name)
    print(f"{PAGE}, {RACES}: rewritten from {len(races)} times {RACE}")


if __name__ == "__main__":
    main()
