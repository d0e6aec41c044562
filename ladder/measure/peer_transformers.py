"""The peer: Hugging Face transformers' own GPT-2, trained with everything a user would switch on.

    python ladder/measure/peer_transformers.py -B 1 -T 1024 --steps 12

It is rung 10 with a different model, transformers' GPT2LMHeadModel with causal SDPA attention and without dropout: the
same data, autocast and GradScaler, compilation, fused AdamW, clipping, learning rate, clock and log. Rung 10 should not
be slower. The log is `<log-dir>/peer_transformers.log`.
"""
import sys
from pathlib import Path

import torch.nn as nn
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import speedup_10_fused_adamw as rung_10  # noqa: E402

# transformers' default, "sdpa", skips the mask only if no sequences are packed, which it cannot tell while
# torch.compile traces: a compiled GPT-2 computes a dense (T, T) mask, and SDPA cannot take its causal kernel. For an
# attention with a name of our own transformers makes no mask, and the same function is causal.
AttentionInterface.register("plain_sdpa", sdpa_attention_forward)


class Peer(nn.Module):
    """transformers' GPT-2 with random weights, called as rung 10 calls its own model."""

    configure_optimizers = rung_10.GPT.configure_optimizers

    def __init__(self, settings, loader):
        super().__init__()
        if settings.pretrained or settings.save:
            sys.exit("error: --pretrained, --save: the peer has neither; leave them out")
        shape = rung_10.model_config(settings, loader.meta["vocab_size"])
        self.model = GPT2LMHeadModel(GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.block_size,
            n_embd=shape.n_embd, n_layer=shape.n_layer, n_head=shape.n_head,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="plain_sdpa",
        ))
        # What transformers falls back to, but then it warns, which breaks the compiled graph between logits and loss.
        self.model.loss_type = "ForCausalLM"

    def forward(self, idx, targets):
        """Token ids and targets, (B, T) each -> the mean loss. Our targets are already the next tokens."""
        return self.model(idx, labels=targets, shift_labels=targets).loss


def main(argv=None):
    rung_10.new_model = Peer
    rung_10.SCRIPT = ROOT / Path(__file__).name  # names the log
    rung_10.train(rung_10.parse_args(argv))


if __name__ == "__main__":
    main()
