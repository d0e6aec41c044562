"""`python -m ladder floor`: the minimum time of a step on any GPU, computed without one."""
from pathlib import Path

from ladder import formats
from ladder.count.cards import find_card
from ladder.count.floors import STORED, TIMES_FLOOR, counted_rungs, floor_row, read_store
from ladder.count.flops import SHAPES
from ladder.count.memory import BLOCK_SIZE, step_bytes
from ladder.errors import UserError
from ladder.records.machine import measured_card
from ladder.rungs.list import BY_LABEL, parse_rungs
from ladder.show.columns import columns_of
from ladder.show.terminal import COUNT, print_table


def add_flags(parser):
    flag = parser.add_argument
    flag("--gpu", nargs="+", action="extend", metavar="CARD", help="GPUs: a name such as H100 or 4090, "
         "its rates as NAME:FLOAT32,TF32,16BIT,GB (TFLOP/s, then GB/s), or the folder of a run, whose measured rates "
         "are used (default: A100)")
    flag("--rungs", default="0-10", help="rungs, such as 0,5,ddp or 0-10,modern/ (default: %(default)s)")
    flag("--model", default=STORED["model"], choices=SHAPES, help="model size (default: %(default)s)")
    flag("-B", type=COUNT, default=STORED["B"], help="sequences per batch (default: %(default)s); values other than "
         "the defaults of --model, -B and -T take about ten seconds per rung")
    flag("-T", type=COUNT, default=STORED["T"],
         help=f"tokens per sequence, at most {BLOCK_SIZE} (default: %(default)s)")


def main(args, console):
    cards = [measured_card(name) if Path(name).is_dir() else find_card(name) for name in args.gpu or ["A100"]]
    names = [card.name for card in cards]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--gpu: two of these GPUs are called {name}; show their floors separately")
    labels = counted_rungs(parse_rungs(args.rungs), console)
    setting = {"model": args.model, "B": args.B, "T": args.T}
    if args.T > BLOCK_SIZE:
        raise UserError(f"-T {args.T}: the model takes at most {BLOCK_SIZE} tokens; give a smaller -T")
    if setting == STORED:
        kernels = {label: rung["kernels"] for label, rung in read_store().items() if label in labels}
    else:
        from ladder.count.kernels import count_all

        kernels = count_all(labels, setting, console)
    print_floors(kernels, cards, setting, console)


def floor_texts(label, kernels, cards):
    """One rung as {heading: text}: what was counted, the floor on each card; for a single one also its parts."""
    row = floor_row(kernels, cards)
    texts = {"rung": BY_LABEL[label].row, "GB": formats.traffic(row["gb"]), "launches": formats.number(row["launches"])}
    for card in cards:
        texts[f"{card.name}, ms"] = formats.ms(row["ms"][card.name]["floor"])
    if len(cards) == 1:
        [ms] = row["ms"].values()
        texts["TFLOP"] = ", ".join(f"{formats.trillions(x)} {name}" for name, x in row["tflop"].items())
        texts |= {part: formats.ms(ms[part]) for part in ("products", "traffic")}
        texts["expect, ms"] = formats.spread(*(times * ms["floor"] for times in TIMES_FLOOR), formats.number)
    return texts


def print_floors(kernels, cards, setting, console):
    """The floors of {label: {Kernel: how many}}, a line for each rung; `setting`: model, B and T."""
    texts = [floor_texts(label, counted, cards) for label, counted in kernels.items()]
    expect = ("expect: measured steps (the GPUs of logs/reference, the lecture's A100) took "
              f"{' to '.join(map(formats.ratio, TIMES_FLOOR))} times their floors")
    columns = columns_of(texts, ["TFLOP", "launches", "traffic", "products", "GB"], {"expect, ms": expect})
    least, label = max((step_bytes(label=label, **setting), label) for label in kernels)
    called = BY_LABEL[label].called
    gigabytes = formats.number(least / 1e9)
    caption = f"{called} needs the most memory, about {gigabytes} GB; a card with less needs a smaller -B.\n"
    caption += "\n".join(f"{card.name}: {card.float32:g} / {card.tf32:g} / {card.bits16:g} TFLOP/s in float32 / TF32 / "
                        f"16 bits, {card.bandwidth:,g} GB/s ({card.source})" for card in cards)
    title = "Floors, computed: {model}, B={B} T={T}".format(**setting)
    print_table(texts, columns, console, title, caption)
