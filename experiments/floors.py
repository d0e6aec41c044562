"""Does a counted floor lie below every published or measured step? And how far?

    python -m experiments.floors [FOLDER_OF_LOGS ...]

The folders are CPUs' besides those of logs/reference.
"""
import json
import sys
from pathlib import Path

from experiments.count_kernels import count
from ladder.count.cards import CARDS, card_of
from ladder.count.floor import STORED, floor_of, read_store
from ladder.count.flops import flops_per_token
from ladder.rungs.list import BY_NAME, ROOT
from ladder.show.logs import read_folder
from ladder.show.machine import read_machine
from ladder.show.report import build_report

T, EAGER = 1024, {"compile_mode": "none"}
LECTURE = [("float32", "0", 16, {}, 1000), ("TF32", "2", 16, {}, 333), ("bfloat16", "3", 16, {}, 300),
           ("compile", "5", 16, {}, 130), ("flash attention", "6", 16, {}, 96), ("50304 rows", "7", 16, {}, 93)]
FROM_SCRATCH = [("as in the book", "0", 8, {}, 12_525), ("TF32", "2", 8, {}, 27_648),
                ("bfloat16, torch's LayerNorm and GELU", "3", 8, {}, 55_256),
                ("flash attention, not compiled", "6", 8, EAGER, 91_901), ("compile", "6", 8, {}, 112_046),
                ("50304 rows", "7", 8, {}, 127_345), ("B=32", "7", 32, {}, 142_156)]
NANOGPT = [("bfloat16, not compiled", "3", 12, {}, 250), ("compile", "5", 12, {}, 135),
           ("8 x A100: a micro-step of one card", "10", 12, {}, 1000 * 4 * 24 * 3600 / 600_000 / 5)]


def ms_of(tokens_per_second, B):
    return 1000 * B * T / tokens_per_second


def kernels(label, B, settings):
    if settings or (B, T) != (STORED["B"], STORED["T"]):
        return count(label, "gpt2", B, T, **settings)
    return read_store()[label]["kernels"]


def compare(title, rows, card, what="published"):
    """Counted and published or measured, row by row, each with the step from the row before."""
    print(f"\n{title}\n")
    print(f"| | rung | B | floor, ms | products | traffic | launches | {what}, ms | floor / {what} "
          f"| × before, counted | × before, {what} |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    last = None
    for name, label, B, settings, published in rows:
        counted = kernels(label, B, settings)
        floor, products, traffic = floor_of(counted, card).values()
        launches = sum(n * kernel.launches for kernel, n in counted.items())
        steps = f"{last[0] / floor:.2f} | {last[1] / published:.2f}" if last and last[2] == B else "| "
        print(f"| {name} | {label} | {B} | {floor:.0f} | {products:.0f} | {traffic:.0f} | {launches:,} "
              f"| {published:.0f} | {floor / published:.2f} | {steps} |", flush=True)
        last = floor, published, B


def gpu(folder):
    """The rungs of a folder of logs from a GPU, the median of their rounds."""
    report = build_report(folder)
    rows = [(row.title, BY_NAME[row.name].label, STORED["B"], {}, row.ms) for row in report.rows if row.name in BY_NAME]
    compare(f"{folder.name}: measured", rows, card_of(report.setting["device"]), "measured")


def cpu(folder):
    """The matrix products of each rung at its CPU's measured rates: all of the floor, as no bandwidth was measured."""
    rates = read_machine(folder)["rates"]
    print(f"\n{folder.name}: {json.dumps({name: round(rate / 1e9) for name, rate in rates.items()})} GFLOP/s\n")
    print("| rung | products, ms | fastest round, ms | share |\n|--:|--:|--:|--:|")
    for name, runs in read_folder(folder)[0].items():
        if name in BY_NAME and runs[0].ranks == 1:
            run, rung = min(runs, key=lambda run: run.median_ms), BY_NAME[name]
            rate = rates["bfloat16" if run.headers["precision"].startswith("bfloat16") else "float32"]
            products = 1000 * flops_per_token(run.model, run.T, rung.causal) * run.tokens_per_step / rate
            print(f"| {rung.label} | {products:,.0f} | {run.median_ms:,.0f} | {products / run.median_ms:.2f} |")


def main():
    a100 = CARDS["A100"]
    print(f"GPT-2 (124M), T={T}, floors of an A100: {a100.source}")
    compare("Karpathy's lecture, one A100 (40 or 80 GB is not said)", LECTURE, a100)
    compare("LLMs-from-scratch, ch05/10_llm-training-speed, one A100, from its tokens/sec",
            [(*row[:4], ms_of(row[4], row[2])) for row in FROM_SCRATCH], a100)
    compare("nanoGPT's README: 250 -> 135 ms (bench.py: B=12), and 600,000 iterations of 5 micro-steps in 4 days",
            NANOGPT, a100)
    for folder in sorted(ROOT.glob("logs/reference/nvidia_*_B16_T1024")):
        gpu(folder)
    for folder in [*sorted(ROOT.glob("logs/reference/*_B1_T1024*")), *map(Path, sys.argv[1:])]:
        cpu(folder)


if __name__ == "__main__":
    main()
