"""AdamW with its two moments in 8 bits, by maintained libraries: where it runs, what it saves, what it costs.

    python -m experiments.eight_bit_adamw [flags of rung 10]

Trains rung 10 three times with the same flags: with its own fused AdamW, with torchao's AdamW8bit and with
bitsandbytes' (`pip install torchao==0.18.0 bitsandbytes==0.50.2`), and prints the size of the optimizer's state, the
median step and the last loss of each. A library that cannot run here gets a line that says why.

Sources: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; torchao.optim; bitsandbytes.optim.
"""
import contextlib
import io
import logging
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
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


OPTIMIZERS = {"torch, fused, 32 bits": own_adamw, "torchao AdamW8bit": torchao_adamw,
              "bitsandbytes AdamW8bit": bitsandbytes_adamw}


def bytes_of(tensor):
    """Bytes that a tensor holds; torchao's 8-bit one is made of several."""
    if is_traceable_wrapper_subclass(tensor):
        return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def train(make_optimizer, flags):
    """Run rung 10 with another optimizer. Returns (bytes of the optimizer's state, median ms/step, last loss)."""
    configure, made = rung_10.GPT.configure_optimizers, []

    def configure_optimizers(self, weight_decay):
        groups = configure(self, weight_decay).param_groups
        made.append(make_optimizer([{name: group[name] for name in ("params", "weight_decay")} for group in groups]))
        return made[0]

    torch.compiler.reset()  # each run compiles its own step
    settings = rung_10.parse_settings(flags)
    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()),
          mock.patch.object(rung_10.GPT, "configure_optimizers", configure_optimizers)):
        settings.log_dir = Path(folder)
        rung_10.train(settings)
        log = (settings.log_dir / "speedup_10_fused_adamw.log").read_text(encoding="utf-8")
    state = [value for state in made[0].state.values() for value in state.values() if torch.is_tensor(value)]
    ms, loss = re.search(r"median : dt: (\S+) ms", log)[1], re.findall(r"loss: (\S+)", log)[-1]
    return sum(map(bytes_of, state)), float(ms), float(loss)


def main(flags):
    table = Table("AdamW", "state MB", "ms/step", "last loss")
    for name, make_optimizer in OPTIMIZERS.items():
        try:
            size, ms, loss = train(make_optimizer, flags)
        except Exception as error:  # whatever a library cannot do here is the finding
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            table.add_row(name, "-", "-", f"does not run: {reason}")
        else:
            table.add_row(name, f"{size / 1e6:,.1f}", f"{ms:,.1f}", f"{loss:.3f}")
    Console().print(table)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # torchao tells which GPU kernels it lacks, and of deprecations in torch
    main(sys.argv[1:])
