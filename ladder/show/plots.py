"""Pictures of a report: where a step's time goes, the ladder of tokens/sec, the losses, the memory.

A picture is a dictionary: title, caption, height, and panels of bars or curves. Its file holds a digest of all that, so
that a test can tell whether it is up to date.
"""
import hashlib
import json
import os
import re

os.environ["MPLBACKEND"] = "Agg"  # a notebook's own would not be there in a terminal, and its import would fail
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ladder.count.cards import CARDS
from ladder.count.floors import floors_on
from ladder.rungs.list import LADDER, PEERS
from ladder.show.charts import KIND_COLORS, curves, memory_bars, profile_bars, speed_bars, step_bars
from ladder.show.facts import batch_of, conditions, floors_of, where

BLUE = "#4f7fc4"  # of a bar that is not told apart by color

plt.rcParams["text.parse_math"] = False  # a $ in a name does not start a formula


def colors_of(names):
    """{rung: color} along one color map, so that only neighbors look alike; the peers are grey."""
    rungs = [name for name in names if name not in PEERS]
    shades = plt.get_cmap("viridis")
    greys = dict(zip(PEERS, ("grey", "silver", "black"), strict=True))
    return {name: to_hex(shades(0.92 * i / max(1, len(rungs) - 1))) for i, name in enumerate(rungs)} | greys


def heading(bar):
    return f"{bar['title']}  {bar['label'] if bar['label'].isdigit() else ''}".strip()


def draw_bars(axes, bars, xlabel, rows=None):
    """Bars, one below the other, each of one part or of all kinds of work; with `rows`, each at its place in these."""
    rows = rows or [heading(bar) for bar in bars]
    for bar in bars:
        place, start = rows.index(heading(bar)), 0
        colors = KIND_COLORS.values() if len(bar["parts"]) > 1 else [bar.get("color", BLUE)]
        for part, color in zip(bar["parts"], colors, strict=True):
            axes.barh(place, part, left=start, color=color, height=0.76, alpha=0.25 if bar.get("pale") else 1)
            start += part
        if "high" in bar:
            axes.hlines(place, bar["low"], bar["high"], color="black", linewidth=1, alpha=0.5)
            start = max(start, bar["high"], 0)
        if "floor" in bar:  # a black line with white edges
            axes.vlines(bar["floor"], place - 0.46, place + 0.46, color="white", linewidth=3.5)
            axes.vlines(bar["floor"], place - 0.46, place + 0.46, color="black", linewidth=1.5)
        axes.annotate(bar["end"] + bar.get("more", ""), (start, place), (6, 0), textcoords="offset points",
                      va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), rows, fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.margins(x=0.6 if len(axes.figure.axes) > 1 else 0.15)
    axes.set_xlabel(xlabel, fontsize=8, color="grey")
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor="grey")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}" if axes.get_xlim()[1] >= 10 else "{x:g}")


def draw_curves(axes, curves, x, xlabel, ylabel="loss (nats)"):
    """Losses against `x`, a key of the curves; those of validations dotted, in black."""
    for curve in curves:
        style = {"color": curve["color"]}
        if curve.get("val"):
            style = {"color": "black", "linestyle": ":", "marker": "o", "markersize": 3}
        if "low" in curve:
            axes.fill_between(curve[x], curve["low"], curve["high"], color=curve["color"], alpha=0.15, linewidth=0)
        axes.plot(curve[x], curve["loss"], label=curve["title"], linewidth=1.2, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel)


def draw(picture):
    """The figure of a picture: its panels side by side, with the same vertical axis."""
    panels = picture["panels"]
    figure, axes = plt.subplots(1, len(panels), figsize=(9, picture["height"]), layout="constrained", sharey=True,
                                squeeze=False)
    figure.suptitle(picture["title"], x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, -0.01, picture["caption"], fontsize=7, color="grey", va="top", wrap=True)
    for one, panel in zip(axes[0], panels, strict=True):
        one.spines[["top", "right"]].set_visible(False)
        shown = dict(panel)
        one.set_title(shown.pop("heading", None), fontsize=9, loc="left")
        if "bars" in panel:
            draw_bars(one, **shown)
        else:
            draw_curves(one, **shown)
        one.label_outer()
    if picture.get("legend") == "kinds":
        draw_kinds(axes[0, 0])
    elif picture.get("legend"):
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, frameon=False)
    return figure


def draw_kinds(axes):
    """Above the bars: a color for each kind of work, and the line of the products."""
    handles = [Patch(color=color, label=kind) for kind, color in KIND_COLORS.items()]
    handles.append(Line2D([], [], color="black", linewidth=1.5, label="products alone"))
    in_rows = [handle for column in range(5) for handle in handles[column::5]]  # matplotlib fills column by column
    axes.legend(handles=in_rows, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5, fontsize=8.5, frameon=False,
                handlelength=1.1, handletextpad=0.5, columnspacing=1.3)


def bar_picture(title, caption, bars, xlabel, **more):
    return {"title": title, "caption": caption, "height": 1.4 + 0.36 * max(4, len(bars)),
            "panels": [{"bars": bars, "xlabel": xlabel}], **more}


def profile_picture(profile):
    """A step's milliseconds by kind of work, and what its matrix products need."""
    caption = (f"{profile['name']}, {profile['model']}, B={profile['B']} T={profile['T']}. Products alone: what all "
               "matrix products, attention's included, take at the rate measured on this machine.")
    bars = list(profile_bars(profile))
    if any(bar["pale"] for bar in bars):
        caption += " (!) unreliable: the step takes a different time without the profiler."
    return bar_picture("Where a step's time goes", caption, bars, "ms per step", legend="kinds")


def step_picture(report):
    """The milliseconds of a step, rung by rung: of the report's machine, and of an A100, as published."""
    floors = floors_of(report)
    measured = list(step_bars(report, floors))
    rows = [heading(bar) for bar in measured]
    marks = "black: the computed floor" if floors else "thin lines: lowest to highest"
    a100 = floors_on(CARDS["A100"])
    published = [{"title": rung.title, "label": rung.label, "parts": [rung.lecture_ms or 0],
                  "floor": a100[rung.label], "end": str(rung.lecture_ms or "")} for rung in LADDER]
    return {"title": "A training step, rung by rung", "height": 1.6 + 0.3 * len(rows), "panels": [
        {"heading": f"{report.setting['device']}, {batch_of(report)}\nmeasured; {marks}",
         "bars": measured, "xlabel": "ms a step", "rows": rows},
        {"heading": "One A100, B=16 T=1024, different scale\npublished; black: the computed floor",
         "bars": published, "xlabel": "ms a step", "rows": rows},
    ], "caption": f"Left: {where(report)}. "
                  "Right: GPT-2 (124M), the lecture's scripts; it has no time for rungs 1, 4, 8 and 9."}


def loss_picture(report):
    """The loss against steps and, where they were timed, against seconds of training."""
    colors = colors_of(report.race.names if report.race else report.runs)
    shown = [curve | {"color": None if curve.get("val") else colors[name]} for name, curve in curves(report)]
    panels = [{"curves": shown, "x": "steps", "xlabel": "step"}]
    if not report.race:
        panels.append({"curves": shown, "x": "seconds", "xlabel": "seconds of training, the first step included"})
    return {"title": "Loss", "caption": conditions(report), "height": 4.2, "panels": panels, "legend": "curves"}


def pictures_of(report):
    """{kind: picture} of a report, without those that its logs say nothing of."""
    pictures = {"loss": loss_picture(report)}
    if report.race:
        return pictures
    speeds, memory = list(speed_bars(report)), list(memory_bars(report))
    if speeds:
        pictures["ladder"] = bar_picture("Tokens per second", conditions(report), speeds,
                                         "tokens/sec; the thin lines show the spread")
    if {rung.name for rung in LADDER} <= set(report.runs):
        pictures["step"] = step_picture(report)
    if memory:
        pictures["memory"] = bar_picture("Peak memory", conditions(report), memory, "GB (1e9 bytes)")
    if report.profile:
        pictures["profile"] = profile_picture(report.profile)
    return pictures


def all_pictures(reports):
    """{file name: picture} of several reports."""
    return {f"{report.name}_{kind}.png": picture for report in reports
            for kind, picture in pictures_of(report).items()}


def digest(picture):
    """A short hash of what a picture shows, as its file has it."""
    return hashlib.sha256(json.dumps(picture, sort_keys=True).encode()).hexdigest()[:16]


def save(picture, path):
    figure, partial = draw(picture), path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=150, bbox_inches="tight", metadata={"Digest": digest(picture)})
    partial.replace(path)
    plt.close(figure)


def write_plots(reports, folder, only=None):
    """Write the PNG files, of a set of names `only` those in it, to `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = all_pictures(reports)
    names = [name for name in pictures if only is None or name in only]
    for name in names:
        save(pictures[name], folder / name)
    return [folder / name for name in names]


def shown_in_docs(root):
    """The names of the pictures of docs/ that README.md and docs/*.md show."""
    texts = [path.read_text(encoding="utf-8") for path in [root / "README.md", *root.glob("docs/*.md")]]
    return {name for text in texts for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?([^)/]+\.png)\)", text)}
