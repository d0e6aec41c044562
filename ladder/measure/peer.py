"""The peers of `run --peers`: other people's GPT-2, each in its best form, with everything a user would switch on.

    python ladder/measure/peer.py -B 1 -T 1024                          # transformers'
    python ladder/measure/peer.py FOLDER/model.py -B 1 -T 1024          # github.com/karpathy/nanoGPT's
    python ladder/measure/peer.py FOLDER/train_gpt2.py -B 1 -T 1024     # github.com/karpathy/build-nanogpt's

A peer is rung 10 with a different model: the same data, autocast and GradScaler, compilation, fused AdamW, clipping,
learning rate, clock and log. Rung 10 should not be slower. Each has 50,304 rows in its embedding, as the fetched models
have at home, and a loss over all of them; nanoGPT's GELU is not the tanh approximation.
"""
import ast
import inspect
import math
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import speedup_10_fused_adamw as rung_10  # noqa: E402
from ladder.errors import UserError  # noqa: E402
from ladder.rungs.list import PEER, PEERS  # noqa: E402

FETCHED = {"model.py": "peer_nanogpt", "train_gpt2.py": "peer_build_nanogpt"}  # {file: its log}
MORE = {"model.py": {"dropout": 0.0, "bias": True}, "train_gpt2.py": {}}  # of its GPTConfig: GPT-2 has biases
IMPORTED = {"dataclass": dataclass, "inspect": inspect, "math": math, "torch": torch, "nn": nn,
            "F": nn.functional}  # what their classes use


def padded(vocab_size):
    """Rows of an embedding that suit a GPU's kernels: 50257 -> 50304."""
    return math.ceil(vocab_size / 128) * 128


class Peer(nn.Module):
    """transformers' GPT-2 with random weights, called as rung 10 calls its own model."""

    configure_optimizers = rung_10.GPT.configure_optimizers

    def __init__(self, settings, loader):
        super().__init__()
        if settings.pretrained or settings.save:
            sys.exit("error: --pretrained, --save: a peer cannot load or save models; leave them out")
        self.model = self.build(rung_10.model_config(settings, loader.meta["vocab_size"]))

    def build(self, shape):
        from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # transformers' default, "sdpa", skips the mask only if no sequences are packed, which it cannot tell while
        # torch.compile traces: a compiled GPT-2 computes a dense (T, T) mask, and SDPA cannot take its causal kernel.
        # For an attention with a name of our own transformers makes no mask, and the same function is causal.
        AttentionInterface.register("plain_sdpa", sdpa_attention_forward)
        model = GPT2LMHeadModel(GPT2Config(
            vocab_size=padded(shape.vocab_size), n_positions=shape.block_size,
            n_embd=shape.n_embd, n_layer=shape.n_layer, n_head=shape.n_head, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, attn_implementation="plain_sdpa"))
        # What transformers falls back to, but then it warns, which breaks the compiled graph between logits and loss.
        model.loss_type = "ForCausalLM"
        return model

    def forward(self, idx, targets):
        """Token ids and targets, (B, T) each -> the mean loss. Our targets are already the next tokens."""
        return self.model(idx, labels=targets, shift_labels=targets).loss


def fetched_peer(file):
    class FetchedPeer(Peer):
        def build(self, shape):
            theirs = load_classes(file)
            return theirs.GPT(theirs.GPTConfig(
                vocab_size=padded(shape.vocab_size), block_size=shape.block_size,
                n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd, **MORE[file.name]))

        def forward(self, idx, targets):
            _, loss = self.model(idx, targets)  # logits that leave a compiled graph cost memory
            return loss

    return FetchedPeer


def classes_of(file):
    """The classes of a fetched file, as a syntax tree: train_gpt2.py as a whole would train."""
    problem = f"--peers {file}: does not define GPT and GPTConfig; fetch the file that docs/running.md names"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError:  # the web page around the file
        raise UserError(problem) from None
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not {"GPT", "GPTConfig"} <= {node.name for node in tree.body}:
        raise UserError(problem)
    return tree


def load_classes(file):
    module = types.ModuleType(f"fetched_{file.stem}")
    sys.modules[module.__name__] = module  # torch.compile looks it up
    vars(module).update(IMPORTED)
    exec(compile(classes_of(file), file, "exec"), vars(module))
    return module


def find_peers(wanted):
    """{log's name: script and file} of the peers that are `wanted`: None, True (transformers'), or a folder."""
    script = ROOT / PEERS[PEER].file
    if wanted is None or wanted is True:
        return {PEER: [script]} if wanted else {}
    files = [wanted / name for name in FETCHED if (wanted / name).exists()]
    if not files:
        raise UserError(f"--peers {wanted}: holds no {' or '.join(FETCHED)}; docs/running.md says where they are")
    for file in files:
        classes_of(file)
    return {PEER: [script]} | {FETCHED[file.name]: [script, file.resolve()] for file in files}


def main(argv):
    name, model = PEER, Peer
    if Path(*argv[:1]).name in FETCHED:
        file, *argv = argv
        name, model = FETCHED[Path(file).name], fetched_peer(Path(file))
    rung_10.new_model = model
    rung_10.SCRIPT = ROOT / f"{name}.py"  # names the log
    rung_10.train(rung_10.parse_args(argv))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
