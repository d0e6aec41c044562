"""How much arithmetic a step takes, to compare a speed with what the chip can do.

FLOPs per token of training = 6 N + 12 n_layer n_embd T, with N the parameters that take part in matrix products:
all but `wpe`, biases and LayerNorms; the vocabulary's matrix counts once, as the output projection. (2 FLOPs per
multiply-add, forward once and backward twice; the second term is attention's. Chowdhery et al. 2022, PaLM, appendix B.)
Not counted, because it is not useful work: padding rows of the vocabulary, recomputed blocks, Muon's products.
SwiGLU's three matrices have the parameters of the two they replace, up to rounding. `grouped_query_attention`, whose
flags change the matrices, has no MFU.

That is PaLM's convention, which published MFUs follow: it counts the whole (T, T) score matrix. A causal kernel
computes half of it, and "causal" counts half of the second term: for gpt2 at T=1024, 7 % less.

MFU = FLOPs per token * tokens/sec / the highest matrix-product rate measured on that device, over float32, TF32 and
16 bits: the same for all rungs, so the column rises towards 100 %.
"""
import re

from ladder.rungs.list import rung_of

VOCAB_SIZE = 50257  # of GPT-2's tokens
SHAPES = {  # of --model: (n_layer, n_head, n_embd), as the scripts have them
    "tiny": (2, 2, 64), "mini": (6, 3, 192), "small": (6, 6, 384), "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600),
}


def shape_of(model):
    """(n_layer, n_head, n_embd) of a --model, which may be a shape like 4x4x128; None for an unknown one."""
    numbers = re.fullmatch(r"(\d+)x(\d+)x(\d+)", model or "")
    return tuple(map(int, numbers.groups())) if numbers else SHAPES.get(model)


def flops_per_token(model, T, causal=False, vocab_size=VOCAB_SIZE):
    """FLOPs of training on one token at sequence length T; None for an unknown model or vocabulary.

    `causal` counts half of attention; otherwise all of it, as PaLM does.
    """
    if not shape_of(model) or T is None or vocab_size is None:
        return None
    n_layer, _, n_embd = shape_of(model)
    n_matrix = vocab_size * n_embd + n_layer * 12 * n_embd * n_embd
    return 6 * n_matrix + (6 if causal else 12) * n_layer * n_embd * T


def mfu(run, rates, tokens_per_second, causal=False):
    """A speed as a share (0 to 1) of the device's best measured matrix-product rate (FLOP/s), or None."""
    per_token = flops_per_token(run.model, run.T, causal, run.vocab_size)
    if not rates or per_token is None or tokens_per_second is None or not rung_of(run.name).has_mfu:
        return None
    devices = 1 if run.on_cpu else run.ranks  # on a CPU all ranks share the measured rate
    return per_token * tokens_per_second / (devices * max(rates.values()))
