"""python -m ladder: verbs, flags and rungs as users write them, rightly and wrongly."""
import os
import subprocess

import pytest
from load_script import ROOT
from log_files import MEDIAN, write_log
from run_tool import LADDER, files_in, flags, is_one_error, ladder

import ladder.__main__ as tool
from ladder.errors import UserError
from ladder.records.logs import RUNS
from ladder.rungs.list import BY_LABEL, RUNGS as ALL_RUNGS, find_rung, parse_rungs


def test_help_comes_without_torch():
    run = ladder("--help", PYTHONPROFILEIMPORTTIME="1")
    assert run.returncode == 0 and tool.VERBS.keys() <= set(run.stdout.split())
    assert "argparse" in run.stderr and "torch" not in run.stderr and "pandas" not in run.stderr


def test_a_table_goes_into_a_file_whose_encoding_lacks_its_signs_or_nowhere(tmp_path):
    words = ["report", write_log(tmp_path / "baseline.log").parent]
    run = ladder(*words, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "tokens/s" in run.stdout, run.stderr
    read, write = os.pipe()
    os.close(read)  # as head does, once it has its lines
    run = subprocess.run([*LADDER, *words], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")


def test_diff_shows_the_change_and_its_effect_in_the_records_and_in_the_reader_s_own_newest_run(call, tmp_path,
                                                                                                monkeypatch):
    """That the text and the change are whole: test_tutorial.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ladder.records.logs.REFERENCE", tmp_path / "records")
    for folder, times in ((tmp_path / "records" / "an_epyc", (90.0, 30.0)), (RUNS / "mine", (60.0, 40.0))):
        for label, ms in zip("56", times, strict=True):
            write_log(folder / f"{BY_LABEL[label].name}.log", ms=[ms] * 3)
        (folder / "machine.json").write_text('{"rates": {"float32": 1e12}}')
    records, _, own = call("diff", "06")[1].partition("Your newest run, mine")
    for part in ("Rung 6, flash attention", "+ y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                 "- att = F.softmax(att, dim=-1)"):
        assert part in records
    assert "90.0 -> 30.0 ms/step (3.00 x" in records.partition("Measured, ")[2]
    assert "60.0 -> 40.0 ms/step (1.50 x" in own
    assert "+ " in call("diff", "ddp", "2_prefetch.py")[1] and "@@" not in call("diff", "0")[1]


def test_rungs_are_chosen_by_label_range_or_file():
    def labels(text):
        return [entry.label for entry in parse_rungs(text)]

    assert labels("0-2,10") == ["0", "1", "2", "10"]
    assert labels("ddp, 10,9-10") == ["ddp", "10", "9"]  # each once: a second one would overwrite the first's log
    assert labels("gpu/,muon,gpu") == [entry.label for entry in ALL_RUNGS if "/gpu/" in entry.file] + ["muon"]
    assert labels("long_run") == ["long_run"] and {"prefetch", "long_run"} <= {*labels("long_run/")}
    for wrong in ("99", "3-1", "a", "", "-1", "0-99", "1-2-3", "3-", "9-11", "11-17", "muon-rope", "ddp/"):
        with pytest.raises(UserError, match="--rungs"):
            parse_rungs(wrong)
    for word in ("7", "07", "speedup_07_vocab_pad.py", "/x/speedup_07_vocab_pad.py"):
        assert find_rung(word) is BY_LABEL["7"]
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


@pytest.mark.parametrize("words, reasons", [
    (["report", "/no/such/folder"], ["no such folder of logs"]),
    (["report", ROOT / "logs" / "reference"], ["holds no logs"]),  # several machines are not rounds
    (["report", "x", "--readme"], ["--readme: shows all folders of logs/reference"]),
    (["compare", "/no/a.log", "/no/b.log"], ["a.log"]),
    *((["floor", "--gpu", card], [f"--gpu {card}"]) for card in ("nonsense", "mine:1,2", "mine:1,2,3,-4")),
    (["floor", "--rungs", "ddp,fp8"], ["--rungs ddp,fp8: floors are of"]), (["floor", "-T", "2048"], ["-T 2048"]),
    (["propagate", "nothing.py"], ["no rung nothing.py"]), (["diff", "99"], ["no rung 99"]),
    (["diff", "1", "2", "3"], ["one rung, or two"]), (["run", "--rungs", "77"], ["--rungs 77"]),
    (["run", "--save=x"], ["--save"]), (["run", "--max-batch", "--peers"], ["--peers: not with --max-batch"]),
    (["run", "--max-batch", "--at-once", "2"], ["--at-once: not with --max-batch"]),
    (["profile", "--rungs", "ddp"], ["rungs 0 to 10"]), (["profile", "--steps", "3"], ["--steps", "not for a profile"]),
])
def test_wrong_words_end_in_one_line_before_anything_is_written(words, reasons, tmp_path, monkeypatch, call):
    """Before anything is written: here a script would prepare data/tokens."""
    monkeypatch.chdir(tmp_path)
    assert is_one_error(call(*words), *reasons) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("refused", [
    ["--bogus", 3], ["--rung", 0], ["-B", 0], ["--save", "x"], ["--data", "no/such/folder"], ["-B", 1_000_000],
    ["--resume"],
    ["--rungs", "0-77"]], ids=lambda words: " ".join(map(str, words)))
def test_refused_flags_leave_no_trace(refused, tmp_path, tokens, monkeypatch, call):
    """Neither of themselves, nor in the results of the run before."""
    monkeypatch.chdir(tmp_path)
    write_log(RUNS / "last" / "baseline.log", losses=[4, 5, 6], tail=MEDIAN)
    (RUNS / "last" / "machine.json").write_text('{"rates": {"x": 1}}')
    before = files_in(tmp_path)
    code, output, error = call("run", "--rungs", "0,5", *flags(tokens), *refused)
    assert code in (1, 2) and "error: " in error and str(refused[0]) in error and output == ""
    assert files_in(tmp_path) == before and "6.000" in call("report")[1]
