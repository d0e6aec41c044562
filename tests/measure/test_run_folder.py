"""The folder of a run: its rates, its lock, and what is never overwritten."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from log_files import MEDIAN, write_log
from run_tool import files_in, flags, is_one_error

from ladder.measure import run_folder
from ladder.records.logs import newest_run


def test_a_machine_keeps_its_highest_rates(monkeypatch, tmp_path):
    for rate in (2e12, 3e12, 1e12):
        found = json.dumps({"rates": {"float32": rate}, "bytes_per_second": rate / 10})
        monkeypatch.setattr(run_folder, "run_module", lambda *_, found=found: found)
        run_folder.write_machine(tmp_path, "cpu", arguments=["run"])
    assert json.loads((tmp_path / "machine.json").read_text()) == {
        "rates": {"float32": 3e12}, "bytes_per_second": 3e11, "arguments": ["run"]}
    (tmp_path / "machine.json").write_text('{"device": "cpu"}')  # of a run that measured none
    run_folder.write_machine(tmp_path, "cpu")
    assert json.loads((tmp_path / "machine.json").read_text())["rates"] == {"float32": 1e12}


def test_a_run_never_touches_the_logs_of_another(tmp_path, tokens, call):
    words = ["run", "--rungs", 0, "--logs", tmp_path, *flags(tokens)]
    with filelock.FileLock(tmp_path / "lock"):
        assert is_one_error(call(*words), "another run is using it")
    command = [sys.executable, "-c", "input()", "--log-dir", tmp_path / "round_1"]
    killed = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert is_one_error(call(*words), "of a killed run still writes there", f"end process {killed.pid}")
    killed.communicate()
    write_log(tmp_path / "baseline.log")
    before = files_in(tmp_path)
    assert is_one_error(call(*words), "not empty", "--resume")
    assert is_one_error(call("run", "--resume", "--logs", tmp_path), "holds no run")
    assert files_in(tmp_path) == before
    (tmp_path / "machine.json").write_text("{")
    assert is_one_error(call("run", "--resume", "--logs", tmp_path), "is damaged")


@pytest.mark.parametrize("folder", ["/proc/logs", f"{__file__}/logs"], ids=["read-only", "in a file"])
def test_a_folder_that_cannot_be_written_to(folder, tokens, call):
    assert is_one_error(call("run", "--rungs", 0, "--logs", folder, *flags(tokens)), f"--logs {folder}: ")


def test_every_run_has_its_folder_and_the_newest_is_shown(fake_run, call):
    for words in (["report"], ["run", "--resume"]):
        assert is_one_error(call(*words), "holds no run")
    assert fake_run(lambda job: write_log(job.log, losses=[1, 2, 3], tail=MEDIAN) and None)[0] == 0
    first = newest_run()
    time.sleep(1.1)  # folders are called by the second
    assert fake_run(lambda job: write_log(job.log, losses=[4, 5, 6], tail=MEDIAN) and None)[0] == 0
    second = newest_run()
    assert second != first and "6.000" in call("report")[1]
    (first / "baseline.log").write_text("# script: baseline.py\n")  # killed before its first step: not to be shown
    os.utime(first / "machine.json")
    assert newest_run() == second and newest_run(Path.exists) == first  # but to be resumed


def test_a_run_may_write_to_the_folder_that_it_stands_in(fake_run):
    assert fake_run(lambda job: write_log(job.log, tail=MEDIAN) and None, "--logs", ".")[0] == 0
