"""Of the lessons of rungs 1 to 10 what their exercises do not test; what they do in `train` is in test_train.py."""
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from load_script import ROOT, builds_on, known_flags, rung, rungs_that_change
from log_files import read_steps
from run_script import train, train_in_float32
from saved_models import assert_untrained, saved_model
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F
from watch_training import norm_of, watch


# The rungs in which a step with the scaler differs from that of the rung before; 3 and 8 have exercises.
SCALED = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW", since="9")
          if not builds_on(label, "gradient_accumulation") or label in rungs_that_change("optimizer_step", "MuonAdamW")]


@pytest.mark.parametrize("label", SCALED)
def test_03_float16_gradients_are_unscaled_before_they_are_clipped(label, tmp_path, byte_tokens):
    """The scale starts at 65536: a norm that forgets it is as much too large."""
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float16
    one_step = known_flags(module, B=1, T=32, steps=1, total_batch=32, val_every=0)
    with watch() as seen:
        log = train(module, tmp_path / "float16", byte_tokens, *one_step)
    exact = train_in_float32(label, tmp_path / "float32", byte_tokens, *one_step)
    assert "| precision: float16 autocast\n" in log.read_text()
    assert read_steps(log)[0]["norm"] == pytest.approx(read_steps(exact)[0]["norm"], rel=0.02)
    assert norm_of(seen.gradients[0]) <= 1 + 1e-4


@pytest.mark.parametrize("label", SCALED)
def test_03_float16_overflow_skips_the_step(label, tmp_path, byte_tokens, huge_scale):
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float16
    train(module, tmp_path, byte_tokens, *known_flags(module, B=1, T=8, steps=2, total_batch=8, val_every=0),
          "--save", tmp_path / "model.pt")
    assert huge_scale[0].get_scale() == 2.0**58
    assert_untrained(module, tmp_path / "model.pt")


@pytest.mark.parametrize("label", ["ddp", "zero_init"])  # what accumulates: test_ranks.py
def test_05_the_model_is_one_graph(label, tmp_path, byte_tokens, monkeypatch):
    """With a backend that writes no C++; and what is saved has plain names. Validation compiles nothing."""
    module, compile_ = rung(label), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: compile_(model, backend="eager"))
    counters.clear()
    flags = known_flags(module, B=1, T=8, steps=2, total_batch=8, val_sequences=1, save=tmp_path / "model.pt")
    log = train(module, tmp_path, byte_tokens, *flags, compile_mode="default")
    assert counters["stats"]["unique_graphs"] == 2  # the probe and the model, in one piece
    assert not counters["graph_break"] and "# compile: default" in log.read_text()
    assert saved_model(module, tmp_path / "model.pt")(torch.tensor([[1, 2, 3]])).shape == (1, 3, 257)


def test_05_ends_where_nothing_can_be_compiled(tmp_path, byte_tokens):
    """With one line, before the first step. A real missing compiler; no Triton or an old Python raise as it does."""
    line = r"error: torch.compile does not work here \([^\n]+\); --compile-mode none trains without it, [^\n]+"
    with (torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}), fresh_cache(),
          pytest.raises(SystemExit, match=f"^{line}$")):
        train(rung("5"), tmp_path, byte_tokens, "-B", 1, "-T", 32, compile_mode="default")
    assert not list(tmp_path.glob("*.log"))


def test_05_nothing_is_compiled_for_those_who_do_not_want_it(tmp_path, byte_tokens, monkeypatch):
    """Nor, unless it is asked for, on an Apple GPU."""
    monkeypatch.setattr(torch, "compile", None)  # must not be called
    assert "# compile: none\n" in train(rung("5"), tmp_path, byte_tokens, "-B", 1, "-T", 32, "--steps", 2).read_text()
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert rung("5").parse_args([]).compile_mode == "none"
    assert rung("5").parse_args(["--compile-mode", "default"]).compile_mode == "default"


LINES = re.findall(r"(?s)```python\n(.+?)```", (ROOT / "docs" / "running.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("native, dtype", [(True, torch.bfloat16), (False, torch.float16)])
def test_the_lines_for_any_model_train_one_that_is_not_a_gpt(native, dtype, monkeypatch):
    """Those of docs/running.md, on a CPU: a convolutional network overfits one batch, as the text says."""
    dtypes, losses = set(), []

    class MyModel(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 10))

        cuda = torch.nn.Sequential.cpu

        def forward(self, x):
            logits = super().forward(x)
            dtypes.add(logits.dtype)
            return logits

    def cross_entropy(logits, targets):
        losses.append(F.cross_entropy(logits, targets))
        return losses[-1]

    torch.manual_seed(0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))  # no C++: seconds
    names = {"torch": torch, "F": SimpleNamespace(cross_entropy=cross_entropy), "MyModel": MyModel,
             "batches": 150 * [(torch.randn(16, 1, 8, 8), torch.arange(16) % 10)]}
    exec(LINES[0].replace('"cuda"', '"cpu"'), names)
    assert torch.get_float32_matmul_precision() == "high"
    assert dtypes == {dtype} and losses[0] > 2 and losses[-1] < 0.1
    assert {loss.dtype for loss in losses} == {torch.float32}
    assert names["optimizer"].param_groups[0]["fused"]
