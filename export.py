"""A trained checkpoint as a Hugging Face folder, which `from_pretrained` and `pipeline("text-generation")` load.

    python export.py model.pt my-gpt2               # from --save of any rung, or a checkpoint of beyond/
    python speedup_10_fused_adamw.py --pretrained my-gpt2       # and the way back: any rung goes on with it

The model in the folder gives the same logits: GPT-2's "Conv1D" layers store their matrices the other way round, the
rows that pad the vocabulary go, and an output layer that is not tied to the embedding (baseline.py) stays its own.
"""
import argparse
import shutil
import sys
from pathlib import Path

import torch

GPT2_TOKENS = 50257
SHAPE = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"}


def load_checkpoint(path):
    """{"config", "model", ...} from a file that a rung wrote; exits with one line when it is none."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # no such file, no torch file, a damaged one: each its own class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        sys.exit(f"error: {path} cannot be read as a checkpoint ({reason})")
    if not isinstance(checkpoint, dict) or not {"config", "model"} <= checkpoint.keys():
        sys.exit(f"error: {path} is no checkpoint of these scripts: give a file that --save or beyond/ wrote")
    return checkpoint


def to_transformers(checkpoint):
    """The checkpoint's model as a transformers GPT2LMHeadModel; exits with one line when it is not a GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config, weights = checkpoint["config"], dict(checkpoint["model"])
    if not SHAPE <= config.keys() <= SHAPE | {"n_tokens"}:
        sys.exit(f"error: this checkpoint's architecture ({sorted(config)}) is not GPT-2's")
    n_tokens = config.get("n_tokens", config["vocab_size"])  # the rest of the rows is padding
    end_of_text = n_tokens - 1 if n_tokens == GPT2_TOKENS else None
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
    except (KeyError, RuntimeError, ValueError) as error:
        sys.exit(f"error: this checkpoint's weights are not those of a GPT-2 ({str(error).splitlines()[0]})")
    return model.eval()


def write_tokenizer(folder):
    """GPT-2's tokenizer beside the model, made from tiktoken's; without a network only the model is written."""
    import tiktoken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # requests' and tiktoken's own zoo
        print(f"WARNING: tiktoken could not fetch GPT-2's merges ({type(error).__name__}): the folder has no tokenizer,"
              " so pipeline() needs one from elsewhere", file=sys.stderr)
        return
    end = "<|endoftext|>"
    converter = TikTokenConverter(pattern=encoding._pat_str, extra_special_tokens=[end])
    converter.load_tiktoken_bpe = lambda _: encoding._mergeable_ranks  # instead of from a file
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted(), bos_token=end, eos_token=end)
    tokenizer.save_pretrained(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    if args.folder.exists():
        sys.exit(f"error: {args.folder} exists: name a new folder")
    model = to_transformers(load_checkpoint(args.checkpoint))
    partial = args.folder.with_name(args.folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        if model.config.vocab_size == GPT2_TOKENS:
            write_tokenizer(partial)
        partial.rename(args.folder)
    except Exception as error:  # safetensors, tokenizers and the file system: each its own class for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        sys.exit(f"error: {args.folder} could not be written ({error})")
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
