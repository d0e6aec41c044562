"""Logs with known numbers, and the tool on them."""
import pytest

import ladder.__main__ as tool

MEDIAN = "\nmedian : dt: 50.00 ms | tokens/sec: 1.00 | peak memory: 1.00 GB | steps 3-3\n"


def write_log(path, ms=(100, 50, 50), losses=None, header="# batch: B=4 T=1024 | steps: 3 | seed: 1\n", tail="\n"):
    losses = losses or [10 - i for i in range(len(ms))]
    lines = [f"step : {i + 1} | loss: {losses[i]} | dt: {ms[i]} ms | tokens/sec: 1.0" for i in range(len(ms))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n".join(lines) + tail)
    return path


@pytest.fixture
def call(monkeypatch, capsys):
    """The tool in this process and a wide terminal: call(words) gives (exit code, stdout in one line, stderr)."""
    monkeypatch.setattr(tool.console, "width", 200)

    def call(*words):
        code = tool.main([str(word) for word in words])
        out, error = capsys.readouterr()
        return code, " ".join(out.split()), error

    return call
