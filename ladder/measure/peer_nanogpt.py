"""Two peers: the models of nanoGPT and build-nanogpt, trained with everything a user would switch on.

    python ladder/measure/peer_nanogpt.py FOLDER/model.py -B 1 -T 1024 --steps 12
    python ladder/measure/peer_nanogpt.py FOLDER/train_gpt2.py -B 1 -T 1024 --steps 12

As peer_transformers.py: rung 10 with a different model. Each has the form that it is trained in at home, with 50,304
rows and a loss over all of them; nanoGPT's GELU is not the tanh approximation. ladder/measure/peers.py says where the
files are. The log is `<log-dir>/peer_nanogpt.log` or `peer_build_nanogpt.log`.
"""
import math
import sys
from functools import partial
from pathlib import Path

import torch.nn as nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import speedup_10_fused_adamw as rung_10  # noqa: E402
from ladder.errors import UserError  # noqa: E402
from ladder.measure.peers import FETCHED, load_classes  # noqa: E402

MORE = {"model.py": {"dropout": 0.0, "bias": True}, "train_gpt2.py": {}}  # of its GPTConfig: GPT-2 has biases


class Peer(nn.Module):
    """The GPT of a fetched file with random weights, called as rung 10 calls its own model."""

    configure_optimizers = rung_10.GPT.configure_optimizers

    def __init__(self, file, settings, loader):
        super().__init__()
        if settings.pretrained or settings.save:
            sys.exit("error: --pretrained, --save: the peer has neither; leave them out")
        shape, theirs = rung_10.model_config(settings, loader.meta["vocab_size"]), load_classes(file)
        self.model = theirs.GPT(theirs.GPTConfig(
            vocab_size=math.ceil(shape.vocab_size / 128) * 128,  # 50257 -> 50304
            block_size=shape.block_size, n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd,
            **MORE[file.name],
        ))

    def forward(self, idx, targets):
        """Token ids and targets, (B, T) each -> the mean loss; logits that leave a compiled graph cost memory."""
        _, loss = self.model(idx, targets)
        return loss


def main(argv=None):
    file, *flags = sys.argv[1:] if argv is None else argv
    file = Path(file)
    rung_10.new_model = partial(Peer, file)
    rung_10.SCRIPT = ROOT / f"{FETCHED[file.name]}.py"  # names the log
    rung_10.train(rung_10.parse_args(flags))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
