"""evaluate.py: the numbers of a model on val.bin, against closed forms, the scripts' own and transformers' losses."""
import io
import json
import logging
import math
import os
import re
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, load_module, run_command, rung, train

from data import vocabulary

DOCUMENTS = ["To be, or not to be:\nthat is the question. ", "naïve 日本語 🙂 12345", " ".join(["word"] * 300)]
N_BYTES = len("".join(DOCUMENTS).encode()) - 1  # but for the first
BYTES = vocabulary.of_bytes()


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """A fresh evaluate.py, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return load_module(ROOT / "evaluate.py")


def data_folder(folder, tokenizer=BYTES, documents=DOCUMENTS):
    """Make token files whose val.bin has these documents; return its ids."""
    folder.mkdir()
    ids = [i for text in documents for i in (tokenizer.end_of_text, *tokenizer.encode(text))][1:]
    for split in ("train", "val"):
        np.array(ids, dtype="<u2").tofile(folder / f"{split}.bin")
    meta = {"source": "made up", "sha256": "", "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text, "train_tokens": len(ids), "val_tokens": len(ids)}
    (folder / "meta.json").write_text(json.dumps(meta))
    if tokenizer.json:
        (folder / "tokenizer.json").write_text(tokenizer.json)
    return np.array(ids, dtype="<u2")


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
    return data_folder(tmp_path / "data")


def result(evaluate, capsys, *flags):
    """(tokens, their name, bytes, T, loss, perplexity, bits per byte) that evaluate.py prints."""
    capsys.readouterr()
    evaluate.main([*map(str, flags), "--device", "cpu"])
    pattern = (r".* on data/val.bin \(made up\): (\S+) (\S+) tokens, (\S+) bytes, T=(\d+)\n"
               r"loss: (\S+) nats per token \| perplexity: (\S+) \| bits per byte: (\S+)\n")
    tokens, name, *others = re.fullmatch(pattern, capsys.readouterr().out).groups()
    n_bytes, T, *losses = [float(number.replace(",", "")) for number in others]
    return int(tokens.replace(",", "")), name, n_bytes, T, *losses


# The numbers


@pytest.mark.parametrize("tokenizer, T", [("bytes", 1), ("bytes", 7), ("bpe-300", 64), ("bpe-300", None)])
def test_all_tokens_alike(tokenizer, T, evaluate, folders, tmp_path, capsys):
    """A model without an opinion: ln V nats for each token but the first; the end of a text counts, but is no byte.

    Whatever tokens the data has, they are the model's."""
    data_folder(tmp_path / "bpe-300", vocabulary.trained(iter(DOCUMENTS), 300))
    (tmp_path / "data").rename(tmp_path / "bytes")
    (tmp_path / tokenizer).rename(tmp_path / "data")
    flags = ["model", "--data", "data", *(["-T", T] if T else [])]
    n_tokens, name, n_bytes, found_T, loss, perplexity, bits = result(evaluate, capsys, *flags)
    assert (n_tokens, name, n_bytes, found_T) == (N_BYTES + 2, "bytes", N_BYTES, T or 128)
    assert loss == pytest.approx(math.log(257), abs=1e-4) and perplexity == pytest.approx(257, abs=0.01)
    assert bits == pytest.approx(math.log2(257) * (N_BYTES + 2) / N_BYTES, abs=1e-4)


@pytest.mark.parametrize("T, batch_size", [(1, 100), (16, 3), (64, 1), (128, 1000)])
def test_each_token_is_predicted_once_and_from_its_own_sequence(T, batch_size, evaluate):
    """One token at a time, by transformers' own loss."""
    model, ids = gpt2(longest=129), BYTES.encode(" ".join(DOCUMENTS))[:150]
    expected = torch.zeros(T, dtype=torch.float64)
    for i in range(1, len(ids)):
        start = (i - 1) // T * T
        x = torch.from_numpy(ids[start : i + 1].astype(np.int64))[None]
        ignored = torch.full_like(x, -100)
        ignored[0, -1] = x[0, -1]
        expected[i - 1 - start] += model(x, labels=ignored).loss.item()
    total, count = evaluate.losses(model, ids, T, batch_size)
    assert torch.allclose(total, expected, atol=1e-4)
    assert count.sum() == 149 and count.tolist() == [len(range(i, 149, T)) for i in range(T)]


@pytest.mark.parametrize("label", ["13", "20", "24"])
def test_the_loss_is_the_script_s_own(label, evaluate, tmp_path, tokens):
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float32
    log = train(module, tmp_path, tokens, "-B", 2, "-T", 32, "--total-batch", 64, "--steps", 3, "--val-sequences", 40,
                "--save", tmp_path / "model.pt")
    expected = float(re.search(r"val : step 3 \| loss: (\S+)", log.read_text())[1])
    model, _ = evaluate.load_model("model.pt", "cpu")
    total, count = evaluate.losses(model, np.fromfile(tokens / "val.bin", dtype="<u2")[: 40 * 32 + 1], 32, 7)
    assert total.sum() / count.sum() == pytest.approx(expected, abs=2e-6)


def test_documents_apart(evaluate, tmp_path, monkeypatch):
    """As rung 29 validates its model."""
    ids = data_folder(tmp_path / "data", documents=[f"document {i} " * 3 for i in range(100)])
    module = rung("29")
    module.autocast_dtype = lambda device: torch.float32
    log = train(module, tmp_path, tmp_path / "data", "-B", 2, "-T", 64, "--total-batch", 128, "--steps", 10,
                "--val-sequences", 0, "--max-lr", 0.01, "--muon-lr", 0.01, "--save", tmp_path / "model.pt")
    expected = float(re.findall(r"val : step \d+ \| loss: (\S+)", log.read_text())[-1])
    model, tokenizer = evaluate.load_model("model.pt", "cpu")
    apart, across = ((total.sum() / count.sum()).item() for total, count in
                     (evaluate.losses(model, ids[: (len(ids) - 1) // 64 * 64 + 1], 64, 7, end_of_text)
                      for end_of_text in (tokenizer.end_of_text, None)))
    assert apart == pytest.approx(expected, abs=2e-6) and abs(across - apart) > 1e-3
    given = []
    monkeypatch.setattr(evaluate, "losses", lambda *args: given.append(args[4]) or (torch.ones(64), torch.ones(64)))
    for flags in ([], ["--documents-apart"]):
        evaluate.main(["model.pt", "--data", "data", "-T", "64", "--device", "cpu", *flags])
    assert given == [None, 256]


# The tokens


@pytest.mark.parametrize("name", ["gpt2-bytes", "bpe-300"])
def test_the_data_s_own_tokens_stay_as_they_are(name, evaluate, tmp_path, monkeypatch, capsys):
    """And T is that of the training; those of another tokenizer of the same name do not."""
    tokenizer = vocabulary.trained(iter(DOCUMENTS), 300) if name == "bpe-300" else vocabulary.of_bytes(name)
    ids = data_folder(tmp_path / "data", tokenizer)
    train(rung("1"), tmp_path, tmp_path / "data", "-B", 1, "-T", 8, "--steps", 1, "--save", tmp_path / "model.pt")
    again = []
    monkeypatch.setattr(evaluate, "encode_again", lambda tokens, *_: again.append(len(tokens)) or tokens)
    found = result(evaluate, capsys, "model.pt", "--data", "data")
    assert found[:4] == (len(ids) - 1, tokenizer.name, N_BYTES, 8) and not again
    if tokenizer.json:
        other = json.loads(tokenizer.json)
        other["pre_tokenizer"]["add_prefix_space"] = True
        (tmp_path / "data" / "tokenizer.json").write_text(json.dumps(other))
        result(evaluate, capsys, "model.pt", "--data", "data")
        assert again == [len(ids)]


@pytest.mark.parametrize("theirs", ["bytes", "bpe-300", "gpt2"])
@pytest.mark.parametrize("ours", ["bytes", "bpe-300", "gpt2-bytes", "gpt2"])
def test_other_tokens_of_the_same_text(theirs, ours, evaluate, tmp_path):
    """The documents come back whole, whatever their tokens; so a model's bits per byte do not depend on the data's."""
    if "gpt2" in (theirs, ours) and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("no GPT-2 merges at hand")
    theirs, ours = (vocabulary.GPT2() if name == "gpt2" else vocabulary.trained(iter(DOCUMENTS), 300)
                    if name == "bpe-300" else vocabulary.of_bytes(name) for name in (theirs, ours))
    ids, expected = data_folder(tmp_path / "data", theirs), data_folder(tmp_path / "same", ours)
    assert evaluate.encode_again(ids, theirs, ours).tolist() == expected.tolist()


def test_a_long_text_is_encoded_in_pieces(evaluate, real_text):
    """With the tokens that the whole text has."""
    tokenizer = vocabulary.trained(iter([real_text[:20_000]]), 500)
    ids = tokenizer.encode(real_text)
    assert max(map(len, evaluate.PIECE.findall(real_text))) <= 16384
    assert np.array_equal(evaluate.encode_again(ids, tokenizer, tokenizer), ids)
    assert [len(text) for text in evaluate.PIECE.findall("x" * 40_000)] == [16384, 16384, 7232]


# Batches, warnings, errors


def test_a_batch_is_bounded_by_its_logits(evaluate, tmp_path, monkeypatch):
    shapes = []

    def model(x, **_):
        shapes.append(tuple(x.shape))
        return SimpleNamespace(logits=torch.zeros(1, 1, 257).expand(*x.shape, 257))

    model.device, model.to = "cpu", lambda device: None
    data_folder(tmp_path / "data", documents=["a" * 30_000])
    monkeypatch.setattr(evaluate, "load_model", lambda name, device: (model, BYTES))
    for vocab_size, longest, flags, expected in [
        (257, 4096, [], [(16, 1024), (13, 1024), (1, 303)]),  # 16,384 tokens
        (50257, 1024, [], [(2, 1024)] * 14 + [(1, 1024), (1, 303)]),  # 0.4 GB of logits
        (10**9, 20_000, ["-T", "20000"], [(1, 20_000), (1, 9999)]),  # one sequence at least
        (257, 512, ["-B", "50"], [(50, 512), (8, 512), (1, 303)]),
    ]:
        shapes.clear()
        model.config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=longest)
        evaluate.main(["model", "--data", "data", "--device", "cpu", *flags])
        assert shapes == expected


@pytest.mark.parametrize("second, warned", [(0.9, False), (1.05, False), (1.2, True)])
def test_a_model_that_was_trained_on_shorter_sequences(second, warned, evaluate, folders, capsys, monkeypatch):
    """With more to go by, a model predicts better, not worse."""
    count = torch.tensor([12] * 50 + [11] * 50)
    monkeypatch.setattr(evaluate, "losses", lambda *_: (count * torch.tensor([1.0] * 50 + [second] * 50), count))
    evaluate.main(["model", "--data", "data", "--device", "cpu", "-T", "100"])
    assert ("smaller -T" in capsys.readouterr().err) == warned


def test_what_is_refused(evaluate, folders, tmp_path, hf_folder):
    (tmp_path / "text.pt").write_text("not a checkpoint")
    gpt2(SimpleNamespace(vocab_size=100), folder=tmp_path / "small")
    data_folder(tmp_path / "short", documents=["a"])
    data_folder(tmp_path / "foreign", vocabulary.trained(iter(DOCUMENTS), 300))
    for file in ("meta.json", "tokenizer.json"):  # those of bytes, which do not have all ids of val.bin
        (tmp_path / "foreign" / file).write_text((tmp_path / "data" / file).read_text())
    for words, reason in [
        ("model -T 129", "-T 129: .* 128"), ("model -T 0", "-T 0: .* 1$"), ("model -B -1", "--batch-size -1: .* 1$"),
        ("model --device abacus", "--device abacus: .*--device cpu"),
        ("model --data nowhere", "--data nowhere: .*prepare.py"), ("model --data model", "--data model: .*prepare.py"),
        ("model --data short", "--data short: .*two tokens"), ("model --data foreign", "--data foreign: .*tokens"),
        (str(hf_folder), f"{hf_folder}: .*tokenizer"), ("small", "small: .* 257 tokens, more than the model, 100"),
        ("text.pt", "text.pt: damaged"), ("data", "data: cannot be loaded"),
    ]:
        with pytest.raises(SystemExit, match=f"^error: {reason}") as stop:
            evaluate.main(["--data", "data", "--device", "cpu", *words.split()])
        assert re.fullmatch("error: .+: .+; .+", stop.value.code)


def test_as_a_program(evaluate, folders, tmp_path):
    """From another folder; progress and result apart."""
    run = run_command(sys.executable, ROOT / "evaluate.py", "model", "--data", "data", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.count("\n") == 2, run.stderr
    assert run.stdout.startswith(f"model on data/val.bin (made up): {len(folders) - 1:,} bytes tokens, ")
    assert "loss: 5.5491 nats per token | perplexity: 257.00 | bits per byte: " in run.stdout


@pytest.mark.parametrize("message, line", [
    ("CUDA error: no kernel image is available", "--device cuda: .*; .*ladder check"),
    ("CUDA out of memory. Tried to allocate", "out of memory; .*--batch-size"),
])
def test_what_torch_says_of_the_device(message, line, evaluate, folders, monkeypatch):
    def fail(*_, **__):
        raise torch.AcceleratorError(message)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "model", "--data", "data", "--device", "cpu"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit, match=f"^error: {line}"):
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    logging.disable(logging.NOTSET)
