"""Ideas of the NanoGPT speedrun and of papers, one at a time on rung 24: fixed rates, one seed, three of rung 24.

    python data/prepare.py --tokenizer bytes --out data/bytes
    python -m experiments.past_qwen3 logs/past_qwen3 --data data/bytes --model 4x4x128 -B 4 -T 256 --total-batch 1024 \
        --steps 500 --val-every 250 --val-sequences 256 --max-lr 0.01 --muon-lr 0.0025

Each is the script of rung 24 with the replacements below; where the idea allows it, what is new starts at zero. The
same command resumes. What such a trial favors goes into the race: both rates searched, five seeds.
"""
import argparse
import statistics
import sys
from pathlib import Path

from rich.console import Console

from experiments.variants import BASE, write_variant
from ladder.errors import UserError
from ladder.measure.runner import Job, Runner, check_flags, command_for
from ladder.judge.standings import last_val_loss

EMBEDDED = "        x = self.transformer.wte(idx)  # (B, T, C)\n"
BEFORE_THE_DRAW = "        cos, sin = rotary_angles(config.block_size"
STD = "            std = 0.02\n"
ZERO_TABLES = (STD, '            std = 0.0 if hasattr(module, "starts_at_zero") else 0.02\n')
CALL = "                x = block(x, cos, sin)\n"
NORMED = "        self.k_norm = nn"
BLOCK = "    def forward(self, x, cos, sin):\n        x = x + self.attn(self.ln_1(x), cos, sin)"
ATTENTION = "    def forward(self, x, cos, sin):\n        B, T, C"
MATRICES = "        matrices = [p for p in self.transformer.h.parameters() if p.dim() >= 2]\n"
VECTORS = "        others = [p for p in self.parameters() if p.dim() < 2]"
UPDATE = ("            update = muon_update(torch.stack(grads), torch.stack(momenta))"
          ' + muon["weight_decay"] * torch.stack(stack)\n')
CONVOLUTION = [  # over a token and the three before it, one filter per channel, at first the token alone
    ("class CausalSelfAttention(", '''class ShortConvolution(nn.Module):
    def __init__(self, n_embd, size=4):
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(size - 1, n_embd))

    def forward(self, x):
        y = x
        for i, tap in enumerate(self.taps, 1):
            y = y + tap * F.pad(x, (0, 0, i, -i))
        return y


class CausalSelfAttention('''),
    (MATRICES, '        taps = [p for name, p in self.named_parameters() if "taps" in name]\n'
               "        matrices = [p for name, p in self.transformer.h.named_parameters() "
               'if p.dim() >= 2 and "taps" not in name]\n'),
    (VECTORS, VECTORS.replace("= [", "= taps + [")),
]


def pairs(n_rows):
    return [
        (BEFORE_THE_DRAW, f"        self.pairs = nn.Embedding({n_rows}, config.n_embd)\n"
                          "        self.pairs.starts_at_zero = True\n" + BEFORE_THE_DRAW),
        (EMBEDDED, EMBEDDED + f"        x = x + self.pairs((36313 * idx + 27191 * F.pad(idx, (1, -1))) % {n_rows})\n"),
        ZERO_TABLES,
    ]


def pairs_and_triples(n_rows):
    return [
        (BEFORE_THE_DRAW, f"        self.n_grams = nn.ModuleList([nn.Embedding({n_rows}, config.n_embd) "
                          "for _ in range(2)])\n"
                          "        for table in self.n_grams:\n            table.starts_at_zero = True\n"
                          + BEFORE_THE_DRAW),
        (EMBEDDED, EMBEDDED + "        pairs = 36313 * idx + 27191 * F.pad(idx, (1, -1))\n"
                              "        triples = pairs + 51787 * F.pad(idx, (2, -2))\n"
                              f"        x = x + self.n_grams[0](pairs % {n_rows})\n"
                              f"        x = x + self.n_grams[1](triples % {n_rows})\n"),
        ZERO_TABLES,
    ]


TRIALS = {  # name: (what it is, and where it comes from; [(text of rung 24, what replaces it), ...])
    "pairs_8k": ("hashed pairs of tokens, 8,192 rows (speedrun)", pairs(8192)),
    "pairs_64k": ("hashed pairs of tokens, 65,536 rows (speedrun)", pairs(65536)),
    "n_grams_8k": ("hashed pairs and triples, 8,192 rows each (after Pagnoni et al. 2024)", pairs_and_triples(8192)),
    "n_grams_32k": ("hashed pairs and triples, 32,768 rows each (after Pagnoni et al. 2024)", pairs_and_triples(32768)),
    "smear": ("smear: each embedding takes a learned part of the one before (speedrun)", [
        (BEFORE_THE_DRAW, "        self.smear = nn.Parameter(torch.zeros(config.n_embd))\n" + BEFORE_THE_DRAW),
        (EMBEDDED, EMBEDDED + "        x = x + self.smear * F.pad(x, (0, 0, 1, -1))\n"),
    ]),
    "embedding_convolution": ("a short convolution of the embeddings (after Allen-Zhu 2025, Canon layers)", [
        *CONVOLUTION,
        (BEFORE_THE_DRAW, "        self.convolution = ShortConvolution(config.n_embd)\n" + BEFORE_THE_DRAW),
        (EMBEDDED, EMBEDDED + "        x = self.convolution(x)\n"),
    ]),
    "attention_convolution": ("a short convolution of what enters the attention (Allen-Zhu 2025, Canon A)", [
        *CONVOLUTION,
        ("        self.mlp = MLP(config)\n", "        self.mlp = MLP(config)\n"
                                             "        self.convolution = ShortConvolution(config.n_embd)\n"),
        ("self.attn(self.ln_1(x), cos", "self.attn(self.convolution(self.ln_1(x)), cos"),
    ]),
    "embedding_norm": ("RMSNorm of the embedding (speedrun)", [
        (EMBEDDED, "        x = F.rms_norm(self.transformer.wte(idx), (self.config.n_embd,))  # (B, T, C)\n"),
    ]),
    "embedding_shortcut": ("a learned share of the embedding enters every block (speedrun)", [
        (BEFORE_THE_DRAW, "        self.share = nn.Parameter(torch.zeros(config.n_layer))\n" + BEFORE_THE_DRAW),
        (EMBEDDED, EMBEDDED + "        embedded = x\n"),
        (CALL, "                x = block(x + self.share[i] * embedded, cos, sin)\n"),
    ]),
    "u_net": ("U-net skips: learned shares of the first half's outputs enter the second half, mirrored (speedrun)", [
        (BEFORE_THE_DRAW, "        self.skip = nn.Parameter(torch.zeros(config.n_layer // 2))\n" + BEFORE_THE_DRAW),
        (EMBEDDED, EMBEDDED + "        skipped, half = [], self.config.n_layer // 2\n"),
        (CALL, "                x = block(x if i < half else x + self.skip[i - half] * skipped.pop(), cos, sin)\n"
               "                skipped += [x] if i < half else []\n"),
    ]),
    "value_embeddings": ("the first and the last block's values from an embedding, too (speedrun)", [
        (BEFORE_THE_DRAW, "        self.value_embeddings = nn.ModuleList([nn.Embedding(n_rows, config.n_embd) "
                          "for _ in range(2)])\n"
                          "        for table in self.value_embeddings:\n            table.starts_at_zero = True\n"
                          + BEFORE_THE_DRAW),
        ZERO_TABLES,
        (ATTENTION, ATTENTION.replace("sin)", "sin, values)")),
        ("        v = v.view(B", "        v = v if values is None else v + values\n        v = v.view(B"),
        (BLOCK, BLOCK.replace("sin)", "sin, values)").replace("sin, values):", "sin, values=None):")),
        (CALL, "                ends = i in (0, self.config.n_layer - 1)\n"
               "                values = self.value_embeddings[min(i, 1)](idx) if ends else None\n"
               + CALL.replace("sin)", "sin, values)")),
    ]),
    "value_residual": ("a learned share of the first block's values in every other's (Zhou et al. 2024)", [
        (NORMED, "        self.mix = nn.Parameter(torch.zeros(1))\n" + NORMED),
        (ATTENTION, ATTENTION.replace("sin)", "sin, first)")),
        ("        v = v.view(B", "        v = v if first is None else v + self.mix * first\n"
                                "        values = v\n        v = v.view(B"),
        ("        return self.c_proj(y)\n", "        return self.c_proj(y), values\n"),
        (BLOCK + "\n        return x + self.mlp(self.ln_2(x))",
         "    def forward(self, x, cos, sin, first=None):\n"
         "        y, values = self.attn(self.ln_1(x), cos, sin, first)\n"
         "        x = x + y\n"
         "        return x + self.mlp(self.ln_2(x)), values if first is None else first"),
        ("        for i, block in enum", "        first = None\n        for i, block in enum"),
        (CALL, "                x, first = block(x, cos, sin, first)\n"),
    ]),
    "attention_gate": ("a learned gate for each head and token (Qiu et al. 2025; speedrun)", [
        (NORMED, "        self.gate = nn.Linear(config.n_embd, config.n_head, bias=False)\n" + NORMED),
        ("        y = y.transpose(1, 2).contiguous()",
         "        y = y * 2 * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]\n"
         "        y = y.transpose(1, 2).contiguous()"),
        (MATRICES, MATRICES.replace(">= 2]", ">= 2 and p.shape[0] > 64]")),  # AdamW for the gate
        (VECTORS, VECTORS.replace("< 2]", "< 2 or p.shape[0] <= 64]")),
    ]),
    "softcap": ("logits capped softly at 15 (Gemma 2; speedrun)", [
        ("            logits = F.linear(part, weight)  # (chunk, C) -> (chunk, n_rows)\n",
         "            linear = F.linear(part, weight)\n"
         "            capped = torch.tanh(linear.float() / 15)\n"
         "            logits = 15 * capped\n"),
        (".add_(one_hot, alpha=-1).to(logits.dtype)",
         ".add_(one_hot, alpha=-1).mul_(1 - capped.square()).to(linear.dtype)"),
        ("return self.lm_head(x)[..., :", "return (15 * torch.tanh(self.lm_head(x) / 15))[..., :"),
    ]),
    "next_but_one": ("the token after the next is predicted, too, by one more matrix, with a weight of 0.2 "
                     "(after Gloeckle et al. 2024)", [
        (BEFORE_THE_DRAW, "        self.next_but_one = nn.Linear(config.n_embd, config.n_embd, bias=False)\n"
                          + BEFORE_THE_DRAW),
        ("        return ChunkedCrossEntropy.apply(x, self.lm_head",
         "        more = 0\n"
         "        if self.training:\n"
         "            ahead = x.view(B, T, -1)[:, :-1]\n"
         "            ahead = (ahead + self.next_but_one(ahead)).reshape(B * (T - 1), -1)\n"
         "            more = 0.2 * ChunkedCrossEntropy.apply(ahead, self.lm_head.weight, targets.view(B, T)[:, 1:]"
         ".reshape(-1), self.config.vocab_size, self.loss_chunk)\n"
         "            more = more - more.detach()  # its gradient counts, and the log shows the loss without it\n"
         "        return more + ChunkedCrossEntropy.apply(x, self.lm_head"),
        ("return MuonAdamW([*groups, ",
         'groups[0]["params"] += [self.next_but_one.weight]\n        return MuonAdamW([*groups, '),
    ]),
    "normuon": ("NorMuon: each row of Muon's update divided by its root mean square over the steps (Li et al. 2025)", [
        (UPDATE, "            update = orthogonalize(torch.stack(grads).lerp(torch.stack(momenta), 0.95)).float()\n"
                 '            rows = [self.state[p].setdefault("rows", torch.zeros_like(p[:, :1])) for p in stack]\n'
                 "            torch._foreach_lerp_(rows, update.square().mean(-1, keepdim=True).unbind(), 0.05)\n"
                 "            update = update / (torch.stack(rows).sqrt() + 1e-10)\n"
                 "            norm = update.norm(dim=(-2, -1), keepdim=True) + 1e-10\n"
                 "            update = update * (0.2 * update[0].numel() ** 0.5 / norm)\n"
                 '            update = update + muon["weight_decay"] * torch.stack(stack)\n'),
    ]),
    "polar_express": ("other coefficients in each of Muon's iterations (Amsel et al. 2025; the speedrun's)", [
        ("    for _ in range(5):", "    x = x / 1.02\n"
         "    for a, b, c in ((8.156554524902461, -22.48329292557795, 15.878769915207462),\n"
         "                    (4.042929935166739, -2.808917465908714, 0.5000178451051316),\n"
         "                    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),\n"
         "                    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),\n"
         "                    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)):"),
        ("beta=-4.7750, alpha=2.0315), x, beta=3.4445)", "beta=b, alpha=c), x, beta=a)"),
    ]),
    "three_iterations": ("three of Muon's five iterations", [("range(5):", "range(3):")]),
    "momentum_90": ("Muon's momentum 0.9 instead of 0.95", [
        ("(momenta, grads, 0.05)", "(momenta, grads, 0.1)"),
        ("grads.lerp(momenta, 0.95)", "grads.lerp(momenta, 0.9)"),
    ]),
    "betas_80_99": ("AdamW's betas 0.8 and 0.99 instead of 0.9 and 0.95", [("betas=(0.9, 0.95)", "betas=(0.8, 0.99)")]),
    "cautious_decay": ("Muon's weight decay only where it has the update's sign (Chen et al. 2025)", [
        (UPDATE, "            weights = torch.stack(stack)\n"
                 "            update = muon_update(torch.stack(grads), torch.stack(momenta))\n"
                 '            update = update + muon["weight_decay"] * weights * (update * weights > 0)\n'),
    ]),
    "no_decay": ("no weight decay", [("(weight_decay=0.1)", "(weight_decay=0.0)")]),
    "wide_init": ("all matrices, the embedding too, drawn with a standard deviation of (inputs)^-0.5 instead of 0.02", [
        (STD, "            std = module.weight.shape[1] ** -0.5\n"),
    ]),
}
SEEDS = 1337, 1338, 1339  # of rung 24 itself: how far chance goes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    args, flags = parser.parse_known_args()
    settings = check_flags([BASE], flags)
    if settings.recompute_blocks:
        raise UserError("--recompute-blocks: some of the replacements are made for none; leave it out")
    args.logs.mkdir(parents=True, exist_ok=True)
    runs = [(BASE, seed) for seed in SEEDS] + [(write_variant(name, args.logs, TRIALS), SEEDS[0]) for name in TRIALS]
    folders = {seed: args.logs / f"seed_{seed}" for seed in SEEDS}
    with Runner(settings, args.logs, 7200, Console(), resume=True, n_jobs=len(runs)) as runner:
        runner.run([Job(stage.name, command_for(stage, [*flags, "--seed", str(seed)], folders[seed]), folders[seed])
                    for stage, seed in runs])
    loss = {(stage.name, seed): last_val_loss(folders[seed] / f"{stage.name}.log") for stage, seed in runs}
    base = [loss[BASE.name, seed] for seed in SEEDS]
    print(f"rung 24: {' '.join(f'{value:.3f}' for value in base)}")
    for stage, seed in sorted(runs[len(SEEDS) :], key=lambda run: loss[run[0].name, run[1]]):
        value = loss[stage.name, seed]
        print(f"{value:.3f} {value - statistics.mean(base):+.3f} {stage.title}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
