"""What the changes in docs/exercises.md do that break or bend a lesson, each in a copy of our script.

    python data/prepare.py --tokenizer bytes --out data/bytes    # once
    OMP_NUM_THREADS=1 python -m experiments.exercises            # all of them, or the labels of some: 7 9

Short runs are `--model tiny -T 256` on data/tokens (50 steps); longer ones are 200 steps on data/bytes, three seeds.
Changes that are a flag of the script, and predictions that are arithmetic, need no program: the exercise has the
command. printed.txt also has those figures, from when this program printed them (commit 1984a32).
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
from torch.utils.flop_counter import FlopCounterMode

from ladder.rungs.list import BY_LABEL, load_script

QUICK = {"model": "tiny", "B": 1, "T": 256, "compile_mode": "none", "total_batch": 256, "val_every": 0,
         "checkpoint_every": 0}
LONG = QUICK | {"data": "data/bytes", "B": 8, "T": 64, "steps": 200, "total_batch": 512, "max_lr": 3e-3,
                "muon_lr": 0.01, "val_every": 200, "val_sequences": 100}
SEEDS = (1, 2, 3)


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
            setattr(args, name, Path(value) if name == "data" else value)
    return args


def losses_of(log, kind):
    """The losses of a log's lines of one kind, "step" or "val"."""
    return [float(loss) for loss in re.findall(rf"^{kind} .*? loss: ([\d.]+|nan|inf)", log, re.MULTILINE)]


def run(module, **settings):
    """Train without a word. The losses of the steps and of the validations, the weights at the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = parse(module, QUICK | settings)
        args.log_dir, args.save = Path(folder), Path(folder) / "model.pt"
        module.train(args)
        log = next(Path(folder).glob("*.log")).read_text(encoding="utf-8")
        weights = torch.load(args.save, weights_only=True)["model"]
    return SimpleNamespace(losses=losses_of(log, "step"), vals=losses_of(log, "val"), weights=weights)


def last_loss(done):
    """A run's last validation loss, or before `distributed_validation` the mean loss of its last 20 steps."""
    if done.vals:
        return done.vals[-1]
    return sum(done.losses[-20:]) / len(done.losses[-20:])


def new_model(module, size="tiny", vocab_size=257):
    torch.manual_seed(1337)
    return module.GPT(module.model_config(parse(module, {"model": size}), vocab_size))


def kept(function, part):
    """What a function keeps for the backward pass: [(shape, bytes)], without the parameters of `part`."""
    shapes = []
    seen = {p.untyped_storage().data_ptr() for p in part.parameters()}

    def see(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            shapes.append((tuple(tensor.shape), storage.nbytes()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        result = function()  # alive until here, so that no storage's address is used twice
    del result
    return shapes


# ---- the exercises ---------------------------------------------------------------------------------------------------

def rounded(x, bits):
    """Float32 numbers rounded to so many bits of mantissa."""
    drop = 23 - bits
    whole = x.view(torch.int32)
    return (((whole + (1 << drop - 1)) >> drop) << drop).view(torch.float32)


def exercise_0():
    one_batch = ("loader.batch(step - 1)", "loader.batch(0)")
    same_token = ("x, y = x.to(device), y.to(device)", "x, y = x.to(device), x.to(device)")
    changes = {"as it is": [], "one batch": [one_batch], "targets are the inputs": [one_batch, same_token],
               "gradients not zeroed": [one_batch, ("        optimizer.zero_grad()\n", "")]}
    for name, edits in changes.items():
        losses = run(script("0", *edits), model="small", T=64, steps=100).losses
        print(f"{name}: steps 1, 20, 50, 100:", *(f"{losses[step - 1]:.3f}" for step in (1, 20, 50, 100)), flush=True)


def exercise_2():
    torch.manual_seed(0)
    a, b = torch.randn(1024, 768), torch.randn(768, 768)
    exact = a.double() @ b.double()
    products = {23: a @ b} | {bits: rounded(a, bits).double() @ rounded(b, bits).double() for bits in (10, 7)}
    for bits, product in products.items():
        print(f"{bits} bits of mantissa, relative error of a product: {(product - exact).norm() / exact.norm():.1e}")


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


def attention_bytes(label, T):
    module = script(label)
    attention = module.CausalSelfAttention(module.GPTConfig(block_size=T))
    shapes = kept(lambda: attention(torch.zeros(1, T, 768, requires_grad=True)), attention)
    return sum(n_bytes for _, n_bytes in shapes)


def exercise_6():
    for T in (256, 512, 1024, 2048):
        print(f"T={T}: attention of one layer keeps {attention_bytes('5', T) / 1e6:.1f} MB,"
              f" flash {attention_bytes('6', T) / 1e6:.1f} MB (B=1, float32)")


def exercise_7():
    mask = "        logits = logits + padding  # (B, T, n_rows) + (n_rows,)\n"
    ours, whole = (run(script("7", *edits)) for edits in ([], [(mask, "")]))
    for step in (1, 50):
        print(f"step {step}: {ours.losses[step - 1]:.6f}, without the mask {whole.losses[step - 1]:.6f},"
              f" difference {whole.losses[step - 1] - ours.losses[step - 1]:.6f}")
    start = new_model(script("7"), vocab_size=50257).lm_head.weight
    for name, done in (("with the mask", ours), ("without", whole)):
        change = (done.weights["lm_head.weight"] - start)[50257:]
        print(f"{name}: padding rows moved by {change.square().mean().sqrt():.6f} (they start at 0.02)")


def crash_and_resume(module, steps):
    """The losses of a run, and of the steps that it repeats after its second half was lost; the checkpoint's bytes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = parse(module, QUICK | {"steps": steps, "checkpoint_every": steps // 2})
        args.log_dir, args.checkpoint_dir = Path(folder), Path(folder) / "checkpoints"
        module.train(args)
        newest = sorted(args.checkpoint_dir.glob("*.pt"))[-1]
        n_bytes = newest.stat().st_size
        log = next(Path(folder).glob("*.log"))
        first = losses_of(log.read_text(encoding="utf-8"), "step")
        newest.unlink()
        args.resume = True
        module.train(args)
        second = losses_of(log.read_text(encoding="utf-8"), "step")
    return first, second[-steps // 2 :], n_bytes


def exercise_checkpoints():
    forgets = ('        self.optimizer.load_state_dict(saved["optimizer"])\n', "")
    for name, edits in (("as it is", []), ("moments not restored", [forgets])):
        first, second, n_bytes = crash_and_resume(script("checkpoints", *edits), steps=20)
        print(f"{name}: a file of {n_bytes / 1e6:.1f} MB; steps 11, 12, 20:", first[10], first[11], first[19],
              "resumed:", second[0], second[1], second[9])


def exercise_gradient_checkpointing():
    module = script("gradient_checkpointing")
    block = module.Block(module.GPTConfig(n_layer=2, n_head=2, n_embd=64))
    x = torch.zeros(1, 256, 64, requires_grad=True)
    checkpointed = torch.utils.checkpoint.checkpoint
    calls = {"plain": lambda: block(x), "checkpointed": lambda: checkpointed(block, x, use_reentrant=False)}
    for name, call in calls.items():
        shapes = kept(call, block)
        share = sum(n_bytes for _, n_bytes in shapes) / x.nbytes
        print(f"{name}: a block keeps {len(shapes)} tensors, {share:.2f} times its input:",
              *(("x".join(map(str, shape))) for shape, _ in shapes))
    for blocks in (0, 2):
        model = new_model(module)
        model.recompute_blocks = blocks
        ids = torch.zeros(1, 256, dtype=int)
        with FlopCounterMode(display=False) as flops:
            model(ids, ids).backward()
        print(f"{blocks} of 2 blocks recomputed: {flops.get_total_flops() / 1e6:.1f} MFLOP in a step")


def exercise_muon():
    torch.manual_seed(0)
    matrix = torch.randn(64, 192)
    for n in (1, 3, 5, 10):
        module = script("muon", ("    for _ in range(5):\n        gram", f"    for _ in range({n}):\n        gram"))
        module.autocast_dtype = lambda device: torch.float32
        values = torch.linalg.svdvals(module.orthogonalize(matrix[None]))
        print(f"{n} iterations: singular values {values.min():.3f} to {values.max():.3f}")


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


# ---- longer runs: (what, rung, edits, settings) ----------------------------------------------------------------------

SDPA = "F.scaled_dot_product_attention(q, k, v, is_causal=True)"
ROTATED = "        q = rotate(q, cos, sin)\n        k = rotate(k, cos, sin)\n"
CONSTANT = ("lr = get_lr(step, args.steps, args.max_lr, args.warmup_steps)", "lr = args.max_lr")
LONGER = {
    "6": [
        ("as it is", "6", [], {}),
        ("is_causal=False", "6", [(SDPA, SDPA.replace("True", "False"))], {}),
        ("scale=1.0", "6", [(SDPA, SDPA.replace("True", "True, scale=1.0"))], {}),
    ],
    "8": [
        ("rung 7", "7", [], {}),
        ("as it is", "8", [], {}),
        ("beta2 0.999", "8", [("betas=(0.9, 0.95)", "betas=(0.9, 0.999)")], {}),
        ("clipped to 0.01", "8", [("parameters(), 1.0)", "parameters(), 0.01)")], {}),
        ("not clipped", "8", [("parameters(), 1.0)", "parameters(), 1e9)")], {}),
    ],
    "9": [
        ("0.003, cosine", "9", [], {}),
        ("0.003, constant", "9", [CONSTANT], {}),
        ("0.03, cosine", "9", [], {"max_lr": 0.03}),
    ],
    "distributed_validation": [
        ("val.bin", "distributed_validation", [], {}),
        ("train.bin", "distributed_validation", [('args.T, device, "val")', 'args.T, device, "train")')], {}),
    ],
    "muon": [
        ("rung 10's AdamW", "validation", [], {}),
        ("as it is", "muon", [], {}),
        ("one iteration", "muon", [("range(5):\n        gram", "range(1):\n        gram")], {}),
    ],
    "trapezoid_lr": [
        ("muon, cosine", "muon", [], {}),
        ("as it is", "trapezoid_lr", [], {}),
    ],
    "rope": [
        ("trapezoid_lr, wpe", "trapezoid_lr", [], {}),
        ("as it is", "rope", [], {}),
        ("no positions", "rope", [(ROTATED, "")], {}),
        ("values rotated, too", "rope", [(ROTATED, ROTATED + "        v = rotate(v, cos, sin)\n")], {}),
    ],
}

SHORT = {name.removeprefix("exercise_"): function for name, function in list(globals().items())
         if name.startswith("exercise_")}
LABELS = [label for label in BY_LABEL if label in SHORT or label in LONGER]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("labels", nargs="*", metavar="LABEL", help=f"of {', '.join(LABELS)} (default: all)")
    parser.add_argument("--short", action="store_true", help="without the longer runs")
    args = parser.parse_args(argv)
    for label in args.labels or LABELS:
        if label not in LABELS:
            parser.error(f"no changes for {label}; there are some for {', '.join(LABELS)}")
        print(f"\n## {label}", flush=True)
        if label in SHORT:
            SHORT[label]()
        for name, rung, edits, settings in [] if args.short else LONGER.get(label, []):
            runs = [run(script(rung, *edits), **LONG | settings, seed=seed) for seed in SEEDS]
            print(f"loss, {name}:", *(f"{last_loss(done):.3f}" for done in runs), flush=True)


if __name__ == "__main__":
    main()
