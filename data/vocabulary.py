"""Tokenizers: GPT-2's, single bytes, one from Hugging Face, or one trained on the text itself.

Each has `name`, `vocab_size`, `end_of_text` (the id of the token before each document), `dtype` (of
its ids in a file), `special_tokens` (their text), `json` (what Hugging Face's tokenizers library
stores as tokenizer.json; None for "gpt2" and "gpt2-bytes"), and

    encode(text)       token ids, (n_tokens,); a literal "<|endoftext|>" is ordinary text
    decode(ids)        their text, without end-of-text tokens
    byte_lengths()     UTF-8 bytes that each token stands for, (vocab_size,); 0 for special tokens
    to_transformers()  the same tokenizer for transformers

If a text is cut only between a letter or digit and the blank after it, its pieces give the tokens
of the whole.
"""
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import sys
import zipfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

SEPARATOR = "<|endoftext|>"
U2 = np.dtype("<u2")  # for up to 65,536 tokens
U4 = np.dtype("<u4")
# what a model's file says about its tokenizer: the arguments of `restore`
FIELDS = ("tokenizer", "tokenizer_json", "end_of_text")
OUR_NAMES = ("gpt2", "gpt2-bytes", "bytes")  # each stands for one tokenizer, never for a folder's
# a tokenizer that changes this text would change others, too
PROBE = " Two  blanks,\n\n\ttabs\t12345\nnaïve 日本語 🙂!\r\n"


class NoTokenizer(Exception):
    """A tokenizer cannot be had, or does not suit; the message says why."""


def reason(error):
    """The first line of what an exception says."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


class GPT2:
    """GPT-2's 50,000 merges, 256 bytes and <|endoftext|>: tiktoken's "gpt2", downloaded once."""

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256
    json = None
    dtype = U2
    special_tokens = [SEPARATOR]

    def __init__(self, seconds=60):
        try:
            # tiktoken sets no timeout of its own; the pool's threads do not outlive the program
            with ThreadPool(1) as pool:
                download = pool.apply_async(tiktoken.get_encoding, ["gpt2"])
                self.encoding = download.get(seconds)
        except (OSError, ValueError, multiprocessing.TimeoutError) as error:
            # ValueError: the file is not the one that tiktoken expects
            kind = type(error).__name__
            raise NoTokenizer(f"tiktoken could not fetch GPT-2's merges ({kind})") from error

    def encode(self, text):
        ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(self.dtype)

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i < self.end_of_text])

    def byte_lengths(self):
        lengths = np.zeros(self.vocab_size, dtype=int)
        for i in range(self.end_of_text):
            lengths[i] = len(self.encoding.decode_single_token_bytes(i))
        return lengths

    def to_transformers(self):
        from transformers.convert_slow_tokenizer import TikTokenConverter

        pattern = self.encoding._pat_str
        converter = TikTokenConverter(pattern=pattern, extra_special_tokens=[SEPARATOR])
        # it would read the merges from a file
        converter.load_tiktoken_bpe = lambda _: self.encoding._mergeable_ranks
        return for_transformers(converter.converted(), self.end_of_text)


class Tokenizer:
    """A byte-level tokenizer of Hugging Face's tokenizers library.

    Raises ValueError if `json_text`, the content of a tokenizer.json, is damaged.
    """

    def __init__(self, name, json_text, end_of_text):
        check_json(json_text)
        self.tokenizer = tokenizers.Tokenizer.from_str(json_text)
        # the characters of a special token are ordinary text
        self.tokenizer.encode_special_tokens = True
        self.name = name
        self.json = json_text
        self.end_of_text = end_of_text
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.dtype = U2 if self.vocab_size <= 65536 else U4
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = [token.content for token in added if token.special]

    def encode(self, text):
        # unlike `encode`, this releases the GIL
        batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(batch[0].ids, dtype=self.dtype)

    def decode(self, ids):
        ids = [i for i in ids if i != self.end_of_text]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def byte_lengths(self):
        lengths = np.zeros(self.vocab_size, dtype=int)
        for token, i in self.tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[i] = len(token)  # each of its characters stands for one byte
        for i, token in self.tokenizer.get_added_tokens_decoder().items():
            lengths[i] = 0 if token.special else len(token.content.encode("utf-8"))
        return lengths

    def to_transformers(self):
        copy = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        return for_transformers(copy, self.end_of_text)


class Bytes(Tokenizer):
    """Single bytes: a table encodes them faster than the library does."""

    def __init__(self, name):
        # GPT-2 writes a printable byte as its character, the n-th of the others as chr(256 + n)
        characters = []
        n_hidden = 0
        for byte in range(256):
            if chr(byte).isprintable() and chr(byte) != " ":
                characters.append(chr(byte))
            else:
                characters.append(chr(256 + n_hidden))
                n_hidden += 1
        ids = list(range(256))
        end_of_text = 256
        if name == "gpt2-bytes":  # GPT-2 numbers them in the order of these characters
            in_order = sorted(characters)
            ids = [in_order.index(character) for character in characters]
            end_of_text = GPT2.end_of_text
        vocab = dict(zip(characters, ids, strict=True))
        vocab[SEPARATOR] = end_of_text
        tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens([SEPARATOR])
        super().__init__(name, tokenizer.to_str(), end_of_text)
        if name == "gpt2-bytes":
            self.json = None
        self.id_of_byte = np.array(ids, dtype=self.dtype)

    def encode(self, text):
        return self.id_of_byte[np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]


def check_json(json_text):
    """Raise ValueError if a text is not the content of a tokenizer.json.

    The tokenizers library would raise a bare Exception.
    """
    contents = json.loads(json_text or "{}")
    if "model" not in contents:
        raise ValueError("there is no model in its tokenizer.json")


def for_transformers(tokenizer, end_of_text):
    """A tokenizer of the tokenizers library as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.id_to_token(end_of_text)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def of_bytes(name="bytes"):
    """Single bytes, for any language: the ids are their values, 256 is the end of a text.

    "gpt2-bytes" has GPT-2's ids for them and for the end of a text.
    """
    return Bytes(name)


def trained(texts, vocab_size):
    """A byte-level BPE of at most `vocab_size` tokens, split into words as GPT-2's.

    It is trained on an iterator of texts.
    """
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[SEPARATOR],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    json_text = tokenizer.to_str()
    digest = hashlib.sha256(json_text.encode()).hexdigest()  # no two tokenizers share a name
    name = f"bpe-{tokenizer.get_vocab_size()}-{digest[:6]}"
    return Tokenizer(name, json_text, tokenizer.token_to_id(SEPARATOR))


def from_hugging_face(name):
    """The tokenizer in a Hugging Face folder, or of that name on the hub.

    Raises NoTokenizer if there is none, or if it does not suit.
    """
    from transformers import AutoTokenizer

    json_file = Path(name, "tokenizer.json")
    try:
        if json_file.exists():
            check_json(json_file.read_text(encoding="utf-8"))
        theirs = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:  # ImportError: some need sentencepiece
        if Path(name).is_dir() and not json_file.exists():
            advice = "transformers' save_pretrained writes one"
            raise NoTokenizer(f"there is no tokenizer.json in it ({advice})") from error
        raise NoTokenizer(f"cannot be loaded ({reason(error)})") from error
    if theirs.eos_token_id is None:
        raise NoTokenizer("has no end-of-text token (eos_token)")
    if not theirs.is_fast:
        raise NoTokenizer("is written in Python; only those with a tokenizer.json can be used")

    folder = os.path.basename(os.path.abspath(name))
    our_name = f"hf-{folder}" if folder in OUR_NAMES else folder
    if len(theirs) <= 256:  # transformers makes one up where there is none
        raise NoTokenizer("is missing, or has fewer than 257 tokens")
    tokenizer = Tokenizer(our_name, theirs.backend_tokenizer.to_str(), theirs.eos_token_id)
    if not is_lossless(tokenizer):
        raise NoTokenizer("does not give back the text that it encodes, piece by piece;"
                          " only byte-level tokenizers do")
    vocab = tokenizer.tokenizer.get_vocab()
    for ours in (of_bytes("gpt2-bytes"), of_bytes()):
        if ours.tokenizer.get_vocab() == vocab:
            return ours
    return tokenizer


def is_lossless(tokenizer):
    """Whether a tokenizer gives back PROBE, counts its bytes, and encodes it in pieces alike."""
    ids = tokenizer.encode(PROBE)
    if tokenizer.decode(ids) != PROBE:
        return False
    if tokenizer.byte_lengths()[ids].sum() != len(PROBE.encode("utf-8")):
        return False
    pieces = re.split(r"(?<=[^\W_])(?=[ \t\r\n])", PROBE)
    in_pieces = np.concatenate([tokenizer.encode(piece) for piece in pieces])
    return np.array_equal(ids, in_pieces)


def is_gpt2(tokenizer):
    """Whether a tokenizer of the tokenizers library is GPT-2's, without added tokens.

    Its size and its last merge tell.
    """
    last = tokenizer.tokenizer.token_to_id("Ġgazed")
    return tokenizer.vocab_size == GPT2.vocab_size and last == 50255


def of_ours(path):
    """The tokenizer of a model's file, or of a folder of token files.

    Raises NoTokenizer if it is neither.
    """
    if path.is_dir():
        return of_token_files(path)
    if not zipfile.is_zipfile(path):  # as every file of torch.save is
        raise NoTokenizer("not a model's file, or an incomplete one")
    import torch  # takes seconds, and few need it

    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        name, json_text, end_of_text = [saved[key] for key in FIELDS]
    except (OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        # torch's own message advises to load it without weights_only
        raise NoTokenizer("not a model's file, or a damaged one") from error
    return restore(name, json_text, end_of_text)


def of_token_files(folder):
    """The tokenizer of a folder of token files; raises NoTokenizer if it is damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        json_text = None
        if meta["tokenizer"] not in OUR_NAMES:
            json_text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        end_of_text = meta["end_of_text"]
    except (OSError, ValueError, KeyError) as error:
        raise NoTokenizer(f"cannot be read ({reason(error)})") from error
    return restore(meta["tokenizer"], json_text, end_of_text)


def restore(name, json_text, end_of_text):
    """The tokenizer that these fields of a data folder or a model's file describe.

    Raises NoTokenizer if it cannot be had.
    """
    if name == GPT2.name:
        return GPT2()
    if name in OUR_NAMES:
        return of_bytes(name)
    try:
        return Tokenizer(name, json_text, end_of_text)
    except ValueError as error:
        raise NoTokenizer(f"{name} is damaged ({reason(error)})") from error
