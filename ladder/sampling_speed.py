"""How much the key-value cache speeds sampling up: the same greedy text with it and without.

    python -m ladder.sampling_speed model.pt [new tokens]           # default: 512

With the cache each new token costs one position; without it the whole text so far is read again for each. Prints tokens
per second of both, in turn and twice, and their ratio. Takes what sample.py takes.
"""
import sys
import time

import torch
from tqdm import tqdm

from sample import END_OF_TEXT, load_model


@torch.inference_mode()
def tokens_per_second(model, new_tokens, use_cache):
    """(tokens per second of one greedy sequence from <|endoftext|> on, its token ids)."""
    x = torch.full((1, 1), END_OF_TEXT)
    started = time.perf_counter()
    ids = model.generate(x, attention_mask=torch.ones_like(x), do_sample=False, use_cache=use_cache, pad_token_id=0,
                         min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    return new_tokens / (time.perf_counter() - started), ids[0].tolist()


def main(name, new_tokens=512):
    model, _ = load_model(name)
    if not 1 <= new_tokens < model.config.n_positions:
        sys.exit(f"error: {new_tokens} new tokens: from 1 to {model.config.n_positions - 1} fit into this model")
    tokens_per_second(model, 5, True)  # warms up
    speeds, texts = {True: [], False: []}, set()
    for use_cache in tqdm([True, False, True, False], desc="sampling", disable=None):
        speed, ids = tokens_per_second(model, new_tokens, use_cache)
        speeds[use_cache].append(speed)
        texts.add(tuple(ids))
    with_cache, without = max(speeds[True]), max(speeds[False])
    print(f"{new_tokens} tokens: {with_cache:.1f} tokens/sec with the cache, {without:.1f} without: "
          f"{with_cache / without:.1f} times as fast, {'the same text' if len(texts) == 1 else 'texts that differ'}")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or not all(word.isdigit() for word in sys.argv[2:]):
        sys.exit(__doc__)
    main(sys.argv[1], *map(int, sys.argv[2:]))
