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
from test_data import PREPARE, assert_refused, read_tokens

from data import vocabulary

END = 50256
DOCUMENTS = ["The first document.", "A second:\n\n  with blanks\r\n", "Drittes: äöü 日本 😀", "<|endoftext|> in", "x"]


@pytest.fixture
def prepare():
    """A fresh data/prepare.py with single-byte tokens, which needs no network."""
    module = load_module(PREPARE)
    module.load_tokenizer = lambda name: vocabulary.of_bytes("gpt2-bytes")
    return module


@pytest.fixture(scope="module")
def merges():
    """GPT-2's tokenizer, tiktoken's."""
    if "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip("no GPT-2 merges at hand")
    return vocabulary.GPT2()


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))


def write_parquet(path, texts, field="text", **layout):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path, **layout)


def documents_in(folder):
    """The texts in a folder of single-byte tokens, split at <|endoftext|>."""
    tokens, tokenizer = read_tokens(folder), vocabulary.of_bytes("gpt2-bytes")
    return [tokenizer.decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == END))]


@pytest.mark.parametrize("suffix, write", [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_records_become_documents(suffix, write, prepare, tmp_path):
    """Empty and missing texts are no documents; the hash is that of the texts joined by <|endoftext|>."""
    path = tmp_path / f"corpus.{suffix}"
    write(path, ["", DOCUMENTS[0], "", *DOCUMENTS[1:], None], field="content")
    meta = prepare.prepare(path, tmp_path / "out", field="content")
    assert documents_in(tmp_path / "out") == DOCUMENTS
    assert meta["documents"] == 5 and meta["source"] == path.name
    assert meta["sha256"] == hashlib.sha256("<|endoftext|>".join(DOCUMENTS).encode()).hexdigest()
    assert meta["train_tokens"] + meta["val_tokens"] == sum(len(text.encode()) for text in DOCUMENTS) + 4


def test_a_folder_is_read_in_the_order_of_names(prepare, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    write_parquet(corpus / "c.parquet", DOCUMENTS[3:])
    write_jsonl(corpus / "b" / "part.JSONL", DOCUMENTS[1:3])
    (corpus / "a.txt").write_text(DOCUMENTS[0])
    (corpus / "empty.txt").write_text("")
    prepare.main(["--text", str(corpus), "--out", str(tmp_path / "out")])
    assert documents_in(tmp_path / "out") == DOCUMENTS
    said = capsys.readouterr()
    assert "corpus (gpt2-bytes tokens), 5 documents" in said.out and "left out" not in said.err
    for name in ("picture.png", "read.md", "b/more.MD", "no_suffix"):
        (corpus / name).write_bytes(b"\xff\xfe")
    prepare.main(["--text", str(corpus), "--out", str(tmp_path / "out")])
    assert documents_in(tmp_path / "out") == DOCUMENTS
    said = capsys.readouterr().err
    assert f"WARNING: {corpus}: files left out: 4 (1 without suffix, 2 .md, 1 .png); " in said


def test_end_of_text_separates_the_documents_of_a_txt_file(prepare, merges, tmp_path, monkeypatch):
    """As tiktoken encodes it with special tokens allowed, wherever a block or a piece ends; in a record it is text."""
    prepare.load_tokenizer = lambda name: merges
    end, texts = "<|endoftext|>", ["One.\n", "\nTwo " * 50, " ", "\u65e5\u672c" * 60, "x", "no <|endoftext> at all\n"]
    (tmp_path / "a.txt").write_text(f"{end}{end.join(texts[:3])}{end}{end}{end.join(texts[3:])}{end}")
    for size in range(30, 60):
        monkeypatch.setattr(prepare, "PIECE_CHARACTERS", size)
        meta = prepare.prepare(tmp_path / "a.txt", tmp_path / "out")
        assert meta["documents"] == len(texts)
        tokens = read_tokens(tmp_path / "out")
        parts = np.split(tokens, np.flatnonzero(tokens == END))
        assert [merges.decode(part[part != END].tolist()) for part in parts] == texts
    monkeypatch.undo()
    prepare.load_tokenizer = lambda name: merges
    prepare.prepare(tmp_path / "a.txt", tmp_path / "out")
    assert read_tokens(tmp_path / "out").tolist() == merges.encoding.encode(end.join(texts), allowed_special="all")
    write_jsonl(tmp_path / "a.jsonl", texts=[end.join(texts)])
    assert prepare.prepare(tmp_path / "a.jsonl", tmp_path / "of_jsonl")["documents"] == 1
    assert END not in read_tokens(tmp_path / "of_jsonl")


def test_lines_with_other_keys_and_types(prepare, tmp_path):
    """As in real .jsonl, also beyond the first 10 MB, where `datasets` would fail; and half a surrogate pair."""
    path = tmp_path / "corpus.jsonl"
    long = "long " * 3_000_000
    lines = [{"text": long, "meta": 1}, {"meta": "one", "text": "2020-01-01", "new": {"key": []}}]
    path.write_text("\n\n".join(map(json.dumps, lines)) + '\n{"text": "half \\ud83d pair"}')
    prepare.prepare(path, tmp_path / "out")
    assert documents_in(tmp_path / "out") == [long, "2020-01-01", "half ? pair"]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A local dataset with two splits, in the format in which the hub stores them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset" / "data"
    folder.mkdir(parents=True)
    for split, texts in {"train": [*DOCUMENTS, ""], "test": DOCUMENTS[:2]}.items():
        for shard in range(2):
            write_parquet(folder / f"{split}-0000{shard}-of-00002.parquet", texts[shard::2])
    return folder.parent


def test_a_hugging_face_dataset(dataset, prepare, tmp_path):
    prepare.prepare(None, tmp_path / "out", hf=(str(dataset), None, "train"))
    assert documents_in(tmp_path / "out") == DOCUMENTS[::2] + DOCUMENTS[1::2]  # shard by shard
    meta = prepare.prepare(None, tmp_path / "out", hf=(str(dataset), None, "test"))
    assert documents_in(tmp_path / "out") == DOCUMENTS[:2] and meta["documents"] == 2


@pytest.mark.parametrize("flags, reason", [
    (["--split", "nowhere"], "nowhere"),
    (["--name", "nobody"], "nobody"),
    (["--field", "body"], "no string in field 'body'"),
    (["--field", "id"], "no string in field 'id'"),
    (["--hf", "nobody/nothing"], "nobody/nothing: .*Hub"),
    (["--hf", "texts"], "each line of its .txt files would be a document: give it as --text"),
])
def test_a_dataset_asked_wrongly(flags, reason, dataset, prepare, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(SystemExit, match=f"error: --hf .*{reason}.*; c"):
        prepare.main(["--hf", str(dataset), "--out", "out", *flags])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name, content, reason", [
    ("a.jsonl", b'{"text": "good"}\n\n{"text": "cut', "a.jsonl: line 3 is not JSON .Unterminated .*; write each"),
    ("a.jsonl", b'{\n  "text": "pretty"\n}\n', "a.jsonl: line 1 is not JSON .*; write each document as one line"),
    ("a.jsonl", b'{"text": "caf\xe9"}\n', "a.jsonl: not UTF-8; if it is text, give its --encoding"),
    ("a.jsonl", b'{"text": "good"}\n{"body": ""}\n', "document 2 has no string in field 'text' of {'body'"),
    ("a.jsonl", b'["x"]\n', "no string in field 'text' of \\['x'"),
    ("a.jsonl", b'{"text": 0}\n', "no string in field 'text' of {'text': 0}"),
    ("a.jsonl", b'{"text": ""}\n', "0 tokens are too few"),
    ("a.jsonl", b"[" * 200_000, "RecursionError"),
    ("a.parquet", b"PAR1 no parquet", "a.parquet: document 1 cannot be read .ArrowInvalid"),
    ("a.txt", b"caf\xe9 au lait", "a.txt: not UTF-8; if it is text, give its --encoding"),
    ("a.pdf", b"%PDF", "0 tokens are too few; give more text \\(.txt, .jsonl or .parquet\\)"),
])
def test_corpora_that_cannot_be_used(name, content, reason, prepare, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"error: .*{reason}"):
        prepare.main(["--text", str(tmp_path / "corpus"), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_damaged_parquet_files(prepare, tmp_path):
    column = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    write_parquet(tmp_path / "latin.parquet", column)
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS * 1000}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-100])
    (tmp_path / "hole.parquet").write_bytes(b"PAR1" + bytes(200) + whole[204:])
    for name in ("latin", "cut", "hole"):
        with pytest.raises(SystemExit, match=f"error: .*{name}.parquet: document 1 cannot be read"):
            prepare.main(["--text", str(tmp_path / f"{name}.parquet"), "--out", str(tmp_path / "out")])


def test_an_error_is_one_line_of_the_program(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    run = run_command(sys.executable, PREPARE, "--text", "a.parquet", "--out", "out", cwd=tmp_path)
    assert_refused(run, "error: a.parquet: document 1 cannot be read")


# The tokens


def test_pieces_never_cut_a_token(prepare, merges, tmp_path, monkeypatch):
    """Encoding piece by piece gives exactly the tokens of the whole, however odd the whitespace."""
    random.seed(0)
    parts = ["word", " ", "  ", "\n", "\n\n", "\t", "it's", "we'll ", "123", "!?", "é", "日本", "\u00a0", "\u3000"]
    parts += ["\r\n"]
    for size in (64, 200):
        monkeypatch.setattr(prepare, "PIECE_CHARACTERS", size)
        for _ in range(50):
            text = "".join(random.choices(parts, k=300))
            (tmp_path / "text").write_bytes(text.encode())
            pieces = [piece for _, piece in prepare.read(tmp_path / "text", "text", "utf-8")]
            assert "".join(pieces) == text and len(pieces) > 2
            together = [token for piece in pieces for token in merges.encoding.encode_ordinary(piece)]
            assert together == merges.encoding.encode_ordinary(text)


@pytest.mark.parametrize("split", ["bytes", "gpt2", "cl100k"])
def test_pieces_give_the_tokens_of_the_whole(split, prepare, tmp_path, monkeypatch):
    """Of tokenizers that split into words as GPT-2's, as later ones or not at all."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    random.seed(0)
    parts = ["word", "words", " ", "  ", "\n", "\n\n", "\t", "it's", "12", "!?", "!\n", "_\n", "é", "日本", "\r\n"]
    texts = ["".join(random.choices(parts, k=1000)) for _ in range(20)]
    tokenizer = vocabulary.of_bytes()
    if split != "bytes":
        tokenizer = vocabulary.trained(texts, 320)
    if split == "cl100k":  # there "!" and the newline after it are one token
        words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner = Tokenizer.from_str(tokenizer.json)
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
        contents = json.loads(inner.to_str())
        contents["model"]["vocab"]["!Ċ"] = len(contents["model"]["vocab"])
        contents["model"]["merges"].append(["!", "Ċ"])
        tokenizer = vocabulary.Tokenizer("theirs", json.dumps(contents), 0)
        assert len(tokenizer.encode("!\n")) == 1
    monkeypatch.setattr(prepare, "PIECE_CHARACTERS", 300)
    for text in texts:
        (tmp_path / "text").write_bytes(text.encode())
        pieces = [piece for _, piece in prepare.read(tmp_path / "text", "text", "utf-8")]
        assert len(pieces) > 2
        assert np.concatenate([*map(tokenizer.encode, pieces)]).tolist() == tokenizer.encode(text).tolist()


# What is drawn for val.bin


def split_documents(folder, end=END):
    """[the documents in train.bin, those in val.bin], as lists of lists of tokens."""
    def documents(name):
        tokens = np.fromfile(folder / name, dtype="<u2")
        return [part[part != end].tolist() for part in np.split(tokens, np.flatnonzero(tokens == end))]

    return [documents(name) for name in ("train.bin", "val.bin")]


@pytest.mark.parametrize("n_tokens", [7, 64, 1 << 20])
def test_validation_documents_are_drawn_by_hash(n_tokens, prepare, tmp_path, monkeypatch):
    """A tenth, spread over the corpus, whole and in their order, as are the others; wherever the moved blocks end."""
    monkeypatch.setattr(prepare.move_drawn, "__defaults__", (n_tokens,))
    texts = [f"{number} " * (1 + number % 5) for number in range(500)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    encode = vocabulary.of_bytes("gpt2-bytes").encode
    drawn = [number for number in range(500) if prepare.is_drawn(number)]
    documents = [encode(text).tolist() for text in texts]
    assert split_documents(tmp_path / "out") == [
        [document for number, document in enumerate(documents) if (number in drawn) == val] for val in (False, True)]
    assert 40 < len(drawn) < 60 and drawn[:3] == [18, 72, 74] and meta["documents"] == 500
    sizes = [(tmp_path / "out" / name).stat().st_size // 2 for name in ("train.bin", "val.bin")]
    assert [meta["train_tokens"], meta["val_tokens"]] == sizes and meta["val"] == "documents drawn by hash"
    assert sum(sizes) == len("".join(texts)) + 498  # each file has an end of text between its documents
    assert meta["sha256"] == hashlib.sha256("<|endoftext|>".join(texts).encode()).hexdigest()


def test_a_hash_draws_a_tenth(prepare):
    assert [sum(map(prepare.is_drawn, range(start, start + 10_000))) for start in (0, 10_000)] == [1004, 1033]
    assert not prepare.is_drawn(0)  # move_drawn leaves the first document in train.bin


@pytest.mark.parametrize("n, long, times", [(1, 0, 50), (20, 18, 2), (500, 3, 2000), (500, 18, 2000), (500, 18, 100)])
def test_few_documents_are_cut_at_nine_tenths(n, long, times, prepare, tmp_path):
    """Or many, if one of them holds most of the text, drawn (18) or not."""
    texts = [f"{number:03} " * (times if number == long else 1) for number in range(n)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    assert documents_in(tmp_path / "out") == texts and meta["val"] == "last tenth"
    assert meta["train_tokens"] == (meta["train_tokens"] + meta["val_tokens"]) * 9 // 10


def test_many_chunks_give_the_tokens_of_one_call(prepare, merges, tmp_path, monkeypatch):
    """Documents shorter and much longer than a piece, in many threads, against tiktoken's own encoding of each."""
    monkeypatch.setattr(prepare, "PIECE_CHARACTERS", 2000)
    monkeypatch.setattr(prepare.os, "cpu_count", lambda: 4)
    prepare.load_tokenizer = lambda name: merges
    draw = random.Random(0)
    words = ["word", " ", "\n\n", "it's", "12", "é", "日本", "?!", "longer words "]
    texts = ["".join(draw.choices(words, k=draw.randint(1, 400))) + "." for _ in range(1000)]
    texts[70] = "".join(texts)
    texts[71] = "<|endoftext|>"
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    expected = []
    for text in texts:
        expected += [END] * bool(expected) + merges.encoding.encode_ordinary(text)
    assert read_tokens(tmp_path / "out").tolist() == expected


def test_text_without_blanks_and_a_million_blanks(prepare, merges, tmp_path):
    """tiktoken panics over a million blanks in one piece; a text that offers no place to cut is cut all the same."""
    prepare.load_tokenizer = lambda name: merges
    text = "a" + 1_500_000 * " " + "word " + 1_100_000 * "\n" + 500_000 * "xy" + "end"
    (tmp_path / "text.txt").write_text(text)
    write_jsonl(tmp_path / "text.jsonl", [text])
    for path in (tmp_path / "text.txt", tmp_path / "text.jsonl"):
        assert max(len(piece) for _, piece in prepare.read(path, "text", "utf-8")) <= 2 * prepare.PIECE_CHARACTERS
        out = tmp_path / f"out{path.suffix}"
        prepare.prepare(path, out)
        assert merges.decode(read_tokens(out).tolist()) == text


# Memory


def peak_of_preparing(path):
    """MiB that preparing takes beyond what the program itself does."""
    code = (
        "import sys; from data import prepare; from conftest import peak_memory\n"
        "import pyarrow.parquet; prepare.load_tokenizer = lambda name: prepare.vocabulary.of_bytes('gpt2-bytes')\n"
        "before = peak_memory(); prepare.main(['--text', sys.argv[1], '--out', sys.argv[2]])\n"
        "print(peak_memory() - before)"
    )
    run = run_command(sys.executable, "-c", code, path, path.with_name("out"),
                      PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    assert run.returncode == 0, run.stderr
    return float(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("suffix", [
    "one_group.parquet", *(pytest.param(suffix, marks=pytest.mark.slow) for suffix in ("txt", "jsonl", "parquet"))])
def test_memory_does_not_grow_with_the_corpus(suffix, tmp_path):
    """100 MB of text that does not compress; of .parquet in many row groups and in one. Read whole, it takes more."""
    path = tmp_path / f"corpus.{suffix}"
    documents = [os.urandom(8000).hex() + "\n" for _ in range(6250)]
    if suffix == "txt":
        path.write_text("".join(documents))
    elif suffix == "jsonl":
        write_jsonl(path, documents)
    else:
        group = len(documents) if suffix == "one_group.parquet" else 500
        write_parquet(path, documents, row_group_size=group, write_batch_size=16)
    assert peak_of_preparing(path) < 95
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["train_tokens"] > 89_000_000 and (meta["val"] == "last tenth") == (suffix == "txt")


@pytest.mark.slow
def test_memory_holds_a_few_long_rows_of_a_parquet_file(tmp_path):
    """Rows of 2 MB: all 32 at once would be 64 MB several times over."""
    rows = [os.urandom(1_000_000).hex() for _ in range(32)]
    write_parquet(tmp_path / "long.parquet", rows, write_batch_size=1, compression="none", use_dictionary=False)
    assert peak_of_preparing(tmp_path / "long.parquet") < 180


@pytest.mark.slow
@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_prepare_speed(capsys, tmp_path):
    prepare_speed = load_module(ROOT / "experiments" / "prepare_speed.py")
    prepare_speed.main([1_000_000])
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [row[1].strip() for row in rows] == ["txt", "jsonl", "parquet"]
    for row in rows:
        assert float(row[2]) > 0 and float(row[6]) > 10
    path = tmp_path / "a.jsonl"
    prepare_speed.write_jsonl(path, prepare_speed.documents(100_000))
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert 100_000 <= sum(map(len, texts)) < 120_000
