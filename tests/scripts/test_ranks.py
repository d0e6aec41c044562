"""DDP, from ddp_run.py on: ranks together compute what one process computes, stop together, and come back."""
import json
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from load_script import ROOT, builds_on, known_flags, new_gpt, rung, rungs_that_change
from log_files import assert_same_losses, losses, read_steps, val_losses
from ranks import GROUP_OF_ONE, on_ranks, write_runs
from run_script import run_command, train, train_in_float32
from saved_models import assert_same_weights
from tensor_bytes import Watch

from ladder.rungs.list import BY_LABEL

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FIRST = "gradient_accumulation"
# Everything of which ranks could disagree; ddp is in test_exercises.py, fsdp in test_fsdp.py.
LABELS = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW", "init_ranks", since=FIRST)
          if not builds_on(label, "fsdp")]
TOTAL = {"total_batch": 256, "val_every": 3, "val_sequences": 5, "checkpoint_every": 0}


def six_steps(label, B):
    """Six steps, if possible of 256 tokens, and 5 sequences of validation, which 2 ranks cannot share."""
    return ["-B", B, "-T", 32, "--steps", 6, *known_flags(rung(label), **TOTAL)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, byte_tokens):
    """The folder of runs of two ranks, one for each label, in float32; and what was printed."""
    folder = tmp_path_factory.mktemp("two")
    runs = {label: (label, "float32", [*six_steps(label, 2), "--save", folder / f"{label}.pt"]) for label in LABELS}
    runs |= {f"saved {label}": (label, "float32", [*six_steps(label, 2), "--checkpoint-every", 3])
             for label in ("long_run", "sharded_optimizer")}
    runs["compiled"] = ("long_run", "float32", [*six_steps("long_run", 2), "--compile-mode", "default", "--save",
                                                folder / "compiled.pt"])
    printed = on_ranks(2, folder, byte_tokens, runs)
    assert [text.count("step : 1 |") for text in printed] == [len(runs), 0]  # only rank 0 speaks
    return folder


def assert_equal_ranks(folder):
    """That both ranks have ended with the same weights, bit by bit."""
    digests = [json.loads((folder / f"rank{rank}.json").read_text())["digest"] for rank in (0, 1)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("label", LABELS)
def test_two_ranks_equal_one_process(label, two_ranks, tmp_path, byte_tokens):
    """With as many tokens in a step, in one micro-step.

    Float32 sums in another order: weights agree to a few percent of one step's length.
    """
    alone = train_in_float32(label, tmp_path, byte_tokens, *six_steps(label, 8), "--save", tmp_path / "alone.pt")
    log = two_ranks / label / alone.name
    assert_same_losses(log, alone)
    assert len(losses(log)) == 6 and "# ranks: 2\n" in log.read_text()
    assert list(val_losses(log)) == ([3, 6] if builds_on(label, "distributed_validation") else [])
    assert_same_weights(two_ranks / f"{label}.pt", tmp_path / "alone.pt", atol=3e-5)
    assert_equal_ranks(two_ranks / label)
    # if a second rank also wrote, it would set those of the first aside
    assert not list(two_ranks.glob(f"{label}.pt.*")) and not list(log.parent.glob("*.log.*"))
    for step in read_steps(log):
        assert step["tokens_per_second"] == pytest.approx(256 / (step["ms"] / 1000), rel=5e-3)  # ms has two digits


@pytest.mark.parametrize("label", rungs_that_change("train", since="ddp"))
def test_what_a_step_sends_and_keeps(label, tmp_path, byte_tokens, group_of_one, monkeypatch):
    """Of two micro-steps: gradients cross the ranks in the last one, buffers never, and no loss keeps its graph.

    Buffers are the same on all ranks, as RoPE's tables; DDP would send them in each step.
    """
    module, sent, graphs, item = rung(label), [], [], torch.Tensor.item

    class WatchedDDP(getattr(module, "DDP", object)):
        def forward(self, *args):
            sent.append((self.require_backward_grad_sync, self.will_sync_module_buffers()))
            assert label == "ddp" or self.gradient_as_bucket_view  # or each gradient would be there twice
            return super().forward(*args)

    class GPT(module.GPT):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.register_buffer("table", torch.ones(1), persistent=False)

    if hasattr(module, "DDP"):
        module.DDP, module.GPT = WatchedDDP, GPT
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: graphs.append(tensor.grad_fn) or item(tensor))
    train(module, tmp_path, byte_tokens, "-B", 1, "-T", 16, "--steps", 2,
          *known_flags(module, total_batch=32, val_every=0, checkpoint_every=0))
    micro_steps = [(True, False)] if label == "ddp" else [(False, False), (True, False)]
    assert sent == (2 * micro_steps if hasattr(module, "DDP") else [])
    assert label == "ddp" or graphs and {*graphs} == {None}


@pytest.mark.parametrize("label", rungs_that_change("train", "optimizer_step", "DataLoaderLite", since="ddp"))
def test_a_rank_of_eight_fetches_each_of_its_batches_once_and_keeps_none(label, tmp_path, byte_tokens):
    """Rank 5, in three steps of two micro-steps; from `prefetch` on the one after the last is there already."""
    module, fetched, loaders = rung(label), [], set()
    batch = module.DataLoaderLite.batch

    def watched_batch(loader, i):
        loaders.add(loader)
        if i not in getattr(loader, "prefetched", ()):
            fetched.append(i)
        return batch(loader, i)

    module.DataLoaderLite.batch, module.init_ranks = watched_batch, lambda device: (5, 8)
    flags = known_flags(module, B=1, T=8, steps=3, total_batch=128, val_every=0, checkpoint_every=0)
    train(module, tmp_path, byte_tokens, *flags)
    if label == "ddp":  # no micro-steps yet
        assert fetched == [5, 13, 21]
    else:
        assert fetched == [5, 13, 21, 29, 37, 45] + [53] * builds_on(label, "prefetch")
    assert sum(len(getattr(loader, "prefetched", ())) for loader in loaders) == builds_on(label, "prefetch")


@pytest.mark.parametrize("label", rungs_that_change("train", "Checkpoints", since="preemption"))
def test_a_rank_in_a_group(label, tmp_path, byte_tokens, group_of_one, monkeypatch):
    """The sums over the ranks say that another one has got a signal in the second of four steps: all stop after it.

    FSDP's mixed precision, which casts what a block is given unless it is told not to, leaves RoPE's angles in float32.
    """
    module, angles, sums = rung(label), set(), []
    rotate, all_reduce = getattr(module, "rotate", None), dist.all_reduce

    def watched_rotate(x, cos, sin):
        angles.update({cos.dtype, sin.dtype})
        return rotate(x, cos, sin)

    def all_ranks(tensor, *args, **kwargs):
        all_reduce(tensor, *args, **kwargs)
        if tensor.dtype == torch.int64:  # not the loss: on how many ranks there was a signal
            sums.append(tensor)
            tensor += len(sums) == 2

    module.autocast_dtype = lambda device: torch.bfloat16
    if builds_on(label, "rope"):
        module.rotate = watched_rotate
    monkeypatch.setattr(dist, "all_reduce", all_ranks)
    log = train(module, tmp_path, byte_tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", 4, "--val-every", 0)
    assert len(losses(log)) == 2 and "# checkpoint: step 2 in " in log.read_text()
    assert angles == ({torch.float32} if builds_on(label, "rope") else set())


INITS = pytest.mark.parametrize("label", rungs_that_change("init_ranks")[1:])


@pytest.fixture
def torchrun(monkeypatch):
    """torchrun(RANK="1", …): the environment that torchrun gives to a process, but for these."""
    def set_environment(**others):
        for name, value in (GROUP_OF_ONE | others).items():
            monkeypatch.setenv(name, value)

    return set_environment


@INITS
@pytest.mark.parametrize("device, nccl, expected", [
    ("cuda", True, [1, "nccl"]), ("cuda", False, [1, "gloo"]), ("cpu", True, ["gloo"])])
def test_the_backend_and_the_gpu_of_a_rank(label, device, nccl, expected, torchrun, monkeypatch):
    """Of rank 9 of all, the second on its machine; torch for Windows has no NCCL."""
    calls = []
    torchrun(RANK="9", LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)
    monkeypatch.setattr(dist, "get_world_size", lambda: 16)
    assert rung(label).init_ranks(device) == (9, 16)
    if label == "sharded_optimizer" and "nccl" in expected:  # its checkpoints gather on the CPU
        expected = [1, "cpu:gloo,cuda:nccl"]
    assert calls == expected


@INITS
@pytest.mark.parametrize("device, gpus, reason", [
    ("mps", 0, "--device mps: .*use --device cpu"),
    ("cuda", 1, "--nproc_per_node: there are 1 GPUs; give at most that number")])
def test_what_cannot_work_under_torchrun_is_refused(label, device, gpus, reason, torchrun, monkeypatch):
    """As the second process of two; and without torchrun it is not."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    module = rung(label)
    assert module.init_ranks(device) == (0, 1)
    torchrun(RANK="1", LOCAL_RANK="1")
    with pytest.raises(SystemExit, match=f"^error: {reason}$"):
        module.init_ranks(device)


@INITS
@pytest.mark.parametrize("missing", ["MASTER_PORT", "LOCAL_RANK", "WORLD_SIZE"])
def test_a_rank_without_the_rest_of_torchruns_environment_is_refused(label, missing, torchrun, monkeypatch):
    """As a container's or a scheduler's: to train alone would say nothing of the ranks that were meant."""
    torchrun()
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit, match="^error: RANK: torchrun.s other variables are missing; "):
        rung(label).init_ranks("cpu")


@pytest.mark.parametrize("label", [label for label in BY_LABEL if not builds_on(label, "ddp")])
def test_torchrun_on_a_script_of_one_process_names_the_one_for_several(label, monkeypatch, tmp_path, byte_tokens):
    monkeypatch.setenv("WORLD_SIZE", "2")
    names = "long_run" if builds_on(label, "validation") else "ddp_run"
    with pytest.raises(SystemExit, match=f"^error: .*torchrun starts {names}.py$"):
        train(rung(label), tmp_path, byte_tokens)


SIX = ["-T", 32, "--total-batch", 128, "--steps", 6, "--checkpoint-every", 2, "--val-every", 0, "--resume"]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["long_run", "sharded_checkpoint"])
def test_a_killed_rank_comes_back_by_itself(label, tmp_path, byte_tokens):
    """torchrun --max-restarts: rank 1 kills itself in step 4, once; the job ends as one process does undisturbed."""
    alone = train_in_float32(label, tmp_path / "alone", byte_tokens, "-B", 4, *SIX)
    write_runs(tmp_path / "killed", byte_tokens, {"run": (label, "float32", ["-B", 2, *SIX])})
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=1", ROOT / "tests" / "ranks.py"]
    run = run_command(*command, tmp_path / "killed", timeout=200, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
                      DIE_RANK="1", DIE_BATCH="4")
    assert run.returncode == 0, run.stderr
    log = tmp_path / "killed" / "run" / alone.name
    assert (tmp_path / "killed" / "died").exists() and "# resumed after step 2 of 6" in log.read_text()
    assert_same_losses(log, alone)


@pytest.mark.slow
def test_two_machines(byte_tokens, tmp_path):
    """Two torchrun agents that meet on loopback, one rank each: the losses of one process."""
    write_runs(tmp_path, byte_tokens, {"run": (FIRST, "float32", six_steps(FIRST, 2))})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{probe.getsockname()[1]}"
    command = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-id=test", endpoint,
               "--local-addr=127.0.0.1", ROOT / "tests" / "ranks.py", tmp_path]
    agents = [subprocess.Popen(command, cwd=ROOT) for _ in range(2)]
    assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    alone = train_in_float32(FIRST, tmp_path / "alone", byte_tokens, *six_steps(FIRST, 8))
    assert_same_losses(tmp_path / "run" / alone.name, alone)


def test_compiled_as_eagerly(two_ranks):
    """What DDP wraps is one graph, beside the probe."""
    assert json.loads((two_ranks / "compiled" / "rank1.json").read_text())["graphs"] == 2
    assert_same_losses(two_ranks / "compiled" / "long_run.log", two_ranks / "long_run" / "long_run.log")
    assert_same_weights(two_ranks / "compiled.pt", two_ranks / "long_run.pt", atol=3e-5)


def test_sharded_optimizer_each_parameter_is_updated_by_one_rank(two_ranks, tmp_path, byte_tokens):
    """Bit for bit as by both; a checkpoint holds the moments of both, and one process continues from it."""
    checkpoints = [two_ranks / f"saved {label}" / "checkpoints" for label in ("long_run", "sharded_optimizer")]
    whole, shared = (torch.load(folder / "step_0000006.pt") for folder in checkpoints)
    groups = [saved["optimizer"].pop("param_groups") for saved in (shared, whole)]  # with names, which are no numbers
    assert groups[0] == groups[1]
    for name in ("model", "optimizer"):
        torch.testing.assert_close(shared[name], whole[name], rtol=0, atol=0)
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(checkpoints[1] / "step_0000003.pt", tmp_path / "checkpoints")
    words = *six_steps("sharded_optimizer", 8), "--checkpoint-every", 3, "--resume"
    log = train_in_float32("sharded_optimizer", tmp_path, byte_tokens, *words)
    assert losses(log) == pytest.approx(losses(two_ranks / "saved sharded_optimizer" / log.name)[3:], abs=1e-4)


def test_sharded_optimizer_the_moments_are_divided(group_of_one, monkeypatch):
    """By size, the largest first; of a checkpoint that holds all, only its own ever reach a rank's device."""
    module = rung("sharded_optimizer")
    dist.init_process_group("gloo")
    try:
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        with torch.device("meta"):
            model = new_gpt(module)
        optimizer = model.configure_optimizers(lr=1e-3, muon_lr=2e-3, weight_decay=0.1)
        loads = [sum(p.numel() for p, owner in optimizer.owners.items() if owner == rank) for rank in (0, 1)]
        sizes = sorted(p.numel() for p in model.parameters())
        assert sum(loads) == sum(sizes) and max(loads) == max(sizes[-1], sum(sizes) - sizes[-1])
        whole = torch.optim.AdamW.state_dict(optimizer)
        whole["state"] = {i: {"step": torch.zeros(()), "momentum": torch.ones(p.shape)}
                          for i, p in enumerate(optimizer.params)}
        with Watch() as seen:
            optimizer.load_state_dict(whole)
        mine = {p for p, owner in optimizer.owners.items() if owner == 0}
        assert set(optimizer.state) == mine
        assert seen.peak == sum(4 + p.nbytes for p in mine)  # a count of steps and a moment each
    finally:
        dist.destroy_process_group()
