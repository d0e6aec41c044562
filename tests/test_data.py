"""data/prepare.py: the default text and its fallbacks, what it refuses, and token files that are whole or absent."""
import hashlib
import http.server
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, load_module, run_command

from data import vocabulary

PREPARE = ROOT / "data" / "prepare.py"
CONTENT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 50
BYTES, GPT2_BYTES = vocabulary.of_bytes(), vocabulary.of_bytes("gpt2-bytes")
NO_NETWORK = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "", "NO_PROXY": ""}
GPT2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
OLD = "the old text"


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A fresh data/prepare.py in an empty folder, with single-byte tokens; CONTENT is its Tiny Shakespeare."""
    monkeypatch.chdir(tmp_path)
    module = load_module(PREPARE)
    module.TINY_SHAKESPEARE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    module.load_tokenizer = lambda name: BYTES if name == "bytes" else GPT2_BYTES
    return module


@pytest.fixture
def server():
    """A local HTTP server; the path chooses how it behaves."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/missing":
                return self.send_error(404)
            if self.path == "/hanging":
                return time.sleep(2)
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            body = {"/wrong": b"x" + CONTENT[1:], "/truncated": CONTENT[:500]}.get(self.path, CONTENT)
            for part in (body[i : i + 1] for i in range(20)) if self.path == "/dripping" else [body]:
                self.wfile.write(part)
                time.sleep(0.1 * (len(part) == 1))  # never silent for long

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.block_on_close = False
        http_server.handle_error = lambda *_: None  # whoever asked is gone
        threading.Thread(target=http_server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


def write(**files):
    for name, text in files.items():
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())


def text_in(folder):
    folder = Path(folder)
    ids = np.concatenate([np.fromfile(folder / name, dtype="<u2") for name in ("train.bin", "val.bin")])
    tokenizer = BYTES if json.loads((folder / "meta.json").read_text())["tokenizer"] == "bytes" else GPT2_BYTES
    return tokenizer.decode(ids.tolist())


def refusal(prepare, *flags):
    """The error line of a preparation that must leave everything as it was."""
    before = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    with pytest.raises(SystemExit) as stop:
        prepare.main([str(flag) for flag in flags])
    assert re.fullmatch(r"error: .+: .+; .+", stop.value.code)
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == before
    return stop.value.code


# The default text


def test_the_default_text_from_the_url_to_the_files(prepare, server):
    prepare.default_text = lambda default_text=prepare.default_text: default_text(server)
    prepare.main(["--out", "new/tokens"])
    assert sorted(os.listdir("new/tokens")) == ["meta.json", "train.bin", "val.bin"] and os.listdir("new") == ["tokens"]
    n_train = len(CONTENT) * 9 // 10
    assert json.loads(Path("new/tokens/meta.json").read_text()) == {
        "source": "tiny_shakespeare", "sha256": hashlib.sha256(CONTENT).hexdigest(), "tokenizer": "gpt2-bytes",
        "vocab_size": 50257, "dtype": "<u2", "end_of_text": 50256, "documents": 1, "train_tokens": n_train,
        "val_tokens": len(CONTENT) - n_train, "val": "last tenth",
    }
    train = np.fromfile("new/tokens/train.bin", "<u2")
    assert len(train) == n_train and train[0] == 37  # "F" is id 37 in GPT-2's vocabulary: "!" (33) is 0
    assert text_in("new/tokens").encode() == CONTENT


@pytest.mark.parametrize("path, seconds, reason", [
    ("/wrong", 30, "SHA-256"), ("/truncated", 30, "Incomplete"), ("/missing", 30, "404"),
    ("/hanging", 0.5, "Timeout"), ("/dripping", 0.5, "Timeout"),
])
def test_a_bad_download_falls_back_loudly(path, seconds, reason, prepare, server, capsys):
    """Here in bytes, which need no network; a killed run has left its text, which is no stranger in the folder."""
    prepare.default_text = lambda default_text=prepare.default_text: default_text(server + path, seconds)
    os.makedirs("data/tokens.partial")
    write(**{"data/tokens.partial/default.txt": "left by a killed run"})
    started = time.monotonic()
    prepare.main(["--tokenizer", "bytes"])
    assert seconds == 30 or time.monotonic() - started < 1.8  # the server takes 2
    said = capsys.readouterr()
    assert reason in said.err and said.err.count("NOT comparable") == 1 and "python data/prepare.py" in said.err
    assert "python_topics (bytes tokens)" in said.out and os.listdir("data") == ["tokens"]
    assert text_in("data/tokens") == prepare.fallback_text() and len(prepare.fallback_text()) > 300_000


def test_offline_the_scripts_still_run(tmp_path):
    """No data, no network, no tokenizer: one command still trains, and the log names what it trained on."""
    run = run_command(
        sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "-T", "32", "--steps", "2",
        cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), **NO_NETWORK,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("NOT comparable") == 2
    assert "# data: python_topics (gpt2-bytes tokens)" in (tmp_path / "logs" / "baseline.log").read_text()
    assert os.listdir(tmp_path / "data") == ["tokens"]


@pytest.mark.parametrize("had, flags, tokenizer, reason", [
    # A text of one's own, or a vocabulary that took a training, goes only when the same is made again.
    ("my.txt bytes", ["--text", "new.txt"], "bytes", "would be lost"),
    ("new.txt gpt2", ["--text", "new.txt"], "bytes", "would be lost"),
    ("new.txt bpe-300", ["--text", "new.txt"], "bytes", "would be lost"),
    ("tiny_shakespeare bpe-300", [], "bytes", "would be lost"),
    ("new.txt bytes", ["--text", "new.txt"], "bytes", None),
    # Tiny Shakespeare's, which the README's own commands replace.
    ("tiny_shakespeare gpt2", ["--text", "new.txt"], "bytes", None),
    # No fallback replaces real tokens or a real text, but its like.
    ("tiny_shakespeare gpt2", ["offline"], "gpt2-bytes", "network"),
    ("tiny_shakespeare gpt2", ["offline"], "gpt2", "network"),  # the merges are at hand, the text is not
    ("my.txt gpt2-bytes", ["offline"], "gpt2-bytes", "network"),
    ("python_topics gpt2", ["offline"], "gpt2-bytes", "network"),
    ("my.txt gpt2", ["--text", "new.txt"], "gpt2-bytes", "network"),
    ("my.txt gpt2-bytes", ["--text", "new.txt"], "gpt2-bytes", None),
    ("my.txt gpt2-bytes", ["--text", "new.txt"], "bytes", None),
    ("python_topics gpt2-bytes", ["offline"], "gpt2-bytes", None),
    ("python_topics gpt2-bytes", ["--text", "new.txt"], "gpt2", None),
    (None, ["offline"], "gpt2-bytes", None),  # a folder without a usable meta.json
])
def test_what_may_replace_what(had, flags, tokenizer, reason, prepare):
    source = "python_topics" if flags == ["offline"] else "tiny_shakespeare"
    prepare.default_text = lambda: (prepare.fallback_text(), source)
    encoder = vocabulary.of_bytes()
    encoder.name, prepare.load_tokenizer = tokenizer, lambda name: encoder
    os.mkdir("out")
    write(**{"new.txt": "some new text", "out/train.bin": b"old",
             "out/meta.json": json.dumps(dict(zip(("source", "tokenizer"), had.split(), strict=True)) if had else [])})
    flags = [*(flags if flags != ["offline"] else []), "--out", "out"]
    if reason:
        said = refusal(prepare, *flags)
        assert "--out" in said and reason in said and "holds {} ({} tokens)".format(*had.split()) in said
    else:
        prepare.main(flags)
        assert json.loads(Path("out/meta.json").read_text())["tokenizer"] == tokenizer


# A text


@GPT2
@pytest.mark.skipif(not os.environ.get("TINY_SHAKESPEARE"), reason="set TINY_SHAKESPEARE to the text's path")
def test_tiny_shakespeare_has_338025_tokens(tmp_path):
    """As a program, on a terminal that lacks a character of the folder's name."""
    text, out = Path(os.environ["TINY_SHAKESPEARE"]).resolve(), tmp_path / "naïve"
    run = run_command(sys.executable, PREPARE, "--text", text, "--out", out, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "na?ve: tiny_shakespeare (gpt2 tokens)" in run.stdout, run.stderr
    train, val = (np.fromfile(out / name, dtype="<u2") for name in ("train.bin", "val.bin"))
    assert (len(train), len(val)) == (304_222, 338_025 - 304_222)
    assert vocabulary.GPT2().decode([*train, *val]).encode() == text.read_bytes()


def test_an_error_is_one_line_of_the_program(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no parquet")
    run = run_command(sys.executable, PREPARE, "--text", "a.parquet", "--out", "out", "--tokenizer", "bytes",
                      cwd=tmp_path)
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("error: a.parquet: document 1 ")
    assert "Traceback" not in run.stderr and os.listdir(tmp_path) == ["a.parquet"]


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


LINES = b'{"text": "good"}\n'


@pytest.mark.parametrize("name, content, reason", [
    ("a.txt", b"", "0 tokens"),
    ("a.txt", b"caf\xe9 au lait", "a.txt: not UTF-8.*--encoding"),
    ("a.txt", "utf-16".encode("utf-16"), "a.txt: not UTF-8.*--encoding"),
    ("a.jsonl", LINES + b'\n{"text": "cut', "a.jsonl: line 3 "),
    ("a.jsonl", b'{\n  "text": "pretty"\n}\n', "a.jsonl: line 1 .*one line"),
    ("a.jsonl", b'{"text": "caf\xe9"}\n', "a.jsonl: not UTF-8.*--encoding"),
    ("a.jsonl", LINES + b'{"body": ""}\n', "document 2 .*'text' of {'body'.*; choose another --field$"),
    ("a.jsonl", b'["x"]\n', "document 1 .*'text' of \\['x'"),
    ("a.jsonl", b'{"text": 0}\n', "document 1 .*'text' of {'text': 0}"),
    ("a.jsonl", b'{"text": ""}\n', "0 tokens"),
    ("a.jsonl", b"[" * 200_000, "RecursionError"),
    ("a.parquet", b"PAR1 no parquet", "a.parquet: document 1 .*ArrowInvalid"),
    ("a.pdf", b"%PDF", "0 tokens.*\\.txt, \\.jsonl or \\.parquet"),
])
def test_texts_that_cannot_be_used(name, content, reason, prepare):
    os.mkdir("corpus")
    write(**{f"corpus/{name}": content})
    assert re.search(reason, refusal(prepare, "--text", "corpus", "--out", "out"))


@pytest.mark.parametrize("flags, reason", [
    (["--name", "x"], "--name.*--hf"), (["--split", "x"], "--split.*--hf"), (["--field", "x"], "--field.*--hf"),
    (["--encoding", "utf-16"], "--encoding: .*--text"),
    (["--text", "a.txt", "--encoding", "klingon"], "--encoding klingon: "),
    (["--text", ""], "--text: is empty"), (["--text", "nowhere"], "--text nowhere: no such file"),
    (["--train-tokenizer", "256"], "--train-tokenizer 256: .* 257 .* 65536"),
    (["--train-tokenizer", "65537"], "--train-tokenizer 65537: "),
    (["--text", "a.txt", "--out", "/"], "--out /: "), (["--text", "a.txt", "--out", "/proc/x"], "--out /proc/x: "),
    (["--text", "a.txt", "--out", "a.txt"], "--out a.txt: .*another --out"),
    (["--text", "a.txt", "--out", "a.txt/y"], "--out a.txt/y: .*another --out"),
    (["--text", "a.txt", "--out", 200 * "long"], "File name too long"),
])
def test_wrong_flags(flags, reason, prepare):
    write(**{"a.txt": "To be, or not to be"})
    assert re.search(reason, refusal(prepare, "--out", "out", *flags))


@pytest.mark.parametrize("place", ["mine", "mine.partial"])
def test_a_foreign_folder_is_never_replaced(place, prepare):
    os.mkdir(place)
    write(**{f"{place}/novel.txt": "my novel, in a folder of its own"})
    assert f"{place}/novel.txt" in refusal(prepare, "--text", f"{place}/novel.txt", "--out", "mine")


# Files that are whole or absent

STOPPED_RUN = """
import os, sys; from data import prepare, vocabulary
class Tokenizer(vocabulary.Bytes):
    def encode(self, text):
        if "STOP" in text and sys.argv[3] != "0":
            os.kill(os.getpid(), int(sys.argv[3]))
        return super().encode(text)
prepare.load_tokenizer = lambda name: Tokenizer("gpt2-bytes")
print("ready", flush=True)
prepare.main(["--text", sys.argv[1], "--out", sys.argv[2]])
"""


@pytest.fixture
def old(prepare):
    """data/prepare.py in a folder where `tokens` already holds a text."""
    write(old=OLD)
    prepare.main(["--text", "old", "--out", "tokens"])
    os.remove("old")
    return prepare


def stopped(text, number=0, code=STOPPED_RUN, **more):
    """A program that prepares the file `text` and, where that says STOP, gets the signal `number`."""
    words = [sys.executable, "-c", code, Path(text).resolve(), Path("tokens").resolve(), str(int(number))]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, **more)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_preparation_leaves_the_old_files(number, old):
    """Stopped in the middle of the text: the old folder is as it was, and the next run cleans up and works."""
    new = "new text " * 200_000 + "STOP" + " and the rest" * 1000
    write(new=new)
    run = stopped("new", number)
    assert run.returncode == (1 if number == signal.SIGINT else -number) and text_in("tokens") == OLD
    assert Path("tokens.partial").exists() == (number != signal.SIGINT)
    if number == signal.SIGINT:
        assert run.stderr.splitlines()[-1].startswith("error: --out ") and "stopped" in run.stderr
    old.main(["--text", "new", "--out", "tokens"])
    assert text_in("tokens") == new and sorted(os.listdir()) == ["new", "tokens"]


def test_killed_while_the_drawn_documents_are_moved(old):
    write(new="<|endoftext|>".join(["some text"] * 300))
    run = stopped("new", code=STOPPED_RUN.replace("print(", """
def move(train, val, *_):
    val.write(train.read(500))
    os.kill(os.getpid(), 9)
prepare.move_drawn = move
print(""", 1))
    assert run.returncode == -9 and Path("tokens.partial/new/val.bin").exists() and text_in("tokens") == OLD
    old.main(["--text", "new", "--out", "tokens"])
    assert text_in("tokens") == "some text" * 300 and not Path("tokens.partial").exists()
    assert json.loads(Path("tokens/meta.json").read_text())["val"] == "documents drawn by hash"


def test_killed_between_the_two_renames(old):
    """The old tokens are then in tokens.partial: the next run puts them back, even one that fails."""
    os.mkdir("tokens.partial")
    os.rename("tokens", "tokens.partial/old")
    with pytest.raises(SystemExit):
        old.main(["--text", "nowhere", "--out", "tokens"])
    assert text_in("tokens") == OLD and os.listdir() == ["tokens"]


def test_an_old_folder_is_back_when_the_new_one_cannot_take_its_place(old, monkeypatch):
    """As on Windows, where a folder in use is not renamed."""
    def refuse_the_new(path, target, rename=Path.rename):
        if path.name == "new":
            raise PermissionError("in use")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    write(text="some new text")
    assert "in use" in refusal(old, "--text", "text", "--out", "tokens")


def test_a_full_disk_leaves_the_old_files(old):
    """A limit on the size of files stands for the full disk: the write fails with an OSError."""
    write(new="some text " * 100_000)
    run = stopped("new", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2))
    assert run.returncode == 1 and re.fullmatch("error: --out .*: .*too large.*; .*", run.stderr.splitlines()[-1])
    assert text_in("tokens") == OLD and sorted(os.listdir()) == ["new", "tokens"]


@pytest.mark.parametrize("flags", [[], ["--tokenizer", "bytes"]])
def test_the_second_of_two_that_found_no_data_uses_the_firsts(flags, prepare):
    """Two scripts, or two ranks, start together: the second must not replace what the first is reading.

    One that was asked for other tokens does (or says, without a network, that it cannot)."""
    write(text="some text or other")
    with prepare.locked(Path("tokens").resolve()):
        run = subprocess.Popen([sys.executable, PREPARE, "--out", "tokens", *flags], stderr=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
        assert "waiting" in run.stderr.readline()
        assert run.poll() is None and not Path("tokens").exists()
        prepare.main(["--text", "text", "--out", "first"])
        os.rename("first", "tokens")
        before = os.stat("tokens/train.bin").st_ino
    printed, _ = run.communicate(timeout=60)
    assert sorted(os.listdir()) == ["text", "tokens"]
    if flags:
        assert run.returncode == 1 or "(bytes tokens)" in printed
    else:
        assert run.returncode == 0 and "text (gpt2-bytes tokens)" in printed
        assert os.stat("tokens/train.bin").st_ino == before


@pytest.mark.parametrize("size", [257, 65536])
def test_the_smallest_and_the_largest_vocabulary_are_taken(size, prepare):
    assert "no such file" in refusal(prepare, "--text", "nowhere", "--out", "out", "--train-tokenizer", size)
