"""Folders of token files, made up or read."""
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

NEEDS_GPT2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="tiktoken would download its merges")


def tokens_of(folder, ids, val_ids=None, tokenizer=None, **meta):
    """A data folder with these token ids as train and, unless `val_ids` are given, as val."""
    folder.mkdir()
    meta = {"source": "made up", "sha256": "", "tokenizer": "gpt2", "vocab_size": 50257, "end_of_text": 50256,
            "documents": 1} | meta
    if tokenizer and tokenizer.json:
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    if tokenizer:
        meta |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
    for split, own in {"train": ids, "val": ids if val_ids is None else val_ids}.items():
        np.array(own, dtype="<u2").tofile(folder / f"{split}.bin")
        meta[f"{split}_tokens"] = len(own)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def data_with(tokenizer, text, folder):
    """A data folder of a text in the tokens of one of data/vocabulary.py's tokenizers."""
    ids = tokenizer.encode(text)
    n_train = len(ids) * 9 // 10
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return tokens_of(folder, ids[:n_train], ids[n_train:], tokenizer, sha256=sha256)


def tokens_in(folder, *splits):
    """The token ids of a data folder, of train and then val unless others are asked for."""
    files = [Path(folder, f"{split}.bin") for split in splits or ("train", "val")]
    return np.concatenate([np.fromfile(file, dtype="<u2") for file in files])


def edit_json(path, **changes):
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
