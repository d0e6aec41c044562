"""The profile of a folder: where the time of each rung's step goes, as measured by `python -m ladder profile`.

A record calls what the step's matrix products take at the measured rate "floor_ms".
"""
from pathlib import Path

import pandas

from ladder.rungs.list import BY_NAME
from ladder.show.machine import read_json
from ladder.show.terminal import print_texts

KINDS = {  # kind of work: what belongs to it
    "matrix products": "the linear layers of the blocks",
    "head": "lm_head's product",
    "attention": "scores, mask, softmax, weighted sum, copies between heads",
    "normalization and pointwise": "LayerNorm, GELU, residuals, embeddings, biases, conversions",
    "cross-entropy": "everything on the logits but the head's product",
    "optimizer": "AdamW, clipping, zeroing the gradients",
    "data": "the batch, and its copy to the device",
    "waiting": "no operator at work: Python, autograd, freeing memory; on a GPU, no kernel running",
}

MOST_OFF = 0.1  # how far a step under the profiler may be from the plain step for its parts to be reliable
UNRELIABLE = "unreliable, as the step under the profiler and the plain step are more than 10 % apart"


def is_reliable(rung):
    """Whether a rung's step under the profiler takes about as long as without it."""
    return abs(rung["step_ms"] / rung["plain_ms"] - 1) <= MOST_OFF


def read_profile(folder):
    """The profile that `python -m ladder profile` put into a folder, or None."""
    return read_json(Path(folder) / "profile.json", dict, "delete it, and run python -m ladder profile again") or None


def print_profile(profile, console):
    """The profile as a table: ms per step, by kind of work."""
    wide = console.width >= 130
    words = KINDS if wide else ("matmul", "head", "attn", "pointw", "CE", "optim", "data", "wait")
    rows = []
    for found in profile["rungs"]:
        rung, mark = BY_NAME[found["name"]], "" if is_reliable(found) else " (!)"
        times = dict(zip(words, found["parts_ms"].values(), strict=True)) | {"step": found["step_ms"]}
        times |= ({"plain": found["plain_ms"]} if wide else {}) | {"products": found["floor_ms"]}
        rows.append({"rung": (rung.title if wide else rung.label) + mark}
                    | {word: f"{ms:,.0f}" if ms >= 10 else f"{ms:,.1f}" for word, ms in times.items()})
    caption = "step: under the profiler; products: all of its matrix products at the rate measured"
    caption += "" if all(map(is_reliable, profile["rungs"])) else f"\n(!) {UNRELIABLE}"
    print_texts(pandas.DataFrame(rows), console, f"ms per step, {profile['name']}, {profile['model']}, "
                f"B={profile['B']} T={profile['T']}", caption, padding=(0, 1, 0, 0), pad_edge=False)
