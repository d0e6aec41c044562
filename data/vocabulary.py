"""Tokenizers: GPT-2's, single bytes, one from Hugging Face, or one trained on the text itself.

Each has `name`, `vocab_size`, `end_of_text` (the id of the token before each document), `json` (what Hugging Face's
tokenizers library stores as tokenizer.json; None where the name says it all), and

    encode(text)       token ids, of type `dtype`; a literal "<|endoftext|>" is ordinary text
    decode(ids)        their text, without end-of-text tokens
    byte_lengths()     bytes of UTF-8 that each token stands for, (vocab_size,); 0 for the end of text
    to_transformers()  the same tokenizer for transformers

If a text is cut only between a letter or digit and the blank after it, its pieces give the tokens of the whole.
"""
import hashlib
import json as json_library
import os
import re
import sys
from multiprocessing.pool import ThreadPool

import numpy as np
import tiktoken
import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

SEPARATOR = "<|endoftext|>"
U2, U4 = np.dtype("<u2"), np.dtype("<u4")  # of ids below 65,536, and of others
FIELDS = ("tokenizer", "tokenizer_json", "end_of_text")  # what a model's file says of its tokenizer: `restore`'s words
OUR_NAMES = ("gpt2", "gpt2-bytes", "bytes")  # each names one tokenizer; a folder's never gets one of them
PROBE = " Two  blanks,\n\n\ttabs\t12345\nnaïve 日本語 🙂!\r\n"  # a tokenizer that changes this would change other texts


class NoTokenizer(Exception):
    """A tokenizer cannot be had, or does not suit; the message says why."""


def reason(error):
    """What an exception says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class GPT2:
    """GPT-2's 50,000 merges, 256 bytes and, last, <|endoftext|>: tiktoken's "gpt2", which it downloads once."""

    name, vocab_size, end_of_text, json, dtype = "gpt2", 50257, 50256, None, U2

    def __init__(self, seconds=60):
        try:
            with ThreadPool(1) as pool:  # a daemon thread, because tiktoken waits forever for a network that is silent
                self.encoding = pool.apply_async(tiktoken.get_encoding, ["gpt2"]).get(seconds)
        except Exception as error:  # requests and tiktoken raise many kinds
            raise NoTokenizer(f"tiktoken could not fetch GPT-2's merges ({type(error).__name__})") from error

    def encode(self, text):
        return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(self.dtype)

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i < self.end_of_text])

    def byte_lengths(self):
        return np.array([*map(len, map(self.encoding.decode_single_token_bytes, range(self.end_of_text))), 0])

    def to_transformers(self):
        from transformers.convert_slow_tokenizer import TikTokenConverter

        converter = TikTokenConverter(pattern=self.encoding._pat_str, extra_special_tokens=[SEPARATOR])
        converter.load_tiktoken_bpe = lambda _: self.encoding._mergeable_ranks  # instead of from a file
        return for_transformers(converter.converted(), self.end_of_text)


class Tokenizer:
    """A byte-level tokenizer of Hugging Face's tokenizers library."""

    def __init__(self, name, json, end_of_text):
        self.tokenizer = tokenizers.Tokenizer.from_str(json)
        self.tokenizer.encode_special_tokens = True  # a special token's characters are ordinary text
        self.name, self.json, self.end_of_text = name, json, end_of_text
        self.vocab_size = max(self.tokenizer.get_vocab().values()) + 1
        self.dtype = U2 if self.vocab_size <= 1 << 16 else U4

    def encode(self, text):
        encoded, = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)  # unlike encode, without the GIL
        return np.array(encoded.ids, dtype=self.dtype)

    def decode(self, ids):
        return self.tokenizer.decode([i for i in ids if i != self.end_of_text], skip_special_tokens=False)

    def byte_lengths(self):
        lengths = np.zeros(self.vocab_size, dtype=int)
        for token, i in self.tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[i] = len(token)  # each of its characters stands for one byte
        for i, token in self.tokenizer.get_added_tokens_decoder().items():
            lengths[i] = 0 if token.special else len(token.content.encode("utf-8"))
        return lengths

    def to_transformers(self):
        return for_transformers(tokenizers.Tokenizer.from_str(self.tokenizer.to_str()), self.end_of_text)


class Bytes(Tokenizer):
    """Single bytes: a table encodes them faster than the library does."""

    def __init__(self, name):
        # GPT-2 numbers the printable bytes first, then the others, and writes byte n of those as chr(256 + n).
        hidden = [b for b in range(256) if b == 32 or not chr(b).isprintable()]
        characters = [chr(256 + hidden.index(b)) if b in hidden else chr(b) for b in range(256)]
        ids, end = list(range(256)), 256
        if name == "gpt2-bytes":
            ids, end = [sorted(characters).index(character) for character in characters], GPT2.end_of_text
        vocab = dict(zip([*characters, SEPARATOR], [*ids, end], strict=True))
        tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        tokenizer.add_special_tokens([SEPARATOR])
        super().__init__(name, tokenizer.to_str(), end)
        if name == "gpt2-bytes":
            self.json = None  # as GPT-2's: the name says it all
        self.id_of_byte = np.array(ids, dtype=self.dtype)

    def encode(self, text):
        return self.id_of_byte[np.frombuffer(text.encode("utf-8"), dtype=np.uint8)]


def for_transformers(tokenizer, end_of_text):
    """A tokenizer of the tokenizers library as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    end = tokenizer.id_to_token(end_of_text)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def of_bytes(name="bytes"):
    """Single bytes, for any language: ids are their values, 256 ends a text. "gpt2-bytes" has GPT-2's ids for both."""
    return Bytes(name)


def trained(texts, vocab_size):
    """A byte-level BPE of at most `vocab_size` tokens, trained on an iterator of texts, split as GPT-2 splits."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[SEPARATOR], initial_alphabet=ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty()))
    json = tokenizer.to_str()
    name = f"bpe-{tokenizer.get_vocab_size()}-{hashlib.sha256(json.encode()).hexdigest()[:6]}"  # no other's
    return Tokenizer(name, json, tokenizer.token_to_id(SEPARATOR))


def from_hugging_face(name):
    """The tokenizer in a Hugging Face folder, or of that name on the hub. Raise NoTokenizer when it does not suit."""
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(name)
        json, end = theirs.backend_tokenizer.to_str(), theirs.eos_token_id
        folder = os.path.basename(os.path.abspath(name))
        tokenizer = Tokenizer(f"hf-{folder}" if folder in OUR_NAMES else folder, json, end)
    except Exception as error:  # no such folder, no network, a damaged file: any exception
        raise NoTokenizer(f"cannot be loaded ({reason(error)})") from error
    if tokenizer.vocab_size <= 256:  # transformers makes up one of a single token
        raise NoTokenizer("is missing, or has fewer than 257 tokens")
    if end is None:
        raise NoTokenizer("has no end-of-text token (eos_token)")
    ids = tokenizer.encode(PROBE)
    pieces = [tokenizer.encode(piece) for piece in re.split(r"(?<=[^\W_])(?=[ \t\r\n])", PROBE)]
    lengths = tokenizer.byte_lengths()[ids]
    if tokenizer.decode(ids) != PROBE or lengths.sum() != len(PROBE.encode()) or [*ids] != [*np.concatenate(pieces)]:
        raise NoTokenizer("does not give back the text that it encodes, piece by piece; only byte-level tokenizers do")
    vocab = tokenizer.tokenizer.get_vocab()
    return next((ours for ours in map(of_bytes, OUR_NAMES[1:]) if ours.tokenizer.get_vocab() == vocab), tokenizer)


def is_gpt2(tokenizer):
    """Whether a tokenizer of the tokenizers library is GPT-2's, without added tokens: its size and last merge tell."""
    return tokenizer.vocab_size == GPT2.vocab_size and tokenizer.tokenizer.token_to_id("Ġgazed") == 50255


def of_ours(path):
    """The tokenizer of a model's file, or of a folder of token files. Raise NoTokenizer when it is neither."""
    try:
        if path.is_dir():
            meta = json_library.loads((path / "meta.json").read_text(encoding="utf-8"))
            ours = meta["tokenizer"] in OUR_NAMES  # the name says it all
            saved = meta | {"tokenizer_json": None if ours else (path / "tokenizer.json").read_text(encoding="utf-8")}
        else:
            import torch  # takes seconds, and few need it

            saved = torch.load(path, map_location="cpu", weights_only=True)
        fields = [saved[key] for key in FIELDS]
    except Exception as error:  # a damaged file: any exception
        raise NoTokenizer(f"cannot be read ({reason(error)})") from error
    return restore(*fields)


def restore(name, json, end_of_text):
    """The tokenizer of a data folder or a checkpoint. Raise NoTokenizer when it cannot be had."""
    if name == GPT2.name:
        return GPT2()
    if name in OUR_NAMES:
        return of_bytes(name)
    try:
        return Tokenizer(name, json, end_of_text)
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise NoTokenizer(f"{name} is damaged ({reason(error)})") from error
