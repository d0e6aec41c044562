"""Turn a text into the GPT-2 token files that the training scripts read.

    python data/prepare.py                          # Tiny Shakespeare -> data/tokens/
    python data/prepare.py --text my.txt --out data/mine

The output folder holds

    train.bin, val.bin   GPT-2 token ids, little-endian uint16; the last 10 % of the tokens are val.bin
    meta.json            source, SHA-256 of the text, tokenizer, vocabulary size, token counts

It is written beside its place and renamed as a whole, so it is either complete or absent, also when this
program is killed half-way.

Without a network it still works, and says loudly what it did: the text falls back to the language reference
that every Python carries, the tokenizer to GPT-2's own 256 single-byte tokens (a valid GPT-2 token sequence
that simply uses no merge). The scripts print both in their log, so such a run is never taken for another.

Sources: Tiny Shakespeare is from Andrej Karpathy's char-rnn; the tokenizer is tiktoken's "gpt2".
"""
import argparse
import hashlib
import http.client
import json
import shutil
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import tiktoken
from filelock import FileLock
from tqdm import tqdm

TINY_SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_SECONDS = 60  # for the whole text, and again for the tokenizer
VOCAB_SIZE = 50257  # GPT-2's: 50,000 merges + 256 bytes + 1 <|endoftext|>
CHUNK_CHARACTERS = 1 << 20  # text is read and encoded in pieces, so that memory does not grow with the file
TOKEN_FILES = {"train.bin", "val.bin", "meta.json"}


class ByteTokenizer:
    """GPT-2's 256 single-byte tokens, ids 0-255: what its byte-level BPE gives when no merge applies."""

    name = "gpt2-bytes"

    def __init__(self):
        # GPT-2 numbers the printable bytes first, then the others (tiktoken.load.data_gym_to_mergeable_bpe_ranks).
        printable = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
        others = [byte for byte in range(256) if byte not in printable]
        self.id_of_byte = np.empty(256, dtype="<u2")
        self.id_of_byte[printable + others] = np.arange(256)

    def encode_to_numpy(self, text):
        return self.id_of_byte[np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]

    def decode(self, ids):
        byte_of_id = np.argsort(self.id_of_byte)
        return bytes(byte_of_id[i] for i in ids if i < 256).decode("utf-8", errors="replace")


class MergeTokenizer:
    """tiktoken's "gpt2" encoding. <|endoftext|> inside the text is encoded as plain text."""

    name = "gpt2"

    def __init__(self, encoding):
        self.encoding = encoding

    def encode_to_numpy(self, text):
        return np.array(self.encoding.encode_ordinary(text), dtype="<u2")

    def decode(self, ids):
        return self.encoding.decode(ids)


def warn(message):
    print(f"WARNING: {message}", file=sys.stderr, flush=True)


def download(url, sha256, seconds=DOWNLOAD_SECONDS):
    """Return the bytes at `url`. Raise OSError when they do not arrive in `seconds` or are not the expected ones."""
    deadline = time.monotonic() + seconds
    received = bytearray()
    with urllib.request.urlopen(url, timeout=min(10, seconds)) as response:
        while block := response.read1(1 << 16):
            received += block
            if time.monotonic() > deadline:
                raise TimeoutError(f"not complete after {seconds} s")
    if hashlib.sha256(received).hexdigest() != sha256:
        raise OSError(f"the {len(received):,} bytes received are not the expected file (SHA-256 differs)")
    return bytes(received)


def load_tokenizer(seconds=DOWNLOAD_SECONDS):
    """tiktoken's gpt2 encoding, or the single-byte tokens when its merges cannot be fetched within `seconds`."""
    found = {}

    def fetch():
        try:
            found["encoding"] = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' and tiktoken's own zoo: whatever it is, the answer is the fallback
            found["error"] = error

    # tiktoken downloads without a time-out of its own: give up waiting for it, not on the user.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    if "encoding" in found:
        return MergeTokenizer(found["encoding"])
    reason = type(found["error"]).__name__ if "error" in found else f"no answer after {seconds} s"
    warn(f"tiktoken could not fetch GPT-2's merges ({reason}).")
    warn("Falling back to GPT-2's 256 single-byte tokens: losses are NOT comparable with those of gpt2 tokens.")
    return ByteTokenizer()


def fallback_text():
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def default_text(folder, url=TINY_SHAKESPEARE_URL, seconds=DOWNLOAD_SECONDS):
    """Put Tiny Shakespeare, or without a network Python's language reference, into `folder`. Return (path, source)."""
    path = folder / "text.txt"
    try:
        path.write_bytes(download(url, TINY_SHAKESPEARE_SHA256, seconds))
        return path, "tiny_shakespeare"
    except (OSError, http.client.HTTPException) as error:  # urllib's errors and time-outs are OSErrors
        warn(f"could not download Tiny Shakespeare ({error}).")
        warn("Falling back to Python's own language reference: losses are NOT comparable with Tiny Shakespeare's.")
    path.write_bytes(fallback_text().encode("utf-8"))
    return path, "python_topics"


def cut_before_last_space(text):
    """Split `text` where no GPT-2 token can straddle: before whitespace that follows a non-space character."""
    end = len(text)
    while end > 0 and text[end - 1].isspace():
        end -= 1
    while end > 0 and not text[end - 1].isspace():
        end -= 1
    while end > 0 and text[end - 1].isspace():
        end -= 1
    return text[:end], text[end:]


def read_in_pieces(path):
    """Yield a UTF-8 file's text in pieces that encode, one by one, to the tokens of the whole."""
    rest = ""
    with open(path, encoding="utf-8", newline="") as file:
        while text := file.read(CHUNK_CHARACTERS):
            piece, rest = cut_before_last_space(rest + text)
            if piece:
                yield piece
    if rest:
        yield rest


def encode_file(path, tokenizer, folder, source):
    """Encode the text file `path` into `folder`/train.bin, val.bin and meta.json."""
    sha256, n_tokens = hashlib.sha256(), 0
    train_path, val_path = folder / "train.bin", folder / "val.bin"
    with (
        open(train_path, "wb") as file,
        tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"encoding {path.name}", disable=None) as bar,
    ):
        for piece in read_in_pieces(path):
            encoded = piece.encode("utf-8")
            sha256.update(encoded)
            tokens = tokenizer.encode_to_numpy(piece)
            tokens.tofile(file)
            n_tokens += len(tokens)
            bar.update(len(encoded))
    if n_tokens < 2:
        sys.exit(f"error: {path} is {'empty' if n_tokens == 0 else 'too short'}: give a text of at least two tokens")

    n_train = min(n_tokens * 9 // 10, n_tokens - 1)
    with open(train_path, "r+b") as train, open(val_path, "wb") as val:
        train.seek(2 * n_train)
        shutil.copyfileobj(train, val)
        train.truncate(2 * n_train)
    meta = {
        "source": "tiny_shakespeare" if sha256.hexdigest() == TINY_SHAKESPEARE_SHA256 else source,
        "sha256": sha256.hexdigest(),
        "tokenizer": tokenizer.name,
        "vocab_size": VOCAB_SIZE,
        "train_tokens": n_train,
        "val_tokens": n_tokens - n_train,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def check_replaceable(out):
    """Refuse an output path that holds anything but token files: it is about to be replaced as a whole."""
    if out.exists() and not out.is_dir():
        sys.exit(f"error: {out} is a file: give another --out")
    if out.is_dir():
        foreign = sorted(entry.name for entry in out.iterdir() if entry.name not in TOKEN_FILES | {"text.txt"})
        if foreign:
            sys.exit(f"error: {out} also holds {foreign[0]}, which would be lost: give another --out")


def replace_folder(new, out):
    """Rename the finished folder `new` to `out`, in the place of an older one."""
    if not out.exists():
        new.rename(out)
        return
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    out.rename(old)
    new.rename(out)
    shutil.rmtree(old)


def prepare(text, out):
    """Write token files of `text` (a path, or None for the default text) to the folder `out`. Return the metadata."""
    for folder in (out, out.with_name(out.name + ".partial"), out.with_name(out.name + ".old")):
        check_replaceable(folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    with FileLock(out.with_name(out.name + ".lock")):  # one writer at a time; a dead one leaves no lock
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left behind
        partial.mkdir()
        try:
            source_path, source = (text, text.name) if text else default_text(partial)
            meta = encode_file(source_path, load_tokenizer(), partial, source)
            if not text:
                source_path.unlink()
            replace_folder(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return meta


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Turn a text into GPT-2 token files for the training scripts.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a UTF-8 text (default: Tiny Shakespeare)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("data/tokens"), help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.text and not args.text.is_file():
        sys.exit(f"error: --text {args.text}: no such file")
    return args


def main(argv=None):
    args = parse_args(argv)
    out = args.out.resolve()
    try:
        meta = prepare(args.text, out)
    except UnicodeDecodeError as error:
        sys.exit(f"error: {args.text} is not UTF-8 text ({error.reason}): convert it first, e.g. with iconv")
    except OSError as error:
        sys.exit(f"error: nothing was written to {args.out}: {error}")
    print(
        f"{args.out}: {meta['source']} ({meta['tokenizer']} tokens), "
        f"{meta['train_tokens']:,} train + {meta['val_tokens']:,} val tokens"
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: nothing was written"))  # lets `finally` clean up
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: nothing was written")
