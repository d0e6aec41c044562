"""How fast data/prepare.py encodes GPT-2's tokens, and how much memory it takes.

    python -m experiments.prepare_speed [megabytes]         # default: 1000

Words drawn from the language reference bundled with Python, as .txt, .jsonl and .parquet. The seconds include the
program's start; needs three times the megabytes on disk, in the folder for temporary files.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
from pyarrow.parquet import ParquetWriter

PREPARE = Path(__file__).resolve().parent.parent / "data" / "prepare.py"


def documents(n_bytes):
    """Yield generated documents of 50 to 1,000 words, `n_bytes` in all."""
    words = " ".join(topics.values()).encode("ascii", "ignore").decode().split(" ")
    draw = random.Random(1337)
    while n_bytes > 0:
        document = " ".join(draw.choices(words, k=draw.randint(50, 1000)))
        n_bytes -= len(document)
        yield document


def write(path, texts):
    if path.suffix == ".parquet":
        schema = pyarrow.schema([("text", pyarrow.string())])
        with ParquetWriter(path, schema) as file:
            while batch := list(islice(texts, 10_000)):
                file.write_table(pyarrow.table({"text": batch}, schema))
    else:
        with open(path, "w") as file:
            file.writelines((text if path.suffix == ".txt" else json.dumps({"text": text})) + "\n" for text in texts)


def main(megabytes):
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("txt", "jsonl", "parquet"):
            path = Path(folder) / f"text.{suffix}"
            write(path, documents(megabytes * 1_000_000))
            started = time.perf_counter()
            run = subprocess.Popen([sys.executable, PREPARE, "--text", path, "--out", Path(folder) / suffix])
            _, status, usage = os.wait4(run.pid, 0)
            seconds = time.perf_counter() - started
            path.unlink()
            if status:
                sys.exit(f"error: {PREPARE}: failed on .{suffix}; its own line says why")
            print(f"{megabytes} MB of .{suffix}: {seconds:.1f} s, {megabytes / seconds:.1f} MB/s, "
                  f"peak memory {usage.ru_maxrss / 1000:,.0f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("megabytes", type=int, nargs="?", default=1000)
    main(parser.parse_args().megabytes)
