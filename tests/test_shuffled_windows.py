"""Rung 26: the windows of each epoch, in an order that is a function of the seed and the epoch's number."""
import sys

import numpy as np
import pytest
import torch
from conftest import run_command, rung, train
from test_beyond import beyond_flags, losses, tokens_of
from test_ddp import RANK, TWO_RANKS

SHUFFLED = "26"
T, N = 8, 1003  # the tokens of `numbers` are their own places in the file
N_WINDOWS = (N - 1) // T - 1


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return tokens_of(tmp_path_factory.mktemp("data") / "numbers", range(N))


def windows(loader, first, n):
    """The windows `first` to `first + n` of the run, (n, T), from batches that hold them and perhaps more."""
    batches = range(first // loader.B, -(-(first + n) // loader.B))
    x = torch.cat([loader.batch(i)[0] for i in batches])
    return x[first % loader.B :][:n]


def loader_of(folder, B=4, seed=1337, **more):
    return rung(SHUFFLED).DataLoaderLite(folder, B, T, "cpu", seed=seed, **more)


@pytest.mark.parametrize("way", ["mapped", "on the device", "pinned"])
def test_26_targets_follow_their_inputs_on_every_path(way, numbers, monkeypatch):
    """In more than two epochs of batches that do not divide an epoch."""
    module, pinned, device = rung(SHUFFLED), [], "cpu"
    module.free_memory = lambda device: 1e12 if way == "on the device" else 0
    if way == "pinned":  # what a GPU would do, as far as a CPU can
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self)
        device = "cuda"
    loader, mapped = module.DataLoaderLite(numbers, 5, T, device, seed=1337), loader_of(numbers, B=5)
    assert loader.on_device == (way == "on the device") and not mapped.on_device
    for i in range(2 * loader.n_batches + 2):
        x, y = loader.batch(i)
        assert x.shape == y.shape == (5, T) and x.dtype == y.dtype == torch.int64
        assert x.is_contiguous() and y.is_contiguous()  # the model views them as (B*T,)
        assert torch.equal(x - x[:, :1], torch.arange(T).expand(5, T)) and torch.equal(y, x + 1)
        assert torch.equal(x, mapped.batch(i)[0])
    assert way != "pinned" or len(pinned) == 2 * loader.n_batches + 2


def test_26_every_epoch_has_every_window_once_in_its_own_order(numbers):
    loader = loader_of(numbers)
    assert (loader.n_windows, loader.n_batches) == (N_WINDOWS, -(-N_WINDOWS // 4))
    orders, offsets = [], []
    for epoch in range(20):
        starts = windows(loader, epoch * N_WINDOWS, N_WINDOWS)[:, 0]
        offset = starts.min()
        assert torch.equal(starts.sort().values, offset + T * torch.arange(N_WINDOWS))
        orders.append(tuple((starts - offset).tolist()))
        offsets.append(offset.item())
    assert len(set(orders)) == 20 and tuple(sorted(orders[0])) not in orders
    assert len({offset % T for offset in offsets}) > T // 2  # the borders between windows move
    assert min(offsets) >= 0 and max(offsets) + N_WINDOWS * T < N  # and the last target is in the file


def test_26_each_token_is_reached():
    """The first and the last ones, too, in one epoch or another: an offset can be zero, or the largest that fits."""
    loader = object.__new__(rung(SHUFFLED).DataLoaderLite)
    for n_tokens in (T + 1, 2 * T, 2 * T + 1, 3 * T, 3 * T + 1, N):
        loader.T, loader.seed, loader.epoch, loader.tokens = T, 0, None, range(n_tokens)
        loader.n_windows = max(1, (n_tokens - 1) // T - 1)
        firsts = {min(loader.start(epoch * loader.n_windows), *loader.starts) for epoch in range(300)}
        assert firsts == set(range(n_tokens - loader.n_windows * T))


@pytest.mark.parametrize("n_tokens, B, n_windows, n_batches", [
    (T + 1, 1, 1, 1), (2 * T, 1, 1, 1), (2 * T + 1, 2, 1, 1), (3 * T + 1, 1, 2, 2), (4 * T + 1, 4, 3, 1)])
def test_26_the_smallest_files(n_tokens, B, n_windows, n_batches, tmp_path):
    """What was enough for a batch still is: a batch may hold windows of more than one epoch."""
    loader = loader_of(tokens_of(tmp_path / "tokens", range(n_tokens)), B)
    assert (loader.n_windows, loader.n_batches) == (n_windows, n_batches)
    for i in range(20):
        x, y = loader.batch(i)
        assert x.shape == (B, T) and torch.equal(y, x + 1) and y.max() < n_tokens


def test_26_the_order_is_the_seeds(numbers):
    first, same, other = (windows(loader_of(numbers, seed=seed), 0, 3 * N_WINDOWS) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    for epoch in range(3):
        part = slice(epoch * N_WINDOWS, (epoch + 1) * N_WINDOWS)
        assert not torch.equal(first[part], other[part])
    assert windows(loader_of(numbers, seed=2**63 - 1), 0, 1).shape == (1, T)  # the largest that --seed takes


@pytest.mark.parametrize("B", [1, 3, 5, N_WINDOWS, 2 * N_WINDOWS + 1])
def test_26_the_same_windows_whatever_the_batch_and_the_moment(B, tmp_path, numbers):
    """In order, and backwards: a batch does not depend on those before it."""
    text = tokens_of(tmp_path / "long", np.resize(np.arange(N), 3 * N)) if B > N_WINDOWS else numbers
    expected = windows(loader_of(text), 0, 3 * N_WINDOWS)
    assert torch.equal(windows(loader_of(text, B), 0, 3 * N_WINDOWS), expected)
    loader, n = loader_of(text, B), 3 * N_WINDOWS // B
    backwards = [loader.batch(i)[0] for i in reversed(range(n))]
    assert torch.equal(torch.cat(backwards[::-1]), expected[: n * B])


def test_26_ranks_and_micro_steps_share_one_order(numbers):
    """With the index that `train` computes; in an epoch no two ranks see the same window."""
    world_size, micro_steps, B = 3, 2, 2
    expected = windows(loader_of(numbers, 1), 0, 40 * world_size * micro_steps * B)
    loaders = [loader_of(numbers, B) for _ in range(world_size)]
    found = torch.cat([loader.batch(i * world_size + rank)[0]
                       for i in range(40 * micro_steps) for rank, loader in enumerate(loaders)])
    assert torch.equal(found, expected) and len(set(found[:N_WINDOWS, 0].tolist())) == N_WINDOWS


@pytest.mark.parametrize("free", [0, 1e12])
def test_26_validation_is_in_the_order_of_the_file(free, tmp_path):
    """All of it, with the batches of rung 24."""
    folder = tokens_of(tmp_path / "tokens", range(100), range(1000, 1090))
    loaders = []
    for label in ("24", SHUFFLED):
        module = rung(label)
        module.free_memory = lambda device: free
        loaders.append(module.DataLoaderLite(folder, 1, T, "cpu", "val"))
    assert loaders[0].n_batches == loaders[1].n_batches == 11
    for i in range(25):
        assert all(map(torch.equal, loaders[0].batch(i), loaders[1].batch(i)))


def recorded(folder, text, B, n_steps, *flags):
    """(The windows that a run trained on, its losses, its weights); 4 windows a step, and no decay."""
    folder.mkdir(exist_ok=True)
    module, seen = rung(SHUFFLED), []
    forward = module.GPT.forward

    def recording_forward(self, idx, targets):
        if self.training:
            seen.append(idx.clone())
        return forward(self, idx, targets)

    module.GPT.forward = recording_forward
    module.autocast_dtype = lambda device: torch.float32
    log = train(module, folder, text, "-B", B, "-T", T, "--total-batch", 4 * T, "--steps", n_steps, "--val-every", 0,
                "--checkpoint-every", 2, "--decay-share", 0, "--save", folder / "model.pt", *flags)
    return torch.cat(seen), losses(log), torch.load(folder / "model.pt", weights_only=True)["model"]


def test_26_a_run_is_the_same_whatever_its_micro_steps_and_when_it_stopped(tmp_path):
    """Four steps of 4 windows in a text of 7: more than two epochs, stopped in the second and resumed."""
    text = tokens_of(tmp_path / "tokens", range(8 * T + 3))
    windows_seen, truth, weights = recorded(tmp_path / "whole", text, 2, 4)
    assert torch.equal(windows_seen, windows(loader_of(text), 0, 16))
    assert torch.equal(recorded(tmp_path / "one_micro_step", text, 4, 4)[0], windows_seen)

    recorded(tmp_path / "stopped", text, 2, 2)
    rest, found, resumed_weights = recorded(tmp_path / "stopped", text, 2, 4, "--resume")
    assert torch.equal(rest, windows_seen[8:]) and found == truth
    assert all(torch.equal(resumed_weights[name], weights[name]) for name in weights)


@pytest.mark.slow
def test_26_two_ranks_equal_one_process(tmp_path, tokens):
    """Across the borders of epochs of 7 windows; float32."""
    text = tokens_of(tmp_path / "tokens", np.fromfile(tokens / "train.bin", dtype="<u2")[: 8 * 32 + 3])
    more = ("--steps", 5, "--val-every", 0, "--checkpoint-every", 0)
    logs = []
    for name, start, B in (("two", TWO_RANKS, 2), ("one", [sys.executable], 4)):
        folder = tmp_path / name
        run = run_command(*start, RANK, tmp_path, SHUFFLED, *beyond_flags(text, folder, B, *more),
                          "--checkpoint-dir", folder / "checkpoints")
        assert run.returncode == 0, run.stderr
        logs.append(losses(folder / "rung_26_shuffled_windows.log"))
    assert len(logs[0]) == 5 and logs[0] == pytest.approx(logs[1], abs=1e-4)
