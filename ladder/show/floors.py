"""Counted floors in a terminal."""
import pandas

from ladder.count.floor import row_of
from ladder.show.terminal import print_texts


def floor_texts(row, cards):
    """One rung as {heading: text}: what was counted, the floor on each card; for a single one also its parts."""
    alone = cards[0].name if len(cards) == 1 else None
    texts = {"rung": f"{row['label']} {row['title']}"}
    if alone:
        texts["TFLOP"] = ", ".join(f"{x:.2f} {name}" for name, x in row["tflop"].items())
    texts["GB"] = f"{row['gb']:,.1f}"
    texts["launches"] = f"{row['launches']:,}"
    for card in cards:
        texts[f"{card.name}, ms"] = f"{row['ms'][card.name]['floor']:,.1f}"
    if alone:
        texts["products"] = f"{row['ms'][alone]['products']:,.1f}"
        texts["traffic"] = f"{row['ms'][alone]['traffic']:,.1f}"
    return texts


def print_floors(kernels, cards, setting, console):
    """The floors of {label: {Kernel: how many}}, a line for each rung; `setting`: model, B and T."""
    texts = [floor_texts(row_of(label, counted, cards), cards) for label, counted in kernels.items()]
    caption = "\n".join(f"{card.name}: {card.float32:g} / {card.tf32:g} / {card.bits16:g} TFLOP/s in float32 / TF32 / "
                        f"16 bits, {card.bandwidth:,g} GB/s ({card.source})" for card in cards)
    title = "Floors, counted: {model}, B={B} T={T}".format(**setting)
    print_texts(pandas.DataFrame(texts), console, title, caption)
