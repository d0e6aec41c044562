"""Counted floors in a terminal."""
import pandas

from ladder.count.floor import COUNTED, NOT_COUNTED, STORED, floor_data
from ladder.errors import UserError
from ladder.show.terminal import print_texts


def print_floors(rows, cards, setting, console):
    """One line per rung: what was counted, and the floor on each card; for a single card, also its parts and FLOPs."""
    texts, alone = [], len(cards) == 1
    for row in rows:
        text = {"rung": f"{row['label']} {row['title']}"}
        if alone:
            text["TFLOP"] = ", ".join(f"{x:.2f} {name}" for name, x in row["tflop"].items())
        text |= {"GB": f"{row['gb']:,.1f}", "launches": f"{row['launches']:,}"}
        text |= {f"{card.name}, ms": f"{row['ms'][card.name]['floor']:,.1f}" for card in cards}
        if alone:
            text |= {part: f"{row['ms'][cards[0].name][part]:,.1f}" for part in ("products", "traffic")}
        texts.append(text)
    caption = "\n".join(f"{card.name}: {card.float32:g} / {card.tf32:g} / {card.bits16:g} TFLOP/s in float32 / TF32 / "
                        f"16 bits, {card.bandwidth:,g} GB/s ({card.source})" for card in cards)
    print_texts(pandas.DataFrame(texts), console, f"Floors, counted: {setting}", caption)


def show_floors(stages, cards, console):
    """The stored floors of some rungs; UserError where none is counted."""
    labels = [stage.label for stage in stages]
    if not (rows := floor_data(cards, labels)["rungs"]):
        raise UserError(f"--rungs {','.join(labels)}: {NOT_COUNTED}; give others")
    if left_out := [label for label in labels if label not in COUNTED]:
        console.print(f"left out: {', '.join(left_out)}; {NOT_COUNTED}")
    print_floors(rows, cards, "{model}, B={B} T={T}".format(**STORED), console)
