"""What comes out of the changes in docs/exercises.md, and of its predictions: each in a copy of our script.

    python data/prepare.py --tokenizer bytes --out data/bytes    # once
    OMP_NUM_THREADS=1 python -m experiments.exercises            # all of them, or the labels of some: 7 9 ddp

Short runs are `--model tiny -T 256` on data/tokens (50 steps); longer ones are 200 steps on data/bytes, three seeds.
"""
import argparse
import contextlib
import io
import math
import re
import subprocess
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
LONG_RUNS = {}  # of this process: what long_run has found


# ---- scripts, changed and run ----------------------------------------------------------------------------------------

def edited(label, *edits):
    """The text of a rung's script with each (old, new) replaced."""
    source = BY_LABEL[label].path.read_text(encoding="utf-8")
    for old, new in edits:
        if source.count(old) != 1:
            sys.exit(f"error: rung {label}: {source.count(old)} places for the change: {old}")
        source = source.replace(old, new)
    return source


def script(label, *edits):
    """A rung's script as a module, with these edits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{BY_LABEL[label].name}.py"
        path.write_text(edited(label, *edits), encoding="utf-8")
        return load_script(SimpleNamespace(name=path.stem, path=path))


def parse(module, settings):
    """The arguments of a script: these settings as far as it has them."""
    args = module.parse_args(["--device", "cpu"])
    for name, value in settings.items():
        if hasattr(args, name):
            setattr(args, name, Path(value) if name == "data" else value)
    return args


def numbers(name, text):
    return [float(number) for number in re.findall(rf"\b{name}: ([\d.e+-]+|nan)", text)]


def run(module, **settings):
    """Train without a word. The losses, norms and rates of the steps, the last validation loss, the weights."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = parse(module, QUICK | settings)
        args.log_dir, args.save = Path(folder), Path(folder) / "model.pt"
        module.train(args)
        log = next(Path(folder).glob("*.log")).read_text(encoding="utf-8")
        weights = torch.load(args.save, weights_only=True)["model"]
    steps = "\n".join(line for line in log.splitlines() if line.startswith("step"))
    vals = "\n".join(line for line in log.splitlines() if line.startswith("val"))
    return SimpleNamespace(losses=numbers("loss", steps), norms=numbers("norm", steps), lrs=numbers("lr", steps),
                           val=(numbers("loss", vals) or [None])[-1], weights=weights)


def long_run(label, *edits, **settings):
    """Of a longer run its validation loss, or before rung 13 the mean loss of the last 20 steps; of three seeds."""
    key = str((label, edits, settings))
    if key not in LONG_RUNS:
        done = [run(script(label, *edits), **LONG | settings, seed=seed) for seed in SEEDS]
        losses = [each.val or sum(each.losses[-20:]) / 20 for each in done]
        LONG_RUNS[key] = " ".join(f"{loss:.3f}" for loss in losses)
    return LONG_RUNS[key]


def new_model(module, size="tiny", vocab_size=50257, seed=1337):
    torch.manual_seed(seed)
    return module.GPT(module.model_config(parse(module, {"model": size}), vocab_size))


def count(label, size="tiny", vocab_size=50257, *edits):
    """The parameters of a model."""
    with torch.device("meta"):
        model = new_model(script(label, *edits), size, vocab_size)
    return sum(p.numel() for p in model.parameters())


def first_loss(label, size, T):
    """The loss of step 1, in float32: that of an untrained model on the first T tokens."""
    loader = script("0").DataLoaderLite(Path("data/tokens"), 1, T)
    with torch.no_grad():
        return new_model(script(label), size)(*loader.batch(0)).item()


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

def exercise_1():
    tie = "        # one parameter (vocab_size, n_embd) under two names\n" \
          "        self.transformer.wte.weight = self.lm_head.weight\n"
    start = "        self.apply(self._init_weights)\n"
    for size in ("tiny", "gpt2"):
        print(f"parameters of {size}: {count('0', size):,} and tied {count('1', size):,}")
        T = 256 if size == "tiny" else 1024
        print(f"  loss of step 1: {first_loss('0', size, T):.3f} and tied {first_loss('1', size, T):.3f}")
    print(f"with wte.weights, tiny: {count('1', 'tiny', 50257, ('wte.weight = self', 'wte.weights = self')):,}")
    ours, later = (run(script("1", *edits), steps=1).losses for edits in ([], [(tie + start, start + tie)]))
    print(f"tied before and after the weights are drawn, loss of step 1: {ours[0]} and {later[0]}")


def rounded(x, bits):
    """Float32 numbers rounded to so many bits of mantissa."""
    drop = 23 - bits
    whole = x.view(torch.int32)
    return (((whole + (1 << drop - 1)) >> drop) << drop).view(torch.float32)


def exercise_2():
    one = torch.ones(1)
    print("1 + 1/1024 and 1 + 1/4096 with 10 bits:", *(rounded(one + 1 / n, 10).item() for n in (1024, 4096)))
    ours, tf32 = (run(script(label)).losses for label in ("1", "2"))
    print(f"losses of rungs 1 and 2 on a CPU, most apart: {max(abs(a - b) for a, b in zip(ours, tf32, strict=True))}")
    torch.manual_seed(0)
    a, b = torch.randn(1024, 768), torch.randn(768, 768)
    exact = a.double() @ b.double()
    for bits in (23, 10, 7):
        product = rounded(a, bits).double() @ rounded(b, bits).double() if bits < 23 else (a @ b).double()
        print(f"{bits} bits of mantissa, relative error of a product: {(product - exact).norm() / exact.norm():.1e}")


def exercise_3():
    print("256 + 1 in bfloat16:", (torch.tensor(256.0) + 1).bfloat16().item())
    plain = ("new_model(args, loader).to(device)\n", "new_model(args, loader).to(device, torch.bfloat16)\n")
    module = script("3")
    exact = run(script("2")).losses
    for name, one in (("under autocast", module), ("weights in bfloat16", script("3", plain))):
        one.autocast_dtype = lambda device: torch.bfloat16
        done = run(one)
        gains = done.weights["transformer.ln_f.weight"]
        apart = max(abs(a - b) for a, b in zip(done.losses, exact, strict=True))
        print(f"{name}: step 50 {done.losses[-1]:.3f} (rung 2: {exact[-1]:.3f}), most apart {apart:.4f};"
              f" gains of ln_f that have moved: {(gains != 1).sum()} of 64")


def added_to_stream(label, n_layer, *edits):
    """The standard deviation of what all blocks together add to the residual stream of a fresh model."""
    module, streams = script(label, *edits), []
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(vocab_size=1000, n_layer=n_layer, n_head=2, n_embd=128))
    model.transformer.h[0].register_forward_hook(lambda part, args, output: streams.append(args[0]))
    model.transformer.h[-1].register_forward_hook(lambda part, args, output: streams.append(output))
    with torch.no_grad():
        model(torch.randint(0, 1000, (4, 64)))
    return (streams[1] - streams[0]).std().item()


def exercise_4():
    for name, size in (("tiny", "tiny"), ("gpt2", "gpt2")):
        model = new_model(script("4"), size, 257)
        print(f"{name}: c_proj starts at {model.transformer.h[0].mlp.c_proj.weight.std():.5f}")
    halved = ("(2 * self.config.n_layer) ** -0.5", "(2 * self.config.n_layer) ** -1.0")
    scripts = (("rung 3", "3", ()), ("rung 4", "4", ()), ("1 / n in place of 1 / sqrt(n)", "4", [halved]))
    for name, label, edits in scripts:
        found = [added_to_stream(label, n_layer, *edits) for n_layer in (6, 24, 96)]
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
    losses = [run(script(label)).losses for label in ("5", "6")]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print(f"losses of rungs 5 and 6, 50 steps: most apart {apart:.4f}")


def exercise_7():
    n_rows = [count("7", "tiny", size) - count("6", "tiny", size) for size in (50257, 257, 256)]
    print("parameters more in tiny, vocabularies of 50257, 257, 256:", *n_rows, "in gpt2:",
          count("7", "gpt2") - count("6", "gpt2"))
    mask = "        logits = logits + padding  # (B, T, n_rows) + (n_rows,)\n"
    ours, whole = (run(script("7", *edits)) for edits in ([], [(mask, "")]))
    print(f"ln(50304 / 50257) = {math.log(50304 / 50257):.6f}")
    for step in (1, 2, 10, 50):
        print(f"step {step}: {ours.losses[step - 1]:.6f}, without the mask {whole.losses[step - 1]:.6f},"
              f" difference {whole.losses[step - 1] - ours.losses[step - 1]:.6f}")
    start = new_model(script("7")).lm_head.weight
    for name, done in (("with the mask", ours), ("without", whole)):
        change = (done.weights["lm_head.weight"] - start)[50257:]
        print(f"{name}: padding rows moved by {change.square().mean().sqrt():.6f} (they start at 0.02)")


def exercise_8():
    before, after = (run(script(label), steps=3) for label in ("7", "8"))
    print("norms:", *after.norms)
    print("losses of rung 7:", *before.losses)
    print("losses of rung 8:", *after.losses)


def exercise_9():
    done = run(script("9"), max_lr=6e-4)
    print("rates of steps 1, 5, 10, 30, 50:", *(done.lrs[step - 1] for step in (1, 5, 10, 30, 50)))


def exercise_10():
    with torch.device("meta"):
        model = new_model(script("10"), "gpt2")
    groups = model.configure_optimizers(lr=6e-4, weight_decay=0.1).param_groups
    for name, group in zip(("decay", "do not"), groups, strict=True):
        print(f"gpt2, {name}: {len(group['params'])} tensors, {sum(p.numel() for p in group['params']):,} parameters")
    ours = run(script("10"), max_lr=6e-4)
    factor = math.prod(1 - 0.1 * lr for lr in ours.lrs)
    start = new_model(script("10")).lm_head.weight[50257:]
    rows = ours.weights["lm_head.weight"][50257:]
    print(f"sum of the rates {sum(ours.lrs):.5f}; product of 1 - 0.1 lr: {factor:.6f};"
          f" a padding row after 50 steps: {(rows / start).mean():.6f} of itself")


def two_ranks(source, *flags):
    """The step lines of a script on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(source, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", path, "--model",
                   "tiny", "-T", "256", "--compile-mode", "none", "--device", "cpu", "--log-dir", folder, *flags]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return numbers("loss", "\n".join(line for line in done.stdout.splitlines() if line.startswith("step")))


def exercise_ddp():
    n = count("10", "gpt2")
    print(f"gradients of gpt2: {4 * n / 1e6:.0f} MB; a rank sends 2 (n - 1) / n of it:",
          *(f"{ranks} ranks {2 * (ranks - 1) / ranks * 4 * n / 1e6:.0f} MB" for ranks in (2, 8)))
    same = ("(step - 1) * world_size + rank)", "(step - 1) * world_size)")
    rows = [("two ranks, B=1", two_ranks(edited("ddp"), "--steps", "3", "-B", "1")),
            ("one process, B=2", run(script("10"), B=2, steps=3).losses),
            ("one process, B=1", run(script("10"), B=1, steps=3).losses),
            ("two ranks, B=1, without + rank", two_ranks(edited("ddp", same), "--steps", "3", "-B", "1"))]
    for name, losses in rows:
        print(f"{name}:", *losses)


def exercise_11():
    print("micro-steps of B=16 T=1024 in 524288:", 524288 // (16 * 1024))
    wrong = ("model(x, y) / len(numbers)", "model(x, y)")
    for name, edits in (("as it is", []), ("without the division", [wrong])):
        done = run(script("11", *edits), total_batch=1024)
        print(f"{name}: steps 1, 2, 50: losses", done.losses[0], done.losses[1], done.losses[-1],
              "norms", done.norms[0], done.norms[1], done.norms[-1])


def exercise_13():
    loader = script("13").DataLoaderLite(Path("data/tokens"), 1, 1024, "cpu", "val")
    short = script("13").DataLoaderLite(Path("data/tokens"), 1, 256, "cpu", "val")
    print(f"val.bin: {len(loader.tokens):,} tokens, {loader.n_batches} sequences of 1024, {short.n_batches} of 256")


def exercise_14():
    n = count("14")
    print(f"12 bytes a parameter: tiny {12 * n / 1e6:.1f} MB, gpt2 {12 * count('14', 'gpt2') / 1e9:.2f} GB")
    forgets = ('        self.optimizer.load_state_dict(saved["optimizer"])\n', "")
    for name, edits in (("as it is", []), ("moments not restored", [forgets])):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            module = script("14", *edits)
            args = parse(module, QUICK | {"steps": 20, "checkpoint_every": 10})
            args.log_dir, args.checkpoint_dir = Path(folder), Path(folder) / "checkpoints"
            module.train(args)
            newest = sorted(args.checkpoint_dir.glob("*.pt"))[-1]
            size = newest.stat().st_size
            first = numbers("loss", next(Path(folder).glob("*.log")).read_text(encoding="utf-8"))
            newest.unlink()  # as if the run had crashed after step 10
            args.resume = True
            module.train(args)
            second = numbers("loss", (Path(folder) / "rung_14_checkpoint_resume.log").read_text(encoding="utf-8"))
        print(f"{name}: a file of {size / 1e6:.1f} MB; steps 11, 12, 20:", first[10], first[11], first[19],
              "resumed:", second[-10], second[-9], second[-1])


def exercise_16():
    module = script("16")
    block = module.Block(module.GPTConfig(n_layer=2, n_head=2, n_embd=64))
    x = torch.zeros(1, 256, 64, requires_grad=True)
    checkpointed = torch.utils.checkpoint.checkpoint
    for name, call in (("plain", lambda: block(x)),
                       ("checkpointed", lambda: checkpointed(block, x, use_reentrant=False))):
        shapes = kept(call, block)
        share = sum(n for _, n in shapes) / x.nbytes
        print(f"{name}: a block keeps {len(shapes)} tensors, {share:.2f} times its input:",
              *(("x".join(map(str, shape))) for shape, _ in shapes))
    for blocks in (0, 2):
        model = new_model(module, vocab_size=257)
        model.recompute_blocks = blocks
        ids = torch.zeros(1, 256, dtype=int)
        with FlopCounterMode(display=False) as flops:
            model(ids, ids).backward()
        print(f"{blocks} of 2 blocks recomputed: {flops.get_total_flops() / 1e6:.1f} MFLOP in a step")


def exercise_17():
    for n in (4096, 16384):
        print(f"logits of {n} tokens in float32: {n * 50304 * 4 / 1e9:.2f} GB")
    logits = torch.zeros(1, 50257, requires_grad=True)
    F.cross_entropy(logits, torch.tensor([7])).backward()
    print(f"gradient by the logits, all equal: {logits.grad[0, 7]:.6f} at the target, "
          f"{logits.grad[0, 8]:.2e} elsewhere")
    inf = ("            logits[:, vocab_size:] = -torch.inf  # no probability for padding\n", "")
    for name, edits in (("as it is", []), ("padding keeps its probability", [inf])):
        for chunk in (0, 4096, 16):
            done = run(script("17", *edits), B=2, total_batch=512, steps=3, loss_chunk=chunk)
            print(f"{name}, --loss-chunk {chunk}:", *done.losses)


def exercise_18():
    s = 0.01
    path = []
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        path.append(f"{s:.3f}")
    print("a singular value of 0.01:", *path)
    torch.manual_seed(0)
    matrix = torch.randn(64, 192)
    for n in (1, 3, 5, 10):
        module = script("18", ("    for _ in range(5):\n        gram", f"    for _ in range({n}):\n        gram"))
        module.autocast_dtype = lambda device: torch.float32
        update = module.orthogonalize(matrix)
        values = torch.linalg.svdvals(update)
        print(f"{n} iterations: singular values {values.min():.3f} to {values.max():.3f}, RMS"
              f" {update.square().mean().sqrt():.4f} (192 ** -0.5 = {192**-0.5:.4f})")


def exercise_19():
    lrs = run(script("19"), max_lr=6e-4).lrs
    print("rates of steps 10, 31, 32, 41, 50:", *(lrs[step - 1] for step in (10, 31, 32, 41, 50)))


def exercise_20():
    for size in ("tiny", "gpt2"):
        print(f"parameters less in {size}: {count('19', size) - count('20', size):,}")
    print("1000 and 1001 in bfloat16:", *torch.tensor([1000.0, 1001.0]).bfloat16().tolist())
    print(f"tokens for a full turn, hs=64: first pair {2 * math.pi:.1f},"
          f" last pair {2 * math.pi * 10000 ** (62 / 64):,.0f}")


def exercise_21():
    for size in ("tiny", "gpt2"):
        print(f"parameters less in {size}: {count('20', size) - count('21', size):,}")
    x = torch.full((4,), 5.0)
    print("of (5, 5, 5, 5): LayerNorm", torch.nn.LayerNorm(4)(x).tolist(), "RMSNorm", torch.nn.RMSNorm(4)(x).tolist())
    for x in ([1.0, 2.0, 3.0, 4.0], [101.0, 102.0, 103.0, 104.0]):
        for name, norm in (("LayerNorm", torch.nn.LayerNorm(4)), ("RMSNorm", torch.nn.RMSNorm(4, eps=1e-6))):
            print(f"of {x}: {name}", *(f"{number:.2f}" for number in norm(torch.tensor(x)).tolist()))


def largest_score(label, factor):
    """The largest attention score of a fresh model whose c_attn is `factor` times as large."""
    model, scores = new_model(script(label), vocab_size=257), []
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


def exercise_22():
    print("parameters more in tiny:", count("22") - count("21"), "in gpt2:", count("22", "gpt2") - count("21", "gpt2"))
    print(f"bound: 32 ** 0.5 = {32**0.5:.2f}")
    for factor in (1, 10, 100):
        print(f"c_attn times {factor}: largest score {largest_score('21', factor):.2f}, with the norms"
              f" {largest_score('22', factor):.2f}")


def exercise_23():
    for n in (64, 768):
        hidden = math.ceil(8 * n / 3 / 64) * 64
        print(f"n_embd {n}: hidden {hidden}, {3 * n * hidden:,} weights; before {8 * n * n:,}")
    gate = "F.silu(self.gate_proj(x))"
    torch.manual_seed(0)
    x = torch.randn(64)
    for name, label, edits in (("GELU, rung 22", "22", []), ("SwiGLU", "23", []),
                               ("gate without SiLU", "23", [(gate, "self.gate_proj(x)")]),
                               ("constant gate", "23", [(gate, "torch.ones_like(self.gate_proj(x))")])):
        mlp = new_model(script(label, *edits), vocab_size=257).transformer.h[0].mlp
        with torch.no_grad():
            for p in mlp.parameters():
                torch.nn.init.normal_(p, std=0.125)  # 64 ** -0.5: numbers of about 1
            growth = (mlp(10 * x).norm() / mlp(x).norm()).item()
            print(f"{name}: 10 times the input gives {growth:.1f} times the output")


def exercise_24():
    for size, T in (("tiny", 256), ("gpt2", 1024)):
        before, after = first_loss("23", size, T), first_loss("24", size, T)
        print(f"loss of step 1, {size}: rung 23 {before:.3f}, rung 24 {after:.3f}")
    model = new_model(script("24"))
    x = torch.arange(256)[None]
    model(x, x.roll(-1, dims=1)).backward()
    block = model.transformer.h[0]
    print("no gradient in step 1:", *(name for name, p in block.named_parameters() if not p.grad.any()))
    print("a gradient:", *(name for name, p in model.transformer.h[0].named_parameters() if p.grad.any()))
    zeros = ("            std = 0.02\n", "            std = 0.0\n")
    losses = run(script("24", zeros)).losses
    print("everything zero: steps 1, 2, 50:", losses[0], losses[1], losses[-1])


def exercise_32():
    print("cache of Qwen3-0.6B, numbers a token:", 2 * 28 * 8 * 128, "with 16 heads:", 2 * 28 * 16 * 128)
    print("c_attn of gpt2 with 4 of 12 heads:", (12 + 2 * 4) * 64, "rows; parameters less:",
          f"{12 * 768 * (2304 - 20 * 64):,}")
    for heads in (4, 2, 1):
        module = script("32")
        args = parse(module, {"model": "2x4x64", "kv_heads": heads})
        model = module.GPT(module.model_config(args, 257))
        print(f"--model 2x4x64 --kv-heads {heads}: {sum(p.numel() for p in model.parameters()):,} parameters on bytes,"
              f" c_attn {tuple(model.transformer.h[0].attn.c_attn.weight.shape)}, cache {2 * 2 * heads * 16} a token")


def exercise_change():
    last = "        return F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))\n"
    twice = (last, last.replace("return ", "return 2 * "))
    for label, chunk in (("24", 0), ("long_run", 4096), ("long_run", 0)):
        ours, changed = (run(script(label, *edits), steps=3, loss_chunk=chunk).losses for edits in ([], [twice]))
        print(f"twice the loss in forward's last line, {label}, --loss-chunk {chunk}:", *changed, "as it is:", *ours)


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
    ],
    "9": [
        ("0.003, cosine", "9", [], {}),
        ("0.003, constant", "9", [CONSTANT], {}),
        ("0.03, cosine", "9", [], {"max_lr": 0.03}),
    ],
    "13": [
        ("val.bin", "13", [], {}),
        ("train.bin", "13", [('args.T, device, "val")', 'args.T, device, "train")')], {}),
    ],
    "18": [
        ("rung 10's AdamW", "validation", [], {}),
        ("as it is", "18", [], {}),
        ("one iteration", "18", [("range(5):\n        gram", "range(1):\n        gram")], {}),
    ],
    "19": [
        ("rung 18, cosine", "18", [], {}),
        ("as it is", "19", [], {}),
    ],
    "20": [
        ("rung 19, wpe", "19", [], {}),
        ("as it is", "20", [], {}),
        ("no positions", "20", [(ROTATED, "")], {}),
        ("values rotated, too", "20", [(ROTATED, ROTATED + "        v = rotate(v, cos, sin)\n")], {}),
    ],
}

EXERCISES = {name.removeprefix("exercise_"): function for name, function in list(globals().items())
             if name.startswith("exercise_")}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("labels", nargs="*", metavar="LABEL", help="exercises (default: all)")
    parser.add_argument("--short", action="store_true", help="without the longer runs")
    args = parser.parse_args(argv)
    for label in args.labels or EXERCISES:
        if label not in EXERCISES:
            parser.error(f"no exercise {label}; there are {', '.join(EXERCISES)}")
        print(f"\n## {label}", flush=True)
        EXERCISES[label]()
        for name, rung, edits, settings in [] if args.short else LONGER.get(label, []):
            print(f"loss, {name}: {long_run(rung, *edits, **settings)}", flush=True)


if __name__ == "__main__":
    main()
