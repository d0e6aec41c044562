"""The loader: the i-th batch is the i-th B*T tokens of the file, for every rank and split, up to rung 26.

test_shuffled_windows.py looks at the order from there on.
"""
import numpy as np
import pytest
import torch
from conftest import make_tokens, rung

from ladder.scripts.stages import BY_LABEL

FROM_12 = list(BY_LABEL)[list(BY_LABEL).index("12") :]  # these loaders know their device and split
B, T = 4, 1000


def shuffles(label):
    """Whether the rung is 26, or starts from one that shuffles."""
    return label == "26" or label != "0" and shuffles(BY_LABEL[label].before)


def loader_of(label, folder, B=B, T=T, **more):
    """The loader, and its module."""
    module = rung(label)
    return module.DataLoaderLite(folder, B, T, *(["cpu"] if label in FROM_12 else []), **more), module


def read(folder, split):
    return np.fromfile(folder / f"{split}.bin", dtype="<u2").astype(np.int64)


def check_batches(loader, tokens):
    n_batches = (len(tokens) - 1) // (loader.B * loader.T)
    assert loader.n_batches == n_batches
    for i in (0, 1, n_batches - 1, n_batches, n_batches + 1, 7 * n_batches + 2):
        x, y = loader.batch(i)
        start = i % n_batches * loader.B * loader.T  # after the last whole batch the first one comes again
        end = start + loader.B * loader.T
        assert x.shape == y.shape == (loader.B, loader.T) and x.dtype == y.dtype == torch.int64
        assert (x.flatten().numpy() == tokens[start:end]).all()
        assert (y.flatten().numpy() == tokens[start + 1 : end + 1]).all()


@pytest.mark.parametrize("label", [label for label in BY_LABEL if not shuffles(label)])
def test_batches_are_the_text_in_order(label, tokens):
    """Inputs and targets are neighbours in the file."""
    check_batches(loader_of(label, tokens)[0], read(tokens, "train"))


@pytest.mark.parametrize("label, split", [("12", "train"), *((label, "val") for label in FROM_12[1:])])
def test_the_split_is_read_on_every_path(label, split, tokens, monkeypatch):
    """Also where the file is small enough to be held on the device: val data really is val data there, too."""
    more = {} if label == "12" else {"split": split}  # rung 12 does not validate
    B = 1 if shuffles(label) else 2  # there the last B windows are not left out
    loader, module = loader_of(label, tokens, B, T=100, **more)
    assert not loader.on_device
    check_batches(loader, read(tokens, split))
    monkeypatch.setattr(module, "free_memory", lambda device: 10**12)
    loader = module.DataLoaderLite(tokens, B, 100, "cpu", **more)
    assert loader.on_device
    check_batches(loader, read(tokens, split))


def test_a_batch_does_not_depend_on_the_batches_before(tokens):
    loader, _ = loader_of("0", tokens)
    first = loader.batch(3)[0].clone()
    loader.batch(0)[0].zero_()  # nor can its reader damage the file
    assert torch.equal(loader.batch(3)[0], first)


def test_all_tokens_of_a_file_that_is_one_batch_are_used(tmp_path):
    folder = make_tokens(tmp_path / "tokens", "x" * 18 + "y" * 2)  # 18 to train on
    loader, module = loader_of("0", folder, B=1, T=17)
    assert loader.n_batches == 1 and loader.batch(0)[0].shape == loader.batch(5)[1].shape == (1, 17)
    with pytest.raises(SystemExit, match="18 train tokens, a batch needs 19; lower -B or -T"):
        module.DataLoaderLite(folder, 1, 18)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_the_batches_of_one_process(world_size, tokens):
    """With the index that `train` of ddp_run.py computes: test_ddp.py shows that it does."""
    one, module = loader_of("ddp", tokens, B=2 * world_size)
    ranks = [module.DataLoaderLite(tokens, 2, T) for _ in range(world_size)]
    for step in range(one.n_batches):
        together = [loader.batch(step * world_size + rank) for rank, loader in enumerate(ranks)]
        x, y = one.batch(step)
        assert torch.equal(torch.cat([x for x, _ in together]), x)
        assert torch.equal(torch.cat([y for _, y in together]), y)


@pytest.mark.parametrize("label", BY_LABEL)
def test_train_takes_one_batch_after_the_other(label, short_run):
    """From rung 12 on one more is fetched while the device works: after the last one in vain."""
    trained_on = [i for n_sequences, i in short_run(label).batches if n_sequences == 2]  # validation has one at a time
    assert trained_on == list(range(5 + (label in FROM_12)))
