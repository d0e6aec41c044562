"""What is known of a lesson from its text."""
import pytest

from ladder.rungs.lessons import step_hash
from ladder.rungs.list import BY_LABEL


@pytest.mark.parametrize("old, new, same", [
    ('"""The position-wise feed-forward network', '"""The MLP', True),
    ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()  # before the forward pass\n", True),
    ("x, y = loader.batch(step - 1)", "x, y = loader.batch(\n            step - 1)", True),
    ("    log.finish(step)", "    log.line('end')", True), ("import json\n", "import json\nimport csv\n", True),
    ("block_size=max(1024, args.T)", "block_size=args.T", True),
    ("4 * config.n_embd", "3 * config.n_embd", False), ("        optimizer.zero_grad()\n", "", False),
    ("DEFAULT_B = 1", "DEFAULT_B = 2", True), ('"gpt2": "12x12x768"', '"gpt2": "12x6x768"', False),
    ("lr=3e-4", "lr=3e-3", False), ("F.cross_entropy(", "0 * F.cross_entropy(", False),
])
def test_a_hash_changes_with_what_a_step_computes_alone(old, new, same):
    source = BY_LABEL["0"].path.read_text()
    assert (step_hash(source.replace(old, new)) == step_hash(source)) == same and old in source
