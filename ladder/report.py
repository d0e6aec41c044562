"""The table and the plots: what each rung did on a machine, from its logs.

Rows are rungs; a rung with several rounds (`run --repeat`) shows the median of the rounds' medians, and their spread.
Runs that differ in data, model, B, T or device are never put in one comparison without a word: they are refused.
"""
import csv
import io
import json
import math
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from ladder.errors import UserError
from ladder.flops import mfu
from ladder.logs import PEER, read_folder
from ladder.stages import ROOT, STAGES

WIDE = 130  # characters of a terminal that takes all columns
LADDER_MARKS = ("<!-- ladder:begin -->", "<!-- ladder:end -->")
BEYOND_MARKS = ("<!-- beyond:begin -->", "<!-- beyond:end -->")
BEYOND = {stage.name for stage in STAGES if stage.file.startswith("beyond/")}
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
    mfu: float | None
    peak_memory_gb: float | None
    last_loss: float
    last_step: int
    seconds_to_common_loss: float | None
    first_step_s: float
    complete: bool
    last_val_loss: float | None
    seconds_to_common_val_loss: float | None


@dataclass
class Report:
    """All rows of one machine, and what they have in common."""

    name: str  # the folder's
    setting: dict  # data, model, B, T, device
    machine: dict  # rates and versions measured in the same run; {} when unknown
    common_loss: float
    common_val_loss: float | None  # None without a validation
    rows: list
    runs: dict  # {name: [Run, ...]}


def title_of(name):
    titles = {stage.name: stage.title for stage in STAGES} | {PEER: "transformers' GPT-2, everything on"}
    return titles.get(name, name)


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
                    f"{run.path} has {value!r}; report them from folders of their own"
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


def read_machine(folder):
    """What `run` noted about the machine, {} when it did not."""
    path = Path(folder) / "machine.json"
    if not path.exists():
        return {}
    try:
        machine = json.loads(path.read_text())
        machine["rates"] = {name: float(rate) for name, rate in machine["rates"].items()}
        return machine
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}): run python -m ladder run again, or delete it") from None


def build_report(folder, **stand_ins):
    """Read all logs of a folder into a Report. Raises UserError when they cannot be compared."""
    runs = read_folder(folder, **stand_ins)
    check_comparable(runs, folder)
    machine = read_machine(folder)
    # A loss that every rung reaches: the highest of their lowest. Smoothing would need a choice; the lowest does not.
    common_loss = max(min(run.losses) for rounds in runs.values() for run in rounds)
    lowest_val_losses = [min(run.val_losses) for rounds in runs.values() for run in rounds if run.val_losses]
    common_val_loss = max(lowest_val_losses, default=None)

    rows = []
    medians = {name: statistics.median(run.median_ms for run in rounds) for name, rounds in runs.items()}
    tokens = {name: rounds[0].tokens_per_step for name, rounds in runs.items()}
    speeds = {name: tokens[name] / medians[name] * 1000 if tokens[name] else None for name in runs}
    baseline = speeds.get(STAGES[0].name)
    before = None
    for name, rounds in runs.items():
        low, high = spread(rounds)
        speed = speeds[name]
        share = mfu(rounds[0], machine.get("rates"))  # the first round's; the row's follows from the row's speed
        is_rung = name != PEER
        rows.append(Row(
            name=name,
            title=title_of(name) + (f", {rounds[0].ranks} ranks" if rounds[0].ranks > 1 else ""),
            ms=medians[name],
            ms_low=low,
            ms_high=high,
            rounds=len(rounds),
            tokens_per_second=speed,
            times_baseline=speed / baseline if baseline and speed else None,
            times_before=speed / before if is_rung and before and speed else None,
            mfu=share * speed / rounds[0].tokens_per_second if share else None,
            peak_memory_gb=median_or_none(run.peak_memory_gb for run in rounds),
            last_loss=statistics.median(run.losses[-1] for run in rounds),
            last_step=min(run.steps[-1] for run in rounds),
            seconds_to_common_loss=median_or_none(run.seconds_to(common_loss) for run in rounds),
            first_step_s=statistics.median(run.first_step_s for run in rounds),
            complete=all(run.complete for run in rounds),
            last_val_loss=median_or_none(run.val_losses[-1] for run in rounds if run.val_losses),
            seconds_to_common_val_loss=median_or_none(
                run.seconds_to_val(common_val_loss) for run in rounds if run.val_losses
            ),
        ))
        before = speed if is_rung else before
    first = next(iter(runs.values()))[0]
    return Report(
        Path(folder).resolve().name, first.setting(), machine, common_loss, common_val_loss, rows, runs
    )


def describe(report):
    """One line: where and on what the numbers were measured."""
    setting = report.setting
    data = (setting["data"] or "unknown data").split(" | ")[0]
    batch = f"B={setting['B']} T={setting['T']}" if setting["B"] else "unknown batch"
    line = f"{setting['device'] or 'unknown device'}, {setting['model'] or 'unknown model'}, {batch}, {data}"
    if report.machine:
        best = max(report.machine["rates"], key=report.machine["rates"].get)
        line += f"; fastest matrix products measured: {report.machine['rates'][best] / 1e12:.2f} TFLOP/s in {best}"
    return line


def cells(row, with_validation):
    """The row's numbers as short texts, in the order of columns()."""
    def show(value, pattern):
        return "–" if value is None else pattern.format(value)

    return [
        row.title,
        f"{row.ms:,.1f}" if row.ms < 1000 else f"{row.ms:,.0f}",
        f"{row.ms_low:,.0f}–{row.ms_high:,.0f}",
        show(row.tokens_per_second, "{:,.0f}"),
        show(row.times_baseline, "{:.2f}"),
        show(row.times_before, "{:.2f}"),
        show(row.mfu, "{:.0%}") + (" (!)" if row.mfu and row.mfu > 1 else ""),
        show(row.peak_memory_gb, "{:.2f}"),
        f"{row.last_loss:.3f}",
        show(row.seconds_to_common_loss, "{:,.0f}"),
        f"{row.first_step_s:,.1f}",
        *([show(row.last_val_loss, "{:.3f}"), show(row.seconds_to_common_val_loss, "{:,.0f}")]
          if with_validation else []),
    ]


def has_validation(report):
    return report.common_val_loss is not None


def columns(report):
    steps = sorted({row.last_step for row in report.rows})
    step = str(steps[0]) if len(steps) == 1 else f"{steps[0]}–{steps[-1]}"
    return ["rung", "ms/step", "spread", "tokens/s", "× base", "× before", "MFU", "GB", f"loss @{step}",
            f"s to {report.common_loss:.2f}", "1st step s",
            *(["val loss", f"s to val {report.common_val_loss:.2f}"] if has_validation(report) else [])]


def warnings(report):
    """What a reader of the table must know: impossible values, runs that did not finish, different lengths."""
    for row in report.rows:
        if row.mfu and row.mfu > 1:
            yield f"{row.title}: MFU {row.mfu:.0%} is {IMPOSSIBLE}"
        if not row.complete:
            yield f"{row.title}: the run did not finish ({row.last_step} steps)"
    if len({row.last_step for row in report.rows}) > 1:
        yield "the runs have different numbers of steps: their last losses do not compare"
    if not report.machine:
        yield "no measured matrix-product rates (machine.json) here, so no MFU"


def print_table(report, console):
    """The table in a terminal; a narrow one gets the columns that fit, the others are in `--csv`."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    headings = columns(report)
    left_out = ("spread", "× before", "s to", "1st step", "val loss") if console.width < WIDE else ()
    shown = [heading for heading in headings if not heading.startswith(left_out)]
    table = Table(title=report.name, caption=describe(report), caption_justify="left", box=box.SIMPLE_HEAD)
    for heading in shown:
        first = heading == "rung"
        table.add_column(
            heading, justify="left" if first else "right", no_wrap=not first, min_width=16 if first else None
        )
    for row in report.rows:
        texts = zip(headings, cells(row, has_validation(report)), strict=True)
        table.add_row(*[escape(cell) for heading, cell in texts if heading in shown])
    console.print(table)
    for warning in warnings(report):
        console.print(f"! {warning}", style="yellow", markup=False)


def markdown_table(report):
    """The README's table: one row per rung, with links to the files."""
    files = {stage.name: stage.file for stage in STAGES} | {PEER: f"ladder/{PEER}.py"}
    labels = {stage.name: stage.label for stage in STAGES}
    steps = {row.last_step for row in report.rows}
    lines = [
        "| | file | the one change | ms/step | tokens/sec | × baseline | MFU | peak GB | loss |",
        "|--:|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report.rows:
        title, ms, _, speed, times, _, share, memory, loss, *_ = cells(row, with_validation=False)
        file = files.get(row.name, row.name)
        numbers = " | ".join([ms, speed, times, share, memory, loss])
        lines.append(f"| {labels.get(row.name, '')} | [`{file}`]({file}) | {title} | {numbers} |")
    rounds = max(row.rounds for row in report.rows)
    lines += ["", f"{describe(report)}. ms/step is the median{' of ' + str(rounds) + ' rounds' if rounds > 1 else ''}, "
                  f"the loss that of step {'/'.join(map(str, sorted(steps)))}."]
    return "\n".join(lines)


def beyond_table(report):
    """The README's table of the rungs beyond: what they cost, and the validation loss."""
    files = {stage.name: stage.file for stage in STAGES}
    lines = [
        "| file | the one capability | ms/step | tokens/sec | × the rung before | peak GB | loss | val loss |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report.rows:
        title, ms, _, speed, _, before, _, memory, loss, _, _, val_loss, _ = cells(row, with_validation=True)
        file = files.get(row.name, row.name)
        lines.append(f"| [`{file}`]({file}) | {title} | {ms} | {speed} | {before} | {memory} | {loss} | {val_loss} |")
    steps = "/".join(map(str, sorted({row.last_step for row in report.rows})))
    lines += ["", f"{describe(report)}. ms/step is the median, the losses those of step {steps}."]
    return "\n".join(lines)


def between_marks(text, marks, tables, readme):
    """`text` with the tables between the two marks; raises UserError when they are not there."""
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise UserError(f"{readme} must hold {begin} and then {end}, once each, around the table")
    head, rest = text.split(begin)
    tail = rest.split(end)[1]
    return "\n".join([head + begin, "\n\n".join(tables), end + tail])


def write_readme(reports, readme=ROOT / "README.md"):
    """Put the ladder's tables and those of the rungs beyond between their marks; raises UserError without marks."""
    beyond = [report for report in reports if BEYOND & report.runs.keys()]
    ladder = [report for report in reports if report not in beyond]
    text = between_marks(readme.read_text(), LADDER_MARKS, [markdown_table(report) for report in ladder], readme)
    text = between_marks(text, BEYOND_MARKS, [beyond_table(report) for report in beyond], readme)
    partial = readme.with_name(readme.name + ".partial")
    partial.write_text(text)
    partial.replace(readme)


def as_json(reports):
    def finite(value):
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps([
        {"name": report.name, "setting": report.setting, "machine": report.machine, "common_loss": report.common_loss,
         "rows": [{key: finite(value) for key, value in asdict(row).items()} for row in report.rows]}
        for report in reports
    ], indent=2)


def as_csv(reports):
    out = io.StringIO()
    writer = csv.DictWriter(out, ["machine", *Row.__dataclass_fields__], lineterminator="\n")
    writer.writeheader()
    for report in reports:
        writer.writerows({"machine": report.name, **asdict(row)} for row in report.rows)
    return out.getvalue()
