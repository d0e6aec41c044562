"""python -m ladder: verbs, flags and rungs as users write them, rightly and wrongly."""
import os
import subprocess

import pytest
from load_script import ROOT
from log_files import MEDIAN, write_log
from run_tool import LADDER, files_in, flags, is_one_error, ladder

import ladder.__main__ as tool
from ladder.records.logs import RUNS


def test_help_comes_without_torch():
    run = ladder("--help", PYTHONPROFILEIMPORTTIME="1")
    assert run.returncode == 0 and tool.VERBS.keys() <= set(run.stdout.split())
    assert "argparse" in run.stderr and "torch" not in run.stderr and "pandas" not in run.stderr


def test_a_table_goes_into_a_file_whose_encoding_lacks_its_signs_or_nowhere(tmp_path):
    words = ["report", write_log(tmp_path / "baseline.log").parent]
    run = ladder(*words, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "tokens/s" in run.stdout and "0 baseline" in run.stdout, run.stderr
    read, write = os.pipe()
    os.close(read)  # as head does, once it has its lines
    run = subprocess.run([*LADDER, *words], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("words, reasons", [
    (["report", "/no/such/folder"], ["no such folder", "the folder of one run"]),
    (["report", ROOT / "logs" / "reference"], ["the folder of one run"]),  # several machines are not rounds
    (["report", "x", "--readme"], ["--readme: shows all of logs/reference"]),
    (["compare", "/no/a.log", "/no/b.log"], ["a.log"]), (["compare", "a.log", "b.log", "c.log"], ["two logs"]),
    (["compare", "a.log", "6"], ["two logs"]), (["compare", ROOT / "logs", ROOT / "docs"], ["two logs", "report"]),
    *((["floor", "--gpu", card], [f"--gpu {card}"]) for card in ("nonsense", "mine:1,2", "mine:1,2,3,-4")),
    (["floor", "--gpu", "mine:1,2,4,1000", "mine:2,4,8,1000"], ["--gpu: two of these GPUs are called mine; "]),
    (["floor", "--rungs", "ddp,fp8"], ["--rungs ddp,fp8: floors are of"]), (["floor", "-T", "2048"], ["-T 2048"]),
    (["propagate", "nothing.py"], ["no rung nothing.py"]), (["diff", "99"], ["no rung 99"]),
    (["diff", "1", "2", "3"], ["one rung or two"]), (["run", "--rungs", "77"], ["--rungs 77"]),
    (["run", "--rungs", "mine.py"], ["no rung mine.py", "compare"]),
    (["run", "--save=x"], ["--save"]), (["run", "--max-batch", "--peers"], ["--peers: cannot be combined"]),
    (["run", "--max-batch", "--at-once", "2"], ["--at-once: cannot be combined"]),
    (["profile", "--rungs", "ddp"], ["rungs 0 to 10"]), (["profile", "--steps", "3"], ["--steps", "not allow them"]),
])
def test_wrong_words_end_in_one_line_before_anything_is_written(words, reasons, tmp_path, monkeypatch, call):
    """Before anything is written: here a script would prepare data/tokens."""
    monkeypatch.chdir(tmp_path)
    assert is_one_error(call(*words), *reasons) and not list(tmp_path.iterdir())


def test_a_refused_flag_names_the_script_that_lacks_it(call):
    code, _, error = call("run", "--rungs", "muon,ddp", "--val-every", "2")
    assert code == 2 and "ddp_run.py: error: unrecognized arguments: --val-every" in error


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
