"""data/prepare.py: the download and its fallbacks, token files that are whole or absent, and the scripts' batches."""
import hashlib
import http.server
import json
import os
import random
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
from filelock import FileLock

from data import vocabulary

PREPARE = ROOT / "data" / "prepare.py"
CONTENT = "First Citizen:\nBefore we proceed any further, hear me speak.\n".encode() * 50
NO_NETWORK = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
NO_NETWORK |= {"no_proxy": "", "NO_PROXY": ""}


@pytest.fixture
def prepare():
    """A fresh data/prepare.py with single-byte tokens that expects CONTENT as its default text."""
    module = load_module(PREPARE)
    module.TINY_SHAKESPEARE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    module.load_tokenizer = lambda name: vocabulary.of_bytes("gpt2-bytes")
    return module


@pytest.fixture
def server():
    """A local HTTP server; the path chooses how it behaves."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/missing":
                return self.send_error(404)
            if self.path == "/hanging":
                return time.sleep(3)
            body = {"/good": CONTENT, "/wrong": b"x" + CONTENT[1:], "/dripping": CONTENT}.get(self.path, CONTENT[:500])
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            if self.path != "/dripping":
                return self.wfile.write(body)
            for byte in body:  # never silent for long, never done
                try:
                    self.wfile.write(bytes([byte]))
                except OSError:
                    return None
                time.sleep(0.1)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        http_server.block_on_close = False
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


def read_tokens(folder):
    return np.concatenate([np.fromfile(folder / name, dtype="<u2") for name in ("train.bin", "val.bin")])


def text_in(folder):
    return vocabulary.of_bytes("gpt2-bytes").decode(read_tokens(folder).tolist())


def assert_refused(run, reason):
    """One error line "error: <flag or file>: <what is wrong>; <what to do>", and no traceback."""
    assert run.returncode == 1 and "Traceback" not in run.stderr, run.stderr
    line = run.stderr.strip().splitlines()[-1]
    assert re.fullmatch(r"error: .+: .+; .+", line) and reason in line


# The default text


def test_the_default_text_from_the_url_to_the_files(prepare, server, tmp_path):
    default_text = prepare.default_text
    prepare.default_text = lambda: default_text(server + "/good")
    prepare.main(["--out", str(tmp_path / "new" / "tokens")])
    out = tmp_path / "new" / "tokens"
    assert {path.name for path in out.iterdir()} == {"train.bin", "val.bin", "meta.json"}
    n_train = len(CONTENT) * 9 // 10
    assert json.loads((out / "meta.json").read_text()) == {
        "source": "tiny_shakespeare", "sha256": hashlib.sha256(CONTENT).hexdigest(), "tokenizer": "gpt2-bytes",
        "vocab_size": 50257, "end_of_text": 50256, "documents": 1, "train_tokens": n_train,
        "val_tokens": len(CONTENT) - n_train, "val": "last tenth",
    }
    assert text_in(out).encode() == CONTENT
    assert len(np.fromfile(out / "train.bin", "<u2")) == n_train
    assert read_tokens(out)[0] == 37  # "F" is id 37 in GPT-2's vocabulary: "!" (33) is 0


@pytest.mark.parametrize("path, reason", [
    ("/wrong", "SHA-256"), ("/truncated", "Incomplete"), ("/missing", "404"), ("/hanging", "Timeout"),
    ("/dripping", "Timeout"), (None, "refused"),
])
def test_a_bad_download_falls_back_loudly(path, reason, prepare, server, capsys):
    started = time.monotonic()
    text, source = prepare.default_text(server + path if path else "http://127.0.0.1:9/", seconds=1)
    assert time.monotonic() - started < 3
    assert source == "python_topics" and text == prepare.fallback_text() and len(text) > 300_000
    errors = capsys.readouterr().err
    assert "WARNING: could not download Tiny Shakespeare" in errors and reason in errors
    assert "NOT comparable" in errors and "run `python data/prepare.py` again with a network" in errors


def test_offline_the_scripts_still_run(tmp_path):
    """No data, no network, no tokenizer: one command still trains, and the log names what it trained on."""
    run = run_command(
        sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "-T", "32", "--steps", "2",
        cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), **NO_NETWORK,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("NOT comparable") == 2
    assert "# data: python_topics (gpt2-bytes tokens)" in run.stdout
    assert "# data: python_topics (gpt2-bytes tokens)" in (tmp_path / "logs" / "baseline.log").read_text()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["tokens", "tokens.lock"]


@pytest.mark.parametrize("had, flags, refused", [
    (("my.txt", "bytes"), ["--text", "new.txt"], True), (("new.txt", "gpt2"), ["--text", "new.txt"], True),
    (("new.txt", "bpe-300"), ["--text", "new.txt"], True), (("tiny_shakespeare", "bpe-300"), [], True),
    (("new.txt", "bytes"), ["--text", "new.txt"], False), (("tiny_shakespeare", "gpt2"), ["--text", "new.txt"], False),
    (("my.txt", "gpt2-bytes"), ["--text", "new.txt"], False),
])
def test_a_folder_of_other_tokens_is_not_replaced(had, flags, refused, tmp_path, monkeypatch):
    """But Tiny Shakespeare's, which the README's own commands replace, and those of a fallback."""
    prepare = load_module(PREPARE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "default_text", lambda: ("text", "tiny_shakespeare"))
    (tmp_path / "new.txt").write_text("new text")
    (tmp_path / "out").mkdir()
    before = json.dumps(dict(zip(("source", "tokenizer"), had, strict=True)))
    (tmp_path / "out" / "meta.json").write_text(before)
    words = [*flags, "--tokenizer", "bytes", "--out", "out"]
    if refused:
        with pytest.raises(SystemExit, match=f"error: --out .*: holds {had[0]} .{had[1]} tokens., which would be lost"):
            prepare.main(words)
        assert (tmp_path / "out" / "meta.json").read_text() == before
    else:
        prepare.main(words)
        assert json.loads((tmp_path / "out" / "meta.json").read_text())["tokenizer"] == "bytes"


@pytest.mark.parametrize("words, said", [
    (["--text", ""], "error: --text: is empty"),
    (["--text", "x.txt", "--out", "x.txt/y"], "not written .*; make room, or give another --out"),
    (["--text", "x.txt", "--out", "/proc/x"], "not written .*; make room, or give another --out"),
])
def test_slips_that_prepare_refuses(words, said, prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(SystemExit, match=said):
        prepare.main(words)


def test_a_local_dataset_of_several_kinds_is_read_in_part_and_says_so(prepare, tmp_path, capsys):
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("text")
    (tmp_path / "mixed" / "b.jsonl").write_text('{"text": "a document"}\n')
    prepare.main(["--hf", str(tmp_path / "mixed"), "--out", str(tmp_path / "out")])
    assert "of its .jsonl, .txt files `datasets` reads one kind only; --text reads all" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["documents"] == 1


def test_what_is_read_as_plain_text_is_said(prepare, tmp_path, capsys):
    (tmp_path / "a.json").write_text('["text"]')
    prepare.main(["--text", str(tmp_path / "a.json"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"])
    assert "a.json: read as plain text, one document" in capsys.readouterr().err


@pytest.mark.parametrize("had, flags, tokenizer, refused", [
    (("tiny_shakespeare", "gpt2"), [], "gpt2-bytes", True),
    (("tiny_shakespeare", "gpt2"), [], "gpt2", True),  # the merges are at hand, the text is not
    (("my.txt", "gpt2-bytes"), [], "gpt2-bytes", True),  # a real text
    (("python_topics", "gpt2"), [], "gpt2-bytes", True),
    (("my.txt", "gpt2"), ["--text", "new.txt"], "gpt2-bytes", True),
    (("new.txt", "gpt2"), ["--text", "new.txt"], "gpt2", False),
    (("my.txt", "gpt2-bytes"), ["--text", "new.txt"], "gpt2-bytes", False),
    (("python_topics", "gpt2-bytes"), [], "gpt2-bytes", False),
    (("python_topics", "gpt2-bytes"), ["--text", "new.txt"], "gpt2", False),
    (None, [], "gpt2-bytes", False),  # a folder without a usable meta.json
])
def test_no_fallback_replaces_real_tokens(had, flags, tokenizer, refused, prepare, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "default_text", lambda: (prepare.fallback_text(), "python_topics"))
    encoder = vocabulary.of_bytes()
    encoder.name = tokenizer
    prepare.load_tokenizer = lambda name: encoder
    (tmp_path / "new.txt").write_text("new text")
    out = tmp_path / "data" / "tokens"
    out.mkdir(parents=True)
    (out / "train.bin").write_bytes(b"old")
    (out / "meta.json").write_text(json.dumps(dict(zip(("source", "tokenizer"), had, strict=True)) if had else []))
    if refused:
        with pytest.raises(SystemExit, match=f"error: --out .*: holds {had[0]} .{had[1]} tokens.*; .*network"):
            prepare.main(flags)
        assert (out / "train.bin").read_bytes() == b"old" and not (tmp_path / "data" / "tokens.partial").exists()
    else:
        prepare.main(flags)
        assert json.loads((out / "meta.json").read_text())["tokenizer"] == tokenizer


# The tokenizers


def test_a_tokenizer_that_never_answers():
    """No waiting for it, neither in GPT2() nor when the program ends."""
    code = ("import time; from data import vocabulary\n"
            "vocabulary.tiktoken.get_encoding = lambda name: time.sleep(60)\n"
            "try: vocabulary.GPT2(seconds=0.2)\n"
            "except vocabulary.NoTokenizer as error: print(error)")
    run = run_command(sys.executable, "-c", code, timeout=30)
    assert run.stdout == "tiktoken could not fetch GPT-2's merges (TimeoutError)\n", run.stderr


def test_single_byte_tokens_are_gpt2s_own():
    """GPT-2's table of bytes: OpenAI's bytes_to_unicode, as transformers ships it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = vocabulary.of_bytes("gpt2-bytes")
    assert tokenizer.id_of_byte[list(bytes_to_unicode())].tolist() == list(range(256))  # keys in the order of the ids
    assert tokenizer.decode([37, 50256, 3]) == "F$"


TEXT = "naïve 日本語 🙂\r\n\r\n  \tThe value of an object's value, 12345! <|endoftext|>\n" * 20


def hugging_face_folder(folder, tokenizer, end="<|endoftext|>"):
    """As transformers saves it, beside a model's config."""
    from transformers import GPT2Config, PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    GPT2Config().save_pretrained(folder)
    return str(folder)


def test_the_text_of_every_tokenizer(tmp_path):
    """There and back; the files say which tokens they hold, and their bytes are counted right."""
    prepare = load_module(PREPARE)
    (tmp_path / "text.txt").write_text(TEXT, newline="")
    mine = hugging_face_folder(tmp_path / "mine", vocabulary.trained([TEXT], 300).tokenizer)
    text = TEXT.replace("<|endoftext|>", "")  # there it separates documents
    for flags, name, size in [(["--tokenizer", "bytes"], "bytes", 257), (["--train-tokenizer", "290"], "bpe-290", 290),
                              (["--tokenizer", mine], "mine", 300), (["--tokenizer", mine + "/"], "mine", 300)]:
        prepare.main(["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *flags])
        meta = json.loads((tmp_path / "out" / "meta.json").read_text())
        (tmp_path / "out" / "meta.json").write_text("{}")  # nothing to lose
        assert (meta["tokenizer"], meta["vocab_size"], meta["documents"]) == (name, size, 21)
        tokenizer = vocabulary.restore(name, (tmp_path / "out" / "tokenizer.json").read_text(), meta["end_of_text"])
        ids = read_tokens(tmp_path / "out")
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.byte_lengths()[ids].sum() == len(text.encode()) and len(tokenizer.byte_lengths()) == size
        assert (ids == meta["end_of_text"]).sum() == 20 and tokenizer.vocab_size == size
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and meta["end_of_text"] not in tokenizer.encode(TEXT)


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_gpt2_in_the_hands_of_transformers():
    gpt2 = vocabulary.GPT2()
    assert gpt2.to_transformers().encode(TEXT) == gpt2.encoding.encode(TEXT, allowed_special="all")
    ids = gpt2.encode(TEXT)
    assert gpt2.byte_lengths()[ids].sum() == len(TEXT.encode()) and gpt2.decode([*ids, 50256, 50300]) == TEXT


def test_the_default_text_in_bytes_without_a_network(tmp_path):
    run = run_command(sys.executable, PREPARE, "--tokenizer", "bytes", "--out", tmp_path / "bytes", **NO_NETWORK)
    assert run.returncode == 0 and run.stderr.count("NOT comparable") == 1, run.stderr
    text = load_module(PREPARE).fallback_text()
    assert bytes(read_tokens(tmp_path / "bytes").tolist()).decode() == text
    assert "python_topics (bytes tokens)" in run.stdout


def test_a_trained_tokenizer_fits_its_text():
    """A word of the text becomes a token; a pair that occurs once does not. The same text gives the same tokenizer."""
    first, second = (vocabulary.trained(["object " * 50, "xyz"], 400) for _ in range(2))
    assert first.json == second.json and first.name == f"bpe-{first.vocab_size}" and first.vocab_size < 400
    assert len(first.encode(" object")) == 1 and len(first.encode("xyz")) == 3
    assert vocabulary.trained([], 400).vocab_size == 257


def test_a_tokenizer_is_trained_on_a_share_of_every_file(prepare, tmp_path, monkeypatch, capsys):
    """On a few bytes of each, however many files there are."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number}.txt").write_text(chr(65 + number) * 500 * (1 + 3 * (number == 7)))
    monkeypatch.setattr(prepare, "TRAINING_BYTES", 1150)
    given = []
    trained = vocabulary.trained
    monkeypatch.setattr(prepare.vocabulary, "trained", lambda texts, size: given.extend(texts) or trained(given, size))
    prepare.main(["--text", str(corpus), "--train-tokenizer", "300", "--out", str(tmp_path / "out")])
    assert sorted(given) == [chr(65 + number) * 50 * (1 + 3 * (number == 7)) for number in range(20)]
    assert "a tokenizer trained on 0.0 MB of the text\n" in capsys.readouterr().out


def broken_tokenizer(kind):
    """(a tokenizer of the tokenizers library that token files cannot have, its end of text)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer, end = vocabulary.trained([], 257).tokenizer, "<|endoftext|>"
    if kind == "metaspace":
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "lowercase":
        tokenizer.normalizer = normalizers.Lowercase()
    elif kind == "prefix":  # in front of each piece
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == "byte fallback":  # as Llama's; here "▁" is one byte, not three
        vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁": 256, end: 257}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    elif kind == "no end":
        end = None
    elif kind == "large":
        contents = json.loads(tokenizer.to_str())
        contents["model"]["vocab"]["xyz"] = 65_536
        tokenizer = Tokenizer.from_str(json.dumps(contents))
    return tokenizer, end


@pytest.mark.parametrize("kind, reason", [
    ("metaspace", "does not give back the text"), ("lowercase", "does not give back the text"),
    ("prefix", "does not give back the text"), ("byte fallback", "does not give back the text"),
    ("no end", "has no end-of-text token"),
    ("large", "has 65,537 tokens, more than 65,536"), (None, "is missing, or has fewer than 257 tokens"),
    ("file", "cannot be loaded"),
])
def test_tokenizers_that_do_not_suit(kind, reason, tmp_path, capsys):
    (tmp_path / "text").write_text(TEXT)
    if kind is None:
        from transformers import GPT2Config
        GPT2Config().save_pretrained(tmp_path / "theirs")
    elif kind == "file":
        (tmp_path / "theirs").mkdir()
        (tmp_path / "theirs" / "tokenizer.json").write_text("{")
    else:
        hugging_face_folder(tmp_path / "theirs", *broken_tokenizer(kind))
    with pytest.raises(SystemExit, match=f"^error: --tokenizer {tmp_path / 'theirs'}: {reason}.*; give gpt2, bytes"):
        load_module(PREPARE).main(["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"),
                                   "--tokenizer", str(tmp_path / "theirs")])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_folder_named_as_our_tokenizers(tmp_path):
    """In the files "gpt2" says everything about the tokens."""
    folder = hugging_face_folder(tmp_path / "gpt2", vocabulary.trained(["some text"], 300).tokenizer)
    assert vocabulary.from_hugging_face(folder).name == "hf-gpt2"


def test_an_added_token_counts_its_bytes():
    tokenizer = vocabulary.trained(["some text"], 300).tokenizer
    tokenizer.add_tokens(["é"])
    assert vocabulary.Tokenizer("x", tokenizer.to_str(), 0).byte_lengths()[tokenizer.token_to_id("é")] == 2


@pytest.mark.parametrize("name", ["bytes", "gpt2-bytes"])
def test_single_bytes_are_known_again(name, tmp_path):
    """So that a converted model fits its data when it comes back."""
    tokenizer = vocabulary.of_bytes(name)
    found = vocabulary.from_hugging_face(hugging_face_folder(tmp_path / "model", tokenizer.tokenizer))
    assert (found.name, found.json, found.end_of_text) == (name, tokenizer.json, tokenizer.end_of_text)


@pytest.mark.skipif(not os.environ.get("TINY_SHAKESPEARE"), reason="set TINY_SHAKESPEARE to the text's path")
@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_tiny_shakespeare_has_338025_tokens(tmp_path):
    text = Path(os.environ["TINY_SHAKESPEARE"])
    run = run_command(sys.executable, PREPARE, "--text", text.resolve(), "--out", tmp_path / "tokens")
    assert run.returncode == 0, run.stderr
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    assert (meta["source"], meta["tokenizer"]) == ("tiny_shakespeare", "gpt2")
    assert (meta["train_tokens"], meta["val_tokens"]) == (304_222, 338_025 - 304_222)
    encoding = vocabulary.GPT2()
    assert encoding.decode(read_tokens(tmp_path / "tokens").tolist()).encode() == text.read_bytes()


# A text


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_a_name_that_the_terminal_cannot_show(tmp_path):
    (tmp_path / "naïve.txt").write_text("To be, or not to be. " * 20)
    words = ["--text", tmp_path / "naïve.txt", "--out", tmp_path / "tokens"]
    run = run_command(sys.executable, PREPARE, *words, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and ": na?ve.txt (gpt2 tokens)" in run.stdout, run.stderr


@pytest.mark.parametrize("content, reason", [
    (b"", "0 tokens are too few"),
    ("latin: caf\xe9 au lait".encode("latin-1"), "not UTF-8; if it is text, give its --encoding"),
    ("utf-16".encode("utf-16"), "not UTF-8; if it is text, give its --encoding"), (None, "no such file or folder"),
])
def test_texts_that_cannot_be_used(content, reason, tmp_path):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    run = run_command(sys.executable, PREPARE, "--text", tmp_path / "text", "--out", tmp_path / "tokens")
    assert_refused(run, reason)
    assert not (tmp_path / "tokens").exists() and not (tmp_path / "tokens.partial").exists()


def test_a_byte_order_mark_is_no_text(prepare, tmp_path):
    (tmp_path / "text").write_bytes("\ufefftwo \ufeffwords\r\n".encode())
    prepare.prepare(tmp_path / "text", tmp_path / "tokens")
    assert text_in(tmp_path / "tokens") == "two \ufeffwords\r\n"


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "UTF-8"])
def test_a_text_in_another_encoding(encoding, prepare, tmp_path):
    (tmp_path / "text.txt").write_bytes("caf\xe9 au lait\r\n".encode(encoding))
    (tmp_path / "text.jsonl").write_bytes('{"text": "caf\xe9 au lait\\r\\n"}\n{"text": "x"}\n'.encode(encoding))
    for name, end in [("text.txt", ""), ("text.jsonl", "x")]:
        prepare.main(["--text", str(tmp_path / name), "--encoding", encoding, "--out", str(tmp_path / "tokens")])
        assert text_in(tmp_path / "tokens") == "caf\xe9 au lait\r\n" + end
    wrong = "utf-16" if encoding == "UTF-8" else "UTF-8"
    with pytest.raises(SystemExit, match=f"text.txt: not {wrong}; if it is text, give its --encoding"):
        prepare.main(["--text", str(tmp_path / "text.txt"), "--encoding", wrong, "--out", str(tmp_path / "tokens")])


def test_a_tiny_text_works(prepare, tmp_path):
    (tmp_path / "text").write_bytes(b"ab")
    meta = prepare.prepare(tmp_path / "text", tmp_path / "tokens")
    assert (meta["train_tokens"], meta["val_tokens"]) == (1, 1) and text_in(tmp_path / "tokens") == "ab"


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


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_preparation_leaves_the_old_files(signal_number, prepare, tmp_path):
    """Stopped in the middle of the text: the old folder is as it was, and the next run cleans up and works."""
    old, new = b"old text " * 100, b"new text " * 200_000 + b"STOP" + b" and the rest" * 1000
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    out = tmp_path / "tokens"
    prepare.prepare(tmp_path / "old", out)
    run = run_command(sys.executable, "-c", STOPPED_RUN, tmp_path / "new", out, int(signal_number))
    assert run.returncode == (1 if signal_number == signal.SIGINT else -signal_number)
    assert text_in(out).encode() == old
    if signal_number == signal.SIGINT:
        assert_refused(run, "not written (stopped); run the same command again")
        assert not (tmp_path / "tokens.partial").exists()
    else:
        assert (tmp_path / "tokens.partial").exists()
    prepare.prepare(tmp_path / "new", out)
    assert text_in(out).encode() == new
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "tokens", "tokens.lock"}


def test_killed_while_the_drawn_documents_are_moved(prepare, tmp_path):
    (tmp_path / "old").write_bytes(b"old text")
    (tmp_path / "new").write_text("<|endoftext|>".join(["some text"] * 300))
    prepare.prepare(tmp_path / "old", tmp_path / "tokens")
    code = STOPPED_RUN.replace("print(", """
def move(train, val, *_):
    val.write(train.read(500))
    os.kill(os.getpid(), 9)
prepare.move_drawn = move
print(""", 1)
    run = run_command(sys.executable, "-c", code, tmp_path / "new", tmp_path / "tokens", "0")
    assert run.returncode == -9 and (tmp_path / "tokens.partial" / "new" / "val.bin").exists()
    assert text_in(tmp_path / "tokens") == "old text"
    assert prepare.prepare(tmp_path / "new", tmp_path / "tokens")["val"] == "documents drawn by hash"
    assert text_in(tmp_path / "tokens") == "some text" * 300 and not (tmp_path / "tokens.partial").exists()


def test_killed_with_the_default_text_at_hand(prepare, tmp_path, monkeypatch):
    """The file that it was read from is no stranger in the folder."""
    (tmp_path / "tokens.partial").mkdir()
    (tmp_path / "tokens.partial" / "default.txt").write_text("left by a killed run")
    monkeypatch.setattr(prepare, "default_text", lambda: (CONTENT.decode(), "python_topics"))
    prepare.prepare(None, tmp_path / "tokens")
    assert text_in(tmp_path / "tokens").encode() == CONTENT and not (tmp_path / "tokens.partial").exists()


@pytest.mark.slow
def test_a_preparation_killed_at_random_moments(prepare, tmp_path):
    random.seed(0)
    texts = [b"old text " * 1000, b"new text " * 100_000]
    out = tmp_path / "tokens"
    for number, text in enumerate(texts):
        (tmp_path / str(number)).write_bytes(text)
    prepare.prepare(tmp_path / "0", out)
    for number in range(20):
        command = [sys.executable, "-c", STOPPED_RUN, tmp_path / str(number % 2), out, "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as run:
            run.stdout.readline()
            time.sleep(random.uniform(0, 0.1))
            run.kill()
        if out.exists():  # else killed between the two renames: the next run puts it back
            assert text_in(out).encode() in texts
    assert prepare.prepare(tmp_path / "1", out) and text_in(out).encode() == texts[1]


def test_killed_between_the_two_renames(prepare, tmp_path):
    """The old tokens are then in tokens.partial: the next run puts them back, even one that fails."""
    (tmp_path / "old").write_bytes(b"old text")
    prepare.prepare(tmp_path / "old", tmp_path / "tokens")
    (tmp_path / "tokens.partial").mkdir()
    (tmp_path / "tokens").rename(tmp_path / "tokens.partial" / "old")
    with pytest.raises(SystemExit):
        prepare.prepare(tmp_path / "nowhere", tmp_path / "tokens")
    assert text_in(tmp_path / "tokens") == "old text" and not (tmp_path / "tokens.partial").exists()


def test_an_old_folder_is_back_when_the_new_one_cannot_take_its_place(prepare, tmp_path, monkeypatch):
    """As on Windows, where a folder in use is not renamed."""
    for name in ("old", "new"):
        (tmp_path / name).write_bytes(f"{name} text".encode())
    prepare.prepare(tmp_path / "old", tmp_path / "tokens")
    rename = Path.rename

    def refuse_the_new(path, target):
        if path.name == "new":
            raise PermissionError("in use")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(SystemExit, match="not written .in use.; make room"):
        prepare.main(["--text", str(tmp_path / "new"), "--out", str(tmp_path / "tokens")])
    assert text_in(tmp_path / "tokens") == "old text" and not (tmp_path / "tokens.partial").exists()


def test_a_full_disk_leaves_the_old_files(prepare, tmp_path):
    """A limit on the size of files stands for the full disk: the write fails with an OSError."""
    (tmp_path / "old").write_bytes(b"old text")
    (tmp_path / "text").write_bytes(b"some text " * 100_000)
    prepare.prepare(tmp_path / "old", tmp_path / "tokens")
    run = subprocess.run(
        [sys.executable, "-c", STOPPED_RUN, tmp_path / "text", tmp_path / "tokens", "0"], capture_output=True,
        text=True, timeout=120, cwd=ROOT, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000,) * 2),
    )
    assert_refused(run, "File too large")
    assert text_in(tmp_path / "tokens") == "old text" and not (tmp_path / "tokens.partial").exists()


@pytest.mark.parametrize("place", ["mine", "mine.partial"])
def test_a_foreign_folder_is_never_replaced(place, prepare, tmp_path):
    (tmp_path / place).mkdir()
    (tmp_path / place / "text.txt").write_text("my novel")
    with pytest.raises(SystemExit, match=f"error: --out .*: {place} also holds text.txt, which would be lost; "):
        prepare.main(["--text", str(tmp_path / place / "text.txt"), "--out", str(tmp_path / "mine")])
    assert (tmp_path / place / "text.txt").read_text() == "my novel"
    assert list(tmp_path.iterdir()) == [tmp_path / place]


def test_a_second_preparation_waits_and_says_so(tmp_path):
    (tmp_path / "text").write_bytes(b"some text")
    command = [sys.executable, "-c", STOPPED_RUN, tmp_path / "text", tmp_path / "tokens", "0"]
    with open(tmp_path / "said", "w") as said, FileLock(tmp_path / "tokens.lock"):
        run = subprocess.Popen(command, stderr=said, cwd=ROOT)
        deadline = time.monotonic() + 30
        while not (tmp_path / "said").stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "waiting for another preparation" in (tmp_path / "said").read_text()
        assert run.poll() is None and not (tmp_path / "tokens").exists()
    assert run.wait(timeout=60) == 0 and text_in(tmp_path / "tokens") == "some text"


@pytest.mark.parametrize("flags", [[], ["--tokenizer", "bytes"]])
def test_the_second_of_two_that_found_no_data_uses_the_firsts(flags, prepare, tmp_path):
    """Two scripts, or two ranks, start together: the second must not replace what the first is reading.

    One that was asked for other tokens does (or says, without a network, that it cannot)."""
    out = tmp_path / "tokens"
    command = [sys.executable, PREPARE, "--out", out, *flags]
    with FileLock(tmp_path / "tokens.lock"):
        run = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert "waiting for another preparation" in run.stderr.readline()
        (tmp_path / "text").write_bytes(b"some text")
        prepare.prepare(tmp_path / "text", tmp_path / "first")
        (tmp_path / "first").rename(out)
        before = (out / "train.bin").stat().st_ino
    printed, _ = run.communicate(timeout=60)
    if flags:
        assert run.returncode == 1 or "(bytes tokens)" in printed
        return
    assert run.returncode == 0 and printed.startswith(f"{out}: text (gpt2-bytes tokens)")
    assert (out / "train.bin").stat().st_ino == before


@pytest.mark.parametrize("flags, reason", [
    (["--name", "x"], "--hf too"),
    (["--split", "x"], "--hf too"),
    (["--field", "x"], "--hf too"),
    (["--encoding", "utf-16"], "--encoding: .*; give --text too"),
    (["--train-tokenizer", "256"], "error: --train-tokenizer 256: out of range; give 257 .* to 65536"),
    (["--train-tokenizer", "65537"], "error: --train-tokenizer 65537: out of range; "),
    (["--train-tokenizer", "0"], "error: --train-tokenizer 0: out of range; "),
    (["--text", __file__, "--encoding", "klingon"], "error: --encoding klingon: unknown; "),
    (["--text", __file__, "--out", "/"], "error: --out /: .*; run"),
    (["--text", __file__, "--out", __file__], "Not a directory"),
    (["--text", __file__, "--out", 200 * "long"], "File name too long"),
])
def test_wrong_flags(flags, reason, prepare):
    with pytest.raises(SystemExit, match=reason):
        prepare.main(flags)
