"""How should rung 7 keep the padding of the vocabulary out of the loss? Output layer and loss, forward and backward.

    env $(python -m ladder.measure.allocator) python -m experiments.padded_loss [--rounds 7]

On a CPU, compiled, with the widths of GPT-2 (124M), in turns. What a GPU would run: tests/test_lowered.py.
"""
import argparse
import statistics
import time

import torch
from torch.nn import functional as F

from ladder.measure.rates import cpu_name, rung_10

VOCAB_SIZE, N_ROWS, N_EMBD, N_TOKENS = 50257, 50304, 768, 1024


def cut_off(logits):
    return logits[..., :VOCAB_SIZE]


def masked_fill(logits):
    return logits.masked_fill(torch.arange(N_ROWS) >= VOCAB_SIZE, -torch.inf)


def overwritten(logits):
    logits[..., VOCAB_SIZE:] = -torch.inf
    return logits


def added(logits):  # rung 7's
    padding = torch.zeros(N_ROWS)
    padding[VOCAB_SIZE:] = -torch.inf
    return logits + padding


def main(rounds):
    dtype = rung_10.autocast_dtype("cpu")
    torch.manual_seed(0)
    x = torch.randn(N_TOKENS, N_EMBD, requires_grad=True)
    weight = torch.nn.Parameter(0.02 * torch.randn(N_ROWS, N_EMBD))
    targets = torch.randint(VOCAB_SIZE, (N_TOKENS,))
    ms, forms = {}, {}
    for form in (cut_off, masked_fill, overwritten, added):
        forms[form.__name__] = torch.compile(
            lambda x, form=form: F.cross_entropy(form(F.linear(x, weight).float()), targets))
        ms[form.__name__] = []
    for number in range(rounds + 2):  # the first two compile and warm up
        for name, loss_of in forms.items():
            x.grad = weight.grad = None
            started = time.perf_counter()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = loss_of(x)
            loss.backward()
            ms[name].append(1000 * (time.perf_counter() - started))
            if number == 0:
                print(f"{name}: loss {loss.item():.6f}, sum of the gradients' sizes {weight.grad.abs().sum():.4f},"
                      f" of the padding's {weight.grad[VOCAB_SIZE:].abs().sum()}", flush=True)
    print(f"{cpu_name()}, {rung_10.PRECISION[dtype]}, {N_TOKENS} tokens, {rounds} rounds: median, lowest, highest ms")
    for name, each in ms.items():
        print(f"{name}: {statistics.median(each[2:]):.0f} {min(each[2:]):.0f} {max(each[2:]):.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    main(parser.parse_args().rounds)
