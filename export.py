"""A trained checkpoint as a Hugging Face folder, which `from_pretrained` and `pipeline("text-generation")` load.

    python export.py model.pt my-gpt2               # from --save of any rung, or a checkpoint of beyond/
    python speedup_10_fused_adamw.py --pretrained my-gpt2       # and the way back: a rung goes on with it

The model in the folder gives the same logits: GPT-2's "Conv1D" layers store their matrices the other way round, the
rows that pad the vocabulary go, and an output layer that is not tied to the embedding (baseline.py) stays its own: only
baseline.py goes on with such a model.
"""
import argparse
import logging
import sys
import tempfile
from pathlib import Path

import torch

from data import prepare

GPT2_TOKENS = "gpt2"  # the name of tiktoken's encoding, in checkpoints
SHAPE = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"}


def load_checkpoint(path):
    """{"config", "model", ...} from a file that a rung wrote; exits with one line when it is none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        sys.exit(f"error: {path} cannot be read ({error.strerror})")
    except Exception:  # no torch file, or a damaged one: each its own class, with advice that is none here
        checkpoint = None
    parts = [checkpoint.get(name) for name in ("config", "model")] if isinstance(checkpoint, dict) else [None]
    if not all(isinstance(part, dict) for part in parts):
        sys.exit(f"error: {path} is no checkpoint, or a damaged one: give a file that --save or beyond/ wrote")
    return checkpoint


def tokenizer_of(checkpoint):
    """The name of the tokenizer of the text that the model was trained on."""
    return checkpoint.get("tokenizer", GPT2_TOKENS)  # an older file does not say


def to_transformers(checkpoint):
    """The checkpoint's model as a transformers GPT2LMHeadModel; exits with one line when it is not a GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config, weights = checkpoint["config"], dict(checkpoint["model"])
    if not SHAPE <= config.keys() <= SHAPE | {"n_tokens"}:
        sys.exit(f"error: this checkpoint's architecture ({sorted(config)}) is not GPT-2's")
    n_tokens = config.get("n_tokens", config["vocab_size"])  # the rest of the rows is padding
    end_of_text = n_tokens - 1 if n_tokens == prepare.VOCAB_SIZE else None
    try:
        for name in ("transformer.wte.weight", "lm_head.weight"):
            weights[name] = weights[name][:n_tokens]
        tied = torch.equal(weights["transformer.wte.weight"], weights["lm_head.weight"])
        for name in weights:
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                weights[name] = weights[name].t().contiguous()
        model = GPT2LMHeadModel(GPT2Config(
            n_positions=config["block_size"], vocab_size=n_tokens, n_layer=config["n_layer"], n_head=config["n_head"],
            n_embd=config["n_embd"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=tied,
            bos_token_id=end_of_text, eos_token_id=end_of_text,
        ))
        model.load_state_dict(weights)
    except Exception as error:  # missing names, other shapes, other types: each its own class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        sys.exit(f"error: this checkpoint's weights are not those of a GPT-2 ({reason})")
    return model.eval()


def write_tokenizer(folder):
    """GPT-2's tokenizer beside the model, made from tiktoken's; without a network only the model is written."""
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    try:
        encoding = prepare.fetch_merges()
    except prepare.NoMerges as error:
        prepare.warn(f"{error}: the folder has no tokenizer, so pipeline() needs one from elsewhere")
        return
    end = "<|endoftext|>"
    converter = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=[end])
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # instead of from a file
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted(), bos_token=end, eos_token=end)
    tokenizer.save_pretrained(folder)


def write_folder(model, tokenizer_name, folder):
    """Write model and tokenizer under a temporary name beside `folder`, then rename. Leaves nothing when it fails."""
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.absolute().parent) as parent:
        partial = Path(parent) / folder.name
        model.save_pretrained(partial)
        if tokenizer_name == GPT2_TOKENS and model.config.vocab_size == prepare.VOCAB_SIZE:
            write_tokenizer(partial)
        partial.rename(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    if args.folder.exists():
        sys.exit(f"error: {args.folder} exists: name a new folder")
    checkpoint = load_checkpoint(args.checkpoint)
    model = to_transformers(checkpoint)
    try:
        write_folder(model, tokenizer_of(checkpoint), args.folder)
    except Exception as error:  # safetensors, tokenizers and the file system: each its own class for a full disk
        sys.exit(f"error: {args.folder} could not be written ({error})")
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # transformers imports torchao, if it is there, which tells what it lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
