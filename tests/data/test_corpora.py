"""data/prepare.py on real corpora: folders, .jsonl, .parquet, datasets; its tokens, its memory."""
import gzip
import hashlib
import json
import os
import random
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from load_script import ROOT
from run_script import run_command
from token_folders import tokens_in
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from data import texts as reading
from data import vocabulary

END = 50256
DOCUMENTS = ["The first document.", "A second:\n\n  with blanks\r\n", "Drittes: äöü 日本 😀", "<|endoftext|> in", "x"]


@pytest.fixture
def merges(prepare):
    """GPT-2's tokenizer, which is then data/prepare.py's, too."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("tiktoken would download its merges")
    tokenizer = vocabulary.GPT2()
    prepare.load_tokenizer = lambda name: tokenizer
    return tokenizer


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))


def write_parquet(path, texts, field="text", **layout):
    table = pyarrow.table({"id": range(len(texts)), field: texts})
    pyarrow.parquet.write_table(table, path, **layout)


def documents_of(tokens, tokenizer=None):
    """The texts between the <|endoftext|> tokens."""
    decode = (tokenizer or vocabulary.of_bytes("gpt2-bytes")).decode
    return [decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == END))]


def test_a_folder_becomes_documents(prepare, tmp_path, capsys):
    """In the order of names. Empty and missing texts are none; what is left out is said."""
    corpus = tmp_path / "corpus"
    for folder in (corpus / "b", corpus / ".hidden", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "text.txt").write_text("not to be read")
    write_parquet(corpus / "c.parquet", ["", *DOCUMENTS[3:], None], field="content")
    write_jsonl(corpus / "b" / "part.JSONL", [DOCUMENTS[1], "", DOCUMENTS[2], None], field="content")
    (corpus / "b" / "text.txt").unlink()
    (corpus / "a.txt").write_text(DOCUMENTS[0])
    (corpus / "empty.txt").write_text("")
    for name in ("picture.png", "read.md", "b/more.MD", "no_suffix"):
        (corpus / name).write_bytes(b"\xff\xfe")
    (corpus / "linked").symlink_to(tmp_path / "elsewhere")
    prepare.main(["--text", "corpus", "--field", "content", "--out", "out"])
    assert documents_of(tokens_in("out")) == DOCUMENTS
    left_out = "6 (2 .md, 1 .png, 1 hidden, 1 linked folder, 1 without suffix); "
    assert f"WARNING: corpus: files left out: {left_out}" in capsys.readouterr().err
    meta = json.loads(Path("out/meta.json").read_text())
    assert (meta["documents"], meta["source"]) == (5, "corpus")
    assert meta["sha256"] == hashlib.sha256("<|endoftext|>".join(DOCUMENTS).encode()).hexdigest()
    n_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    assert meta["train_tokens"] + meta["val_tokens"] == n_bytes + 4


def test_end_of_text_separates_the_documents_of_a_txt_file(prepare, merges, tmp_path, monkeypatch):
    """As tiktoken encodes it with special tokens allowed, wherever a block or a piece ends."""
    end = "<|endoftext|>"
    texts = ["One.\n", "\nTwo " * 50, " ", "日本" * 60, "x", "no <|endoftext> at all\n"]
    content = f"{end}{end.join(texts[:3])}{end}{end}{end.join(texts[3:])}{end}"
    (tmp_path / "a.txt").write_text(content)
    for size in (*range(30, 60, 2), reading.PIECE_CHARACTERS):
        monkeypatch.setattr(reading, "PIECE_CHARACTERS", size)
        out = tmp_path / str(size)
        assert prepare.prepare(tmp_path / "a.txt", out)["documents"] == len(texts)
        tokens = tokens_in(out)
        assert documents_of(tokens, merges) == texts
    assert tokens.tolist() == merges.encoding.encode(end.join(texts), allowed_special="all")


@pytest.fixture
def dataset(prepare, tmp_path, monkeypatch):
    """data/prepare.py beside a dataset with two splits, in the format of the hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset" / "data"
    folder.mkdir(parents=True)
    for split, texts in {"train": [*DOCUMENTS, ""], "test": DOCUMENTS[:2]}.items():
        for shard in range(2):
            write_parquet(folder / f"{split}-0000{shard}-of-00002.parquet", texts[shard::2])
    return prepare


@pytest.mark.parametrize("split, documents", [("train", DOCUMENTS[::2] + DOCUMENTS[1::2]), ("test", DOCUMENTS[:2])])
def test_a_hugging_face_dataset(split, documents, dataset, tmp_path):
    """Shard by shard, without a copy on the disk; its name in the metadata, with that of its configuration."""
    words = ["--hf", "dataset", "--name", "default", "--out", "out"]
    dataset.main(words + (["--split", split] if split != "train" else []))
    assert documents_of(tokens_in("out")) == documents and not list((tmp_path / "cache").rglob("*.arrow"))
    meta = json.loads(Path("out/meta.json").read_text())
    assert (meta["documents"], meta["source"]) == (len(documents), "dataset/default")
    dataset.main([*words[:-1], "both", "--val", "test"])
    assert documents_of(tokens_in("both", "val")) == DOCUMENTS[:2]


def test_a_split_that_save_to_disk_wrote(prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets.DatasetDict(train=datasets.Dataset.from_dict({"text": DOCUMENTS})).save_to_disk("saved")
    prepare.main(["--hf", "saved/train", "--out", "out"])
    assert documents_of(tokens_in("out")) == DOCUMENTS


def test_a_dataset_asked_wrongly(dataset, tmp_path):
    """`datasets` reads one kind of files, and would make each line of a .txt a document."""
    for folder in ("texts", "cut"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\n")
    records = "".join(json.dumps({"text": os.urandom(99).hex()}) + "\n" for _ in range(999))
    (tmp_path / "cut" / "a.jsonl.gz").write_bytes(gzip.compress(records.encode())[:-999])
    for words, reason in [("--split nowhere", "nowhere"), ("--name nobody", "nobody"), ("--field body", "'body'"),
                          ("--hf cut", "cut: document .*EOFError"), ("--hf texts", "texts: .*.txt files"),
                          ("--hf nobody/nothing", "nobody/nothing: .*Hub")]:
        with pytest.raises(SystemExit, match=f"error: --hf .*{reason}.*; .*(--field|--text)"):
            dataset.main(["--hf", "dataset", "--out", "out", *words.split()])
        assert not Path("out").exists() and not Path("out.partial").exists()


def test_pieces_give_the_tokens_of_the_whole(tmp_path, monkeypatch):
    """However odd the whitespace, of a tokenizer with the words of those after GPT-2's."""
    draw = random.Random(0)
    parts = ["word", "words", " ", "  ", "\n", "\n\n", "\t", "it's", "we'll ", "12", "!?", "!\n", "_\n", "é", "日本",
             "\u00a0", "\u3000", "\r\n"]
    texts = ["".join(draw.choices(parts, k=1000)) for _ in range(20)]
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(Regex(words), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    theirs.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=byte_level.alphabet()))
    tokenizer = vocabulary.Tokenizer("theirs", theirs.to_str(), 0)
    assert len(tokenizer.encode("!\n")) == 1  # unlike GPT-2's
    for text in texts:
        monkeypatch.setattr(reading, "PIECE_CHARACTERS", draw.choice([64, 200, 300]))
        (tmp_path / "text").write_bytes(text.encode())
        pieces = [piece for _, piece in reading.read(tmp_path / "text", "text", "utf-8")]
        assert "".join(pieces) == text and len(pieces) > 2
        in_pieces = np.concatenate([tokenizer.encode(piece) for piece in pieces])
        assert in_pieces.tolist() == tokenizer.encode(text).tolist()


def test_many_chunks_give_the_tokens_of_one_call(prepare, merges, tmp_path, monkeypatch):
    """Documents shorter and longer than a piece, in many threads, against tiktoken's encoding."""
    monkeypatch.setattr(reading, "PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 4)
    draw = random.Random(0)
    words = ["word", " ", "\n\n", "it's", "12", "é", "日本", "?!", "longer words "]
    texts = ["".join(draw.choices(words, k=draw.randint(1, 400))) + "." for _ in range(1000)]
    texts[70] = "".join(texts)
    texts[71] = "<|endoftext|> as text, half a \ud83d pair"
    texts[-1] = "a" + 1_100_000 * " " + "word " + 200_000 * "xy"  # tiktoken panics over a million blanks in one piece
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    expected = []
    for text in texts[:-1]:
        expected += [END, *merges.encoding.encode_ordinary(text.replace("\ud83d", "?"))]
    tokens = tokens_in("out")
    assert tokens[: len(expected) - 1].tolist() == expected[1:]
    assert documents_of(tokens, merges)[-1] == texts[-1]


def test_copies_of_a_document_stay_on_one_side(prepare, tmp_path, capsys):
    """Else the loss on val.bin is that of text that was trained on; and a line counts them."""
    texts = [f"document {number}" for number in range(300)]
    write_jsonl(tmp_path / "corpus.jsonl", texts + texts[::-1] + ["new"])
    prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    train, val = (documents_of(tokens_in("out", split)) for split in ("train", "val"))
    assert len(val) > 30 and not set(train) & set(val) and len(train) + len(val) == 601
    assert "300 of 601 documents are copies of earlier ones" in capsys.readouterr().err


@pytest.mark.parametrize("names, said", [
    (["train.jsonl", "validation-00000.jsonl"], True), (["test/x.jsonl", "train/x.jsonl"], True),
    (["contest.jsonl", "b.jsonl"], False), (["test.jsonl"], False)])
def test_files_named_like_held_out_data_are_said(names, said, prepare, tmp_path, capsys):
    """A downloaded dataset in one folder: all of it would be training data."""
    for name in names:
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / "corpus" / name, [f"the text of {name}"])
    prepare.prepare(tmp_path / "corpus", tmp_path / "out")
    assert ("named like held-out data" in capsys.readouterr().err) is said


@pytest.mark.parametrize("block_tokens", [7, 1 << 20])
def test_validation_documents_are_drawn_by_hash(block_tokens, prepare, tmp_path, monkeypatch):
    """A tenth, whole and in their order, as are the others; wherever the moved blocks end."""
    monkeypatch.setattr(prepare, "BLOCK_TOKENS", block_tokens)
    texts = [f"{number} " * (1 + number % 5) for number in range(500)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    drawn = [number for number in range(1, 500) if int(hashlib.sha256(str(number).encode()).hexdigest(), 16) % 10 == 0]
    assert drawn[:3] == [18, 72, 74] and (meta["documents"], meta["val"]) == (500, "documents drawn by hash")
    train, val = tokens_in("out", "train"), tokens_in("out", "val")
    assert documents_of(val) == [texts[number] for number in drawn]
    assert documents_of(train) == [text for number, text in enumerate(texts) if number not in drawn]
    assert (meta["train_tokens"], meta["val_tokens"]) == (len(train), len(val))
    assert len(train) + len(val) == len("".join(texts)) + 498  # each has an end of text between its documents


@pytest.mark.parametrize("n, val, least, most", [
    (1000, "documents drawn by hash", 50, 200), (1, "last 100 tokens", 100, 100)])
def test_of_a_large_corpus_less_than_a_tenth_is_held_out(n, val, least, most, prepare, tmp_path):
    """A hundred tokens here, ten million outside of the tests."""
    prepare.MAX_VAL_TOKENS = 100
    write_jsonl(tmp_path / "corpus.jsonl", [f"{number:04}" * (1000 // n) for number in range(n)])
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    assert meta["val"] == val and least <= meta["val_tokens"] <= most
    assert len(tokens_in("out")) in (4000, 4998)  # 998: separators


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
        assert documents_of(tokens_in("out")) == texts
        assert meta["train_tokens"] == (meta["train_tokens"] + meta["val_tokens"]) * 9 // 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here to read the peak memory from")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Text that does not compress, 24 MB as .txt and as .parquet in one row group: under 95 MB."""
    documents = [os.urandom(8000).hex() + "\n" for _ in range(1500)]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("".join(documents))
    write_parquet(corpus / "b.parquet", documents, row_group_size=1500, write_batch_size=16)
    code = (
        "import sys; from data import prepare; import pyarrow.parquet\n"
        "prepare.load_tokenizer = lambda name: prepare.vocabulary.of_bytes('gpt2-bytes')\n"
        "def peak():  # not getrusage's, which begins with that of the process that started it\n"
        "    return int(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0]) / 1024\n"
        "before = peak(); prepare.main(['--text', sys.argv[1], '--out', sys.argv[2]])\n"
        "print(peak() - before)"
    )
    run = run_command(sys.executable, "-c", code, corpus, tmp_path / "out", PYTHONPATH=str(ROOT))
    assert run.returncode == 0 and float(run.stdout.splitlines()[-1]) < 95, run.stderr


def test_parquet_rows_and_fields_that_are_no_text(tmp_path):
    """A null is an empty text; pandas writes large strings."""
    write_parquet(tmp_path / "a.parquet", [None, None, 3])
    with pytest.raises(SystemExit, match="^error: .*a.parquet: row 3: field 'text' does not hold a text; "):
        list(reading.read_parquet(tmp_path / "a.parquet", "text"))
    table = pyarrow.table({"id": [1], "body": ["x"], "content": pyarrow.array(["x"], pyarrow.large_string())})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(SystemExit, match="'text'.*choose a --field, of body, content$"):
        reading.open_parquet(tmp_path / "a.parquet", "text")
