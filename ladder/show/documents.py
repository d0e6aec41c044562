"""The tables that the tool writes between marks in README.md, docs/ and beyond/; and a report as JSON and CSV."""
import json
import math
import re
import textwrap

import pandas

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.records.significance import FEWEST_ROUNDS
from ladder.rungs.list import BY_LABEL, ROOT
from ladder.show.columns import CAUSAL, CONVENTION, README_COLUMNS, RESULTS_COLUMNS, markdown, texts_of
from ladder.show.facts import fastest, gain, machine_of, marks_of, setting_of, todays_rows
from ladder.show.tree import PAGE_PARTS, chains


def short_table(report):
    """README.md's, below its caption: each rung's step with its spread. Floors are of today's scripts, so not here."""
    table, rounds = markdown(texts_of(todays_rows(report), README_COLUMNS)), max(row.rounds for row in report.rows)
    return (f"**{machine_of(report)}**, {setting_of(report)}. Medians and ranges of {rounds} rounds. × previous "
            f"compares with the rung above, and \\* marks a [significant difference](docs/results.md#the-ladder)."
            f"{marks_of(report)}\n\n{table}")


def long_table(report):
    """docs/results.md's, below its caption; the document says what its columns are."""
    table, rounds = markdown(texts_of(todays_rows(report), RESULTS_COLUMNS)), max(row.rounds for row in report.rows)
    commit = report.machine.get("commit", "unknown")
    return (f"**{machine_of(report)}.** *{setting_of(report)}; {rounds} rounds; commit: {commit}. {fastest(report)}"
            f"{marks_of(report)}*\n\n{table}")


def write_between(path, name, tables):
    """Put tables between the marks called `name` of a document; UserError where it lacks them."""
    begin, end, text = f"<!-- {name}:begin -->", f"<!-- {name}:end -->", "\n\n".join(tables)
    if path.parent.name == "docs":
        text = re.sub(r"\]\((?!https:)", "](../", text)
    page, n = re.subn(f"(?s)(?<={begin}\n).*(?={end})", lambda _: f"{text}\n", path.read_text(encoding="utf-8"))
    if n != 1:
        raise UserError(f"{path.name} must hold {begin} and then {end} around the table, on lines of their own")
    write_whole(path, page)


def scripts_list():
    """beyond/README.md's: the chains of scripts from rung 10 on, and what each script brings, by folder."""
    lines = [" → ".join(rung.label for rung in chain) for chain in chains(BY_LABEL["10"])]
    branches = "\n".join(textwrap.fill(line, 100, subsequent_indent="    ") for line in lines)
    texts = [f"```\n{branches}\n```"]
    for part in PAGE_PARTS[1:]:
        items = [f"- [`{rung.label}`]({rung.file.removeprefix('beyond/')}): {rung.brings}" for rung in part.rungs]
        texts += [f"**`{part.id}/`: {part.title}**", "\n".join(items)]
    return "\n\n".join(texts)


def write_tables(reports, root=ROOT):
    """Put the tables between their marks: in README.md of the machine where the ladder gains the most, docs/, beyond/.

    Both show only machines with the whole ladder in enough rounds to test a gain; `report` shows the others.
    """
    whole = [report for report in reports if {BY_LABEL["0"].name, BY_LABEL["10"].name} <= report.runs.keys()
             and min(row.rounds for row in report.rows) >= FEWEST_ROUNDS]
    if not whole:
        raise UserError(f"--readme: no record of the whole ladder has {FEWEST_ROUNDS} rounds; add --repeat "
                        f"{FEWEST_ROUNDS}")
    whole.sort(key=gain, reverse=True)
    write_between(root / "README.md", "ladder", [short_table(whole[0])])
    write_between(root / "docs" / "results.md", "ladder", [long_table(report) for report in whole])
    write_between(root / "beyond" / "README.md", "scripts", [scripts_list()])


def all_numbers(report):
    """A row for each script of a report, or of its race: there with the effects against the row before, and their p."""
    if not report.race:
        return report.table
    table = report.race.race_table.reset_index(drop=True)
    rates = [(*rates, math.nan)[:2] for rates in table.pop("rates")]
    for name, value_of in (("change", float), ("times", math.exp)):  # of the logarithms of times
        effects = [effect and {name: value_of(effect.mean), f"{name}_low_99": value_of(effect.low),
                               f"{name}_high_99": value_of(effect.high), f"{name}_p": effect.p}
                   for effect in table.pop(name)]
        table = table.join(pandas.DataFrame([effect or {} for effect in effects]))
    return table.join(pandas.DataFrame(rates, columns=["max_lr", "muon_lr"]))


def as_json(reports):
    """All numbers of the reports; null where a log does not say."""
    return json.dumps([
        {"name": report.name, "setting": report.setting, "machine": report.machine,
         "mfu": f"{CONVENTION}; {CAUSAL.explains}", "rows": json.loads(all_numbers(report).to_json(orient="records"))}
        for report in reports
    ], indent=2)


def as_csv(reports):
    tables = [all_numbers(report).assign(machine=report.name).set_index("machine") for report in reports]
    return pandas.concat(tables).to_csv()
