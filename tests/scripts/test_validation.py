"""distributed_validation, beside its exercise: which sequences, in how much memory, by which rank."""
import numpy as np
import pytest
import torch
from load_script import builds_on, new_gpt, rung, rungs_that_change, validates
from run_script import train
from token_folders import tokens_of

FORWARDS = [label for label in rungs_that_change("evaluate", "GPT.forward") if validates(label)]


def val_loader(module, data, T):
    """The loader of val.bin as `train` makes it."""
    device = ["cpu"] if hasattr(module, "init_ranks") else []
    return module.DataLoaderLite(data, 1, T, *device, split="val")


def mean_loss(module, model, loader, n, autocast, rank=0, ranks=1):
    """What a rung's evaluate() gives: for one of several ranks, or in one process."""
    where = [rank, ranks] if hasattr(module, "init_ranks") else ["cpu"]
    return module.evaluate(model, loader, n, autocast, *where)


@pytest.mark.parametrize("label", FORWARDS)
def test_distributed_validation_validates_on_the_same_sequences_whatever_the_number_of_ranks(label, byte_tokens):
    """One at a time, so that it takes no more memory than a step of training.

    Of 5 three ranks read 2, 2 and 1; FSDP's all 2, since every rank must take part.
    """
    module, shapes, autocast = rung(label), [], torch.autocast("cpu", enabled=False)
    model, loader = new_gpt(module, vocab_size=257), val_loader(module, byte_tokens, 32)
    with torch.no_grad():
        expected = np.mean([model(*loader.batch(i)).item() for i in range(5)])
    model.register_forward_hook(lambda model, inputs, loss: shapes.append(inputs[0].shape))
    assert mean_loss(module, model, loader, 5, autocast) == pytest.approx(expected, abs=1e-5)
    assert shapes == [(1, 32)] * 5 and model.training
    if builds_on(label, "distributed_validation"):
        shares, read = [], []
        for rank in range(3):
            del shapes[:]
            shares.append(mean_loss(module, model, loader, 5, autocast, rank, 3))
            read.append(len(shapes))
        assert sum(shares) == pytest.approx(expected, abs=1e-5)
        assert read == ([2, 2, 2] if builds_on(label, "fsdp") else [2, 2, 1])


@pytest.mark.parametrize("label", ["distributed_validation", "validation"])
def test_distributed_validation_too_little_text_to_validate(label, tmp_path):
    folder = tokens_of(tmp_path / "tokens", range(100), range(10))
    with pytest.raises(SystemExit, match="a batch needs 33 val tokens; there are 10"):
        train(rung(label), tmp_path, folder, "-B", 1, "-T", 32)
    train(rung(label), tmp_path, folder, "-B", 1, "-T", 16, "--steps", 1, "--val-every", 0)
    log = train(rung(label), tmp_path, folder, "-B", 1, "-T", 4, "--steps", 1)
    assert "# validation: every 25 steps on 2 sequences" in log.read_text()  # as many as there are, of 32
