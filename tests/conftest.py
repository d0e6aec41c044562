"""How pytest runs the tests. What they share: shared_fixtures.py, and helpers that are no fixtures: load_script.py,
run_script.py, watch_training.py, log_files.py, saved_models.py, token_folders.py, damaged_files.py, ranks.py,
tensor_bytes.py, fake_cuda.py, fake_race.py; of the tool run_tool.py.
"""
import os

import pytest

# One thread, here and in the programs that the tests start: a second one makes so small a model hardly faster, and on
# a machine that also does something else it makes it many times slower. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes, which import torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network

pytest_plugins = ["exercise_hooks"]


def pytest_configure(config):
    """The fixtures, in the processes that run tests: where those are others, this one needs no torch, which is slow."""
    if hasattr(config, "workerinput") or getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cuda", "mps", "cpu"], help="run the smoke test there, and only that")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two processes; of a smoke test as many as cores and a GPU's memory allow."""
    device = config.option.device
    if not device:
        return 2
    import torch

    from ladder.count.memory import free_memory

    if not torch.get_device_module(device).is_available():
        raise pytest.UsageError(f"--device {device}: torch cannot use one; python -m ladder check may say why")
    n_workers = max(2, min(8, os.cpu_count() // 2))
    return n_workers if device == "cpu" else max(1, min(n_workers, int(free_memory(device) // 2e9)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The smoke test is one file, whose tests all processes share."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.device else None


def pytest_collection_modifyitems(config, items):
    """The files that take longest first, so that two processes end at about the same time."""
    longest = ("test_lowered.py", "test_smoke.py", "test_fake_cuda.py", "test_checkpoints.py", "test_try.py")
    items.sort(key=lambda item: item.path.name not in longest)
    smoke = [item for item in items if item.path.name == "test_smoke.py"]
    if config.option.device:
        items[:] = smoke
    else:
        for item in smoke:
            item.add_marker("slow")
