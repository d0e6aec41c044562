"""What do the races in logs/reference/ say? Writes the standings of each, and the tables and pictures of PAGE.

    python -m experiments.race_docs
"""
import argparse
import math

from experiments import race_record
from ladder.rungs.list import ROOT
from ladder.show.contest import read_csv
from ladder.show.logs import ORDER, stage_of
from ladder.show.plots import colors_of, save
from ladder.show.report import build_report
from ladder.show.standings import FILE, KEY, race_texts
from ladder.show.tables import batch_of, data_of, machine_of, markdown, write_between

PAGE = "docs/results.md"
RACES, LEAD = "races.png", "lead.png"
LEADERS = {"24": "#4f7fc4", "30": "#c95a2e", "31": "#35ab72"}  # the colors of the rungs in the second one, by label


def race_name(report):
    """A race's text, its tokens, and the model."""
    trunk = ", long trunk" if "total batch" in report.race.facts else ""
    return f"{data_of(report)}, {report.setting['model']}{trunk}"


def races_of(folders):
    """The reports of races: those of the same kind of tokens together, today's and those of many rungs first."""
    races = [build_report(folder) for folder in folders]
    return sorted(races, key=lambda race: (
        data_of(race).partition(" (")[2], "total batch" in race.race.facts, -len(race.race.racers),
        race.setting["model"]))


def race_table(report):
    texts, caption = race_texts(report)
    rows = texts.drop(columns="rung").rename(columns={"label": ""}).to_dict("records")
    return (f"### {race_name(report)}\n\n{markdown(rows, 2)}\n\n"
            f"{machine_of(report)}, {batch_of(report)}. {caption}")


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
    rows = [f"{stage_of(name).title}  {stage_of(name).label}" for name in names]
    panels = []
    for report in reports:
        heading = race_name(report).replace(" (", "\n(").replace(", ", "\n")
        panels.append(race_panel(report, names) | {"rows": rows, "heading": heading})
    machines = "; ".join(dict.fromkeys(machine_of(report) for report in reports))
    return {"title": "Seconds to the same loss, rung by rung", "height": 1.5 + 0.28 * len(rows), "panels": panels,
            "caption": "The share of the first rung's seconds, the median of the seeds; thin lines: lowest to highest, "
            f"with an arrow where a seed never got there. No bar: not raced. Measured on {machines}."}


def lead_curves(report, style):
    """How far some rungs are below the first one's loss after the same tokens, the means of the seeds."""
    first, *others = report.race.racers
    curves = []
    for racer in others:
        if racer.label in LEADERS:
            leads = [before - after for before, after in zip(first.losses, racer.losses, strict=True)]
            curves.append({"title": racer.label, "end": racer.label, "loss": leads, "style": style,
                           "tokens": [step * report.race.rows[0]["tokens"] for step in racer.steps],
                           "color": LEADERS[racer.label]})
    curves.sort(key=lambda curve: curve["loss"][-1])
    for place, curve in enumerate(curves):  # names that can be told apart
        curve["shift"] = 7 * place - 3.5 * (len(curves) - 1)
    return curves


def lead_picture(reports):
    """The lead over the first rung against tokens: a panel for each kind of tokens, a kind of line for each text."""
    kinds, styles = {}, {}
    for report in reports:
        text, _, kind = data_of(report).partition(" (")
        style = styles.setdefault(f"{text}, {report.setting['model']}", ["solid", "dashed", "dotted"][len(styles) % 3])
        kinds.setdefault(kind.rstrip(")"), []).extend(lead_curves(report, style))
    panels = [{"heading": kind, "curves": curves, "x": "tokens", "xlabel": "tokens trained on", "xscale": "log",
               "ylabel": "nats below the first rung"} for kind, curves in kinds.items()]
    firsts = "/".join(sorted({report.race.racers[0].label for report in reports}))
    return {"title": f"The lead over rung {firsts}, after the same tokens", "height": 4.2, "panels": panels,
            "caption": "Validation losses, the means of the seeds; "
            + "; ".join(f"{style}: {text}" for text, style in styles.items())}


def pictures(races):
    """{file name: picture} of PAGE; the lead is that of races with two of its rungs or more."""
    leading = [race for race in races if len({*LEADERS} & {racer.label for racer in race.race.racers}) > 1]
    return {RACES: races_picture(races)} | ({LEAD: lead_picture(leading)} if leading else {})


def write_tables(races, root=ROOT):
    write_between(root / PAGE, "race", [*map(race_table, races), KEY])


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    records = sorted((ROOT / "logs" / "reference").glob(f"*/{race_record.FILE}"))
    for path in records:
        race_record.write_standings(read_csv(path), path.with_name(FILE))
    races = races_of(path.parent for path in records)
    write_tables(races)
    for name, picture in pictures(races).items():
        save(picture, ROOT / "docs" / name)
    print(f"{len(records)} times {FILE}, {PAGE}, {RACES}, {LEAD}: rewritten")


if __name__ == "__main__":
    main()
