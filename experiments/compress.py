"""What compression costs a trained model: its size, validation loss and speed before and after, in one table.

    python -m experiments.compress model.pt -T 256          # any model that sample.py takes
    python -m experiments.compress my-gpt2 --data data/mine --png compressed.png

Needs torchao besides requirements.txt (`pip install torchao==0.18.0`).

- bfloat16: every weight in 16 bits.
- int8: weights in 8 bits with one scale for each row, through torchao; activations stay as they are. Twice the matrices
  of the blocks alone, once the output layer too, which is then no longer tied to the embedding.
- pruned: the smallest weights of the blocks' matrices, compared over all of them, set to zero, through
  torch.nn.utils.prune, without training afterwards. Zeros take as much room and time as other numbers, unless a file
  format or a kernel knows of them: "zipped" shows what a compressor makes of the file.

Size is that of the weights in a file, loss the mean over sequences of val.bin, tokens/sec the median of three times 100
greedy tokens with the key-value cache, one sequence at a time.

Sources: torchao's quantize_; Han et al. 2015, "Learning both Weights and Connections for Efficient Neural Networks".
"""
import argparse
import copy
import io
import logging
import statistics
import sys
import time
import zlib
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from tqdm import tqdm
from transformers.pytorch_utils import Conv1D

from sample import load_model, pick_device
from speedup_10_fused_adamw import open_tokens

NEW_TOKENS = 100


def with_linear_layers(model):
    """Replace transformers' Conv1D layers by the nn.Linear that they are but for the order of their matrix."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight = nn.Parameter(layer.weight.detach().t().contiguous())  # (nx, nf) -> (nf, nx)
                linear.bias = layer.bias
                setattr(parent, name, linear)
    return model


def is_in_block(layer, name):
    return isinstance(layer, nn.Linear) and name.startswith("transformer.h.")


def to_int8(model, which):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(version=2), filter_fn=which)


def prune_blocks(model, amount):
    """Set the `amount` (0 to 1) of the blocks' weights that are smallest in magnitude to zero."""
    weights = [(layer, "weight") for name, layer in model.named_modules() if is_in_block(layer, name)]
    prune.global_unstructured(weights, pruning_method=prune.L1Unstructured, amount=amount)
    for layer, name in weights:
        prune.remove(layer, name)


VARIANTS = {
    "float32, as trained": lambda model: None,
    "bfloat16": lambda model: model.bfloat16(),
    "int8 blocks": lambda model: to_int8(model, is_in_block),
    "int8 blocks, rest bfloat16": lambda model: to_int8(model.bfloat16(), is_in_block),
    "int8 blocks and output": lambda model: to_int8(model, lambda layer, name: isinstance(layer, nn.Linear)),
    "30 % pruned": lambda model: prune_blocks(model, 0.3),
    "50 % pruned": lambda model: prune_blocks(model, 0.5),
    "70 % pruned": lambda model: prune_blocks(model, 0.7),
    "90 % pruned": lambda model: prune_blocks(model, 0.9),
}


def file_sizes(model):
    """(bytes of the weights in a file, the same zipped)."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell(), len(zlib.compress(file.getbuffer(), level=1))


@torch.inference_mode()
def validation_loss(model, sequences):
    """Mean cross-entropy in nats per token over `sequences`, (n, T + 1) token ids."""
    losses = []
    for sequence in sequences:
        logits = model(sequence[None, :-1]).logits[0].float()  # (T, vocab_size)
        losses.append(F.cross_entropy(logits, sequence[1:]).item())
    return statistics.mean(losses)


@torch.inference_mode()
def tokens_per_second(model, rounds=3):
    x = torch.full((1, 1), model.config.eos_token_id, device=model.device)
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        out = model.generate(x, attention_mask=torch.ones_like(x), do_sample=False, pad_token_id=0,
                             min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
        out.cpu()  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return NEW_TOKENS / statistics.median(seconds[1:])  # the first one warms up


def read_sequences(folder, T, n):
    """The first `n` validation sequences, (n, T + 1) int64, and meta.json; exits with one line without any."""
    tokens, meta = open_tokens(folder, "val", T + 1)
    n = min(n, (len(tokens) - 1) // T)
    return torch.from_numpy(tokens[: n * T + 1].astype("int64")).unfold(0, T + 1, T), meta


def measure(base, change, sequences):
    """{"MB", "MB zipped", "val loss", "tokens/sec"} of a changed copy of the model."""
    model = copy.deepcopy(base)
    change(model)
    size, zipped = file_sizes(model)
    return {"MB": size / 1e6, "MB zipped": zipped / 1e6, "val loss": validation_loss(model, sequences),
            "tokens/sec": tokens_per_second(model)}


def to_table(results):
    table = Table("", "MB", "MB zipped", "val loss", "tokens/sec", box=box.MARKDOWN)
    for name, result in results.items():
        table.add_row(name, f"{result['MB']:.1f}", f"{result['MB zipped']:.1f}", f"{result['val loss']:.3f}",
                      f"{result['tokens/sec']:.1f}")
    return table


def plot(results, title, path):
    """Bars of size, loss and speed side by side, written as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, rows = list(results), list(results.values())
    panels = {"size in a file, MB": ([row["MB"] for row in rows], "%.0f"),
              "validation loss, difference": ([row["val loss"] - rows[0]["val loss"] for row in rows], "%+.3f"),
              "generated tokens/sec": ([row["tokens/sec"] for row in rows], "%.0f")}
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 0.4 * len(names) + 1.4), sharey=True, layout="constrained")
    for axis, (label, (values, form)) in zip(axes, panels.items(), strict=True):
        axis.bar_label(axis.barh(names, values, color=["0.6"] + ["tab:blue"] * (len(names) - 1)), fmt=form, padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)


def parse_args(argv=None):
    """The command line's flags; exits with one line when one cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint file, a Hugging Face folder or a name")
    parser.add_argument("--data", type=Path, default=Path("data/tokens"), help="default: %(default)s")
    parser.add_argument("-T", "--seq-len", dest="T", type=int, default=1024,
                        help="tokens per validation sequence: as many as in training (default: %(default)s)")
    parser.add_argument("--val-sequences", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--png", type=Path, help="also draw the table into this file")
    parser.add_argument("--device", default=pick_device(), help="default: %(default)s")
    args = parser.parse_args(argv)
    for flag, value in {"-T": args.T, "--val-sequences": args.val_sequences}.items():
        if value < 1:
            sys.exit(f"error: {flag} {value}: out of range; give at least 1")
    if args.png and (args.png.is_dir() or not args.png.absolute().parent.is_dir()):
        sys.exit(f"error: --png {args.png}: cannot be written; name a file in a folder that exists")
    return args


def main(argv=None):
    args = parse_args(argv)
    try:
        import torchao
    except ImportError:
        sys.exit("error: torchao: not installed, and the int8 rows need it; pip install torchao==0.18.0")
    base = with_linear_layers(load_model(args.model, args.device)[0].float())  # a folder may hold 16 bits
    longest = base.config.n_positions
    if args.T > longest:
        sys.exit(f"error: -T {args.T}: the model's longest sequence is {longest}; lower -T")
    sequences, meta = read_sequences(args.data, args.T, args.val_sequences)
    sequences = sequences.to(args.device)

    print(f"{args.model}, {sum(p.numel() for p in base.parameters()):,} parameters; {len(sequences)} sequences of "
          f"{args.T} tokens of {meta['source']} ({meta['tokenizer']} tokens)\n"
          f"torch {torch.__version__}, torchao {torchao.__version__}, {args.device}\n", flush=True)
    bar = tqdm(VARIANTS.items(), desc="measuring", disable=None)
    results = {name: measure(base, change, sequences) for name, change in bar}
    Console().print(to_table(results))
    if args.png:
        plot(results, f"{Path(args.model).name}: what compression costs", args.png)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # torchao tells which GPU kernels it lacks, and of deprecations in torch
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped")
