"""data/vocabulary.py: every tokenizer gives back the text; one that could not is refused."""
import builtins
import json
import re
from pathlib import Path
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import tokenizers
import torch
from damaged_files import Attack, cut_in_half
from load_script import ROOT, load_module, rung
from saved_models import save_as_from_a_gpu
from token_folders import NEEDS_GPT2, data_with, edit_json, tokens_in
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from data import vocabulary

LINE = "naïve 日本語 🙂\r\n\r\n  \tThe value of an object's value, 12345! <|endoftext|>\n"
TEXT = LINE * 20
END = vocabulary.SEPARATOR


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A fresh data/prepare.py in a folder that holds TEXT."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT, newline="")
    return load_module(ROOT / "data" / "prepare.py")


def refusal(prepare, tokenizer="gpt2"):
    """The error line of a preparation of `text` with this --tokenizer."""
    with pytest.raises(SystemExit) as stop:
        prepare.main(["--text", "text", "--out", "out", "--tokenizer", tokenizer])
    assert not Path("out").exists() and not Path("ran").exists()
    return stop.value.code


def hugging_face_folder(folder, tokenizer, end=END):
    """As transformers saves it, beside a model's config."""
    from transformers import GPT2Config, PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    GPT2Config().save_pretrained(folder)
    return folder


def test_the_text_of_every_tokenizer(prepare, tmp_path):
    """There and back; the files say which tokens they hold, and their bytes are counted right."""
    trained = vocabulary.trained([TEXT], 300)
    for name in ("mine", "gpt2"):  # the second's name would say everything about its tokens
        hugging_face_folder(tmp_path / name, trained.tokenizer)
    data_with(trained, TEXT, tmp_path / "ours")
    saved = {"tokenizer": "theirs", "tokenizer_json": trained.json, "end_of_text": 0, "model": torch.ones(1)}
    save_as_from_a_gpu(saved, tmp_path / "model.pt")
    text = TEXT.replace(END, "")  # there it separates documents
    for number, (words, name, size) in enumerate([
        ("--tokenizer bytes", "bytes", 257), ("--train-tokenizer 290", vocabulary.trained([text], 290).name, 290),
        ("--tokenizer mine/", "mine", 300), ("--tokenizer ./gpt2", "hf-gpt2", 300),
        ("--tokenizer mine/tokenizer.json", "mine", 300), ("--tokenizer ours", trained.name, 300),
        ("--tokenizer model.pt", "theirs", 300), ("--tokenizer ours/tokenizer.json", trained.name, 300)]):
        out = tmp_path / str(number)
        prepare.main(["--text", "text", "--out", str(out), *words.split()])
        meta = json.loads((out / "meta.json").read_text())
        assert (meta["tokenizer"], meta["vocab_size"], meta["documents"]) == (name, size, 21)
        tokenizer = vocabulary.of_ours(out)
        ids = tokens_in(out)
        assert tokenizer.decode(ids.tolist()) == text
        lengths = tokenizer.byte_lengths()
        assert lengths[ids].sum() == len(text.encode()) and len(lengths) == size
        assert (ids == meta["end_of_text"]).sum() == 20 and tokenizer.vocab_size == size
        encoded = tokenizer.encode(TEXT)
        assert tokenizer.decode(encoded) == TEXT and meta["end_of_text"] not in encoded


def test_special_tokens_in_a_text_are_counted(prepare, tmp_path, capsys):
    """They are ordinary text, and one line says so."""
    tokenizer = vocabulary.trained([TEXT], 300).tokenizer
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    hugging_face_folder(tmp_path / "chat", tokenizer)
    Path("text").write_text("<|im_start|>user\nHi!<|im_end|>\n<|endoftext|>" * 600)
    prepare.main(["--text", "text", "--tokenizer", "chat", "--out", "out"])
    assert "special tokens in the text: 1,200 (<|im_end|> <|im_start|>); " in capsys.readouterr().err
    assert tokenizer.token_to_id("<|im_start|>") not in tokens_in("out")


@NEEDS_GPT2
def test_gpt2_s_tokens_are_tiktoken_s():
    ours, theirs = vocabulary.GPT2().encoding, tiktoken.get_encoding("gpt2")
    assert ours._mergeable_ranks == theirs._mergeable_ranks and ours._special_tokens == theirs._special_tokens
    assert ours.encode_ordinary(TEXT) == theirs.encode_ordinary(TEXT)


@pytest.fixture(scope="module")
def gpt2s():
    """GPT-2's tokenizer, ours and as one of transformers."""
    tokenizer = vocabulary.GPT2()
    return tokenizer, tokenizer.to_transformers()


@pytest.mark.slow
@NEEDS_GPT2
def test_gpt2_s_tokens_have_one_name_wherever_they_come_from(gpt2s, prepare, tmp_path, monkeypatch):
    """From a folder of transformers', too: --pretrained compares names, and a folder's is whatever its owner chose.

    What was read once, or fetched, is there without a network from then on; a damaged file is not used.
    """
    gpt2s[1].save_pretrained(tmp_path / "my_gpt2")
    offline(monkeypatch, tmp_path)
    with pytest.raises(vocabulary.NoTokenizer, match="TIKTOKEN_CACHE_DIR"):
        vocabulary.GPT2()
    (tmp_path / "my_gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    Path("text").write_text("To be, or not to be, that is the question")
    prepare.main(["--text", "text", "--out", "out", "--tokenizer", "my_gpt2"])
    assert json.loads(Path("out/meta.json").read_text())["tokenizer"] == "gpt2"
    assert not Path("out/tokenizer.json").exists()
    assert vocabulary.GPT2().decode(tokens_in("out")) == "To be, or not to be, that is the question"
    vocabulary.KEPT.write_text(vocabulary.KEPT.read_text()[:-5])
    with pytest.raises(vocabulary.NoTokenizer):
        vocabulary.GPT2()


def offline(monkeypatch, tmp_path):
    """Without a network, tiktoken's cache, and tokens kept from before."""
    monkeypatch.setattr(vocabulary, "KEPT", tmp_path / "kept.txt")
    monkeypatch.setattr(tiktoken, "get_encoding", mock.Mock(side_effect=OSError))


def test_without_gpt2_s_tokens_only_the_default_text_falls_back_to_bytes(prepare, tmp_path, monkeypatch, capsys):
    offline(monkeypatch, tmp_path)
    assert "--tokenizer bytes" in refusal(prepare)
    prepare.default_text = lambda: (TEXT, "tiny_shakespeare")
    prepare.main([])
    assert "NOT comparable" in capsys.readouterr().err
    assert json.loads(Path("data/tokens/meta.json").read_text())["tokenizer"] == "gpt2-bytes"


@NEEDS_GPT2
def test_gpt2_in_the_hands_of_transformers(gpt2s):
    gpt2, theirs = gpt2s
    assert theirs.encode(TEXT) == gpt2.encoding.encode(TEXT, allowed_special="all")
    ids = gpt2.encode(TEXT)
    assert 50256 not in ids and gpt2.decode([*ids, 50256, 50300]) == TEXT
    assert gpt2.byte_lengths()[ids].sum() == len(TEXT.encode())
    assert not vocabulary.is_gpt2(vocabulary.of_bytes("gpt2-bytes"))  # it has the same end of text


@pytest.mark.parametrize("name", ["bytes", "gpt2-bytes"])
def test_single_bytes(name, tmp_path):
    """GPT-2's ids of them are OpenAI's; they are recognized in transformers' hands."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = vocabulary.of_bytes(name)
    ids = tokenizer.encode(TEXT).tolist()
    in_order = list(bytes_to_unicode()) if name == "gpt2-bytes" else range(256)
    assert bytes(in_order[i] for i in ids).decode() == TEXT
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == TEXT
    found = vocabulary.from_hugging_face(hugging_face_folder(tmp_path / "model", tokenizer.tokenizer))
    assert (found.name, found.json, found.end_of_text) == (name, tokenizer.json, tokenizer.end_of_text)


def test_a_trained_tokenizer_fits_its_text():
    """A word becomes a token, a pair that occurs once does not. The same text, the same tokens."""
    texts = ["object " * 50, "xyz"]
    first, second = vocabulary.trained(texts, 400), vocabulary.trained(texts, 400)
    assert first.json == second.json and first.name == second.name and first.vocab_size < 400
    other = vocabulary.trained(["thing " * 50, "xyzabcdef"], first.vocab_size)
    assert first.name.startswith(f"bpe-{first.vocab_size}-") and other.name != first.name
    assert len(first.encode(" object")) == 1 and len(first.encode("xyz")) == 3


def test_what_a_tokenizer_is_trained_on(prepare, monkeypatch):
    """A few bytes of each file, however many there are; all of a small .parquet, whose text is many times as large."""
    Path("corpus").mkdir()
    for number in range(20):
        Path("corpus", f"{number}.txt").write_text(chr(65 + number) * (2000 if number == 7 else 500))
    documents = [f"{i} " * 2000 for i in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), "a.parquet", compression="zstd")
    given, trained = [], vocabulary.trained
    monkeypatch.setattr(vocabulary, "trained", lambda texts, size: given.append([*texts]) or trained(texts, size))
    prepare.main(["--text", "a.parquet", "--train-tokenizer", "300", "--out", "one"])
    monkeypatch.setattr(prepare, "TRAINING_BYTES", 1150)
    prepare.main(["--text", "corpus", "--train-tokenizer", "300", "--out", "two"])
    assert "".join(given[0]) == "".join(documents)
    assert sorted(given[1]) == [chr(65 + number) * (200 if number == 7 else 50) for number in range(20)]


def test_the_file_is_what_counts(prepare, tmp_path):
    """Not the class that transformers picks; and what cuts, fills or adds tokens in training is off."""
    trained = vocabulary.trained([TEXT], 300).tokenizer
    trained.add_tokens(["object"])
    trained.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    expected = trained.encode(TEXT).ids
    trained.post_processor = processors.TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 0)])
    trained.enable_truncation(8)
    trained.enable_padding(length=4000)
    hugging_face_folder(tmp_path / "theirs", trained)
    edit_json(tmp_path / "theirs" / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    trained.save(str(tmp_path / "theirs" / "tokenizer.json"))
    Path("text.jsonl").write_text(json.dumps({"text": TEXT}))
    prepare.main(["--text", "text.jsonl", "--out", "out", "--tokenizer", "theirs"])
    assert tokens_in("out").tolist() == expected == vocabulary.of_ours(Path("out")).encode(TEXT).tolist()


BYTE_TOKENS = {f"<0x{b:02X}>": b for b in range(256)}
BYTE_FALLBACK = {  # as Llama's; here "▁" is one byte, not three
    "model": models.BPE(vocab=BYTE_TOKENS | {"▁": 256, END: 257}, merges=[], byte_fallback=True),
    "normalizer": normalizers.Replace(" ", "▁"),
    "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])}
@pytest.mark.parametrize("changes, place, excerpt", [
    (BYTE_FALLBACK, "document 1, character 0", "byte-level"),
    ({"normalizer": normalizers.NFKC()}, "document 2, character 18", "1⁄2 Pfund'"),
    ({"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)}, "document 1, character 0", "' One"),
    ({"added": [AddedToken("kauft", lstrip=True)]}, "document 2, character 11", "Müllerkauft")])
def test_a_tokenizer_that_changes_the_text(changes, place, excerpt, prepare, tmp_path):
    """Its first change is named with its place, whatever its kind."""
    tokenizer = vocabulary.trained([], 257).tokenizer
    if "model" in changes:
        tokenizer = tokenizers.Tokenizer(changes["model"])
    for name, part in changes.items():
        tokenizer.add_tokens(part) if name == "added" else setattr(tokenizer, name, part)
    hugging_face_folder(tmp_path / "theirs", tokenizer)
    Path("text").write_text(f"One\n{END}Herr Müller kauft ½ Pfund")
    assert re.match(f"error: text: {place}[^\n]*{excerpt}[^\n]*; give a --tokenizer ", refusal(prepare, "theirs"))


def test_a_change_far_into_a_document_is_found(prepare, monkeypatch):
    """GPT-2's own path, too; the place counts from the document's beginning, not the piece's."""
    class Tokenizer(vocabulary.Bytes):
        def encode(self, text):
            return super().encode(text.replace("STOP", "HALT"))

    prepare.load_tokenizer = lambda name: Tokenizer("gpt2-bytes")
    Path("text").write_text("one" + END + "a word " * 7000 + "STOP")
    assert re.match("error: text: document 2, character 49,000: .*word STOP.*word HALT", refusal(prepare))


@pytest.mark.parametrize("model, end, reason", [
    (None, None, 'no end-of-text token; .*"eos_token": "<'),
    (None, "<end>", "eos_token <end> is not in its tokenizer.json"),
    (models.BPE(), END, "fewer than 257 tokens")])
def test_tokenizers_that_do_not_suit(model, end, reason, prepare, tmp_path):
    tokenizer = tokenizers.Tokenizer(model) if model else vocabulary.trained([], 257).tokenizer
    hugging_face_folder(tmp_path / "theirs", tokenizer, end)
    tokenizer.save(str(tmp_path / "theirs" / "tokenizer.json"))  # without what transformers has added
    assert re.match(f"error: --tokenizer theirs: .*{reason}.*; give ", refusal(prepare, "theirs"))


def remote_code(folder):
    (folder / "theirs.py").write_text("open('ran', 'w')")
    auto_map = {"AutoConfig": "theirs.Config", "AutoTokenizer": ["theirs.Tokenizer", None]}
    edit_json(folder / "config.json", model_type="theirs", auto_map=auto_map)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Tokenizer", auto_map=auto_map)


@pytest.mark.parametrize("damage, reason", [
    (lambda folder: cut_in_half(folder / "tokenizer.json"), "cannot be loaded"),
    (lambda folder: (folder / "tokenizer.json").write_text("{}"), "no model"),
    (lambda folder: (folder / "meta.json").write_text("{"), "cannot be read"),  # of token files
    (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json in it"),
    (remote_code, "custom code"),
])
def test_damaged_and_dangerous_tokenizers(damage, reason, prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *prompt: "y")  # to "run the custom code?"
    hugging_face_folder(tmp_path / "theirs", vocabulary.trained([TEXT], 300).tokenizer)
    damage(tmp_path / "theirs")
    assert re.match(f"error: --tokenizer theirs: .*{reason}.*; give ", refusal(prepare, "theirs"))


def test_what_is_not_a_models_file(prepare, tmp_path):
    """Nor does one run code; and torch's advice to load it without weights_only is not passed on."""
    saved = {"tokenizer": "theirs", "tokenizer_json": "{", "end_of_text": 0}
    for name, contents in [("unsafe.pt", saved | {"T": Attack(Path("ran"))}), ("damaged.pt", saved),
                           ("others.pt", {"weights": torch.zeros(9)}), ("cut.pt", saved)]:
        torch.save(contents, name)
    cut_in_half(tmp_path / "cut.pt")
    Path("lfs").mkdir()
    Path("lfs/tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    for name, reason in [("lfs", "git lfs pull"), ("text", "not a model's file"), ("unsafe.pt", "not a model's file"),
                         ("others.pt", "not a model's file"), ("cut.pt", "an incomplete one"),
                         ("damaged.pt", "theirs is damaged")]:
        line = refusal(prepare, name)
        assert reason in line and "weights_only" not in line and "\n" not in line


@pytest.mark.parametrize("largest, dtype", [(65_535, "<u2"), (65_536, "<u4")])
def test_ids_beyond_16_bits_take_32(largest, dtype, prepare, tmp_path):
    """From Hugging Face's tokenizer to a script's batch; a single text is cut, and documents drawn, in that width."""
    contents = json.loads(vocabulary.trained([], 257).json)
    contents["model"]["vocab"]["xyz"] = largest
    hugging_face_folder(tmp_path / "theirs", tokenizers.Tokenizer.from_str(json.dumps(contents)))
    texts = [f"document {i}: to be or not to be" for i in range(200)]
    Path("many.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for source, val in (("text", "last tenth"), ("many.jsonl", "documents drawn by hash")):
        prepare.main(["--text", source, "--out", source[:2], "--tokenizer", "theirs"])
        meta = json.loads(Path(source[:2], "meta.json").read_text())
        assert (meta["dtype"], meta["vocab_size"], meta["val"]) == (dtype, largest + 1, val)
        tokenizer = vocabulary.of_ours(Path(source[:2])).tokenizer
        found = []
        for split in ("train", "val"):
            tokens, _ = rung("0").load_tokens(Path(source[:2]), split, 2)
            assert tokens.dtype == dtype and len(tokens) == meta[f"{split}_tokens"]
            found.append(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
        if val == "last tenth":
            assert "".join(found) == TEXT
            assert meta["train_tokens"] == (meta["train_tokens"] + meta["val_tokens"]) * 9 // 10
        else:
            assert sorted(filter(None, END.join(found).split(END))) == sorted(texts)


