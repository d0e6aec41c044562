"""Numbers that cannot be, in a log or against a card."""

import pytest
from log_files import write_log

from ladder.__main__ import main
from ladder.records.impossible import fastest_ms, impossible
from ladder.records.logs import read_log


@pytest.mark.parametrize("header, ms, speed, found", [
    ("# batch: B=2 T=1024 | steps: 1\n", "177.00", "11.57", "they are tokens per millisecond"),
    ("# batch: B=2 T=1024 | steps: 1\n", "177.00", "11570.62", None),
    ("# batch: B=4 T=1024 | steps: 1\n", "177.00", "11570.62", "its header says 4,096"),
    ("# batch: B=4 T=1024 | steps: 1\n# ranks: 2\n", "93.10", "87991.41", None),
    ("# batch: B=4 T=1024 | steps: 1\n", "0.0", "11570.62", None),
])
def test_tokens_per_second_that_are_something_else_are_called_so(header, ms, speed, found, tmp_path):
    """The earlier series logged tokens per millisecond."""
    (tmp_path / "a.log").write_text(f"{header}step : 1 | loss: 10.9 | dt: {ms} ms | tokens/sec: {speed}\n")
    sentences = [*impossible(read_log(tmp_path / "a.log"))]
    assert len(sentences) == (found is not None) and all(found in sentence for sentence in sentences)


@pytest.mark.parametrize("device, ms, fast", [
    ("NVIDIA GeForce RTX 3080", 13.5, True), ("NVIDIA GeForce RTX 3080", 60, False), (None, 13.5, False),
    ("cpu", 13.5, False)])
def test_a_step_below_its_cards_arithmetic_is_called_impossible(device, ms, fast, tmp_path, call):
    header = "# model: gpt2\n" + (f"# device: {device}\n" if device else "") + "# batch: B=2 T=1024 | steps: 3\n"
    logs = [write_log(tmp_path / f"{side}.log", [ms] * 3, header=header) for side in "ab"]
    folder = write_log(tmp_path / "one" / "a.log", [ms] * 3, header=header).parent
    for words in (["compare", *logs], ["report", folder]):
        out = call(*words)[1]
        assert ("matrix products alone take 22.0 ms" in " ".join(out.split())) == fast


def rung_10(path, ms, precision="bfloat16 autocast", device="NVIDIA GeForce RTX 3080", more=""):
    path.write_text(f"# script: speedup_10_fused_adamw.py\n# model: gpt2\n"
                    f"# device: {device} | precision: {precision}{more}\n"
                    f"# batch: B=4 T=1024 | steps: 1 | seed: 1\nstep : 1 | loss: 9.0 | dt: {ms} ms\n")
    return path


def test_a_log_in_tf32_is_held_to_the_rate_of_tf32(tmp_path):
    slow, fast = (fastest_ms(read_log(rung_10(tmp_path / "a.log", 100, precision, "NVIDIA A100-SXM4-40GB")))[0]
                  for precision in ("float32", "float32, products in TF32"))
    assert slow / fast == pytest.approx(156 / 19.5)


@pytest.mark.parametrize("more, times", [(" | ranks: 2", 1.4), (" | float8: 3 layers", 0.7)])
def test_an_honest_log_is_not_called_impossible(more, times, tmp_path, capsys):
    """Two cards do twice the arithmetic; float8 has another rate, which no card's row has."""
    path = tmp_path / "speedup_10_fused_adamw.log"
    products, _ = fastest_ms(read_log(rung_10(path, 100)))
    rung_10(path, times * products, more=more)
    assert main(["report", str(tmp_path)]) == 0
    assert "matrix products alone take" not in " ".join(capsys.readouterr().out.split())
