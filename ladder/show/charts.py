"""The data of all charts: bars and curves, for the pictures (plots.py) and for the page, which draw them.

A bar is a dictionary: title, label (of its rung), parts (one length, or one for each kind of work), end and more (the
text at its end), perhaps low and high (its spread), floor (a mark), pale (a doubt), color.
A curve has title, steps, seconds, loss, and val where the losses are those of validations.
"""
from ladder import formats
from ladder.records.recipes import curves_of
from ladder.records.step_profile import KINDS, is_reliable
from ladder.rungs.list import BY_NAME, LADDER, rung_of

# One color per kind of work. Blue is the arithmetic; color-blind readers can tell all eight apart, on white and on
# black.
KIND_COLORS = {"matrix products": "#2463c0", "head": "#6fbdf0", "attention": "#c95a2e",
               "normalization and pointwise": "#e5bb3f", "cross-entropy": "#9676b8", "optimizer": "#35ab72",
               "data": "#5f5a66", "waiting": "#b6bfba"}


def speed_bars(report):
    """Tokens per second of each rung, with the ratio to the baseline and MFU."""
    for row in report.rows:
        if not row.tokens_per_second:
            continue
        work = row.tokens_per_second * row.ms
        more = f"  ×{formats.ratio(row.times_baseline)}" if row.times_baseline else ""
        if row.mfu:
            more += f"  MFU {formats.share(row.mfu)}"
        yield {"title": row.title, "label": rung_of(row.name).label, "parts": [row.tokens_per_second],
               "low": work / row.ms_high, "high": work / row.ms_low, "end": formats.number(row.tokens_per_second),
               "more": more}


def step_bars(report, floors):
    """Milliseconds of a step, of the rungs 0 to 10; `floors` are the ms of {label: the card's counted floor}."""
    for row in report.rows:
        label = rung_of(row.name).label
        if rung_of(row.name) not in LADDER:
            continue
        bar = {"title": row.title, "label": label, "parts": [row.ms], "low": row.ms_low, "high": row.ms_high,
               "end": formats.ms(row.ms)}
        yield bar | ({"floor": floors[label]} if label in floors else {})


def memory_bars(report):
    """Peak memory of each rung, in GB (1e9 bytes)."""
    for row in report.rows:
        if row.peak_memory_gb:
            yield {"title": row.title, "label": rung_of(row.name).label, "parts": [row.peak_memory_gb],
                   "end": formats.gigabytes(row.peak_memory_gb)}


def profile_bars(profile):
    """Milliseconds of each rung's step by kind of work; the mark is what its products alone take."""
    rungs = profile["rungs"] if profile else []
    for found in rungs:
        rung, sure = BY_NAME[found["name"]], is_reliable(found)
        parts = [found["parts_ms"][kind] for kind in KINDS]
        yield {"title": rung.title, "label": rung.label, "parts": parts, "floor": found["products_ms"],
               "pale": not sure, "end": formats.ms(sum(parts)) + ("" if sure else " (!)")}


def curves(report):
    """Yields (script, curve): the losses of each rung's first round and its validations; of a race what it compares."""
    if report.race:
        for name, curve in curves_of(report.race):
            yield name, {"title": rung_of(name).title, "steps": curve.index.tolist(), "loss": curve["mean"].tolist(),
                         "low": curve["min"].tolist(), "high": curve["max"].tolist()}
        return
    for row in report.rows:
        run = report.runs[row.name][0]
        yield row.name, {"title": row.title, "steps": run.steps, "seconds": list(run.seconds.values()),
                         "loss": run.losses}
        if run.val_steps:
            seconds = [run.seconds.get(step) for step in run.val_steps]
            yield row.name, {"title": f"{row.title}: validation", "steps": run.val_steps, "seconds": seconds,
                             "loss": run.val_losses, "val": True}
