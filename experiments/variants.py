"""Ideas that did not become rungs, by the protocol of the race: variants of rung 24, each with its own search.

    python -m experiments.variants logs/variants --model mini -B 8 -T 128 --total-batch 1024 --steps 120 \
        --val-every 60

Each is the script of rung 24 with the replacements below. The folder then holds logs as after python -m ladder run
--race; rerun the same command to resume.
"""
import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ladder.errors import UserError
from ladder.measure.race import n_jobs, race
from ladder.measure.runner import Runner, check_flags
from ladder.scripts.stages import BY_LABEL
from ladder.judge.standings import last_val_loss, read_sweep, show_rates

BASE = BY_LABEL["24"]  # the last rung of the race
VARIANTS = {  # name: (what it is, [(text of rung 24, what replaces it), ...])
    "label_smoothing": ("label smoothing of 0.1, judged by the loss without it", [
        ("logits_grad = log_probs.exp_().add_(one_hot, alpha=-1)",
         "smoothed = 0.9 * one_hot\n"
         "                smoothed[:, :vocab_size] += 0.1 / vocab_size\n"
         "                logits_grad = log_probs.exp_().sub_(smoothed)"),
    ]),
    "relu_squared": ("ReLU^2 with 4 * C hidden numbers instead of SwiGLU with 8/3 * C", [
        ("        self.gate_proj = nn.Linear(config.n_embd, config.n_hidden, bias=False)\n", ""),
        ("F.silu(self.gate_proj(x)) * self.up_proj(x)", "F.relu(self.up_proj(x)).square()"),
        ("return math.ceil(8 * self.n_embd / 3 / 64) * 64", "return 4 * self.n_embd"),
    ]),
    "untied": ("an output layer of its own", [
        ("self.transformer.wte.weight = self.lm_head.weight  # one parameter", "# two parameters, not one"),
        ("isinstance(module, nn.Embedding)]\n", "isinstance(module, nn.Embedding)] + [self.lm_head.weight]\n"),
    ]),
    "adamw": ("AdamW for the matrices of the blocks, too; --muon-lr is its rate for them", [
        ("return MuonAdamW(", "return torch.optim.AdamW("),
    ]),
    "qkv_apart": ("c_attn's query, key and value orthogonalized one by one, not as one matrix", [
        ("self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)",
         "self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)\n"
         "        self.c_attn.weight.n_parts = 3"),
        ("stacks.setdefault((p.shape, ", 'stacks.setdefault((getattr(p, "n_parts", 1), p.shape, '),
        ("update = muon_update(torch.stack(grads), torch.stack(momenta))",
         'pieces = [torch.stack(each).chunk(getattr(stack[0], "n_parts", 1), dim=1) for each in (grads, momenta)]\n'
         "            update = torch.cat([muon_update(*each) for each in zip(*pieces, strict=True)], dim=1)"),
    ]),
}


def write_variant(name, folder, variants=VARIANTS):
    """The script of a variant, in `folder`, as a stage of a race."""
    text = BASE.path.read_text(encoding="utf-8")
    for old, new in variants[name][1]:
        if text.count(old) != 1:
            raise UserError(f"{name}: the variant no longer fits {BASE.file}: {old!r}")
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return replace(BASE, label=name, file=str(path.resolve()), title=variants[name][0], same_losses=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("logs", type=Path, help="a folder")
    parser.add_argument("--seeds", type=int, default=3)
    args, flags = parser.parse_known_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    stages = [write_variant(name, args.logs) for name in VARIANTS]
    settings = check_flags([BASE], flags)
    with Runner(settings, args.logs, 7200, Console(), resume=True, n_jobs=n_jobs(stages, args.seeds)) as runner:
        race(stages, flags, args.logs, args.seeds, runner.run)
    sweep = read_sweep(args.logs)
    for stage in stages:
        rounds = [last_val_loss(args.logs / f"round_{n + 1}" / f"{stage.name}.log") for n in range(args.seeds)]
        rates = ", ".join(f"{show_rates(rates)}: {loss:.3f}" for rates, loss in sweep[stage.name].items())
        print(f"{stage.title}: {' '.join(f'{loss:.3f}' for loss in rounds)} (search: {rates})")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
