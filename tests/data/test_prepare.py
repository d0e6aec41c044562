"""data/prepare.py: the default text, what it refuses, token files that are whole or absent."""
import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from load_script import ROOT, load_module
from run_script import as_program, run_command
from token_folders import tokens_in

from data import vocabulary

PREPARE = ROOT / "data" / "prepare.py"
CONTENT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 50


@pytest.fixture
def prepare(prepare):
    """To data/prepare.py CONTENT is Shakespeare's."""
    prepare.TINY_SHAKESPEARE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    prepare.default_text = lambda: (CONTENT.decode(), "tiny_shakespeare")
    return prepare


def write(name, content):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def text_in(folder, *splits):
    return vocabulary.of_ours(Path(folder)).decode(tokens_in(folder, *splits).tolist())


def meta_in(folder):
    return json.loads(Path(folder, "meta.json").read_text())


def refusal(prepare, *flags):
    """The error line of a preparation that must leave everything as it was."""
    def everything():
        return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}

    before = everything()
    with pytest.raises(SystemExit) as stop:
        prepare.main([str(flag) for flag in flags])
    assert re.fullmatch(r"error: .+: .+; .+", stop.value.code)
    assert everything() == before
    return stop.value.code


def test_the_default_text_from_the_url_to_the_files(prepare):
    write("there", CONTENT)
    fresh = load_module(PREPARE)
    fresh.TINY_SHAKESPEARE_SHA256 = prepare.TINY_SHAKESPEARE_SHA256
    prepare.default_text = lambda: fresh.default_text(Path("there").resolve().as_uri())
    prepare.main(["--out", "new/own/tokens"])
    out = Path("new/own/tokens")
    assert sorted(os.listdir(out)) == ["meta.json", "train.bin", "val.bin"] and os.listdir("new/own") == ["tokens"]
    n_train = len(CONTENT) * 9 // 10
    assert meta_in(out) == {
        "source": "tiny_shakespeare", "sha256": hashlib.sha256(CONTENT).hexdigest(), "tokenizer": "gpt2-bytes",
        "vocab_size": 50257, "dtype": "<u2", "end_of_text": 50256, "documents": 1, "train_tokens": n_train,
        "val_tokens": len(CONTENT) - n_train, "val": "last tenth"}
    train = tokens_in(out, "train")
    assert len(train) == n_train and train[0] == 37  # "F" in GPT-2's vocabulary: "!" (33) is 0
    assert text_in(out).encode() == CONTENT


@pytest.mark.parametrize("content, reason", [(b"x", "SHA-256"), (None, "No such file")])
def test_a_bad_download_falls_back_loudly(content, reason, prepare, capsys):
    if content:
        write("there", content)
    prepare.default_text = lambda: load_module(PREPARE).default_text(Path("there").resolve().as_uri())
    prepare.main(["--tokenizer", "bytes"])
    said = capsys.readouterr()
    assert reason in said.err and said.err.count("NOT comparable") == 1
    assert "python_topics (bytes tokens)" in said.out
    assert text_in("data/tokens") == prepare.fallback_text() and len(prepare.fallback_text()) > 300_000


def test_offline_the_scripts_still_run(tmp_path, monkeypatch, capfd):
    """No data, no network: one command still trains, and the log names the text."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nowhere
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for file in PREPARE.parent.glob("*.py"):
        shutil.copy(file, tmp_path / "data")
    run = as_program("gradient_accumulation", *"-B 1 -T 32 --total-batch 32 --steps 1 --compile-mode none".split())
    errors = run.stderr + capfd.readouterr().err
    assert run.returncode == 0 and errors.count("NOT comparable") == 2, errors
    assert "# data: python_topics (gpt2-bytes tokens)" in run.stdout


def test_only_a_default_text_is_replaced(prepare):
    """Not one that is only called so."""
    write("my.txt", "my own text")
    write("tiny_shakespeare/a.txt", "my own text")
    prepare.main(["--tokenizer", "bytes", "--out", "out"])
    prepare.main(["--text", "my.txt", "--tokenizer", "bytes", "--out", "out"])
    for flags in ("--text my.txt --tokenizer bytes", "--text new.txt", "", "--tokenizer bytes"):
        write("new.txt", "some new text")
        said = refusal(prepare, *flags.split(), "--out", "out")
        assert "--out" in said and "holds my.txt (bytes tokens), which would be lost" in said
    prepare.main(["--text", "tiny_shakespeare", "--tokenizer", "bytes", "--out", "two"])
    assert "would be lost" in refusal(prepare, "--text", "new.txt", "--tokenizer", "bytes", "--out", "two")


def test_the_default_text_again(prepare):
    """Its tokens stay as they are, unless they are damaged, or others are asked for."""
    prepare.main(["--tokenizer", "bytes"])
    before = os.stat("data/tokens/train.bin")
    prepare.default_text = lambda: (prepare.fallback_text(), "python_topics")
    prepare.main(["--tokenizer", "bytes"])
    assert os.stat("data/tokens/train.bin") == before
    write("data/tokens/train.bin", "cut")
    prepare.main(["--tokenizer", "bytes"])
    assert text_in("data/tokens") == prepare.fallback_text()
    prepare.main([])
    assert meta_in("data/tokens")["tokenizer"] == "gpt2-bytes"


@pytest.mark.parametrize("files, reason", [
    ({"nano/train.bin": b"\1\0", "nano/val.bin": b"\1\0"}, "meta.json is missing"),  # nanoGPT's
    ({"nano/train.bin": b"\1\0", "nano/meta.json": '{"source": "tiny_shakespeare"}'}, "incomplete"),
    ({"nano/novel.txt": "my novel"}, "novel.txt"), ({"nano.partial/novel.txt": "my novel"}, "novel.txt would be lost")])
def test_what_prepare_did_not_make_stays(files, reason, prepare):
    for name, content in files.items():
        write(name, content)
    assert reason in refusal(prepare, "--out", "nano")


@pytest.mark.skipif("TINY_SHAKESPEARE" not in os.environ, reason="see .ci/run")
def test_tiny_shakespeare_has_338025_tokens(tmp_path):
    """As a program."""
    text = Path(os.environ["TINY_SHAKESPEARE"]).resolve()
    out = tmp_path / "naïve"
    run = run_command(sys.executable, PREPARE, "--text", text, "--out", out, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "na?ve: tiny_shakespeare (gpt2 tokens)" in run.stdout, run.stderr
    assert (len(tokens_in(out)), len(tokens_in(out, "val"))) == (338_025, 338_025 - 304_222)
    assert vocabulary.GPT2().decode(tokens_in(out)).encode() == text.read_bytes()


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "UTF-8"])
def test_a_text_in_another_encoding(encoding, prepare):
    """A byte-order mark is not text."""
    mark = "\ufeff" if encoding == "UTF-8" else ""
    text = "caf\xe9 au lait\r\n"
    write("a.txt", (mark + text).encode(encoding))
    write("a.jsonl", (json.dumps({"text": text}) + '\n{"text": "x"}\n').encode(encoding))
    for name, end in [("a.txt", ""), ("a.jsonl", "x")]:
        prepare.main(["--text", name, "--encoding", encoding, "--out", f"{name}.out"])
        assert text_in(f"{name}.out") == text + end


def test_the_shortest_text(prepare, capsys):
    """With a token less, val.bin would have a single one. A file without a suffix is a text."""
    write("long", "0123456789a")
    write("short", "0123456789")
    prepare.main(["--text", "long", "--out", "out"])
    assert [len(tokens_in("out", split)) for split in ("train", "val")] == [9, 2]
    assert "long: read as plain text" in capsys.readouterr().err
    assert "10 tokens" in refusal(prepare, "--text", "short", "--out", "short.out")


def test_warnings_that_nobody_reads(prepare, monkeypatch):
    """As in `2>&1 | head`: the tokens are written all the same."""
    write("words", "To be, or not to be")  # without a suffix: one line says that it is read as text
    gone = mock.Mock(**{"isatty.return_value": False, "write.side_effect": BrokenPipeError})
    monkeypatch.setattr(sys, "stderr", gone)
    prepare.main(["--text", "words", "--out", "out"])
    assert text_in("out") == "To be, or not to be"


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize("name, content, reason", [
    ("a.txt", b"x" * 20_000 + b"caf\xe9 au lait", r"a.txt: not UTF-8 \(byte 0xe9 at position 20,003\).*--encoding"),
    ("a.jsonl", b'{"text": "caf\xe9"}\n', "not UTF-8 .* at position 13.*--encoding"),
    ("a.txt", "no byte-order mark".encode("utf-16-le"), "a.txt: has zero bytes.* --encoding, for example utf-16"),
    ("a.txt", gzip.compress(b"text", mtime=0), "a.txt: gzip data, not text"),
    ("a.jsonl", GOOD + b'\n{"text": "cut', "a.jsonl: line 3 is not JSON"),
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a.parquet: .*git lfs pull"),
    ("a.jsonl", GOOD + b'{"body": "", "n": 1}\n', "line 2: .*'text'.*choose a --field, of body$"),
    ("a.jsonl", b'["x"]\n', "line 1: .*no field"), ("a.jsonl", b'{"text": 0}\n', "line 1: .*no field"),
    ("a.parquet", b"PAR1 no parquet", "a.parquet: not a .parquet file"), ("a.pdf", b"%PDF", "0 tokens"),
    ("a.txt", b" \t\n\xc2\xa0" * 9999, "all blanks")])
def test_texts_that_cannot_be_used(name, content, reason, prepare):
    write(f"corpus/{name}", content)
    assert re.search(reason, refusal(prepare, "--text", "corpus", "--out", "out"))


@pytest.mark.parametrize("name, content, reason", [
    ("a.json", b'[{"text": "x"}]', "jq"), ("a.json", b'{\n "text": "x"\n}\n', "jq"), ("a.csv", b"text\nx\n", "to_json"),
    ("a.html", b"<p>x</p>", "pandoc"), ("a.rtf", b"{\\rtf1 x}", "RTF data")])
def test_files_that_are_not_plain_text(name, content, reason, prepare):
    write(name, content * 20)
    for more in ([], ["--encoding", "latin-1"]):
        assert re.search(f"{name}: .*{reason}", refusal(prepare, "--text", name, "--out", "out", *more))


def test_json_lines_are_known_by_their_content(prepare, capsys):
    """Whatever the file is called; only one called .txt is text, which a warning says."""
    lines = json.dumps({"text": "To be, or "}) + "\n" + json.dumps({"text": "not to be"}) + "\n"
    for name in ("a.json", "a.ndjson", "a", "a.txt"):
        write(name, lines)
        prepare.main(["--text", name, "--out", f"{name}.out"])
        assert text_in(f"{name}.out") == (lines if name == "a.txt" else "To be, or not to be")
        assert ("if its lines are documents" in capsys.readouterr().err) is (name == "a.txt")


def test_utf8_that_is_almost_whole(prepare, capsys):
    """One byte of an old editor: it can be replaced; --encoding latin-1 would garble all the rest, and is warned of."""
    text = "Müller kauft Äpfel. " * 20
    write("a.txt", text.encode() + b"Caf\xe9 " + text.encode())
    assert refusal(prepare, "--text", "a.txt").endswith("(the rest is UTF-8) with --encoding utf-8:replace")
    prepare.main(["--text", "a.txt", "--encoding", "utf-8:replace", "--out", "out"])
    assert text_in("out") == f"{text}Caf\ufffd {text}" and not capsys.readouterr().err
    prepare.main(["--text", "a.txt", "--encoding", "latin-1", "--out", "garbled"])
    assert "its bytes are UTF-8, which --encoding latin-1 garbles" in capsys.readouterr().err
    write("b.txt", text.encode("latin-1"))
    prepare.main(["--text", "b.txt", "--encoding", "latin-1", "--out", "right"])
    assert text_in("right") == text and not capsys.readouterr().err


@pytest.mark.parametrize("text", ["one\r\ntwo\r\nthree\n\r\n", "one\rtwo\rthree\r"])
def test_carriage_returns_are_counted(text, prepare, capsys):
    """Those of Windows and of old Macs."""
    write("a.txt", text)
    prepare.main(["--text", "a.txt", "--out", "out"])
    assert "WARNING: a.txt: carriage returns in the text: 3; " in capsys.readouterr().err


def test_a_validation_text_of_its_own(prepare):
    """Is val.bin, whole, and the other text is train.bin, whole: nothing is held out."""
    write("train.txt", "To be, or not to be")
    write("test.jsonl", GOOD * 2 + b'{"text": "end"}')
    prepare.main(["--text", "train.txt", "--val", "test.jsonl", "--out", "out"])
    assert [text_in("out", split) for split in ("train", "val")] == ["To be, or not to be", "goodgoodend"]
    meta = meta_in("out")
    assert (meta["train_tokens"], meta["val_tokens"], meta["documents"]) == (19, 13, 4)
    prepare.main(["--text", "train.txt", "--val", "train.txt", "--out", "two"])
    assert meta_in("two")["sha256"] != meta["sha256"]


def test_wrong_flags(prepare):
    write("a.txt", "To be, or not to be")
    os.mkfifo("pipe")  # /dev/stdin is such a file, too
    for words, reason in [
        ("--name x", "--name.*--hf"), ("--split x", "--split.*--hf"), ("--field x", "--field.*--hf"),
        ("--encoding utf-16", "--encoding: .*--text"), ("--val a.txt", "--val: .*--text"), ("--text=", "is empty"),
        ("--text a.txt --val nowhere", "error: nowhere: no such"), ("--text pipe", "pipe: not a file"),
        ("--text a.txt --encoding utf-8:spell", "spell: unknown"),
        ("--text a.txt --encoding klingon", "--encoding klingon: "),
        ("--train-tokenizer 256", "--train-tokenizer 256: .* 257 .* 65536"), ("--train-tokenizer 65537", "65537: "),
        ("--text a.txt --out /proc/x", "--out /proc/x: "), ("--text a.txt --out a.txt", "a.txt: .*choose another"),
    ]:
        assert re.search(reason, refusal(prepare, "--out", "out", *words.split()))


@pytest.mark.parametrize("error, said", [(KeyboardInterrupt(), "stopped"), (OSError("disk full"), "disk full")])
def test_a_stopped_preparation_leaves_the_old_files(error, said, prepare):
    """Stopped in the middle of the text; the next one works, also after a killed one."""
    class Tokenizer(vocabulary.Bytes):
        def encode(self, text):
            if "STOP" in text:
                raise error
            return super().encode(text)

    prepare.main(["--out", "tokens"])
    usual = prepare.load_tokenizer
    prepare.load_tokenizer = lambda name: Tokenizer("gpt2-bytes")
    new = "new text " * 200_000 + "STOP" + " and the rest" * 1000
    write("new", new)
    assert said in refusal(prepare, "--text", "new", "--out", "tokens")
    write("tokens.partial/train.bin", "half, by a killed run")
    prepare.load_tokenizer = usual
    prepare.main(["--text", "new", "--out", "tokens"])
    assert text_in("tokens") == new
    assert sorted(os.listdir()) == ["new", "tokens"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
@pytest.mark.timeout(20)
@pytest.mark.filterwarnings("ignore:flock not supported")
def test_where_files_cannot_be_locked(number, prepare, monkeypatch):
    """Network drives: it does not wait for a lock that nobody holds."""
    def flock(*args):
        raise OSError(number, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    prepare.main(["--out", "tokens"])
    assert text_in("tokens") == CONTENT.decode() and os.listdir() == ["tokens"]


def test_a_second_preparation_waits_for_the_first_and_uses_its_tokens(prepare, monkeypatch):
    """Two scripts, or two ranks, found no data and start together: the second must not replace what one reads."""
    second, made, said = threading.Thread(target=prepare.main, args=(["--out", "tokens"],)), [], io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)  # emptying capsys would lose a line that comes meanwhile

    def text_of_the_first():
        made.append("a text")
        if not second.ident:
            second.start()
            while "waiting for another preparation" not in said.getvalue():
                assert second.is_alive()
                time.sleep(0.01)
        return CONTENT.decode(), "python_topics"

    prepare.default_text = text_of_the_first
    prepare.main(["--out", "tokens"])
    before = os.stat("tokens/train.bin")
    second.join(timeout=60)
    assert os.stat("tokens/train.bin") == before and made == ["a text"] and os.listdir() == ["tokens"]
