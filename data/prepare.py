"""Turn text into the token files that the training scripts read.

    python data/prepare.py                                      # Tiny Shakespeare -> data/tokens/
    python data/prepare.py --text my.txt --out data/mine        # a text
    python data/prepare.py --text corpus/ --out data/mine       # a folder of .txt, .jsonl and .parquet files
    python data/prepare.py --hf HuggingFaceFW/fineweb-edu --name sample-10BT --out data/edu
    python data/prepare.py --text my.txt --tokenizer bytes --out data/mine            # single bytes, not GPT-2's tokens
    python data/prepare.py --text my.txt --train-tokenizer 4096 --out data/mine       # tokens that fit the text

Each line of a .jsonl file is a document, as is each row of a .parquet file or dataset; a .txt file is one, or several
with <|endoftext|> between them. Memory does not grow with the corpus. Of many documents, a hash draws a tenth for
validation; of few, the end of the text is held out. Without a network the default text is Python's language reference,
and only the 256 byte tokens of GPT-2 are used.
"""
import argparse
import codecs
import contextlib
import hashlib
import io
import json
import logging
import os
import re
import shutil
import sys
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

try:
    from data import vocabulary
except ImportError:  # started as data/prepare.py
    import vocabulary

TINY_SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DEFAULTS = ("tiny_shakespeare", "python_topics")
SEPARATOR = vocabulary.SEPARATOR
SUFFIXES = (".txt", ".jsonl", ".parquet")
PIECE_CHARACTERS = 1 << 14  # far below the million blanks in a row that make tiktoken panic
# No token spans a letter or digit and the blank after it; of GPT-2's, none spans any non-blank and the blank after it.
LAST_CUT = re.compile(r".*[^\W_](?=[ \t\r\n])|.*\S(?=[ \t\r\n])", re.DOTALL)
TRAINING_BYTES = 10_000_000  # a tokenizer's training takes up to 100 times as much memory
MANY_DOCUMENTS = 100


def warn(message):
    print(f"WARNING: {message}", file=sys.stderr, flush=True)


def load_tokenizer(name):
    """The tokenizer that --tokenizer names; without GPT-2's merges, its single bytes."""
    try:
        if name == "gpt2":
            return vocabulary.GPT2()
        if name == "bytes":
            return vocabulary.of_bytes()
        ours = Path(name).is_file() or Path(name, "meta.json").exists()
        return vocabulary.of_ours(Path(name)) if ours else vocabulary.from_hugging_face(name)
    except vocabulary.NoTokenizer as error:
        if name != "gpt2":
            sys.exit(f"error: --tokenizer {name}: {error}; give gpt2, bytes, a model's file, or a folder that has one")
        warn(f"{error}. Using GPT-2's single-byte tokens: losses are NOT comparable with those of gpt2 tokens.")
        return vocabulary.of_bytes("gpt2-bytes")


def train_tokenizer(vocab_size, sources, field, encoding):
    """A tokenizer trained on at most TRAINING_BYTES: of files the same share of each, from its beginning."""
    sizes = [source.stat().st_size if isinstance(source, Path) else TRAINING_BYTES for source in sources]
    parts = []
    for source, size in zip(sources, sizes, strict=True):
        left = TRAINING_BYTES * size // max(sum(sizes), TRAINING_BYTES)
        for _, text in read(source, field, encoding):
            parts.append(text.encode()[:left])
            left -= len(parts[-1])
            if not left:
                break
    tokenizer = vocabulary.trained([part.decode(errors="ignore") for part in parts], vocab_size)  # cut characters
    print(f"{tokenizer.name}: a tokenizer trained on {sum(map(len, parts)) / 1e6:,.1f} MB of the text", flush=True)
    return tokenizer


def fallback_text():
    return "\n\n".join(topics[name] for name in sorted(topics))


def default_text(url=TINY_SHAKESPEARE_URL, seconds=60):
    """(text, source): Tiny Shakespeare, or without a network Python's language reference."""
    try:
        with ThreadPool(1) as pool:  # a daemon thread, because urlopen's timeout applies to each packet
            text = pool.apply_async(lambda: urllib.request.urlopen(url, timeout=seconds).read()).get(seconds)
        if hashlib.sha256(text).hexdigest() != TINY_SHAKESPEARE_SHA256:
            raise ValueError("its SHA-256 is wrong")
        return text.decode("utf-8"), "tiny_shakespeare"
    except Exception as error:  # urllib, http.client and ssl raise many kinds
        warn(f"could not download Tiny Shakespeare ({error!r}). Using Python's language reference: losses are NOT"
             " comparable. To get Tiny Shakespeare, run `python data/prepare.py` again with a network.")
        return fallback_text(), "python_topics"


def documents_of(source, field, encoding):
    """Yield the documents of a file, or of a Hugging Face dataset (name, config, split), as open text files."""
    if codecs.lookup(encoding).name == "utf-8":
        encoding = "utf-8-sig"  # a byte order mark is not text
    if isinstance(source, tuple):
        import datasets
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it would log what our error line says
        dataset = datasets.load_dataset(*source[:2], split=source[2], streaming=True)
        if dataset.info.builder_name == "text":
            raise ValueError("each line of its .txt files would be a document: give it as --text")
        batches = (table.to_pylist() for table in dataset.with_format("arrow").iter(batch_size=64))
    elif source.suffix.lower() == ".parquet":  # `datasets` would decode whole row groups: often all of a file at once
        from pyarrow.parquet import ParquetFile
        file = ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
        columns = [field] if field in file.schema_arrow.names else None  # None: all, for the error line
        batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=8, columns=columns))
    elif source.suffix.lower() == ".jsonl":  # `datasets` would fail where a line has a key that the first 10 MB lack
        lines = open(source, encoding=encoding, newline="\n")
        batches = ([json.loads(line) if line.strip() else {field: None}] for line in lines)
    else:
        yield open(source, encoding=encoding, newline="")
        return
    for record in chain.from_iterable(batches):
        if not isinstance(record, dict) or field not in record or not isinstance(record[field], str | None):
            raise LookupError(f"no string in field {field!r} of {str(record)[:80]}")
        yield io.StringIO((record[field] or "").encode(errors="replace").decode())  # JSON may hold half surrogate pairs


def read(source, field, encoding):
    """Yield (does a document begin here?, piece); encoded one by one, the pieces give the tokens of their document."""
    place, number = f"--hf {source[0]}" if isinstance(source, tuple) else source, 1
    suffix = None if isinstance(source, tuple) else source.suffix.lower()
    separated = suffix not in (None, ".jsonl", ".parquet")  # a record is one document, its <|endoftext|> is text
    try:
        for document in documents_of(source, field, encoding):
            begins, rest = True, ""
            while block := document.read(PIECE_CHARACTERS):
                *ended, rest = (rest + block).split(SEPARATOR) if separated else [rest + block]
                for text in ended:
                    if text:
                        yield begins, text
                    begins = True
                if len(rest) >= PIECE_CHARACTERS:
                    end = cut.end() if (cut := LAST_CUT.match(rest)) else len(rest) - len(SEPARATOR)  # none is cut
                    yield begins, rest[:end]
                    begins, rest = False, rest[end:]
            if rest:
                yield begins, rest
            number += 1
    except Exception as error:  # json, pyarrow, datasets and huggingface_hub raise many kinds
        wrong, cure = f"document {number} cannot be read ({error!r:.300})", "check the file and the flags"
        if isinstance(error, UnicodeError) and suffix not in (None, ".parquet"):
            wrong, cure = f"not {encoding}", "if it is text, give its --encoding, for example utf-16"
        elif type(error) is LookupError:
            wrong, cure = f"document {number} has {error}", "choose another --field"
        elif isinstance(error, json.JSONDecodeError) and suffix == ".jsonl":
            wrong, cure = f"line {number} is not JSON ({error.msg})", "write each document as one line (jq -c .)"
        sys.exit(f"error: {place}: {wrong}; {cure}")


def files_in(text):
    """The files to read: `text` itself, or those in that folder in name order."""
    if not text.exists():
        sys.exit(f"error: --text {text}: no such file or folder; check the path")
    if not text.is_dir():
        if text.suffix.lower() not in SUFFIXES:
            warn(f"{text}: read as plain text, one document")
        return [text]
    files = sorted(file for file in text.rglob("*") if file.is_file())
    if left_out := Counter(file.suffix.lower() for file in files if file.suffix.lower() not in SUFFIXES):
        counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in sorted(left_out.items()))
        warn(f"{text}: files left out: {left_out.total()} ({counts}); only .txt, .jsonl and .parquet are read")
    return [file for file in files if file.suffix.lower() in SUFFIXES]


def encode(pieces, tokenizer):
    """Yield ((begins, piece), its token ids), in order. Tokenizers release the GIL, so threads use all cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = []
        while (chunk := list(islice(pieces, 32))) or jobs:
            if chunk:
                tokens = (tokenizer.encode(text) for _, text in chunk)
                jobs.append((chunk, pool.submit(list, tokens)))  # list() runs the generator, in a thread
            if not chunk or len(jobs) > 2 * os.cpu_count():  # at most so many chunks are in memory
                chunk, future = jobs.pop(0)
                yield from zip(chunk, future.result(), strict=True)


def is_drawn(number):
    """Is this document, counted from 0, validation data? A tenth of all are, spread over the corpus by a hash."""
    return int(hashlib.sha256(str(number).encode()).hexdigest(), 16) % 10 == 0


def move_drawn(train, val, end_of_text, dtype, n_tokens=1 << 20):
    """Move the drawn documents from train.bin to val.bin, block by block; both keep the order of the documents."""
    train.seek(0)
    number = written = 0
    while (block := np.frombuffer(train.read(dtype.itemsize * n_tokens), dtype=dtype)).size:
        read_up_to = train.tell()
        numbers = number + np.cumsum(block == end_of_text)  # a separator belongs to the document that it begins
        first, number = numbers[0], numbers[-1]
        drawn = np.array([is_drawn(n) for n in range(first, number + 1)])[numbers - first]
        moved = block[drawn]
        val.write(moved[1:] if not val.tell() else moved)  # the first document has no separator before it
        train.seek(written)
        written += train.write(block[~drawn])
        train.seek(read_up_to)
    train.truncate(written)


def write_tokens(pieces, source, tokenizer, folder, origin):
    """Write train.bin, val.bin, meta.json and, but for GPT-2's, tokenizer.json. Return the metadata."""
    sha256, n_documents, n_drawn, width = hashlib.sha256(), 0, 0, tokenizer.dtype.itemsize
    with open(folder / "train.bin", "w+b") as train, open(folder / "val.bin", "wb") as val:
        for (begins, text), tokens in tqdm(encode(pieces, tokenizer), "encoding", unit=" pieces", disable=None):
            if begins:
                if n_documents:
                    train.write(tokenizer.end_of_text.to_bytes(width, "little"))
                    sha256.update(SEPARATOR.encode())
                drawn = is_drawn(n_documents)
                n_documents += 1
            train.write(tokens)
            n_drawn += len(tokens) * drawn
            sha256.update(text.encode("utf-8"))
        n_tokens = train.tell() // width
        if n_tokens < 11:  # else val.bin has one, and nothing is predicted
            sys.exit(f"error: {source}: {n_tokens} tokens are too few; give more text (.txt, .jsonl or .parquet)")
        by_hash = n_documents >= MANY_DOCUMENTS and n_tokens / 20 <= n_drawn <= n_tokens / 5  # else few hold most of it
        if by_hash:
            move_drawn(train, val, tokenizer.end_of_text, tokenizer.dtype)
        else:
            n_train = n_tokens * 9 // 10
            train.seek(width * n_train)
            shutil.copyfileobj(train, val)
            train.truncate(width * n_train)
        n_train, n_val = (file.seek(0, os.SEEK_END) // width for file in (train, val))
    meta = {"source": "tiny_shakespeare" if sha256.hexdigest() == TINY_SHAKESPEARE_SHA256 else source,
            "sha256": sha256.hexdigest(), "tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size,
            "dtype": tokenizer.dtype.str, "origin": origin,
            "end_of_text": tokenizer.end_of_text, "documents": n_documents, "train_tokens": n_train,
            "val_tokens": n_val, "val": "documents drawn by hash" if by_hash else "last tenth"}
    if tokenizer.json:
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


@contextlib.contextmanager
def locked(out):
    """Let only one preparation of `out` run at a time. Yield whether this one had to wait for another."""
    path = out.with_name(out.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()  # else a place that cannot be written to would count as another's lock
    lock, waits = FileLock(path), False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waits = True
        print(f"waiting for another preparation of {out}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield waits
    finally:
        with contextlib.suppress(OSError):  # Windows deletes no open file
            path.unlink()  # who has waited for it sees that it is gone, and makes a new one
        lock.release()


def refuse_loss(out, source, tokenizer, origin):
    """Exit if `out` holds tokens that those of `source` may not replace: other ones, unless they are quickly made."""
    try:
        old = json.loads((out / "meta.json").read_text())
        before = old["source"], old["tokenizer"]
        same = before == (source, tokenizer) and old.get("origin", origin) == origin
    except (OSError, ValueError, KeyError, TypeError):  # no usable tokens are there to lose
        return
    held = f"error: --out {out}: holds {before[0]} ({before[1]} tokens)"
    if source == "python_topics" != before[0] or tokenizer == "gpt2-bytes" != before[1]:
        sys.exit(f"{held}, which no fallback may replace; run again with a network, or give another --out")
    quick = before[1] == "gpt2-bytes" or before[0] in DEFAULTS and before[1] in vocabulary.OUR_NAMES
    if not same and not quick:
        other = " of another origin" if before == (source, tokenizer) else ""
        sys.exit(f"{held}{other}, which would be lost; delete it, or give another --out")


def clean_up(partial, out):
    """Delete `partial`. If the run ended between the two renames, the old tokens are in it: put them back first."""
    if (partial / "old").exists() and not out.exists():
        (partial / "old").rename(out)
    shutil.rmtree(partial, ignore_errors=True)


def prepare(text, out, hf=None, field="text", encoding="UTF-8", tokenizer="gpt2", vocab_size=None):
    """Write the tokens of `text` (a file or folder), of the dataset `hf` (name, config, split) or of the default text
    to the folder `out`; on failure leave it as it was. A `vocab_size` trains a tokenizer. Return the metadata."""
    partial = out.with_name(out.name + ".partial")
    ours = {out: ("train.bin", "val.bin", "meta.json", "tokenizer.json"), partial: ("new", "old", "default.txt")}
    for other in (file for folder in ours if folder.exists() for file in folder.iterdir()):
        if other.name not in ours[other.parent]:
            sys.exit(f"error: --out {out}: {other} would be lost; choose another --out")
    with locked(out) as waited:
        defaults = not text and not hf and tokenizer == "gpt2" and not vocab_size
        if waited and defaults and (out / "meta.json").exists():  # two scripts or two ranks found no data
            return json.loads((out / "meta.json").read_text())
        clean_up(partial, out)  # what a killed run left
        try:
            (partial / "new").mkdir(parents=True)
            if hf:
                sources, name = [hf], "/".join(filter(None, hf[:2]))
            elif text:
                sources, name = files_in(text), text.resolve().name
            else:
                sources, (default, name) = [partial / "default.txt"], default_text()
                sources[0].write_text(default, encoding="utf-8", newline="")
            if vocab_size:
                tokenizer = train_tokenizer(vocab_size, sources, field, encoding)
            else:
                tokenizer = load_tokenizer(tokenizer)
            place = hf and (str(Path(hf[0]).resolve()) if Path(hf[0]).exists() else hf[0], *hf[1:])
            described = repr((place, text and str(text.resolve()), field, codecs.lookup(encoding).name, tokenizer.json))
            origin = hashlib.sha256(described.encode(errors="replace")).hexdigest()[:16]  # a path is private
            refuse_loss(out, name, tokenizer.name, origin)
            pieces = chain.from_iterable(read(source, field, encoding) for source in sources)
            meta = write_tokens(pieces, name, tokenizer, partial / "new", origin)
            if out.exists():
                out.rename(partial / "old")
            (partial / "new").rename(out)
        finally:
            clean_up(partial, out)
    return meta


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--text", help="a .txt, .jsonl or .parquet file, or a folder of them")
    group.add_argument("--hf", metavar="DATASET", help="a Hugging Face dataset: its name, or a local folder")
    parser.add_argument("--name", help="a configuration of the dataset, if it has several")
    parser.add_argument("--split", help="a split of the dataset (default: train)")
    parser.add_argument("--field", help="the field of .jsonl, .parquet or dataset that is the text (default: text)")
    parser.add_argument("--encoding", help="how .txt and .jsonl files are encoded (default: UTF-8)")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--tokenizer", default="gpt2", metavar="gpt2|bytes|FILE|FOLDER|NAME",
                        help="GPT-2's (default), single bytes, that of a model's file or of a folder of tokens, or one "
                             "from Hugging Face")
    tokens.add_argument("--train-tokenizer", type=int, metavar="SIZE", help="train one of so many tokens on the text")
    parser.add_argument("--out", type=Path, default=Path("data/tokens"), help="a folder (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.train_tokenizer is not None and not 257 <= args.train_tokenizer <= 1 << 16:
        sys.exit(f"error: --train-tokenizer {args.train_tokenizer}: out of range; give 257 (single bytes and the end of"
                 " a text) to 65536")
    if args.text == "":  # as of a variable that is not set; Path("") would be the current folder
        sys.exit("error: --text: is empty; give a file or a folder")
    if not args.hf and (args.name or args.split or args.field and not args.text):
        sys.exit("error: --name, --split, --field: are for a dataset; give --hf too (or --text, for --field)")
    if args.encoding and not args.text:
        sys.exit("error: --encoding: says how text files are encoded; give --text too")
    try:
        codecs.lookup(args.encoding or "UTF-8")
    except LookupError:
        sys.exit(f"error: --encoding {args.encoding}: unknown; give one that Python knows, for example utf-16")
    files = Path(args.hf).rglob("*") if args.hf else ()  # none of a dataset on the hub
    if len(kinds := sorted({file.suffix.lower() for file in files}.intersection(SUFFIXES))) > 1:
        warn(f"--hf {args.hf}: of its {', '.join(kinds)} files `datasets` reads one kind only; --text reads all")
    try:
        hf = (args.hf, args.name, args.split or "train") if args.hf else None
        meta = prepare(Path(args.text) if args.text else None, args.out.resolve(), hf, args.field or "text",
                       args.encoding or "UTF-8", args.tokenizer, args.train_tokenizer)
    except (ValueError, KeyboardInterrupt) as error:
        sys.exit(f"error: --out {args.out}: not written ({str(error) or 'stopped'}); run the same command again")
    except OSError as error:  # no permission, a file in the way, a full disk
        sys.exit(f"error: --out {args.out}: not written ({error}); make room, or give another --out")
    print(f"{args.out}: {meta['source']} ({meta['tokenizer']} tokens), {meta['documents']:,} documents, "
          f"{meta['train_tokens']:,} train + {meta['val_tokens']:,} val tokens")


if __name__ == "__main__":
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's stdout lacks it
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of a file's name
    logging.disable(logging.WARNING)  # transformers imports torchao if installed, which warns of what it lacks
    main()
