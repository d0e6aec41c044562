"""The tables of the ladder, as short texts: in a terminal, in README.md and docs/, as JSON and CSV."""
import json
import re

import pandas

from ladder.count.cards import CARDS
from ladder.count.floor import floor_data
from ladder.count.published import read_published
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.scripts.stages import BY_LABEL, ROOT
from ladder.show.chance import BEYOND_CHANCE, FEWEST_ROUNDS
from ladder.show.logs import stage_of
from ladder.show.report import allocators, cores_of, warnings
from ladder.show.standings import KEY, WIDE, race_texts
from ladder.show.terminal import print_texts

NOTHING = "–"  # where a log does not say
NO_TEST = "?"  # after a ratio that too few rounds tell from chance
CONVENTION = "MFU counts attention's FLOPs in full, as PaLM does; causal, the half that a causal kernel computes"
HEADINGS = (f"× before: with * significant, p < {BEYOND_CHANCE} in a paired test over {FEWEST_ROUNDS} rounds or more; "
            "else no measurable gain, or with ? too few rounds to tell. s to: seconds to the first step, or "
            "validation, with this loss, the lowest that all reach. 1st step: with compilation, unless its graphs were "
            "in torch's cache")
# The columns of the Markdown tables, and their headings; the first ones are words, the others numbers.
README = {"file": "file", "title": "the one change", "range": "tokens/sec", "times_baseline": "× baseline",
          "a100": "A100: floor / published, ms"}
RESULTS = {"label": "", "file": "file", "title": "the one change", "ms": "ms/step", "spread": "spread",
           "speed": "tokens/sec", "times_baseline": "× baseline", "mfu": "MFU", "causal": "causal", "memory": "peak GB",
           "loss": "loss"}


def data_of(report):
    """The name of the text, and the kind of its tokens."""
    return report.setting["data"] or "unknown data"


def machine_of(report):
    """The device, of a CPU its cores and allocator."""
    cores = cores_of(report)
    known = [name for name in allocators(report) if name not in ("unknown", "torch")]
    details = [f"{cores} cores"] * (cores > 0) + [f"allocator: {' and '.join(known)}"] * bool(known)
    return (report.setting["device"] or "unknown device") + (f" ({', '.join(details)})" if details else "")


def batch_of(report):
    return "B={B} T={T}".format(**report.setting) if report.setting["B"] else "unknown batch"


def where(report):
    """One line: the machine, the model, the batch and the text."""
    model = report.setting["model"] or "unknown model"
    return f"{machine_of(report)}, {model}, {batch_of(report)}, {data_of(report)}"


def fastest(report):
    """What MFU is a share of, in a sentence; "" where it was not measured."""
    if not report.machine:
        return ""
    best, rate = max(report.machine["rates"].items(), key=lambda item: item[1])
    return f"Fastest matrix products measured: {rate / 1e12:.2f} TFLOP/s in {best}. {CONVENTION}."


def conditions(report):
    """Where and on what the numbers were measured, and what MFU is a share of."""
    return f"{where(report)}. {fastest(report)}".strip()


def texts_of(report):
    """The report as short strings: a DataFrame with fixed column names, one row per rung."""
    table, rows = report.table, report.rows
    stages = [stage_of(row.name) for row in rows]

    def column(name, pattern):
        return [NOTHING if pandas.isna(value) else pattern.format(value) for value in table[name]]

    work = table["tokens_per_second"] * table["ms"]
    slow, fast = work / table["ms_high"], work / table["ms_low"]
    marks = [NO_TEST if pandas.isna(p) else "*" * (p < BEYOND_CHANCE) for p in table["p_before"]]
    floors = {row["label"]: f"{row['ms']['A100']['floor']:,.0f}" for row in floor_data([CARDS["A100"]])["rungs"]}
    return pandas.DataFrame({
        "label": [stage.label for stage in stages],
        "file": [f"[`{stage.file}`]({stage.file})" for stage in stages],
        "title": table["title"],
        "ms": [f"{row.ms:,.1f}" if row.ms < 1000 else f"{row.ms:,.0f}" for row in rows],
        "spread": [f"{row.ms_low:,.0f}–{row.ms_high:,.0f}" for row in rows],
        "speed": column("tokens_per_second", "{:,.0f}"),
        "range": [f"{row.tokens_per_second or 0:,.0f} ({low:,.0f}–{high:,.0f})"
                  for row, low, high in zip(rows, slow, fast, strict=True)],
        "times_baseline": column("times_baseline", "{:.2f}"),
        "times_before": [text + mark if text != NOTHING else text
                         for text, mark in zip(column("times_before", "{:.2f}"), marks, strict=True)],
        "mfu": [text + " (!)" * (share > 1) for text, share in zip(column("mfu", "{:.0%}"), table["mfu"], strict=True)],
        "causal": column("mfu_causal", "{:.0%}"),
        "memory": column("peak_memory_gb", "{:.2f}"),
        "loss": [f"{loss:.3f}" for loss in table["last_loss"]],
        "seconds": column("seconds_to_common_loss", "{:,.0f}"),
        "first_step": column("first_step_s", "{:,.1f}"),
        "val_loss": column("last_val_loss", "{:.3f}"),
        "val_seconds": column("seconds_to_common_val_loss", "{:,.0f}"),
        "a100": [f"{floors[stage.label]} / {stage.lecture_ms or NOTHING}" if stage.label in floors else NOTHING
                 for stage in stages],
    })


def last_steps(report):
    return "/".join(map(str, sorted(report.table["last_step"].unique())))


def shown_texts(report):
    """What a terminal and the page show of texts_of: the columns with values, under headings."""
    headings = {
        "title": "rung", "ms": "ms/step", "spread": "spread", "speed": "tokens/s", "times_baseline": "× base",
        "times_before": "× before", "mfu": "MFU", "causal": "causal", "memory": "GB",
        "loss": f"loss @{last_steps(report)}", "seconds": f"s to {report.common_loss or 0:.2f}",
        "first_step": "1st step s", "val_loss": "val loss",
        "val_seconds": f"s to val {report.common_val_loss or 0:.2f}",
    }
    texts = texts_of(report)[list(headings)].rename(columns=headings)
    return texts.loc[:, (texts != NOTHING).any()]


def print_table(report, console, card=None):
    """The table in a terminal; a narrow one gets the columns that fit, the others are in `--csv`."""
    texts = shown_texts(report)
    left_out = ("spread", "× before", "causal", "s to", "1st step", "val loss") if console.width < WIDE else ()
    texts = texts[[heading for heading in texts if not heading.startswith(left_out)]]
    print_texts(texts, console, report.name, f"{conditions(report)} {HEADINGS}.", min_width=16)
    for warning in warnings(report, card):
        console.print(f"! {warning}", style="yellow")


def markdown(texts, headings, n_left):
    """The columns {name: heading} of `texts` in Markdown: the first `n_left` are words, the others numbers."""
    rows = [headings.values(), ["---"] * n_left + ["--:"] * (len(headings) - n_left), *texts[list(headings)].to_numpy()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def short_table(report):
    """README.md's: each rung's speed and its spread, and its counted and published times for an A100."""
    return (f"{markdown(texts_of(report), README, 2)}\n\n"
            f"{where(report)}; the median of {report.table['rounds'].max()} rounds, lowest to highest.")


def long_table(report):
    """docs/results.md's."""
    rounds = report.table["rounds"].max()
    spread = f" of {rounds} rounds, the spread their lowest and highest" if rounds > 1 else ""
    return (f"{markdown(texts_of(report), RESULTS, 3)}\n\n{conditions(report)} ms/step is the median{spread}, "
            f"the loss that of step {last_steps(report)}.")


def race_name(report):
    """A race's text, its tokens, and the model."""
    return f"{data_of(report)}, {report.setting['model']}"


def races_of(reports):
    """The races among reports: those of the same kind of tokens together, those of many rungs first."""
    races = (report for report in reports if report.race)
    return sorted(races, key=lambda race: (data_of(race).partition(" (")[2], -len(race.table), race.setting["model"]))


def race_table(report):
    """docs/race.md's."""
    texts, caption = race_texts(report)
    table = markdown(texts, {name: "" if name == "label" else name for name in texts if name != "rung"}, 2)
    return f"### {race_name(report)}\n\n{table}\n\n{machine_of(report)}, {batch_of(report)}. {caption}"


def published_table():
    """docs/floors.md's: what others measured on GPUs."""
    rows = read_published()
    remarks = rows["remark"].where(rows["remark"] == "", ": " + rows["remark"])
    rows["source"] = "[" + rows["who"] + "](" + rows["link"] + ")" + remarks
    columns = ["GPU", "B", "what", "ms", "tokens/sec", "source"]
    return markdown(rows.replace("", NOTHING), dict(zip(columns, columns, strict=True)), len(columns))


def write_tables(reports, root=ROOT):
    """Put all tables between their marks in README.md and docs/; raises UserError where the marks are missing.

    The README shows the machine with the most rungs; among several, the one where they gain the most.
    """
    ladder = sorted((report for report in reports if BY_LABEL["0"].name in report.runs),
                    key=lambda report: (-len(report.table), -report.table["times_baseline"].max()))
    for file, name, tables in [
        ("README.md", "ladder", [short_table(report) for report in ladder[:1]]),
        ("docs/results.md", "ladder", [long_table(report) for report in ladder]),
        ("docs/race.md", "race", [*map(race_table, races_of(reports)), KEY]),
        ("docs/floors.md", "published", [published_table()]),
    ]:
        if file.startswith("docs/"):
            tables = [re.sub(r"\]\((?!https:)", "](../", table) for table in tables]
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        parts = re.split(f"(?s)(?<={begin}\n).*(?={end})", (root / file).read_text(encoding="utf-8"))
        if len(parts) != 2:
            raise UserError(f"{file} must hold {begin} and then {end} around the table, on lines of their own")
        write_whole(root / file, "\n\n".join(tables).join([parts[0], "\n" + parts[1]]))


def as_json(reports):
    """All numbers of the reports; null where a log does not say."""
    return json.dumps([
        {"name": report.name, "setting": report.setting, "machine": report.machine, "common_loss": report.common_loss,
         "mfu": CONVENTION, "rows": json.loads(report.table.to_json(orient="records"))}
        for report in reports
    ], indent=2)


def as_csv(reports):
    return pandas.concat([report.table.assign(machine=report.name).set_index("machine") for report in reports]).to_csv()
