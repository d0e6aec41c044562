"""Learning works: real text gets more probable, and one batch can be memorized."""
import numpy as np
import pytest
from conftest import losses, make_tokens, rung, train


@pytest.mark.parametrize("label, compile_mode", [
    (0, None), (10, "none"),
    *(pytest.param(label, "default", marks=pytest.mark.slow) for label in ("5", "10", "16", "24")),
])
def test_fifty_steps_on_real_text_lower_the_loss(label, compile_mode, tmp_path, tokens):
    """The rungs between learn as these do: test_optimizations.py compares each with the one before."""
    found = losses(train(rung(label), tmp_path, tokens, "-B", 1, "-T", 32, compile_mode=compile_mode))
    assert len(found) == 50
    assert found[0] == pytest.approx(np.log(50257), abs=0.3)  # at the start every token is as likely as any other
    assert np.mean(found[-5:]) < found[0] - 0.5


@pytest.mark.parametrize("label, flags", [
    pytest.param(0, ("--steps", 700), marks=pytest.mark.slow), (10, ("--steps", 60, "--max-lr", 0.01)),
])
def test_one_batch_is_memorized(label, flags, tmp_path, real_text):
    B, T = 2, 16
    one_batch = make_tokens(tmp_path / "tokens", real_text[: (B * T + 1) * 10 // 9 + 1])
    found = losses(train(rung(label), tmp_path / "logs", one_batch, "-B", B, "-T", T, *flags))
    assert found[-1] < 0.1
