"""A trained checkpoint as a Hugging Face folder, which `from_pretrained` and `pipeline("text-generation")` load.

    python export.py model.pt my-gpt2               # a file of --save, or a checkpoint: checkpoints/<script>/newest.pt
    python speedup_10_fused_adamw.py --pretrained my-gpt2       # and back: train it further

The folder holds a GPT-2 up to rung 19 and a Qwen3 from rung 23 to 29, with the same logits, and the tokenizer;
transformers has no model for the others. GPT-2's "Conv1D" layers store their matrices transposed, the rows that
pad the vocabulary (rung 7) are cut off, and untied embeddings stay untied (baseline.py's; no other script can train
such a model further).
"""
import argparse
import logging
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from data import vocabulary
from data.prepare import warn

SHAPE = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd"}
QWEN3_NAMES = {  # what the parameters of rung 23 are called in transformers
    "transformer.wte": "model.embed_tokens", "transformer.h": "model.layers", "transformer.ln_f": "model.norm",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", ".attn.": ".self_attn.", "c_proj": "o_proj",
}


def to_transformers(checkpoint):
    """A checkpoint's model as a transformers GPT-2 or Qwen3; raises KeyError or RuntimeError if it is neither."""
    end = checkpoint["end_of_text"]
    config, weights = checkpoint["config"], dict(checkpoint["model"])
    if config.keys() != SHAPE:
        raise KeyError("not the shape of a GPT")
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][: config["vocab_size"]]  # the rows after those are padding
    convert = to_qwen3 if "transformer.h.0.mlp.gate_proj.weight" in weights else to_gpt2
    return convert(config, weights, bos_token_id=end, eos_token_id=end).eval()


def refuse_folder(path):
    """Exit if `path` is a folder of checkpoints; the line says which file has the model, or how to get it."""
    folder = Path(path)
    if (folder / ".metadata").exists() or (folder / "newest" / ".metadata").exists():  # of torch.distributed.checkpoint
        sys.exit(f"error: {path}: sharded checkpoints, not a model; resume with --save FILE, then give FILE")
    if (folder / "newest.pt").exists():
        sys.exit(f"error: {path}: a folder of checkpoints, not a model; give {folder / 'newest.pt'}")


def load_checkpoint(path, convert=to_transformers):
    """(The model in a checkpoint file, as `convert` makes it; the file's contents); exits with one line."""
    refuse_folder(path)
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not check the sums that torch.save writes
            if file.testzip():
                raise zipfile.BadZipFile
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint = {"tokenizer_json": None, "end_of_text": 50256} | checkpoint  # older files have GPT-2's tokens
        keys = ("script", "config", "model", "tokenizer", "tokenizer_json", "end_of_text")
        checkpoint = {name: checkpoint[name] for name in keys}
    except OSError as error:
        sys.exit(f"error: {path}: cannot be read ({error.strerror}); give a file that a rung wrote")
    except Exception:  # any exception; some advise loading without weights_only, so none is passed on
        sys.exit(f"error: {path}: damaged, or not a checkpoint; give a file that a rung wrote")
    try:
        return convert(checkpoint), checkpoint
    except (KeyError, RuntimeError):  # names that are missing; names or shapes that differ
        sys.exit(f"error: {path}: neither a GPT-2 (rungs 0 to 19) nor a Qwen3 (23 to 29); give a checkpoint of one")


def restore_tokenizer(checkpoint):
    """The tokenizer of a checkpoint's model; raises NoTokenizer."""
    return vocabulary.restore(*(checkpoint[key] for key in ("tokenizer", "tokenizer_json", "end_of_text")))


def to_gpt2(config, weights, **ends):
    """A GPT2LMHeadModel with the weights of a GPT of rungs 0 to 19; raises KeyError or RuntimeError for others."""
    from transformers import GPT2Config, GPT2LMHeadModel

    for name in weights:
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            weights[name] = weights[name].t().contiguous()  # nn.Linear stores (out, in), Conv1D (in, out)
    tied = torch.equal(weights["transformer.wte.weight"], weights["lm_head.weight"])
    model = GPT2LMHeadModel(GPT2Config(
        n_positions=config["block_size"], vocab_size=config["vocab_size"], n_layer=config["n_layer"],
        n_head=config["n_head"], n_embd=config["n_embd"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=tied, **ends,
    ))
    model.load_state_dict(weights)
    return model


def to_qwen3(config, weights, **ends):
    """A Qwen3ForCausalLM with the weights of a GPT of rungs 23 to 29; raises RuntimeError for others."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(
        max_position_embeddings=config["block_size"], vocab_size=config["vocab_size"],
        num_hidden_layers=config["n_layer"], num_attention_heads=config["n_head"], num_key_value_heads=config["n_head"],
        hidden_size=config["n_embd"], head_dim=config["n_embd"] // config["n_head"],
        intermediate_size=len(weights["transformer.h.0.mlp.gate_proj.weight"]), tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000}, rms_norm_eps=1e-6, **ends,
    ))
    renamed = {}
    for name, weight in weights.items():
        for ours, theirs in QWEN3_NAMES.items():
            name = name.replace(ours, theirs)
        parts = "qkv" if "c_attn" in name else "q"  # one matrix here, three there
        for part, matrix in zip(parts, weight.chunk(len(parts)), strict=True):
            renamed[name.replace("c_attn", f"{part}_proj")] = matrix
    model.load_state_dict(renamed)
    return model


def write_folder(model, tokenizer, folder):
    """Write model and tokenizer under a temporary name beside `folder`, then rename; a failure leaves nothing."""
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.absolute().parent) as parent:
        partial = Path(parent) / folder.name
        model.save_pretrained(partial)
        if tokenizer:
            tokenizer.to_transformers().save_pretrained(partial)
        partial.rename(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args(argv)
    if args.folder.exists():
        sys.exit(f"error: {args.folder}: exists already; name a new folder")
    model, checkpoint = load_checkpoint(args.checkpoint)
    try:
        tokenizer = restore_tokenizer(checkpoint)
    except vocabulary.NoTokenizer as error:
        if checkpoint["tokenizer"] != "gpt2":
            sys.exit(f"error: {args.checkpoint}: its tokenizer {error}; give a file that a rung wrote")
        warn(f"{error}: the folder has no tokenizer, so pipeline() needs one from elsewhere")
        tokenizer = None
    try:
        write_folder(model, tokenizer, args.folder)
    except Exception as error:  # on a full disk, safetensors, tokenizers and the file system raise different ones
        sys.exit(f"error: {args.folder}: cannot be written ({error}); name a folder elsewhere, or make room")
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of a folder's name
    logging.disable(logging.WARNING)  # transformers imports torchao if installed, which warns of what it lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: no folder was written")
