"""ddp_run.py: 2 ranks of batch B compute what 1 process computes with batch 2B, on one machine and on two."""
import os
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, losses, read_steps, run_command, rung

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TWO_RANKS = [*TORCHRUN, "--standalone", "--nproc_per_node=2"]
RANK = ROOT / "tests" / "ddp_rank.py"


def flags(tokens, log_dir, B, steps=6, compile_mode="none"):
    return ["--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", log_dir, "-B", B, "-T", 32,
            "--steps", steps, "--compile-mode", compile_mode]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, tokens):
    """One process, batch 4, float32: the truth for every run of two ranks with batch 2."""
    folder = tmp_path_factory.mktemp("one")
    run = run_command(sys.executable, RANK, folder, "ddp", *flags(tokens, folder, B=4))
    assert run.returncode == 0, run.stderr
    return folder


def assert_same_training(folder, one_process):
    """Float32 sums in another order: losses agree to 1e-5 of 10.8, weights to 1 % of one step's length."""
    ours, truth = read_steps(folder / "ddp_run.log"), read_steps(one_process / "ddp_run.log")
    assert len(ours) == len(truth) == 6
    for key, tolerance in (("loss", 1e-4), ("norm", 1e-3), ("lr", 0)):
        assert [s[key] for s in ours] == pytest.approx([s[key] for s in truth], abs=tolerance)
    rank0, rank1 = (torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    alone = torch.load(one_process / "rankalone.pt", weights_only=True)
    assert all(torch.equal(rank0[name], rank1[name]) for name in alone)  # bit by bit
    for name in alone:
        assert torch.allclose(rank0[name], alone[name], rtol=0, atol=6e-6), name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tokens):
    """(the log's folder, what was printed) of two ranks with batch 2, started by one torchrun."""
    folder = tmp_path_factory.mktemp("two")
    run = run_command(*TWO_RANKS, RANK, folder, "ddp", *flags(tokens, folder, B=2))
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


def test_two_ranks_equal_one_process(one_process, two_ranks):
    folder, printed = two_ranks
    assert_same_training(folder, one_process)
    log = (folder / "ddp_run.log").read_text()
    assert "# ranks: 2\n" in log
    assert printed.count("step : 1 |") == 1  # rank 0 alone speaks; the other has a log of its own
    assert losses(folder / "rank_1" / "ddp_run.log") == losses(folder / "ddp_run.log")
    for step in read_steps(folder / "ddp_run.log"):
        assert step["tokens_per_second"] == pytest.approx(2 * 2 * 32 / (step["ms"] / 1000), rel=1e-3)


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path, tokens):
    """The script itself, compiled and, where the CPU has it, in bfloat16: the losses agree to its 0.2 %."""
    script = ROOT / "ddp_run.py"
    run = run_command(
        *TWO_RANKS, script, *flags(tokens, tmp_path / "two", B=2, compile_mode="default"), "--save", tmp_path / "ddp.pt"
    )
    assert run.returncode == 0, run.stderr
    assert "# compile: default" in run.stdout
    alone = run_command(sys.executable, script, *flags(tokens, tmp_path / "one", B=4))
    assert alone.returncode == 0, alone.stderr
    assert "# ranks: 1\n" in alone.stdout
    expected = losses(tmp_path / "one" / "ddp_run.log")
    assert losses(tmp_path / "two" / "ddp_run.log") == pytest.approx(expected, abs=0.02)
    saved = torch.load(tmp_path / "ddp.pt", weights_only=True)
    assert saved["script"] == "ddp_run.py" and "transformer.wte.weight" in saved["model"]


def run_two_agents(*command):
    """What two torchrun agents print that meet on loopback, one rank each, as two machines would be started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agents = []
    for _ in range(2):
        words = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-id=test",
                 f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", *command]
        agents.append(subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE, text=True, cwd=ROOT))
    printed = []
    for agent in agents:
        output, errors = agent.communicate(timeout=300)
        assert agent.returncode == 0, errors
        printed.append(output)
    return "".join(printed)


@pytest.mark.slow
def test_two_machines(one_process, two_ranks, tmp_path, tokens):
    """The losses of one agent with two ranks, digit for digit."""
    run_two_agents(RANK, tmp_path, "ddp", *flags(tokens, tmp_path, B=2))
    assert_same_training(tmp_path, one_process)
    assert losses(tmp_path / "ddp_run.log") == losses(two_ranks[0] / "ddp_run.log")


@pytest.mark.slow
def test_network_between_two_machines():
    """experiments/network.py: the columns agree with each other, and with 4 bytes for each of GPT-2's parameters."""
    lines = [line.split() for line in run_two_agents("-m", "experiments.network", 1, 4).splitlines()]
    assert lines[0] == "2 ranks on 2 machines, gloo".split()
    table, models = lines[2:4], {line[0]: [float(word) for word in line[1:]] for line in lines[5:]}
    for size, (megabytes, ms, rate, link) in zip((1, 4), (map(float, line) for line in table), strict=True):
        assert megabytes == size and ms > 0
        assert rate == pytest.approx(megabytes / ms, rel=0.02, abs=0.001)
        assert link == rate  # in a ring of two each sends the buffer once
    assert models["gpt2"] == pytest.approx([4 * 124_475_904 / 1e6, 497.9 / 1000 / float(table[1][2])], rel=0.02)
    assert list(models) == ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]


@pytest.mark.parametrize("dying", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_dying_rank_ends_the_job(dying, tmp_path, tokens):
    started = time.monotonic()
    run = run_command(*TWO_RANKS, RANK, tmp_path, "ddp", *flags(tokens, tmp_path, B=2, steps=100_000),
                      DIE_RANK=dying, DIE_BATCH="3", timeout=120)
    assert run.returncode != 0
    assert time.monotonic() - started < 90
    assert "SIGKILL" in run.stderr or "Signal 9" in run.stderr


@pytest.mark.parametrize("device, gpus, reason", [
    ("mps", 0, "--device mps: torch has no DDP for Apple GPUs; use --device cpu"),
    ("cuda", 1, "--nproc_per_node: more processes than GPUs; use 1"),
])
def test_what_cannot_work_under_torchrun_is_refused(device, gpus, reason, monkeypatch):
    """As the second process of two; and without torchrun it is not."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    module, settings = rung("ddp"), SimpleNamespace(device=device)
    assert module.init_ranks(settings) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match=f"^error: {reason}$"):
        module.init_ranks(settings)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_no_cuda_graphs(mode, capsys):
    """They do not take tied weights under DDP, and from rung 11 on they would overwrite gradients that accumulate."""
    assert rung(10).parse_settings(["--compile-mode", mode]).compile_mode == mode
    for label in ("ddp", "11", "31", "dcp"):
        with pytest.raises(SystemExit):
            rung(label).parse_settings(["--compile-mode", mode])
        assert f"argument --compile-mode: invalid choice: '{mode}'" in capsys.readouterr().err


@pytest.mark.parametrize("device, nccl, expected", [
    ("cuda", True, [1, "nccl"]), ("cuda", False, [1, "gloo"]), ("cpu", True, ["gloo"])])
def test_the_backend_the_gpu_and_the_files_of_a_rank(device, nccl, expected, monkeypatch, tmp_path):
    """On the second machine of two; torch for Windows has no NCCL."""
    module, calls = rung("ddp"), []
    for name, value in {"RANK": "9", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(module.dist, "init_process_group", lambda backend: calls.append(backend))
    monkeypatch.setattr(module.dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # as it was, in the end
    settings = SimpleNamespace(device=device, log_dir=tmp_path, save=tmp_path / "model.pt")
    assert module.init_ranks(settings) == (9, 16)
    assert calls == expected and (settings.log_dir, settings.save) == (tmp_path / "rank_9", None)


@pytest.mark.slow
def test_a_bad_value_ends_all_ranks_with_its_line(tmp_path, tokens):
    run = run_command(*TWO_RANKS, ROOT / "ddp_run.py", *flags(tokens, tmp_path, B=1_000_000), timeout=120)
    assert run.returncode != 0
    assert "error: " in run.stderr and "needs 32000001" in run.stderr


def test_both_ranks_wait_for_the_data(tmp_path):
    """Nothing prepared: one of them prepares, the other waits."""
    (tmp_path / "data").mkdir()
    for script in (ROOT / "data").glob("*.py"):
        shutil.copy(script, tmp_path / "data")
    no_network = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    run = run_command(
        *TWO_RANKS, ROOT / "ddp_run.py", "--model", "tiny", "--device", "cpu", "-T", 32, "--steps", 2,
        "--compile-mode", "none", cwd=tmp_path, TIKTOKEN_CACHE_DIR=os.fspath(tmp_path), **no_network,
    )
    assert run.returncode == 0, run.stderr
    assert len(losses(tmp_path / "logs" / "ddp_run.log")) == 2
