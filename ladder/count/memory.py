"""A small model of the memory that a training step takes, to recommend a batch that fits.

    bytes = 16 N  +  B T (a n_layer n_embd + v vocabulary)  +  s B n_layer n_head T T  +  the process itself

16 bytes per parameter: its float32 value, its gradient and AdamW's two moments. The rest is what the forward pass keeps
for the backward pass and what the loss adds: `a` bytes for the vectors of n_embd numbers that a block keeps per token,
`v` for the logits, their log-softmax and gradients, `s` for the (T, T) attention scores of every head.

    rungs                       a                             v    s
    0-2, float32                64: 16 vectors                12   4: the softmax
    3-4, 16-bit autocast        36: 2 in float32, 14 in 16    12   6: the softmax in float32 (CUDA), its 16-bit copy
    5, compiled                 36                            4    4: scores and softmax, in 16 bits
    6 on, flash attention       36                            4    0: the scores are never stored
    17, long_run on, chunks     36                            4    0; the logits of LOSS_CHUNK tokens at most

Compiled, the logits and their gradients exist in 16 bits only; where torch cannot compile, v is 10 where it is 4 here.

`list.py` has a, v and s of each rung. Tests compare the model with what autograd keeps and with the peaks in
logs/reference/. `card_bytes` models the same for several cards that share a run of long_run.py (DDP) or fsdp_run.py;
`sent_bytes` is what they send each other. `python -m ladder.count.memory DEVICE` prints the device's free bytes.
"""
import bisect
import math
import sys

import psutil

from ladder.count.flops import SHAPES, VOCAB_SIZE, shape_of
from ladder.rungs.list import BY_LABEL, LADDER

PROCESS_BYTES = 0.5e9  # Python, torch and its libraries; on a GPU the driver takes about as much
BLOCK_SIZE = 1024
LOSS_CHUNK = 4096  # tokens whose logits exist at once in rung 17: the default of --loss-chunk
RUN_BY_DEFAULT = [rung.label for rung in LADDER]  # the labels of `python -m ladder run`


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


def split_parameters(model, n_layer=None):
    """(parameters of the embedding, of one block, number of blocks) of long_run.py and fsdp_run.py, without norms."""
    layers, _, n_embd = shape_of(model)
    n_rows, n_hidden = math.ceil(VOCAB_SIZE / 128) * 128, math.ceil(8 * n_embd / 3 / 64) * 64
    return n_rows * n_embd, 4 * n_embd * n_embd + 3 * n_embd * n_hidden, n_layer or layers


def state_bytes(model, ranks=1, n_layer=None):
    """Bytes of parameters, gradients and moments that a card holds between two steps, shared by `ranks` cards.

    In float32: 16 per parameter of the embedding (AdamW), 12 per parameter of the blocks (Muon).
    """
    embedding, block, n_layer = split_parameters(model, n_layer)
    return (16 * embedding + 12 * block * n_layer) / ranks


def card_bytes(model, B, T, ranks, sharded, n_layer=None):
    """Bytes that a card takes at its peak, one of `ranks`: under FSDP (`sharded`, fsdp_run.py) or DDP (long_run.py).

    All blocks recompute: only the input of each is kept (under FSDP in 16 bits), and all vectors of one. While in use,
    a sharded block takes 10 bytes per parameter: itself and the next one in 16 bits, its gradient, and that in float32
    on its way to the other ranks; so does the root, with the embedding, whose gradient exists twice.
    Under DDP the embedding takes 10 (its gradient twice more, a copy in 16 bits), the blocks a copy in 16 bits.
    """
    embedding, block, n_layer = split_parameters(model, n_layer)
    state = state_bytes(model, ranks if sharded else 1, n_layer)
    unsharded = 10 * embedding + (10 * block if sharded else 2 * block * n_layer)
    a, v, _ = BY_LABEL["fsdp"].memory
    _, _, n_embd = shape_of(model)
    vectors = (2 if sharded else 4) * n_layer + a
    kept = B * T * vectors * n_embd + v * VOCAB_SIZE * min(B * T, LOSS_CHUNK)
    return PROCESS_BYTES + state + unsharded + kept


def sent_bytes(model, ranks, sharded, micro_steps=1):
    """Bytes that each of `ranks` cards sends in a step whose parameters are gathered in 16 bits.

    In a ring, as in NCCL, each rank passes on (ranks - 1) / ranks of a buffer to gather or to reduce it; DDP does both
    with the float32 gradients, once per step. In each micro-step FSDP gathers the blocks twice and the root once, and
    reduces all gradients in float32; Muon gathers the blocks' gradients once per step.
    """
    embedding, block, n_layer = split_parameters(model)
    blocks = block * n_layer
    if sharded:
        whole = micro_steps * (2 * (embedding + 2 * blocks) + 4 * (embedding + blocks)) + 4 * blocks
    else:
        whole = 2 * 4 * (embedding + blocks)
    return whole * (ranks - 1) / ranks


def largest_model(memory_bytes, ranks, sharded):
    """(the largest --model that fits a card at B=1 T=1024, or None; how many blocks of gpt2-xl's width fit)."""
    fitting = [name for name in SHAPES if card_bytes(name, 1, 1024, ranks, sharded) <= memory_bytes]
    first = card_bytes("gpt2-xl", 1, 1024, ranks, sharded, n_layer=1)
    second = card_bytes("gpt2-xl", 1, 1024, ranks, sharded, n_layer=2)
    return fitting[-1] if fitting else None, max(0, int((memory_bytes - first) // (second - first)) + 1)


def recommend(available_bytes, accelerator, shapes=(("gpt2", 1024), ("gpt2", 256), ("tiny", 256))):
    """(model, B, T) for rungs 0 to 10 in 80 % of the memory: the first shape that fits, B a power of two up to 64.

    On a CPU B is 1: a larger batch only makes a longer step there.
    """
    for model, T in shapes:
        B = largest_fitting(model, T, RUN_BY_DEFAULT, 0.8 * available_bytes)
        if B:
            return model, min(2 ** (B.bit_length() - 1), 64 if accelerator else 1), T
    return model, 1, T


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
