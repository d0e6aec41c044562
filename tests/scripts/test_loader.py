"""The loader: the i-th batch is the i-th B*T tokens of the file; from shuffled_windows on, windows in random order."""
import numpy as np
import pytest
import torch
from load_script import builds_on, rung, rungs_that_change
from run_script import train
from token_folders import tokens_of

LOADERS = [label for label in rungs_that_change("DataLoaderLite") if label != "shuffled_windows"]
N = 1003  # the tokens of `numbers` are their own places in the file
WAYS = ["mapped", "pinned"]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A text whose tokens are their own places in the file, for training, and 50,000 more in val.bin."""
    return tokens_of(tmp_path_factory.mktemp("data") / "numbers", range(N), range(50_000, 50_257))


def loader_of(label, folder, B=4, T=8, way="mapped", **more):
    """The loader of a rung, as it reads the file on one of the two ways to the device."""
    module = rung(label)
    device = ["cuda" if way == "pinned" else "cpu"] if builds_on(label, "prefetch") else []
    return module.DataLoaderLite(folder, B, T, *device, **more)


@pytest.fixture
def copies(monkeypatch):
    """What happens to tensors on the way to a GPU, as far as a CPU can do it."""
    events = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: events.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **more: events.append((args, more)) or self)
    return events


@pytest.mark.parametrize("label, split, way", [
    *((label, "train", way) for label in LOADERS for way in (WAYS if builds_on(label, "prefetch") else WAYS[:1])),
    *((label, "val", way) for label in ("distributed_validation", "validation", "shuffled_windows")
      for way in (WAYS if label == "distributed_validation" else WAYS[:1]))])
def test_batches_are_the_text_in_order(label, split, way, numbers, copies):
    """On every way: val data really is val data there, and ids above 32,767 survive it."""
    loader = loader_of(label, numbers, way=way, **({"split": split} if split == "val" else {}))
    first, n_tokens = (0, N) if split == "train" else (50_000, 257)
    n_batches = (n_tokens - 1) // 32
    assert loader.n_batches == n_batches
    for i in (n_batches - 1, 0, 1, n_batches, 7 * n_batches + 2):  # in any order
        del copies[:]
        x, y = loader.batch(i)
        start = first + i % n_batches * 32  # after the last whole batch the first one comes again
        assert x.dtype == torch.int64 and torch.equal(x, torch.arange(start, start + 32).view(4, 8))
        assert y.dtype == torch.int64 and torch.equal(y, x + 1)
        if way == "pinned":
            assert copies == ["pinned", (("cuda",), {"non_blocking": True})]


@pytest.mark.parametrize("label", LOADERS)
def test_the_last_batch_needs_a_token_after_it(label, tmp_path):
    """35 tokens are two batches of 17 and the target of the last; of 34 the second would lack that."""
    for n_tokens, n_batches in ((18, 1), (34, 1), (35, 2)):
        loader = loader_of(label, tokens_of(tmp_path / str(n_tokens), range(n_tokens)), B=1, T=17)
        assert loader.n_batches == n_batches and loader.batch(n_batches - 1)[1][0, -1] == 17 * n_batches
        assert loader.tokens.mode == "r"  # a corpus that others share may be read-only
    with pytest.raises(SystemExit, match="a batch needs 19 train tokens; there are 18"):
        loader_of(label, tmp_path / "18", B=1, T=18)


class Corpus:
    """8 billion tokens that are their own places in the file, and take no memory."""

    def __len__(self):
        return 2**33

    def __getitem__(self, places):
        return np.arange(places.start, places.stop)


@pytest.mark.parametrize("label", [*LOADERS, "shuffled_windows"])
def test_a_corpus_beyond_2_31_tokens_is_read_to_its_end(label, monkeypatch):
    """Its last batch; of `shuffled_windows`'s windows, which come in any order, 40 of 32,766."""
    module, T = rung(label), 2**18
    module.load_tokens = lambda *_: (Corpus(), {"vocab_size": 2**34})
    loader = module.DataLoaderLite("", 1, T, *(["cpu"] if builds_on(label, "prefetch") else []))
    numbers, n_batches = [loader.n_batches - 1], 2**33 // T - 1
    if label == "shuffled_windows":
        loader = module.DataLoaderLite("", 1, T, seed=1337)
        numbers, n_batches = range(40), n_batches - 1
    starts = [loader.batch(i)[0][0, 0].item() for i in numbers]
    assert loader.n_batches == n_batches and len({start % T for start in starts}) == 1
    assert min(starts) >= 0 and max(starts) > 2**32 and len(set(starts)) == len(numbers)


def test_prefetch_the_next_batch_is_fetched_before_the_wait_for_the_device(tmp_path, byte_tokens, monkeypatch):
    """In steps of four micro-steps."""
    module, events = rung("prefetch"), []
    batch = module.DataLoaderLite.batch
    module.DataLoaderLite.batch = lambda self, i: (i in self.prefetched or events.append(i)) and None or batch(self, i)
    monkeypatch.setattr(torch.cpu, "synchronize", lambda *_: events.append("synchronize"))
    train(module, tmp_path, byte_tokens, "-B", 1, "-T", 32, "--steps", 3)
    assert events == [0, 1, 2, 3, 4, "synchronize", 5, 6, 7, 8, "synchronize", 9, 10, 11, 12, "synchronize"]


# ---- shuffled_windows: the windows of each epoch, in an order that follows from the seed and the epoch's number ----

T = 8
N_WINDOWS = (N - 1) // T - 1


def shuffled(folder, B=4, seed=1337):
    return loader_of("shuffled_windows", folder, B, T, seed=seed)


def windows(loader, n_epochs):
    """The windows of so many epochs, (n_epochs, N_WINDOWS, T)."""
    n = n_epochs * N_WINDOWS
    batches = [loader.batch(i)[0] for i in range(-(-n // loader.B))]
    return torch.cat(batches)[:n].view(n_epochs, N_WINDOWS, T)


def test_shuffled_windows_every_epoch_has_every_window_once_in_its_own_order(numbers):
    loader = shuffled(numbers)
    assert loader.n_batches == -(-N_WINDOWS // 4)
    starts = windows(loader, 20)[:, :, 0]  # (epochs, windows)
    offsets = starts.min(dim=1, keepdim=True).values
    assert torch.equal(starts.sort().values, offsets + T * torch.arange(N_WINDOWS))
    orders = {tuple(order) for order in (starts - offsets).tolist()}
    assert len(orders) == 20 and tuple(range(0, T * N_WINDOWS, T)) not in orders
    assert len(set((offsets % T).flatten().tolist())) > T // 2  # the borders between windows move


@pytest.mark.parametrize("n_tokens, B, n_windows", [
    (T + 1, 1, 1), (2 * T, 1, 1), (2 * T + 1, 2, 1), (3 * T, 1, 1), (3 * T + 1, 1, 2), (4 * T + 1, 4, 3)])
def test_shuffled_windows_each_token_of_the_smallest_files_is_reached(n_tokens, B, n_windows, tmp_path):
    """Over the epochs even the first and the last token. A batch may hold windows of more than one epoch."""
    loader = shuffled(tokens_of(tmp_path / "tokens", range(n_tokens)), B)
    assert loader.n_batches == -(-n_windows // B)
    found = [loader.batch(i) for i in range(300 * n_windows)]
    assert all(torch.equal(y, x + 1) for x, y in found)
    assert min(x.min() for x, _ in found) == 0 and max(y.max() for _, y in found) == n_tokens - 1
    assert len({x[0, 0].item() for x, _ in found}) == n_tokens - T  # all places where a window may start


def test_shuffled_windows_the_order_is_the_seeds(numbers):
    first, same, other = (windows(shuffled(numbers, seed=seed), 3) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    epochs = [{tuple(epoch.flatten().tolist()) for epoch in order} for order in (first, other)]
    assert len(epochs[0]) == 3 and epochs[0].isdisjoint(epochs[1])  # nor is one's second epoch the other's first
    assert shuffled(numbers, seed=2**63 - 1).batch(0)[0].shape == (4, T)  # the largest that --seed takes


@pytest.mark.parametrize("B", [1, 5, N_WINDOWS])
def test_shuffled_windows_the_same_windows_whatever_the_batch_and_the_moment(B, numbers):
    """Backwards: a batch does not depend on those before it. Targets follow their inputs."""
    loader, n = shuffled(numbers, B), 3 * N_WINDOWS // B
    backwards = [loader.batch(i) for i in reversed(range(n))]
    assert torch.equal(torch.cat([x for x, _ in backwards[::-1]]), windows(shuffled(numbers), 3).flatten(0, 1)[: n * B])
    for x, y in backwards:
        assert x.shape == (B, T) and x.dtype == y.dtype == torch.int64 and torch.equal(y, x + 1)
        assert x.is_contiguous() and y.is_contiguous()  # the model views them as (B*T,)
