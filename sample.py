"""Generate text with a trained model: a checkpoint of any rung, or a Hugging Face model.

    python sample.py model.pt --prompt "ROMEO:" --num-samples 3
    python sample.py gpt2 --prompt "Hello, I'm a language model," --top-k 50    # a name or a folder

The weights are converted to a transformers model (convert.py), whose generate() provides the
key-value cache, sampling and streaming. For some scripts, such as `rope`, transformers has no such
model. Then the script's own model generates, without a cache. If the prompt and the new tokens
exceed the model's longest sequence, the beginning of the prompt is cut off.
"""
import argparse
import logging
import os
import sys

import torch

from convert import (
    import_transformers,
    is_model_file,
    load_hugging_face,
    load_script,
    read_file,
    refuse_other_things,
    to_transformers,
)
from data import vocabulary
from data.texts import warn


def script_model(name, saved):
    """The model of a file's own script, with transformers' generate()."""
    transformers = import_transformers()
    from transformers.modeling_outputs import CausalLMOutput

    class Model(transformers.PreTrainedModel, transformers.GenerationMixin):
        def __init__(self, config, gpt):
            super().__init__(config)
            self.gpt = gpt

        def forward(self, input_ids, **_):
            return CausalLMOutput(logits=self.gpt(input_ids))

    try:
        script = load_script(saved["script"])
        gpt = script.GPT(script.GPTConfig(**saved["config"]))
        gpt.load_state_dict(saved["model"])
    except ValueError as error:
        sys.exit(f"error: {name}: {error}; give a file that --save wrote")
    except (TypeError, RuntimeError):
        sys.exit(f"error: {name}: not a model of {saved['script']} as it is here;"
                 " give a file that it wrote")
    config = transformers.PreTrainedConfig()
    config.vocab_size = gpt.config.vocab_size
    config.max_position_embeddings = gpt.config.block_size
    config.eos_token_id = saved["end_of_text"]
    model = Model(config, gpt)
    model.generation_config.use_cache = False
    return model.eval()


def load_model(name, device):
    """The model of a file, a Hugging Face folder or a name on the hub, and its tokenizer.

    Exits with one line when one of them is missing or does not fit.
    """
    refuse_other_things(name)
    try:
        if is_model_file(name):
            saved = read_file(name)
            tokenizer = vocabulary.restore(*[saved[key] for key in vocabulary.FIELDS])
            try:
                model = to_transformers(saved)
            except ValueError:  # neither a GPT-2 nor a Qwen3
                model = script_model(name, saved)
            model.config.trained_length = saved["T"]
        else:
            model = load_hugging_face(name)
            tokenizer = vocabulary.from_hugging_face(name)
            forget_generation_config(model, tokenizer)
    except vocabulary.NoTokenizer as error:
        sys.exit(f"error: {name}: no usable tokenizer ({error});"
                 " give a folder that has one, or connect to the network")
    if tokenizer.vocab_size > model.config.vocab_size:
        sys.exit(f"error: {name}: its tokenizer has {tokenizer.vocab_size} tokens, more than the"
                 f" model, {model.config.vocab_size}; give a folder whose tokenizer is the model's")
    try:
        return model.to(device), tokenizer
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"error: --device {device}: not available here ({vocabulary.reason(error)});"
                 " try --device cpu")


def forget_generation_config(model, tokenizer):
    """Keep the end-of-text ids of a folder's generation_config.json, and nothing else of it."""
    end_ids = model.generation_config.eos_token_id  # None, one or several
    if end_ids is None:
        end_ids = tokenizer.end_of_text
    model.generation_config = import_transformers().GenerationConfig(eos_token_id=end_ids)


def pick_device():
    """The accelerator, if there is one."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.mps.is_available():
        return "mps"
    return "cpu"


def parse_args(argv=None):
    """Parse the command line; a mistake ends in argparse's error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = parser.add_argument
    flag("model", help="a checkpoint file, or a Hugging Face folder or name")
    flag("--prompt", default="", help="text to continue; empty: start a document")
    flag("--num-samples", type=int, default=1, help="number of texts to generate")
    flag("--max-new-tokens", type=int, default=200, help="most new tokens per text")
    flag("--temperature", type=float, default=0.8, help="randomness; 0: take the likeliest token")
    flag("--top-k", type=int, default=0, help="keep only the k likeliest tokens; 0: all")
    flag("--top-p", type=float, default=1.0, help="keep the likeliest tokens, up to this share")
    flag("--seed", type=int, default=1337, help="random seed of the sampling")
    flag("--device", default=pick_device(), help="device to compute on")
    args = parser.parse_args(argv)
    if args.num_samples < 1 or args.max_new_tokens < 1:
        parser.error("--num-samples and --max-new-tokens must be at least 1")
    if not (args.temperature == 0 or args.temperature >= 0.001):
        parser.error("--temperature must be 0, or at least 0.001")
    if args.top_k < 0:
        parser.error("--top-k must be at least 0")
    if not 0 < args.top_p <= 1:
        parser.error("--top-p must be above 0 and at most 1")
    return args


def encode_prompt(tokenizer, prompt):
    """The token ids of a prompt; unlike in a training text, a special token in it is one token."""
    special = tokenizer.special_tokens  # {text: id}
    ids = []
    for part in vocabulary.pattern_of(special).split(prompt):
        if part in special:
            ids.append(special[part])
        else:
            ids += tokenizer.encode(part).tolist()
    return ids


def fit_prompt(ids, new_tokens, longest):
    """The end of the prompt that leaves room for `new_tokens`; exits if not one token does."""
    room = longest - new_tokens
    if room < 1:
        sys.exit(f"error: --max-new-tokens {new_tokens}: the model's longest sequence, with the"
                 f" prompt, is {longest}; give fewer")
    if len(ids) > room:
        warn(f"the prompt's first {len(ids) - room} tokens do not fit and are left out")
    return ids[-room:]


def main(argv=None):
    args = parse_args(argv)
    model, tokenizer = load_model(args.model, args.device)
    if isinstance(tokenizer, vocabulary.OwnIds):
        sys.exit(f"error: {args.model}: was trained on token ids without a tokenizer; generate ids"
                 " in Python, as docs/own_text.md says")
    ids = encode_prompt(tokenizer, args.prompt)
    if not ids:
        ids = [tokenizer.end_of_text]
    is_bytes = len(ids) >= len(args.prompt)
    if args.prompt.endswith(" ") and not is_bytes:
        warn("the prompt ends in a blank, which most tokens begin with: leave it out")
    ids = fit_prompt(ids, args.max_new_tokens, model.config.max_position_embeddings)
    trained_length = getattr(model.config, "trained_length", None)  # not known of Hugging Face's
    if trained_length and len(ids) + args.max_new_tokens > trained_length:
        warn(f"the model was trained on sequences of {trained_length} tokens; beyond that its text"
             " gets worse: shorten the prompt, or give fewer --max-new-tokens")
    x = torch.tensor([ids], device=args.device)  # (1, T)

    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {
            "do_sample": True,
            "temperature": args.temperature,
            "top_k": args.top_k,
            "top_p": args.top_p,
        }
    streamer = import_transformers().TextStreamer(tokenizer, skip_prompt=True)
    torch.manual_seed(args.seed)
    for number in range(1, args.num_samples + 1):
        if args.num_samples > 1:
            print(f"--- sample {number} of {args.num_samples}")
        print(args.prompt, end="", flush=True)
        with torch.inference_mode():
            model.generate(
                x,
                attention_mask=torch.ones_like(x),
                max_new_tokens=args.max_new_tokens,
                pad_token_id=0,
                streamer=streamer,
                **sampling,
            )


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # transformers imports torchao, which warns of what it lacks
    sys.stdout.reconfigure(errors="replace")  # a file on Windows: cp1252 lacks most characters
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
    except BrokenPipeError:  # `| head` has read enough; Python's own last flush must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
