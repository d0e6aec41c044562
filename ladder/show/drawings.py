"""Drawings of ideas that a picture shows better than words, as SVG for the page, whose colors they take.

Each is a function of what it shows, drawn to scale. They are 358 units wide, what a phone of 390 pixels leaves, so that
text of 13 units can be read there.
"""
import csv
import html
import math
import statistics
import struct
from dataclasses import dataclass

from ladder.count.flops import VOCAB_SIZE, shape_of
from ladder.count.memory import LOSS_CHUNK, split_parameters
from ladder.rungs.list import BY_LABEL, ROOT

WIDTH = 358
GB = 1e9


@dataclass
class Drawing:
    """What the page shows: the drawing, and what it says below, in the docstrings' Markdown."""

    svg: str
    caption: str


def svg(height, label, *parts):
    """A drawing; `label` says what it shows to who cannot see it."""
    return (f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{html.escape(label)}">\n'
            + "\n".join(parts) + "\n</svg>")


def text(x, y, words, css="", anchor="start"):
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}"{css and f" class={css!r}"}{at}>{html.escape(words)}</text>'


def box(x, y, width, height, css):
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" class="{css}"/>'


def path(points, css, close=False):
    corners = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
    return f'<path d="M{corners}{"z" if close else ""}" class="{css}"/>'


def legend(y, *entries):
    """Colors and what they mean, side by side: (class, words)."""
    parts, x = [], 0
    for css, words in entries:
        parts += [box(x, y - 10, 11, 11, css), text(x + 16, y, words, "dim")]
        x += 28 + 6.4 * len(words)
    return "".join(parts)


# ---- rungs 2 and 3: number formats -----------------------------------------------------------------------------------

FORMATS = {"float32": (8, 23), "TF32": (8, 10), "bfloat16": (8, 7), "float16": (5, 10)}  # bits: exponent, mantissa


def bits_of(number, name):
    """The bits of a number in one of the FORMATS, rounded to the nearest (of two to the even one), as a string."""
    if name == "float16":
        return f"{struct.unpack('>H', struct.pack('>e', number))[0]:016b}"
    bits = struct.unpack(">I", struct.pack(">f", number))[0]
    dropped = 23 - FORMATS[name][1]
    kept = round(bits / 2**dropped)  # Python's round takes the even one of two as near; 32 bits fit into its floats
    return f"{kept:0{32 - dropped}b}"


def value_of(bits, name):
    """The number that these bits of a format mean (neither zero, infinity nor NaN)."""
    n_exponent, n_mantissa = FORMATS[name]
    exponent, mantissa = int(bits[1 : 1 + n_exponent], 2), int(bits[1 + n_exponent :], 2)
    scale = 2.0 ** (exponent - (2 ** (n_exponent - 1) - 1))
    return (-1) ** int(bits[0]) * scale * (1 + mantissa / 2**n_mantissa)


def number_formats(*names):
    """One third, bit by bit, in some of the FORMATS."""
    cell, parts = WIDTH / 32, []
    for i, name in enumerate(names):
        bits, n_exponent, y = bits_of(1 / 3, name), FORMATS[name][0], 13 + 46 * i
        top = "65,504" if name == "float16" else "3·10³⁸"
        parts += [text(0, y, name, "strong"), text(68, y, f"up to {top}", "dim"),
                  text(WIDTH, y, f"1/3 is {value_of(bits, name):.7f}", "", "end")]
        for place in range(32 if name == "TF32" else len(bits)):
            css = "one" if place == 0 else "two" if place <= n_exponent else "three"
            digit = bits[place] if place < len(bits) else ""
            parts.append(box(place * cell, y + 6, cell - 1, 17, css if digit else "off"))
            if digit:
                parts.append(text((place + 0.5) * cell - 0.5, y + 18.5, digit, "digit", "middle"))
    y = 46 * len(names) + 10
    parts.append(legend(y, ("one", "sign"), ("two", "exponent: range"), ("three", "mantissa: precision")))
    return svg(y + 5, f"The bits of one third in {', '.join(names)}", *parts)


# ---- rung 6: attention scores ----------------------------------------------------------------------------------------

TOKENS, TILE = 1024, 128


def scores_and_tiles():
    """The (T, T) scores of a head as a matrix in memory, and as tiles of which one exists at a time."""
    n, side, right, y = TOKENS // TILE, 160, WIDTH - 160 - 12, 40
    step, current = side / n, (5, 3)  # the row and the column of the tile that is being computed
    parts = [text(0, 13, "rung 5", "strong"), text(0, 31, "all scores in memory", "dim"),
             text(right, 13, "rung 6", "strong"), text(right, 31, "one tile on the chip", "dim"),
             path([(0, y), (side, y), (side, y + side)], "pale", True),
             path([(0, y), (0, y + side), (side, y + side)], "one", True),
             text(side - 8, y + 40, "masked", "", "end"), text(14, y + side - 30, "softmax", "on"),
             text(14, y + side - 14, "of scores", "on")]
    for row in range(n):
        for column in range(n):
            done = (row, column) <= current
            css = "off" if column > row else "two" if (row, column) == current else "done" if done else "todo"
            parts.append(box(right + column * step, y + row * step, step - 1.5, step - 1.5, css))
        css = "three" if row < current[0] else "two" if row == current[0] else "todo"
        parts.append(box(right + side + 5, y + row * step, 7, step - 1.5, css))
    parts += [text(right + side - 8, y + 40, "skipped", "over", "end"),
              text(0, y + side + 17, "columns: keys; rows: queries", "dim"),
              text(WIDTH, y + side + 17, "sums", "dim", "end")]
    return svg(y + side + 22, "Left: a full square of attention scores, its upper half masked. Right: the same square "
               "in tiles; those above the diagonal are skipped, one of the others is being computed", *parts)


LENGTHS, MS = (256, 4096), (20, 5000)  # the ends of both axes
SHOWN = {"rung 0": "before", "rung 5, compiled": "before", "rung 6, flash attention": "now"}


def measured_ms():
    """{rung: [(T, ms), ...]}, medians of the rounds that docs/growth.csv has."""
    times = {rung: {} for rung in SHOWN}
    with (ROOT / "docs" / "growth.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["curve"] == "length" and row["rung"] in SHOWN:
                times[row["rung"]].setdefault(int(row["value"]), []).append(float(row["ms"]))
    return {rung: [(T, statistics.median(rounds)) for T, rounds in sorted(by_length.items())]
            for rung, by_length in times.items()}


def time_over_length():
    """Milliseconds of a step against T, both on logarithmic axes, where a power of T is a straight line."""
    left, top, width, height = 50, 26, 190, 200

    def place(point):
        shares = [math.log(value / low) / math.log(high / low)
                  for value, (low, high) in zip(point, (LENGTHS, MS), strict=True)]
        return left + width * shares[0], top + height * (1 - shares[1])

    parts = [text(0, 13, "ms per step", "dim"), text(left + width, top + height + 34, "T", "dim", "end")]
    for ms in (100, 1000):
        parts += [path([place((LENGTHS[0], ms)), place((LENGTHS[1], ms))], "grid"),
                  text(left - 6, place((LENGTHS[0], ms))[1] + 4, f"{ms:,}", "dim", "end")]
    for T in (256, 1024, 4096):
        x, y = place((T, MS[0]))
        parts += [path([place((T, MS[0])), place((T, MS[1]))], "grid"), text(x, y + 17, f"{T:,}", "dim", "middle")]
    for rung, points in measured_ms().items():
        parts.append(path(map(place, points), f"curve {SHOWN[rung]} line"))
        x, y = place(points[-1])
        parts.append(text(x + 6, y + 4, rung.partition(",")[0], f"label {SHOWN[rung]}"))
    x, y = place((512, 700))
    for power, name in ((2, "T²"), (1, "T")):  # what grows so has this slope
        end = place((1024, 700 * 2**power))
        parts += [path([(x, y), end], "guide"), text(end[0] + 4, end[1] + 4, name, "dim")]
    return svg(top + height + 40, "Milliseconds of a step against the sequence length T, for rungs 0, 5 and 6", *parts)


# ---- rungs 16 and 17: the memory of a step ---------------------------------------------------------------------------

B, T = 16, 1024
FORWARD, LOSS, BACKWARD = 8, 64, 12  # widths in the drawing: of a block's forward pass, the loss, a block's backward


def kept_bytes(label):
    """Bytes of rung 15, 16 or 17, GPT-2 (124M): (kept by a block, existing in addition while it is recomputed,
    the logits and their gradients at once, in how many chunks)."""
    rung, (_, _, n_embd) = BY_LABEL[label], shape_of("gpt2")
    per_vector, per_logit, _ = rung.memory
    block, only_input = B * T * per_vector * n_embd, B * T * 4 * n_embd  # a float32 residual stream
    tokens = LOSS_CHUNK if rung.chunked else B * T
    logits = per_logit * VOCAB_SIZE * tokens
    recomputes = label != "15"
    return (only_input, block, logits, B * T // tokens) if recomputes else (block, 0, logits, B * T // tokens)


def memory_curve(label):
    """(x, bytes) of what exists over a step, beside weights, gradients and moments."""
    kept, recomputed, logits, chunks = kept_bytes(label)
    n_layer = shape_of("gpt2")[0]
    x = n_layer * FORWARD
    points = [(0, 0), (x, n_layer * kept)]
    for _ in range(chunks):
        width = LOSS / chunks
        points += [(x + width / 2, n_layer * kept + logits), (x + width, n_layer * kept)]
        x += width
    for block in range(n_layer, 0, -1):
        if recomputed:
            points.append((x + BACKWARD / 3, block * kept + recomputed))
        x += BACKWARD
        points.append((x, (block - 1) * kept))
    return points


def memory_over_a_step(before, label):
    """Two rungs' curves, one above the other."""
    n_layer = shape_of("gpt2")[0]
    left, top, height, most = 46, 26, 190, 15 * GB
    bottom, ends = top + height, [n_layer * FORWARD, n_layer * FORWARD + LOSS, n_layer * (FORWARD + BACKWARD) + LOSS]

    def place(point):
        return left + point[0], bottom - height * point[1] / most

    parts = []
    for gb in (0, 5, 10, 15):
        y = place((0, gb * GB))[1]
        parts += [path([(left, y), (left + ends[-1], y)], "grid"),
                  text(left - 6, y + 4, f"{gb} GB" if gb else "0", "dim", "end")]
    parts += [path([(left + x, top), (left + x, bottom)], "grid") for x in ends[:2]]
    for rung, css in ((before, "before"), (label, "now")):
        points = memory_curve(rung)
        parts.append(path(map(place, points), f"curve {css}"))
        peak = max(size for _, size in points)
        x, y = place((ends[1], peak))
        parts.append(text(x + 6, y + 4, f"rung {rung}: {peak / GB:.1f} GB", f"label {css}"))
    starts = [0, *ends]
    for name, first, last in zip(("forward", "loss", "backward"), starts[:-1], starts[1:], strict=True):
        parts.append(text(left + (first + last) / 2, bottom + 18, name, "", "middle"))
    parts.append(text(0, 13, "activations and logits in memory", "dim"))
    return svg(bottom + 24, f"Memory over a step: rung {before} and rung {label}", *parts)


# ---- rung 20: a rotated pair -----------------------------------------------------------------------------------------

PAIR, HEAD_SIZE = 4, 64
RADIANS_A_TOKEN = 10_000 ** (-2 * PAIR / HEAD_SIZE)
QUERY, KEY = (1.0, math.radians(10)), (0.8, math.radians(120))  # length and direction before the rotation


def angle_between(query_at, key_at):
    """Degrees from the rotated query to the rotated key."""
    return math.degrees(KEY[1] + key_at * RADIANS_A_TOKEN - QUERY[1] - query_at * RADIANS_A_TOKEN)


def rotated_pairs():
    """A pair of a query and of a key, rotated at two places that are equally far apart."""
    radius, parts = 66, []
    for center, (key_at, query_at) in ((80, (2, 5)), (WIDTH - 80, (10, 13))):
        middle = 104

        def tip(length, angle, center=center, middle=middle):
            return center + radius * length * math.cos(angle), middle - radius * length * math.sin(angle)

        parts += [text(center, 14, f"positions {key_at} and {query_at}", "strong", "middle"),
                  f'<circle cx="{center}" cy="{middle}" r="{radius}" class="ring"/>']
        directions = []
        for name, (length, angle), at, css in (("q", QUERY, query_at, "before"), ("k", KEY, key_at, "now")):
            turned = angle + at * RADIANS_A_TOKEN
            directions.append(turned)
            x, y = tip(length + 0.17, turned)
            parts += [path([(center, middle), tip(length, angle)], f"unturned {css}"),
                      path([(center, middle), tip(length, turned)], f"arrow {css}"),
                      text(x, y + 4, name, f"label {css}", "middle")]
        arc = [tip(0.3, directions[0] + (directions[1] - directions[0]) * i / 12) for i in range(13)]
        x, y = tip(0.52, sum(directions) / 2)
        parts += [path(arc, "arc"), text(x, y + 4, f"{angle_between(query_at, key_at):.0f}°", "over", "middle")]
    return svg(190, "A query and a key at positions 2 and 5 and at 10 and 13: the same angle between them", *parts)


# ---- ddp, 33, fsdp: who holds what -----------------------------------------------------------------------------------

CARDS = 4


def shares():
    """{scheme: for each card [(first, last) of its parameters, gradients and moments]}, in bytes of GPT-2 (124M).

    In float32: 4 bytes of moments per parameter of the blocks (Muon), 8 of the embedding (AdamW). In rung 33 the
    embedding, more than a fourth of all parameters, has an owner that gets nothing else.
    """
    embedding, block, n_layer = split_parameters("gpt2")
    blocks = block * n_layer
    weights, moments = 4 * (embedding + blocks), 8 * embedding + 4 * blocks
    rest = (moments - 8 * embedding) / (CARDS - 1)
    owners = [0, *(8 * embedding + rest * i for i in range(CARDS))]
    quarter = [i / CARDS for i in range(CARDS + 1)]
    return {
        "DDP": [[(0, weights), (0, weights), (0, moments)]] * CARDS,
        "33": [[(0, weights), (0, weights), (owners[i], owners[i + 1])] for i in range(CARDS)],
        "fsdp": [[(whole * quarter[i], whole * quarter[i + 1]) for whole in (weights, weights, moments)]
                 for i in range(CARDS)],
    }


TITLES = {"DDP": ("DDP", "all of it on every card"),
          "33": ("rung 33, sharded optimizer", "a share of the moments"),
          "fsdp": ("FSDP", "a fourth of everything")}


def who_holds_what():
    """Bars of the cards: what each of four keeps of parameters, gradients and moments between two steps."""
    schemes, parts = shares(), []
    wholes = [last for _, last in schemes["DDP"][0]]
    scale, gap, y = (WIDTH - 66) / sum(wholes), 3, 0
    for scheme, cards in schemes.items():
        title, remark = TITLES[scheme]
        parts += [text(0, y + 13, title, "strong"), text(WIDTH, y + 13, remark, "dim", "end")]
        y += 21
        for held in cards:
            x = 0
            for (first, last), whole, css in zip(held, wholes, ("one", "two", "three"), strict=True):
                parts.append(box(x, y + 0.5, whole * scale, 12, "off"))
                parts.append(box(x + first * scale, y, (last - first) * scale, 13, css))
                x += whole * scale + gap
            kept = sum(last - first for first, last in held) / GB
            parts.append(text(WIDTH, y + 11, f"{kept:.2f} GB", "", "end"))
            y += 17
        y += 12
    parts.append(legend(y + 4, ("one", "parameters"), ("two", "gradients"), ("three", "moments")))
    return svg(y + 10, "What each of four cards keeps under DDP, in rung 33 and under FSDP", *parts)


# ---- rung 34: learning rates and width -------------------------------------------------------------------------------

RATES, LOSSES = (0.001, 0.016), (2.01, 2.35)  # the ends of both axes


def searched_rates(rung):
    """{width: [(Muon's rate, loss), ...]}: the runs of experiments/widths.csv that have the width's best AdamW rate."""
    with (ROOT / "experiments" / "widths.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["part"], row["rung"]) == ("search", rung)]
    found = {}
    for width in sorted({int(row["width"]) for row in rows}):
        runs = [row for row in rows if int(row["width"]) == width]
        best = min(runs, key=lambda row: float(row["val_loss"]))
        found[width] = sorted((float(row["muon_lr"]), float(row["val_loss"])) for row in runs
                              if row["max_lr"] == best["max_lr"])
    return found


def loss_over_rate():
    """The loss against Muon's rate, a line for each width: on the left the lowest point moves with the width."""
    top, width, height, parts = 26, 116, 200, []

    def place(point, left):
        x = math.log(point[0] / RATES[0]) / math.log(RATES[1] / RATES[0])
        y = (point[1] - LOSSES[0]) / (LOSSES[1] - LOSSES[0])
        return left + width * x, top + height * (1 - y)

    for name, left in (("rung 24", 58), ("rung 34", 234)):
        parts.append(text(left, 13, name, "strong"))
        for loss in (2.1, 2.2, 2.3):
            y = place((RATES[0], loss), left)[1]
            parts.append(path([(left, y), (left + width, y)], "grid"))
            if left < 100:
                parts.append(text(0, y + 4, f"{loss:g}", "dim"))
        for rate in (0.002, 0.008):
            x = place((rate, LOSSES[0]), left)[0]
            parts += [path([(x, top), (x, top + height)], "grid"),
                      text(x, top + height + 17, f"{rate:g}", "dim", "middle")]
        lowest = 0
        for n_embd, points in searched_rates(name).items():
            css = "now" if name == "rung 34" else "before"
            parts.append(path([place(point, left) for point in points], f"curve {css} line"))
            x, y = place(min(points, key=lambda point: point[1]), left)
            parts.append(box(x - 4, y - 4, 8, 8, "two"))
            x, y = place(points[0], left)
            lowest = max(y + 4, lowest + 14)  # of the labels, which must not touch
            parts.append(text(x - 4, lowest, f"{n_embd}", f"label {css}", "end"))
    parts.append(text(WIDTH, top + height + 34, "Muon’s learning rate", "dim", "end"))
    return svg(top + height + 40, "Validation loss against Muon's learning rate at four widths, in rungs 24 and 34",
               *parts)


# ---- what the page shows ---------------------------------------------------------------------------------------------

def drawings():
    """{label of a rung or id of a section: its Drawings}."""
    tiles = TOKENS // TILE
    n_tiles = tiles * (tiles + 1) // 2
    return {
        "2": [Drawing(number_formats("float32", "TF32"),
                      "One third. In memory it stays float32; a product reads the first 19 bits, rounded.")],
        "3": [Drawing(number_formats("float32", "bfloat16", "float16"),
                      "One third again. bfloat16 has float32's range and fewer digits; float16 has more digits, and "
                      "nothing above 65,504.")],
        "6": [Drawing(scores_and_tiles(),
                      f"T=1024, a head of one sequence. Rung 5 stores {TOKENS * TOKENS:,} scores and keeps "
                      f"their softmax for the backward pass. In tiles of {TILE} × {TILE}, rung 6 computes {n_tiles} "
                      f"of {tiles * tiles}; of each row it keeps the output and one number, the logarithm of the sum. "
                      "Orange: the tile at work; green: rows that are done."),
              Drawing(time_over_length(),
                      "Measured: 4 blocks of width 256, byte tokens, B=1, on two cores of an Intel Xeon with AMX; "
                      "medians of five rounds. Flash attention makes no significant difference at T=256 and 512; at "
                      "4,096 it is 2.2 times as fast as rung 5.")],
        "16": [Drawing(memory_over_a_step("15", "16"),
                       "GPT-2 (124M), B=16 T=1024, all 12 blocks recomputed: counted as in `ladder/count/memory.py`, "
                       "not measured, and not to scale in time. Weights, gradients and moments are not shown. Each "
                       "tooth is a block that computes its activations again.")],
        "17": [Drawing(memory_over_a_step("16", "17"),
                       "As in rung 16's picture, with its blocks recomputed: the logits of 4,096 tokens at a time, "
                       "four times, in place of all 16,384.")],
        "20": [Drawing(rotated_pairs(),
                       f"Pair i={PAIR} of a head of {HEAD_SIZE} numbers turns by {RADIANS_A_TOKEN:.3f} radians "
                       f"({math.degrees(RADIANS_A_TOKEN):.0f}°) a token; dashed: unrotated. The query, q, comes three "
                       "tokens after the key, k, in both places, so the angle between them, and their dot product, is "
                       "the same.")],
        "34": [Drawing(loss_over_rate(),
                       "Measured: a line for each width, 64 to 512, at its best AdamW rate; two layers, 200 steps on "
                       "bytes, one seed. The lowest point, a square, moves from a Muon rate of 0.008 to 0.002 in rung "
                       "24, and stays at 0.004 in rung 34.")],
        "cards": [Drawing(who_holds_what(),
                          "Four cards, rung 24's GPT-2 (124M), between two steps: counted, in float32. In rung 33 each "
                          "tensor has one owner, and the first card's is the embedding. Under FSDP a block is gathered "
                          "while it computes.")],
    }
