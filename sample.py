"""Text from a trained model: a checkpoint of any rung, or Hugging Face weights.

    python sample.py model.pt --prompt "ROMEO:" --num-samples 3
    python sample.py gpt2 --prompt "Hello, I'm a language model," --top-k 50      # a Hugging Face name or folder

The weights become a transformers GPT2LMHeadModel (export.py), whose generate() has the key-value cache, the sampling
and the streaming: nothing of that is written anew here. A prompt that leaves no room for the new tokens in the model's
longest sequence is cut at its front.
"""
import argparse
import sys
from pathlib import Path

import torch

from export import load_checkpoint, to_transformers


class Tokenizer:
    """Text to GPT-2 token ids and back, with the decode() that transformers' TextStreamer asks for."""

    def __init__(self):
        sys.path.insert(0, str(Path(__file__).resolve().parent / "data"))
        import prepare

        self.tokens = prepare.load_tokenizer()  # tiktoken's, or loudly the single bytes where there is no network

    def encode(self, text):
        return self.tokens.encode_to_numpy(text).astype("int64").tolist()

    def decode(self, ids, **_):
        return self.tokens.decode(list(ids))


def load_model(name):
    """A transformers GPT-2 from a checkpoint file, a Hugging Face folder or a name; exits with one line without."""
    if Path(name).is_file():
        return to_transformers(load_checkpoint(name))
    from transformers import GPT2LMHeadModel

    try:
        return GPT2LMHeadModel.from_pretrained(name).eval()
    except Exception as error:  # no network, no such name, a damaged folder: each its own class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        sys.exit(f"error: {name}: neither a checkpoint file nor a GPT-2 of Hugging Face ({reason})")


def parse_args(argv=None):
    """The command line's flags, checked; exits with one line when one cannot be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint file, a Hugging Face folder or a name")
    parser.add_argument("--prompt", default="", help="default: <|endoftext|>, the start of a document")
    parser.add_argument("--num-samples", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="of the k likeliest tokens; 0: all (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="the likeliest p of the mass (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1337, help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    args = parser.parse_args(argv)
    for flag, value in {"--num-samples": args.num_samples, "--max-new-tokens": args.max_new_tokens}.items():
        if value < 1:
            sys.exit(f"error: {flag} {value}: must be at least 1")
    if not 0 < args.top_p <= 1:
        sys.exit(f"error: --top-p {args.top_p:g}: must be above 0 and at most 1")
    if args.top_k < 0:
        sys.exit(f"error: --top-k {args.top_k}: must be at least 0")
    if not 0 <= args.temperature < float("inf"):
        sys.exit(f"error: --temperature {args.temperature:g}: must be at least 0")
    return args


def fit(ids, new_tokens, longest):
    """The end of the prompt that leaves room for `new_tokens`; exits with one line when even one token does not."""
    if new_tokens >= longest:
        sys.exit(f"error: --max-new-tokens {new_tokens}: with the prompt, this model's longest sequence is {longest}")
    if len(ids) + new_tokens > longest:
        print(f"WARNING: the prompt's first {len(ids) + new_tokens - longest} tokens do not fit", file=sys.stderr)
    return ids[-(longest - new_tokens) :]


def main(argv=None):
    args = parse_args(argv)
    from transformers import TextStreamer

    model = load_model(args.model).to(args.device)
    tokenizer = Tokenizer()
    ids = tokenizer.encode(args.prompt) or [model.config.vocab_size - 1]
    ids = fit(ids, args.max_new_tokens, model.config.n_positions)
    x = torch.tensor([ids], device=args.device)  # (1, T)
    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    torch.manual_seed(args.seed)
    for number in range(1, args.num_samples + 1):
        if args.num_samples > 1:
            print(f"--- sample {number} of {args.num_samples}")
        print(args.prompt, end="", flush=True)
        with torch.inference_mode():
            model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=args.max_new_tokens, pad_token_id=0,
                           streamer=TextStreamer(tokenizer, skip_prompt=True), **sampling)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
