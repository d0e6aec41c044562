"""Numbers that cannot be, in a log or against a card."""
import pytest
from log_files import write_log

from ladder.records.impossible import impossible
from ladder.records.logs import read_log


@pytest.mark.parametrize("header, ms, speed, found", [
    ("# batch: B=2 T=1024 | steps: 1\n", "177.00", "11.57", "they are tokens per millisecond"),
    ("# batch: B=2 T=1024 | steps: 1\n", "177.00", "11570.62", None),
    ("# batch: B=4 T=1024 | steps: 1\n", "177.00", "11570.62", "its header says 4,096"),
    ("# batch: B=4 T=1024 | steps: 1\n# ranks: 2\n", "93.10", "87991.41", None),
    ("", "177", "11.5", "no whole number"), ("", "177.00", "11570.62", None), ("", "4.17", "0.02", "no whole number"),
])
def test_tokens_per_second_that_are_something_else_are_called_so(header, ms, speed, found, tmp_path):
    """The earlier series logged tokens per millisecond; a log need not have a header."""
    (tmp_path / "a.log").write_text(f"{header}step : 1 | loss: 10.9 | dt: {ms} ms | tokens/sec: {speed}\n")
    sentences = impossible(read_log(tmp_path / "a.log"))
    assert len(sentences) == (found is not None) and all(found in sentence for sentence in sentences)


@pytest.mark.parametrize("device, gpu, ms, fast", [
    ("NVIDIA GeForce RTX 3080", None, 13.5, True), ("NVIDIA GeForce RTX 3080", None, 60, False),
    (None, "RTX 3080", 13.5, True), (None, None, 13.5, False), ("cpu", None, 13.5, False)])
def test_a_step_below_its_cards_arithmetic_is_called_impossible(device, gpu, ms, fast, tmp_path, call):
    header = "# model: gpt2\n" + (f"# device: {device}\n" if device else "") + "# batch: B=2 T=1024 | steps: 3\n"
    logs = [write_log(tmp_path / f"{side}.log", [ms] * 3, header=header) for side in "ab"]
    folder = write_log(tmp_path / "one" / "a.log", [ms] * 3, header=header).parent
    for words in (["compare", *logs], ["report", folder]):
        out = call(*words, *(["--gpu", gpu] if gpu else []))[1]
        assert ("matrix products alone take 22.0 ms" in " ".join(out.split())) == fast
