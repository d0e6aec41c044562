"""A small model of the memory that a training step takes, to choose a batch that fits.

    bytes = 16 N  +  B T (a n_layer n_embd + v vocabulary)  +  s B n_layer n_head T T  +  the process itself

16 bytes per parameter: its float32 value, its gradient and AdamW's two moments. The rest is what the forward pass keeps
for the backward pass and what the loss adds: `a` bytes for the vectors of n_embd numbers that a block keeps per token,
`v` for the logits, their log-softmax and gradients, `s` for the (T, T) attention scores of every head.

    rungs                       a                             v    s
    0-2, float32                64: 16 vectors                12   4: the softmax
    3-4, 16-bit autocast        36: 2 in float32, 14 in 16    12   6: the softmax in float32 (CUDA), its 16-bit copy
    5, compiled                 36                            4    4: scores and softmax, in 16 bits
    6 on, flash attention       36                            4    0: the scores are never stored
    chunked_cross_entropy       36                            4    0; the logits of LOSS_CHUNK tokens at most

Compiled, the logits and their gradients exist in 16 bits only; where torch cannot compile, v is 10 where it is 4 here.

`list.py` has a, v and s of each rung. Tests compare the model with what autograd keeps and with the peaks in
logs/reference/. `python -m ladder.count.memory DEVICE` prints the device's free bytes.
"""
import bisect
import sys

import psutil

from ladder.count.flops import VOCAB_SIZE, shape_of
from ladder.rungs.list import BY_LABEL

PROCESS_BYTES = 0.5e9  # Python, torch and its libraries; on a GPU the driver takes about as much
BLOCK_SIZE = 1024
LOSS_CHUNK = 4096  # tokens whose logits exist at once in `chunked_cross_entropy`: the default of --loss-chunk


def step_bytes(model, B, T, label, vocab_size=VOCAB_SIZE):
    """Bytes that training on the rung `label` takes at its peak."""
    rung, (n_layer, n_head, n_embd) = BY_LABEL[label], shape_of(model)
    n_matrices = 1 if rung.tied else 2  # of the vocabulary
    n_vocabulary, n_positions = n_matrices * vocab_size, max(BLOCK_SIZE, T)
    parameters = (n_vocabulary + n_positions) * n_embd + n_layer * (12 * n_embd * n_embd + 13 * n_embd)
    a, v, s = rung.memory
    tokens_with_logits = min(B * T, LOSS_CHUNK) if rung.chunked else B * T
    kept = B * T * a * n_layer * n_embd + v * vocab_size * tokens_with_logits + s * B * n_layer * n_head * T * T
    return PROCESS_BYTES + 16 * parameters + kept


def largest_fitting(model, T, labels, available_bytes):
    """The largest B at which the rung that needs the most memory fits into the memory; 0 if none does."""
    return bisect.bisect_right(range(1, 1_000_000), available_bytes,
                               key=lambda B: max(step_bytes(model, B, T, label) for label in labels))


def free_memory(device):
    """Free bytes of a device; for a CPU, of the machine."""
    import torch  # a second or more, for this alone

    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    if device == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return psutil.virtual_memory().available


if __name__ == "__main__":
    print(free_memory(sys.argv[1]))
