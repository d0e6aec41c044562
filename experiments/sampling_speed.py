"""How much the key-value cache speeds sampling up: the same greedy text with it and without.

    python -m experiments.sampling_speed model.pt [--new-tokens 512]

With the cache each new token costs one position; without it the whole text so far is read again for each. Prints the
tokens per second of both, the better of two rounds in turn, and their ratio. Takes the models that sample.py takes.
"""
import argparse
import logging
import time

import torch

from sample import load_model, pick_device


@torch.inference_mode()
def tokens_per_second(model, new_tokens, use_cache):
    """(tokens per second of one greedy sequence that <|endoftext|> begins, its token ids)."""
    x = torch.full((1, 1), model.config.eos_token_id, device=model.device)
    t0 = time.perf_counter()
    ids = model.generate(x, attention_mask=torch.ones_like(x), do_sample=False, use_cache=use_cache, pad_token_id=0,
                         min_new_tokens=new_tokens, max_new_tokens=new_tokens)
    ids = ids[0].tolist()  # waits for the device
    return new_tokens / (time.perf_counter() - t0), ids


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint file, a Hugging Face folder or a name")
    parser.add_argument("--new-tokens", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--device", default=pick_device(), help="default: %(default)s")
    args = parser.parse_args(argv)
    model, _ = load_model(args.model, args.device)
    tokens_per_second(model, 1, True)  # warms up
    runs = [(use_cache, *tokens_per_second(model, args.new_tokens, use_cache)) for use_cache in (True, False) * 2]
    cached, uncached = (max(speed for use_cache, speed, _ in runs if use_cache is wanted) for wanted in (True, False))
    same = all(ids == runs[0][2] for *_, ids in runs)
    print(f"{args.new_tokens} tokens on {args.device}: {cached:.1f} tokens/sec with the cache, {uncached:.1f} without: "
          f"{cached / uncached:.1f} times as fast, {'the same text' if same else 'texts that differ'}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # transformers imports torchao, if it is there, which tells what it lacks
    main()
