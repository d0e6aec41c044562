"""Turn text into the GPT-2 token files that the training scripts read.

    python data/prepare.py                                      # Tiny Shakespeare -> data/tokens/
    python data/prepare.py --text my.txt --out data/mine        # a text
    python data/prepare.py --text corpus/ --out data/mine       # a folder of .txt, .jsonl and .parquet files
    python data/prepare.py --hf HuggingFaceFW/fineweb-edu --name sample-10BT --out data/edu

The output folder holds

    train.bin, val.bin   GPT-2 token ids, little-endian uint16; the last 10 % of the tokens are val.bin
    meta.json            source, SHA-256 of the text, tokenizer, vocabulary size, documents, token counts

A .txt file is one document; so is each line of a .jsonl file and each row of a .parquet file or Hugging Face dataset.
Between two documents stands <|endoftext|>. Files are taken in the order of their names.

Any size works: one process reads, one process per core encodes, and memory holds a few megabytes of text for each (of
a .jsonl or .parquet file at least one whole document, of a dataset some rows at once).
The folder is written beside its place, as <out>.partial, and renamed as a whole: it is either complete or absent. What
a killed run leaves there is checked against the text by the next one, which goes on with it.

Without a network it still works, and says loudly what it did: the text falls back to the language reference
that every Python carries, the tokenizer to GPT-2's own 256 single-byte tokens (a valid GPT-2 token sequence
that simply uses no merge). The scripts print both in their log, so such a run is never taken for another.

Sources: Tiny Shakespeare is from Andrej Karpathy's char-rnn; the tokenizer is tiktoken's "gpt2".
"""
import argparse
import contextlib
import hashlib
import http.client
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import urllib.request
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path

import numpy as np
import tiktoken
from filelock import FileLock, Timeout
from tqdm import tqdm

TINY_SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DOWNLOAD_SECONDS = 60  # for the whole text, and again for the tokenizer
VOCAB_SIZE = 50257  # GPT-2's: 50,000 merges + 256 bytes + 1 <|endoftext|>
END_OF_TEXT = VOCAB_SIZE - 1
# Text is read and encoded in pieces, so that memory does not grow with the corpus. A text is cut after LONGEST_WORD
# characters even where no blank is: together they stay below the million blanks in a row that tiktoken cannot take.
CHUNK_CHARACTERS = 1 << 19
LONGEST_WORD = 1 << 18
PROGRESS_SECONDS = 10  # a killed run loses this much work
SUFFIXES = {".txt", ".jsonl", ".parquet"}
TOKEN_FILES = {"train.bin", "val.bin", "meta.json"}
WORKING_FILES = {"default_text.txt", "progress.json", "progress.json.partial"}  # in the unfinished folder only
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
# Where no GPT-2 token can straddle: after a character that is no space, before one that is.
LAST_CUT = re.compile(r".*\S(?=[ \t\r\n])", re.DOTALL)


class TextError(Exception):
    """The text cannot be used, or no longer be read; the message says which and what to do."""


class NoMerges(Exception):
    """tiktoken could not fetch GPT-2's merges; the message says why."""


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
        byte_of_id = np.argsort(self.id_of_byte).astype(np.uint8)
        unknown = "\ufffd".encode()
        return b"".join(bytes([byte_of_id[i]]) if i < 256 else unknown for i in ids).decode("utf-8", errors="replace")


class MergeTokenizer:
    """tiktoken's "gpt2" encoding. <|endoftext|> inside a document is encoded as plain text."""

    name = "gpt2"

    def __init__(self, encoding):
        self.encoding = encoding

    def encode_to_numpy(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype("<u2")

    def decode(self, ids):
        return self.encoding.decode(ids)

    def __getstate__(self):
        """For other processes: the merges themselves, so that none reads, or even fetches, them again."""
        encoding = self.encoding
        return encoding._pat_str, encoding._mergeable_ranks, encoding._special_tokens

    def __setstate__(self, state):
        pattern, merges, special = state
        self.encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=merges, special_tokens=special)


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


def fetch_merges(seconds=DOWNLOAD_SECONDS):
    """The tokenizer of tiktoken's gpt2 encoding. Raise NoMerges when it cannot be fetched within `seconds`."""
    found = {}

    def fetch():
        try:
            found["encoding"] = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' and tiktoken's own zoo
            found["error"] = error

    # tiktoken downloads without a time-out of its own: give up waiting for it, not on the user.
    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    if "encoding" in found:
        return MergeTokenizer(found["encoding"])
    reason = type(found["error"]).__name__ if "error" in found else f"no answer after {seconds} s"
    raise NoMerges(f"tiktoken could not fetch GPT-2's merges ({reason})")


def load_tokenizer():
    """tiktoken's gpt2 encoding, or the single-byte tokens when its merges cannot be fetched."""
    try:
        return fetch_merges()
    except NoMerges as error:
        warn(f"{error}.")
        warn("Falling back to GPT-2's 256 single-byte tokens: losses are NOT comparable with those of gpt2 tokens.")
        return ByteTokenizer()


def fallback_text():
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def default_text(folder, url=TINY_SHAKESPEARE_URL, seconds=DOWNLOAD_SECONDS):
    """Put Tiny Shakespeare, or without a network Python's language reference, into `folder`. Return (path, source)."""
    path = folder / "default_text.txt"
    try:
        path.write_bytes(download(url, TINY_SHAKESPEARE_SHA256, seconds))
        return path, "tiny_shakespeare"
    except (OSError, http.client.HTTPException) as error:  # urllib's errors and time-outs are OSErrors
        warn(f"could not download Tiny Shakespeare ({error}).")
        warn("Falling back to Python's own language reference: losses are NOT comparable with Tiny Shakespeare's.")
    path.write_bytes(fallback_text().encode("utf-8"))
    return path, "python_topics"


def in_pieces(blocks):
    """Yield the text of consecutive `blocks` in pieces that encode, one by one, to the tokens of the whole."""
    rest = ""
    for block in blocks:
        rest += block
        cut = LAST_CUT.match(rest)
        end = cut.end() if cut else len(rest) if len(rest) > LONGEST_WORD else 0
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest


def read_blocks(path, bar):
    with open(path, encoding="utf-8-sig", newline="") as file:  # "sig": a byte order mark is no text
        done = 0
        try:
            while block := file.read(CHUNK_CHARACTERS):
                bar.update(file.buffer.tell() - done)
                done = file.buffer.tell()
                yield block
        except UnicodeDecodeError as error:
            reason = f"{path} is not UTF-8 text ({error.reason})"
            raise TextError(f"{reason}: convert it (iconv) or unpack it (gunzip) first") from error


def read_txt(path, field, bar):
    """Yield the one document of a text file, as pieces; an empty file has none."""
    if path.stat().st_size:
        yield in_pieces(read_blocks(path, bar))


def text_of(record, field, place):
    """Return the text of a record. Raise TextError when it has none under the name `field`."""
    if not isinstance(record, dict) or field not in record:
        names = ", ".join(map(str, record)) if isinstance(record, dict) else f"no names at all: {str(record)[:40]!r}"
        raise TextError(f"{place}: nothing is called {field!r} there: name the text with --field (there is {names})")
    if not isinstance(record[field], str | None):
        raise TextError(f"{place}: {field!r} is {str(record[field])[:40]}, not a text: name another --field")
    return record[field] or ""


def pieces_of(text):
    """The pieces of one record's text; an ordinary document is a single one."""
    if len(text) <= CHUNK_CHARACTERS:
        return [text]
    return in_pieces(text[i : i + CHUNK_CHARACTERS] for i in range(0, len(text), CHUNK_CHARACTERS))


def read_jsonl(path, field, bar):
    """Yield each line's document, as pieces."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TextError(f"{path} line {number} is not JSON ({error}): repair or delete that line") from error
            yield pieces_of(text_of(record, field, f"{path} line {number}"))


def read_parquet(path, field, bar):
    """Yield each row's document, as pieces."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise TextError(f"{path}: reading it takes pyarrow: pip install pyarrow") from error
    try:
        with ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as table:  # else it keeps whole columns
            text_of(dict.fromkeys(table.schema_arrow.names), field, path)
            groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
            n_rows = max(1, table.metadata.num_rows)
            bytes_per_row = 1 + sum(group.total_byte_size for group in groups) // n_rows  # unpacked
            rows_at_once = min(64, 1 + CHUNK_CHARACTERS // bytes_per_row)
            for batch in table.iter_batches(batch_size=rows_at_once, columns=[field]):
                bar.update(path.stat().st_size * len(batch) / n_rows)
                for text in batch.column(0).to_pylist():
                    yield pieces_of(text_of({field: text}, field, path))
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path} cannot be read as parquet ({str(error).splitlines()[0]})") from error


READERS = {".jsonl": read_jsonl, ".parquet": read_parquet}  # any other file is a text


def find_files(path):
    """The files of a corpus: `path` itself, or what its folder holds. Raise TextError when there is none."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise TextError(f"{path} holds no {', '.join(sorted(SUFFIXES))} file: give another --text")
    return files


def read_files(path, field):
    """Yield each document of a file or a folder, as pieces, with a progress bar over the bytes of the files."""
    files = find_files(path)
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"encoding {path.name}", disable=None) as bar:
        for file in files:
            yield from READERS.get(file.suffix.lower(), read_txt)(file, field, bar)


def read_dataset(name, config, split, field):
    """Yield each document of a Hugging Face dataset (a name or a local folder), as pieces; it is streamed."""
    try:
        import datasets
    except ImportError as error:
        raise TextError("--hf takes the datasets library: pip install datasets") from error
    try:
        dataset = datasets.load_dataset(name, config, split=split, streaming=True)
        if dataset.info.builder_name == "text":  # it takes each line for a document, and .txt files alone
            raise TextError(f"{name} holds .txt files, which are no dataset: give it as --text")
        splits = dataset.info.splits or {}
        total = splits[split].num_examples if split in splits else None
        with tqdm(dataset, total=total, unit=" documents", desc=f"encoding {name}", disable=None) as bar:
            for number, row in enumerate(bar, 1):
                yield pieces_of(text_of(row, field, f"{name} row {number}"))
    except TextError:
        raise
    except Exception as error:  # huggingface_hub's, fsspec's, aiohttp's and pyarrow's own zoo
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise TextError(f"--hf {name} cannot be read ({reason})") from error


def chunks_of(documents, counted):
    """Pack documents into lists of about CHUNK_CHARACTERS bytes: UTF-8 pieces, and None between two documents.

    `counted["documents"]` counts along. A record without text is no document.
    """
    chunk, size = [], 0
    for document in documents:
        started = False
        for piece in filter(None, document):
            if not started and counted["documents"]:
                chunk.append(None)
            counted["documents"] += not started
            started = True
            chunk.append(piece.encode("utf-8", "replace"))  # half a surrogate pair, as some JSON has, becomes "?"
            size += len(chunk[-1])
            if size >= CHUNK_CHARACTERS:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk


def encode_chunk(chunk, tokenizer):
    """The token ids of a chunk, (n,) uint16."""
    end = np.array([END_OF_TEXT], dtype="<u2")
    return np.concatenate([end if text is None else tokenizer.encode_to_numpy(text.decode()) for text in chunk])


def block_signals(block):
    """Block or unblock STOP_SIGNALS in this thread and the processes that it starts."""
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK if block else signal.SIG_UNBLOCK, STOP_SIGNALS)


def start_worker(tokenizers):
    """Begin a worker process: it takes a tokenizer, leaves Ctrl-C to its parent, and ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    block_signals(False)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    start_worker.tokenizer = tokenizers.get()


def encode_in_worker(chunk):
    return encode_chunk(chunk, start_worker.tokenizer)


@contextlib.contextmanager
def held_signals():
    """Let Ctrl-C and SIGTERM wait, so that nothing here is done by half; for a process started here, until it is up."""
    arrived = []
    handlers = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in STOP_SIGNALS}
    block_signals(True)
    try:
        yield
    finally:
        block_signals(False)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


def encode_chunks(chunks, tokenizer):
    """Yield (chunk, its token ids), in order."""
    first = list(islice(chunks, 4))
    if len(first) == 4:
        yield from encode_in_processes(chain(first, chunks), tokenizer)
        return
    for chunk in first:  # a small text is done before another process has started
        yield chunk, encode_chunk(chunk, tokenizer)


def encode_in_processes(chunks, tokenizer):
    """Yield (chunk, its token ids), in order. One process per core encodes: this one too, when it has nothing to read.

    At most a few chunks for each process are in memory.
    """
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    n_workers = min(max(1, n_cores - 1), 60)  # 60: Windows allows no more, and one reader could not feed them
    spawn = multiprocessing.get_context("spawn")  # the same on every system, and no copy of this process's threads
    tokenizers = spawn.Queue()  # as an argument a megabyte of merges would block this process if its worker died early
    tokenizers.cancel_join_thread()
    for _ in range(n_workers):
        tokenizers.put(tokenizer)
    pool = ProcessPoolExecutor(n_workers, spawn, start_worker, (tokenizers,))
    # [chunk, future of its tokens], oldest first. Only what the workers will take soon is given to them, and so has a
    # future: one that is taken back (cancelled) makes the pool hang when a worker dies (python 3.11).
    jobs = deque()
    try:
        while True:
            jobs.extend([chunk, None] for chunk in islice(chunks, 6 + 2 * n_workers - len(jobs)))
            if not jobs:
                return
            running = sum(future is not None and not future.done() for _, future in jobs)
            for job in islice((job for job in jobs if job[1] is None), 2 * n_workers - running):
                with held_signals():
                    job[1] = pool.submit(encode_in_worker, job[0])
            untaken = next((job for job in reversed(jobs) if job[1] is None), None)
            if untaken and not jobs[0][1].done():
                untaken[1] = Future()
                untaken[1].set_result(encode_chunk(untaken[0], tokenizer))
                continue
            chunk, tokens = jobs.popleft()
            yield chunk, tokens.result()
    except BrokenProcessPool as error:
        raise TextError("an encoding process died: does the memory suffice?") from error
    finally:
        with held_signals():
            pool.shutdown()


def update_hash(sha256, chunk):
    """SHA-256 is that of the documents' UTF-8 text, joined by <|endoftext|>."""
    for text in chunk:
        sha256.update(b"<|endoftext|>" if text is None else text)


def save_progress(folder, progress):
    """Write down, for the next run, what the tokens in `folder` stand for."""
    partial = folder / "progress.json.partial"
    partial.write_text(json.dumps(progress))
    partial.replace(folder / "progress.json")


def read_progress(folder):
    """What a killed run has done in `folder`; nothing, if that cannot be used."""
    try:
        progress = json.loads((folder / "progress.json").read_text())
        whole = (folder / "train.bin").stat().st_size >= 2 * progress["tokens"]
        return progress if whole and {"source", "tokenizer", "chunks", "sha256"} <= progress.keys() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def progress_to_go_on_with(folder, source, tokenizer):
    """What a killed run has done of this source; nothing, if that is no loss. Raise TextError when it would be one."""
    done = read_progress(folder)
    if done and done["source"] != source:
        raise TextError(f"{folder.name} holds an unfinished preparation of {done['source']}: finish or delete it")
    if not done or done["tokenizer"] == tokenizer.name:
        return done
    if done["tokenizer"] == MergeTokenizer.name:
        raise TextError("what was stopped has gpt2 tokens, which need GPT-2's merges")
    warn(f"the preparation that was stopped had {done['tokenizer']} tokens: starting anew")
    return {}


def open_text(read_documents):
    """(The chunks of the text, its hash, its number of documents as far as it has been read)."""
    counted = {"documents": 0}
    return chunks_of(read_documents(), counted), hashlib.sha256(), counted


def skip_done(chunks, done, sha256):
    """Read what is encoded already; whether it is still the same text."""
    for chunk in islice(chunks, done["chunks"]):
        update_hash(sha256, chunk)
    return sha256.hexdigest() == done["sha256"]


def write_tokens(chunks, sha256, done, source, tokenizer, folder):
    """Append the tokens of `chunks` to what is `done` of train.bin, and note the progress. Return their number."""
    n_chunks, n_tokens = done.get("chunks", 0), done.get("tokens", 0)
    if not done:
        (folder / "progress.json").unlink(missing_ok=True)  # it tells of other tokens than those to come
    with open(folder / "train.bin", "r+b" if done else "wb") as file:
        file.truncate(2 * n_tokens)
        file.seek(2 * n_tokens)
        saved = time.monotonic()
        for chunk, tokens in encode_chunks(chunks, tokenizer):
            update_hash(sha256, chunk)
            file.write(tokens)
            n_chunks, n_tokens = n_chunks + 1, n_tokens + len(tokens)
            if time.monotonic() - saved > PROGRESS_SECONDS:
                file.flush()
                os.fsync(file.fileno())
                progress = {"source": source, "tokenizer": tokenizer.name, "chunks": n_chunks, "tokens": n_tokens}
                save_progress(folder, progress | {"sha256": sha256.hexdigest()})
                saved = time.monotonic()
    return n_tokens


def split_off_validation(folder, n_tokens):
    """Move the last tenth of train.bin's tokens to val.bin. Return how many stay."""
    n_train = min(n_tokens * 9 // 10, n_tokens - 1)
    with open(folder / "train.bin", "r+b") as train, open(folder / "val.bin", "wb") as val:
        train.seek(2 * n_train)
        shutil.copyfileobj(train, val)
        train.truncate(2 * n_train)
        for file in (train, val):
            file.flush()
            os.fsync(file.fileno())  # after a power cut the folder's name must not stand for less
    return n_train


def encode_corpus(read_documents, source, tokenizer, folder):
    """Encode the documents into `folder`/train.bin, val.bin and meta.json, going on where a killed run stopped."""
    done = progress_to_go_on_with(folder, source, tokenizer)
    chunks, sha256, counted = open_text(read_documents)
    if done and not skip_done(chunks, done, sha256):
        warn("the text has changed since the preparation that was stopped: starting anew")
        chunks.close()
        done = {}
        chunks, sha256, counted = open_text(read_documents)
    if done:
        print(f"going on with {folder.name}: {done['tokens']:,} tokens are there", file=sys.stderr, flush=True)
    n_tokens = write_tokens(chunks, sha256, done, source, tokenizer, folder)
    if n_tokens < 2:
        reason = "empty" if n_tokens == 0 else "too short"
        raise TextError(f"{source} is {reason}: give a text of at least two tokens")
    n_train = split_off_validation(folder, n_tokens)
    meta = {
        "source": "tiny_shakespeare" if sha256.hexdigest() == TINY_SHAKESPEARE_SHA256 else source,
        "sha256": sha256.hexdigest(),
        "tokenizer": tokenizer.name,
        "vocab_size": VOCAB_SIZE,
        "documents": counted["documents"],
        "train_tokens": n_train,
        "val_tokens": n_tokens - n_train,
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


def check_replaceable(folder, own_files):
    """Refuse a path that holds anything but our files: it is about to be replaced as a whole."""
    if folder.exists() and not folder.is_dir():
        sys.exit(f"error: {folder} is a file: give another --out")
    if folder.is_dir():
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in own_files)
        if foreign:
            sys.exit(f"error: {folder} also holds {foreign[0]}, which would be lost: give another --out")


def replace_folder(new, out):
    """Rename the finished folder `new` to `out`, in the place of an older one. Raise OSError, with `out` as it was."""
    if not out.exists():
        new.rename(out)
        return
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    out.rename(old)
    try:
        new.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def become_only_writer(out):
    """A held lock: one preparation of `out` at a time. A dead one leaves none."""
    lock = FileLock(out.with_name(out.name + ".lock"))
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another preparation of {out}", file=sys.stderr, flush=True)
        return lock.acquire()


def open_source(text, hf, field, folder):
    """Return (a function that yields the documents, the name of their source)."""
    if hf:
        dataset, config, _ = hf
        dataset = Path(dataset).resolve().name if Path(dataset).is_dir() else dataset
        return lambda: read_dataset(*hf, field), f"{dataset}/{config}" if config else dataset
    if text:
        return lambda: read_files(text, field), text.resolve().name
    path, source = default_text(folder)
    return lambda: read_files(path, field), source


def partial_of(out):
    return out.with_name(out.name + ".partial")


def prepare(text, out, hf=None, field="text"):
    """Write token files to the folder `out`. Return their metadata.

    The text is that of `text` (the path of a file or a folder), of the Hugging Face dataset `hf` (name, config or None,
    split), or without either the default text. Raises TextError and OSError; `out` is then as it was.
    """
    partial = partial_of(out)
    check_replaceable(out, TOKEN_FILES)
    check_replaceable(out.with_name(out.name + ".old"), TOKEN_FILES)
    check_replaceable(partial, TOKEN_FILES | WORKING_FILES)
    out.parent.mkdir(parents=True, exist_ok=True)
    with become_only_writer(out):
        if not (partial / "progress.json").exists():
            shutil.rmtree(partial, ignore_errors=True)  # a killed run left nothing to go on with
        partial.mkdir(exist_ok=True)
        try:
            meta = encode_corpus(*open_source(text, hf, field, partial), load_tokenizer(), partial)
            with held_signals():
                for name in WORKING_FILES:
                    (partial / name).unlink(missing_ok=True)
                replace_folder(partial, out)
        finally:
            if not (partial / "progress.json").exists():
                shutil.rmtree(partial, ignore_errors=True)
    return meta


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Turn text into GPT-2 token files for the training scripts.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, metavar="PATH",
                        help="a UTF-8 text, or a folder of .txt, .jsonl and .parquet files (default: Tiny Shakespeare)")
    source.add_argument("--hf", metavar="DATASET", help="a Hugging Face dataset: its name, or a local folder")
    parser.add_argument("--name", help="which configuration of the dataset, if it has several")
    parser.add_argument("--split", help="which part of the dataset (default: train)")
    parser.add_argument("--field", help="what the text is called in .jsonl, .parquet and datasets (default: text)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("data/tokens"), help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.text and not os.path.exists(args.text):  # unlike Path.exists, False for a name that is too long
        sys.exit(f"error: --text {args.text}: no such file or folder")
    if not args.out.resolve().name:
        sys.exit(f"error: --out {args.out}: give the name of a folder of its own")
    if args.field and not (args.text or args.hf):
        sys.exit("error: --field says what the text is called: give --text or --hf too")
    for flag in ("name", "split"):
        if getattr(args, flag) and not args.hf:
            sys.exit(f"error: --{flag} says which part of a dataset: give --hf too")
    return args


def main(argv=None):
    args = parse_args(argv)
    out = args.out.resolve()
    hf = (args.hf, args.name, args.split or "train") if args.hf else None
    try:
        meta = prepare(args.text, out, hf, args.field or "text")
    except (TextError, OSError) as error:
        sys.exit(f"error: nothing was written to {args.out}: {error}{how_to_go_on(out)}")
    except KeyboardInterrupt:
        sys.exit(f"stopped: nothing was written to {args.out}{how_to_go_on(out)}")
    print(
        f"{args.out}: {meta['source']} ({meta['tokenizer']} tokens), "
        f"{meta['documents']:,} document{'s' * (meta['documents'] != 1)}, "
        f"{meta['train_tokens']:,} train + {meta['val_tokens']:,} val tokens"
    )


def how_to_go_on(out):
    if not os.path.exists(partial_of(out) / "progress.json"):
        return ""
    return f"; the same command goes on with what is in {partial_of(out).name}, which may be deleted"


def stop_once(*_):
    """Ctrl-C and SIGTERM end the program; the impatient ones after it must not disturb what it still puts in order."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in STOP_SIGNALS:
        signal.signal(number, stop_once)
    main()
