"""evaluate.py: a model's numbers on val.bin, against closed forms and others' losses."""
import io
import json
import logging
import math
import re
import runpy
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import tokenizers
import torch
from load_script import ROOT, known_flags, load_module, rung
from log_files import val_losses
from run_script import train, train_in_float32
from token_folders import NEEDS_GPT2, edit_json, tokens_of
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


def encode(tokenizer, documents=DOCUMENTS):
    """The tokens of documents, each after an end of text but the first, (n_tokens,)."""
    ids = []
    for text in documents:
        ids += [tokenizer.end_of_text, *tokenizer.encode(text)]
    return np.array(ids[1:], "<u2")


def gpt2(vocab_size=257, std=0.2, folder=None, longest=128):
    """A transformers GPT-2 with random weights, saved to a folder; with std=0 all logits are 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=2, n_positions=longest,
                        initializer_range=float(std))
    model = GPT2LMHeadModel(config).eval()
    if not std:
        model.transformer.wte.weight.data.zero_()
    if folder:
        model.save_pretrained(folder)
        BYTES.to_transformers().save_pretrained(folder)
    return model


@pytest.fixture
def folders(tmp_path):
    """The ids of val.bin in the folder `data`, beside `model`, a byte model whose logits are 0."""
    gpt2(std=0.0, folder=tmp_path / "model")
    tokens_of(tmp_path / "data", encode(BYTES), tokenizer=BYTES)
    return encode(BYTES)


def result(evaluate, capsys, *flags):
    """The numbers that evaluate.py prints."""
    capsys.readouterr()
    evaluate.main([*map(str, flags), "--data", "data", "--device", "cpu"])
    pattern = (r".* on data/val.bin \(made up\): (\S+) (\S+) tokens, (\S+) bytes, T=(\d+)\n"
               r"loss: (\S+) nats per token \| perplexity: (\S+) \| bits per byte: (\S+)\n")
    found = re.fullmatch(pattern, capsys.readouterr().out)
    n_tokens, n_bytes = (int(found[i].replace(",", "")) for i in (1, 3))
    loss, perplexity, bits_per_byte = map(float, found.groups()[4:])
    return SimpleNamespace(n_tokens=n_tokens, tokenizer=found[2], n_bytes=n_bytes, T=int(found[4]), loss=loss,
                           perplexity=perplexity, bits_per_byte=bits_per_byte)


@pytest.mark.parametrize("tokenizer, flags, longest, T", [
    (BYTES, ["-T", 7], 128, 7), (BPE, [], 128, 128), (BYTES, [], 2048, 1024)])
def test_all_tokens_alike(tokenizer, flags, longest, T, evaluate, tmp_path, capsys):
    """Logits of 0: ln V nats for each token but the first; the end of a text is no byte.

    Whatever tokens the data has, they are the model's; a sequence is the model's longest, up to 1024.
    """
    gpt2(std=0.0, folder=tmp_path / "model", longest=longest)
    tokens_of(tmp_path / "data", encode(tokenizer), tokenizer=tokenizer)
    found = result(evaluate, capsys, "model", *flags)
    assert (found.n_tokens, found.tokenizer, found.n_bytes, found.T) == (N_BYTES + 2, "bytes", N_BYTES, T)
    assert found.loss == pytest.approx(math.log(257), abs=1e-4)
    assert found.perplexity == pytest.approx(257, abs=0.01)
    assert found.bits_per_byte == pytest.approx(math.log2(257) * (N_BYTES + 2) / N_BYTES, abs=1e-4)


def trained_with(evaluate, T):
    """From now on evaluate.py takes a model for one that was trained on sequences of this length."""
    load_model = evaluate.load_model

    def load(*args):
        model, tokenizer = load_model(*args)
        model.config.trained_length = T
        return model, tokenizer

    evaluate.load_model = load


def test_a_sequence_is_as_long_as_in_training(evaluate, folders, tmp_path, capsys):
    """Also beyond the 1024 of a model whose training is not known."""
    gpt2(std=0.0, folder=tmp_path / "model", longest=2048)
    trained_with(evaluate, 1500)
    assert result(evaluate, capsys, "model").T == 1500


def test_tokens_of_32_bits(evaluate, folders, tmp_path, capsys):
    """As a tokenizer of more than 65,536 tokens has them."""
    expected = result(evaluate, capsys, "model")
    folders.astype("<u4").tofile(tmp_path / "data/val.bin")
    edit_json(tmp_path / "data/meta.json", dtype="<u4")
    assert result(evaluate, capsys, "model") == expected


def test_a_batch_has_as_many_logits_as_fit(evaluate, folders, capsys):
    """By default, or at least one sequence; without gradients."""
    shapes, sum_losses = [], evaluate.sum_losses

    def watched(model, *args):
        model.register_forward_hook(
            lambda model, inputs, output: shapes.append((*inputs[0].shape, output.logits.requires_grad)))
        return sum_losses(model, *args)

    evaluate.sum_losses = watched
    for logits, tokens, most in ((3 * 16 * 257, 2**14, 3), (2**27, 5 * 16, 5), (1, 2**14, 1)):
        evaluate.MAX_LOGITS, evaluate.MAX_TOKENS = logits, tokens
        shapes.clear()
        result(evaluate, capsys, "model", "-T", 16)
        assert max(shapes, key=lambda shape: shape[0]) == (most, 16, False)


@pytest.mark.parametrize("second, T, warned", [(1.2, None, True), (1.0, None, False), (1.2, 16, False)])
def test_worse_second_halves_are_said(second, T, warned, evaluate, folders, capsys):
    """Of sequences longer than those of the training, that is."""
    losses = torch.tensor([1.0] * 8 + [second] * 8, dtype=torch.float64)
    evaluate.sum_losses = lambda *args: (losses, torch.ones(16))
    trained_with(evaluate, T)
    evaluate.main(["model", "-T", "16", "--data", "data", "--device", "cpu"])
    assert ("a smaller -T" in capsys.readouterr().err) is warned


def test_token_ids_without_a_tokenizer_have_a_loss(evaluate, tmp_path, capsys):
    """Music, proteins: no bytes to count. Other ids are refused, since nothing translates them."""
    data = tokens_of(tmp_path / "data", np.arange(3000) % 300, tokenizer="", vocab_size=300, end_of_text=0)
    (data / "tokenizer.json").write_text("{}")
    edit_json(data / "meta.json", tokenizer="mine")
    log = train_in_float32("distributed_validation", tmp_path, data, "-B", 1, "-T", 64, "--steps", 2, "--val-every", 2,
                           "--total-batch", 64, "--val-sequences", 0, "--save", tmp_path / "model.pt")
    capsys.readouterr()
    evaluate.main(["model.pt", "--data", "data", "--device", "cpu"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert float(line.split()[1]) == pytest.approx(val_losses(log)[2], abs=2e-3) and "byte" not in line
    tokens_of(tmp_path / "bytes", encode(BYTES), tokenizer=BYTES)
    with pytest.raises(SystemExit, match="^error: --data bytes: .*; "):
        evaluate.main(["model.pt", "--data", "bytes", "--device", "cpu"])


def test_documents_apart_by_the_model_s_end_of_text(evaluate, tmp_path, capsys):
    """The data's is another id where its tokens are others: one text, as bytes or as GPT-2's bytes, has one loss."""
    data = tokens_of(tmp_path / "own", encode(BYTES), tokenizer=BYTES)
    train(rung("trapezoid_lr"), tmp_path, data, "-B", 2, "-T", 64, "--steps", 30, "--val-every", 0, "--max-lr", 0.02,
          "--save", tmp_path / "model.pt")
    found = []
    for tokenizer in (BYTES, vocabulary.of_bytes("gpt2-bytes")):
        if (tmp_path / "data").exists():
            shutil.rmtree(tmp_path / "data")
        tokens_of(tmp_path / "data", encode(tokenizer), tokenizer=tokenizer)
        found.append(result(evaluate, capsys, "model.pt", "-T", 64, "--documents-apart").loss)
    assert found[0] == found[1]
    assert abs(result(evaluate, capsys, "model.pt", "-T", 64).loss - found[0]) > 1e-3


@torch.no_grad()
def test_each_token_is_predicted_once_and_from_its_own_sequence(evaluate):
    """The last sequence is shorter, and so is the last batch."""
    T, model, ids = 16, gpt2(), BYTES.encode(" ".join(DOCUMENTS))[:150]
    expected = torch.zeros(T, dtype=torch.float64)
    for start in range(0, 149, T):
        part = torch.from_numpy(ids[start : start + T + 1].astype(np.int64))
        losses = F.cross_entropy(model(part[None, :-1]).logits[0], part[1:], reduction="none")
        expected[: len(losses)] += losses
    total, count = evaluate.sum_losses(model, ids, T, 4)
    assert torch.allclose(total, expected, atol=1e-4)
    assert count.tolist() == [len(range(i, 149, T)) for i in range(T)]


@pytest.mark.parametrize("label, flags", [
    ("distributed_validation", []), ("rope", []), ("documents_apart", ["--documents-apart"]), ("ngram_embeddings", [])])
def test_the_loss_is_the_script_s_own(label, flags, evaluate, tmp_path, capsys):
    ids = encode(BYTES, [f"document {i} " * 3 for i in range(100)])[: 50 * 64 + 1]
    data = tokens_of(tmp_path / "data", ids, tokenizer=BYTES, documents=100)
    log = train_in_float32(label, tmp_path, data, "-B", 2, "-T", 64, "--steps", 10, "--val-every", 10,
                           "--val-sequences", 0, "--max-lr", 0.01, "--save", tmp_path / "model.pt",
                           *known_flags(rung(label), total_batch=128))
    loss = result(evaluate, capsys, "model.pt", "-B", 7, *flags).loss
    assert loss == pytest.approx(val_losses(log)[10], abs=6e-5)
    if flags:
        assert abs(result(evaluate, capsys, "model.pt").loss - loss) > 1e-3
    if label == "rope":  # the script's own model keeps no documents apart
        with pytest.raises(SystemExit, match="^error: --documents-apart: .*; leave it out$"):
            result(evaluate, capsys, "model.pt", "--documents-apart")


def test_the_data_s_own_tokens_stay_as_they_are(evaluate, tmp_path, monkeypatch, capsys):
    """And T is that of the training; tokens of another tokenizer of the same name do not stay."""
    data = tokens_of(tmp_path / "data", encode(BPE), tokenizer=BPE)
    train(rung("1"), tmp_path, data, "-B", 1, "-T", 8, "--steps", 1, "--save", tmp_path / "model.pt")
    again = []
    monkeypatch.setattr(evaluate, "encode_again", lambda tokens, *_: again.append(len(tokens)) or tokens)
    n_tokens = len(encode(BPE))
    found = result(evaluate, capsys, "model.pt")
    assert (found.n_tokens, found.tokenizer, found.n_bytes, found.T) == (n_tokens - 1, BPE.name, N_BYTES, 8)
    assert not again
    other = json.loads(BPE.json)
    other["pre_tokenizer"]["add_prefix_space"] = True
    (data / "tokenizer.json").write_text(json.dumps(other))
    result(evaluate, capsys, "model.pt")
    assert again == [n_tokens]


@NEEDS_GPT2
def test_other_tokens_of_the_same_text(evaluate):
    """Documents come back whole; so bits per byte do not depend on the data's tokens."""
    tokenizers = [BYTES, BPE, vocabulary.of_bytes("gpt2-bytes"), vocabulary.GPT2()]
    for theirs in tokenizers:
        for ours in tokenizers:
            assert evaluate.encode_again(encode(theirs), theirs, ours).tolist() == encode(ours).tolist()


def test_a_model_s_tokenizer_that_changes_the_text_is_named(evaluate, capsys):
    lossy = tokenizers.Tokenizer.from_str(BPE.json)
    lossy.normalizer = tokenizers.normalizers.Lowercase()
    evaluate.encode_again(encode(BYTES), BYTES, vocabulary.Tokenizer("lossy", lossy.to_str(), BPE.end_of_text))
    assert "changes the text ('To be, or not to be:" in capsys.readouterr().err


def test_a_long_text_is_encoded_in_pieces(evaluate, real_text):
    """With the tokens that the whole text has."""
    tokenizer = vocabulary.trained(iter([real_text[:20_000]]), 500)
    ids = tokenizer.encode(real_text[:100_000])
    assert np.array_equal(evaluate.encode_again(ids, tokenizer, tokenizer), ids)
    assert [len(text) for text in evaluate.PIECE.findall("x" * 40_000)] == [16384, 16384, 7232]


def test_what_is_refused(evaluate, folders, tmp_path):
    """What may be wrong with a model: test_convert.py."""
    tokens_of(tmp_path / "short", encode(BYTES, ["a"]), tokenizer=BYTES)
    tokens_of(tmp_path / "cut", folders, tokenizer=BYTES)
    folders[:-1].tofile(tmp_path / "cut/val.bin")
    tokens_of(tmp_path / "foreign", encode(BPE), tokenizer=BYTES)  # which has fewer tokens
    for words, reason in [
        ("-T 129", "-T 129: .* 128"), ("--device abacus", "--device abacus: .*; try"),
        ("--data nowhere", "--data nowhere: .*prepare.py"), ("--data short", "--data short: .*two tokens"),
        ("--data cut", "--data cut: val.bin has .* tokens, not "), ("--data foreign", "--data foreign: "),
    ]:
        with pytest.raises(SystemExit, match=f"^error: {reason}") as stop:
            evaluate.main(["model", "--data", "data", "--device", "cpu", *words.split()])
        assert re.fullmatch("error: .+: .+; .+", stop.value.code)
    for flag in ("-T", "-B"):
        with pytest.raises(SystemExit):
            evaluate.main(["model", flag, "0"])


def test_as_a_program(evaluate, folders, tmp_path, monkeypatch):
    """Also where stdout cannot encode a name, or the memory does not suffice."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "model", "--data", "data", "--device", "cpu"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    edit_json(tmp_path / "data/meta.json", source="дневник.txt")
    runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    sys.stdout.seek(0)
    assert torch.get_float32_matmul_precision() == "high"  # TF32 on CUDA
    assert re.search(r"val.bin \(\?{7}.txt\).*\nloss: 5.5491 nats per token \| perplexity: 257.00 \| bits per byte: ",
                     sys.stdout.read())
    monkeypatch.setattr(F, "cross_entropy", mock.Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 20 GiB")))
    with pytest.raises(SystemExit, match="^error: out of memory; .*--batch-size"):
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    logging.disable(logging.NOTSET)
