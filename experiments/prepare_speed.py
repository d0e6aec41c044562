"""How fast data/prepare.py encodes, against tiktoken's own batch encoding, and how much memory it takes.

    python -m experiments.prepare_speed [megabytes ...]         # default: 10 100 1000

Writes generated text (words drawn from the language reference bundled with Python) of each size as .txt, .jsonl and
.parquet, prepares it, and prints a table:

    seconds         from the program's start to its end
    MB/s            the same without the start, which is what 1 kB of text takes
    tiktoken MB/s   `encode_ordinary_batch` with one thread per core, merges loaded, 20 MB of that text, just before
    peak memory     of all the program's processes together, shared pages counted once where the system tells

Needs three times the largest size on disk, in the folder for temporary files.
"""
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import tiktoken
from rich.console import Console
from rich.table import Table

SAMPLE_BYTES = 20_000_000
PREPARE = Path(__file__).resolve().parent.parent / "data" / "prepare.py"


def documents(size):
    """Yield generated documents of 50 to 1,000 words, `size` bytes in all."""
    from pydoc_data.topics import topics

    words = " ".join(topics.values()).encode("ascii", "ignore").decode().split(" ")
    draw = random.Random(1337)
    while size > 0:
        document = " ".join(draw.choices(words, k=draw.randint(50, 1000)))
        size -= len(document)
        yield document


def write_txt(path, texts):
    with open(path, "w") as file:
        file.writelines(text + "\n" for text in texts)


def write_jsonl(path, texts):
    with open(path, "w") as file:
        file.writelines(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts))


def write_parquet(path, texts):
    schema = pyarrow.schema([("text", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(path, schema) as file:
        rows = []
        for text in texts:
            rows.append(text)
            if len(rows) == 10_000:
                file.write_table(pyarrow.table({"text": rows}, schema))
                rows = []
        file.write_table(pyarrow.table({"text": rows}, schema))


WRITERS = {"txt": write_txt, "jsonl": write_jsonl, "parquet": write_parquet}


def tiktoken_speed(size, threads):
    """MB/s of tiktoken's own batch encoding."""
    encoding = tiktoken.get_encoding("gpt2")
    texts = list(documents(min(size, SAMPLE_BYTES)))
    encoding.encode_ordinary_batch(texts[:100], num_threads=threads)
    started = time.perf_counter()
    encoding.encode_ordinary_batch(texts, num_threads=threads)
    return sum(map(len, texts)) / 1e6 / (time.perf_counter() - started)


def memory_of(process):
    """Bytes that a process and its children hold; 0 when they are gone."""
    total = 0
    try:
        for one in [process, *process.children(recursive=True)]:
            info = one.memory_full_info()
            total += getattr(info, "pss", info.rss)
    except psutil.NoSuchProcess:
        return 0
    return total


def prepare(path, watched=False):
    """(seconds that data/prepare.py takes from start to end, its peak memory in bytes if it is `watched`)."""
    memory, ended = [0], threading.Event()

    def watch(process):
        while not ended.wait(0.1):
            memory.append(memory_of(process))

    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        started = time.perf_counter()
        command = [sys.executable, PREPARE, "--text", path, "--out", out]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as run:
            if watched:
                threading.Thread(target=watch, args=(psutil.Process(run.pid),), daemon=True).start()
            run.wait()
            seconds = time.perf_counter() - started
            ended.set()
    if run.returncode:
        sys.exit(f"error: {PREPARE.name} failed on {path.name}")
    return seconds, max(memory)


def main(sizes):
    threads = psutil.cpu_count()
    table = Table("text", "format", "seconds", "MB/s", "tiktoken MB/s", "ratio", "peak memory MB")
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            for suffix, write in WRITERS.items():
                path = Path(folder) / f"{size // 1_000_000}.{suffix}"
                write(path, documents(1000))
                start = min(prepare(path)[0] for _ in range(3))
                write(path, documents(size))
                theirs = tiktoken_speed(size, threads)
                seconds, _ = prepare(path)
                _, peak = prepare(path, watched=True)  # in a run of its own: watching takes time
                path.unlink()
                ours = size / 1e6 / (seconds - start)
                table.add_row(f"{size / 1e6:,.0f} MB", suffix, f"{seconds:.1f}", f"{ours:.1f}", f"{theirs:.1f}",
                              f"{ours / theirs:.2f}", f"{peak / 1e6:,.0f}")
                print(f"{path.name}: {ours:.1f} MB/s after a start of {start:.1f} s", file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    if not all(word.isdigit() and int(word) for word in sys.argv[1:]):
        sys.exit(__doc__)
    main([int(word) * 1_000_000 for word in sys.argv[1:]] or [10_000_000, 100_000_000, 1_000_000_000])
