"""AdamW with its two moments in 8 bits, by maintained libraries: what runs on this device, saves, and costs.

    python -m ladder.eight_bit_adamw [flags of the scripts]

Trains rung 10 three times with the same flags: with its own fused AdamW, with torchao's AdamW8bit and with
bitsandbytes' (`pip install torchao bitsandbytes`), and prints the bytes of the optimizer's state, the median step and
the last loss of each. A library that cannot run here gets a line that says why.

Sources: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; torchao.optim; bitsandbytes.optim.
"""
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ladder.logs import read_log
from ladder.runner import load_script
from ladder.stages import STAGES

RUNG_10 = next(stage for stage in STAGES if stage.label == "10")
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
    """Run rung 10 with another optimizer. Return (bytes of the optimizer's state, the log)."""
    module = load_script(RUNG_10)
    configure, made = module.GPT.configure_optimizers, []

    def configure_optimizers(self, weight_decay):
        groups = configure(self, weight_decay).param_groups
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups]
        made.append(make_optimizer(groups))
        return made[0]

    module.GPT.configure_optimizers = configure_optimizers
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            module.main([*flags, "--log-dir", folder])
        log = read_log(Path(folder) / f"{RUNG_10.name}.log")
    states = [value for state in made[0].state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(map(bytes_of, states)), log


def main(flags):
    table = Table("AdamW", "state MB", "ms/step", "last loss")
    for name, make_optimizer in OPTIMIZERS.items():
        try:
            size, log = train(make_optimizer, flags)
        except Exception as error:  # whatever a library cannot do here is the finding
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            table.add_row(name, "-", "-", f"does not run: {reason}")
            continue
        table.add_row(name, f"{size / 1e6:,.1f}", f"{log.median_ms:,.1f}", f"{log.losses[-1]:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
