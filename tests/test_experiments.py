"""experiments/: every idea still fits its rung, trains and looks at no later token; every question can be asked."""
import logging
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from conftest import load_module

from experiments import causal_attention, variants
from ladder.rungs.list import BY_LABEL

FOLDER = Path(variants.__file__).parent
BASES = {"evidence": "15", "own_text": "29"}  # of the patches in a folder, where it is not rung 24
NO_FLAGS = {"cpu_bfloat16", "floors", "race_record"}


@pytest.mark.parametrize("patch", sorted(variants.PATCHES.glob("*/*.patch")), ids=lambda patch: patch.stem)
def test_patches_train(patch, tmp_path):
    """Each starts with a loss near its rung's, all that it adds gets a gradient, and no token sees a later one."""
    base = BY_LABEL[BASES.get(patch.parent.name, "24")]
    module = load_module(variants.write_variant(patch, tmp_path, base).path)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(block_size=16, vocab_size=257, n_layer=4, n_head=2, n_embd=32))
    rates = {"lr": 1e-3, "muon_lr": 2e-3} if hasattr(module, "MuonAdamW") else {"lr": 1e-3}
    optimizer = model.configure_optimizers(**rates, weight_decay=0.1)
    x = torch.randint(0, 257, (2, 16))
    for step in range(3):  # what ends the branches is zero in the first, and so are the gradients before it
        loss = model(x, x.roll(-1, dims=1))
        loss.backward()
        if step == 0:
            assert abs(loss.item() - math.log(257)) < 0.2
        if step == 2:
            assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    changed = torch.cat((x[:, :10], x[:, 10:].roll(1, dims=1)), dim=1)
    with torch.no_grad():
        assert torch.allclose(model(x)[:, :10], model(changed)[:, :10], atol=1e-5)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_every_program_starts(name, monkeypatch, capsys):
    if name in NO_FLAGS:
        runpy.run_path(str(FOLDER / f"{name}.py"))
        return
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    logging.disable(logging.NOTSET)
    assert capsys.readouterr().out.startswith("usage: ")


def test_causal_attention_in_blocks_is_causal_attention():
    q, k, v = torch.randn(3, 1, 2, 700, causal_attention.HS)
    expected = causal_attention.flash(q, k, v)
    for name in ("flash kernel in blocks", "written out in blocks"):
        assert torch.allclose(causal_attention.CONTESTANTS[name](q, k, v), expected, atol=1e-5), name
