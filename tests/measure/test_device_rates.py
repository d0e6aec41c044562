"""The measured rates of products and copies."""
import json
from types import SimpleNamespace

import pytest
import torch

from ladder.measure import device_rates, machine_check


@pytest.mark.parametrize("dtype, names, bfloat16", [
    (torch.float32, {"float32"}, "- none in this CPU"), (torch.bfloat16, {"float32", "bfloat16"}, "+ rung 3 gains")])
def test_only_formats_in_hardware_count(dtype, names, bfloat16, monkeypatch):
    """A CPU without bfloat16 multiplies it a hundred times slower: measuring that took minutes."""
    monkeypatch.setattr(device_rates, "PRODUCTS", [(8, 8, 8)])
    monkeypatch.setattr(device_rates, "RATE_SECONDS", 0.01)
    monkeypatch.setattr(device_rates, "autocast_dtype", lambda device: dtype)
    assert device_rates.measure("cpu").keys() == names
    _, found, _ = machine_check.check_formats("cpu")
    assert f"{found.mark} {found.detail}".startswith(bfloat16)


def test_each_format_of_a_gpu_is_measured_as_a_rung_multiplies_in_it(monkeypatch):
    """TF32 is float32 at another precision, and the best of all three shapes counts."""
    seen = []
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    monkeypatch.setattr(device_rates, "autocast_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(device_rates, "best_rate", lambda device, dtype, shape: seen.append(
        (dtype, torch.get_float32_matmul_precision())) or shape[0])
    assert device_rates.measure("cuda") == dict.fromkeys(("float32", "bfloat16", "tf32"), 8192)
    assert [seen[0], seen[6]] == [(torch.float32, "highest"), (torch.float32, "high")] and seen[3][0] == torch.bfloat16


def test_rates_are_those_of_all_threads_and_of_the_fastest_try(monkeypatch):
    """A copy reads and writes each byte, a product has two operations for each multiplication: (8, 16) @ (16, 32)."""
    threads = []
    monkeypatch.setattr(device_rates, "COPIED", {"cpu": 1000})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)  # a Timer takes one, unless it is told
    monkeypatch.setattr(device_rates.benchmark.Timer, "blocked_autorange", lambda timer, min_run_time: (
        threads.append(timer._task_spec.num_threads) or SimpleNamespace(times=[0.5, 0.25])))
    assert device_rates.best_bandwidth("cpu") == 2 * 1000 / 0.25
    assert device_rates.best_rate("cpu", torch.float32, (8, 16, 32)) == 2 * 8 * 16 * 32 / 0.25
    assert threads == [7, 7]


def test_what_a_run_records_names_the_attention_kernel(monkeypatch, capsys):
    monkeypatch.setattr(device_rates, "measure", lambda device: {})
    monkeypatch.setattr(device_rates, "best_bandwidth", lambda device: 0)
    monkeypatch.setattr("sys.argv", ["device_rates"])
    device_rates.main()
    assert json.loads(capsys.readouterr().out)["attention"] == "FLASH_ATTENTION"
