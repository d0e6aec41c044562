"""On a CPU what the tool starts keeps the memory that it frees, and its log says by which allocator."""
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ladder.measure import allocator, check
from ladder.measure.allocator import KEPT, keeping_freed_memory, mimalloc
from ladder.measure.runner import Job, run_job
from ladder.show.logs import read_log

linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems are left as they are")
# Four times 64 MB, freed each time: the pages that Linux zeroes are counted.
PROGRAM = """
import resource, torch
for _ in range(3): torch.ones(16_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4): torch.ones(16_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.fixture(autouse=True)
def untouched_environment(monkeypatch):
    for name in ("LD_PRELOAD", *KEPT):
        monkeypatch.delenv(name, raising=False)


def faults(variables):
    return int(subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | variables, text=True,
                              capture_output=True, check=True).stdout)


@linux
def test_freed_memory_comes_without_page_faults():
    assert mimalloc(), "requirements.txt installs it"
    pages = 4 * 64_000_000 / resource.getpagesize()
    assert faults({}) > 0.9 * pages
    assert faults(keeping_freed_memory()) < 0.1 * pages


@linux
def test_what_the_tool_starts_on_a_cpu_runs_under_it_and_says_so(tokens, tmp_path):
    command = [sys.executable, str(ROOT / "baseline.py"), "--model", "tiny", "-T", "32", "--steps", "2",
               "--device", "cpu", "--data", str(tokens), "--log-dir", str(tmp_path)]
    for device, name in (("cpu", "mimalloc"), ("cuda", None)):  # a GPU's memory is torch's own affair
        assert run_job(Job("baseline", command, tmp_path), 60, device).status == "ok"
        log = read_log(tmp_path / "baseline.log")
        assert log.allocator == name


def test_glibc_keeps_memory_only_with_both_of_its_variables():
    for name, value in KEPT.items():
        assert allocator.name_of({name: value}) == "default"
    assert allocator.name_of(KEPT) == "glibc, memory kept"


@linux
def test_without_the_wheel_glibc_is_told_to_keep(monkeypatch):
    monkeypatch.setattr(allocator.importlib.metadata, "files", lambda name: None)
    assert keeping_freed_memory() == KEPT
    assert "mimalloc needs less memory" in next(check.check_allocator("cpu")).detail


@linux
@pytest.mark.parametrize("path", ["/home/my project/libmimalloc.so", "/a:b/libmimalloc.so"])
def test_a_path_that_ld_preload_would_split_is_not_given_to_it(path, monkeypatch):
    monkeypatch.setattr(allocator, "mimalloc", lambda: path)
    assert keeping_freed_memory() == KEPT


@linux
@pytest.mark.parametrize("name", ["LD_PRELOAD", "MALLOC_TRIM_THRESHOLD_"])
def test_what_the_user_has_set_stays(name, monkeypatch):
    monkeypatch.setenv(name, "")
    assert keeping_freed_memory() == {}
    assert "in this environment says" in next(check.check_allocator("cpu")).detail


def test_other_systems_are_left_as_they_are(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keeping_freed_memory() == {} and list(check.check_allocator("cpu")) == []


@linux
def test_a_script_by_itself():
    """The line of docs/measuring.md."""
    done = subprocess.run("env $(python -m ladder.measure.allocator) python -c 'import os; print(*os.environ.items())'",
                          shell=True, cwd=ROOT, text=True, capture_output=True, check=True,
                          env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    assert "libmimalloc.so" in done.stdout and "('MIMALLOC_PURGE_DELAY', '-1')" in done.stdout
