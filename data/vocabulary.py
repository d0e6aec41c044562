"""Tokenizers: GPT-2's, single bytes, one from Hugging Face, or one trained on the text itself.

Each tokenizer has `name`, `vocab_size`, `end_of_text` (the id of the token before each document),
`dtype` (of its ids in a file), `special_tokens` ({text: id}), `json` (the tokenizer.json of Hugging
Face's tokenizers library; None for "gpt2" and "gpt2-bytes"), and

    encode(text)       token ids, (n_tokens,); a literal "<|endoftext|>" is ordinary text
    decode(ids)        their text, without end-of-text tokens
    byte_lengths()     UTF-8 bytes that each token stands for, (vocab_size,); 0 for special tokens
    to_transformers()  the same tokenizer for transformers

A text may be encoded in pieces: the tokens are the same if it is cut only between a letter or digit
and the blank after it.
"""
import contextlib
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
# how GPT-2 splits a text into words, numbers, punctuation and blanks
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
U2 = np.dtype("<u2")  # for up to 65,536 tokens
U4 = np.dtype("<u4")
# GPT-2's tokens as once fetched, a line each, so that its models need no network later
KEPT = Path(__file__).with_name("gpt2_tokens.txt")
KEPT_SHA256 = "3a1f1c010d179f036be1992bc14b861e326341438633869c694dc4dccfe153d3"
# what a model's file says about its tokenizer: the arguments of `restore`
FIELDS = ("tokenizer", "tokenizer_json", "end_of_text")
OUR_NAMES = ("gpt2", "gpt2-bytes", "bytes")  # each stands for one tokenizer, never for a folder's


class NoTokenizer(Exception):
    """A tokenizer cannot be had, or does not suit; the message says why."""


def reason(error):
    """The first line of what an exception says."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def byte_characters():
    """How GPT-2 writes each byte: a printable one as its character, the n-th other as chr(256 + n).
    """
    characters = []
    n_hidden = 0
    for byte in range(256):
        if chr(byte).isprintable() and chr(byte) != " ":
            characters.append(chr(byte))
        else:
            characters.append(chr(256 + n_hidden))
            n_hidden += 1
    return characters


def are_gpt2s(tokens):
    """Whether these are GPT-2's tokens, in the order of their ids, without <|endoftext|>."""
    return hashlib.sha256("\n".join(tokens).encode("utf-8")).hexdigest() == KEPT_SHA256


def keep_gpt2s(tokens):
    """Write GPT-2's tokens to KEPT; a checkout that cannot be written to has to fetch them again.
    """
    with contextlib.suppress(OSError):
        partial = KEPT.with_name(f"{KEPT.name}.{os.getpid()}")
        partial.write_text("\n".join(tokens), encoding="utf-8")
        os.replace(partial, KEPT)


def gpt2s_tokens(seconds=60):
    """GPT-2's tokens, in the order of their ids: those that are kept, or tiktoken's."""
    tokens = KEPT.read_text(encoding="utf-8").split("\n") if KEPT.exists() else []
    if are_gpt2s(tokens):
        return tokens
    try:
        # tiktoken sets no timeout of its own; the pool's threads do not outlive the program
        with ThreadPool(1) as pool:
            download = pool.apply_async(tiktoken.get_encoding, ["gpt2"])
            encoding = download.get(seconds)
    except (OSError, ValueError, multiprocessing.TimeoutError) as error:
        # ValueError: the file is not the one that tiktoken expects
        kind = type(error).__name__
        raise NoTokenizer(f"GPT-2's tokens could not be fetched ({kind}); without a network"
                          " TIKTOKEN_CACHE_DIR may name a folder that has them") from error
    characters = byte_characters()
    tokens = []
    for i in range(GPT2.end_of_text):
        data = encoding.decode_single_token_bytes(i)
        tokens.append("".join(characters[byte] for byte in data))
    keep_gpt2s(tokens)
    return tokens


class GPT2:
    """GPT-2's 256 bytes, 50,000 merges and <|endoftext|>; raises NoTokenizer without a network,
    unless they were fetched before.
    """

    name = "gpt2"
    vocab_size = 50257
    end_of_text = 50256
    json = None
    dtype = U2
    special_tokens = {SEPARATOR: end_of_text}

    def __init__(self):
        characters = byte_characters()
        byte_of = {character: byte for byte, character in enumerate(characters)}
        ranks = {}
        for i, token in enumerate(gpt2s_tokens()):
            ranks[bytes(byte_of[character] for character in token)] = i
        self.encoding = tiktoken.Encoding(
            "gpt2", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=self.special_tokens)

    def encode(self, text):
        ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        return ids.astype(self.dtype)

    def decode(self, ids):
        ids = np.asarray(ids, dtype=np.int64)
        return self.encoding.decode(ids[ids < self.end_of_text].tolist())

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
        # some files hold the settings of a training with short sequences
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # the characters of a special token are ordinary text
        self.tokenizer.encode_special_tokens = True
        self.name = name
        self.json = self.tokenizer.to_str()
        self.end_of_text = end_of_text
        self.vocab_size = max(self.tokenizer.get_vocab().values(), default=-1) + 1
        self.dtype = U2 if self.vocab_size <= 65536 else U4
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}

    def encode(self, text):
        # unlike `encode`, this releases the GIL
        batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(batch[0].ids, dtype=self.dtype)

    def decode(self, ids):
        ids = np.asarray(ids, dtype=np.int64)
        ids = ids[ids != self.end_of_text].tolist()
        # unlike `decode`, this releases the GIL
        return self.tokenizer.decode_batch([ids], skip_special_tokens=False)[0]

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


class OwnIds:
    """Token ids of somebody's own, of which no text is known: their tokenizer.json holds {}."""

    def __init__(self, name, json_text, end_of_text):
        self.name, self.json, self.end_of_text = name, json_text, end_of_text
        self.vocab_size = 0  # not known here


class Bytes(Tokenizer):
    """Single bytes: tables encode and decode them faster than the library does."""

    def __init__(self, name):
        characters = byte_characters()
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
        self.byte_of_id = np.argsort(self.id_of_byte).astype(np.uint8)

    def encode(self, text):
        return self.id_of_byte[np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]

    def decode(self, ids):
        ids = np.asarray(ids, dtype=np.int64)
        data = self.byte_of_id[ids[ids < 256]].tobytes()
        return data.decode("utf-8", errors="replace")


def pattern_of(special_tokens):
    """A pattern for the texts of special tokens, one group: the longest that fits."""
    texts = sorted(special_tokens, key=len, reverse=True)
    alternatives = "|".join(re.escape(text) for text in texts)
    return re.compile(f"({alternatives or '(?!)'})")  # (?!) is nowhere


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
    from transformers.utils import cached_file

    json_text = None
    try:
        json_file = cached_file(name, "tokenizer.json",
                                _raise_exceptions_for_missing_entries=False)
        if json_file:
            json_text = Path(json_file).read_text(encoding="utf-8")
            check_json(json_text)
        theirs = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:  # ImportError: some need sentencepiece
        if Path(name).is_dir() and json_text is None:
            advice = "transformers' save_pretrained writes one"
            raise NoTokenizer(f"there is no tokenizer.json in it ({advice})") from error
        raise NoTokenizer(f"cannot be loaded ({reason(error)})") from error
    if theirs.eos_token is None:
        raise NoTokenizer('has no end-of-text token; name one of its tokens in its'
                          ' tokenizer_config.json, as in "eos_token": "<|endoftext|>"')
    if json_text is None and not theirs.is_fast:
        raise NoTokenizer("is written in Python; only those with a tokenizer.json can be used")

    folder = os.path.basename(os.path.abspath(name))
    our_name = f"hf-{folder}" if folder in OUR_NAMES else folder
    # the file is what counts: some of transformers' classes replace parts of it by their own
    tokenizer = Tokenizer(our_name, json_text or theirs.backend_tokenizer.to_str(), None)
    if tokenizer.vocab_size <= 256:  # transformers makes one up where there is none
        raise NoTokenizer("is missing, or has fewer than 257 tokens")
    tokenizer.end_of_text = tokenizer.tokenizer.token_to_id(theirs.eos_token)
    if tokenizer.end_of_text is None:
        raise NoTokenizer(f"its eos_token {theirs.eos_token} is not in its tokenizer.json")
    vocab = tokenizer.tokenizer.get_vocab()
    for ours in (of_bytes("gpt2-bytes"), of_bytes()):
        if ours.tokenizer.get_vocab() == vocab:
            tokenizer = ours
    if is_gpt2(tokenizer):
        keep_gpt2s(tokens_of(tokenizer))
        tokenizer = GPT2()
    return tokenizer


def find_change(tokenizer, text, ids, byte_lengths):
    """Where a text is not what its tokens `ids` stand for: None, or (character, in words)."""
    decoded = tokenizer.decode(ids)
    if decoded != text:
        place = len(os.path.commonprefix([text, decoded]))
        excerpt = slice(max(place - 10, 0), place + 20)
        return place, f"{text[excerpt]!r} comes back as {decoded[excerpt]!r}"
    n_bytes = len(text.encode("utf-8"))
    if byte_lengths[ids].sum() != n_bytes:  # as of sentencepiece's tokens: evaluate.py counts them
        return 0, f"the tokens of {text[:30]!r} are not those of a byte-level tokenizer"
    return None


def tokens_of(tokenizer):
    """The tokens of a tokenizer of the tokenizers library with ids below GPT-2's <|endoftext|>."""
    vocab = tokenizer.tokenizer.get_vocab()
    return sorted(vocab, key=vocab.get)[: GPT2.end_of_text]


def is_gpt2(tokenizer):
    """Whether a tokenizer of the tokenizers library is GPT-2's, without added tokens."""
    return tokenizer.vocab_size == GPT2.vocab_size and are_gpt2s(tokens_of(tokenizer))


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
        if json.loads(json_text or "null") == {}:
            return OwnIds(name, json_text, end_of_text)
        return Tokenizer(name, json_text, end_of_text)
    except ValueError as error:
        raise NoTokenizer(f"{name} is damaged ({reason(error)})") from error
