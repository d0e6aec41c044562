"""Turn text into the token files that the training scripts read.

    python data/prepare.py                                   # Tiny Shakespeare -> data/tokens/
    python data/prepare.py --text my.txt --out data/mine     # a text
    python data/prepare.py --text corpus --out data/mine     # .txt, .jsonl and .parquet files
    python data/prepare.py --text train.jsonl --val val.jsonl --out data/mine   # your own split
    python data/prepare.py --hf HuggingFaceFW/fineweb-edu --name sample-10BT --out data/edu
    python data/prepare.py --text my.txt --tokenizer bytes --out data/mine       # single bytes
    python data/prepare.py --text my.txt --train-tokenizer 4096 --out data/mine  # tokens that fit

Each line of a .jsonl file is a document, and so is each row of a .parquet file or of a dataset. A
.txt file is one document, or several with <|endoftext|> between them. Memory grows by only a few
bytes per document. Without --val, a hash of each document decides which ones are held out for
validation. If there are few documents, the end of the text is held out. If there is no network, the
default text is Python's language reference, in GPT-2's 256 byte tokens.
"""
import argparse
import codecs
import contextlib
import hashlib
import http.client
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import urllib.request
from array import array
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from filelock import FileLock, Timeout
from tqdm import tqdm

try:
    from data import texts, vocabulary
except ImportError:  # started as data/prepare.py
    import texts
    import vocabulary

TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
DEFAULTS = ("tiny_shakespeare", "python_topics")  # texts whose tokens are quickly made again
TOKEN_FILES = ("train.bin", "val.bin", "meta.json", "tokenizer.json")
META_KEYS = (
    "source", "sha256", "tokenizer", "vocab_size", "dtype", "end_of_text", "documents",
    "train_tokens", "val_tokens", "val",
)
BLOCK_TOKENS = 1 << 20  # that are moved to val.bin at once
TRAINING_BYTES = 10_000_000  # a tokenizer's training takes up to 100 times as much memory
MANY_DOCUMENTS = 100
MAX_VAL_TOKENS = 10_000_000


# ---- the default text ----------------------------------------------------------------------------

def fallback_text():
    """Python's language reference, which is installed with it: 0.5 MB of English."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def default_text(url=TINY_SHAKESPEARE_URL, seconds=60):
    """(text, its name): Tiny Shakespeare, or without a network Python's language reference."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as response:
            text = response.read()
        if hashlib.sha256(text).hexdigest() != TINY_SHAKESPEARE_SHA256:
            raise ValueError("its SHA-256 is wrong")
        return text.decode("utf-8"), "tiny_shakespeare"
    except (OSError, http.client.HTTPException, ValueError) as error:
        texts.warn(f"could not download Tiny Shakespeare ({error!r}). Using Python's language"
                   " reference: losses are NOT comparable. To get Tiny Shakespeare, run"
                   " `python data/prepare.py` again with a network.")
        return fallback_text(), "python_topics"


# ---- tokenizers ----------------------------------------------------------------------------------

def load_tokenizer(name):
    """The tokenizer that --tokenizer names; raises NoTokenizer if GPT-2's cannot be had."""
    if name == "bytes":
        return vocabulary.of_bytes()
    if name == "gpt2":
        return vocabulary.GPT2()
    path = name
    if os.path.basename(name) == "tokenizer.json":
        path = os.path.dirname(name) or "."
    texts.refuse_lfs_pointer(Path(path, "tokenizer.json"))
    try:
        if Path(path).is_file() or Path(path, "meta.json").exists():
            tokenizer = vocabulary.of_ours(Path(path))
            if isinstance(tokenizer, vocabulary.OwnIds):
                raise vocabulary.NoTokenizer("has token ids, and no tokenizer")
            return tokenizer
        return vocabulary.from_hugging_face(path)
    except vocabulary.NoTokenizer as error:
        sys.exit(f"error: --tokenizer {name}: {error};"
                 " give gpt2, bytes, a model's file, or a folder that has one")


def text_size(source, field):
    """About how many bytes of text a source has; of a dataset the most that is used."""
    if not isinstance(source, Path):
        return TRAINING_BYTES
    if source.suffix.lower() != ".parquet":
        return source.stat().st_size
    metadata = texts.open_parquet(source, field).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return sum(group.total_byte_size for group in groups)  # not compressed


def load_tokenizer_or_bytes(name, is_default):
    """The tokenizer that --tokenizer names; for the default text GPT-2's single bytes if need be.
    """
    try:
        return load_tokenizer(name)
    except vocabulary.NoTokenizer as error:
        if not is_default:
            sys.exit(f"error: --tokenizer {name}: {error}; or give --tokenizer bytes")
        texts.warn(f"{error}. Using GPT-2's single-byte tokens: losses are NOT comparable with"
                   " those of gpt2 tokens.")
        return vocabulary.of_bytes("gpt2-bytes")


def train_tokenizer(vocab_size, sources, field, encoding):
    """A tokenizer trained on at most TRAINING_BYTES of the text.

    Of files it takes the same share of each, from its beginning.
    """
    sizes = [text_size(source, field) for source in sources]
    total = max(sum(sizes), TRAINING_BYTES)
    parts = []
    for source, size in zip(sources, sizes, strict=True):
        left = TRAINING_BYTES * size // total
        for _, piece in texts.read(source, field, encoding):
            part = piece.encode("utf-8")[:left]
            parts.append(part)
            left -= len(part)
            if left == 0:
                break
    # the last character of a part may be cut
    beginnings = [part.decode("utf-8", errors="ignore") for part in parts]
    tokenizer = vocabulary.trained(beginnings, vocab_size)
    megabytes = sum(len(part) for part in parts) / 1e6
    print(f"{tokenizer.name}: a tokenizer trained on {megabytes:,.1f} MB of the text", flush=True)
    return tokenizer


def encode(pieces, tokenizer):
    """Yield (does a document begin here?, piece, its token ids, what they change), in order.

    Tokenizers release the GIL, so threads use all cores.
    """
    byte_lengths = tokenizer.byte_lengths()

    def encode_chunk(chunk):
        encoded = []
        for begins, text in chunk:
            tokens = tokenizer.encode(text)
            change = vocabulary.find_change(tokenizer, text, tokens, byte_lengths)
            encoded.append((begins, text, tokens, change))
        return encoded

    n_threads = os.cpu_count()
    jobs = deque()
    with ThreadPoolExecutor(n_threads) as pool:
        for chunk in iter(lambda: list(islice(pieces, 32)), []):
            jobs.append(pool.submit(encode_chunk, chunk))
            if len(jobs) > 2 * n_threads:  # so many chunks are in memory
                yield from jobs.popleft().result()
        while jobs:
            yield from jobs.popleft().result()


# ---- writing -------------------------------------------------------------------------------------

def is_drawn(number, one_in):
    """Whether this document, counted from 0, is validation data, as `one_in` is on average.

    The first stays in train.bin, which therefore does not begin with a separator.
    """
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return number > 0 and int(digest, 16) % one_in == 0


def read_drawn(file, tokenizer, one_in, firsts):
    """Yield the tokens of an open file in blocks, (n,), each with a mask of the drawn documents.

    A document that occurs again goes where the first of its kind, `firsts`, goes.
    """
    number = 0
    n_bytes = BLOCK_TOKENS * tokenizer.dtype.itemsize
    for block in iter(lambda: file.read(n_bytes), b""):
        tokens = np.frombuffer(block, dtype=tokenizer.dtype)
        # a separator belongs to the document that it begins
        numbers = number + np.cumsum(tokens == tokenizer.end_of_text)
        begin = numbers[0]
        number = numbers[-1]
        drawn = [is_drawn(first, one_in) for first in firsts[begin : number + 1]]
        yield tokens, np.array(drawn)[numbers - begin]


def count_drawn(folder, tokenizer, one_in, firsts):
    """How many tokens of train.bin are in drawn documents."""
    with open(folder / "train.bin", "rb") as file:
        return sum(int(drawn.sum()) for _, drawn in read_drawn(file, tokenizer, one_in, firsts))


def move_drawn(folder, tokenizer, one_in, firsts):
    """Move the drawn documents from train.bin to val.bin; both keep the documents' order."""
    path = folder / "train.bin"
    begins = True
    # train.bin is overwritten from its beginning, never beyond what has been read
    with open(path, "rb") as old, open(path, "r+b") as train, open(folder / "val.bin", "wb") as val:
        for tokens, drawn in read_drawn(old, tokenizer, one_in, firsts):
            moved = tokens[drawn]
            if begins and len(moved) > 0:  # no separator before the first document
                moved = moved[1:]
                begins = False
            val.write(moved)
            train.write(tokens[~drawn])
        train.truncate()


def move_end(folder, n_bytes):
    """Move the last bytes of train.bin to val.bin."""
    with open(folder / "train.bin", "r+b") as train, open(folder / "val.bin", "wb") as val:
        start = train.seek(-n_bytes, os.SEEK_END)
        shutil.copyfileobj(train, val)
        train.truncate(start)


def hold_out(folder, n_tokens, tokenizer, firsts):
    """Move a tenth of train.bin, but at most about 10M tokens, to val.bin; return how, in words."""
    one_in = max(10, math.ceil(n_tokens / MAX_VAL_TOKENS))
    wanted = math.ceil(n_tokens / one_in)
    if len(firsts) >= MANY_DOCUMENTS:
        n_drawn = count_drawn(folder, tokenizer, one_in, firsts)
        if wanted / 2 <= n_drawn <= wanted * 2:  # else a few documents hold most of the text
            move_drawn(folder, tokenizer, one_in, firsts)
            return "documents drawn by hash"
    move_end(folder, wanted * tokenizer.dtype.itemsize)
    return "last tenth" if one_in == 10 else f"last {wanted:,} tokens"


class Found:
    """What the texts hold: for meta.json, and for the warnings."""

    def __init__(self):
        self.sha256 = hashlib.sha256()
        self.documents = array("Q")  # a hash of each
        self.special = Counter()
        self.carriage_returns = 0

    def firsts(self):
        """The number of the first document that is the same, of each, (n_documents,)."""
        hashes = np.frombuffer(self.documents, dtype=np.uint64)
        _, first, kinds = np.unique(hashes, return_index=True, return_inverse=True)
        return first[kinds]

    def warn(self, source):
        if self.special:
            names = " ".join(sorted(self.special)[:5])
            texts.warn(f"{source}: special tokens in the text: {self.special.total():,} ({names});"
                       " they are encoded as ordinary text")
        if self.carriage_returns:
            texts.warn(f"{source}: carriage returns in the text: {self.carriage_returns:,}; each"
                       " costs a token, and a prompt's \\n is new to the model; dos2unix (where \\r"
                       " stands alone, mac2unix) replaces them")
        firsts = self.firsts()
        n_again = int((firsts != np.arange(len(firsts))).sum())
        if n_again:
            texts.warn(f"{source}: {n_again:,} of {len(firsts):,} documents are copies of earlier"
                       " ones; where val.bin has copies of train.bin's, its loss is too low")


def write_documents(pieces, source, tokenizer, path, found):
    """Write the tokens of the pieces to a file, and note in `found` what they hold."""
    separator = tokenizer.end_of_text.to_bytes(tokenizer.dtype.itemsize, "little")
    special = vocabulary.pattern_of(tokenizer.special_tokens)
    n_documents = 0
    n_characters = 0  # of this document
    blank = True
    digest = hashlib.blake2b(digest_size=8)  # of this document
    encoded = tqdm(encode(pieces, tokenizer), "encoding", unit=" pieces", disable=None)
    with open(path, "wb") as file:
        for begins, text, tokens, change in encoded:
            if begins:
                if n_documents > 0:
                    file.write(separator)
                    found.sha256.update(vocabulary.SEPARATOR.encode())
                    found.documents.append(int.from_bytes(digest.digest(), "little"))
                n_documents += 1
                n_characters = 0
                digest = hashlib.blake2b(digest_size=8)
            if change:
                place, words = change
                sys.exit(f"error: {source}: document {n_documents}, character"
                         f" {n_characters + place:,}: {words}; give a --tokenizer that keeps any"
                         " text, as byte-level ones do, or change the text")
            n_characters += len(text)
            file.write(tokens)
            data = text.encode("utf-8")
            found.sha256.update(data)
            digest.update(data)
            found.special.update(special.findall(text))
            found.carriage_returns += text.count("\r")
            blank = blank and text.isspace()
    if n_documents > 0:
        if blank:
            sys.exit(f"error: {source}: its text for {path.name} is all blanks; check the file")
        found.documents.append(int.from_bytes(digest.digest(), "little"))


def write_tokens(pieces, val_pieces, source, tokenizer, folder):
    """Write the token files of a text; return their metadata. Without `val_pieces`, hold some out.
    """
    width = tokenizer.dtype.itemsize
    found = Found()
    parts = {"train": pieces}
    if val_pieces is not None:
        parts["val"] = val_pieces
    for split, part in parts.items():
        path = folder / f"{split}.bin"
        write_documents(part, source, tokenizer, path, found)
        n_tokens = path.stat().st_size // width
        if n_tokens < 11:  # a tenth of it would be a single one, which nothing predicts
            sys.exit(f"error: {source}: {n_tokens} tokens for {split}.bin are too few;"
                     " give more text (.txt, .jsonl or .parquet)")
    found.warn(source)
    val = "a text of its own"
    if val_pieces is None:
        val = hold_out(folder, n_tokens, tokenizer, found.firsts())
    sha256 = found.sha256.hexdigest()
    meta = {
        "source": "tiny_shakespeare" if sha256 == TINY_SHAKESPEARE_SHA256 else source,
        "sha256": sha256,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "dtype": tokenizer.dtype.str,
        "end_of_text": tokenizer.end_of_text,
        "documents": len(found.documents),
        "train_tokens": (folder / "train.bin").stat().st_size // width,
        "val_tokens": (folder / "val.bin").stat().st_size // width,
        "val": val,
    }
    if tokenizer.json is not None:
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    return meta


# ---- the folder ----------------------------------------------------------------------------------

def refuse_loss(out):
    """Exit if the folder `out` holds anything but the tokens of a default text.

    Returns the metadata of those, or None if there are none.
    """
    if not out.exists():
        return None
    names = os.listdir(out)
    if not names:
        return None
    others = sorted(set(names) - set(TOKEN_FILES))
    if others:
        sys.exit(f"error: --out {out}: holds {others[0]}, which prepare.py did not make;"
                 " choose another --out")
    try:
        meta = json.loads((out / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        meta = {}
    if not set(META_KEYS).issubset(meta):
        sys.exit(f"error: --out {out}: prepare.py did not make its files"
                 " (meta.json is missing or incomplete); choose another --out")
    if meta["source"] not in DEFAULTS:
        sys.exit(f"error: --out {out}: holds {meta['source']} ({meta['tokenizer']} tokens), which"
                 " would be lost; delete that folder, or choose another --out")
    return meta


def is_whole(out, meta):
    """Whether the token files in `out` are as long as their metadata says."""
    width = np.dtype(meta["dtype"]).itemsize
    for split in ("train", "val"):
        path = out / f"{split}.bin"
        if not path.exists() or path.stat().st_size != width * meta[f"{split}_tokens"]:
            return False
    return True


@contextlib.contextmanager
def locked(out):
    """Let only one preparation of `out` run at a time; yield whether this one had to wait."""
    path = out.with_name(out.name + ".prepare.lock")
    # FileLock would wait forever where no file can be made; its own must not be there yet
    tempfile.TemporaryFile(dir=path.parent).close()
    lock = FileLock(path)
    waited = False
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting for another preparation of {out}; if there is none, delete {path}",
              file=sys.stderr, flush=True)
        lock.acquire()
        waited = True
    except (OSError, NotImplementedError) as error:  # network drives
        texts.warn(f"{out}: cannot be locked ({error}): do not prepare it twice at a time")
    try:
        yield waited
    finally:
        with contextlib.suppress(OSError):  # on Windows `release` deletes it
            path.unlink()
        lock.release()


def make_place(out, partial):
    """Make an empty folder `partial`; fail if it could not be renamed to `out` once it is full."""
    if partial.exists():  # what a killed run left
        others = sorted(set(os.listdir(partial)) - {*TOKEN_FILES, "old"})
        if others:
            sys.exit(f"error: --out {out}: {partial / others[0]} would be lost;"
                     " choose another --out")
        shutil.rmtree(partial)
    partial.mkdir()
    if out.exists():  # a mount point, for one, cannot be replaced: find out now
        out.rename(partial / "old")
        (partial / "old").rename(out)


def replace(out, partial):
    """Rename `partial` to `out`, where at most token files are."""
    if out.exists():
        for name in TOKEN_FILES:
            (out / name).unlink(missing_ok=True)
        out.rmdir()
    partial.rename(out)


def prepare(text, out, dataset=None, field="text", encoding="utf-8", tokenizer="gpt2",
            vocab_size=None, val=None):
    """Write the tokens of a text to the folder `out`; return their metadata.

    The text is `text` (a file or a folder), a Dataset, or the default text. A `vocab_size` trains a
    tokenizer on it. `val` is the validation text: a file or folder, or a split of the dataset.
    Exits with one line if that is not possible, and then leaves `out` as it was.
    """
    codec, colon, errors = encoding.partition(":")
    if codecs.lookup(codec).name == "utf-8":
        encoding = f"utf-8-sig{colon}{errors}"  # a byte-order mark is not text
    is_default = not text and not dataset
    val_sources = []
    if dataset:
        sources = [dataset]
        if val:
            val_sources = [dataset._replace(split=val)]
        name = f"{dataset.path}/{dataset.config}" if dataset.config else dataset.path
    elif text:
        sources = texts.sources_of(text, field, encoding)
        if val:
            val_sources = texts.sources_of(Path(val), field, encoding)
        name = text.resolve().name
    if not is_default and name in DEFAULTS:
        name = f"{name} (not the default text)"  # or the next text would replace it
    partial = out.with_name(out.name + ".partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(out) as waited:
        held = refuse_loss(out)
        if held and is_default and vocab_size is None:
            if waited and tokenizer == "gpt2":  # two scripts, or two ranks, found no data
                return held
            same = (held["source"], held["tokenizer"]) == ("tiny_shakespeare", tokenizer)
            if same and is_whole(out, held):
                return held
        make_place(out, partial)
        try:
            if is_default:
                default, name = default_text()
                sources = [default]
            if vocab_size:
                loaded = train_tokenizer(vocab_size, sources, field, encoding)
            else:
                loaded = load_tokenizer_or_bytes(tokenizer, is_default)
            pieces = texts.read_all(sources, field, encoding)
            val_pieces = texts.read_all(val_sources, field, encoding) if val else None
            meta = write_tokens(pieces, val_pieces, name, loaded, partial)
            replace(out, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return meta


# ---- the command line ----------------------------------------------------------------------------

def parse_args(argv=None):
    """The command line's flags; exits with one line when they do not go together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--text", help="a .txt, .jsonl or .parquet file, or a folder of them")
    text.add_argument("--hf", metavar="DATASET",
                      help="a Hugging Face dataset: its name, or a local folder")
    flag = parser.add_argument
    flag("--name", help="configuration of the dataset, if it has several")
    flag("--split", help="split of the dataset (default: train)")
    flag("--field", help="field of .jsonl, .parquet or dataset that contains the text"
                         " (default: text)")
    flag("--val", metavar="FILE|FOLDER|SPLIT",
         help="validation text: a file, a folder, or a split of the dataset (default: hold out a"
              " tenth of the text)")
    flag("--encoding", help="encoding of .txt and .jsonl files (default: UTF-8; utf-8:replace"
                            " replaces invalid bytes)")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--tokenizer", default="gpt2", metavar="gpt2|bytes|FILE|FOLDER|NAME",
                        help="GPT-2's tokenizer (default), single bytes, or the tokenizer of a"
                             " model's file, a token folder or a Hugging Face name or folder")
    tokens.add_argument("--train-tokenizer", type=int, metavar="SIZE",
                        help="train a tokenizer of SIZE tokens on the text")
    flag("--out", default="data/tokens", help="folder to write (default: %(default)s)")
    args = parser.parse_args(argv)

    for name, value in vars(args).items():
        if value == "":  # as of a variable that is not set
            sys.exit(f"error: --{name}: is empty; give a value, or leave the flag out")
    size = args.train_tokenizer
    if size is not None and not 257 <= size <= 65536:
        sys.exit(f"error: --train-tokenizer {size}: out of range; give 257 (single bytes and the"
                 " end of a text) to 65536")
    if (args.name or args.split) and not args.hf:
        sys.exit("error: --name, --split: are for a dataset; give --hf too")
    if args.field and not args.hf and not args.text:
        sys.exit("error: --field: names a field of records; give --text or --hf too")
    if args.val and not args.hf and not args.text:
        sys.exit("error: --val: goes with a text of yours; give --text or --hf too")
    if args.encoding and not args.text:
        sys.exit("error: --encoding: says how text files are encoded; give --text too")
    codec, _, errors = (args.encoding or "utf-8").partition(":")
    try:
        "".encode(codec)
        codecs.lookup_error(errors or "strict")
    except LookupError:
        sys.exit(f"error: --encoding {args.encoding}: unknown;"
                 " give one that Python knows, for example utf-16")
    return args


def main(argv=None):
    args = parse_args(argv)
    dataset = None
    if args.hf:
        dataset = texts.Dataset(args.hf, args.name, args.split or "train")
        suffixes = {path.suffix.lower() for path in Path(args.hf).rglob("*")}  # of a local folder
        kinds = sorted(suffixes.intersection(texts.SUFFIXES))
        if len(kinds) > 1:
            texts.warn(f"--hf {args.hf}: of its {', '.join(kinds)} files `datasets` reads one kind"
                       " only; --text reads all")
    try:
        meta = prepare(
            text=Path(args.text) if args.text else None,
            out=Path(args.out).resolve(),
            dataset=dataset,
            field=args.field or "text",
            encoding=args.encoding or "utf-8",
            tokenizer=args.tokenizer,
            vocab_size=args.train_tokenizer,
            val=args.val,
        )
    except KeyboardInterrupt:
        sys.exit(f"error: --out {args.out}: not written (stopped); run the same command again")
    except OSError as error:  # no permission, a file in the way, a mount point, a full disk
        sys.exit(f"error: --out {args.out}: not written ({error}); make room, or choose another")
    print(f"{Path(args.out).resolve()}: {meta['source']} ({meta['tokenizer']} tokens),"
          f" {meta['documents']:,} documents,"
          f" {meta['train_tokens']:,} train + {meta['val_tokens']:,} val tokens")


if __name__ == "__main__":
    # transformers imports torchao if it is installed, which warns of what it lacks
    logging.disable(logging.WARNING)
    sys.stdout.reconfigure(errors="replace")  # for names that its encoding lacks
    main()
