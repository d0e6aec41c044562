"""What some changes in docs/exercises.md do that break or bend a lesson, each in a copy of our script.

    OMP_NUM_THREADS=1 python -m experiments.exercises            # all of them, or the labels of some: 4 swiglu

The runs are `--model tiny -T 256` on data/tokens (50 steps). printed.txt also has the figures of the other exercises,
which older versions of this program printed.
"""
import argparse
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from ladder.rungs.list import BY_LABEL, load_script

QUICK = {"model": "tiny", "B": 1, "T": 256, "compile_mode": "none"}


# ---- scripts, changed and run ----------------------------------------------------------------------------------------

def edited(label, edits):
    """The text of a rung's script with each (old, new) replaced."""
    source = BY_LABEL[label].path.read_text(encoding="utf-8")
    for old, new in edits:
        if source.count(old) != 1:
            sys.exit(f"error: {label}: {source.count(old)} places for the change: {old}")
        source = source.replace(old, new)
    return source


def script(label, *edits):
    """A rung's script as a module, with these edits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{BY_LABEL[label].name}.py"
        path.write_text(edited(label, edits), encoding="utf-8")
        return load_script(SimpleNamespace(name=path.stem, path=path))


def parse(module, settings):
    """The arguments of a script: these settings as far as it has them."""
    args = module.parse_args(["--device", "cpu"])
    for name, value in settings.items():
        if hasattr(args, name):
            setattr(args, name, value)
    return args


def run(module, **settings):
    """Train without a word. The losses of the steps, and the weights at the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = parse(module, QUICK | settings)
        args.log_dir, args.save = Path(folder), Path(folder) / "model.pt"
        module.train(args)
        log = next(Path(folder).glob("*.log")).read_text(encoding="utf-8")
        weights = torch.load(args.save, weights_only=True)["model"]
    losses = [float(loss) for loss in re.findall(r"^step .*? loss: ([\d.]+|nan|inf)", log, re.MULTILINE)]
    return SimpleNamespace(losses=losses, weights=weights)


def new_model(module):
    torch.manual_seed(1337)
    return module.GPT(module.model_config(parse(module, {"model": "tiny"}), 257))


# ---- the exercises ---------------------------------------------------------------------------------------------------

def exercise_3():
    plain = ("new_model(args, loader).to(device)\n", "new_model(args, loader).to(device, torch.bfloat16)\n")
    exact = run(script("2")).losses
    for name, module in (("under autocast", script("3")), ("weights in bfloat16", script("3", plain))):
        module.autocast_dtype = lambda device: torch.bfloat16
        done = run(module)
        moved = (done.weights["transformer.ln_f.weight"] != 1).sum()
        apart = max(abs(a - b) for a, b in zip(done.losses, exact, strict=True))
        print(f"{name}: step 50 {done.losses[-1]:.3f} (rung 2: {exact[-1]:.3f}), most apart {apart:.4f};"
              f" gains of ln_f that have moved: {moved} of 64")


def added_to_stream(module, n_layer):
    """The standard deviation of what all blocks together add to the residual stream of a fresh model."""
    streams = []
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(vocab_size=1000, n_layer=n_layer, n_head=2, n_embd=128))
    model.transformer.h[0].register_forward_hook(lambda part, args, output: streams.append(args[0]))
    model.transformer.h[-1].register_forward_hook(lambda part, args, output: streams.append(output))
    with torch.no_grad():
        model(torch.randint(0, 1000, (4, 64)))
    return (streams[1] - streams[0]).std().item()


def exercise_4():
    halved = ("(2 * self.config.n_layer) ** -0.5", "(2 * self.config.n_layer) ** -1.0")
    scripts = {"rung 3": script("3"), "rung 4": script("4"), "1 / n in place of 1 / sqrt(n)": script("4", halved)}
    for name, module in scripts.items():
        found = [added_to_stream(module, n_layer) for n_layer in (6, 24, 96)]
        print(f"{name}: added by 6, 24, 96 layers:", *(f"{std:.4f}" for std in found))


def exercise_5():
    wrong = ("save_model(args.save, model, ", "save_model(args.save, step_model, ")
    compile_ = torch.compile
    torch.compile = lambda function, mode=None: compile_(function, backend="eager")  # writes no C++: seconds
    for name, edits in (("model", []), ("step_model", [wrong])):
        names = list(run(script("5", *edits), steps=1, compile_mode="default").weights)
        print(f"saved {name}: {names[0]}, …")
    torch.compile = compile_


def largest_score(label, factor):
    """The largest attention score of a fresh model whose c_attn is `factor` times as large."""
    model, scores = new_model(script(label)), []
    attention = F.scaled_dot_product_attention

    def see(q, k, v, **more):
        scores.append((q @ k.mT).abs().max().item() / q.size(-1) ** 0.5)
        return attention(q, k, v, **more)

    F.scaled_dot_product_attention = see
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight.mul_(factor)
        model(torch.arange(256)[None])
    F.scaled_dot_product_attention = attention
    return max(scores)


def exercise_qk_norm():
    for factor in (1, 10, 100):
        print(f"c_attn times {factor}: largest score {largest_score('rmsnorm', factor):.2f}, with the norms"
              f" {largest_score('qk_norm', factor):.2f}")


def growth_of_mlp(label, *edits):
    """By what factor an MLP's output grows when its input grows tenfold."""
    torch.manual_seed(0)
    x = torch.randn(64)
    mlp = new_model(script(label, *edits)).transformer.h[0].mlp
    with torch.no_grad():
        for p in mlp.parameters():
            torch.nn.init.normal_(p, std=0.125)  # 64 ** -0.5: numbers of about 1
        return (mlp(10 * x).norm() / mlp(x).norm()).item()


def exercise_swiglu():
    gate = "F.silu(self.gate_proj(x))"
    rows = {"GELU, qk_norm": ("qk_norm",), "SwiGLU": ("swiglu",),
            "gate without SiLU": ("swiglu", (gate, "self.gate_proj(x)")),
            "constant gate": ("swiglu", (gate, "torch.ones_like(self.gate_proj(x))"))}
    for name, row in rows.items():
        print(f"{name}: 10 times the input gives {growth_of_mlp(*row):.1f} times the output")


EXERCISES = {"3": exercise_3, "4": exercise_4, "5": exercise_5, "qk_norm": exercise_qk_norm, "swiglu": exercise_swiglu}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("labels", nargs="*", metavar="LABEL", help=f"of {', '.join(EXERCISES)} (default: all)")
    for label in parser.parse_args(argv).labels or EXERCISES:
        if label not in EXERCISES:
            parser.error(f"no changes for {label}; there are some for {', '.join(EXERCISES)}")
        print(f"\n## {label}", flush=True)
        EXERCISES[label]()


if __name__ == "__main__":
    main()
