"""How good is a model: loss, perplexity and bits per byte over the whole of val.bin.

    python evaluate.py model.pt --data data/mine        # a file of --save, or a checkpoint
    python evaluate.py gpt2 --data data/mine            # a Hugging Face name or folder

val.bin is cut into sequences of T tokens, the last one shorter; every token but the very first is predicted once, from
the tokens before it in its sequence. So the numbers depend on T, which is that of the model's training: give the same
-T for models that you compare. Bits per byte may be compared across tokenizers: a model with a tokenizer other than the
data's gets the same text in its own tokens.
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
from data.prepare import warn
from sample import load_model, pick_device

PIECE = re.compile(  # cut before a blank, where no token is split
    r".{,16383}[^\W_](?=[ \t\r\n])|.{,16383}\S(?=[ \t\r\n])|.{1,16384}", re.DOTALL)
LOGITS, TOKENS = 2**27, 2**14  # how many at most in a batch, unless one sequence has more: 0.5 GB of logits


def open_data(folder):
    """(val.bin of a data folder, memory-mapped, (n_tokens,); its source; its tokenizer); exits without them."""
    try:
        tokenizer = vocabulary.of_ours(folder)
        tokens = np.memmap(folder / "val.bin", dtype=tokenizer.dtype, mode="r")
        if len(tokens) < 2 or tokens.max() >= tokenizer.vocab_size:
            raise ValueError("val.bin does not hold at least two tokens of its tokenizer")
        return tokens, json.loads((folder / "meta.json").read_text(encoding="utf-8"))["source"], tokenizer
    except (OSError, ValueError, KeyError, vocabulary.NoTokenizer) as error:
        sys.exit(f"error: --data {folder}: {error}; give a folder that data/prepare.py made")


def encode_again(tokens, theirs, ours):
    """The text of `tokens`, which are those of the tokenizer `theirs`, in the tokens of `ours`, (n_tokens,)."""
    parts = []
    for document in tqdm(np.split(tokens, np.flatnonzero(tokens == theirs.end_of_text)), "encoding", disable=None):
        if len(document) and document[0] == theirs.end_of_text:
            parts.append(np.array([ours.end_of_text], dtype=ours.dtype))
        parts += [ours.encode(text) for text in PIECE.findall(theirs.decode(document.tolist()))]
    return np.concatenate(parts)


@torch.inference_mode()
def losses(model, tokens, T, batch_size, end_of_text=None):
    """The loss of every token but the first, in nats, summed by position in the sequence, (T,); how many, (T,).

    With the id `end_of_text` no token attends to a document before its own.
    """
    n_whole, rest = divmod(len(tokens) - 1, T)
    batches = [(i * T, min(batch_size, n_whole - i), T) for i in range(0, n_whole, batch_size)]
    batches += [(n_whole * T, 1, rest)] if rest else []
    total, count = torch.zeros(T, dtype=torch.float64), torch.zeros(T, dtype=torch.int64)
    with tqdm(total=len(tokens) - 1, unit=" tokens", disable=None) as progress:
        for start, n, length in batches:
            chunk = torch.from_numpy(tokens[start : start + n * length + 1].astype(np.int64)).to(model.device)
            x, mask = chunk[:-1].view(n, length), None
            if end_of_text is not None:
                document = (x == end_of_text).cumsum(1)  # (n, length): its number in the sequence
                mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]  # (n, 1, length, length)
            logits = model(x, attention_mask=mask, use_cache=False).logits.flatten(0, 1)  # (n * length, vocab_size)
            parts = zip(logits.split(1024), chunk[1:].split(1024), strict=True)  # cross_entropy makes copies of logits
            loss = torch.cat([F.cross_entropy(rows.float(), ids, reduction="none") for rows, ids in parts])
            total[:length] += loss.view(n, length).sum(0).cpu().double()  # Apple GPUs have no float64
            count[:length] += n
            progress.update(n * length)
    return total, count


def parse_args(argv=None):
    """The command line's flags; exits with one line when a value is out of range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint file, or a Hugging Face folder or name")
    parser.add_argument("--data", type=Path, default=Path("data/tokens"), help="a folder of token files")
    parser.add_argument("-T", "--seq-len", type=int, help="tokens per sequence (default: as in training; of a Hugging "
                        "Face model its longest, at most 1024)")
    parser.add_argument("-B", "--batch-size", type=int, help="sequences at once (default: by the size of the logits)")
    parser.add_argument("--documents-apart", action="store_true", help="no attention across documents, as in rung 29")
    parser.add_argument("--device", default=pick_device(), help="default: %(default)s")
    args = parser.parse_args(argv)
    for flag, value in [("-T", args.seq_len), ("--batch-size", args.batch_size)]:
        if value is not None and value < 1:
            sys.exit(f"error: {flag} {value}: out of range; give at least 1")
    return args


def main(argv=None):
    args = parse_args(argv)
    tokens, source, theirs = open_data(args.data)
    model, tokenizer = load_model(args.model, args.device)
    if args.documents_apart and hasattr(model, "gpt"):  # the script's own model (sample.py)
        sys.exit("error: --documents-apart: models of rungs 20 to 22, 30 and 31 cannot do that; leave it out")
    vocab_size, longest = model.config.vocab_size, model.config.max_position_embeddings
    T = args.seq_len or getattr(model.config, "trained_length", None) or min(longest, 1024)
    if T > longest:
        sys.exit(f"error: -T {T}: the model's longest sequence is {longest}; lower -T")
    if (tokenizer.name, tokenizer.json) != (theirs.name, theirs.json):
        tokens = encode_again(tokens, theirs, tokenizer)
    batch_size = args.batch_size or max(1, min(LOGITS // (T * vocab_size), TOKENS // T))
    end_of_text = tokenizer.end_of_text if args.documents_apart else None
    total, count = losses(model, tokens, T, batch_size, end_of_text)
    first, second = ((total[half].sum() / count[half].sum()).item() for half in (slice(T // 2), slice(T // 2, T)))
    if second > first + 0.1:
        warn(f"the second halves of the sequences are predicted worse ({second:.2f} nats per token) than the first"
             f" ({first:.2f}): the model was probably trained with a smaller -T; give that one")
    loss = total.sum() / (len(tokens) - 1)
    n_bytes = int(tokenizer.byte_lengths()[tokens[1:]].sum())
    print(f"{args.model} on {args.data / 'val.bin'} ({source}): {len(tokens) - 1:,} {tokenizer.name} tokens,"
          f" {n_bytes:,} bytes, T={T}")
    print(f"loss: {loss:.4f} nats per token | perplexity: {loss.exp():.2f}"
          f" | bits per byte: {total.sum() / math.log(2) / n_bytes:.4f}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of a file's name
    logging.disable(logging.WARNING)  # transformers imports torchao if installed, which warns of what it lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except RuntimeError as error:
        if "no kernel image" in str(error):  # as in the training scripts
            sys.exit("error: --device cuda: this torch was not built for this GPU; see python -m ladder check")
        if "out of memory" not in str(error) and "allocate memory" not in str(error):
            raise
        sys.exit("error: out of memory; give a smaller --batch-size, or a shorter -T")
