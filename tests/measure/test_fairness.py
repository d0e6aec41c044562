"""What may be compared: which scripts, with which flags."""
import pytest
from log_files import write_log
from run_tool import flags, is_one_error

from ladder.errors import UserError
from ladder.measure.contest import script_of
from ladder.measure.fairness import check_logs, known_flags
from ladder.rungs.list import BY_LABEL


def test_each_script_gets_the_flags_that_it_has(mine):
    flag = '    flag("--seed"'
    own = script_of(str(mine(flag, f'    flag("--idea", type=float, default=1.0)\n{flag}')))
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
    (["zero_init", "muon"], ["--tries", "-3"], ["--tries -3: "]),
    (["zero_init"], [], ["compare zero_init: give two"]), (["muon", "muon"], [], ["two of these scripts"]),
    (["zero_init", "long_run"], ["--total-batch", "128"], ["tokens a step", "128 and zero-initialized projections 32"]),
])
def test_what_cannot_be_compared_is_refused_before_a_folder_is_made(what, words, reasons, tokens, tmp_path, call):
    answer = call("compare", *what, "--logs", tmp_path / "logs", *flags(tokens), *words)
    assert is_one_error(answer, *reasons) and not (tmp_path / "logs").exists()


def test_two_files_must_agree_and_have_different_names(mine, tmp_path, tokens, call, imported_here):
    parsed = "    args = parser.parse_args(argv)\n"
    for folder in "ab":
        (tmp_path / folder).mkdir()
    one, other = mine(name="a/mine.py"), mine(parsed, f"{parsed}    args.steps = 40\n", "b/other.py")
    answer = call("compare", one, other, "--logs", tmp_path / "logs", *flags(tokens))
    assert is_one_error(answer, f"--steps: {other} has 40 and {one} 4,")
    for twin in (mine(name="b/mine.py"), mine(name="b/7_zero_init.py"), mine(name="b/validation.py")):
        answer = call("compare", one, twin, "--logs", tmp_path / "logs")
        assert is_one_error(answer, "this name; ", "rename it")


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


def test_runs_that_did_not_do_the_same_are_refused_though_their_flags_say_so(tmp_path):
    logs = [write_log(tmp_path / f"{name}.log", header=f"# batch: B=4 T={T} | steps: 3\n# data: a\n")
            for name, T in (("one", 64), ("two", 32))]
    with pytest.raises(UserError, match="T: two has 32 and one 64"):
        check_logs(logs)
    check_logs([logs[0], tmp_path / "none.log"])
