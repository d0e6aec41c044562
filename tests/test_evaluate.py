"""evaluate.py: the numbers of a model on val.bin, against closed forms, the scripts' own and transformers' losses."""
import json
import logging
import math
import os
import re
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT, load_module, rung, tokens_of, train, train_in_float32, val_losses
from torch.nn import functional as F

from data import vocabulary

DOCUMENTS = ["To be, or not to be:\nthat is the question. ", "naïve 日本語 🙂 12345", " ".join(["word"] * 300)]
N_BYTES = len("".join(DOCUMENTS).encode()) - 1  # but for the first
BYTES, BPE = vocabulary.of_bytes(), vocabulary.trained(iter(DOCUMENTS), 300)


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """A fresh evaluate.py, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return load_module(ROOT / "evaluate.py")


def ids_of(tokenizer, documents=DOCUMENTS):
    return np.array([i for text in documents for i in (tokenizer.end_of_text, *tokenizer.encode(text))][1:], "<u2")


def gpt2(tokenizer=BYTES, longest=128, std=0.2, folder=None):
    """A transformers GPT-2 with random weights, saved to a folder; with std=0 all of its logits are 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.vocab_size, n_embd=32, n_layer=2, n_head=2,
                                       n_positions=longest, initializer_range=float(std))).eval()
    if not std:
        model.transformer.wte.weight.data.zero_()
    if folder:
        model.save_pretrained(folder)
        BYTES.to_transformers().save_pretrained(folder)
    return model


@pytest.fixture
def folders(tmp_path):
    """The ids of val.bin in a folder `data`, beside a folder `model` of a model without an opinion, of byte tokens."""
    gpt2(std=0.0, folder=tmp_path / "model")
    tokens_of(tmp_path / "data", ids_of(BYTES), tokenizer=BYTES)
    return ids_of(BYTES)


def result(evaluate, capsys, *flags):
    """(tokens, their name, bytes, T, loss, perplexity, bits per byte) that evaluate.py prints."""
    capsys.readouterr()
    evaluate.main([*map(str, flags), "--data", "data", "--device", "cpu"])
    pattern = (r".* on data/val.bin \(made up\): (\S+) (\S+) tokens, (\S+) bytes, T=(\d+)\n"
               r"loss: (\S+) nats per token \| perplexity: (\S+) \| bits per byte: (\S+)\n")
    tokens, name, *others = re.fullmatch(pattern, capsys.readouterr().out).groups()
    n_bytes, T, *losses = [float(number.replace(",", "")) for number in others]
    return int(tokens.replace(",", "")), name, n_bytes, T, *losses


@pytest.mark.parametrize("tokenizer, T", [(BYTES, 7), (BPE, None)])
def test_all_tokens_alike(tokenizer, T, evaluate, tmp_path, capsys):
    """A model without an opinion: ln V nats for each token but the first; the end of a text counts, but is no byte.

    Whatever tokens the data has, they are the model's."""
    gpt2(std=0.0, folder=tmp_path / "model")
    tokens_of(tmp_path / "data", ids_of(tokenizer), tokenizer=tokenizer)
    n_tokens, name, n_bytes, found_T, loss, perplexity, bits = result(
        evaluate, capsys, "model", *(["-T", T] if T else []))
    assert (n_tokens, name, n_bytes, found_T) == (N_BYTES + 2, "bytes", N_BYTES, T or 128)
    assert loss == pytest.approx(math.log(257), abs=1e-4) and perplexity == pytest.approx(257, abs=0.01)
    assert bits == pytest.approx(math.log2(257) * (N_BYTES + 2) / N_BYTES, abs=1e-4)


@torch.no_grad()
def test_each_token_is_predicted_once_and_from_its_own_sequence(evaluate):
    """The last sequence is shorter, and so is the last batch."""
    T, model, ids = 16, gpt2(), BYTES.encode(" ".join(DOCUMENTS))[:150]
    expected = torch.zeros(T, dtype=torch.float64)
    for start in range(0, 149, T):
        part = torch.from_numpy(ids[start : start + T + 1].astype(np.int64))
        losses = F.cross_entropy(model(part[None, :-1]).logits[0], part[1:], reduction="none")
        expected[: len(losses)] += losses
    total, count = evaluate.losses(model, ids, T, 4)
    assert torch.allclose(total, expected, atol=1e-4)
    assert count.sum() == 149 and count.tolist() == [len(range(i, 149, T)) for i in range(T)]


@pytest.mark.parametrize("label, flags", [("13", []), ("20", []), ("29", ["--documents-apart"])])
def test_the_loss_is_the_script_s_own(label, flags, evaluate, tmp_path, capsys):
    ids = ids_of(BYTES, [f"document {i} " * 3 for i in range(100)])[: 50 * 64 + 1]
    data = tokens_of(tmp_path / "data", ids, tokenizer=BYTES, documents=100)
    log = train_in_float32(label, tmp_path, data, "-B", 2, "-T", 64, "--total-batch", 128, "--steps", 10, "--val-every",
                           10, "--val-sequences", 0, "--max-lr", 0.01, "--save", tmp_path / "model.pt")
    loss = result(evaluate, capsys, "model.pt", "-B", 7, *flags)[4]
    assert loss == pytest.approx(val_losses(log)[10], abs=6e-5)
    if flags:
        assert abs(result(evaluate, capsys, "model.pt")[4] - loss) > 1e-3
    if label == "20":  # transformers has no such model, and the script's own keeps no documents apart
        with pytest.raises(SystemExit, match="^error: --documents-apart: .*; leave it out$"):
            result(evaluate, capsys, "model.pt", "--documents-apart")


def test_the_data_s_own_tokens_stay_as_they_are(evaluate, tmp_path, monkeypatch, capsys):
    """And T is that of the training; those of another tokenizer of the same name do not."""
    data = tokens_of(tmp_path / "data", ids_of(BPE), tokenizer=BPE)
    train(rung("1"), tmp_path, data, "-B", 1, "-T", 8, "--steps", 1, "--save", tmp_path / "model.pt")
    again = []
    monkeypatch.setattr(evaluate, "encode_again", lambda tokens, *_: again.append(len(tokens)) or tokens)
    n_tokens = len(ids_of(BPE))
    assert result(evaluate, capsys, "model.pt")[:4] == (n_tokens - 1, BPE.name, N_BYTES, 8) and not again
    other = json.loads(BPE.json)
    other["pre_tokenizer"]["add_prefix_space"] = True
    (data / "tokenizer.json").write_text(json.dumps(other))
    result(evaluate, capsys, "model.pt")
    assert again == [n_tokens]


def test_other_tokens_of_the_same_text(evaluate):
    """The documents come back whole, whatever their tokens; so a model's bits per byte do not depend on the data's."""
    tokenizers = [BYTES, BPE, vocabulary.of_bytes("gpt2-bytes")]
    tokenizers += [vocabulary.GPT2()] if "TIKTOKEN_CACHE_DIR" in os.environ else []
    for theirs in tokenizers:
        for ours in tokenizers:
            assert evaluate.encode_again(ids_of(theirs), theirs, ours).tolist() == ids_of(ours).tolist()


def test_a_long_text_is_encoded_in_pieces(evaluate, real_text):
    """With the tokens that the whole text has."""
    tokenizer = vocabulary.trained(iter([real_text[:20_000]]), 500)
    ids = tokenizer.encode(real_text)
    assert np.array_equal(evaluate.encode_again(ids, tokenizer, tokenizer), ids)
    assert [len(text) for text in evaluate.PIECE.findall("x" * 40_000)] == [16384, 16384, 7232]


def test_what_is_refused(evaluate, folders, tmp_path, hf_folder):
    """transformers would load any model, and draw the weights that it lacks at random."""
    from transformers import GPT2Config, GPT2Model

    headless = GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=False)
    GPT2Model(headless).save_pretrained(tmp_path / "headless")
    gpt2(SimpleNamespace(vocab_size=100), folder=tmp_path / "small")
    (tmp_path / "text.pt").write_text("not a checkpoint")
    tokens_of(tmp_path / "short", ids_of(BYTES, ["a"]), tokenizer=BYTES)
    tokens_of(tmp_path / "foreign", ids_of(BPE), tokenizer=BYTES)  # which do not have all of these ids
    for words, reason in [
        ("model -T 129", "-T 129: .* 128"), ("model -T 0", "-T 0: .* 1$"), ("model -B -1", "--batch-size -1: .* 1$"),
        ("model --device abacus", "--device abacus: .*--device cpu"),
        ("model --data nowhere", "--data nowhere: .*prepare.py"), ("model --data model", "--data model: .*prepare.py"),
        ("model --data short", "--data short: .*two tokens"), ("model --data foreign", "--data foreign: .*tokens"),
        (str(hf_folder), f"{hf_folder}: .*tokenizer"), ("small", "small: .* 257 tokens, more than the model, 100"),
        ("text.pt", "text.pt: damaged"), ("data", "data: cannot be loaded"),
        ("headless", "headless: .*lacks weights"),
    ]:
        with pytest.raises(SystemExit, match=f"^error: {reason}") as stop:
            evaluate.main(["--data", "data", "--device", "cpu", *words.split()])
        assert re.fullmatch("error: .+: .+; .+", stop.value.code)


def test_as_a_program(evaluate, folders, monkeypatch, capsys):
    """Also where the device does not suit."""
    def program():
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")

    monkeypatch.setattr(sys, "argv", ["evaluate.py", "model", "--data", "data", "--device", "cpu"])
    program()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"model on data/val.bin (made up): {len(folders) - 1:,} bytes tokens, ")
    assert second.startswith("loss: 5.5491 nats per token | perplexity: 257.00 | bits per byte: ")
    for message, line in [("CUDA error: no kernel image is available", "--device cuda: .*; .*ladder check"),
                          ("CUDA out of memory. Tried to allocate", "out of memory; .*--batch-size")]:
        monkeypatch.setattr(F, "cross_entropy", Mock(side_effect=torch.AcceleratorError(message)))
        with pytest.raises(SystemExit, match=f"^error: {line}"):
            program()
    logging.disable(logging.NOTSET)
