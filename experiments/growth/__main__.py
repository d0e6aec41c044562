"""How do a step's time and memory grow with the sequence, the batch, the depth and the number of ranks?

    python -m experiments.growth docs/growth.csv --logs logs/growth     # measures
    python -m experiments.growth docs/growth.csv                        # prints the table, draws docs/growth_*.png

Small models, which two cores hold. Where attention counts, the tokens are bytes, so that the logits are few
(data/bytes, by data/prepare.py --tokenizer bytes). Each round runs every point once, so that drift in machine speed
affects all alike. Rerun the first command to resume; --curves measures some of the curves only.
"""
import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich.console import Console

from ladder.count.flops import VOCAB_SIZE, shape_of
from ladder.count.memory import LOSS_CHUNK, PROCESS_BYTES, step_bytes
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.processes import Job
from ladder.measure.runner import Runner
from ladder.measure.script_flags import command_for, defaults
from ladder.records.logs import read_log
from ladder.records.significance import paired_effect
from ladder.rungs.list import BY_LABEL, ROOT
from ladder.show.plots import digest

BYTES = 257  # the vocabulary of data/bytes: 256 bytes and <|endoftext|>
LENGTH, MEMORY = "growth_length.png", "growth_memory.png"
COLORS = ["#31356e", "#d9822b", "#35b779", "#a33b76"]
GB = 1e9
RECOMPUTES, CHUNKS = "gradient_checkpointing", "chunked_cross_entropy"
SHOWN = {"rung 15": "no block recomputed", "rung 16, all recomputed": "all blocks recomputed",
         "rung 16": "loss at once", "rung 17, chunks": "loss in chunks"}  # where the record has old numbers


# ---- the memory that ladder/count/memory.py expects, in bytes ------------------------------------------------------

def recomputing_bytes(model, B, T, label, vocab_size=VOCAB_SIZE):
    """`step_bytes`, where each block keeps only its input, a float32 vector per token; one has all of its vectors."""
    n_layer, _, n_embd = shape_of(model)
    bytes_of_an_entry = BY_LABEL[label].memory[0]
    saved = B * T * n_embd * (bytes_of_an_entry * (n_layer - 1) - 4 * n_layer)
    return step_bytes(model, B, T, label, vocab_size) - saved


def split_parameters(model):
    """(parameters of the embedding, of one block, number of blocks) of long_run.py and fsdp.py, without norms."""
    n_layer, _, n_embd = shape_of(model)
    n_rows, n_hidden = math.ceil(VOCAB_SIZE / 128) * 128, math.ceil(8 * n_embd / 3 / 64) * 64
    return n_rows * n_embd, 4 * n_embd * n_embd + 3 * n_embd * n_hidden, n_layer


def ddp_bytes(ranks):
    """Of each rank, however many: parameters, gradients, moments, copies; what blocks keep that recompute; logits."""
    embedding, block, n_layer = split_parameters("gpt2")
    _, _, n_embd = shape_of("gpt2")
    vectors, logit, _ = BY_LABEL["long_run"].memory
    kept = (4 * n_layer + vectors) * n_embd + logit * VOCAB_SIZE
    return PROCESS_BYTES + 26 * embedding + 14 * block * n_layer + min(128, LOSS_CHUNK) * kept


def sharded_optimizer_bytes(ranks):
    """As under DDP, but each rank keeps only its moments. One rank has all of the embedding's, the largest matrix."""
    embedding, block, n_layer = split_parameters("gpt2")
    moments = 8 * embedding + 4 * block * n_layer  # AdamW has two for each parameter, Muon one
    largest_share = max(8 * embedding, moments / ranks)
    return ddp_bytes(ranks) - moments + largest_share


# ---- what grows ----------------------------------------------------------------------------------------------------

@dataclass
class Curve:
    """What grows, and in which rungs."""

    xlabel: str
    values: list
    counted_to: int  # up to which value the memory is counted
    steps: int
    setting: Callable  # (value): --data, --model, -B and -T
    rungs: dict  # {name: (label, flags of its own, (value): bytes, counted)}
    laws: tuple = ()  # (rung, power, text): how its time is expected to grow


CURVES = {
    "length": Curve(
        "T, tokens in a sequence", [256, 512, 1024, 2048, 4096], 8192, 5,
        lambda T: ("data/bytes", "4x4x256", 1, T),
        {"rung 0": ("0", [], lambda T: step_bytes("4x4x256", 1, T, "0", BYTES)),
         "rung 5, compiled": ("5", [], lambda T: step_bytes("4x4x256", 1, T, "5", BYTES)),
         "rung 6, flash attention": ("6", [], lambda T: step_bytes("4x4x256", 1, T, "6", BYTES)),
         "rung 10": ("10", [], lambda T: step_bytes("4x4x256", 1, T, "10", BYTES))},
        laws=(("rung 0", 2, "T²"), ("rung 10", 1, "T"))),
    "batch": Curve(
        "tokens in a batch", [1024, 2048, 4096, 8192, 16384], 32768, 4,
        lambda tokens: ("data/tokens", "2x4x256", tokens // 256, 256),
        {"rung 16": (RECOMPUTES, [], lambda tokens: step_bytes("2x4x256", tokens // 256, 256, RECOMPUTES)),
         "rung 17, chunks": (CHUNKS, [], lambda tokens: step_bytes("2x4x256", tokens // 256, 256, CHUNKS))}),
    "depth": Curve(
        "blocks", [2, 4, 8, 16], 32, 4,
        lambda depth: ("data/bytes", f"{depth}x4x256", 32, 256),
        {"rung 15": ("preemption", [], lambda depth: step_bytes(f"{depth}x4x256", 32, 256, "preemption", BYTES)),
         "rung 16, all recomputed": (RECOMPUTES, ["--recompute-blocks", "99"],
                                     lambda depth: recomputing_bytes(f"{depth}x4x256", 32, 256, RECOMPUTES, BYTES))}),
    "ranks": Curve(
        "ranks", [1, 2, 4], 8, 3,
        lambda ranks: ("data/tokens", "gpt2", 1, 128),
        {"rung 24, DDP": ("long_run", [], ddp_bytes),
         "rung 33, sharded optimizer": ("sharded_optimizer", [], sharded_optimizer_bytes)}),
}


# ---- measuring -----------------------------------------------------------------------------------------------------

def folder_of(logs, name, value, rung):
    return logs / name / f"{value}_{rung.replace(' ', '_')}"


def job_of(logs, name, value, rung, number):
    """A run of one point of a curve."""
    curve = CURVES[name]
    label, flags, _ = curve.rungs[rung]
    entry = BY_LABEL[label]
    ranks = value if name == "ranks" else 1
    data, model, B, T = curve.setting(value)
    flags = [*flags, "--data", data, "--model", model, "-B", str(B), "-T", str(T), "--steps", str(curve.steps)]
    if "val_every" in defaults(entry):
        flags += ["--val-every", "0", "--total-batch", str(ranks * B * T)]  # one micro-batch a step
    folder = folder_of(logs, name, value, rung) / f"round_{number}"
    return Job(entry.name, command_for(replace(entry, torchrun=ranks > 1), flags, folder, ranks), folder)


def measure(logs, names, rounds):
    """Run what has no log yet, under the tool's allocator and with the machine's name in each log."""
    jobs = [job_of(logs, name, value, rung, number)
            for number in range(1, rounds + 1)
            for name in names
            for value in CURVES[name].values
            for rung in CURVES[name].rungs]
    logs.mkdir(parents=True, exist_ok=True)
    with Runner("cpu", logs, 900, Console(), resume=True, n_jobs=len(jobs)) as runner:
        runner.run(jobs)


def read(logs):
    """What the logs say: a row for each run."""
    rows = []
    for name, curve in CURVES.items():
        for value in curve.values:
            for rung in curve.rungs:
                for path in sorted(folder_of(logs, name, value, rung).glob("round_*/*.log")):
                    run = read_log(path)
                    rows.append({"curve": name, "value": value, "rung": rung, "round": int(path.parent.name[6:]),
                                 "ms": round(run.median_ms, 2), "peak_gb": run.peak_memory_gb,
                                 "machine": run.headers["machine"], "torch": run.headers["torch"]})
    return pandas.DataFrame(rows)


# ---- showing -------------------------------------------------------------------------------------------------------

def medians(record, name, rung, column):
    """(values, medians, lowest, highest) of one rung's rounds."""
    rows = record[(record.curve == name) & (record.rung == rung)]
    by_value = rows.groupby("value")[column]
    return by_value.median().index.to_numpy(), by_value.median().to_numpy(), by_value.min(), by_value.max()


def prepare(axes, curve, ylabel):
    axes.set(xlabel=curve.xlabel)
    axes.set_title(ylabel, fontsize=9, loc="left")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)


def use_logarithms(axes, ticks):
    """Both axes logarithmic: a power of what grows is a straight line, and its slope is the exponent."""
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw_times(axes, record, name):
    """Milliseconds, and in grey what grows as expected."""
    curve = CURVES[name]
    prepare(axes, curve, "ms per step")
    for rung, color in zip(curve.rungs, COLORS, strict=False):
        values, ms, low, high = medians(record, name, rung, "ms")
        axes.plot(values, ms, "o-", color=color, markersize=4, label=rung)
        axes.fill_between(values, low, high, color=color, alpha=0.2, linewidth=0)
    first, last = curve.values[0], curve.values[-1]
    for rung, power, text in curve.laws:
        end = 1.15 * medians(record, name, rung, "ms")[1][-1]
        axes.plot([first, last], [end * (first / last) ** power, end], ":", color="0.5")
        axes.annotate(text, (last, end), (3, 3), textcoords="offset points", color="0.4")
    use_logarithms(axes, curve.values)
    axes.legend(frameon=False, fontsize=8)


def draw_memory(axes, record, name):
    """Peak memory: dots measured, lines counted."""
    curve = CURVES[name]
    prepare(axes, curve, "peak GB; dots: measured, lines: computed")
    sizes = (8.5, 7, 5.5, 3.5)  # the later, the smaller: where rungs agree, all stay visible
    for (rung, (_, _, counted)), color, size in zip(curve.rungs.items(), COLORS, sizes, strict=False):
        values, peak, _, _ = medians(record, name, rung, "peak_gb")
        every = range(curve.values[0], curve.counted_to + 1, curve.values[0])
        axes.plot(every, [counted(value) / GB for value in every], "--", color=color, linewidth=1)
        axes.plot(values, peak, "o", color=color, markersize=size, label=SHOWN.get(rung, rung))
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.legend(frameon=False, fontsize=8)


def draw(path, folder):
    """LENGTH: time and memory against T; MEMORY: memory against batch and depth. Each has the digest of its record."""
    record, seen = pandas.read_csv(path), digest(path.read_text(encoding="utf-8"))
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    draw_times(axes[0], record, "length")
    draw_memory(axes[1], record, "length")
    save(figure, folder / LENGTH, seen)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for one, name in zip(axes, ("batch", "depth"), strict=True):
        draw_memory(one, record, name)
    save(figure, folder / MEMORY, seen)


def save(figure, path, seen):
    figure.savefig(path, dpi=150, metadata={"Digest": seen})
    plt.close(figure)
    print(path)


def print_table(record):
    for (name, value), rows in record.groupby(["curve", "value"], sort=False):
        cells = []
        for rung in CURVES[name].rungs:
            one = rows[rows.rung == rung]
            counted = CURVES[name].rungs[rung][2](value) / GB
            memory = f"{one.peak_gb.median():.2f} GB (counted {counted:.2f})"
            time = f"{one.ms.median():,.0f} ms ({one.ms.min():,.0f}-{one.ms.max():,.0f}), " if one.ms.any() else ""
            cells.append(f"{rung}: {time}{memory}")
        print(f"{name} {value}: " + "; ".join(cells))


def print_gains(record, name, before, after):
    """How many times as fast one rung is as another, round by round, and p of a paired test."""
    rows = record[record.curve == name].pivot(index=["value", "round"], columns="rung", values="ms")
    for value, ms in rows.groupby("value"):
        ratios = ms[before] / ms[after]
        p = paired_effect(ms[before].map(math.log), ms[after].map(math.log)).p
        print(f"{name} {value}: {after}, {ratios.median():.2f} times as fast as {before} "
              f"({ratios.min():.2f} to {ratios.max():.2f}, p = {p:.3f})")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="a CSV file")
    parser.add_argument("--logs", type=Path, help="measure into this folder, and write the record from it")
    parser.add_argument("--curves", nargs="+", choices=CURVES, default=list(CURVES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.logs:
        measure(args.logs, args.curves, args.rounds)
        rows = read(args.logs)
        if args.record.exists():  # keeps the curves that were not measured now
            before = pandas.read_csv(args.record)
            rows = pandas.concat([before[~before.curve.isin(rows.curve)], rows])
        write_whole(args.record, rows.to_csv(index=False))
    record = pandas.read_csv(args.record)
    print_table(record)
    print_gains(record, "length", "rung 0", "rung 10")
    print_gains(record, "length", "rung 5, compiled", "rung 6, flash attention")
    print_gains(record, "batch", "rung 16", "rung 17, chunks")
    print_gains(record, "depth", "rung 16, all recomputed", "rung 15")
    draw(args.record, ROOT / "docs")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
