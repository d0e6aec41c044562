"""On a CPU what the tool starts keeps the memory that it frees; test_runner.py sees that a log says so."""
import os
import resource
import subprocess
import sys

import pytest
from ladder.measure import allocator
from ladder.measure.allocator import KEPT, keeping_freed_memory, mimalloc

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are left as they are")
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


@pytest.mark.slow
def test_freed_memory_comes_without_page_faults():
    """By default there is one for each page."""
    assert mimalloc(), "requirements.txt installs it"
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | keeping_freed_memory(), text=True,
                         capture_output=True, check=True)
    assert int(run.stdout) < 0.1 * 4 * 64_000_000 / resource.getpagesize()


def test_without_mimalloc_glibc_is_told_to_keep_unless_the_user_has_set_something(monkeypatch):
    """LD_PRELOAD would split a path at a blank."""
    for path in (None, "/home/my project/libmimalloc.so"):
        monkeypatch.setattr(allocator, "mimalloc", lambda path=path: path)
        assert keeping_freed_memory() == KEPT
    monkeypatch.setenv("LD_PRELOAD", "")
    assert keeping_freed_memory() == {}
