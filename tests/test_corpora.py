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
def prepare():
    """A fresh data/prepare.py with single-byte tokens, which needs no network."""
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


# Documents


@pytest.mark.parametrize("suffix, write", [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_records_become_documents(suffix, write, prepare, tmp_path):
    """Empty and missing texts are no documents; the hash is that of the texts joined by <|endoftext|>."""
    path = tmp_path / f"corpus.{suffix}"
    write(path, ["", DOCUMENTS[0], "", *DOCUMENTS[1:], None], field="content")
    meta = prepare.prepare(path, tmp_path / "out", field="content")
    assert documents_of(tokens_in(tmp_path / "out")) == DOCUMENTS
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
    said = capsys.readouterr()
    assert "corpus (gpt2-bytes tokens), 5 documents" in said.out and "left out" not in said.err
    for name in ("picture.png", "read.md", "b/more.MD", "no_suffix"):
        (corpus / name).write_bytes(b"\xff\xfe")
    prepare.main(["--text", str(corpus), "--out", str(tmp_path / "out")])
    assert documents_of(tokens_in(tmp_path / "out")) == DOCUMENTS
    assert f"WARNING: {corpus}: files left out: 4 (1 without suffix, 2 .md, 1 .png); " in capsys.readouterr().err


def test_end_of_text_separates_the_documents_of_a_txt_file(prepare, merges, tmp_path, monkeypatch):
    """As tiktoken encodes it with special tokens allowed, wherever a block or a piece ends; in a record it is text."""
    end, texts = "<|endoftext|>", ["One.\n", "\nTwo " * 50, " ", "\u65e5\u672c" * 60, "x", "no <|endoftext> at all\n"]
    (tmp_path / "a.txt").write_text(f"{end}{end.join(texts[:3])}{end}{end}{end.join(texts[3:])}{end}")
    usual = prepare.PIECE_CHARACTERS
    for size in (*range(30, 60), usual):
        monkeypatch.setattr(prepare, "PIECE_CHARACTERS", size)
        assert prepare.prepare(tmp_path / "a.txt", tmp_path / "out")["documents"] == len(texts)
        tokens = tokens_in(tmp_path / "out")
        assert documents_of(tokens, merges) == texts
    assert tokens.tolist() == merges.encoding.encode(end.join(texts), allowed_special="all")
    write_jsonl(tmp_path / "a.jsonl", texts=[end.join(texts)])
    assert prepare.prepare(tmp_path / "a.jsonl", tmp_path / "of_jsonl")["documents"] == 1
    assert END not in tokens_in(tmp_path / "of_jsonl")


def test_lines_with_other_keys_and_types(prepare, tmp_path):
    """As in real .jsonl, also beyond the first 10 MB, where `datasets` would fail; and half a surrogate pair."""
    long = "long " * 2_200_000
    lines = [{"text": long, "meta": 1}, {"meta": "one", "text": "2020-01-01", "new": {"key": []}}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + '\n{"text": "half \\ud83d pair"}')
    pieces = [*prepare.read(tmp_path / "a.jsonl", "text", "utf-8")]
    assert [text for begins, text in pieces if begins][1:] == ["2020-01-01", "half ? pair"]
    assert "".join(text for _, text in pieces[:-2]) == long


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A local dataset with two splits, in the format in which the hub stores them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dataset" / "data"
    folder.mkdir(parents=True)
    for split, texts in {"train": [*DOCUMENTS, ""], "test": DOCUMENTS[:2]}.items():
        for shard in range(2):
            write_parquet(folder / f"{split}-0000{shard}-of-00002.parquet", texts[shard::2])


def test_a_hugging_face_dataset(dataset, prepare, tmp_path):
    """Shard by shard; its name in the metadata, with that of its configuration."""
    for flags, documents in ([], DOCUMENTS[::2] + DOCUMENTS[1::2]), (["--split", "test"], DOCUMENTS[:2]):
        prepare.main(["--hf", "dataset", "--name", "default", "--out", "out", *flags])
        assert documents_of(tokens_in(tmp_path / "out")) == documents
        meta = json.loads((tmp_path / "out" / "meta.json").read_text())
        assert (meta["documents"], meta["source"]) == (len(documents), "dataset/default")


@pytest.mark.parametrize("flags, reason", [
    (["--split", "nowhere"], "nowhere"), (["--name", "nobody"], "nobody"),
    (["--field", "body"], "'body'"), (["--field", "id"], "'id'"),
    (["--hf", "nobody/nothing"], "nobody/nothing: .*Hub"),
    (["--hf", "texts"], ".txt .*--text"),  # each line would be a document
])
def test_a_dataset_asked_wrongly(flags, reason, dataset, prepare, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(SystemExit, match=f"error: --hf .*{reason}.*; c"):
        prepare.main(["--hf", "dataset", "--out", "out", *flags])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_local_dataset_of_several_kinds_is_read_in_part_and_says_so(dataset, prepare, tmp_path, capsys):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("text")
    (tmp_path / "mixed" / "b.jsonl").write_text('{"text": "a document of its own"}\n')
    prepare.main(["--hf", "mixed", "--out", "out"])
    said = capsys.readouterr().err
    assert "--hf mixed" in said and ".jsonl, .txt" in said and "--text" in said
    assert documents_of(tokens_in(tmp_path / "out")) == ["a document of its own"]


def test_damaged_parquet_files(prepare, tmp_path):
    column = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    write_parquet(tmp_path / "latin.parquet", column)
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS * 1000}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-100])
    (tmp_path / "hole.parquet").write_bytes(b"PAR1" + bytes(200) + whole[204:])
    for name in ("latin", "cut", "hole"):
        with pytest.raises(SystemExit, match=f"error: .*{name}.parquet: document 1 "):
            prepare.main(["--text", str(tmp_path / f"{name}.parquet"), "--out", str(tmp_path / "out")])


# The tokens


@pytest.mark.parametrize("split", ["tiktoken", "bytes", "gpt2", "cl100k"])
def test_pieces_give_the_tokens_of_the_whole(split, prepare, tmp_path, monkeypatch, request):
    """However odd the whitespace, of tokenizers that split into words as GPT-2's, as later ones or not at all."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    draw = random.Random(0)
    parts = ["word", "words", " ", "  ", "\n", "\n\n", "\t", "it's", "we'll ", "12", "!?", "!\n", "_\n", "é", "日本",
             "\u00a0", "\u3000", "\r\n"]
    texts = ["".join(draw.choices(parts, k=1000)) for _ in range(20)]
    if split in ("tiktoken", "bytes"):
        tokenizer = request.getfixturevalue("merges") if split == "tiktoken" else vocabulary.of_bytes()
    else:
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
    texts[71] = "<|endoftext|>"
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    expected = [token for text in texts for token in [END, *merges.encoding.encode_ordinary(text)]][1:]
    assert tokens_in(tmp_path / "out").tolist() == expected


def test_text_without_blanks_and_a_million_blanks(prepare, merges, tmp_path):
    """tiktoken panics over a million blanks in one piece; a text that offers no place to cut is cut all the same."""
    text = "a" + 1_100_000 * " " + "word " + 1_100_000 * "\n" + 200_000 * "xy" + "end"
    (tmp_path / "text.txt").write_text(text)
    write_jsonl(tmp_path / "text.jsonl", [text])
    for path in (tmp_path / "text.txt", tmp_path / "text.jsonl"):
        pieces = [piece for _, piece in prepare.read(path, "text", "utf-8")]
        assert max(map(len, pieces)) <= 2 * prepare.PIECE_CHARACTERS and "".join(pieces) == text
    prepare.prepare(path, tmp_path / "out")
    assert merges.decode(tokens_in(tmp_path / "out").tolist()) == text


# What is drawn for val.bin


@pytest.mark.parametrize("n_tokens", [7, 64, 1 << 20])
def test_validation_documents_are_drawn_by_hash(n_tokens, prepare, tmp_path, monkeypatch):
    """A tenth, spread over the corpus, whole and in their order, as are the others; wherever the moved blocks end."""
    monkeypatch.setattr(prepare.move_drawn, "__defaults__", (n_tokens,))
    texts = [f"{number} " * (1 + number % 5) for number in range(500)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    drawn = [number for number in range(500) if prepare.is_drawn(number)]
    assert drawn[:3] == [18, 72, 74] and meta["documents"] == 500
    assert [sum(map(prepare.is_drawn, range(start, start + 10_000))) for start in (0, 10_000)] == [1004, 1033]
    files = [np.fromfile(tmp_path / "out" / name, dtype="<u2") for name in ("train.bin", "val.bin")]
    for val, tokens in enumerate(files):
        assert documents_of(tokens) == [text for number, text in enumerate(texts) if (number in drawn) == val]
    assert [meta["train_tokens"], meta["val_tokens"]] == [*map(len, files)] and meta["val"] == "documents drawn by hash"
    assert sum(map(len, files)) == len("".join(texts)) + 498  # each file has an end of text between its documents
    assert meta["sha256"] == hashlib.sha256("<|endoftext|>".join(texts).encode()).hexdigest()


@pytest.mark.parametrize("n, val", [(99, "last tenth"), (100, "documents drawn by hash")])
def test_a_hundred_documents_are_many(n, val, prepare, tmp_path):
    texts = [f"{number:03} " * (1 + 2 * prepare.is_drawn(number)) for number in range(n)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    assert prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")["val"] == val


@pytest.mark.parametrize("n, long, times", [(1, 0, 50), (99, 18, 6), (500, 3, 2000), (500, 18, 2000), (500, 18, 100)])
def test_few_documents_are_cut_at_nine_tenths(n, long, times, prepare, tmp_path):
    """Or many, if one of them holds most of the text, drawn (18) or not."""
    texts = [f"{number:03} " * (times if number == long else 1) for number in range(n)]
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    meta = prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    assert documents_of(tokens_in(tmp_path / "out")) == texts and meta["val"] == "last tenth"
    assert meta["train_tokens"] == (meta["train_tokens"] + meta["val_tokens"]) * 9 // 10


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


def test_drawn_documents_with_hardly_any_text_are_not_for_validation(prepare, tmp_path):
    """Of 500 documents, where the drawn ones have 3 % of the tokens: at least a twentieth is asked for."""
    write_jsonl(tmp_path / "corpus.jsonl", [f"{n:03} " * (1 if prepare.is_drawn(n) else 3) for n in range(500)])
    assert prepare.prepare(tmp_path / "corpus.jsonl", tmp_path / "out")["val"] == "last tenth"
