"""The profile of a folder: where the time of each rung's step goes, as measured by `python -m ladder profile`."""
from pathlib import Path

from ladder.files import read_json
from ladder.rungs.list import today

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


def is_reliable(row):
    """Whether a rung's step under the profiler takes about as long as without it."""
    return abs(row["step_ms"] / row["plain_ms"] - 1) <= MOST_OFF


def read_profile(folder):
    """The profile that `python -m ladder profile` put into a folder, or None."""
    profile = read_json(Path(folder) / "profile.json", needs=("name", "model", "B", "T", "rungs"))
    for row in profile.get("rungs", ()):
        row["name"] = today(row["name"])
        if "floor_ms" in row:  # what records call it
            row["products_ms"] = row.pop("floor_ms")
    return profile or None
