"""Rungs by their labels, ranges, files and tracks; what a wrong word gets."""
import pytest

from ladder.errors import UserError
from ladder.rungs.list import BY_LABEL, find_rung, parse_rungs
from ladder.rungs.list import RUNGS as ALL_RUNGS


def test_rungs_are_chosen_by_label_range_or_file():
    def labels(text):
        return [entry.label for entry in parse_rungs(text)]

    assert labels("0-2,10") == ["0", "1", "2", "10"]
    assert labels("ddp, 10,9-10") == ["ddp", "10", "9"]  # each once: a second one would overwrite the first's log
    assert labels("gpu/,muon,gpu") == [entry.label for entry in ALL_RUNGS if "/gpu/" in entry.file] + ["muon"]
    assert labels("long_run") == ["long_run"] and {"prefetch", "long_run"} <= {*labels("long_run/")}
    for wrong in ("99", "3-1", "a", "", "-1", "0-99", "1-2-3", "3-", "9-11", "11-17", "muon-rope", "ddp/", "0,", "0.5"):
        with pytest.raises(UserError, match="--rungs"):
            parse_rungs(wrong)
    for word in ("7", "07", "speedup_07_vocab_pad.py", "/x/speedup_07_vocab_pad.py"):
        assert find_rung(word) is BY_LABEL["7"] and labels(f"0,{word}") == ["0", "7"]
    assert find_rung("0") is BY_LABEL["0"] and find_rung("ddp") is BY_LABEL["ddp"]
    for word in ("muon", "1_muon.py", "beyond/modern/1_muon.py", "rung_18_muon", "beyond/modern/rung_18_muon.py"):
        assert find_rung(word) is BY_LABEL["muon"]


@pytest.mark.parametrize("word, reason", [
    ("18", "18 is called muon today"), ("dcp", "dcp is called sharded_checkpoint today"),
    ("checkpoint", "perhaps best_checkpoint or checkpoints or "), ("muom", "perhaps muon"), ("xyz", "no rung xyz")])
def test_an_unknown_name_gets_the_nearest_ones(word, reason):
    for look_up in (find_rung, parse_rungs):
        with pytest.raises(UserError, match=reason):
            look_up(word)
