"""Pictures of a report: where a step's time goes, the ladder of tokens/sec, the losses, the memory."""
import math
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ladder.errors import UserError
from ladder.scripts.stages import BY_NAME
from ladder.show.logs import PEER
from ladder.show.profile import is_reliable
from ladder.show.report import conditions, data_of, where
from ladder.judge.standings import finished, race_curves, standings

# One colour per kind of work, here and on the page. Blue is the arithmetic; colour-blind readers can tell all eight
# apart, on white and on black (a test checks it).
KIND_COLOURS = {
    "matrix products": "#2463c0",
    "head": "#6fbdf0",
    "attention": "#c95a2e",
    "normalization and pointwise": "#e5bb3f",
    "cross-entropy": "#9676b8",
    "optimizer": "#35ab72",
    "data": "#5f5a66",
    "waiting": "#b6bfba",
}

RACES = "races.png"  # the picture of all races

plt.rcParams["text.parse_math"] = False  # a $ in a name does not start a formula


def colours_of(rows):
    """{name: colour} along one colour map, so that only neighbours look alike; the peer is grey."""
    rungs = [row.name for row in rows if row.name != PEER]
    shades = plt.get_cmap("viridis")
    return {name: shades(0.92 * i / max(1, len(rungs) - 1)) for i, name in enumerate(rungs)} | {PEER: "grey"}


def new_figure(title, caption, height=4.2, mosaic="a", **how):
    """(the figure, the axes for each letter of `mosaic`)."""
    figure, axes = plt.subplot_mosaic(mosaic, figsize=(9, height), layout="constrained", **how)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, -0.01, caption, fontsize=7, color="grey", va="top", wrap=True)
    for one in axes.values():
        one.spines[["top", "right"]].set_visible(False)
    return figure, *axes.values()


def plot_ladder(report):
    """One bar per rung: tokens/sec with its spread, its ratio to the baseline, and MFU if known."""
    rows = [row for row in report.rows if row.tokens_per_second]
    figure, axes = new_figure("Tokens per second", conditions(report), height=0.8 + 0.36 * max(4, len(rows)))
    colours = colours_of(report.rows)
    speeds = [row.tokens_per_second for row in rows]
    per_ms = [row.tokens_per_second * row.ms for row in rows]
    low = [speed - work / row.ms_high for speed, work, row in zip(speeds, per_ms, rows, strict=True)]
    high = [work / row.ms_low - speed for speed, work, row in zip(speeds, per_ms, rows, strict=True)]
    axes.barh([row.title for row in rows], speeds, color=[colours[row.name] for row in rows],
              xerr=[[max(0, v) for v in low], [max(0, v) for v in high]], error_kw={"elinewidth": 1, "alpha": 0.5})
    axes.invert_yaxis()
    for i, row in enumerate(rows):
        label = f" {row.tokens_per_second:,.0f}"
        label += f"  ×{row.times_baseline:.2f}" if row.times_baseline else ""
        label += f"  MFU {row.mfu:.0%}" if row.mfu else ""
        axes.text(speeds[i] + max(0, high[i]), i, label, va="center", fontsize=8)
    axes.margins(x=0.3)
    axes.set_xlabel("tokens/sec; the thin lines show the spread")
    return figure


def plot_profile(profile):
    """One bar per rung: a step's milliseconds by kind of work, and the floor: what its matrix products need."""
    rungs = profile["rungs"]
    figure, axes = new_figure("Where a step's time goes", height=1.4 + 0.36 * max(4, len(rungs)), caption=(
        f"{profile['name']}, {profile['model']}, B={profile['B']} T={profile['T']}. "
        "Floor: what all matrix products, attention's included, take at the rate measured on this machine."))
    starts = [0.0] * len(rungs)
    handles = []
    for kind, colour in KIND_COLOURS.items():
        ms = [rung["parts_ms"][kind] for rung in rungs]
        handles.append(axes.barh(range(len(rungs)), ms, left=starts, color=colour, label=kind, height=0.76))
        for bar, rung in zip(handles[-1], rungs, strict=True):
            bar.set_alpha(1 if is_reliable(rung) else 0.25)
        starts = [start + more for start, more in zip(starts, ms, strict=True)]
    digits = 0 if max(starts) >= 200 else 1
    for i, rung in enumerate(rungs):
        doubt = "" if is_reliable(rung) else f" unreliable: {rung['plain_ms']:,.{digits}f} without the profiler"
        axes.text(starts[i], i, f" {starts[i]:,.{digits}f}{doubt}", va="center", fontsize=9)
        for colour, width in (("white", 3.5), ("black", 1.5)):
            floor = axes.vlines(rung["floor_ms"], i - 0.46, i + 0.46, color=colour, linewidth=width, label="floor")
    axes.set_yticks(range(len(rungs)), [rung_title(rung["name"]) for rung in rungs], fontsize=9)
    axes.set(ylim=(len(rungs) - 0.5, -0.5), xlim=(0, 1.08 * max(starts)))
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor="grey")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("ms per step", fontsize=8, color="grey")
    handles.append(floor)
    in_rows = [handle for column in range(5) for handle in handles[column::5]]  # matplotlib fills column by column
    axes.legend(handles=in_rows, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5, fontsize=8.5, frameon=False,
                handlelength=1.1, handletextpad=0.5, columnspacing=1.3)
    return figure


def rung_title(name):
    stage = BY_NAME.get(name)
    return f"{stage.title}  {stage.label}" if stage else name


def plot_losses(report):
    """The loss against steps and against seconds of training."""
    figure, by_step, by_time = new_figure("Loss", conditions(report), mosaic="ab", sharey=True)
    colours = colours_of(report.rows)
    for row in report.rows:
        run = report.runs[row.name][0]
        by_step.plot(run.steps, run.losses, color=colours[row.name], label=row.title, linewidth=1.2)
        by_time.plot(run.seconds, run.losses, color=colours[row.name], linewidth=1.2)
        if run.val_steps:
            style = {"color": "black", "linewidth": 1, "linestyle": ":", "marker": "o", "markersize": 3}
            by_step.plot(run.val_steps, run.val_losses, label=f"{row.title}: validation", **style)
            by_time.plot([run.seconds_at(step) for step in run.val_steps], run.val_losses, **style)
    by_step.set(xlabel="step", ylabel="loss (nats)")
    by_time.set(xlabel="seconds of training, the first step included")
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def draw_seconds(axes, report, rows=None):
    """One bar per rung: its seconds to the target, their spread, and their share of the first rung's.

    With `rows` of a report there is a place for each of these, some of them empty.
    """
    target, racers = standings(report)
    apart, rows, runs = rows is None, rows or report.rows, finished(report.runs)
    colours, places = colours_of(rows), {row.name: i for i, row in enumerate(rows)}
    for racer in racers:
        i = places[racer.name]
        whole = runs[racer.name][0].steps[-1] * racer.ms / 1000  # where a run that never gets there ends
        middle, low, high = (min(seconds, whole) for seconds in racer.seconds)
        reached = math.isfinite(racer.seconds[0])
        axes.barh(i, middle, color=colours[racer.name], alpha=1 if reached else 0.25, height=0.76,
                  xerr=[[middle - low], [high - middle]], error_kw={"elinewidth": 1, "alpha": 0.5})
        if racer.seconds[2] == math.inf:
            axes.plot(high, i, ">", color="0.4", markersize=4)
        seconds = f"{racer.seconds[0]:,.{0 if racers[0].seconds[0] >= 20 else 1}f} s, " if apart else ""
        axes.annotate(f"{seconds}{racer.percent[0]:.0f} %" if reached else "not reached", (high, i), (6, 0),
                      textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [f"{row.title}  {BY_NAME[row.name].label}" for row in rows], fontsize=9)
    axes.set(ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel(f"seconds to a validation loss of {target:.2f}", fontsize=8, color="grey")
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor="grey")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.margins(x=0.15 if apart else 0.3)


def about_seconds(report):
    """The caption of draw_seconds."""
    n_seeds = max(map(len, finished(report.runs).values()))
    return f"The median of {n_seeds} seeds; thin lines: lowest to highest, with an arrow where a seed never got there."


def plot_races(reports):
    """The bars of several races side by side, those of the same rung in one row."""
    rows = {row.name: row for report in reports for row in report.rows}
    rows = [rows[name] for name in BY_NAME if name in rows]
    mosaic = "".join(chr(ord("a") + i) for i in range(len(reports)))
    settings = " · ".join(dict.fromkeys(where(report).split(", B=")[0] for report in reports))
    figure, *panels = new_figure("Seconds to the same loss, rung by rung", f"{settings}. {about_seconds(reports[0])} "
                                 "No bar: not raced.", 1.3 + 0.28 * len(rows), mosaic)
    for axes, report in zip(panels, reports, strict=True):
        draw_seconds(axes, report, rows)
        axes.set_title(data_of(report), fontsize=9, loc="left")
        axes.tick_params(labelleft=axes is panels[0])
    return figure


def plot_race(report):
    """The seconds to the target, the losses on the way there, and the final losses of the search.

    Those of the search are along each of the two rates, the other at its best.
    """
    bars = 1 + 0.3 * max(4, len(report.rows))
    figure, by_rung, by_time, by_adamw, by_muon = new_figure(
        "Seconds to the same loss, rung by rung", f"{where(report)}. {about_seconds(report)} Below: the way there; and "
        "the losses that the search ended with, along each learning rate.",
        bars + 3.6, "aaaa\nbbcd", height_ratios=[bars, 3.6])
    draw_seconds(by_rung, report)
    (target, racers), colours = standings(report), colours_of(report.rows)
    for name, _, seconds, losses in race_curves(report):
        by_time.plot(seconds, losses, color=colours[name], linewidth=1.4)
    by_time.axhline(target, color="black", linewidth=0.8, linestyle=":")
    for racer in racers:
        by_time.plot(racer.seconds[0], target, "o", color=colours[racer.name], markersize=4)
    ends = [racer.val_loss[0] for racer in racers]
    by_time.set(xlabel="seconds of training", ylabel="validation loss (nats)",
                ylim=(min(ends) - 0.1, target + 1.5 * (target - min(ends)) + 0.1))
    for i, (axes, whose) in enumerate([(by_adamw, "AdamW's"), (by_muon, "Muon's")]):
        axes.sharey(by_time)
        axes.tick_params(labelleft=False)
        for racer in racers:
            losses, best = report.sweep.get(racer.name, {}), racer.rates
            at_best = {rates[i]: loss for rates, loss in losses.items()
                       if len(best) > i and (*rates[:i], *rates[i + 1 :]) == (*best[:i], *best[i + 1 :])}
            axes.plot(at_best.keys(), at_best.values(), color=colours[racer.name], marker="o", markersize=3)
        axes.set(xlabel=f"{whose} rate", xscale="log")
        tried = sorted({rates[i] for losses in report.sweep.values() for rates in losses if len(rates) > i})
        axes.set_xticks(tried, [f"{rate:g}" for rate in tried], rotation=45, fontsize=7, ha="right")
        axes.set_xticks([], minor=True)
    return figure


def plot_memory(report):
    """Peak memory of each rung."""
    rows = [row for row in report.rows if row.peak_memory_gb]
    figure, axes = new_figure("Peak memory", conditions(report), height=0.8 + 0.36 * max(4, len(rows)))
    colours = colours_of(report.rows)
    axes.barh([row.title for row in rows], [row.peak_memory_gb for row in rows], color=[colours[r.name] for r in rows])
    axes.invert_yaxis()
    for i, row in enumerate(rows):
        axes.text(row.peak_memory_gb, i, f" {row.peak_memory_gb:.2f}", va="center", fontsize=8)
    axes.set_xlabel("GB (1e9 bytes)")
    return figure


def save(figure, path):
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def plots_of(report):
    """{kind: a function that draws it} of all plots of a report."""
    if report.sweep:
        return {"race": lambda: plot_race(report)}
    plots = {"ladder": lambda: plot_ladder(report), "loss": lambda: plot_losses(report),
             "memory": lambda: plot_memory(report)}
    return plots | ({"profile": lambda: plot_profile(report.profile)} if report.profile else {})


def write_plots(reports, folder, wanted=lambda name: True):
    """Write the PNG files whose names are `wanted` to `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for report in reports:
        for kind, draw in plots_of(report).items():
            path = folder / f"{report.name}_{kind}.png"
            if path in paths:
                raise UserError(f"two log folders are called {report.name}: plot them into separate folders")
            if wanted(path.name):
                paths.append(path)
                save(draw(), path)
    races = sorted((report for report in reports if report.sweep), key=lambda report: -len(report.rows))
    if len(races) > 1 and wanted(RACES):
        paths.append(folder / RACES)
        save(plot_races(races), folder / RACES)
    return paths


def shown_in_docs(root):
    """The names of the pictures of docs/ that README.md and docs/*.md show."""
    texts = [path.read_text(encoding="utf-8") for path in [root / "README.md", *root.glob("docs/*.md")]]
    return {name for text in texts for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?([^)/]+\.png)\)", text)}
