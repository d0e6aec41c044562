"""Convert a Hugging Face model to a file like those of --save, or such a file to a folder.

    python convert.py gpt2 gpt2.pt        # from a name on the hub or a folder: a GPT-2 or a Qwen3
    python convert.py mine.pt my-model    # from a file of --save or a checkpoint: to a folder
    python speedup_10_fused_adamw.py --pretrained gpt2.pt

A file belongs to one script. A GPT-2 becomes a file of rung 10, which the scripts from rung 7 to
`trapezoid_lr` can load. A Qwen3 becomes a file of `zero_init`, or of `grouped_query_attention` if
its heads share keys and values, as in the published ones. --script names another script, such as
baseline.py. `mup` loads only its own files. Rows that pad the vocabulary (rung 7) are initialized
as in a new model.

In the other direction, padding is cut off, untied embeddings (baseline.py) stay untied, and the
factor of `mup` on the logits moves into the last norm. Models of `rope`, `rmsnorm`, `qk_norm`,
`no_biases`, `frequency_prior` and `ngram_embeddings` are neither a GPT-2 nor a Qwen3, so they do
not become a folder. But the last two can start from a Qwen3 without shared heads, because what they
add to it starts at zero.
"""
import argparse
import contextlib
import importlib
import logging
import os
import pickle
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from data import texts, vocabulary
from data.texts import warn
from ladder.rungs.old_names import OLD_NAMES

ROOT = Path(__file__).parent
NEITHER = "neither a GPT-2 (as in rung 10) nor a Qwen3 (as in zero_init)"
FIXED = {  # what the scripts cannot choose: a model where it differs computes something else
    "gpt2": ["activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
             "layer_norm_epsilon"],
    "qwen3": ["num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias",
              "sliding_window", "rope_parameters", "tie_word_embeddings"],
}
QWEN3_NAMES = {  # our name of a part: a Qwen3's; those of a GPT-2 are ours
    "transformer.wte": "model.embed_tokens",
    "transformer.h": "model.layers",
    "transformer.ln_f": "model.norm",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    ".attn.": ".self_attn.",
    "c_proj": "o_proj",
}
# GPT-2's Conv1D stores its matrix as (in, out), nn.Linear as (out, in)
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def import_transformers():
    """transformers, imported only when it is needed, since that takes seconds.

    Exits with one line where it is missing or broken.
    """
    try:
        import transformers
        from transformers import GPT2LMHeadModel, Qwen3ForCausalLM  # noqa: F401, with all they need
    except ImportError as error:
        sys.exit(f"error: transformers: cannot be imported ({vocabulary.reason(error)});"
                 " pip install -r requirements.txt")
    return transformers


# ---- our files -----------------------------------------------------------------------------------

def load_script(name):
    """The training script of a file name, today's or an earlier one, as a module; or ValueError."""
    scripts = [ROOT / "baseline.py", *ROOT.glob("speedup_*.py"), ROOT / "ddp_run.py"]
    for path in scripts:
        if path.name == name:
            return importlib.import_module(path.stem)
    label = OLD_NAMES.get(name.removesuffix(".py"))
    for path in ROOT.glob("beyond/**/*.py"):
        if name == path.name or label == path.stem.lstrip("0123456789_"):
            module = path.relative_to(ROOT).with_suffix("")
            return importlib.import_module(".".join(module.parts))
    raise ValueError(f"{name} is not a script of the ladder")


def is_model_file(name):
    """Whether a name means one of our files, not a Hugging Face folder or name."""
    return Path(name).is_file() or name.endswith(".pt")


def refuse_other_things(path):
    """Exit if `path` is not a model, but belongs to one; the line says what to give instead."""
    folder = Path(path)
    files = [folder]
    if folder.is_dir():
        files = [file for file in folder.iterdir() if file.is_file()]
    for file in files:
        texts.refuse_lfs_pointer(file)
    if folder.suffix == ".safetensors":
        sys.exit(f"error: {path}: only weights; give the folder that has config.json, too")
    sharded = list(folder.glob("step_*/.metadata"))  # by torch.distributed.checkpoint
    if sharded or (folder / ".metadata").exists():
        sys.exit(f"error: {path}: sharded checkpoints, not a model;"
                 " resume with --save FILE, then give FILE")
    files = sorted(folder.glob("step_" + 7 * "[0-9]" + ".pt"))
    if files:
        sys.exit(f"error: {path}: a folder of checkpoints, not a model; give {files[-1]}")


def read_file(path):
    """What a model's file or a checkpoint holds, a dictionary; exits with one line."""
    refuse_other_things(path)
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        sys.exit(f"error: {path}: no such file; give a file that --save wrote")
    except OSError as error:
        sys.exit(f"error: {path}: cannot be read ({error.strerror}); give a file that --save wrote")
    except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, ValueError):
        # not the reason: torch's own advice is to load it without weights_only
        saved = None
    if not isinstance(saved, dict):
        sys.exit(f"error: {path}: damaged, or not a model's file; give a file that --save wrote")
    for key in ("script", "config", "model", "T", *vocabulary.FIELDS):
        if key not in saved:
            sys.exit(f"error: {path}: not a model's file, it has no {key!r};"
                     " give a file that --save wrote")
    return saved


# ---- from ours to Hugging Face's -----------------------------------------------------------------

def to_config(shape, tied=True, **more):
    """transformers' configuration of a model whose GPTConfig is the dictionary `shape`."""
    transformers = import_transformers()
    if "n_hidden" not in shape:
        return transformers.GPT2Config(
            n_positions=shape["block_size"],
            vocab_size=shape["vocab_size"],
            n_layer=shape["n_layer"],
            n_head=shape["n_head"],
            n_embd=shape["n_embd"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=tied,
            **more,
        )
    theta = shape.get("rope_theta", 10_000.0)
    return transformers.Qwen3Config(
        max_position_embeddings=shape["block_size"],
        vocab_size=shape["vocab_size"],
        num_hidden_layers=shape["n_layer"],
        num_attention_heads=shape["n_head"],
        num_key_value_heads=shape.get("n_kv_head", shape["n_head"]),
        head_dim=shape.get("head_size", shape["n_embd"] // shape["n_head"]),
        hidden_size=shape["n_embd"],
        intermediate_size=shape["n_hidden"],
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=tied,
        **more,
    )


def to_their_weights(weights, config):
    """Our state dict with the names and layouts of a transformers model: views, not copies."""
    theirs = {}
    if config.model_type == "gpt2":
        for name, weight in weights.items():
            theirs[name] = weight.t() if name.endswith(TRANSPOSED) else weight
        return theirs
    q_rows = config.num_attention_heads * config.head_dim
    kv_rows = config.num_key_value_heads * config.head_dim
    for name, weight in weights.items():
        for ours, other in QWEN3_NAMES.items():
            name = name.replace(ours, other)
        if "c_attn" in name:  # one matrix here, three there
            q, k, v = weight.split([q_rows, kv_rows, kv_rows])
            theirs[name.replace("c_attn", "q_proj")] = q
            theirs[name.replace("c_attn", "k_proj")] = k
            theirs[name.replace("c_attn", "v_proj")] = v
        else:
            theirs[name] = weight
    return theirs


def to_transformers(saved):
    """What read_file gives as a transformers model; raises ValueError if it has no such model."""
    weights = dict(saved["model"])
    is_gpt2 = "transformer.wpe.weight" in weights
    is_qwen3 = "transformer.h.0.mlp.gate_proj.weight" in weights and "log_frequency" not in weights
    if not is_gpt2 and not is_qwen3:
        raise ValueError(NEITHER)
    if "logit_scale" in weights:  # `mup`'s factor of what the last norm gives
        scale = weights.pop("logit_scale")
        weights["transformer.ln_f.weight"] = weights["transformer.ln_f.weight"] * scale
    vocab_size = saved["config"]["vocab_size"]
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][:vocab_size]  # the rows after those are padding
    tied = torch.equal(weights["transformer.wte.weight"], weights["lm_head.weight"])
    config = to_config(
        saved["config"],
        tied,
        bos_token_id=saved["end_of_text"],
        eos_token_id=saved["end_of_text"],
    )
    model = import_transformers().AutoModelForCausalLM.from_config(config)
    try:
        model.load_state_dict(to_their_weights(weights, config))
    except RuntimeError as error:  # a script that somebody has changed
        raise ValueError(NEITHER) from error
    return model.eval()


def write_folder(file, folder):
    """Write a model's file as a Hugging Face folder, with its tokenizer."""
    saved = read_file(file)
    try:
        model = to_transformers(saved)
    except ValueError as error:
        sys.exit(f"error: {file}: {error}; give a file of one")
    try:
        tokenizer = vocabulary.restore(*[saved[key] for key in vocabulary.FIELDS])
    except vocabulary.NoTokenizer as error:
        if saved["tokenizer"] != "gpt2":
            sys.exit(f"error: {file}: its tokenizer {error}; give a file that --save wrote")
        warn(f"{error}; the folder has no tokenizer, so pipeline() needs one from elsewhere")
        tokenizer = None
    with renamed_when_whole(folder) as partial:
        model.save_pretrained(partial)
        if tokenizer and not isinstance(tokenizer, vocabulary.OwnIds):  # which have no text
            tokenizer.to_transformers().save_pretrained(partial)
    return model


# ---- from Hugging Face's to ours -----------------------------------------------------------------

def usual_script(config):
    """The script whose file is written of a Hugging Face configuration, if none is named."""
    if config.model_type == "gpt2":
        return "speedup_10_fused_adamw.py"
    usual = to_config(asdict(to_gpt_config(config, "7_zero_init.py")))
    for key in ("num_key_value_heads", "head_dim", "rope_parameters"):
        if getattr(config, key) != getattr(usual, key):
            return "grouped_query_attention.py"
    return "7_zero_init.py"


def to_gpt_config(config, script):
    """The GPTConfig of a script for a transformers configuration; ValueError if it has none."""
    GPTConfig = load_script(script).GPTConfig
    if config.model_type == "gpt2":
        if hasattr(GPTConfig, "n_hidden"):
            raise ValueError(f"a GPT-2; it fits rung 10 and scripts before rope, not {script}")
        return GPTConfig(
            block_size=config.n_positions,
            vocab_size=config.vocab_size,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
        )
    if not hasattr(GPTConfig, "n_hidden"):
        raise ValueError(f"a Qwen3; it fits swiglu and what follows it, not {script}")
    shape = {
        "block_size": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "n_layer": config.num_hidden_layers,
        "n_head": config.num_attention_heads,
        "n_embd": config.hidden_size,
        "n_hidden": config.intermediate_size,
    }
    if hasattr(GPTConfig, "n_kv_head"):  # grouped-query attention
        shape["n_kv_head"] = config.num_key_value_heads
        shape["head_size"] = config.head_dim
        shape["rope_theta"] = float(config.rope_parameters["rope_theta"])
    return GPTConfig(**shape)


def check_config(config, script):
    """Raise ValueError if a script has no such model as a transformers configuration describes."""
    ours = to_config(asdict(to_gpt_config(config, script)))
    for key in FIXED[config.model_type]:
        found, fixed = getattr(config, key), getattr(ours, key)
        if found != fixed:
            raise ValueError(f"its {key} is {found}; the scripts have {fixed}")
    if config.model_type == "gpt2" and config.n_inner not in (None, 4 * config.n_embd):
        raise ValueError(f"its n_inner is {config.n_inner}; the scripts have {4 * config.n_embd}")


def cannot_be_loaded(name, why):
    if not Path(name).exists():
        why = f"no such file or folder; on the hub: {why}"
    sys.exit(f"error: {name}: cannot be loaded ({why});"
             " give a model's file, or a GPT-2's name or folder")


def load_config(name):
    """The configuration of a GPT-2 or Qwen3 in a folder or on the hub; exits with one line."""
    transformers = import_transformers()
    if Path(name, "adapter_config.json").exists():
        cannot_be_loaded(name, "it has a LoRA adapter: merge it into its base model first, with"
                               " peft's merge_and_unload")
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        cannot_be_loaded(name, vocabulary.reason(error))
    if config.model_type not in FIXED:
        cannot_be_loaded(name, f"a {config.model_type}, neither a GPT-2 nor a Qwen3")
    return config


def load_hugging_face(name):
    """The GPT-2 or Qwen3 in a folder or on the hub, in float32; exits with one line."""
    transformers = import_transformers()
    from safetensors import SafetensorError

    load_config(name)
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False,
            ignore_mismatched_sizes=True)
    except (OSError, ValueError, LookupError, RuntimeError, ImportError, SafetensorError,
            pickle.UnpicklingError) as error:  # no network, damaged files, other shapes, quantized
        cannot_be_loaded(name, vocabulary.reason(error))
    for key, found, expected in report["mismatched_keys"]:
        cannot_be_loaded(name, f"its {key} is {tuple(found)}, its config.json says"
                               f" {tuple(expected)}")
    if report["missing_keys"]:  # transformers has drawn them at random
        cannot_be_loaded(name, "it lacks weights")
    for key in report["unexpected_keys"]:
        if not key.endswith("attn.masked_bias"):  # a constant in old files
            cannot_be_loaded(name, f"its configuration has no place for its {key}")
    return model.eval()


def from_transformers(model, script):
    """A script's GPT with a transformers model's weights; raises ValueError if one does not fit."""
    theirs = model.state_dict()
    torch.manual_seed(1337)
    gpt = load_script(script).GPT(to_gpt_config(model.config, script))
    weights = gpt.state_dict()  # views: what is copied into them fills `gpt`
    scale = weights.pop("logit_scale", None)  # `mup`'s
    ours = to_their_weights(weights, model.config)  # under their names
    for name in theirs:
        if name not in ours:
            raise ValueError(f"{script} has no place for its {name}")
        rows = len(theirs[name])  # a padded vocabulary has more
        ours[name][:rows] = theirs[name]
    for name in ours:
        if name not in theirs:
            if ours[name].any():  # what starts at zero adds nothing
                raise ValueError(f"it lacks {name}, which {script} has")
        elif not torch.equal(ours[name][: len(theirs[name])], theirs[name]):
            # one matrix here, two there, whatever the configuration says
            raise ValueError("its embeddings are untied, which only baseline.py's are")
    if scale is not None:
        weights["transformer.ln_f.weight"] /= scale
    return gpt


def read_tokenizer(name, vocab_size):
    """The tokenizer of a Hugging Face model; exits with one line if it has none that fits."""
    try:
        return vocabulary.from_hugging_face(name)
    except vocabulary.NoTokenizer as error:
        if vocab_size == vocabulary.GPT2.vocab_size:  # a Trainer may save none
            warn(f"{name}: its tokenizer {error}; taken for GPT-2's, which has as many tokens")
            return vocabulary.GPT2
        sys.exit(f"error: {name}: its tokenizer {error}; give a folder that has one")


def write_file(name, path, script=None):
    """Write a Hugging Face model as a file of a script (None: the usual one)."""
    config = load_config(name)
    try:
        if script is None:
            script = usual_script(config)
        check_config(config, script)  # before gigabytes of weights are loaded
        model = load_hugging_face(name)
        tokenizer = read_tokenizer(name, config.vocab_size)
        if tokenizer.vocab_size > config.vocab_size:
            sys.exit(f"error: {name}: its tokenizer has {tokenizer.vocab_size} tokens, more than"
                     f" the model, {config.vocab_size}; in transformers call the model's"
                     " resize_token_embeddings with the first number, and save it again")
        if tokenizer.vocab_size < config.vocab_size:  # a Qwen3 has rows that no token uses
            model.resize_token_embeddings(tokenizer.vocab_size)
        gpt = from_transformers(model, script)
    except ValueError as error:
        sys.exit(f"error: {name}: {error}; give another model, or a --script such as baseline.py")
    saved = {
        "script": script,
        "config": asdict(gpt.config),
        "model": gpt.state_dict(),
        "step": 0,
        "T": None,  # of its training, unknown
        "end_of_text": tokenizer.end_of_text,
        "tokenizer": tokenizer.name,
        "tokenizer_json": tokenizer.json,
    }
    with renamed_when_whole(path) as partial:
        torch.save(saved, partial)
    return gpt


# ---- the command line ----------------------------------------------------------------------------

@contextlib.contextmanager
def renamed_when_whole(path):
    """A temporary path, renamed to `path` at the end; whatever stops the writing leaves nothing."""
    from safetensors import SafetensorError

    folder = path.absolute().parent
    try:
        with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=folder) as temporary:
            partial = Path(temporary) / path.name
            yield partial
            partial.rename(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        sys.exit(f"error: {path}: cannot be written ({vocabulary.reason(error)});"
                 " make room on the disk, or name another place")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a Hugging Face name or folder, or a file of --save")
    parser.add_argument("destination", type=Path, help="new file or folder to write")
    parser.add_argument("--script", type=Path, help="script that will load the file (default: rung"
                        " 10, zero_init or grouped_query_attention, whichever fits)")
    args = parser.parse_args(argv)
    source, destination = args.source, args.destination
    if destination.exists():
        sys.exit(f"error: {destination}: exists already; name a new file or folder")
    if not os.access(destination.absolute().parent, os.W_OK):
        sys.exit(f"error: {destination}: its folder cannot be written to; make it, or name another")
    refuse_other_things(source)
    if is_model_file(source):
        if destination.suffix == ".pt":
            sys.exit(f"error: {destination}: {source} becomes a folder; name one, without .pt")
        model = write_folder(source, destination)
    else:
        if destination.suffix != ".pt":
            sys.exit(f"error: {destination}: {source} becomes a file; name one, ending in .pt")
        script = args.script.name if args.script else None
        model = write_file(source, destination, script)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{destination}: {n_parameters:,} parameters")


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # transformers imports torchao, which warns of what it lacks
    sys.stdout.reconfigure(errors="replace")  # for names that its encoding lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: nothing was written")
