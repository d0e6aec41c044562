"""Still pictures of a report: the ladder of tokens/sec, the losses, the memory."""
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ladder.errors import UserError
from ladder.logs import PEER
from ladder.report import conditions

plt.rcParams["text.parse_math"] = False  # a $ in a name is no formula

def colours_of(report):
    """{name: colour} along one colour map, so that neighbours look alike and the ends do not; the peer is grey."""
    rungs = [row.name for row in report.rows if row.name != PEER]
    shades = plt.get_cmap("viridis")
    return {name: shades(0.92 * i / max(1, len(rungs) - 1)) for i, name in enumerate(rungs)} | {PEER: "grey"}


def new_figure(report, title, height=4.2, columns=1):
    figure, axes = plt.subplots(1, columns, figsize=(9, height), layout="constrained", sharey=columns > 1)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    figure.text(0.01, -0.01, conditions(report), fontsize=7, color="grey", va="top", wrap=True)
    for one in axes if columns > 1 else [axes]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_ladder(report):
    """One bar per rung: tokens/sec, with the spread, how many times the baseline, and MFU where it is known."""
    rows = [row for row in report.rows if row.tokens_per_second]
    figure, axes = new_figure(report, "Tokens per second", height=0.8 + 0.36 * max(4, len(rows)))
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


def plot_losses(report):
    """The loss against steps and against seconds of training."""
    figure, (by_step, by_time) = new_figure(report, "Loss", columns=2)
    colours = colours_of(report)
    for row in report.rows:
        run = report.runs[row.name][0]
        seconds, total = [], 0.0
        for ms in run.ms:
            total += ms / 1000
            seconds.append(total)
        by_step.plot(run.steps, run.losses, color=colours[row.name], label=row.title, linewidth=1.2)
        by_time.plot(seconds, run.losses, color=colours[row.name], linewidth=1.2)
        if run.val_steps:
            style = {"color": "black", "linewidth": 1, "linestyle": ":", "marker": "o", "markersize": 3}
            by_step.plot(run.val_steps, run.val_losses, label=f"{row.title}: validation", **style)
            by_time.plot([run.seconds_at(step) for step in run.val_steps], run.val_losses, **style)
    by_step.set(xlabel="step", ylabel="loss (nats)")
    by_time.set(xlabel="seconds of training, the first step included")
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure


def plot_memory(report):
    """Peak memory of each rung."""
    rows = [row for row in report.rows if row.peak_memory_gb]
    figure, axes = new_figure(report, "Peak memory", height=0.8 + 0.36 * max(4, len(rows)))
    colours = colours_of(report)
    axes.barh([row.title for row in rows], [row.peak_memory_gb for row in rows], color=[colours[r.name] for r in rows])
    axes.invert_yaxis()
    for i, row in enumerate(rows):
        axes.text(row.peak_memory_gb, i, f" {row.peak_memory_gb:.2f}", va="center", fontsize=8)
    axes.set_xlabel("GB (1e9 bytes)")
    return figure


def write_plots(reports, folder):
    """Write PNG files to `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for report in reports:
        for kind, plot in (("ladder", plot_ladder), ("loss", plot_losses), ("memory", plot_memory)):
            figure = plot(report)
            path = folder / f"{report.name}_{kind}.png"
            if path in paths:
                raise UserError(f"two of the log folders are called {report.name}: plot them into folders of their own")
            paths.append(path)
            figure.savefig(paths[-1], dpi=150, bbox_inches="tight")
            plt.close(figure)
    return paths
