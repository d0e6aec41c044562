"""Measure how good a model is: loss, perplexity and bits per byte over the whole of val.bin.

    python evaluate.py model.pt --data data/mine        # a file of --save, or a checkpoint
    python evaluate.py gpt2 --data data/mine            # a Hugging Face name or folder

val.bin is cut into sequences of T tokens, of which the last may be shorter. Every token but the
very first is predicted once, from the tokens before it in its sequence. So the numbers depend on T
(by default that of the training): give the same -T for models that you compare. Bits per byte can
be compared across tokenizers. If the model's tokenizer is not that of the data, the same text is
encoded again with the model's. Everything is computed in float32, and matrix products on CUDA in
TF32.

Do not compare these numbers with GPT-2's published perplexities on WikiText. Those are per word of
a detokenized text: the same total loss is divided by the number of words, not of tokens.
"""
import argparse
import json
import logging
import math
import re
import sys
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

from data import vocabulary
from data.texts import warn
from sample import load_model, pick_device

# A piece of at most 16384 characters that ends before a blank, where no token is split: after a
# letter or digit, else after another character that is not a blank, else anywhere.
PIECE = re.compile(
    r".{,16383}[^\W_](?=[ \t\r\n])|.{,16383}\S(?=[ \t\r\n])|.{1,16384}", re.DOTALL)
# The most logits (0.5 GB) and tokens in a batch, unless a single sequence has more
MAX_LOGITS = 2**27
MAX_TOKENS = 2**14


def load_val(folder):
    """val.bin of a data folder, memory-mapped, (n_tokens,); its source; its tokenizer.

    Exits with one line if it is not whole.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokenizer = vocabulary.of_ours(folder)
        tokens = np.memmap(folder / "val.bin", dtype=meta.get("dtype", "<u2"), mode="r")
        if len(tokens) != meta["val_tokens"]:
            raise ValueError(f"val.bin has {len(tokens)} tokens, not {meta['val_tokens']}")
        if len(tokens) < 2 or tokens.max() >= meta["vocab_size"]:
            raise ValueError("val.bin does not hold at least two tokens of its tokenizer")
        return tokens, meta["source"], tokenizer
    except KeyError as error:
        sys.exit(f"error: --data {folder}: meta.json has no {error};"
                 " give a folder that data/prepare.py made")
    except (OSError, ValueError, vocabulary.NoTokenizer) as error:
        sys.exit(f"error: --data {folder}: {error}; give a folder that data/prepare.py made")


def encode_again(tokens, theirs, ours):
    """The text of `tokens`, which are those of the tokenizer `theirs`, in tokens of `ours`."""
    parts = []
    change = None
    byte_lengths = ours.byte_lengths()
    starts = np.flatnonzero(tokens == theirs.end_of_text)
    for document in tqdm(np.split(tokens, starts), "encoding", disable=None):
        if len(document) and document[0] == theirs.end_of_text:
            parts.append(np.array([ours.end_of_text], dtype=np.uint32))
        text = theirs.decode(document.tolist())
        for piece in PIECE.findall(text):
            ids = ours.encode(piece)
            parts.append(ids)
            change = change or vocabulary.find_change(ours, piece, ids, byte_lengths)
    if change:
        warn(f"the model's tokenizer changes the text ({change[1]}): its numbers are of a"
             " different text, so do not compare them")
    return np.concatenate(parts)  # (n_tokens,)


def batches(n_predicted, T, batch_size):
    """(First token, number of sequences, their length) of each batch; the last may be shorter."""
    n_whole, rest = divmod(n_predicted, T)
    for i in range(0, n_whole, batch_size):
        yield i * T, min(batch_size, n_whole - i), T
    if rest:
        yield n_whole * T, 1, rest


def document_mask(x, end_of_text):
    """The mask of attention for x (B, T), within documents: (B, 1, T, T)."""
    document = (x == end_of_text).cumsum(1)  # (B, T): the number of its document in the sequence
    return (document[:, :, None] == document[:, None, :]).tril()[:, None]


@torch.inference_mode()
def sum_losses(model, tokens, T, batch_size, end_of_text=None):
    """The loss of each position in nats, summed over all sequences, (T,), and their number, (T,).

    Every token but the first is predicted. With the id `end_of_text` no token attends to a document
    before its own.
    """
    total = torch.zeros(T, dtype=torch.float64)
    count = torch.zeros(T, dtype=torch.int64)
    progress = tqdm(total=len(tokens) - 1, unit=" tokens", disable=None)
    for start, n, length in batches(len(tokens) - 1, T, batch_size):
        chunk = tokens[start : start + n * length + 1].astype(np.int64)
        chunk = torch.from_numpy(chunk).to(model.device)
        x, targets = chunk[:-1].view(n, length), chunk[1:]  # (n, length), (n * length,)
        mask = None
        if end_of_text is not None:
            mask = document_mask(x, end_of_text)
        logits = model(x, attention_mask=mask, use_cache=False).logits  # (n, length, vocab_size)
        losses = []
        # cross_entropy makes copies of its logits, so it gets 1024 rows at a time
        for rows, ids in zip(logits.flatten(0, 1).split(1024), targets.split(1024), strict=True):
            losses.append(F.cross_entropy(rows.float(), ids, reduction="none"))
        losses = torch.cat(losses).view(n, length).sum(0).cpu()  # Apple GPUs have no float64
        total[:length] += losses.double()
        count[:length] += n
        progress.update(n * length)
    progress.close()
    return total, count


def parse_args(argv=None):
    """Parse the command line; a mistake ends in argparse's error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flag = parser.add_argument
    flag("model", help="a checkpoint file, or a Hugging Face folder or name")
    flag("--data", type=Path, default=Path("data/tokens"), help="folder written by data/prepare.py"
         " (default: %(default)s)")
    flag("-T", "--seq-len", dest="T", type=int, help="tokens per sequence (default: as in training;"
         " for a Hugging Face model its longest, at most 1024)")
    flag("-B", "--batch-size", dest="B", type=int, help="sequences per batch (default: as many"
         " as have 0.5 GB of logits)")
    flag("--documents-apart", action="store_true", help="attend only within a document, as in"
         " the training of documents_apart")
    flag("--device", default=pick_device(), help="device to compute on (default: %(default)s)")
    args = parser.parse_args(argv)
    for value in (args.T, args.B):
        if value is not None and value < 1:
            parser.error("-T and -B must be at least 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    torch.set_float32_matmul_precision("high")  # TF32 where CUDA has it: 10 bits for products
    tokens, source, data_tokenizer = load_val(args.data)
    model, tokenizer = load_model(args.model, args.device)
    if args.documents_apart and hasattr(model, "gpt"):  # sample.py's script_model
        sys.exit("error: --documents-apart: models of this script cannot do that;"
                 " leave it out")
    longest = model.config.max_position_embeddings
    trained_length = getattr(model.config, "trained_length", None)  # not known of Hugging Face's
    T = args.T or trained_length or min(longest, 1024)
    if longest < T:
        sys.exit(f"error: -T {T}: the model's longest sequence is {longest}; lower -T")
    has_text = not isinstance(tokenizer, vocabulary.OwnIds)
    if (tokenizer.name, tokenizer.json) != (data_tokenizer.name, data_tokenizer.json):
        if not has_text or isinstance(data_tokenizer, vocabulary.OwnIds):
            sys.exit(f"error: --data {args.data}: its ids are not the model's, and have no text to"
                     " encode again; give the data that the model was trained on")
        tokens = encode_again(tokens, data_tokenizer, tokenizer)
    batch_size = min(MAX_LOGITS // (T * model.config.vocab_size), MAX_TOKENS // T)
    batch_size = args.B or max(1, batch_size)
    end_of_text = tokenizer.end_of_text if args.documents_apart else None

    total, count = sum_losses(model, tokens, T, batch_size, end_of_text)
    half = T // 2
    first = (total[:half].sum() / count[:half].sum()).item()
    second = (total[half:].sum() / count[half:].sum()).item()
    if second > first + 0.1 and trained_length != T:
        warn(f"the second halves of the sequences are predicted worse ({second:.2f} nats per token)"
             f" than the first ({first:.2f}): the model was probably trained with a smaller -T;"
             " give that one")
    n_predicted = len(tokens) - 1
    loss = total.sum().item() / n_predicted
    counts = f"{n_predicted:,} {tokenizer.name} tokens"
    results = f"loss: {loss:.4f} nats per token | perplexity: {math.exp(loss):.2f}"
    if has_text:
        n_bytes = int(tokenizer.byte_lengths()[tokens[1:]].sum())
        bits_per_byte = total.sum().item() / math.log(2) / n_bytes
        counts += f", {n_bytes:,} bytes"
        results += f" | bits per byte: {bits_per_byte:.4f}"
    print(f"{args.model} on {args.data / 'val.bin'} ({source}): {counts}, T={T}")
    print(results)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # transformers imports torchao, which warns of what it lacks
    sys.stdout.reconfigure(errors="replace")  # for names that its encoding lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except torch.OutOfMemoryError:
        sys.exit("error: out of memory; give a smaller --batch-size, or a shorter -T")
