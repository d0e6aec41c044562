"""data/prepare.py: the default text and its fallbacks, what it refuses, and token files that are whole or absent."""
import contextlib
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, load_module, run_command

from data import vocabulary

PREPARE = ROOT / "data" / "prepare.py"
CONTENT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 50
BYTES, GPT2_BYTES = vocabulary.of_bytes(), vocabulary.of_bytes("gpt2-bytes")
OLD = "the old text"


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A fresh data/prepare.py in an empty folder, with single-byte tokens; CONTENT is its Tiny Shakespeare."""
    monkeypatch.chdir(tmp_path)
    module = load_module(PREPARE)
    module.TINY_SHAKESPEARE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    module.load_tokenizer = lambda name: BYTES if name == "bytes" else GPT2_BYTES
    return module


def write(**files):
    for name, text in files.items():
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())


def text_in(folder):
    ids = np.concatenate([np.fromfile(Path(folder, name), dtype="<u2") for name in ("train.bin", "val.bin")])
    return vocabulary.of_ours(Path(folder)).decode(ids.tolist())


def refusal(prepare, *flags):
    """The error line of a preparation that must leave everything as it was."""
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as stop:
        prepare.main([str(flag) for flag in flags])
    assert re.fullmatch(r"error: .+: .+; .+", stop.value.code)
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before
    return stop.value.code


def test_the_default_text_from_the_url_to_the_files(prepare):
    write(there=CONTENT)
    url = Path("there").resolve().as_uri()
    prepare.default_text = lambda default_text=prepare.default_text: default_text(url)
    prepare.main(["--out", "new/tokens"])
    assert sorted(os.listdir("new/tokens")) == ["meta.json", "train.bin", "val.bin"] and os.listdir("new") == ["tokens"]
    n_train = len(CONTENT) * 9 // 10
    meta = json.loads(Path("new/tokens/meta.json").read_text())
    assert len(meta.pop("origin")) == 16 and meta == {
        "source": "tiny_shakespeare", "sha256": hashlib.sha256(CONTENT).hexdigest(), "tokenizer": "gpt2-bytes",
        "vocab_size": 50257, "dtype": "<u2", "end_of_text": 50256, "documents": 1, "train_tokens": n_train,
        "val_tokens": len(CONTENT) - n_train, "val": "last tenth",
    }
    train = np.fromfile("new/tokens/train.bin", "<u2")
    assert len(train) == n_train and train[0] == 37  # "F" is id 37 in GPT-2's vocabulary: "!" (33) is 0
    assert text_in("new/tokens").encode() == CONTENT


@pytest.mark.parametrize("content, reason", [(b"x", "SHA-256"), (None, "No such file"), (None, "Timeout")])
def test_a_bad_download_falls_back_loudly(content, reason, prepare, capsys, monkeypatch):
    """Here in bytes, which need no network; a killed run has left its text, which is no stranger in the folder."""
    write(**({"there": content} if content else {}))
    url = Path("there").resolve().as_uri()
    prepare.default_text = lambda default_text=prepare.default_text: default_text(url, seconds=0.5)
    if reason == "Timeout":  # of all, since urlopen's own applies to each packet
        monkeypatch.setattr(prepare.urllib.request, "urlopen", lambda url, timeout: time.sleep(5))
    os.makedirs("data/tokens.partial")
    write(**{"data/tokens.partial/default.txt": "left by a killed run"})
    started = time.monotonic()
    prepare.main(["--tokenizer", "bytes"])
    assert time.monotonic() - started < 4
    said = capsys.readouterr()
    assert reason in said.err and said.err.count("NOT comparable") == 1 and "python data/prepare.py" in said.err
    assert "python_topics (bytes tokens)" in said.out and os.listdir("data") == ["tokens"]
    assert text_in("data/tokens") == prepare.fallback_text() and len(prepare.fallback_text()) > 300_000


def test_offline_the_scripts_still_run(tmp_path):
    """No data, no network, no tokenizer: one command still trains, and the log names what it trained on."""
    no_network = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    rung_11, = (ROOT / "beyond").glob("rung_11_*.py")
    run = run_command(
        sys.executable, rung_11, "--model", "tiny", "--device", "cpu", "-B", "1", "-T", "32", "--total-batch", "32",
        "--steps", "2", "--compile-mode", "none", cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"),
        **no_network, no_proxy="", NO_PROXY="",
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("NOT comparable") == 2
    assert "# data: python_topics (gpt2-bytes tokens)" in (tmp_path / "logs" / f"{rung_11.stem}.log").read_text()
    assert os.listdir(tmp_path / "data") == ["tokens"]


def test_tokens_of_the_same_name_but_another_origin_stay(prepare):
    """Of a file in another folder, another field; those of the same command are made again."""
    os.makedirs("a"), os.makedirs("b")
    write(**{f"{folder}/{name}": json.dumps({"text": folder * 20, "title": "title" * 20}) for folder in "ab"
             for name in ("my.txt", "my.jsonl")})
    for out, first, other in (("of_a", "--text a/my.txt", "--text b/my.txt"),
                              ("texts", "--text a/my.jsonl", "--text a/my.jsonl --field title")):
        for _ in range(2):
            prepare.main([*first.split(), "--tokenizer", "bytes", "--out", out])
        said = refusal(prepare, *other.split(), "--tokenizer", "bytes", "--out", out)
        assert "(bytes tokens) of another origin, which would be lost" in said


@pytest.mark.parametrize("had, new, reason", [
    # A text of one's own, or a vocabulary that took a training, goes only when the same is made again.
    ("my.txt bytes", "new.txt bytes", "would be lost"), ("new.txt gpt2", "new.txt bytes", "would be lost"),
    ("new.txt bpe-300", "new.txt bytes", "would be lost"),
    ("tiny_shakespeare bpe-300", "tiny_shakespeare bytes", "would be lost"),
    ("new.txt bytes", "new.txt bytes", None),
    # Tiny Shakespeare's, which the README's own commands replace.
    ("tiny_shakespeare gpt2", "new.txt bytes", None),
    # No fallback replaces real tokens or a real text, but its like.
    ("tiny_shakespeare gpt2", "python_topics gpt2", "network"),  # the merges are at hand, the text is not
    ("my.txt gpt2-bytes", "python_topics gpt2-bytes", "network"),
    ("my.txt gpt2", "new.txt gpt2-bytes", "network"),
    ("my.txt gpt2-bytes", "new.txt bytes", None), ("python_topics gpt2-bytes", "python_topics gpt2-bytes", None),
    ("python_topics gpt2-bytes", "new.txt gpt2", None),
    (None, "python_topics gpt2-bytes", None),  # a folder without a usable meta.json
])
def test_what_may_replace_what(had, new, reason, prepare):
    source, tokenizer = new.split()
    prepare.default_text = lambda: (prepare.fallback_text(), source)
    encoder = vocabulary.of_bytes()
    encoder.name, prepare.load_tokenizer = tokenizer, lambda name: encoder
    os.mkdir("out")
    write(**{"new.txt": "some new text", "out/train.bin": b"old",
             "out/meta.json": json.dumps(dict(zip(("source", "tokenizer"), had.split(), strict=True)) if had else [])})
    flags = [*(["--text", source] if source == "new.txt" else []), "--out", "out"]
    if reason:
        said = refusal(prepare, *flags)
        assert "--out" in said and reason in said and "holds {} ({} tokens)".format(*had.split()) in said
    else:
        prepare.main(flags)
        assert json.loads(Path("out/meta.json").read_text())["tokenizer"] == tokenizer


@pytest.mark.skipif(not {"TIKTOKEN_CACHE_DIR", "TINY_SHAKESPEARE"} <= {*os.environ}, reason="needs both, see .ci/run")
def test_tiny_shakespeare_has_338025_tokens(tmp_path):
    """As a program, on a terminal that lacks a character of the folder's name."""
    text, out = Path(os.environ["TINY_SHAKESPEARE"]).resolve(), tmp_path / "naïve"
    run = run_command(sys.executable, PREPARE, "--text", text, "--out", out, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "na?ve: tiny_shakespeare (gpt2 tokens)" in run.stdout, run.stderr
    train, val = (np.fromfile(out / name, dtype="<u2") for name in ("train.bin", "val.bin"))
    assert (len(train), len(val)) == (304_222, 338_025 - 304_222)
    assert vocabulary.GPT2().decode([*train, *val]).encode() == text.read_bytes()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "UTF-8"])
def test_a_text_in_another_encoding(encoding, prepare):
    """A byte order mark is no text."""
    mark = "\ufeff" if encoding == "UTF-8" else ""
    write(**{"a.txt": (mark + "caf\xe9 au lait\r\n").encode(encoding),
             "a.jsonl": '{"text": "caf\xe9 au lait\\r\\n"}\n{"text": "x"}\n'.encode(encoding)})
    for name, end in [("a.txt", ""), ("a.jsonl", "x")]:
        prepare.main(["--text", name, "--encoding", encoding, "--out", "out"])
        assert text_in("out") == "caf\xe9 au lait\r\n" + end
    wrong = "utf-16" if encoding == "UTF-8" else "UTF-8"
    assert f"a.txt: not {wrong}" in refusal(prepare, "--text", "a.txt", "--encoding", wrong, "--out", "out")


def test_the_shortest_text(prepare, capsys):
    """With a token less, val.bin would have a single one. And without a known suffix, what was done is said."""
    write(long="0123456789a", short="0123456789")
    prepare.main(["--text", "long", "--out", "out"])
    assert [Path("out", name).stat().st_size for name in ("train.bin", "val.bin")] == [18, 4]
    assert "long: read as plain text" in capsys.readouterr().err
    assert "10 tokens" in refusal(prepare, "--text", "short", "--out", "short.out")


@pytest.mark.parametrize("name, content, reason", [
    ("a.txt", b"caf\xe9 au lait", "a.txt: not UTF-8.*--encoding"),
    ("a.jsonl", b'{"text": "good"}\n\n{"text": "cut', "a.jsonl: line 3 "),
    ("a.jsonl", b'{\n  "text": "pretty"\n}\n', "a.jsonl: line 1 .*one line"),
    ("a.jsonl", b'{"text": "caf\xe9"}\n', "a.jsonl: not UTF-8.*--encoding"),
    ("a.jsonl", b'{"text": "good"}\n{"body": ""}\n', "document 2 .*'text' of {'body'.*; choose another --field$"),
    ("a.jsonl", b'["x"]\n', "document 1 .*'text' of \\['x'"),
    ("a.jsonl", b'{"text": 0}\n', "document 1 .*'text' of {'text': 0}"),
    ("a.parquet", b"PAR1 no parquet", "a.parquet: document 1 .*ArrowInvalid"),
    ("a.pdf", b"%PDF", "0 tokens.*\\.txt, \\.jsonl or \\.parquet"),
])
def test_texts_that_cannot_be_used(name, content, reason, prepare):
    os.mkdir("corpus")
    write(**{f"corpus/{name}": content})
    assert re.search(reason, refusal(prepare, "--text", "corpus", "--out", "out"))


def test_wrong_flags(prepare):
    write(**{"a.txt": "To be, or not to be"})
    for words, reason in [
        ("--name x", "--name.*--hf"), ("--split x", "--split.*--hf"), ("--field x", "--field.*--hf"),
        ("--encoding utf-16", "--encoding: .*--text"), ("--text a.txt --encoding klingon", "--encoding klingon: "),
        ("--text=", "--text: is empty"), ("--text nowhere", "--text nowhere: no such file"),
        ("--train-tokenizer 256", "--train-tokenizer 256: .* 257 .* 65536"), ("--train-tokenizer 65537", "65537: "),
        ("--text a.txt --out /proc/x", "--out /proc/x: "), ("--text a.txt --out a.txt", "a.txt: .*another --out"),
        ("--text a.txt --out a.txt/y", "--out a.txt/y: .*another --out"),
    ]:
        assert re.search(reason, refusal(prepare, "--out", "out", *words.split()))


@pytest.mark.parametrize("place", ["mine", "mine.partial"])
def test_a_foreign_folder_is_never_replaced(place, prepare):
    os.mkdir(place)
    write(**{f"{place}/novel.txt": "my novel, in a folder of its own"})
    assert f"{place}/novel.txt" in refusal(prepare, "--text", f"{place}/novel.txt", "--out", "mine")


@pytest.fixture
def old(prepare):
    """data/prepare.py in a folder where `tokens` already holds a text."""
    write(old=OLD)
    prepare.main(["--text", "old", "--out", "tokens"])
    os.remove("old")
    return prepare


@pytest.mark.parametrize("error, said", [(KeyboardInterrupt(), "stopped"), (OSError("disk full"), "disk full")])
def test_a_stopped_preparation_leaves_the_old_files(error, said, old):
    """Stopped in the middle of the text; the next one works."""
    class Tokenizer(vocabulary.Bytes):
        def encode(self, text):
            if "STOP" in text:
                raise error
            return super().encode(text)

    old.load_tokenizer, usual = lambda name: Tokenizer("gpt2-bytes"), old.load_tokenizer
    new = "new text " * 200_000 + "STOP" + " and the rest" * 1000
    write(new=new)
    line = refusal(old, "--text", "new", "--out", "tokens")
    assert line.startswith("error: --out tokens: ") and said in line and text_in("tokens") == OLD
    old.load_tokenizer = usual
    old.main(["--text", "new", "--out", "tokens"])
    assert text_in("tokens") == new and sorted(os.listdir()) == ["new", "tokens"]


def test_what_a_killed_run_left(old):
    """Killed between its two renames, it has the old tokens: the next run puts them back, even one that fails."""
    os.makedirs("tokens.partial/new")
    write(**{"tokens.partial/new/train.bin": "half"})
    os.rename("tokens", "tokens.partial/old")
    with pytest.raises(SystemExit, match="nowhere: no such file"):
        old.main(["--text", "nowhere", "--out", "tokens"])
    assert text_in("tokens") == OLD and os.listdir() == ["tokens"]


def test_the_second_of_two_that_found_no_data_uses_the_firsts(old):
    """Two scripts, or two ranks, start together: the second must not replace what the first is reading."""
    before = os.stat("tokens/train.bin").st_ino
    old.locked = lambda out: contextlib.nullcontext(True)  # it had to wait
    old.main(["--out", "tokens"])
    assert text_in("tokens") == OLD and os.stat("tokens/train.bin").st_ino == before


@pytest.mark.parametrize("size", [257, 65536])
def test_the_smallest_and_the_largest_vocabulary_are_taken(size, prepare):
    assert "no such file" in refusal(prepare, "--text", "nowhere", "--out", "out", "--train-tokenizer", size)
