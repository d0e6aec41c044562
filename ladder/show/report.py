"""The table and the plots: what each rung did on a machine, from its logs.

Rows are rungs; a rung with several rounds (`run --repeat`) shows the median of the rounds' medians, and their spread.
Runs that differ in data, model, B, T or device are refused. Different memory allocators get a warning.
"""
import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import pandas

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.count.cards import CARDS
from ladder.count.floor import floor_data
from ladder.count.flops import mfu
from ladder.scripts.stages import BY_LABEL, BY_NAME, ROOT, STAGES
from ladder.show.floors import CLOCKED_HIGHER, fastest_ms
from ladder.show.logs import PEER, PEER_FILE, read_folder
from ladder.show.machine import read_machine
from ladder.show.profile import read_profile
from ladder.judge.race_table import read_race
from ladder.judge.standings import WIDE, race_texts

LADDER_MARKS = ("<!-- ladder:begin -->", "<!-- ladder:end -->")
BEYOND_MARKS = ("<!-- beyond:begin -->", "<!-- beyond:end -->")
RACE_MARKS = ("<!-- race:begin -->", "<!-- race:end -->")
BEYOND = {stage.name for stage in STAGES if stage.file.startswith("beyond/")}
PEER_TITLE = "transformers' GPT-2, everything on"
NOTHING = "–"  # in a table, where a log does not say
GIVEN = "given"  # the name of a rate that was not measured
NOISE = "(noise): the spreads of the two rungs overlap"
CONVENTION = "MFU counts attention's FLOPs in full, as PaLM does; causal, the half that a causal kernel computes"
WARM_UP_MS = 3000  # for a GPU to reach its clock, after a compiled step
IMPOSSIBLE = "an impossible measurement: the clock was probably read before the GPU had finished, or in wrong units"


@dataclass
class Row:
    """One rung on one machine. Times in ms or s, memory in GB (1e9 bytes), losses in nats, MFU as a share of 1."""

    name: str
    title: str
    ms: float
    ms_low: float  # of the rounds' medians; of the counted steps' middle half when there is one round
    ms_high: float
    rounds: int
    tokens_per_second: float | None
    times_baseline: float | None
    times_before: float | None
    before_within_noise: bool | None  # the spreads of the two overlap
    mfu: float | None  # by PaLM's FLOPs
    mfu_causal: float | None
    peak_memory_gb: float | None
    last_loss: float
    last_step: int
    seconds_to_common_loss: float | None
    first_step_s: float
    cold_first_step_s: float | None  # of the rounds that compiled; warm: all graphs came from the cache
    warm_first_step_s: float | None
    complete: bool
    last_val_loss: float | None
    seconds_to_common_val_loss: float | None


@dataclass
class Report:
    """All rows of one machine, and what they have in common."""

    name: str  # the folder's
    setting: dict  # data, model, B, T, device
    machine: dict  # rates and versions measured in the same run; {} when unknown
    common_loss: float | None  # None if every loss of a run is infinite or not a number
    common_val_loss: float | None  # None without a validation
    rows: list
    runs: dict  # {name: [Run, ...]}
    profile: dict | None  # where each rung's step time goes, as profile.json has it
    sweep: dict  # of a race, {rung: {its learning rates: validation loss}}; else {}
    timing: dict  # of a race, {rung: [Run, ...]} that measured the time of a step; {} without
    race: object = None  # all of its runs, a race_table.Race; None if this is none
    skipped: list = field(default_factory=list)  # why files of the folder were not used


def check_comparable(runs, folder):
    """Refuse to compare runs of different data, models, batches or devices; says which differ."""
    seen = {}
    for run in (run for rounds in runs.values() for run in rounds):
        for key, value in run.setting().items():
            if value is None:
                continue
            value = value.split(" | ")[0] if key == "data" else value
            first_value, first_path = seen.setdefault(key, (value, run.path))
            if value != first_value:
                raise UserError(
                    f"{folder}: logs of different {key} cannot be compared: {first_path} has {first_value!r}, "
                    f"{run.path} has {value!r}; report them from separate folders"
                )


def spread(rounds):
    """(low, high): of the rounds' medians, or with one round of the middle half of its counted steps."""
    if len(rounds) > 1:
        medians = [run.median_ms for run in rounds]
        return min(medians), max(medians)
    counted = rounds[0].ms[rounds[0].warm_up :]
    if len(counted) < 2:
        return counted[0], counted[0]
    low, _, high = statistics.quantiles(counted, n=4, method="inclusive")
    return low, high


def median_or_none(values):
    values = [value for value in values if value is not None]
    return statistics.median(values) if values else None


def common_lowest(losses_of_runs):
    """A loss that all runs reach: the highest of their lowest. Unlike a smoothed loss, it needs no parameter."""
    finite = [list(filter(math.isfinite, losses)) for losses in losses_of_runs]
    return max((min(losses) for losses in finite if losses), default=None)


def within_noise(one, other):
    """Whether the spreads of two rows overlap, as time per token; None without tokens."""
    if not one.tokens_per_second or not other.tokens_per_second:
        return None
    low, high, other_low, other_high = (
        ms / (row.ms * row.tokens_per_second) for row in (one, other) for ms in (row.ms_low, row.ms_high))
    return low <= other_high and other_low <= high


def read_or_skip(read, folder, skipped, default):
    """What `read` finds in a folder; if the file is damaged, `default`, and the reason goes to `skipped`."""
    try:
        return read(folder)
    except UserError as error:
        skipped.append(str(error))
        return default


def row_of(name, rounds, timed, rates, common_loss, common_val_loss):
    """The row of one rung, with the times of `timed`; compare_rows adds how it compares with others."""
    ms = statistics.median(run.median_ms for run in timed)
    low, high = spread(timed)
    clocked = rounds if timed is rounds else []  # a race's rounds may have shared the machine
    tokens, ranks = rounds[0].tokens_per_step, rounds[0].ranks
    speed = tokens / ms * 1000 if tokens else None
    title = BY_NAME[name].title if name in BY_NAME else PEER_TITLE if name == PEER else name
    return Row(
        name=name,
        title=title + (f", {ranks} ranks" if ranks > 1 else ""),
        ms=ms,
        ms_low=low,
        ms_high=high,
        rounds=len(timed),
        tokens_per_second=speed,
        times_baseline=None,
        times_before=None,
        before_within_noise=None,
        mfu=mfu(rounds[0], rates, speed),
        mfu_causal=mfu(rounds[0], rates, speed, causal=True),
        peak_memory_gb=median_or_none(run.peak_memory_gb for run in rounds),
        last_loss=statistics.median(run.losses[-1] for run in rounds),
        last_step=min(run.steps[-1] for run in rounds),
        seconds_to_common_loss=median_or_none(run.seconds_to(common_loss) for run in clocked),
        first_step_s=statistics.median(run.first_step_s for run in timed),
        cold_first_step_s=median_or_none(run.first_step_s for run in timed if run.start == "cold"),
        warm_first_step_s=median_or_none(run.first_step_s for run in timed if run.start == "warm"),
        complete=all(run.complete for run in rounds),
        last_val_loss=median_or_none(run.val_losses[-1] for run in rounds if run.val_losses),
        seconds_to_common_val_loss=median_or_none(
            run.seconds_to_val(common_val_loss) for run in clocked if run.val_losses),
    )


def compare_rows(rows):
    """Set how each rung's speed compares with the baseline's and with that of the rung it starts from."""
    by_name = {row.name: row for row in rows if row.tokens_per_second}
    baseline = by_name.get(STAGES[0].name)
    for row in by_name.values():
        start = BY_LABEL.get(BY_NAME[row.name].before) if row.name in BY_NAME else None
        before = by_name.get(start.name) if start else None
        if baseline:
            row.times_baseline = row.tokens_per_second / baseline.tokens_per_second
        if before:
            row.times_before = row.tokens_per_second / before.tokens_per_second
            row.before_within_noise = within_noise(row, before)


def build_report(folder, peak_tflops=None, **stand_ins):
    """Read all logs of a folder into a Report. Raises UserError when they cannot be compared.

    `peak_tflops` (1e12 FLOP/s of the device) stands in where no rate was measured.
    """
    race = read_race(folder)
    runs, skipped = (race.runs("round"), race.skipped) if race else read_folder(folder, **stand_ins)
    check_comparable(runs, folder)
    machine = read_or_skip(read_machine, folder, skipped, {})
    profile = read_or_skip(read_profile, folder, skipped, None)
    first = next(iter(runs.values()))[0]
    if profile and (profile["model"], profile["B"], profile["T"]) != (first.model, first.B, first.T):
        skipped.append(f"{folder}/profile.json is of {profile['model']}, B={profile['B']} T={profile['T']}, "
                       "but the logs are not")
        profile = None
    if peak_tflops and not machine:
        machine = {"rates": {GIVEN: 1e12 * peak_tflops}}
    every_run = [run for rounds in runs.values() for run in rounds]
    common_loss = common_lowest(run.losses for run in every_run)
    common_val_loss = common_lowest(run.val_losses for run in every_run)
    timing = race.runs("timing") if race and race.timed == "timing" else {}
    rows = [row_of(name, rounds, timing.get(name, rounds), machine.get("rates"), common_loss, common_val_loss)
            for name, rounds in runs.items()]
    compare_rows(rows)
    return Report(
        Path(folder).resolve().name, first.setting() | {"device": first.device}, machine, common_loss, common_val_loss,
        rows, runs, profile, race.sweep if race else {}, timing, race, skipped,
    )


def allocators(report):
    """{allocator: the titles of the rungs with rounds under it}; "unknown" is that of logs that do not say."""
    under = {}
    for row in report.rows:
        for name in dict.fromkeys(run.allocator or "unknown" for run in report.runs[row.name]):
            under.setdefault(name, []).append(row.title)
    return under


def data_of(report):
    """The name of the text, and the kind of its tokens."""
    return (report.setting["data"] or "unknown data").split(" | ")[0]


def where(report):
    """One line: the device, on a CPU the allocator of its memory, the model, the batch and the text."""
    setting = report.setting
    batch = f"B={setting['B']} T={setting['T']}" if setting["B"] else "unknown batch"
    known = [name for name in allocators(report) if name not in ("unknown", "torch")]
    allocator = f" (allocator: {' and '.join(known)})" if known else ""
    device, model = setting["device"] or "unknown device", setting["model"] or "unknown model"
    return f"{device}{allocator}, {model}, {batch}, {data_of(report)}"


def conditions(report):
    """One line: where and on what the numbers were measured, and what MFU is a share of."""
    line = where(report)
    if report.machine:
        best = max(report.machine["rates"], key=report.machine["rates"].get)
        rate = f"{report.machine['rates'][best] / 1e12:.2f} TFLOP/s"
        given = f"; MFU is of {rate}, given by --peak-tflops, not measured"
        line += given if best == GIVEN else f"; fastest matrix products measured: {rate} in {best}"
        line += f". {CONVENTION}"
    return line


def describe(report, texts=None):
    """The caption of table_of, or of those of its columns in `texts`: the conditions, and what the headings mean."""
    texts = table_of(report) if texts is None else texts
    sentences = [conditions(report)]
    for heading in texts:
        if heading.startswith("s to"):
            kind = "validation" if "val" in heading else "step"
            sentences.append(f"{heading}: seconds to the first {kind} with this loss, the lowest that all reach")
        elif heading == "× before" and texts[heading].str.contains("noise").any():
            sentences.append(NOISE)
        elif heading.startswith("1st step") and texts[heading].str.contains("cold|warm").any():
            sentences.append(f"{heading}: cold compiled its graphs, warm found them in the cache")
    return ". ".join(sentences)


def as_texts(report):
    """The report as short strings: a DataFrame with fixed column names, one row per rung."""
    def column(name, pattern="{}"):
        values = [getattr(row, name) for row in report.rows]
        return [NOTHING if value is None else pattern.format(value) for value in values]

    def first_step(row):
        kinds = {"cold": row.cold_first_step_s, "warm": row.warm_first_step_s}
        known = [f"{seconds:,.1f} {kind}" for kind, seconds in kinds.items() if seconds is not None]
        return ", ".join(known) or f"{row.first_step_s:,.1f}"

    files = {name: stage.file for name, stage in BY_NAME.items()} | {PEER: PEER_FILE}
    return pandas.DataFrame({
        "label": [BY_NAME[row.name].label if row.name in BY_NAME else "" for row in report.rows],
        "file": ["[`{0}`]({0})".format(files.get(row.name, row.name)) for row in report.rows],
        "title": column("title"),
        "ms": [f"{row.ms:,.1f}" if row.ms < 1000 else f"{row.ms:,.0f}" for row in report.rows],
        "spread": [f"{row.ms_low:,.0f}–{row.ms_high:,.0f}" for row in report.rows],
        "speed": column("tokens_per_second", "{:,.0f}"),
        "times_baseline": column("times_baseline", "{:.2f}"),
        "times_before": [text + " (noise)" * bool(row.before_within_noise)
                         for row, text in zip(report.rows, column("times_before", "{:.2f}"), strict=True)],
        "mfu": [text + " (!)" * (text != NOTHING and row.mfu > 1)
                for row, text in zip(report.rows, column("mfu", "{:.0%}"), strict=True)],
        "causal": column("mfu_causal", "{:.0%}"),
        "memory": column("peak_memory_gb", "{:.2f}"),
        "loss": column("last_loss", "{:.3f}"),
        "seconds": column("seconds_to_common_loss", "{:,.0f}"),
        "first_step": [first_step(row) for row in report.rows],
        "val_loss": column("last_val_loss", "{:.3f}"),
        "val_seconds": column("seconds_to_common_val_loss", "{:,.0f}"),
    })


def last_steps(report, between):
    return between.join(map(str, sorted({row.last_step for row in report.rows})))


def table_of(report):
    """What a terminal and the page show of as_texts: the columns with values, under headings."""
    headings = {
        "title": "rung", "ms": "ms/step", "spread": "spread", "speed": "tokens/s", "times_baseline": "× base",
        "times_before": "× before", "mfu": "MFU", "causal": "causal", "memory": "GB",
        "loss": f"loss @{last_steps(report, '/')}", "seconds": f"s to {report.common_loss or 0:.2f}",
        "first_step": "1st step s", "val_loss": "val loss",
        "val_seconds": f"s to val {report.common_val_loss or 0:.2f}",
    }
    texts = as_texts(report)[list(headings)].rename(columns=headings)
    return texts.loc[:, (texts != NOTHING).any()]


def warnings(report):
    """What a reader of the table needs to know: impossible values, different allocators, unfinished or shorter runs."""
    for reason in report.skipped:
        yield f"skipped: {reason}"
    for row in report.rows:
        yield from wrong_unit(row, report.runs[row.name][0])
        if row.mfu and row.mfu > 1:
            yield f"{row.title}: MFU {row.mfu:.0%} is {IMPOSSIBLE}"
        fastest = fastest_ms(report.runs[row.name][0])
        if fastest and row.ms < fastest[0]:
            yield (f"{row.title}: {row.ms:,.1f} ms, and the matrix products alone take {fastest[0]:,.1f} ms at "
                   f"{CLOCKED_HIGHER:g} times the datasheet's rate of the {fastest[1].name}: {IMPOSSIBLE}")
        first = report.runs[row.name][0]
        if not first.on_cpu and "device" in first.headers and sum(first.ms[: first.warm_up]) < WARM_UP_MS:
            yield (f"{row.title}: the steps before those that count took less than {WARM_UP_MS / 1000:g} s, too few to "
                   "warm up a GPU: give more --steps")
        if not row.complete:
            yield f"{row.title}: the run did not finish ({row.last_step} steps)"
    if len(under := allocators(report)) > 1:
        parts = "; ".join(f"{name}: {', '.join(titles)}" for name, titles in under.items())
        yield (f"the runs had different memory allocators ({parts}): on a CPU they can "
               "change the time of a step by a third")
    if len({row.last_step for row in report.rows}) > 1:
        yield "the runs have different numbers of steps: their last losses do not compare"
    if not report.machine:
        yield "no measured matrix-product rates (machine.json) here, so no MFU; --peak-tflops can stand in for them"


def wrong_unit(row, run):
    """A warning if the tokens/sec in a log do not follow from its B, T and dt."""
    own = median_or_none(run.own_tokens)
    if own and run.tokens_per_step and not 0.8 < own / run.tokens_per_step < 1.25:
        off = run.tokens_per_step / own
        word = "it counts tokens per millisecond" if 800 < off < 1250 else f"it is off by a factor of {off:.3g}"
        yield (f"{row.title}: its log has {run.tokens_per_second / off:,.1f} tokens/sec where B * T * ranks / dt is "
               f"{run.tokens_per_second:,.1f}: {word}")


def print_table(report, console):
    """The table in a terminal; a narrow one gets the columns that fit, the others are in `--csv`."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    texts = table_of(report)
    left_out = ("spread", "× before", "causal", "s to", "1st step", "val loss") if console.width < WIDE else ()
    texts = texts[[heading for heading in texts if not heading.startswith(left_out)]]
    table = Table(title=report.name, caption=describe(report, texts), caption_justify="left", box=box.SIMPLE_HEAD)
    for heading in texts:
        first = heading == "rung"
        table.add_column(
            heading, justify="left" if first else "right", no_wrap=not first, min_width=16 if first else None
        )
    for row in texts.itertuples(index=False):
        table.add_row(*map(escape, row))
    console.print(table)
    for warning in warnings(report):
        console.print(f"! {warning}", style="yellow", markup=False)


def markdown(texts, headings, n_left):
    """The columns {name: heading} of as_texts in Markdown: the first `n_left` are words, the others numbers."""
    rows = [headings.values(), ["---"] * n_left + ["--:"] * (len(headings) - n_left), *texts[list(headings)].to_numpy()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown_table(report):
    """The README's table of the ladder: one row per rung, with links to the files."""
    table = markdown(as_texts(report), {
        "label": "", "file": "file", "title": "the one change", "ms": "ms/step", "spread": "spread",
        "speed": "tokens/sec", "times_baseline": "× baseline", "mfu": "MFU", "causal": "causal", "memory": "peak GB",
        "loss": "loss"}, 3)
    return f"{table}\n\n{conditions(report)}. {median_of(report)}, the loss that of step {last_steps(report, '/')}."


def short_table(report):
    """The README's table: each rung's speed and its spread, and its counted and published times for an A100."""
    floors = {row["label"]: row["ms"]["A100"]["floor"] for row in floor_data([CARDS["A100"]])["rungs"]}
    texts, rows = as_texts(report), report.rows
    texts["speed"] = [f"{row.tokens_per_second:,.0f} ({row.tokens_per_second * row.ms / row.ms_high:,.0f}–"
                      f"{row.tokens_per_second * row.ms / row.ms_low:,.0f})" for row in rows]
    stages = [BY_NAME.get(row.name) for row in rows]
    texts["a100"] = [f"{floors[stage.label]:,.0f} / {stage.lecture_ms or NOTHING}"
                     if stage and stage.label in floors else NOTHING for stage in stages]
    table = markdown(texts, {"file": "file", "title": "the one change", "speed": "tokens/sec here",
                             "times_baseline": "× baseline", "a100": "A100: floor / published, ms"}, 2)
    return f"{table}\n\n{where(report)}; the median of {max(row.rounds for row in rows)} rounds, lowest to highest."


def median_of(report):
    """What the ms/step of a table are, for its caption."""
    rounds = max(row.rounds for row in report.rows)
    return "ms/step is the median" + (f" of {rounds} rounds, the spread their lowest and highest" if rounds > 1 else "")


def beyond_table(report):
    """The README's table of the rungs beyond: what they cost, and the validation loss."""
    table = markdown(as_texts(report), {
        "label": "", "file": "file", "title": "the one capability", "ms": "ms/step", "spread": "spread",
        "speed": "tokens/sec", "times_before": "× the rung before", "memory": "peak GB",
        "loss": "loss", "val_loss": "val loss"}, 3)
    noise = f". {NOISE}" if "(noise)" in table else ""
    return (f"{table}\n\n{where(report)}. {median_of(report)}, the losses those of step {last_steps(report, '/')}"
            f"{noise}.")


def race_table(report):
    """The README's table of a race."""
    texts, caption = race_texts(report)
    table = markdown(texts, {name: "" if name == "label" else name for name in texts if name != "rung"}, 2)
    return f"### {data_of(report)}\n\n{table}\n\n{where(report)}. {caption}"


def between_marks(text, marks, tables, readme):
    """`text` with the tables between the two marks; raises UserError when they are not there."""
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"{readme} must hold {begin} and then {end}, once each, around the table")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    return "\n".join([head + begin, "\n\n".join(tables), end + tail])


def write_tables(reports, root=ROOT):
    """Put all tables between their marks in README.md and docs/; raises UserError where the marks are missing.

    The README shows the machine with the most rungs; among several, the one where they gain the most.
    """
    reports = [report for report in reports if len(report.rows) > 1]
    races = sorted((report for report in reports if report.sweep), key=lambda report: -len(report.rows))
    beyond = [report for report in reports if BEYOND & report.runs.keys() and report not in races]
    ladder = sorted((report for report in reports if report not in [*beyond, *races]), reverse=True,
                    key=lambda report: (len(report.rows), max(row.times_baseline or 0 for row in report.rows)))
    for file, marks, tables in [
        ("README.md", LADDER_MARKS, [short_table(report) for report in ladder[:1]]),
        ("docs/results.md", LADDER_MARKS, [markdown_table(report) for report in ladder]),
        ("docs/long_runs.md", BEYOND_MARKS, [beyond_table(report) for report in beyond]),
        ("docs/race.md", RACE_MARKS, [race_table(report) for report in races]),
    ]:
        if file.startswith("docs/"):
            tables = [table.replace("](", "](../") for table in tables]
        text = between_marks((root / file).read_text(encoding="utf-8"), marks, tables, file)
        write_whole(root / file, text)


def as_json(reports):
    """All numbers of the reports; null where a log does not say."""
    return json.dumps([
        {"name": report.name, "setting": report.setting, "machine": report.machine, "common_loss": report.common_loss,
         "mfu": CONVENTION, "rows": json.loads(pandas.DataFrame(report.rows).to_json(orient="records"))}
        for report in reports
    ], indent=2)


def as_csv(reports):
    tables = [pandas.DataFrame(report.rows).assign(machine=report.name).set_index("machine") for report in reports]
    return pandas.concat(tables).to_csv()
