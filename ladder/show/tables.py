"""The tables of the ladder, as short texts: in a terminal, in README.md and docs/, as JSON and CSV."""
import json
import re

import pandas

from ladder.count.cards import CARDS, card_of
from ladder.count.floors import STORED, floor_data
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.records.logs import has_steps, reference_folders, stage_of
from ladder.records.significance import BEYOND_CHANCE, FEWEST_ROUNDS
from ladder.records.summary import build_report, warnings
from ladder.records.two_logs import compare
from ladder.records.work import UNRELIABLE, is_reliable
from ladder.rungs.list import BY_LABEL, BY_NAME, LADDER, ROOT, RUNGS
from ladder.show import formats
from ladder.show.columns import (CAUSAL, CONVENTION, OLDER, README_COLUMNS, RESULTS_COLUMNS, all_columns, last_steps,
                                 markdown, texts_of)
from ladder.show.formats import NOTHING
from ladder.show.standings import print_race
from ladder.show.terminal import print_texts
from ladder.show.tree import tree_lines

DIGITS = {"loss A": "{:.6f}", "loss B": "{:.6f}", "B - A": "{:+.6f}", "ms A": "{:.2f}", "ms B": "{:.2f}",
          "A / B": "{:.2f}"}
WORDS = ("matmul", "head", "attention", "pointwise", "loss", "optimizer", "data", "waiting")  # for KINDS, in a table


def gain(report):
    """How many times the baseline's speed the fastest rung has; 0 without a baseline."""
    return max((row.times_baseline or 0 for row in report.rows), default=0)


def floors_of(report):
    """{label: ms of its counted floor} of the report's card, for what is stored; {} for other cards and batches."""
    card = card_of(report.setting["device"])
    stored = all(report.setting[key] == value for key, value in STORED.items())
    rungs = floor_data([card])["rungs"] if card and stored else []
    return {row["label"]: row["ms"][card.name]["floor"] for row in rungs}


def measured_over_floors():
    """(lowest, highest): how many times its floor a step took, of the GPUs' records and the lecture's A100."""
    lecture = CARDS["A100"]
    floors = {row["label"]: row["ms"][lecture.name]["floor"] for row in floor_data([lecture])["rungs"]}
    ratios = [rung.lecture_ms / floors[rung.label] for rung in LADDER if rung.lecture_ms]
    for report in map(build_report, reference_folders()):
        floors = floors_of(report)
        ratios += [row.ms / floors[stage_of(row.name).label] for row in todays_rows(report)
                   if stage_of(row.name).label in floors]
    return min(ratios), max(ratios)


def data_of(report):
    """The name of the text, and the kind of its tokens."""
    return report.setting["data"] or "unknown data"


def machine_of(report):
    """The device, of a CPU its cores and allocator."""
    device, details = report.setting["device"] or "unknown device", []
    if device == "mps":
        device = report.machine.get("name", device)
    if report.cores:
        details.append(f"{report.cores} cores")
    known = [name for name in report.allocators if name not in ("unknown", "torch")]
    if known:
        details.append(f"allocator: {' and '.join(known)}")
    return f"{device} ({', '.join(details)})" if details else device


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
    return f"Fastest matrix products measured: {rate / 1e12:.2f} TFLOP/s in {best}."


def remarks_of(report):
    """What a reader of the table must know about the record beside the rule: as its machine.json says it."""
    return "".join(f" {remark}" for remark in report.machine.get("remarks", ())) + marks_of(report)


def marks_of(report):
    """What the mark at a row of older code says, if there is one."""
    return f" Scripts marked {OLDER} have changed since." * any(row.older_code for row in report.rows)


def attention_of(report):
    """The kernel that computed attention from rung 6 on, in a sentence: a GPU has several, of different speeds."""
    kernel = report.machine.get("attention")
    return f"torch's attention kernel: {kernel}." if kernel and report.machine["device"] == "cuda" else ""


def conditions(report):
    """Where and on what the numbers were measured, and what MFU is a share of."""
    return " ".join(filter(None, [f"{where(report)}.", fastest(report), attention_of(report)]))


def few_rounds(report):
    """How many rounds a report has, and what that many cannot say; "" where they are enough."""
    rounds = max((row.rounds for row in report.rows), default=FEWEST_ROUNDS)
    return f"{rounds} round{'s' * (rounds > 1)}: too few to name a gain" if rounds < FEWEST_ROUNDS else ""


def print_report(report, console, card=None):
    """A report in a terminal: its warnings, its table, and its profile if it has one; or a race.

    `card` is the GPU of logs that name none.
    """
    if report.race:
        print_race(report, console)
        return
    for warning in warnings(report, card):
        console.print(f"! {warning}", style="yellow")
    columns = all_columns(report)
    goes = sorted((column for column in columns if column.goes), key=lambda column: -column.goes)
    explains = {column.heading: column.explains for column in columns}
    print_texts(texts_of(report.rows, columns), console, " — ".join(filter(None, [report.name, few_rounds(report)])),
                f"{conditions(report)}{remarks_of(report)}", explains, [column.heading for column in goes])
    if report.profile:
        print_profile(report.profile, console)


def print_comparison(one, other, console, card=None):
    result = compare(one, other, card)
    warm = {*one.steps[one.warm_up :]} & {*other.steps[other.warm_up :]}
    counted = result.rows[result.rows["step"].isin(warm)]
    median = (counted if len(counted) else result.rows).median().to_frame().T
    rows, texts = pandas.concat([result.rows, median]), pandas.DataFrame()
    for name, form in DIGITS.items():
        texts[name] = rows[name].map(form.format)
    texts.insert(0, "step", [*result.rows["step"].map(str), "median"])
    texts.iloc[-1, 1:3] = ""
    print_texts(texts, console, f"{one.path}  against  {other.path}", first_to_go=("loss A", "loss B", "ms A", "ms B"))
    for sentence in result.sentences:
        console.print(sentence)


def print_profile(profile, console):
    """The profile as a table: ms per step, by kind of work."""
    rows = []
    for found in profile["rungs"]:
        times = dict(zip(WORDS, found["parts_ms"].values(), strict=True))
        times |= {"step": found["step_ms"], "plain": found["plain_ms"], "products": found["floor_ms"]}
        rows.append({"rung": BY_NAME[found["name"]].row + " (!)" * (not is_reliable(found))}
                    | {word: formats.ms(ms) for word, ms in times.items()})
    caption = "" if all(map(is_reliable, profile["rungs"])) else f"(!) {UNRELIABLE}"
    explains = {"step": "step: under the profiler", "plain": "plain: without it",
                "products": "products: all of its matrix products at the rate measured"}
    print_texts(pandas.DataFrame(rows), console, f"ms per step, {profile['name']}, {profile['model']}, "
                f"B={profile['B']} T={profile['T']}", caption, explains, ("plain", "data", "wait", "products"),
                padding=(0, 1, 0, 0), pad_edge=False)


def print_end(runner, console, quick):
    """The table, and what failed; after a quick look, what comes next."""
    if has_steps(runner.log_dir):
        print_report(build_report(runner.log_dir), console)
        console.print(f"logs: {runner.log_dir}")
    else:
        console.print("no rung finished a step, so there is no table")
    failed = runner.failed()
    if failed:
        console.print(f"{len(failed)} of {runner.n_jobs} runs did not finish:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.name}: {outcome.status}: {outcome.reason}")
    elif quick:
        steps = 10 if runner.device == "cpu" else 200
        minutes = "; allow ten minutes on a CPU" if runner.device == "cpu" else ""
        console.print("\nThat was a small model. The same with GPT-2 (124M): "
                      f"python -m ladder run --rungs 0,5,6 --steps {steps}{minutes}", soft_wrap=True)


def print_largest(found, console):
    """The largest batch of each rung, as max_batch.py found it; returns the exit code."""
    texts = [{"rung": rung.title, "largest B": str(best), "tokens/s": formats.number(speed),
              "what stopped the next one tried": why} for rung, (best, speed, why) in found.items()]
    print_texts(pandas.DataFrame(texts), console, "The largest batch, to within an eighth", wraps=(0, 3))
    return 0 if all(best for best, _, _ in found.values()) else 1


def todays_rows(report):
    """The rows without those that their record gives a title of its own: their scripts have changed, or are gone."""
    return [row for row in report.rows if row.name not in report.machine.get("titles", {})]


def short_table(report):
    """README.md's: each rung's step with its spread. Floors are of today's scripts, so they are not beside records."""
    rounds = max(row.rounds for row in report.rows)
    table = markdown(texts_of(todays_rows(report), README_COLUMNS))
    return (f"{table}\n\n{where(report)}. Median of {rounds} rounds, lowest to highest; * marks a significant "
            f"difference from the rung before (paired test, p < {BEYOND_CHANCE} after Holm's correction)."
            f"{marks_of(report)}")


def long_table(report):
    """docs/results.md's; the document says what its columns are."""
    rounds, commit = max(row.rounds for row in report.rows), report.machine.get("commit", "unknown")
    best, rate = max(report.machine["rates"].items(), key=lambda item: item[1])
    table = markdown(texts_of(todays_rows(report), RESULTS_COLUMNS))
    return (f"{table}\n\n*{where(report)}, {rounds} rounds, commit {commit}. "
            f"Measured peak: {rate / 1e12:.2f} TFLOP/s in {best}. Losses: step {last_steps(report)}."
            f"{marks_of(report)}*")


def published_table():
    """docs/results.md's: what others measured on GPUs, of published.csv, to which a figure is added by a row.

    A row with arrows is a ladder of changes, one on top of the other. T is 1024 and B as stated; the remark says what
    else differs from these scripts. Numbers are the source's own; those marked † are computed here from what it gives.
    """
    rows = pandas.read_csv(ROOT / "ladder" / "count" / "published.csv", dtype=str, keep_default_na=False)
    rows["GPU"] = rows["card"].where(rows["cards"] == "1", rows["cards"] + " × " + rows["card"])
    remarks = rows["remark"].where(rows["remark"] == "", ": " + rows["remark"])
    rows["source"] = "[" + rows["who"] + "](" + rows["link"] + ")" + remarks
    columns = ["GPU", "B", "what", "ms", "tokens/sec", "source"]
    return markdown(rows[columns].replace("", NOTHING), len(columns))


def write_between(path, name, tables):
    """Put tables between the marks called `name` of a document; UserError where it lacks them."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    parts = re.split(f"(?s)(?<={begin}\n).*(?={end})", path.read_text(encoding="utf-8"))
    if len(parts) != 2:
        raise UserError(f"{path.name} must hold {begin} and then {end} around the table, on lines of their own")
    text = "\n\n".join(tables)
    if path.parent.name == "docs":
        text = re.sub(r"\]\((?!https:)", "](../", text)
    write_whole(path, f"{parts[0]}{text}\n{parts[1]}")


def scripts_table():
    """beyond/README.md's: the tree from rung 10 on, and what each script brings."""
    lines = list(tree_lines())
    branch = "\n".join(line for line, _ in lines[[rung.label for _, rung in lines].index("10"):])
    rows = [{"script": f"[`{rung.label}`]({rung.file.removeprefix('beyond/')})", "the idea": rung.title,
             "what it brings": rung.brings} for rung in RUNGS if rung.track]
    return f"```\n{branch}\n```\n\n{markdown(pandas.DataFrame(rows), 3)}"


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
    write_between(root / "docs" / "results.md", "published", [published_table()])
    write_between(root / "beyond" / "README.md", "scripts", [scripts_table()])


def as_json(reports):
    """All numbers of the reports; null where a log does not say."""
    return json.dumps([
        {"name": report.name, "setting": report.setting, "machine": report.machine,
         "mfu": f"{CONVENTION}; {CAUSAL.explains}", "rows": json.loads(report.table.to_json(orient="records"))}
        for report in reports
    ], indent=2)
