"""AdamW with its two moments in 8 bits, by maintained libraries: where it runs, what it saves, what it costs.

    pip install torchao==0.18.0 bitsandbytes==0.50.2
    python -m experiments.eight_bit_adamw [flags of rung 10]

Trains rung 10 three times with the same flags: with its own fused AdamW, with torchao's AdamW8bit and with
bitsandbytes', and prints the size of the optimizer's state; the log that each leaves in logs/eight_bit_adamw/ has the
median step and the last loss.

Sources: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; torchao.optim; bitsandbytes.optim.
"""
import logging
import sys
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import speedup_10_fused_adamw as rung_10

ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}


def own_adamw(groups):
    return torch.optim.AdamW(groups, **ADAMW, fused=True)


def torchao_adamw(groups):
    from torchao.optim import AdamW8bit

    class WithPlainRate(AdamW8bit):
        """torchao keeps the rate in a tensor, so that its compiled step serves all rates; rung 10 sets a number."""

        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = torch.as_tensor(group["lr"])
            return super().step(closure)

    return WithPlainRate(groups, **ADAMW)


def bitsandbytes_adamw(groups):
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, **ADAMW)


def bytes_of(tensor):
    """Bytes that a tensor holds; torchao's 8-bit one is made of several."""
    if is_traceable_wrapper_subclass(tensor):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def train(make_optimizer, args):
    """Run rung 10 with another optimizer. Returns the bytes of its state."""
    configure, made = rung_10.GPT.configure_optimizers, []

    def configure_optimizers(self, lr, weight_decay):
        groups = configure(self, lr, weight_decay).param_groups
        made.append(make_optimizer([{name: group[name] for name in ("params", "weight_decay")} for group in groups]))
        return made[0]

    torch.compiler.reset()  # each run compiles its own step
    with mock.patch.object(rung_10.GPT, "configure_optimizers", configure_optimizers):
        rung_10.train(args)
    return sum(bytes_of(value) for state in made[0].state.values() for value in state.values()
               if torch.is_tensor(value))


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # torchao tells which GPU kernels it lacks, and of deprecations in torch
    for make_optimizer in (own_adamw, torchao_adamw, bitsandbytes_adamw):
        args = rung_10.parse_args(sys.argv[1:])
        args.log_dir = Path("logs/eight_bit_adamw") / make_optimizer.__name__
        print(f"{make_optimizer.__name__}: {train(make_optimizer, args) / 1e6:,.1f} MB of state")
