"""dropout and documents_apart, for a small text; for shuffled_windows and best_checkpoint see their own files."""

import numpy as np
import pytest
import torch
from load_script import rung, rungs_that_change
from log_files import losses, val_losses
from run_script import train
from token_folders import tokens_of

VOCAB_SIZE, END = 1000, 999  # few, so that tests are quick
SHORT = ("-B", 1, "-T", 16, "--steps", 4, "--val-every", 0)


def lively(module, dropout=0.0):
    """A tiny model in training whose residual branches are not zero, as they are at first from `zero_init` on."""
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=VOCAB_SIZE), dropout)
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def built_by(module):
    """The models that a script builds from now on."""
    built, new_model = [], module.new_model
    module.new_model = lambda *args, **options: built.append(new_model(*args, **options)) or built[-1]
    return built


@torch.no_grad()
def test_dropout_where_and_how_much():
    """After the embedding and at the end of each branch, a share of the entries is zero and the others are scaled."""
    model, ends, dropped = lively(rung("dropout"), dropout=0.25), [], []
    for end in (model.transformer.wte, *(end for block in model.transformer.h for end in (block.attn, block.mlp))):
        end.register_forward_hook(lambda part, inputs, output: ends.append(output))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.register_forward_hook(lambda part, inputs, output: dropped.append((inputs[0], output)))
    model(torch.randint(VOCAB_SIZE, (4, 128)))
    for end, (x, output) in zip(ends, dropped, strict=True):
        kept = output != 0
        assert x is end and torch.allclose(output[kept], x[kept] / 0.75)
        assert kept.float().mean() == pytest.approx(0.75, abs=0.01)  # of 32,768 entries: 4 standard deviations
    assert len(ends) == 5


@pytest.mark.parametrize("label", rungs_that_change("train", since="dropout"))
@pytest.mark.parametrize("p", [0.1, 0.3])
def test_dropout_the_flag_reaches_every_block_and_the_embedding(p, label, byte_tokens, tmp_path):
    module = rung(label)
    built = built_by(module)
    train(module, tmp_path, byte_tokens, *SHORT, "--model", "3x2x64", *([] if p == 0.1 else ["--dropout", p]))
    assert [part.p for part in built[0].modules() if isinstance(part, torch.nn.Dropout)] == [p] * (1 + 3)


def masks(folder, data, *flags):
    """What a run drops after the embedding, batch by batch, as bytes, also after a validation."""
    module, seen = rung("dropout"), []
    new_model = module.new_model

    def look(part, inputs, output):
        seen.extend([(output == 0).numpy().tobytes()] if part.training else [])

    def hooked_model(*args, **options):
        model = new_model(*args, **options)
        model.dropout.register_forward_hook(look)
        return model

    module.new_model = hooked_model
    train(module, folder, data, *SHORT, "--val-every", 1, "--val-sequences", 2, *flags)
    return seen


def test_dropout_masks_are_new_in_each_step_and_those_of_the_seed(tmp_path, byte_tokens):
    """A run that is repeated drops the same, however often it validates."""
    first = masks(tmp_path / "first", byte_tokens)
    assert len(first) == len(set(first)) == 4
    assert masks(tmp_path / "again", byte_tokens, "--val-every", 0) == first
    assert masks(tmp_path / "seed", byte_tokens, "--seed", 7)[0] not in first


ROWS = [(40, 1, 70, 89), (199, 1)]  # lengths of documents; the first of the first row has lost its beginning


def documents():
    """(inputs, targets) of two sequences of several documents, (2, 200) each, and where each document is in them."""
    ids = torch.randint(END, (2, 201), generator=torch.Generator().manual_seed(1))
    places = []  # (row, first token, the one after the last)
    for row, lengths in enumerate(ROWS):
        for length in lengths:
            start = sum(stop - first for r, first, stop in places if r == row)
            ids[row, start] = END if places else ids[row, start]
            places.append((row, start, start + length))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), places


def test_documents_apart_as_documents_run_one_by_one():
    """Against `dropout`'s attention on each document alone, from position 0."""
    model, (x, _, places) = lively(rung("documents_apart")), documents()
    model.end_of_text = END
    logits = model(x).detach()
    model.end_of_text, atol = None, 1e-4 * logits.abs().max()
    for row, start, stop in places:
        assert torch.allclose(model(x[row : row + 1, start:stop])[0], logits[row, start:stop], rtol=0, atol=atol)
    assert (model(x) - logits).norm() > 0.1 * logits.norm()  # attention across documents is something else


@pytest.mark.parametrize("meta, expected", [
    ({"documents": 200, "end_of_text": 7}, 7), ({"documents": 1, "end_of_text": 256}, None)])
def test_documents_apart_the_token_is_that_of_the_data(meta, expected, tmp_path):
    """A single document is trained on as in the rung before, bit by bit; several are not, from the first step on."""
    ids = np.random.default_rng(0).integers(10, 256, size=4000)
    ids[::20] = expected or 256
    data = tokens_of(tmp_path / "data", ids, ids[:400], vocab_size=257, **meta)
    module = rung("documents_apart")
    built = built_by(module)
    flags = ("-B", 2, "-T", 64, "--steps", 3, "--val-every", 3, "--val-sequences", 1)
    log, log_before = (train(each, tmp_path / each.__name__, data, *flags) for each in (module, rung("dropout")))
    assert built[0].end_of_text == expected
    assert (losses(log) == losses(log_before)) == (expected is None)
    assert (val_losses(log) == val_losses(log_before)) == (expected is None) and len(val_losses(log)) == 1
