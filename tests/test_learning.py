"""Learning works: one batch can be learned by heart, and real text gets more probable on every rung."""
import numpy as np
import pytest
from conftest import losses, make_tokens, rung, train

from ladder.stages import STAGES


@pytest.mark.parametrize("number", range(len(STAGES)), ids=[stage.name for stage in STAGES])
def test_fifty_steps_on_real_text_lower_the_loss(number, tmp_path, tokens):
    found = losses(train(rung(number), tmp_path, tokens, "-B", 1, "-T", 64, compile_mode="default"))
    assert len(found) == 50
    assert found[0] == pytest.approx(np.log(50257), abs=0.3)  # at the start every token is as likely as any other
    assert np.mean(found[-5:]) < found[0] - 0.5


@pytest.mark.parametrize("number", [0, 10])
def test_one_batch_is_learned_by_heart(number, tmp_path, real_text):
    B, T = 2, 16
    one_batch = make_tokens(tmp_path / "tokens", real_text[: (B * T + 1) * 10 // 9 + 1])
    found = losses(train(rung(number), tmp_path / "logs", one_batch, "-B", B, "-T", T, "--steps", 700))
    assert found[-1] < 0.1
