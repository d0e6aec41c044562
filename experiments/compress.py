"""What compression costs a trained model: its size, validation loss and speed before and after, in one table.

    pip install torchao==0.18.0
    python -m experiments.compress model.pt -T 256          # any GPT-2 that sample.py takes; -T as in its training

- bfloat16: every weight in 16 bits.
- int8: weights in 8 bits with one scale for each row, through torchao; activations stay as they are. Twice the matrices
  of the blocks alone, once the output layer too, which is then no longer tied to the embedding.
- pruned: the smallest weights of the blocks' matrices, compared over all of them, set to zero, through
  torch.nn.utils.prune, without training afterwards. Zeros take as much room and time as other numbers, unless a file
  format or a kernel knows of them: "zipped" shows what a compressor makes of the file.

Size is that of the weights in a file, loss the mean over the first sequences of val.bin, tokens/sec the median of three
times 100 greedy tokens with the key-value cache.

Sources: torchao's quantize_; Han et al. 2015, "Learning both Weights and Connections for Efficient Neural Networks".
"""
import argparse
import copy
import io
import logging
import statistics
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from transformers.pytorch_utils import Conv1D

from experiments.sampling_speed import tokens_per_second
from sample import load_model, pick_device
from speedup_10_fused_adamw import load_tokens

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


@torch.inference_mode()
def validation_loss(model, sequences):
    """Mean cross-entropy in nats per token over `sequences`, (n, T + 1) token ids."""
    return statistics.mean(F.cross_entropy(model(sequence[None, :-1]).logits[0].float(), sequence[1:]).item()
                           for sequence in sequences)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint file, a Hugging Face folder or a name")
    parser.add_argument("--data", type=Path, default=Path("data/tokens"), help="default: %(default)s")
    parser.add_argument("-T", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--val-sequences", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--device", default=pick_device(), help="default: %(default)s")
    args = parser.parse_args(argv)
    base = with_linear_layers(load_model(args.model, args.device)[0].float())  # a folder may hold 16 bits
    n = args.val_sequences * args.T + 1
    tokens = torch.from_numpy(load_tokens(args.data, "val", n)[0][:n].astype("int64"))
    sequences = tokens.unfold(0, args.T + 1, args.T).to(args.device)  # (val_sequences, T + 1)
    print("| | MB | MB zipped | val loss | tokens/sec |\n|---|--:|--:|--:|--:|")
    for name, change in VARIANTS.items():
        model, file = copy.deepcopy(base), io.BytesIO()
        change(model)
        torch.save(model.state_dict(), file)
        zipped = zlib.compress(file.getbuffer(), level=1)
        speeds = [tokens_per_second(model, NEW_TOKENS, use_cache=True)[0] for _ in range(4)][1:]  # the first warms up
        print(f"| {name} | {file.tell() / 1e6:.1f} | {len(zipped) / 1e6:.1f} | {validation_loss(model, sequences):.3f} "
              f"| {statistics.median(speeds):.1f} |", flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # torchao tells which GPU kernels it lacks, and of deprecations in torch
    main()
