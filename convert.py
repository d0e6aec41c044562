"""A Hugging Face model as a file like --save's, and back: the one place that knows both formats.

    python convert.py gpt2 gpt2.pt               # a name on the hub or a folder: a GPT-2 or a Qwen3
    python convert.py mine.pt my-model           # a file of --save, or a checkpoint: a folder, with its tokenizer
    python speedup_10_fused_adamw.py --pretrained gpt2.pt

The file is that of one script: rung 10's for a GPT-2 (rungs 7 to 19 load it), rung 24's for a Qwen3 (23 to 29 and
33), rung 32's for a Qwen3 whose heads share keys and values, as the published ones do; --script names another one, such
as baseline.py. Rows that pad the vocabulary (rung 7) start as in a new model. In the other direction padding is cut
off, and untied embeddings (baseline.py's) stay untied. Rungs 20 to 22, 30 and 31 are neither a GPT-2 nor a Qwen3; rungs
30 and 31 can start from a Qwen3, since what they add to it starts at zero.
"""
import argparse
import importlib
import logging
import sys
import tempfile
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from data import vocabulary
from data.prepare import warn

SCRIPTS = {"gpt2": "speedup_10_fused_adamw.py", "qwen3": "rung_24_zero_init.py"}  # whose files are written
SHARED = "rung_32_grouped_query_attention.py"  # a Qwen3's script where rung 24's does not fit
TITLES = {"gpt2": "a GPT-2; it fits rungs 0 to 19", "qwen3": "a Qwen3; it fits rung 23 and later"}
CONFIG = {  # Hugging Face's names of GPTConfig's fields
    "gpt2": {"n_positions": "block_size", "vocab_size": "vocab_size", "n_layer": "n_layer", "n_head": "n_head",
             "n_embd": "n_embd"},
    "qwen3": {"max_position_embeddings": "block_size", "vocab_size": "vocab_size", "num_hidden_layers": "n_layer",
              "num_attention_heads": "n_head", "hidden_size": "n_embd", "intermediate_size": "n_hidden",
              "num_key_value_heads": "n_kv_head", "head_dim": "head_size"},
}
QWEN3_NAMES = {  # {our name of a part: a Qwen3's}; those of a GPT-2 are ours
    "transformer.wte": "model.embed_tokens", "transformer.h": "model.layers", "transformer.ln_f": "model.norm",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", ".attn.": ".self_attn.", "c_proj": "o_proj",
}
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2's Conv1D stores (in, out), nn.Linear (out, in)


def load_script(name):
    """A training script, by its file's name, as a module; raises ImportError if there is none."""
    stem = Path(name).stem
    beyond = Path(__file__).with_name("beyond") / f"{stem}.py"
    return importlib.import_module(f"beyond.{stem}" if beyond.exists() else stem)


def names_of(kind, script):
    """{Hugging Face's field: ours}, of those that the script's GPTConfig has."""
    return {theirs: ours for theirs, ours in CONFIG[kind].items() if ours in script.GPTConfig.__dataclass_fields__}


def shape_of(config, script):
    """The script's GPTConfig for a Hugging Face configuration."""
    shape = {ours: getattr(config, theirs) for theirs, ours in names_of(config.model_type, script).items()}
    if hasattr(script.GPTConfig, "rope_theta"):
        shape["rope_theta"] = float(config.rope_parameters["rope_theta"])
    return script.GPTConfig(**shape)


def fixed(kind, config):
    """{Hugging Face's field: the only value that our scripts have} for a model of this shape."""
    if kind == "gpt2":
        return {"activation_function": "gelu_new", "n_inner": None, "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False, "layer_norm_epsilon": 1e-5}
    return {"num_key_value_heads": getattr(config, "n_kv_head", config.n_head),
            "head_dim": getattr(config, "head_size", config.n_embd // config.n_head),
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": getattr(config, "rope_theta", 10_000)},
            "tie_word_embeddings": True}


def to_theirs(kind, weights, shape):
    """Our state dict, of a model of this shape, with Hugging Face's names and layouts."""
    theirs = {}
    for name, weight in weights.items():
        if kind == "gpt2":
            theirs[name] = weight.t().contiguous() if name.endswith(TRANSPOSED) else weight
            continue
        for ours, other in QWEN3_NAMES.items():
            name = name.replace(ours, other)
        if "c_attn" not in name:
            theirs[name] = weight
            continue
        width = fixed(kind, shape)["head_dim"]
        q, kv = width * shape.n_head, width * fixed(kind, shape)["num_key_value_heads"]
        for part, matrix in zip("qkv", weight.split([q, kv, kv]), strict=True):  # one matrix here, three there
            theirs[name.replace("c_attn", f"{part}_proj")] = matrix
    return theirs


def to_transformers(saved):
    """A model's file as a transformers GPT-2 or Qwen3; raises KeyError or RuntimeError if it is neither."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape, weights, end = saved["config"], dict(saved["model"]), saved["end_of_text"]
    kind = "qwen3" if "transformer.h.0.mlp.gate_proj.weight" in weights else "gpt2"
    script = load_script(SHARED if "n_kv_head" in shape else SCRIPTS[kind])
    if shape.keys() != asdict(script.GPTConfig()).keys():
        raise KeyError("not the shape of a GPT")
    shape = script.GPTConfig(**shape)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][: shape.vocab_size]  # the rows after those are padding
    words = fixed(kind, shape) | {theirs: getattr(shape, ours) for theirs, ours in names_of(kind, script).items()}
    words["tie_word_embeddings"] = torch.equal(weights["transformer.wte.weight"], weights["lm_head.weight"])
    words |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if kind == "gpt2" else {}
    config = AutoConfig.for_model(kind, bos_token_id=end, eos_token_id=end, **words)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(to_theirs(kind, weights, shape))
    return model.eval()


def refuse_folder(path):
    """Exit if `path` is a folder of checkpoints; the line says which file has the model, or how to get it."""
    folder = Path(path)
    if (folder / ".metadata").exists() or [*folder.glob("step_*/.metadata")]:  # of torch.distributed.checkpoint
        sys.exit(f"error: {path}: sharded checkpoints, not a model; resume with --save FILE, then give FILE")
    if files := sorted(folder.glob("step_*.pt")):
        sys.exit(f"error: {path}: a folder of checkpoints, not a model; give {files[-1]}")


def load_checkpoint(path, convert=to_transformers):
    """(The model in a file, as `convert` makes it; the file's contents); exits with one line."""
    refuse_folder(path)
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not check the sums that torch.save writes
            if file.testzip():
                raise zipfile.BadZipFile
        saved = torch.load(path, map_location="cpu", weights_only=True)
        saved = {name: saved[name] for name in ("script", "config", "model", "T", *vocabulary.FIELDS)}
    except OSError as error:
        sys.exit(f"error: {path}: cannot be read ({error.strerror}); give a file that a rung wrote")
    except Exception:  # any exception; some advise loading without weights_only, so none is passed on
        sys.exit(f"error: {path}: damaged, or not a model's file; give a file that a rung wrote")
    try:
        return convert(saved), saved
    except (KeyError, RuntimeError, TypeError, AttributeError, ImportError):  # other names or shapes, no such script
        sys.exit(f"error: {path}: neither a GPT-2 (rungs 0 to 19) nor a Qwen3 (23 on, not 30, 31); give a file of one")


def usual_script(config):
    """The script whose file is written of a Hugging Face configuration, if none is named."""
    name = SCRIPTS[config.model_type]
    ours = fixed(config.model_type, shape_of(config, load_script(name)))
    shared = ("num_key_value_heads", "head_dim", "rope_parameters")
    return SHARED if any(getattr(config, key) != ours[key] for key in shared if key in ours) else name


def check(config, name):
    """Raise ValueError if the model of a Hugging Face configuration is not that of the training script `name`."""
    kind, script = config.model_type, load_script(name)
    shape = shape_of(config, script)
    if kind != ("qwen3" if hasattr(shape, "n_hidden") else "gpt2"):
        raise ValueError(f"{TITLES[kind]}, not {name}")
    for key, value in fixed(kind, shape).items():
        if (found := getattr(config, key, None)) != value and (key, found) != ("n_inner", 4 * shape.n_embd):
            raise ValueError(f"its {key} is {found}; the scripts have {value}")
    with torch.device("meta"):
        gpt = script.GPT(shape)
    if gpt.transformer.wte.weight is gpt.lm_head.weight and not config.tie_word_embeddings:
        raise ValueError("its embeddings are untied; give --script baseline.py")


def load_hugging_face(name, check=lambda config: None):
    """A transformers GPT-2 or Qwen3 from a folder or the hub; exits with one line when there is none.

    `check` gets its configuration before it is loaded, and raises ValueError to refuse it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        if config.model_type not in SCRIPTS:
            raise ValueError(f"a {config.model_type}, neither a GPT-2 nor a Qwen3")
        check(config)
        model, report = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, dtype=torch.float32)
        if report["missing_keys"]:  # transformers has drawn them at random
            raise ValueError("it lacks weights")
    except Exception as error:  # no network, no such name, a damaged file: any exception
        why = vocabulary.reason(error)
        sys.exit(f"error: {name}: cannot be loaded ({why}); give a model's file, or a GPT-2's name or folder")
    return model.eval()


def from_transformers(model, name):
    """A GPT of the training script `name` with a transformers model's weights; raises ValueError if one misfits."""
    kind, theirs, script = model.config.model_type, model.state_dict(), load_script(name)
    shape = shape_of(model.config, script)
    torch.manual_seed(1337)
    gpt, unused = script.GPT(shape), set(theirs)
    for ours, weight in gpt.state_dict().items():
        parts = [other for other in to_theirs(kind, {ours: weight}, shape) if other in theirs]  # 3 of c_attn
        transposed = kind == "gpt2" and ours.endswith(TRANSPOSED)
        if parts:
            whole = torch.cat([theirs[other].t() if transposed else theirs[other] for other in parts])
            weight[: len(whole)] = whole  # a padded vocabulary has more rows
        elif weight.any():  # what starts at zero adds nothing (rungs 30, 31)
            raise ValueError(f"it lacks {ours}, which {name} has; give another --script")
        unused -= set(parts)
    if unused:
        raise ValueError(f"{name} has no place for its {min(unused)}; give another --script")
    return gpt


def tokenizer_of(name, vocab_size):
    """(name, JSON, end of text) of a Hugging Face model's tokenizer; exits with one line if it has none that fits."""
    try:
        tokenizer = vocabulary.from_hugging_face(name)
        if not vocabulary.is_gpt2(tokenizer):
            return tokenizer.name, tokenizer.json, tokenizer.end_of_text
    except vocabulary.NoTokenizer as error:
        if vocab_size != vocabulary.GPT2.vocab_size:
            sys.exit(f"error: {name}: its tokenizer {error}; give a folder that has one")
        warn(f"{name}: its tokenizer {error}; taken for GPT-2's, which has as many tokens")
    return "gpt2", None, vocabulary.GPT2.end_of_text


def write_file(name, path, script=None):
    """Write a Hugging Face model as a file of a script (None: the usual one); exits if it does not fit."""
    model = load_hugging_face(name, lambda config: check(config, script or usual_script(config)))
    script = script or usual_script(model.config)
    tokens = dict(zip(vocabulary.FIELDS, tokenizer_of(name, model.config.vocab_size), strict=True))
    if tokens["tokenizer_json"]:
        n_tokens = vocabulary.restore(*tokens.values()).vocab_size
        model.resize_token_embeddings(min(n_tokens, model.config.vocab_size))  # a Qwen3 has rows that no token uses
    try:
        gpt = from_transformers(model, script)
    except (ValueError, RuntimeError) as error:  # the latter: shapes that differ
        sys.exit(f"error: {name}: {error}")
    contents = {"script": Path(script).name, "config": asdict(gpt.config), "model": gpt.state_dict(), "step": 0,
                "T": None}  # of its training, unknown
    partial = path.with_name(path.name + ".partial")
    try:
        torch.save(contents | tokens, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return gpt


def write_folder(file, folder):
    """Write a model's file as a Hugging Face folder, aside first, then renamed; a failure leaves nothing."""
    model, saved = load_checkpoint(file)
    try:
        tokenizer = vocabulary.restore(*map(saved.get, vocabulary.FIELDS))
    except vocabulary.NoTokenizer as error:
        if saved["tokenizer"] != "gpt2":
            sys.exit(f"error: {file}: its tokenizer {error}; give a file that a rung wrote")
        warn(f"{error}: the folder has no tokenizer, so pipeline() needs one from elsewhere")
        tokenizer = None
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.absolute().parent) as parent:
        partial = Path(parent) / folder.name
        model.save_pretrained(partial)
        if tokenizer:
            tokenizer.to_transformers().save_pretrained(partial)
        partial.rename(folder)
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="a Hugging Face name or folder, or a model's file")
    parser.add_argument("destination", type=Path, help="a new file, or a new folder")
    parser.add_argument("--script", metavar="FILE", help="whose file to write (default: see above)")
    args = parser.parse_args(argv)
    if args.destination.exists():
        sys.exit(f"error: {args.destination}: exists already; name a new file or folder")
    refuse_folder(args.source)
    to_folder = Path(args.source).is_file() or args.source.endswith(".pt")
    if to_folder == (args.destination.suffix == ".pt"):
        form = "folder, without .pt" if to_folder else "file, ending in .pt"
        sys.exit(f"error: {args.destination}: {args.source} becomes a {form}; name one")
    try:
        if to_folder:
            model = write_folder(args.source, args.destination)
        else:
            model = write_file(args.source, args.destination, args.script)
    except Exception as error:  # on a full disk torch, safetensors and tokenizers raise different ones
        sys.exit(f"error: {args.destination}: cannot be written ({error}); name a place elsewhere, or make room")
    print(f"{args.destination}: {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of a folder's name
    logging.disable(logging.WARNING)  # transformers imports torchao if installed, which warns of what it lacks
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped: nothing was written")
