"""python -m ladder compare, of two logs."""
import sys

import pandas
from log_files import MEDIAN, write_log
from run_script import run_command
from run_tool import is_one_error

from ladder.records.recipes import COLUMNS, Record, read_csv, write_csv


def test_the_table_has_each_common_step_and_a_median_without_the_warm_up(tmp_path, call):
    code, out, _ = call("compare", write_log(tmp_path / "a.log"), write_log(tmp_path / "b.log", ms=(50, 25, 20)))
    assert code == 0 and "2 9.000000 9.000000 +0.000000 50.0 25.0 2.00" in out
    assert "median +0.000000 50.0 22.5 2.25" in out  # without the first step, in which both warm up
    write_log(tmp_path / "a.log", tail=MEDIAN)  # warms up one step longer: only the third step is warm in both
    assert "median +0.000000 50.0 20.0 2.50" in call("compare", tmp_path / "a.log", tmp_path / "b.log")[1]


def test_unknown_flags_are_refused_where_no_script_takes_them(tmp_path, call):
    write_csv(Record({}, pandas.DataFrame(columns=[*COLUMNS])), tmp_path / "compare.csv")
    for what in ([write_log(tmp_path / f"{side}.log") for side in "ab"], [tmp_path]):
        assert is_one_error(call("compare", *what, "--stepz", 3), "--stepz 3: ")


def test_a_script_s_name_may_have_a_number_sign(tmp_path):
    points = pandas.DataFrame([{"part": "round", "rung": "mine#2", "round": 1, "step": 4, "tokens": 4}])
    write_csv(Record({"data": "a # text"}, points.reindex(columns=[*COLUMNS])), tmp_path / "compare.csv")
    record = read_csv(tmp_path / "compare.csv")
    assert record.facts == {"data": "a # text"} and [*record.points.rung] == ["mine#2"]


def test_a_comparison_that_was_stopped_in_its_search_has_nothing_to_show(tmp_path, call):
    points = pandas.DataFrame([{"part": "search", "rung": "1_muon", "round": 1337, "step": 4, "tokens": 4}])
    write_csv(Record({}, points.reindex(columns=[*COLUMNS])), tmp_path / "compare.csv")
    assert is_one_error(call("compare", tmp_path), "has no finished round")


def test_comparing_loads_no_torch(tmp_path):
    logs = [str(write_log(tmp_path / f"{side}.log")) for side in "ab"]
    words = [["compare", *logs], ["report", str(tmp_path)], ["report", str(tmp_path), "--json"]]
    code = (f"import sys; from ladder.__main__ import main; codes = [main(words) for words in {words}]; "
            "sys.exit(any(codes) or 'torch' in sys.modules)")
    assert run_command(sys.executable, "-c", code).returncode == 0
