"""Rungs 28 and 29, for a small text: dropout, documents apart. Rung 26 is in test_loader.py, 27 in test_best.py."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import losses, rung, rungs_that_change, tokens_of, train, val_losses
from torch.nn.attention import flex_attention

VOCAB_SIZE, END = 1000, 999  # few, so that tests are quick
SHORT = ("-B", 1, "-T", 16, "--steps", 4, "--val-every", 0)


def lively(module, dropout=0.0):
    """A tiny model in training whose residual branches are not zero, as they are at first from rung 24 on."""
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(n_layer=2, n_head=2, n_embd=64, vocab_size=VOCAB_SIZE))
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.1)
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = dropout
    return model


@torch.no_grad()
def test_28_where_and_how_much():
    """After the embedding and at the end of each branch, a share of the entries is zero and the others are scaled."""
    model, ends, dropped = lively(rung("28"), dropout=0.25), [], []
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


@pytest.mark.parametrize("label", rungs_that_change("build_model", since="28"))
def test_28_the_flag_reaches_every_block_and_the_embedding(label, byte_tokens):
    module = rung(label)
    loader = module.DataLoaderLite(byte_tokens, 1, 16)
    for p in (0.1, 0.3):
        words = ["--model", "3x2x64", "--device", "cpu", *([] if p == 0.1 else ["--dropout", str(p)])]
        model = module.build_model(module.parse_args(words), loader)
        assert [part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)] == [p] * (1 + 3)


def masks(folder, data, *flags):
    """What a run drops after the embedding, batch by batch, as bytes, also after a validation."""
    module, seen = rung("28"), []
    new_model = module.new_model

    def look(part, inputs, output):
        seen.extend([(output == 0).numpy().tobytes()] if part.training else [])

    def hooked_model(*args):
        model = new_model(*args)
        model.dropout.register_forward_hook(look)
        return model

    module.new_model = hooked_model
    train(module, folder, data, *SHORT, "--val-every", 1, "--val-sequences", 2, *flags)
    return seen


def test_28_masks_are_new_in_each_step_and_those_of_the_seed(tmp_path, byte_tokens):
    """A run that is repeated drops the same, however often it validates."""
    first = masks(tmp_path / "first", byte_tokens)
    assert len(first) == len(set(first)) == 4
    assert masks(tmp_path / "again", byte_tokens, "--val-every", 0) == first
    assert masks(tmp_path / "seed", byte_tokens, "--seed", 7)[0] not in first


@pytest.mark.parametrize("dropout", [1.0, -0.1])
def test_28_not_a_probability(dropout, tmp_path, byte_tokens):
    with pytest.raises(SystemExit, match=f"^error: --dropout {dropout}: .*less than 1$"):
        train(rung("28"), tmp_path, byte_tokens, *SHORT, "--dropout", dropout)


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


def test_29_both_masks_are_the_same():
    """The function that FlexAttention's kernel computes, and the blocks that it does not skip, against the mask."""
    module, (x, _, _) = rung("29"), documents()
    document = (x == END).cumsum(1)
    mask, blocks = module.boolean_mask(document), module.block_mask(document)
    assert torch.equal(flex_attention.create_mask(blocks.mask_mod, 2, 1, 200, 200, device="cpu"), mask)
    allowed = torch.nn.functional.max_pool2d(mask.float(), 128, ceil_mode=True)  # (2, 1, 2, 2)
    assert torch.equal(blocks.to_dense(), allowed.int())
    assert allowed[:, 0, 1, 0].tolist() == [1, 1] and allowed[:, 0, 0, 1].tolist() == [0, 0]


def test_29_as_documents_run_one_by_one():
    """Against rung 28's attention on each document alone, from position 0."""
    model, (x, _, places) = lively(rung("29")), documents()
    model.end_of_text = END
    logits = model(x).detach()
    model.end_of_text, atol = None, 1e-4 * logits.abs().max()
    for row, start, stop in places:
        assert torch.allclose(model(x[row : row + 1, start:stop])[0], logits[row, start:stop], rtol=0, atol=atol)
    assert (model(x) - logits).norm() > 0.1 * logits.norm()  # attention across documents is something else


@pytest.mark.parametrize("device, capability, width, flex", [
    ("cuda", (8, 0), 16, True), ("cuda", (9, 0), 128, True), ("cuda", (8, 0), 8, False), ("cuda", (8, 0), 256, False),
    ("cuda", (7, 5), 64, False), ("cpu", (8, 0), 64, False)])
def test_29_where_flex_attention_has_a_fast_kernel(device, capability, width, flex, monkeypatch):
    """Before Ampere it computes without tensor cores; not every GPU has a kernel for narrow or wide heads."""
    module = rung("29")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    model = module.GPT(module.GPTConfig(n_layer=1, n_head=2, n_embd=2 * width, vocab_size=VOCAB_SIZE))
    monkeypatch.setattr(model, "to", lambda device: model)
    module.new_model = lambda args, loader: model
    loader = SimpleNamespace(meta={"documents": 2, "end_of_text": END})
    assert module.build_model(module.parse_args(["--device", "cpu"]), loader).use_flex_attention is False
    args = module.parse_args([])
    args.device = device
    assert module.build_model(args, loader).use_flex_attention is flex


@pytest.mark.parametrize("compiling", [True, False])
def test_29_flex_attention_only_where_it_is_compiled(compiling, monkeypatch):
    """Eagerly, as in evaluate(), it would compute all scores."""
    module, asked = rung("29"), []
    module.block_mask = lambda document: asked.append("block")
    module.boolean_mask = lambda document: asked.append("boolean")
    model = lively(module)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    model.end_of_text, model.use_flex_attention = END, True
    model(torch.zeros(1, 8, dtype=torch.long))
    assert asked == ["block" if compiling else "boolean"]


@pytest.mark.parametrize("meta, expected", [
    ({"documents": 200, "end_of_text": 7}, 7), ({"documents": 1, "end_of_text": 256}, None)])
def test_29_the_token_is_that_of_the_data(meta, expected, tmp_path):
    """A single document is trained on as in the rung before, bit by bit; several are not, from the first step on."""
    ids = np.random.default_rng(0).integers(10, 256, size=4000)
    ids[::20] = expected or 256
    data = tokens_of(tmp_path / "data", ids, ids[:400], vocab_size=257, **meta)
    module, built = rung("29"), []
    module.new_model = lambda *args, new_model=module.new_model: built.append(new_model(*args)) or built[-1]
    flags = ("-B", 2, "-T", 64, "--steps", 3, "--val-every", 3, "--val-sequences", 1)
    log, log_before = (train(each, tmp_path / each.__name__, data, *flags) for each in (module, rung("28")))
    assert built[0].end_of_text == expected
    assert (losses(log) == losses(log_before)) == (expected is None)
    assert (val_losses(log) == val_losses(log_before)) == (expected is None) and len(val_losses(log)) == 1
