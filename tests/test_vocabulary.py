"""data/vocabulary.py: the text comes back from every tokenizer, and one that could not give it back is refused."""
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from conftest import ROOT, data_with, load_module, rung
from tokenizers import decoders, models, normalizers, pre_tokenizers

from data import vocabulary

GPT2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
TEXT = "naïve 日本語 🙂\r\n\r\n  \tThe value of an object's value, 12345! <|endoftext|>\n" * 20


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A fresh data/prepare.py in a folder that holds TEXT."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT, newline="")
    return load_module(ROOT / "data" / "prepare.py")


def hugging_face_folder(folder, tokenizer, end="<|endoftext|>"):
    """As transformers saves it, beside a model's config."""
    from transformers import GPT2Config, PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    GPT2Config().save_pretrained(folder)
    return folder


def test_the_text_of_every_tokenizer(prepare, tmp_path):
    """There and back; the files say which tokens they hold, and their bytes are counted right."""
    trained = vocabulary.trained([TEXT], 300)
    hugging_face_folder(tmp_path / "mine", trained.tokenizer)
    hugging_face_folder(tmp_path / "gpt2", trained.tokenizer)  # a name that would say everything about the tokens
    data_with(trained, TEXT, tmp_path / "ours")
    torch.save({"tokenizer": "theirs", "tokenizer_json": trained.json, "end_of_text": 0}, tmp_path / "model.pt")
    text = TEXT.replace("<|endoftext|>", "")  # there it separates documents
    for number, (words, name, size) in enumerate([
        ("--tokenizer bytes", "bytes", 257), ("--train-tokenizer 290", vocabulary.trained([text], 290).name, 290),
        ("--tokenizer mine/", "mine", 300), ("--tokenizer ./gpt2", "hf-gpt2", 300),
        ("--tokenizer ours", trained.name, 300), ("--tokenizer model.pt", "theirs", 300),
    ]):
        out = tmp_path / str(number)
        prepare.main(["--text", "text", "--out", str(out), *words.split()])
        meta = json.loads((out / "meta.json").read_text())
        assert (meta["tokenizer"], meta["vocab_size"], meta["documents"]) == (name, size, 21)
        tokenizer = vocabulary.of_ours(out)
        ids = np.concatenate([np.fromfile(out / name, dtype="<u2") for name in ("train.bin", "val.bin")])
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode()) and len(tokenizer.byte_lengths()) == size
        assert (ids == meta["end_of_text"]).sum() == 20 and tokenizer.vocab_size == size
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and meta["end_of_text"] not in tokenizer.encode(TEXT)


@GPT2
def test_gpt2_in_the_hands_of_transformers():
    gpt2 = vocabulary.GPT2()
    theirs = gpt2.to_transformers()
    assert theirs.encode(TEXT) == gpt2.encoding.encode(TEXT, allowed_special="all")
    ids = gpt2.encode(TEXT)
    assert 50256 not in ids and gpt2.decode([*ids, 50256, 50300]) == TEXT
    assert gpt2.byte_lengths()[ids].sum() == len(TEXT.encode())
    known = vocabulary.Tokenizer("theirs", theirs.backend_tokenizer.to_str(), 50256)
    other = vocabulary.of_bytes("gpt2-bytes")
    assert vocabulary.is_gpt2(known) and not vocabulary.is_gpt2(other)  # the same end of text
    theirs.add_tokens(["<pad>"])
    assert not vocabulary.is_gpt2(vocabulary.Tokenizer("padded", theirs.backend_tokenizer.to_str(), 50256))


@pytest.mark.parametrize("name", ["bytes", "gpt2-bytes"])
def test_single_bytes(name, tmp_path):
    """GPT-2's ids of them are OpenAI's; known again in transformers' hands, so that a model fits its data again."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = vocabulary.of_bytes(name)
    ids = tokenizer.encode(TEXT).tolist()
    in_order = list(bytes_to_unicode()) if name == "gpt2-bytes" else range(256)
    assert bytes(in_order[i] for i in ids).decode() == TEXT == tokenizer.decode([*ids, tokenizer.end_of_text])
    found = vocabulary.from_hugging_face(hugging_face_folder(tmp_path / "model", tokenizer.tokenizer))
    assert (found.name, found.json, found.end_of_text) == (name, tokenizer.json, tokenizer.end_of_text)


def test_a_tokenizer_that_never_answers(monkeypatch):
    monkeypatch.setattr(vocabulary.tiktoken, "get_encoding", lambda name: time.sleep(5))
    started = time.monotonic()
    with pytest.raises(vocabulary.NoTokenizer, match="tiktoken.*TimeoutError"):
        vocabulary.GPT2(seconds=0.2)
    assert time.monotonic() - started < 4


def test_a_trained_tokenizer_fits_its_text():
    """A word of the text becomes a token; a pair that occurs once does not. The same text gives the same tokenizer."""
    first, second = (vocabulary.trained(["object " * 50, "xyz"], 400) for _ in range(2))
    assert first.json == second.json and first.name == second.name and first.vocab_size < 400
    other = vocabulary.trained(["thing " * 50, "xyzabcdef"], first.vocab_size)
    assert first.name.startswith(f"bpe-{first.vocab_size}-") and other.name != first.name
    assert len(first.encode(" object")) == 1 and len(first.encode("xyz")) == 3


def test_a_tokenizer_is_trained_on_a_share_of_every_file(prepare, tmp_path, monkeypatch):
    """On a few bytes of each, however many files there are."""
    (tmp_path / "corpus").mkdir()
    for number in range(20):
        (tmp_path / "corpus" / f"{number}.txt").write_text(chr(65 + number) * 500 * (1 + 3 * (number == 7)))
    monkeypatch.setattr(prepare, "TRAINING_BYTES", 1150)
    given, trained = [], vocabulary.trained
    monkeypatch.setattr(prepare.vocabulary, "trained", lambda texts, size: given.extend(texts) or trained(given, size))
    prepare.main(["--text", "corpus", "--train-tokenizer", "300", "--out", "out"])
    assert sorted(given) == [chr(65 + number) * 50 * (1 + 3 * (number == 7)) for number in range(20)]


def test_an_added_token_counts_its_bytes():
    tokenizer = vocabulary.trained(["some text"], 300).tokenizer
    tokenizer.add_tokens(["é"])
    assert vocabulary.Tokenizer("x", tokenizer.to_str(), 0).byte_lengths()[tokenizer.token_to_id("é")] == 2


BYTE_FALLBACK = {  # as Llama's; here "▁" is one byte, not three
    "model": models.BPE(vocab={f"<0x{b:02X}>": b for b in range(256)} | {"▁": 256, vocabulary.SEPARATOR: 257},
                        merges=[], byte_fallback=True),
    "normalizer": normalizers.Replace(" ", "▁"),
    "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
}


@pytest.mark.parametrize("changes, end, reason", [
    (BYTE_FALLBACK, "<|endoftext|>", "give back"),
    ({"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}, "<|endoftext|>", "give back"),
    ({"normalizer": normalizers.Lowercase()}, "<|endoftext|>", "give back"),
    ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "<|endoftext|>", "give back"),  # of each piece
    ({}, None, "eos_token"),
    ({"model": models.BPE()}, "<|endoftext|>", "fewer than 257 tokens"),
])
def test_tokenizers_that_do_not_suit(changes, end, reason, prepare, tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE()) if "model" in changes else vocabulary.trained([], 257).tokenizer
    for name, part in changes.items():
        setattr(tokenizer, name, part)
    hugging_face_folder(tmp_path / "theirs", tokenizer, end)
    with pytest.raises(SystemExit, match=f"^error: --tokenizer theirs: .*{reason}.*; give "):
        prepare.main(["--text", "text", "--out", "out", "--tokenizer", "theirs"])
    for file in ("tokenizer.json", "meta.json"):  # a damaged one; a folder of token files without its tokenizer
        (tmp_path / "theirs" / file).write_text("{")
        with pytest.raises(SystemExit, match="^error: --tokenizer theirs: cannot be (loaded|read).*; give "):
            prepare.main(["--text", "text", "--out", "out", "--tokenizer", "theirs"])
    assert sorted(os.listdir()) == ["text", "theirs"]


@pytest.mark.parametrize("largest, dtype", [(65_535, "<u2"), (65_536, "<u4")])
def test_ids_beyond_16_bits_take_32(largest, dtype, prepare, tmp_path):
    """From Hugging Face's tokenizer to a script's batch; validation documents are drawn in that width, too."""
    contents = json.loads(vocabulary.trained([], 257).json)
    contents["model"]["vocab"]["xyz"] = largest
    hugging_face_folder(tmp_path / "theirs", tokenizers.Tokenizer.from_str(json.dumps(contents)))
    texts = [f"document {i}: to be or not to be" for i in range(200)]
    Path("many.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare.main(["--text", "many.jsonl", "--out", "out", "--tokenizer", "theirs"])
    meta = json.loads(Path("out/meta.json").read_text())
    assert (meta["dtype"], meta["vocab_size"], meta["val"]) == (dtype, largest + 1, "documents drawn by hash")
    found = []
    for split in ("train", "val"):
        tokens, _ = rung("0").load_tokens(Path("out"), split, 2)
        assert tokens.dtype == dtype and len(tokens) == meta[f"{split}_tokens"]
        found += vocabulary.of_ours(Path("out")).tokenizer.decode(tokens.tolist(), skip_special_tokens=False).split(
            vocabulary.SEPARATOR)
    assert sorted(filter(None, found)) == sorted(texts)
