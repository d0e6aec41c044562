"""How much memory a training step takes, by a small model of it, to recommend a batch that fits.

    bytes = 16 N  +  B T (34 n_layer n_embd  +  10 vocabulary)  +  what the process itself takes

16 bytes a parameter are its float32 value, gradient and AdamW's two moments. Per token and layer the backward pass of
rung 6 and later keeps about 17 vectors of n_embd numbers in 16 bits; per token the logits take 2 bytes in 16 bits and
8 more for their float32 softmax and its gradient. Checked by a test against the measured peaks in logs/reference/, to
within 30 %.
"""
from ladder.flops import SHAPES, VOCAB_SIZE

PROCESS_BYTES = 0.5e9  # Python, torch and its libraries; on a GPU the driver's own share is of this size too
BLOCK_SIZE = 1024


def step_bytes(model, B, T):
    """Bytes that training takes at its peak, for rung 6 and later."""
    n_layer, n_embd = SHAPES[model]
    parameters = (VOCAB_SIZE + BLOCK_SIZE) * n_embd + n_layer * (12 * n_embd * n_embd + 13 * n_embd)
    per_token = 34 * n_layer * n_embd + 10 * VOCAB_SIZE
    return PROCESS_BYTES + 16 * parameters + B * T * per_token


def recommend(available_bytes, accelerator):
    """(model, B, T) that fit into 80 % of the memory: gpt2 at the longest T and the largest B up to 64, else tiny."""
    T = 1024 if accelerator else 256
    largest = 64 if accelerator else 2  # on a CPU a larger batch only makes a longer step
    for B in (b for b in (64, 32, 16, 8, 4, 2, 1) if b <= largest):
        if step_bytes("gpt2", B, T) < 0.8 * available_bytes:
            return "gpt2", B, T
    return "tiny", 2, 256
