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


@pytest.fixture
def evaluate():
    return load_module(ROOT / "evaluate.py")


def data_folder(folder, tokenizer, documents=DOCUMENTS):
    """Token files whose val.bin has these documents, and its ids."""
    folder.mkdir()
    ids = [i for text in documents for i in (tokenizer.end_of_text, *tokenizer.encode(text))][1:]
    for split in ("train", "val"):
        np.array(ids, dtype="<u2").tofile(folder / f"{split}.bin")
    meta = {"source": "made up", "sha256": "", "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
            "end_of_text": tokenizer.end_of_text, "train_tokens": len(ids), "val_tokens": len(ids)}
    (folder / "meta.json").write_text(json.dumps(meta))
    if tokenizer.json:
        (folder / "tokenizer.json").write_text(tokenizer.json)
    return folder, np.array(ids, dtype="<u2")


def gpt2(tokenizer, longest=128, std=0.2):
    """A transformers GPT-2 with random weights; with std=0 all of its logits are 0."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=tokenizer.vocab_size, n_embd=32, n_layer=2, n_head=2,
                                       n_positions=longest, initializer_range=float(std))).eval()
    if not std:
        model.transformer.wte.weight.data.zero_()
    return model


def saved(model, tokenizer, folder):
    model.save_pretrained(folder)
    tokenizer.to_transformers().save_pretrained(folder)
    return folder


def numbers(capsys, pattern=r"loss: (\S+) nats per token \| perplexity: (\S+) \| bits per byte: (\S+)"):
    return [float(number.replace(",", "")) for number in re.search(pattern, capsys.readouterr().out).groups()]


@pytest.mark.parametrize("T", [1, 7, 64, 128])
def test_all_tokens_alike(T, evaluate, tmp_path, capsys):
    """A model without an opinion: ln V nats for each token but the first; the end of a text counts, but is no byte."""
    tokenizer = vocabulary.of_bytes()
    data, ids = data_folder(tmp_path / "data", tokenizer)
    model = saved(gpt2(tokenizer, std=0.0), tokenizer, tmp_path / "model")
    evaluate.main([str(model), "--data", str(data), "-T", str(T), "--device", "cpu"])
    n_bytes = len("".join(DOCUMENTS).encode()) - 1  # but for the first
    assert len(ids) == n_bytes + 3
    loss, perplexity, bits = numbers(capsys)
    assert loss == pytest.approx(math.log(257), abs=1e-4) and perplexity == pytest.approx(257, abs=0.01)
    assert bits == pytest.approx(math.log2(257) * (n_bytes + 2) / n_bytes, abs=1e-4)


@pytest.mark.parametrize("T, batch_size", [(1, 100), (16, 3), (16, 1), (64, 2), (128, 1000)])
def test_each_token_is_predicted_once_and_from_its_own_sequence(T, batch_size, evaluate):
    """One token at a time, by transformers' own loss."""
    tokenizer = vocabulary.of_bytes()
    model = gpt2(tokenizer, longest=129)
    ids = tokenizer.encode(" ".join(DOCUMENTS))[:150]
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


@pytest.mark.parametrize("label", ["13", "19", "20", "24"])
def test_the_loss_is_the_script_s_own(label, evaluate, tmp_path, tokens, monkeypatch):
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float32
    log = train(module, tmp_path, tokens, "-B", 2, "-T", 32, "--total-batch", 64, "--steps", 3, "--val-sequences", 40,
                "--save", tmp_path / "model.pt")
    expected = float(re.search(r"val : step 3 \| loss: (\S+)", log.read_text())[1])
    model, tokenizer = evaluate.load_model(str(tmp_path / "model.pt"), "cpu")
    assert tokenizer.name == "gpt2-bytes"
    total, count = evaluate.losses(model, np.fromfile(tokens / "val.bin", dtype="<u2")[: 40 * 32 + 1], 32, 7)
    assert total.sum() / count.sum() == pytest.approx(expected, abs=2e-6)


def test_documents_apart(evaluate, tmp_path, monkeypatch):
    """As rung 29 validates its model."""
    data, ids = data_folder(tmp_path / "data", vocabulary.of_bytes(), [f"document {i} " * 3 for i in range(100)])
    module = rung("29")
    module.autocast_dtype = lambda device: torch.float32
    log = train(module, tmp_path, data, "-B", 2, "-T", 64, "--total-batch", 128, "--steps", 20, "--val-sequences", 0,
                "--max-lr", 0.01, "--muon-lr", 0.01, "--save", tmp_path / "model.pt")
    expected = float(re.findall(r"val : step \d+ \| loss: (\S+)", log.read_text())[-1])
    model, tokenizer = evaluate.load_model(str(tmp_path / "model.pt"), "cpu")
    apart, across = ((total.sum() / count.sum()).item() for total, count in
                     (evaluate.losses(model, ids[: (len(ids) - 1) // 64 * 64 + 1], 64, 7, end_of_text)
                      for end_of_text in (tokenizer.end_of_text, None)))
    assert apart == pytest.approx(expected, abs=2e-6) and abs(across - apart) > 1e-3
    given = []
    monkeypatch.setattr(evaluate, "losses", lambda *args: given.append(args[4]) or (torch.ones(64), torch.ones(64)))
    for flags in ([], ["--documents-apart"]):
        evaluate.main([str(tmp_path / "model.pt"), "--data", str(data), "-T", "64", "--device", "cpu", *flags])
    assert given == [None, 256]


@pytest.mark.parametrize("name", ["gpt2-bytes", "bpe-300"])
def test_the_data_s_own_tokens_stay_as_they_are(name, evaluate, tmp_path, monkeypatch, capsys):
    tokenizer = vocabulary.trained(iter(DOCUMENTS), 300) if name == "bpe-300" else vocabulary.of_bytes(name)
    data, ids = data_folder(tmp_path / "data", tokenizer)
    train(rung("1"), tmp_path, data, "-B", 1, "-T", 8, "--steps", 1, "--save", tmp_path / "model.pt")
    monkeypatch.setattr(evaluate, "encode_again", lambda *_: pytest.fail("in vain"))
    evaluate.main([str(tmp_path / "model.pt"), "--data", str(data), "--device", "cpu"])  # with the T of its training
    n_bytes = len("".join(DOCUMENTS).encode()) - 1
    assert f" {len(ids) - 1:,} {tokenizer.name} tokens, {n_bytes:,} bytes, T=8\n" in capsys.readouterr().out


@pytest.mark.parametrize("model_tokenizer", ["bytes", "bpe-300", "gpt2-bytes", "gpt2"])
@pytest.mark.parametrize("data_tokenizer", ["bytes", "bpe-300", "gpt2"])
def test_other_tokens_of_the_same_text(data_tokenizer, model_tokenizer, evaluate, tmp_path, capsys):
    """The documents come back whole, whatever their tokens; so a model's bits per byte do not depend on the data's."""
    if "gpt2" in (data_tokenizer, model_tokenizer) and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("no GPT-2 merges at hand")
    theirs, ours = (vocabulary.GPT2() if name == "gpt2" else vocabulary.trained(iter(DOCUMENTS), 300)
                    if name == "bpe-300" else vocabulary.of_bytes(name) for name in (data_tokenizer, model_tokenizer))
    _, ids = data_folder(tmp_path / "data", theirs)
    _, expected = data_folder(tmp_path / "same", ours)
    assert evaluate.encode_again(ids, theirs, ours).tolist() == expected.tolist()


def test_a_long_text_is_encoded_in_pieces(evaluate, real_text):
    """With the tokens that the whole text has."""
    tokenizer = vocabulary.trained(iter([real_text[:20_000]]), 500)
    ids = tokenizer.encode(real_text)
    assert max(map(len, evaluate.PIECE.findall(real_text))) <= 16384
    assert np.array_equal(evaluate.encode_again(ids, tokenizer, tokenizer), ids)
    assert [len(text) for text in evaluate.PIECE.findall("x" * 40_000)] == [16384, 16384, 7232]


def test_a_folder_whose_tokenizer_is_not_the_data_s(evaluate, tmp_path, capsys):
    ours = vocabulary.of_bytes()
    data, ids = data_folder(tmp_path / "data", vocabulary.trained(iter(DOCUMENTS), 300))
    evaluate.main([str(saved(gpt2(ours, std=0.0), ours, tmp_path / "model")), "--data", str(data), "--device", "cpu"])
    n_tokens, n_bytes = numbers(capsys, r"val.bin \(made up\): (\S+) bytes tokens, (\S+) bytes, T=128\n")
    assert (n_tokens, n_bytes) == (len("".join(DOCUMENTS).encode()) + 1, len("".join(DOCUMENTS).encode()) - 1)
    assert n_tokens > len(ids)


def test_a_batch_is_bounded_by_its_logits(evaluate, tmp_path, monkeypatch):
    shapes = []

    def model(x, **_):
        shapes.append(tuple(x.shape))
        return SimpleNamespace(logits=torch.zeros(1, 1, 257).expand(*x.shape, 257))

    model.device, model.to = "cpu", lambda device: None
    tokenizer = vocabulary.of_bytes()
    data, ids = data_folder(tmp_path / "data", tokenizer, ["a" * 30_000])
    monkeypatch.setattr(evaluate, "load_model", lambda name, device: (model, tokenizer))
    for vocab_size, longest, flags, expected in [
        (257, 4096, [], [(16, 1024), (13, 1024), (1, 303)]),  # 16,384 tokens
        (50257, 1024, [], [(2, 1024)] * 14 + [(1, 1024), (1, 303)]),  # 0.4 GB of logits
        (10**9, 20_000, ["-T", "20000"], [(1, 20_000), (1, 9999)]),  # one sequence at least
        (257, 512, ["-B", "50"], [(50, 512), (8, 512), (1, 303)]),
    ]:
        shapes.clear()
        model.config = SimpleNamespace(vocab_size=vocab_size, max_position_embeddings=longest)
        evaluate.main(["model", "--data", str(data), "--device", "cpu", *flags])
        assert shapes == expected


@pytest.mark.parametrize("second, warned", [(0.9, False), (1.05, False), (1.2, True)])
def test_a_model_that_was_trained_on_shorter_sequences(second, warned, evaluate, tmp_path, capsys, monkeypatch):
    """With more to go by, a model predicts better, not worse."""
    tokenizer = vocabulary.of_bytes()
    data, ids = data_folder(tmp_path / "data", tokenizer)
    model = saved(gpt2(tokenizer), tokenizer, tmp_path / "model")
    count = torch.tensor([12] * 50 + [11] * 50)
    monkeypatch.setattr(evaluate, "losses", lambda *_: (count * torch.tensor([1.0] * 50 + [second] * 50), count))
    evaluate.main([str(model), "--data", str(data), "--device", "cpu", "-T", "100"])
    assert ("probably trained with a smaller -T" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("flags, reason", [
    (["-T", "129"], "-T 129: the model's longest sequence is 128; lower -T"),
    (["-T", "0"], "-T 0: out of range; give at least 1"),
    (["--batch-size", "-1"], "--batch-size -1: out of range; give at least 1"),
    (["--device", "abacus"], "--device abacus: not available here .*; try --device cpu"),
    (["--data", "nowhere"], "--data nowhere: no token files .*; make them: python data/prepare.py"),
])
def test_flags(flags, reason, evaluate, tmp_path):
    tokenizer = vocabulary.of_bytes()
    data, _ = data_folder(tmp_path / "data", tokenizer)
    model = saved(gpt2(tokenizer), tokenizer, tmp_path / "model")
    with pytest.raises(SystemExit, match=f"^error: {reason}") as stop:
        evaluate.main([str(model), "--data", str(data), "--device", "cpu", *flags])
    assert "\n" not in stop.value.code


def test_models_without_a_fitting_tokenizer(evaluate, tmp_path, hf_folder):
    data, _ = data_folder(tmp_path / "data", vocabulary.of_bytes())
    (tmp_path / "text.pt").write_text("not a checkpoint")
    small = saved(gpt2(SimpleNamespace(vocab_size=100)), vocabulary.of_bytes(), tmp_path / "small")
    for model, reason in [(hf_folder, "no usable tokenizer .*; give a folder that has one"),
                          (small, "its tokenizer has 257 tokens, more than the model, 100; give"),
                          (tmp_path / "text.pt", "damaged, or not a model's file"),
                          (tmp_path / "data", "cannot be loaded")]:
        with pytest.raises(SystemExit, match=f"^error: {model}: .*{reason}") as stop:
            evaluate.main([str(model), "--data", str(data), "--device", "cpu"])
        assert "\n" not in stop.value.code


def test_as_a_program(tmp_path):
    """From another folder; progress and result apart."""
    tokenizer = vocabulary.of_bytes()
    data, ids = data_folder(tmp_path / "data", tokenizer)
    saved(gpt2(tokenizer, std=0.0), tokenizer, tmp_path / "model")
    run = run_command(sys.executable, ROOT / "evaluate.py", "model", "--data", "data", "--device", "cpu", cwd=tmp_path)
    assert run.returncode == 0 and run.stdout.count("\n") == 2, run.stderr
    assert run.stdout.startswith(f"model on data/val.bin (made up): {len(ids) - 1:,} bytes tokens, ")
    assert "loss: 5.5491 nats per token | perplexity: 257.00 | bits per byte: " in run.stdout


@pytest.mark.parametrize("message, line", [
    ("CUDA error: no kernel image is available", "--device cuda: this torch was not built for this GPU; see python -m"),
    ("CUDA out of memory. Tried to allocate", "out of memory; give a smaller --batch-size, or a shorter -T"),
])
def test_what_torch_says_of_the_device(message, line, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise torch.AcceleratorError(message)

    tokenizer = vocabulary.of_bytes()
    data, _ = data_folder(tmp_path / "data", tokenizer)
    model = saved(gpt2(tokenizer), tokenizer, tmp_path / "model")
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", str(model), "--data", str(data), "--device", "cpu"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit, match=f"^error: {line}"):
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_lm_evaluation_harness_finds_the_same_likelihoods(tmp_path):
    """Where it is installed; docs/evaluate.md has the commands."""
    pytest.importorskip("lm_eval")
    tokenizer = vocabulary.of_bytes()
    model = gpt2(tokenizer)
    saved(model, tokenizer, tmp_path / "model")
    document = {"ctx": "To be, or not", "endings": ["to be:", "日本語"], "label": 1}
    (tmp_path / "endings.jsonl").write_text(json.dumps(document))
    (tmp_path / "endings.yaml").write_text(re.search("```yaml\n(.*?)```", (ROOT / "docs" / "evaluate.md").read_text(),
                                                     re.DOTALL)[1])
    run = run_command(sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", "pretrained=model", "--tasks",
                      "endings", "--include_path", ".", "--device", "cpu", "--log_samples", "--output_path", "out",
                      cwd=tmp_path)
    assert run.returncode == 0 and "acc_norm" in run.stdout, run.stderr
    sample = json.loads(next((tmp_path / "out").rglob("samples_*.jsonl")).read_text())
    for ending, answer in zip(document["endings"], sample["filtered_resps"], strict=True):
        x = torch.from_numpy(tokenizer.encode(f"{document['ctx']} {ending}").astype(np.int64))[None]
        n = len(f" {ending}".encode())
        log_probs = model(x).logits.detach().log_softmax(-1)[0, -n - 1 : -1]
        assert float(answer[0]) == pytest.approx(log_probs.gather(1, x[0, -n:, None]).sum().item(), abs=1e-3)
