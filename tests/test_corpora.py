"""data/prepare.py on real corpora: folders, .jsonl, .parquet, datasets; the tokens, and the memory that it takes."""
import hashlib
import json
import os
import random
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, load_module, run_command

from data import vocabulary

END = 50256
DOCUMENTS = ["The first document.", "A second:\n\n  with blanks\r\n", "Drittes: äöü 日本 😀", "<|endoftext|> in", "x"]


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A fresh data/prepare.py with single-byte tokens, which needs no network, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    module = load_module(ROOT / "data" / "prepare.py")
    module.load_tokenizer = lambda name: vocabulary.of_bytes("gpt2-bytes")
    return module


@pytest.fixture
def merges(prepare):
    """GPT-2's tokenizer, tiktoken's, which is then data/prepare.py's, too."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("no GPT-2 merges at hand")
    tokenizer = vocabulary.GPT2()
    prepare.load_tokenizer = lambda name: tokenizer
    return tokenizer


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))


def write_parquet(path, texts, field="text", **layout):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, **layout)


def documents_of(tokens, tokenizer=None):
    """The texts between the <|endoftext|> tokens."""
    tokenizer = tokenizer or vocabulary.of_bytes("gpt2-bytes")
    return [tokenizer.decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == END))]


def tokens_in(folder):
    return np.concatenate([np.fromfile(folder / name, dtype="<u2") for name in ("train.bin", "val.bin")])


def test_a_folder_becomes_documents(prepare, tmp_path, capsys):
    """In the order of names. Empty and missing texts are none; the hash is that of the texts, joined."""
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    write_parquet(corpus / "c.parquet", ["", *DOCUMENTS[3:], None], field="content")
    write_jsonl(corpus / "b" / "part.JSONL", [DOCUMENTS[1], "", DOCUMENTS[2], None], field="content")
    (corpus / "a.txt").write_text(DOCUMENTS[0])
    (corpus / "empty.txt").write_text("")
    for name in ("picture.png", "read.md", "b/more.MD", "no_suffix"):
        (corpus / name).write_bytes(b"\xff\xfe")
    prepare.main(["--text", "corpus", "--field", "content", "--out", "out"])
    assert documents_of(tokens_in(tmp_path / "out")) == DOCUMENTS
    assert "WARNING: corpus: files left out: 4 (1 without suffix, 2 .md, 1 .png); " in capsys.readouterr().err
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["documents"], meta["source"]) == (5, "corpus")
    assert meta["sha256"] == hashlib.sha256("<|endoftext|>".join(DOCUMENTS).encode()).hexdigest()
    assert meta["train_tokens"] + meta["val_tokens"] == sum(len(text.encode()) for text in DOCUMENTS) + 4


def test_end_of_text_separates_the_documents_of_a_txt_file(prepare, merges, tmp_path, monkeypatch):
    """As tiktoken encodes it with special tokens allowed, wherever a block or a piece ends."""
    end, texts = "<|endoftext|>", ["One.\n", "\nTwo " * 50, " ", "\u65e5\u672c" * 60, "x", "no <|endoftext> at all\n"]
    (tmp_path / "a.txt").write_text(f"{end}{end.join(texts[:3])}{end}{end}{end.join(texts[3:])}{end}")
    usual = prepare.PIECE_CHARACTERS
    for size in (*range(30, 60, 2), usual):
        monkeypatch.setattr(prepare, "PIECE_CHARACTERS", size)
        assert prepare.prepare(tmp_path / "a.txt", tmp_path / "out")["documents"] == len(texts)
        tokens = tokens_in(tmp_path / "out")
        assert documents_of(tokens, merges) == texts
    assert tokens.tolist() == merges.encoding.encode(end.join(texts), allowed_special="all")


@pytest.fixture
def dataset(prepare, tmp_path, monkeypatch):
    """data/prepare.py beside a dataset with two splits, in the format in which the hub stores them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset" / "data"
    folder.mkdir(parents=True)
    for split, texts in {"train": [*DOCUMENTS, ""], "test": DOCUMENTS[:2]}.items():
        for shard in range(2):
            write_parquet(folder / f"{split}-0000{shard}-of-00002.parquet", texts[shard::2])
    return prepare


def test_a_hugging_face_dataset(dataset, tmp_path):
    """Shard by shard; its name in the metadata, with that of its configuration."""
    for flags, documents in ([], DOCUMENTS[::2] + DOCUMENTS[1::2]), (["--split", "test"], DOCUMENTS[:2]):
        dataset.main(["--hf", "dataset", "--name", "default", "--out", "out", *flags])
        assert documents_of(tokens_in(tmp_path / "out")) == documents
        meta = json.loads((tmp_path / "out" / "meta.json").read_text())
        assert (meta["documents"], meta["source"]) == (len(documents), "dataset/default")


def test_a_dataset_asked_wrongly(dataset, tmp_path, capsys):
    """Of several kinds of files `datasets` reads one, which is said; of a .txt it would make each line a document."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\n")
    for words, reason in [
        ("--split nowhere", "nowhere"), ("--name nobody", "nobody"), ("--field body", "'body'"), ("--field id", "'id'"),
        ("--hf nobody/nothing", "nobody/nothing: .*Hub"), ("--hf texts", ".txt .*--text"),
    ]:
        with pytest.raises(SystemExit, match=f"error: --hf .*{reason}.*; c"):
            dataset.main(["--hf", "dataset", "--out", "out", *words.split()])
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    (tmp_path / "texts" / "b.jsonl").write_text('{"text": "a document of its own"}\n')
    dataset.main(["--hf", "texts", "--out", "out"])
    assert "WARNING: --hf texts: of its .jsonl, .txt files" in capsys.readouterr().err
    assert documents_of(tokens_in(tmp_path / "out")) == ["a document of its own"]


def test_pieces_give_the_tokens_of_the_whole(prepare, tmp_path, monkeypatch):
    """However odd the whitespace, of a tokenizer that splits into words as those after GPT-2's do."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    draw = random.Random(0)
    parts = ["word", "words", " ", "  ", "\n", "\n\n", "\t", "it's", "we'll ", "12", "!?", "!\n", "_\n", "é", "日本",
             "\u00a0", "\u3000", "\r\n"]
    texts = ["".join(draw.choices(parts, k=1000)) for _ in range(20)]
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
    theirs.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=byte_level.alphabet()))
    tokenizer = vocabulary.Tokenizer("theirs", theirs.to_str(), 0)
    assert len(tokenizer.encode("!\n")) == 1  # unlike GPT-2's
    for text in texts:
        monkeypatch.setattr(prepare, "PIECE_CHARACTERS", draw.choice([64, 200, 300]))
        (tmp_path / "text").write_bytes(text.encode())
        pieces = [piece for _, piece in prepare.read(tmp_path / "text", "text", "utf-8")]
        assert "".join(pieces) == text and len(pieces) > 2
        assert np.concatenate([*map(tokenizer.encode, pieces)]).tolist() == tokenizer.encode(text).tolist()


def test_many_chunks_give_the_tokens_of_one_call(prepare, merges, tmp_path, monkeypatch):
    """Documents shorter and much longer than a piece, in many threads, against tiktoken's own encoding of each."""
    monkeypatch.setattr(prepare, "PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 4)
    draw = random.Random(0)
    words = ["word", " ", "\n\n", "it's", "12", "é", "日本", "?!", "longer words "]
    texts = ["".join(draw.choices(words, k=draw.randint(1, 400))) + "." for _ in range(1000)]
    texts[70] = "".join(texts)
    texts[71] = "<|endoftext|> as text, half a \ud83d pair"
    texts[-1] = "a" + 1_100_000 * " " + "word " + 200_000 * "xy"  # tiktoken panics over a million blanks in one piece
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    encoded = (merges.encoding.encode_ordinary(text.replace("\ud83d", "?")) for text in texts[:-1])
    expected = [token for ids in encoded for token in [END, *ids]][1:]
    tokens = tokens_in(tmp_path / "out")
    assert tokens[: len(expected)].tolist() == expected and documents_of(tokens, merges)[-1] == texts[-1]


@pytest.mark.parametrize("n_tokens", [7, 1 << 20])
def test_validation_documents_are_drawn_by_hash(n_tokens, prepare, tmp_path, monkeypatch):
    """A tenth, spread over the corpus, whole and in their order, as are the others; wherever the moved blocks end."""
    monkeypatch.setattr(prepare.move_drawn, "__defaults__", (n_tokens,))
    texts = [f"{number} " * (1 + number % 5) for number in range(500)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    drawn = [number for number in range(500) if prepare.is_drawn(number)]
    assert drawn[:3] == [18, 72, 74] and meta["documents"] == 500
    files = [np.fromfile(tmp_path / "out" / name, dtype="<u2") for name in ("train.bin", "val.bin")]
    for val, tokens in enumerate(files):
        assert documents_of(tokens) == [text for number, text in enumerate(texts) if (number in drawn) == val]
    assert [meta["train_tokens"], meta["val_tokens"]] == [*map(len, files)] and meta["val"] == "documents drawn by hash"
    assert sum(map(len, files)) == len("".join(texts)) + 498  # each file has an end of text between its documents


@pytest.mark.parametrize("n, long, times, val", [
    (1, 0, 50, "last tenth"), (99, 18, 3, "last tenth"), (100, 18, 3, "documents drawn by hash"),
    (500, 3, 1150, "last tenth"), (500, 18, 100, "last tenth"),
])
def test_few_documents_are_cut_at_nine_tenths(n, long, times, val, prepare, tmp_path):
    """Or many, if one of them holds most of the text, drawn (18) or not. A hundred are many."""
    texts = [f"{number:03} " * (times if number == long else 1) for number in range(n)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    assert meta["val"] == val
    if val == "last tenth":
        assert documents_of(tokens_in(tmp_path / "out")) == texts
        assert meta["train_tokens"] == (meta["train_tokens"] + meta["val_tokens"]) * 9 // 10


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Text that does not compress, 24 MB as .txt and 24 as .parquet in one row group, takes less than 95 MB."""
    documents, corpus = [os.urandom(8000).hex() + "\n" for _ in range(1500)], tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("".join(documents))
    write_parquet(corpus / "b.parquet", documents, row_group_size=len(documents), write_batch_size=16)
    code = (
        "import sys; from data import prepare; from conftest import peak_memory\n"
        "import pyarrow.parquet; prepare.load_tokenizer = lambda name: prepare.vocabulary.of_bytes('gpt2-bytes')\n"
        "before = peak_memory(); prepare.main(['--text', sys.argv[1], '--out', sys.argv[2]])\n"
        "print(peak_memory() - before)"
    )
    run = run_command(sys.executable, "-c", code, corpus, tmp_path / "out",
                      PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    assert run.returncode == 0 and float(run.stdout.splitlines()[-1]) < 95, run.stderr
