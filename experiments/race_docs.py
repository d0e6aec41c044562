"""What do the races in logs/reference/ say? Writes the standings of each, and the tables and pictures of PAGE.

    python -m experiments.race_docs
"""
import argparse
import math

from experiments import race_record
from ladder.records.logs import ORDER, stage_of
from ladder.records.race import FILE
from ladder.records.recipes import read_csv
from ladder.records.summary import build_report
from ladder.rungs.list import ROOT
from ladder.show.plots import colors_of, heading, save
from ladder.show.standings import KEY, race_texts, with_range
from ladder.show.tables import NOTHING, batch_of, data_of, machine_of, markdown, write_between

PAGE = "docs/results.md"
RACES = "races.png"


def race_name(report):
    """A race's text, its tokens, and the model."""
    return f"{data_of(report)}, {report.setting['model']}"


def races_of(folders):
    """The reports of races: those of the same kind of tokens together, today's and those of many rungs first."""
    races = [build_report(folder) for folder in folders]
    return sorted(races, key=lambda race: (
        data_of(race).partition(" (")[2], is_older(race), -len(race.race.racers),
        race.setting["model"]))


def race_table(report):
    texts, caption = race_texts(report)
    rows = texts.drop(columns="rung").rename(columns={"label": ""}).to_dict("records")
    return (f"### {race_name(report)}\n\n{markdown(rows, 2)}\n\n"
            f"{machine_of(report)}, {batch_of(report)}. {caption}")


def older_table(older, newer):
    """A row for each older race: the losses of its first rung, of the newer races' last, and of those they lack."""
    known = {racer.name: racer for race in newer for racer in race.race.racers}
    shown = {}  # by name; the columns
    for race in older:
        first, *others = race.race.racers
        shown |= {racer.name: racer for racer in [first, *others]
                  if racer is first or racer.name not in known or racer.name == [*known][-1]}
    rows = []
    for race in older:
        losses = {racer.name: with_range(racer.val_loss, "{:.3f}") for racer in race.race.racers}
        rows.append({"text": race_name(race), "seeds": race.race.caption.partition(" seed")[0],
                     **{f"`{racer.label}`": losses.get(name, NOTHING) for name, racer in shown.items()}})
    return f"### Older races\n\n{markdown(rows, 1)}"


def race_bar(racer, whole, color):
    """A rung's share of the first one's seconds; `whole` is that of a run which never gets to the target."""
    middle, low, high = [min(percent, whole) for percent in racer.percent]
    reached = math.isfinite(racer.percent[0])
    return {"title": racer.title, "label": racer.label, "parts": [middle], "low": low, "high": high, "color": color,
            "open": racer.percent[2] == math.inf, "pale": not reached,
            "end": f"{middle:.0f} %" if reached else "not reached"}


def race_panel(report, names):
    """The bars of a race; colored as in `names`."""
    racers, colors = report.race.racers, colors_of(names)
    seconds = racers[0].seconds[0]
    bars = [race_bar(racer, racer.steps[-1] * racer.ms / 10 / seconds, colors[racer.name]) for racer in racers]
    return {"bars": bars, "xlabel": f"% of {seconds:,.0f} s\nto {report.race.target:.2f} nats"}


def races_picture(reports):
    """The bars of races side by side, those of the same rung in one row."""
    raced = list(dict.fromkeys(racer.name for report in reports for racer in report.race.racers))
    names = sorted(raced, key=[*ORDER, *raced].index)
    rows = [heading({"title": stage_of(name).title, "label": stage_of(name).label}) for name in names]
    panels = []
    for report in reports:
        above = race_name(report).replace(" (", "\n(").replace(", ", "\n")
        panels.append(race_panel(report, names) | {"rows": rows, "heading": above})
    machines = "; ".join(dict.fromkeys(machine_of(report) for report in reports))
    return {"title": "Seconds to the same loss, rung by rung", "height": 1.5 + 0.28 * len(rows), "panels": panels,
            "caption": "The share of the first rung's seconds, the median of the seeds; thin lines: lowest to highest, "
            f"with an arrow where a seed never got there. No bar: not raced. Measured on {machines}."}


def is_older(race):
    """Run on the long trunk, by a rule that has since been replaced."""
    return "total batch" in race.race.facts


def pictures(races):
    """{file name: picture} of PAGE, which shows the races by today's rule only."""
    return {RACES: races_picture([race for race in races if not is_older(race)])}


def write_tables(races, root=ROOT):
    newer = [race for race in races if not is_older(race)]
    older = [race for race in races if is_older(race)]
    write_between(root / PAGE, "race", [*map(race_table, newer), KEY, older_table(older, newer)])


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    records = sorted((ROOT / "logs" / "reference").glob(f"*/{race_record.FILE}"))
    for path in records:
        race_record.write_standings(read_csv(path), path.with_name(FILE))
    races = races_of(path.parent for path in records)
    write_tables(races)
    for name, picture in pictures(races).items():
        save(picture, ROOT / "docs" / name)
    print(f"{len(records)} times {FILE}, {PAGE}, {RACES}: rewritten")


if __name__ == "__main__":
    main()
