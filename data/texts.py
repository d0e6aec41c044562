"""Read text: files and Hugging Face datasets become documents, and these become short pieces.

A .txt file is one document, or several with <|endoftext|> between them. Each line of a .jsonl file
is a document, and so is each row of a .parquet file or of a dataset. Any other file is read as JSON
lines if its first line is a JSON object, and otherwise as plain text. Memory does not grow with the
text.
"""
import codecs
import contextlib
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

try:
    from data import vocabulary
except ImportError:  # started as data/prepare.py
    import vocabulary

SUFFIXES = (".txt", ".jsonl", ".parquet")
SEPARATOR = vocabulary.SEPARATOR
PIECE_CHARACTERS = 16384  # far below the million blanks in a row that make tiktoken panic
# No token spans a letter or digit and the blank after it; of GPT-2's tokens,
# none spans any non-blank and the blank after it.
LAST_CUT = re.compile(r".*[^\W_](?=[ \t\r\n])|.*\S(?=[ \t\r\n])", re.DOTALL)
MAGIC = {  # how files begin that are not text
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"%PDF": "PDF",
    b"PAR1": "parquet",
    b"{\\rtf": "RTF",
}
NOT_PLAIN = {  # and how to make text of it
    ".json": "write one {\"text\": ...} a line to a .jsonl file, as jq -c '.[]' does of a list",
    ".csv": "write it as .jsonl, as pandas' to_json(path, orient='records', lines=True) does",
    ".tsv": "write it as .jsonl, as pandas' to_json(path, orient='records', lines=True) does",
    ".html": "take its text out, as pandoc -t plain does",
    ".htm": "take its text out, as pandoc -t plain does",
}
HELD_OUT = re.compile(r"(^|[._-])(val|valid|validation|dev|test|eval)([._-]|$)", re.IGNORECASE)


class Dataset(NamedTuple):
    """A Hugging Face dataset: its name on the hub or its folder, a configuration, a split."""
    path: str
    config: str | None = None
    split: str = "train"


def warn(message):
    with contextlib.suppress(OSError):  # its reader has gone: `2>&1 | head`
        print(f"WARNING: {message}", file=sys.stderr, flush=True)


def files_in(folder):
    """The text files in a folder, in name order; one line says what is left out."""
    files = []
    left_out = Counter()
    for path in sorted(folder.rglob("*")):
        suffix = path.suffix.lower()
        if path.is_dir() and not path.is_symlink():
            continue
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            left_out["hidden"] += 1
        elif path.is_dir():
            left_out["linked folder"] += 1
        elif suffix not in SUFFIXES:
            left_out[suffix or "without suffix"] += 1
        elif not path.is_file():
            sys.exit(f"error: {path}: not a file, or a link to nothing; restore or delete it")
        else:
            files.append(path)
    if left_out:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(left_out.items()))
        warn(f"{folder}: files left out: {left_out.total()} ({counts});"
             " only .txt, .jsonl and .parquet are read")
    names = [str(path.relative_to(folder)) for path in files]
    held_out = [name for name in names if is_held_out(Path(name))]
    if 0 < len(held_out) < len(files):
        warn(f"{folder}: its {', '.join(held_out[:3])} are named like held-out data, and become"
             " training data, too; give the parts one by one, as --text and --val")
    return files


def is_held_out(path):
    """Whether the name of a file, or of a folder above it, is that of a validation or test set."""
    return any(HELD_OUT.search(part) for part in path.with_suffix("").parts)


def sources_of(text, field, encoding):
    """The files that --text names, each of them looked at; exits if one cannot be used."""
    if text.is_dir():
        files = files_in(text)
    elif text.is_file():
        files = [text]
    elif text.exists():  # a pipe would be empty at the second reading
        sys.exit(f"error: {text}: not a file; save the text to a file first")
    else:
        sys.exit(f"error: {text}: no such file or folder; check the path")
    for path in files:
        refuse_lfs_pointer(path)
        if path.suffix.lower() == ".parquet":
            open_parquet(path, field)
        else:
            check_is_text(path, encoding)
            check_format(path, encoding)
    return files


def refuse_lfs_pointer(path):
    """Exit if a file is what git leaves in place of a large one."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            sys.exit(f"error: {path}: only a pointer to the file; run `git lfs pull` in its folder")


def check_is_text(path, encoding):
    """Exit if a file begins as one of another kind, or holds zero bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
    except OSError as error:
        sys.exit(f"error: {path}: cannot be read ({error.strerror}); check the file")
    for magic, kind in MAGIC.items():
        if start.startswith(magic):
            sys.exit(f"error: {path}: {kind} data, not text; unpack or convert it first")
    name, _, _ = encoding.partition(":")
    if "\0" in start.decode(name, errors="ignore"):
        sys.exit(f"error: {path}: has zero bytes, as UTF-16 or a binary file; give its --encoding,"
                 " for example utf-16, or convert it")
    if name != "utf-8-sig" and is_mostly_utf8(path):
        warn(f"{path}: its bytes are UTF-8, which --encoding {encoding} garbles; leave that out")


def check_format(path, encoding):
    """Say how a file is read whose name leaves that open; exit if it is neither lines nor plain."""
    suffix = path.suffix.lower()
    is_lines = suffix != ".jsonl" and is_jsonl(path, encoding)
    if suffix == ".txt" and is_lines:
        warn(f"{path}: read as plain text, braces and all; if its lines are documents, name it"
             " .jsonl")
    elif suffix not in SUFFIXES and not is_lines:
        if suffix in NOT_PLAIN:
            sys.exit(f"error: {path}: not plain text; {NOT_PLAIN[suffix]}, or name it .txt to train"
                     " on it as it is")
        warn(f"{path}: read as plain text")


def is_jsonl(path, encoding):
    """Whether a file is JSON lines, judged by its first line."""
    if path.suffix.lower() == ".jsonl":
        return True
    with open_text(path, encoding) as file:
        line = file.readline(PIECE_CHARACTERS * 100)
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def is_mostly_utf8(path):
    """Whether far more characters of a file are UTF-8 of several bytes than are no UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    n_bad = 0
    n_wide = 0  # the bad ones, too
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            text = decoder.decode(block)
            n_bad += text.count("\ufffd")
            n_wide += len(text) - len(text.encode("ascii", errors="ignore"))
    return n_wide > 10 * n_bad


@contextlib.contextmanager
def open_text(path, encoding):
    """Open a text file; exits with the place of the first byte that is not in its encoding.

    Of an encoding such as "utf-8:replace" bytes that are not in it become U+FFFD.
    """
    name, _, errors = encoding.partition(":")
    # "\n": nothing is translated
    with open(path, encoding=name, errors=errors or "strict", newline="\n") as file:
        try:
            yield file
        except UnicodeError as error:
            place = ""
            if isinstance(error, UnicodeDecodeError):
                # error.object: the bytes that were read last
                position = file.buffer.tell() - len(error.object) + error.start
                place = f" (byte 0x{error.object[error.start]:02x} at position {position:,})"
            cure = "give its --encoding, for example cp1252 or utf-16"
            if name == "utf-8-sig" and is_mostly_utf8(path):
                cure = "replace such bytes (the rest is UTF-8) with --encoding utf-8:replace"
            sys.exit(f"error: {path}: not {name.removesuffix('-sig').upper()}{place}; {cure}")


def read_jsonl(path, field, encoding):
    """Yield the texts of a .jsonl file."""
    # `datasets` would fail where a line has a key that the first 10 MB lack
    with open_text(path, encoding) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                sys.exit(f"error: {path}: line {number} is not JSON ({error.msg});"
                         " write each document as one line (jq -c .)")
            yield text_of(record, field, f"{path}: line {number}")


def open_parquet(path, field):
    """A .parquet file; exits if it is damaged or lacks the field."""
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        why = vocabulary.reason(error)
        sys.exit(f"error: {path}: not a .parquet file, or a damaged one ({why}); check the file")
    if field not in file.schema_arrow.names:
        columns = [column.name for column in file.schema_arrow
                   if column.type in ("string", "large_string")]  # pandas writes the second
        refuse_field(path, field, columns)
    return file


def read_parquet(path, field):
    """Yield the texts of a .parquet file."""
    # `datasets` would decode whole row groups: often all of a file at once
    file = open_parquet(path, field)
    number = 0
    try:
        for batch in file.iter_batches(batch_size=8, columns=[field]):
            for record in batch.to_pylist():
                number += 1
                yield text_of(record, field, f"{path}: row {number}")
    except (OSError, ValueError) as error:
        why = vocabulary.reason(error)
        sys.exit(f"error: {path}: damaged after row {number} ({why}); check the file")


def read_dataset(dataset, field):
    """Yield the texts of a Hugging Face dataset, without storing it."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our line says it
    place = f"--hf {dataset.path}"
    number = 0
    try:
        if (Path(dataset.path) / "state.json").exists():  # a split that save_to_disk wrote
            stream = datasets.load_from_disk(dataset.path)
        else:
            stream = datasets.load_dataset(
                dataset.path, dataset.config, split=dataset.split, streaming=True)
        if stream.info.builder_name == "text":
            sys.exit(f"error: {place}: each line of its .txt files would be a document;"
                     " give it as --text")
        for table in stream.with_format("arrow").iter(batch_size=64):
            for record in table.to_pylist():
                number += 1
                yield text_of(record, field, f"{place}: document {number}")
    except (OSError, ValueError, LookupError, RuntimeError, EOFError, TypeError) as error:
        # no such name, configuration or split; no network; a data set that is a program; a
        # truncated file; rows whose types differ
        why = " ".join(str(error).split())
        sys.exit(f"error: {place}: document {number + 1} cannot be read"
                 f" ({type(error).__name__}: {why:.300}); check the flags and the network,"
                 " or give its files as --text")


def text_of(record, field, place):
    """The text in a field of a record, "" where it is null; exits if there is none."""
    if not isinstance(record, dict):
        record = {}
    if field in record and record[field] is None:
        return ""
    texts = [key for key, value in record.items() if isinstance(value, str)]
    if field not in texts:
        refuse_field(place, field, texts)
    # JSON may hold halves of surrogate pairs
    return record[field].encode(errors="replace").decode()


def refuse_field(place, field, others):
    """Exit: a field does not hold text; `others` do."""
    cure = 'no field of it does: write each document as {"text": "..."}'
    if others:
        cure = f"choose a --field, of {', '.join(others)}"
    sys.exit(f"error: {place}: field {field!r} does not hold a text; {cure}")


def cut(file, separated):
    """Yield (does a document begin here?, piece) of an open text file.

    Encoded one by one, the pieces give the tokens of their document. If the file is `separated`,
    <|endoftext|> ends a document; else the file is one document, and <|endoftext|> is text.
    """
    begins = True
    rest = ""
    for block in iter(lambda: file.read(PIECE_CHARACTERS), ""):
        rest += block
        if separated:
            *ended, rest = rest.split(SEPARATOR)
            for text in ended:
                if text:
                    yield begins, text
                begins = True
        if len(rest) >= PIECE_CHARACTERS:
            match = LAST_CUT.match(rest)
            # without a blank: anywhere, but not within a separator
            end = match.end() if match else len(rest) - len(SEPARATOR)
            yield begins, rest[:end]
            begins = False
            rest = rest[end:]
    if rest:
        yield begins, rest


def read(source, field, encoding):
    """Yield (does a document begin here?, piece) of a file, a Dataset, or a text itself."""
    if isinstance(source, str):
        yield from cut(io.StringIO(source), separated=True)
        return
    if isinstance(source, Dataset):
        texts = read_dataset(source, field)
    elif source.suffix.lower() == ".parquet":
        texts = read_parquet(source, field)
    elif source.suffix.lower() != ".txt" and is_jsonl(source, encoding):
        texts = read_jsonl(source, field, encoding)
    else:
        with open_text(source, encoding) as file:
            yield from cut(file, separated=True)
        return
    for text in texts:
        yield from cut(io.StringIO(text), separated=False)


def read_all(sources, field, encoding):
    """Yield the pieces of several sources, one after another."""
    for source in sources:
        yield from read(source, field, encoding)
