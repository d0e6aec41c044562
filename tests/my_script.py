"""mine(old, new): a copy of `zero_init` with a change, as a reader's own script."""
import pytest

from ladder.rungs.list import BY_LABEL


@pytest.fixture
def mine(tmp_path):
    """mine(old, new): a copy of `zero_init` with a change."""
    def write(old="", new="", name="mine.py"):
        source = BY_LABEL["zero_init"].path.read_text(encoding="utf-8")
        assert old in source
        path = tmp_path / name
        path.write_text(source.replace(old, new, 1), encoding="utf-8")
        return path

    return write
