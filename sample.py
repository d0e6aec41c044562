"""Text from a trained model: a checkpoint of any rung, or Hugging Face weights.

    python sample.py model.pt --prompt "ROMEO:" --num-samples 3
    python sample.py gpt2 --prompt "Hello, I'm a language model," --top-k 50      # a Hugging Face name or folder

The weights become a transformers model (convert.py), whose generate() provides the key-value cache, sampling and
streaming. Rungs 20 to 22, 30 and 31, for which transformers has no model, use their own script's, without a cache.
A prompt that leaves no room for the new tokens in the model's longest sequence loses its beginning.
"""
import argparse
import contextlib
import logging
import os
import sys
from pathlib import Path

import torch

from convert import load_checkpoint, load_hugging_face, load_script, refuse_folder, to_transformers
from data import vocabulary
from data.prepare import warn


def to_model(checkpoint):
    """A checkpoint's model with transformers' generate(); raises what load_checkpoint expects if it has none."""
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    with contextlib.suppress(KeyError, RuntimeError):  # neither a GPT-2 nor a Qwen3
        return to_transformers(checkpoint)
    script, shape = load_script(checkpoint["script"]), checkpoint["config"]

    class Model(PreTrainedModel, GenerationMixin):
        def __init__(self, config):
            super().__init__(config)
            self.gpt = script.GPT(script.GPTConfig(**shape))

        def forward(self, input_ids, **_):
            return CausalLMOutput(logits=self.gpt(input_ids))

    config = PretrainedConfig()
    config.vocab_size, config.max_position_embeddings = shape["vocab_size"], shape["block_size"]
    config.eos_token_id = checkpoint["end_of_text"]
    model = Model(config)
    model.gpt.load_state_dict(checkpoint["model"])
    model.generation_config.use_cache = False
    return model.eval()


def load_model(name, device):
    """(The model in a checkpoint file, a Hugging Face folder or on the hub, on the device; its tokenizer).

    Exits with one line when one of them is missing or does not fit.
    """
    refuse_folder(name)
    try:
        if Path(name).is_file() or name.endswith(".pt"):
            model, checkpoint = load_checkpoint(name, to_model)
            model.config.trained_length = checkpoint["T"]
            tokenizer = vocabulary.restore(*map(checkpoint.get, vocabulary.FIELDS))
        else:
            model, tokenizer = load_hugging_face(name), vocabulary.from_hugging_face(name)
    except vocabulary.NoTokenizer as error:
        sys.exit(f"error: {name}: no usable tokenizer ({error}); give a folder that has one, or connect to the network")
    if tokenizer.vocab_size > model.config.vocab_size:
        sys.exit(f"error: {name}: its tokenizer has {tokenizer.vocab_size} tokens, more than the model,"
                 f" {model.config.vocab_size}; give a folder whose tokenizer is the model's")
    try:
        return model.to(device), tokenizer
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"error: --device {device}: not available here ({str(error).splitlines()[0]}); try --device cpu")


def pick_device():
    """The accelerator if there is one."""
    return next((name for name in ("cuda", "mps") if getattr(torch, name).is_available()), "cpu")


def parse_args(argv=None):
    """The command line's flags; exits with one line when a value is out of range."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint file, or a Hugging Face folder or name")
    parser.add_argument("--prompt", default="", help="default: the start of a document")
    parser.add_argument("--num-samples", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens; 0: all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="only the likeliest tokens, up to this probability")
    parser.add_argument("--seed", type=int, default=1337, help="default: %(default)s")
    parser.add_argument("--device", default=pick_device(), help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.prompt != args.prompt.encode(errors="replace").decode():  # bytes that the shell could not decode
        sys.exit("error: --prompt: is not UTF-8; convert it, for example with iconv")
    for flag, value, in_range, need in [
        ("--num-samples", args.num_samples, args.num_samples >= 1, "at least 1"),
        ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens >= 1, "at least 1"),
        ("--temperature", args.temperature, args.temperature == 0 or 0.001 <= args.temperature < 1000, "0 or 0.001 up"),
        ("--top-k", args.top_k, args.top_k >= 0, "at least 0"),
        ("--top-p", args.top_p, 0 < args.top_p <= 1, "more than 0, at most 1"),
        ("--seed", args.seed, 0 <= args.seed < 2**63, "at least 0"),
    ]:
        if not in_range:
            sys.exit(f"error: {flag} {value:g}: out of range; give {need}")
    return args


def fit(ids, new_tokens, longest):
    """The end of the prompt that leaves room for `new_tokens`; exits with one line when even one token does not."""
    if new_tokens >= longest:
        sys.exit(f"error: --max-new-tokens {new_tokens}: the model's longest sequence, with the prompt, is {longest};"
                 " give fewer")
    if len(ids) + new_tokens > longest:
        warn(f"the prompt's first {len(ids) + new_tokens - longest} tokens do not fit and are left out")
    return ids[-(longest - new_tokens) :]


def main(argv=None):
    args = parse_args(argv)
    model, tokenizer = load_model(args.model, args.device)
    from transformers import TextStreamer

    longest = model.config.max_position_embeddings
    ids = fit(tokenizer.encode(args.prompt).tolist() or [tokenizer.end_of_text], args.max_new_tokens, longest)
    trained = getattr(model.config, "trained_length", None)  # not known of a Hugging Face model
    if trained and len(ids) + args.max_new_tokens > trained:
        warn(f"the model was trained on sequences of {trained} tokens; beyond that its text gets worse:"
             " shorten the prompt, or give fewer --max-new-tokens")
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
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that the model writes
    logging.disable(logging.WARNING)  # transformers imports torchao if installed, which warns of what it lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except BrokenPipeError:  # `| head` has read enough; what is left must not fail again when the program ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
