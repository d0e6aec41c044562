"""Pictures of a report: where a step's time goes, the ladder of tokens/sec, the losses, the memory."""
import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ladder.errors import UserError
from ladder.scripts.stages import BY_NAME
from ladder.show.logs import PEER
from ladder.show.profile import is_reliable
from ladder.show.report import conditions, where
from ladder.show.standings import race_curves, standings

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

plt.rcParams["text.parse_math"] = False  # a $ in a name does not start a formula


def colours_of(report):
    """{name: colour} along one colour map, so that only neighbours look alike; the peer is grey."""
    rungs = [row.name for row in report.rows if row.name != PEER]
    shades = plt.get_cmap("viridis")
    return {name: shades(0.92 * i / max(1, len(rungs) - 1)) for i, name in enumerate(rungs)} | {PEER: "grey"}


def new_figure(title, caption, height=4.2, columns=1):
    figure, axes = plt.subplots(1, columns, figsize=(9, height), layout="constrained", sharey=columns > 1)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, -0.01, caption, fontsize=7, color="grey", va="top", wrap=True)
    for one in axes if columns > 1 else [axes]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_ladder(report):
    """One bar per rung: tokens/sec with its spread, its ratio to the baseline, and MFU if known."""
    rows = [row for row in report.rows if row.tokens_per_second]
    figure, axes = new_figure("Tokens per second", conditions(report), height=0.8 + 0.36 * max(4, len(rows)))
    colours = colours_of(report)
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
    figure, (by_step, by_time) = new_figure("Loss", conditions(report), columns=2)
    colours = colours_of(report)
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


def plot_race(report):
    """The validation loss against seconds, and the loss that each learning rate of the search ended with."""
    figure, (by_time, by_rate) = new_figure("To the same validation loss", where(report), columns=2)
    colours, titles = colours_of(report), {row.name: row.title for row in report.rows}
    target, racers = standings(report)
    for name, _, seconds, losses in race_curves(report):
        by_time.plot(seconds, losses, color=colours[name], label=titles[name], linewidth=1.4)
    by_time.axhline(target, color="black", linewidth=0.8, linestyle=":")
    for racer in racers:
        by_time.plot(racer.seconds[0], target, "o", color=colours[racer.name], markersize=4)
        losses = report.sweep.get(racer.name, {})
        by_rate.plot(losses.keys(), losses.values(), color=colours[racer.name], marker="o", markersize=3, linewidth=1.2)
    ends = [racer.val_loss[0] for racer in racers]
    by_time.set(xlabel="seconds of training", ylabel="validation loss (nats)",
                ylim=(min(ends) - 0.1, target + 1.5 * (target - min(ends)) + 0.1))
    by_rate.set(xlabel="learning rate in the search", xscale="log")
    rates = sorted({rate for losses in report.sweep.values() for rate in losses})
    by_rate.set_xticks(rates, [f"{rate:g}" for rate in rates], rotation=45, fontsize=7, ha="right")
    by_rate.set_xticks([], minor=True)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def plot_memory(report):
    """Peak memory of each rung."""
    rows = [row for row in report.rows if row.peak_memory_gb]
    figure, axes = new_figure("Peak memory", conditions(report), height=0.8 + 0.36 * max(4, len(rows)))
    colours = colours_of(report)
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
    return paths


def shown_in_docs(root):
    """The names of the pictures of docs/ that README.md and docs/*.md show."""
    texts = [path.read_text(encoding="utf-8") for path in [root / "README.md", *root.glob("docs/*.md")]]
    return {name for text in texts for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?([^)/]+\.png)\)", text)}
