"""What may be compared: which scripts, with which flags; and a comparison for real."""
import json
from functools import partial

import pytest
from log_files import write_log
from run_tool import flags, is_one_error, run_jobs_here

from ladder.errors import UserError
from ladder.measure import fairness, runner
from ladder.measure.contest import Contest, check_logs, known_flags
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


def test_a_file_is_no_rung_though_it_has_its_name(mine, tmp_path):
    copy = fairness.script_of(str(mine(name="7_zero_init.py")))
    rung = BY_LABEL["zero_init"]
    assert copy.label == "" and fairness.script_of(str(rung.path)) is rung is fairness.script_of("zero_init")
    one, other = fairness.copied([BY_LABEL["zero_init"], copy], tmp_path / "scripts")
    assert one is BY_LABEL["zero_init"] and other.name == "7_zero_init_yours"
    assert other.path.read_bytes() == copy.path.read_bytes()


def test_a_changed_file_never_replaces_the_copy_that_ran(mine, tmp_path):
    file = mine()
    rung, before = fairness.script_of(str(file)), file.read_bytes()
    [copy] = fairness.copied([rung], tmp_path / "scripts")
    assert fairness.copied([rung], tmp_path / "scripts") == [copy]
    file.write_bytes(before + b"# changed\n")
    with pytest.raises(UserError, match="mine.py: differs from .*mine.py, its copy that ran"):
        fairness.copied([rung], tmp_path / "scripts")
    assert copy.path.read_bytes() == before


def test_each_script_gets_the_flags_that_it_has(mine):
    flag = '    flag("--seed"'
    own = fairness.script_of(str(mine(flag, f'    flag("--idea", type=float, default=1.0)\n{flag}')))
    words = ["--steps", "3", "--idea", "3", "-B", "2", "--muon-lr=3"]
    assert known_flags(own, words) == words
    assert known_flags(BY_LABEL["zero_init"], words) == ["--steps", "3", "-B", "2", "--muon-lr=3"]
    assert known_flags(BY_LABEL["validation"], words) == ["--steps", "3", "-B", "2"]


@pytest.mark.parametrize("what, words, reasons", [
    (["zero_init", "10"], [], ["speedup_10_fused_adamw.py: has no --val-every"]),
    (["zero_init", "muon"], ["--seed", "3"], ["--seed: a comparison sets it itself"]),
    (["zero_init", "muon"], ["--ideas", "3"], ["--ideas: none of these scripts has this flag"]),
    (["zero_init", "muon"], ["--val-every", "0"], ["--val-every 0"]),
    (["zero_init", "nosuch"], [], ["no rung nosuch"]), (["zero_init", "nosuch.py"], [], ["nosuch.py: no such script"]),
    (["zero_init"], [], ["compare zero_init: give two"]),
    (["zero_init", "long_run"], ["--total-batch", "128"], ["tokens a step", "128 and zero-initialized projections 32"]),
])
def test_what_cannot_be_compared_is_refused_before_a_folder_is_made(what, words, reasons, tokens, tmp_path, call):
    answer = call("compare", *what, "--logs", tmp_path / "logs", *flags(tokens), *words)
    assert is_one_error(answer, *reasons) and not (tmp_path / "logs").exists()


def test_two_files_of_one_name_must_agree(mine, tmp_path, tokens, call, imported_here):
    parsed = "    args = parser.parse_args(argv)\n"
    for folder in "ab":
        (tmp_path / folder).mkdir()
    one, other = mine(name="a/mine.py"), mine(parsed, f"{parsed}    args.steps = 40\n", "b/mine.py")
    answer = call("compare", one, other, "--logs", tmp_path / "logs", *flags(tokens))
    assert is_one_error(answer, f"--steps: {other} has 40 and {one} 4,")


@pytest.mark.parametrize("old, new, reasons", [
    ('    args = parser.parse_args(argv)\n', '    args = parser.parse_args(argv)\n    args.T = 16\n',
     ["-T: ", "mine.py has 16 and zero-initialized projections 32"]),
    ('    args = parser.parse_args(argv)\n', '    args = parser.parse_args(argv)\n    args.val_sequences = 1\n',
     ["--val-sequences: ", "mine.py has 1"]),
    ('    args = parser.parse_args(argv)\n', '    args = parser.parse_args(argv)\n    args.data = Path("x")\n',
     ["--data: ", "mine.py has x"]),
    ("def add_flags(parser):", "def add_flags(parser", ["line", "was never closed"]),
])
def test_an_unfair_file_is_refused_by_name(old, new, reasons, mine, tokens, tmp_path, call, imported_here):
    answer = call("compare", "zero_init", mine(old, new), "--logs", tmp_path / "logs", *flags(tokens))
    assert is_one_error(answer, *reasons) and not (tmp_path / "logs").exists()


def test_the_data_are_looked_for_where_the_scripts_read_them(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "bytes").mkdir(parents=True)
    (tmp_path / "data" / "bytes" / "meta.json").write_text("{}")
    answer = call("compare", "zero_init", "muon", "--logs", tmp_path / "logs", "--device", "cpu")
    assert is_one_error(answer, "--data data/bytes: no whole token files")


def test_the_newest_comparison_of_the_same_arguments_is_resumed(monkeypatch, tmp_path):
    monkeypatch.setattr(fairness, "FOLDERS", tmp_path)
    for day, seeds in (("01", 5), ("02", 5), ("03", 3)):
        (tmp_path / day).mkdir()
        (tmp_path / day / "contest.json").write_text(json.dumps({"scripts": [{"name": "a"}], "seeds": seeds}))
    assert fairness.newest_of({"seeds": 5}).name == "02"
    with pytest.raises(UserError, match="no comparison of these arguments"):
        fairness.newest_of({"seeds": 4})


def test_runs_that_did_not_do_the_same_are_refused_though_their_flags_say_so(tmp_path):
    logs = [write_log(tmp_path / f"{name}.log", header=f"# batch: B=4 T={T} | steps: 3\n# data: a\n")
            for name, T in (("one", 64), ("two", 32))]
    with pytest.raises(UserError, match="T: two has 32 and one 64"):
        check_logs(logs)
    check_logs([logs[0], tmp_path / "none.log"])


@pytest.mark.slow
def test_a_comparison_for_real(mine, byte_tokens, tmp_path, call, monkeypatch):
    """The same command resumes and repeats nothing; another one, or a changed file, is refused; the folder is shown."""
    monkeypatch.setattr(fairness, "Contest", partial(Contest, timings=1))
    logs, file = tmp_path / "logs", mine("import argparse", "import helper\nimport argparse")
    (tmp_path / "helper.py").write_text("")  # beside the file, whose copy runs
    words = ["compare", "zero_init", file, "--logs", logs, "--seeds", "3", "--tries", "2", *flags(byte_tokens),
             "--val-every", "2", "--val-sequences", "2"]
    with monkeypatch.context() as here:  # what is resumed runs in a process of its own
        here.setattr(runner, "run_jobs", run_jobs_here)
        code, out, error = call(*words)
    assert code == 0, error
    assert "mine.py ends with the same losses as zero_init, to the last digit, with every seed." in out
    n_search = 2 * 3  # two tries, a seed of the search for each that is tested
    assert (logs / "compare.png").exists() and len(list(logs.rglob("*.log"))) == 2 * (n_search + 3 + 2)
    assert len((logs / "differences.csv").read_text().splitlines()) == 1 + 3
    again = call("compare", logs)[1]
    assert "the same losses as zero_init" in again and "Doubtful: 4 steps are too few" in again
    gone = logs / "round_2" / "mine.log"
    gone.unlink()
    kept = {path: path.stat().st_mtime_ns for path in logs.rglob("*.log")}
    assert is_one_error(call(*words), "is not empty") and not gone.exists()
    assert call(*words, "--resume")[0] == 0 and gone.exists()
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert is_one_error(call(*words, "--resume", "--max-lr", "0.1"), "of other flags")
    file.write_text(file.read_text() + "# changed\n")
    assert is_one_error(call(*words, "--resume"), "mine.py: differs from")
    contest = json.loads((logs / "contest.json").read_text())
    assert contest["seeds"] == 3 and contest["scripts"][1]["title"] == str(file) and "commit" in contest
