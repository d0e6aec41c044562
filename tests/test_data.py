"""data/prepare.py: a real download with every way it can fail, the fallbacks, and files that are whole or absent."""
import hashlib
import http.server
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, load_module, rung, run_command
from tqdm import tqdm

PREPARE = ROOT / "data" / "prepare.py"
CONTENT = "First Citizen:\nBefore we proceed any further, hear me speak.\n".encode() * 50


@pytest.fixture
def prepare():
    """A fresh data/prepare.py that expects CONTENT as its default text."""
    module = load_module(PREPARE)
    module.TINY_SHAKESPEARE_SHA256 = hashlib.sha256(CONTENT).hexdigest()
    module.load_tokenizer = module.ByteTokenizer
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
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()


def read_tokens(folder):
    return np.concatenate([np.fromfile(folder / name, dtype="<u2") for name in ("train.bin", "val.bin")])


def bytes_of(prepare, tokens):
    return np.argsort(prepare.ByteTokenizer().id_of_byte)[tokens].astype(np.uint8).tobytes()


def test_good_download(prepare, server, tmp_path):
    path, source = prepare.default_text(tmp_path, server + "/good")
    assert source == "tiny_shakespeare" and path.read_bytes() == CONTENT


@pytest.mark.parametrize("path, reason", [
    ("/wrong", "SHA-256"), ("/truncated", ""), ("/missing", "404"), ("/hanging", "timed out"),
    ("/dripping", "not complete after 1 s"),
])
def test_bad_download_falls_back_loudly(path, reason, prepare, server, tmp_path, capsys):
    started = time.monotonic()
    text, source = prepare.default_text(tmp_path, server + path, seconds=1)
    assert time.monotonic() - started < 3
    assert source == "python_topics"
    assert text.read_text() == prepare.fallback_text() and len(prepare.fallback_text()) > 300_000
    errors = capsys.readouterr().err
    assert "WARNING: could not download" in errors and reason in errors and "NOT comparable" in errors


def test_no_server_at_all_falls_back(prepare, tmp_path, capsys):
    assert prepare.default_text(tmp_path, "http://127.0.0.1:9/", seconds=2)[1] == "python_topics"
    assert "refused" in capsys.readouterr().err


def test_the_whole_default_path(prepare, server, tmp_path):
    """From the URL to the files that the scripts read."""
    default_text = prepare.default_text
    prepare.default_text = lambda folder: default_text(folder, server + "/good")
    prepare.main(["--out", str(tmp_path / "tokens")])
    assert {path.name for path in (tmp_path / "tokens").iterdir()} == prepare.TOKEN_FILES
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    n_train = len(CONTENT) * 9 // 10
    assert meta == {
        "source": "tiny_shakespeare", "sha256": hashlib.sha256(CONTENT).hexdigest(), "tokenizer": "gpt2-bytes",
        "vocab_size": 50257, "documents": 1, "train_tokens": n_train, "val_tokens": len(CONTENT) - n_train,
    }
    tokens = read_tokens(tmp_path / "tokens")
    assert bytes_of(prepare, tokens) == CONTENT
    assert tokens[0] == 37  # "F" is id 37 in GPT-2's vocabulary: "!" (33) is 0


def test_offline_the_scripts_still_run(tmp_path):
    """No data, no network, no tokenizer: one command still trains, and the log names what it trained on."""
    environment = dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    run = run_command(
        sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", "-T", "32", "--steps", "2",
        cwd=tmp_path, TIKTOKEN_CACHE_DIR=str(tmp_path / "empty"), no_proxy="", NO_PROXY="", **environment,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("NOT comparable") == 2
    assert "# data: python_topics (gpt2-bytes tokens)" in run.stdout
    assert "# data: python_topics (gpt2-bytes tokens)" in (tmp_path / "logs" / "baseline.log").read_text()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["tokens", "tokens.lock"]


def test_tokenizer_that_never_answers(monkeypatch):
    prepare = load_module(PREPARE)
    monkeypatch.setattr(prepare.tiktoken, "get_encoding", lambda name: time.sleep(2))
    with pytest.raises(prepare.NoMerges, match="no answer after 0.2 s"):
        prepare.fetch_merges(seconds=0.2)


def test_single_byte_tokens_are_gpt2s_own(monkeypatch):
    """GPT-2's table of bytes: OpenAI's bytes_to_unicode, as transformers ships it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    prepare = load_module(PREPARE)
    order = list(bytes_to_unicode())  # its keys are in the order of the ids
    assert prepare.ByteTokenizer().id_of_byte[order].tolist() == list(range(256))


@pytest.mark.skipif(not os.environ.get("TINY_SHAKESPEARE"), reason="set TINY_SHAKESPEARE to the text's path")
def test_tiny_shakespeare_has_338025_tokens(tmp_path):
    text = Path(os.environ["TINY_SHAKESPEARE"])
    run = run_command(sys.executable, PREPARE, "--text", text.resolve(), "--out", tmp_path / "tokens")
    assert run.returncode == 0, run.stderr
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    if meta["tokenizer"] != "gpt2":
        pytest.skip("tiktoken's gpt2 encoding is not at hand")
    assert meta["source"] == "tiny_shakespeare"
    assert (meta["train_tokens"], meta["val_tokens"]) == (304_222, 338_025 - 304_222)
    encoding = load_module(PREPARE).tiktoken.get_encoding("gpt2")
    assert encoding.decode(read_tokens(tmp_path / "tokens").tolist()).encode() == text.read_bytes()


def test_pieces_never_cut_a_token(tmp_path, monkeypatch):
    """Encoding piece by piece gives exactly the tokens of the whole, however odd the whitespace."""
    prepare = load_module(PREPARE)
    tokenizer = prepare.load_tokenizer()
    if tokenizer.name != "gpt2":
        pytest.skip("tiktoken's gpt2 encoding is not at hand")
    random.seed(0)
    parts = ["word", " ", "  ", "\n", "\n\n", "\t", "it's", "we'll ", "123", "!?", "é", "日本"]
    parts += ["\u00a0", "\u3000", "\r\n"]
    for size in (1, 2, 7, 64):
        monkeypatch.setattr(prepare, "CHUNK_CHARACTERS", size)
        for _ in range(50):
            text = "".join(random.choices(parts, k=100))
            (tmp_path / "text").write_bytes(text.encode())
            with tqdm(disable=True) as bar:
                [document] = prepare.read_txt(tmp_path / "text", "text", bar)
                pieces = list(document)
            assert "".join(pieces) == text
            together = [token for piece in pieces for token in tokenizer.encode_to_numpy(piece).tolist()]
            assert together == tokenizer.encoding.encode_ordinary(text)


@pytest.mark.parametrize("content, reason", [
    (b"", "is empty"), (b"x", "is too short"), (b"\xff\xfe\x00caf\xe9", "is not UTF-8 text"),
])
def test_texts_that_cannot_be_used(content, reason, tmp_path):
    (tmp_path / "text").write_bytes(content)
    run = run_command(sys.executable, PREPARE, "--text", tmp_path / "text", "--out", tmp_path / "tokens")
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("error:") and reason in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "tokens").exists() and not (tmp_path / "tokens.partial").exists()


def test_a_byte_order_mark_is_no_text(prepare, tmp_path):
    (tmp_path / "text").write_bytes("\ufefftwo \ufeffwords".encode())
    prepare.main(["--text", str(tmp_path / "text"), "--out", str(tmp_path / "tokens")])
    assert bytes_of(prepare, read_tokens(tmp_path / "tokens")) == "two \ufeffwords".encode()


def test_a_tiny_text_works(prepare, tmp_path):
    (tmp_path / "text").write_bytes(b"abc")
    prepare.main(["--text", str(tmp_path / "text"), "--out", str(tmp_path / "tokens")])
    assert len(np.fromfile(tmp_path / "tokens" / "train.bin", "<u2")) == 2
    assert len(np.fromfile(tmp_path / "tokens" / "val.bin", "<u2")) == 1


def test_a_huge_text_needs_no_huge_memory(tmp_path):
    """300 MB of text in an address space that cannot hold it twice."""
    with open(tmp_path / "text", "wb") as file:
        for _ in range(300):
            file.write((b"A line of text.\n" * 65536)[:1_000_000])
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import prepare\n"
        "from conftest import peak_memory\n"
        "prepare.load_tokenizer = prepare.ByteTokenizer\n"
        "before = peak_memory()\n"
        "prepare.main(['--text', sys.argv[2], '--out', sys.argv[3]])\n"
        "print(peak_memory() - before)"
    )
    run = run_command(sys.executable, "-c", code, PREPARE.parent, tmp_path / "text", tmp_path / "tokens",
                      PYTHONPATH=str(ROOT / "tests"))
    assert run.returncode == 0, run.stderr
    assert float(run.stdout.splitlines()[-1]) < 60  # MiB
    assert (tmp_path / "tokens" / "train.bin").stat().st_size == 2 * 270_000_000


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_preparation_leaves_the_old_files(signal_number, prepare, tmp_path, monkeypatch):
    """Killed at random moments: the folder always holds one whole text, and the next run cleans up and works."""
    monkeypatch.syspath_prepend(PREPARE.parent)  # where the encoding processes find the module
    (tmp_path / "old").write_bytes(b"old text " * 100)
    (tmp_path / "new").write_bytes(b"new text " * 2_000_000)
    out = tmp_path / "tokens"
    prepare.main(["--text", str(tmp_path / "old"), "--out", str(out)])
    code = (
        "import signal, sys; sys.path.insert(0, sys.argv[1]); import prepare\n"
        "prepare.load_tokenizer = prepare.ByteTokenizer; prepare.CHUNK_CHARACTERS = 200\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit('stopped'))\n"
        "print('ready', flush=True); prepare.main(['--text', sys.argv[2], '--out', sys.argv[3]])"
    )
    random.seed(signal_number)
    for _ in range(4):
        command = [sys.executable, "-c", code, PREPARE.parent, tmp_path / "new", out]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
            run.stdout.readline()
            time.sleep(random.uniform(0.0, 0.3))
            run.send_signal(signal_number)
        assert run.returncode != 0
        # old, or new if the signal came after the rename: whole in any case
        assert bytes_of(prepare, read_tokens(out)) in (b"old text " * 100, b"new text " * 2_000_000)
        if signal_number != signal.SIGKILL:
            assert not (tmp_path / "tokens.partial").exists()
    prepare.main(["--text", str(tmp_path / "new"), "--out", str(out)])
    assert len(read_tokens(out)) == 18_000_000
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new", "tokens", "tokens.lock"}


def test_a_full_disk_leaves_nothing(tmp_path):
    """A limit on the size of files stands for the full disk: the write fails with an OSError."""
    (tmp_path / "text").write_bytes(b"some text " * 100_000)
    limit = 200_000
    run = subprocess.run(
        [sys.executable, PREPARE, "--text", tmp_path / "text", "--out", tmp_path / "tokens"], capture_output=True,
        text=True, timeout=120, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert run.returncode == 1
    assert run.stderr.strip().splitlines()[-1].startswith("error: nothing was written")
    assert "Traceback" not in run.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"text", "tokens.lock"}


def test_a_foreign_folder_is_never_replaced(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "text").write_bytes(b"some text")
    for out, reason in (("photos", "also holds cat.jpg"), ("text", "is a file")):
        run = run_command(sys.executable, PREPARE, "--text", tmp_path / "text", "--out", tmp_path / out)
        assert run.returncode == 1 and reason in run.stderr and "Traceback" not in run.stderr
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"cat"
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "text.txt").write_text("my novel")
    run = run_command(sys.executable, PREPARE, "--text", tmp_path / "novel" / "text.txt", "--out", tmp_path / "novel")
    assert run.returncode == 1 and "text.txt, which would be lost" in run.stderr
    assert (tmp_path / "novel" / "text.txt").read_text() == "my novel"
    for sibling in ("mine.old", "mine.partial"):
        (tmp_path / sibling).mkdir()
        (tmp_path / sibling / "thesis.txt").write_text("thesis")
        run = run_command(sys.executable, PREPARE, "--text", tmp_path / "text", "--out", tmp_path / "mine")
        assert run.returncode == 1 and "thesis.txt, which would be lost" in run.stderr
        assert (tmp_path / sibling / "thesis.txt").read_text() == "thesis"
        (tmp_path / sibling).rename(tmp_path / f"kept {sibling}")


def test_an_old_folder_is_back_when_the_new_one_cannot_take_its_place(prepare, tmp_path, monkeypatch):
    """As on Windows, where a folder in use is not renamed."""
    for name in ("old", "new"):
        (tmp_path / name).write_bytes(f"{name} text".encode())
    prepare.main(["--text", str(tmp_path / "old"), "--out", str(tmp_path / "tokens")])
    rename = Path.rename

    def refuse_the_new(path, target):
        if path.name == "tokens.partial":
            raise PermissionError("in use")
        rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(SystemExit, match="nothing was written to .*in use"):
        prepare.main(["--text", str(tmp_path / "new"), "--out", str(tmp_path / "tokens")])
    assert bytes_of(prepare, read_tokens(tmp_path / "tokens")) == b"old text"
    assert not (tmp_path / "tokens.old").exists()


def test_a_second_preparation_waits_and_says_so(prepare, tmp_path):
    (tmp_path / "text").write_bytes(b"some text")
    command = [sys.executable, PREPARE, "--text", tmp_path / "text", "--out", tmp_path / "tokens"]
    with open(tmp_path / "said", "w") as said, prepare.become_only_writer(tmp_path / "tokens"):
        run = subprocess.Popen(command, stderr=said)
        deadline = time.monotonic() + 30
        while not (tmp_path / "said").stat().st_size and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "waiting for another preparation" in (tmp_path / "said").read_text()
        assert run.poll() is None and not (tmp_path / "tokens").exists()
    assert run.wait(timeout=60) == 0 and (tmp_path / "tokens").exists()
