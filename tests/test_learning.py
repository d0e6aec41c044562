"""Learning works: real text gets more probable, and one batch can be memorized."""
import numpy as np
import pytest
from conftest import losses, make_tokens, rung, train


@pytest.mark.parametrize("label, compile_mode", [
    (0, None), (10, "none"),
    *(pytest.param(label, "default", marks=pytest.mark.slow) for label in ("10", "16", "24")),
])
def test_fifty_steps_on_real_text_lower_the_loss(label, compile_mode, tmp_path, tokens):
    """The rungs between learn as these do: test_optimizations.py compares each with the one before."""
    found = losses(train(rung(label), tmp_path, tokens, "-B", 1, "-T", 32, compile_mode=compile_mode))
    assert len(found) == 50
    assert found[0] == pytest.approx(np.log(50257), abs=0.3)  # at the start every token is as likely as any other
    assert np.mean(found[-5:]) < found[0] - 0.5


def test_one_batch_is_memorized(tmp_path, real_text):
    B, T = 2, 16
    one_batch = make_tokens(tmp_path / "tokens", real_text[: (B * T + 1) * 10 // 9 + 1])
    flags = ("-B", B, "-T", T, "--steps", 60, "--max-lr", 0.01)
    found = losses(train(rung(10), tmp_path / "logs", one_batch, *flags))
    assert found[-1] < 0.1
