"""Pictures of a report: where a step's time goes, the ladder of tokens/sec, the losses, the memory.

A picture's file holds a digest of its Picture, so that a test can tell whether it is up to date.
"""
import hashlib
import json
import os
import re
from dataclasses import dataclass

os.environ["MPLBACKEND"] = "Agg"  # a notebook's own would not be there in a terminal, and its import would fail
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ladder import formats
from ladder.count.cards import CARDS
from ladder.count.floors import floors_on
from ladder.rungs.list import LADDER, PEERS, rung_of
from ladder.show.charts import KIND_COLORS, Bar, profile_bars, step_bars
from ladder.show.facts import batch_of, conditions, floors_of, where
from ladder.show.standings import label_of

plt.rcParams["text.parse_math"] = False  # a $ in a name does not start a formula


@dataclass
class Curve:
    title: str
    x: list
    losses: list
    color: str
    low: list = ()  # a band around it
    high: list = ()
    is_validation: bool = False  # of a run whose losses have a curve of their own


@dataclass
class Panel:
    """Bars, one below the other, or curves."""

    xlabel: str
    bars: list = ()
    curves: list = ()
    title: str = ""
    ylabel: str = "loss (nats)"  # of curves


@dataclass
class Picture:
    """Panels side by side, with the same vertical axis."""

    title: str
    caption: str
    height: float
    panels: list
    rows: list = ()  # the headings of all bars, where a panel has only some


def colors_of(names):
    """{rung: color} along one color map, so that only neighbors look alike; the peers are grey."""
    rungs = [name for name in names if name not in PEERS]
    shades = plt.get_cmap("viridis")
    greys = dict(zip(PEERS, ("grey", "silver", "black"), strict=True))
    return {name: to_hex(shades(0.92 * i / max(1, len(rungs) - 1))) for i, name in enumerate(rungs)} | greys


# ---- what they show --------------------------------------------------------------------------------------------------


def bar_picture(title, caption, bars, xlabel):
    return Picture(title, caption, 1.4 + 0.36 * max(4, len(bars)), [Panel(xlabel, bars)])


def speed_picture(report):
    """Tokens per second of each rung, with the ratio to the baseline and MFU."""
    bars = []
    for row in report.rows:
        if row.tokens_per_second:
            end, tokens_times_1000 = formats.number(row.tokens_per_second), row.tokens_per_second * row.ms
            end += f"  ×{formats.ratio(row.times_baseline)}" if row.times_baseline else ""
            end += f"  MFU {formats.share(row.mfu)}" if row.mfu else ""
            bars.append(Bar(row.title, rung_of(row.name).label, [row.tokens_per_second], end,
                            (tokens_times_1000 / row.ms_high, tokens_times_1000 / row.ms_low)))
    return bar_picture("Tokens per second", conditions(report), bars, "tokens/sec; the thin lines show the spread")


def memory_picture(report):
    bars = [Bar(row.title, rung_of(row.name).label, [row.peak_memory_gb], formats.gigabytes(row.peak_memory_gb))
            for row in report.rows if row.peak_memory_gb]
    return bar_picture("Peak memory", conditions(report), bars, "GB (1e9 bytes)")


def profile_picture(profile):
    """A step's milliseconds by kind of work, and what its matrix products need."""
    bars = profile_bars(profile)
    caption = (f"{profile['name']}, {profile['model']}, B={profile['B']} T={profile['T']}. Products alone: what all "
               "matrix products, attention's included, take at the rate measured on this machine.")
    if any(bar.pale for bar in bars):
        caption += " (!) unreliable: the step takes a different time without the profiler."
    return bar_picture("Where a step's time goes", caption, bars, "ms per step")


def step_picture(report):
    """The milliseconds of a step, rung by rung: of the report's machine, and of an A100, as published."""
    floors, a100 = floors_of(report), floors_on(CARDS["A100"])
    measured = step_bars(report, floors)
    published = [Bar(rung.title, rung.label, [rung.lecture_ms or 0], str(rung.lecture_ms or ""),
                     floor=a100[rung.label]) for rung in LADDER]
    marks = "black: the computed floor" if floors else "thin lines: lowest to highest"
    return Picture(
        "A training step, rung by rung",
        f"Left: {where(report)}. Right: GPT-2 (124M), the lecture's scripts, without times for rungs 1, 4, 8 and 9.",
        1.6 + 0.3 * len(measured), [
            Panel("ms a step", measured, title=f"{report.setting['device']}, {batch_of(report)}\nmeasured; {marks}"),
            Panel("ms a step", published,
                  title="One A100, B=16 T=1024, different scale\npublished; black: the computed floor")])


def seed_curves(record, title_of):
    """The means of the seeds' validation losses, in a band from the lowest to the highest."""
    colors, curves = colors_of(record.names), []
    for name, runs in record.tested.groupby("rung", sort=False):
        losses = runs.groupby("step").val_loss.agg(["mean", "min", "max"])
        curves.append(Curve(title_of(name), losses.index.tolist(), losses["mean"].tolist(), colors[name],
                            losses["min"].tolist(), losses["max"].tolist()))
    return curves


def run_curves(report, by_seconds):
    """The losses of each rung's first round, and its validations, by the step or by the seconds of training."""
    colors, curves = colors_of(report.runs), []
    for row in report.rows:
        run = report.runs[row.name][0]
        x_of = run.seconds.get if by_seconds else int
        curves.append(Curve(row.title, [*map(x_of, run.steps)], run.losses, colors[row.name]))
        if run.val_steps:
            curves.append(Curve(f"{row.title}: validation", [*map(x_of, run.val_steps)], run.val_losses, "black",
                                is_validation=True))
    return curves


def loss_picture(report):
    """The losses against the steps and the seconds of training; of a race, whose runs shared the machine, the steps."""
    panels = [Panel("step", curves=run_curves(report, by_seconds=False)),
              Panel("seconds of training, the first step included", curves=run_curves(report, by_seconds=True))]
    if report.race:
        panels = [Panel("step", curves=seed_curves(report.race, lambda name: rung_of(name).title))]
    return Picture("Loss", conditions(report), 4.2, panels)


def recipes_picture(record):
    """The validation losses of a comparison."""
    panel = Panel("step", curves=seed_curves(record, label_of), ylabel="validation loss (nats)")
    return Picture("Training recipes", "The mean of the seeds; bands: lowest to highest.", 4.2, [panel])


def all_pictures(reports):
    """{file name: picture} of reports, without those that their logs say nothing of."""
    pictures = {}
    for report in reports:
        pictures[f"{report.name}_loss.png"] = loss_picture(report)
        if any(row.tokens_per_second for row in report.rows):
            pictures[f"{report.name}_ladder.png"] = speed_picture(report)
        if {rung.name for rung in LADDER} <= report.runs.keys():
            pictures[f"{report.name}_step.png"] = step_picture(report)
        if any(row.peak_memory_gb for row in report.rows):
            pictures[f"{report.name}_memory.png"] = memory_picture(report)
        if report.profile and not report.race:
            pictures[f"{report.name}_profile.png"] = profile_picture(report.profile)
    return pictures


def shown_in_docs(root):
    """The names of the pictures of docs/ that README.md and docs/*.md show."""
    texts = [path.read_text(encoding="utf-8") for path in [root / "README.md", *root.glob("docs/*.md")]]
    return {name for text in texts for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?([^)/]+\.png)\)", text)}


# ---- drawing ---------------------------------------------------------------------------------------------------------


def heading(row):
    """What stands before a Bar, or before the bars of a Rung."""
    return f"{row.title}  {row.label if row.label.isdigit() else ''}".strip()


def draw_bars(axes, panel, rows):
    """The bars of a panel, each at the place of its heading in `rows`."""
    for bar in panel.bars:
        place, end = rows.index(heading(bar)), 0
        colors = KIND_COLORS.values() if len(bar.parts) > 1 else [bar.color]
        for part, color in zip(bar.parts, colors, strict=True):
            axes.barh(place, part, left=end, color=color, height=0.76, alpha=0.25 if bar.pale else 1)
            end += part
        if bar.spread:
            axes.hlines(place, *bar.spread, color="black", linewidth=1, alpha=0.5)
            end = max(end, bar.spread[1], 0)
        if bar.floor:  # a black line with white edges
            axes.vlines(bar.floor, place - 0.46, place + 0.46, color="white", linewidth=3.5)
            axes.vlines(bar.floor, place - 0.46, place + 0.46, color="black", linewidth=1.5)
        axes.annotate(bar.end, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.margins(x=0.6 if len(axes.figure.axes) > 1 else 0.15)
    axes.set_xlabel(panel.xlabel, fontsize=8, color="grey")
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor="grey")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}" if axes.get_xlim()[1] >= 10 else "{x:g}")


def draw_curves(axes, panel):
    for curve in panel.curves:
        style = {"linestyle": ":", "marker": "o", "markersize": 3} if curve.is_validation else {}
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=curve.color, alpha=0.15, linewidth=0)
        axes.plot(curve.x, curve.losses, label=curve.title, color=curve.color, linewidth=1.2, **style)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)


def draw(picture):
    """The figure of a Picture."""
    panels, first = picture.panels, picture.panels[0]
    figure, axes = plt.subplots(1, len(panels), figsize=(9, picture.height), layout="constrained", sharey=True,
                                squeeze=False)
    figure.suptitle(picture.title, x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, -0.01, picture.caption, fontsize=7, color="grey", va="top", wrap=True)
    for axis, panel in zip(axes[0], panels, strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_title(panel.title or None, fontsize=9, loc="left")
        if panel.curves:
            draw_curves(axis, panel)
        else:
            draw_bars(axis, panel, picture.rows or [heading(bar) for bar in first.bars])
        axis.label_outer()
    if first.curves:
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    elif any(len(bar.parts) > 1 for bar in first.bars):
        draw_kinds(axes[0, 0])
    return figure


def draw_kinds(axes):
    """Above the bars: a color for each kind of work, and the line of the products."""
    handles = [Patch(color=color, label=kind) for kind, color in KIND_COLORS.items()]
    handles.append(Line2D([], [], color="black", linewidth=1.5, label="products alone"))
    in_rows = [handle for column in range(5) for handle in handles[column::5]]  # matplotlib fills column by column
    axes.legend(handles=in_rows, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5, fontsize=8.5, frameon=False,
                handlelength=1.1, handletextpad=0.5, columnspacing=1.3)


def digest(picture):
    """A short hash of what a picture shows, as its file has it."""
    return hashlib.sha256(json.dumps(picture, sort_keys=True, default=vars).encode()).hexdigest()[:16]


def save(picture, path):
    figure, partial = draw(picture), path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=150, bbox_inches="tight", metadata={"Digest": digest(picture)})
    partial.replace(path)
    plt.close(figure)
