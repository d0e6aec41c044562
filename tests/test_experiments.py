"""experiments/: what they change about a model or a run, and that their numbers are true."""
import ast
import json
import math
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import load_module, losses, new_gpt, run_command, rung, train

from experiments import causal_attention, compress, data_wait, eight_bit_adamw, sampling_speed, variants
from ladder.errors import UserError
from ladder.show.logs import read_log

FOLDER = Path(variants.__file__).parent
NO_FLAGS = {"cpu_bfloat16", "floors", "prepare_speed"}
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TINY = ["--model", "tiny", "--device", "cpu", "-B", "1", "-T", "32"]
N_PARAMETERS = 64 * (50304 + 1024) + 2 * (12 * 64**2 + 13 * 64) + 2 * 64  # of the tiny GPT-2 of rung 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokens):
    """A checkpoint of a short run of rung 10."""
    folder = tmp_path_factory.mktemp("saved")
    train(rung("10"), folder, tokens, "-B", 1, "-T", 32, "--steps", 8, "--max-lr", 0.01, "--save", folder / "model.pt")
    return str(folder / "model.pt")


@pytest.fixture
def model(saved):
    return compress.with_linear_layers(compress.load_model(saved, "cpu")[0])


def block_weights(model):
    return {name: layer.weight for name, layer in model.named_modules() if compress.is_in_block(layer, name)}


@torch.no_grad()
def test_compress_measures_the_loss_that_the_script_computes(model, saved, tokens):
    """Of linear layers in place of transformers' Conv1D, in the blocks only."""
    assert sorted(block_weights(model)) == sorted(
        f"transformer.h.{i}.{part}" for i in range(2)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
    module, checkpoint = rung("10"), torch.load(saved, weights_only=True)
    own = module.GPT(module.GPTConfig(**checkpoint["config"]))
    own.load_state_dict(checkpoint["model"])
    sequences, _ = compress.read_sequences(tokens, 64, 5)
    val = torch.from_numpy(module.open_tokens(tokens, "val", 5 * 64 + 1)[0][: 5 * 64 + 1].astype("int64"))
    x, y = val[:-1].view(5, 64), val[1:].view(5, 64)
    assert torch.equal(sequences, torch.cat([x, y[:, -1:]], dim=1))
    assert compress.validation_loss(model, sequences) == pytest.approx(own(x, y).item(), abs=1e-4)


@pytest.mark.parametrize("amount", [0.3, 0.9])
def test_compress_prunes_the_smallest_weights_of_all_blocks(amount, model):
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    compress.prune_blocks(model, amount)
    pruned = torch.cat([weight.detach().flatten() for weight in block_weights(model).values()])
    original = torch.cat([before[f"{name}.weight"].flatten() for name in block_weights(model)])
    gone = pruned == 0
    assert gone.float().mean() == pytest.approx(amount, abs=1e-4)
    assert original[gone].abs().max() <= original[~gone].abs().min()
    assert torch.equal(pruned[~gone], original[~gone])
    for name, parameter in model.named_parameters():
        assert name.removesuffix(".weight") in block_weights(model) or torch.equal(parameter, before[name])


def test_compress_int8_keeps_the_model_and_a_quarter_of_its_blocks(model):
    n_weights = sum(weight.numel() for weight in block_weights(model).values())
    before = compress.file_sizes(model)[0]
    original = {name: weight.detach().clone() for name, weight in block_weights(model).items()}
    compress.to_int8(model, compress.is_in_block)
    for name, weight in block_weights(model).items():
        step = original[name].abs().amax(dim=1, keepdim=True) / 127  # each row has its own
        error = (weight.dequantize() - original[name]).abs()
        assert error.max() > 0 and (error <= 0.51 * step).all()
    saved_bytes = before - compress.file_sizes(model)[0]
    assert saved_bytes == pytest.approx(3 * n_weights, rel=0.1)  # less the scales
    assert model.lm_head.weight is model.transformer.wte.weight


def test_compress_prints_the_whole_table_and_draws_it(model, saved, tokens, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compress, "NEW_TOKENS", 3)
    compress.main([saved, "--data", str(tokens), "-T", "64", "--val-sequences", "4", "--device", "cpu",
                   "--png", str(tmp_path / "c.png")])
    out = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")][2:]
    assert [row[0].strip() for row in rows] == list(compress.VARIANTS)
    n_parameters = sum(p.numel() for p in model.parameters())
    assert float(rows[0][1]) == pytest.approx(4 * n_parameters / 1e6, abs=0.2)
    assert float(rows[1][1]) == pytest.approx(2 * n_parameters / 1e6, abs=0.2)
    assert all(float(row[4]) > 0 for row in rows)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert f"{n_parameters:,} parameters; 4 sequences of 64 tokens" in out


@pytest.mark.parametrize("flags, reason", [
    (["--val-sequences", 0], "--val-sequences 0: out of range; give at least 1"),
    (["-T", 1025], "-T 1025: the model's longest sequence is 1024; lower -T"),
    (["--data", "nowhere"], "--data nowhere: no token files"),
    (["--png", "nowhere/c.png"], "cannot be written; name a file in a folder that exists"),
    (["--device", "abacus"], "--device abacus: not available here"),
])
def test_compress_refuses(flags, reason, saved, tokens):
    with pytest.raises(SystemExit, match=f"^error: .*{reason}"):
        compress.main([saved, "--data", str(tokens), "--device", "cpu", *map(str, flags)])


@torch.no_grad()
def test_sampling_speed_compares_the_same_text(saved, capsys):
    sampling_speed.main([saved, "--new-tokens", "20", "--device", "cpu"])
    out = capsys.readouterr().out
    assert out.startswith("20 tokens on cpu: ") and out.rstrip().endswith("the same text")
    with pytest.raises(SystemExit, match="--new-tokens 1024: out of range; give 1 to 1023"):
        sampling_speed.main([saved, "--new-tokens", "1024", "--device", "cpu"])
    model, _ = sampling_speed.load_model(saved, "cpu")
    read = []  # how many tokens each call of the model reads
    hook = model.register_forward_pre_hook(
        lambda *call: read.append(call[2]["input_ids"].shape[1]), with_kwargs=True)
    for use_cache, expected in {True: [1] * 20, False: [*range(1, 21)]}.items():
        read.clear()
        speed, ids = sampling_speed.tokens_per_second(model, 20, use_cache)
        assert read == expected
    hook.remove()
    expected = [50256]
    for _ in range(20):  # by hand: always the likeliest, <|endoftext|> left out
        expected.append(int(model(torch.tensor([expected])).logits[0, -1, :50256].argmax()))
    assert ids == expected and speed > 0


def test_data_wait_is_the_loaders(tokens, monkeypatch):
    """A loader that takes 20 ms for a batch: rung 11 waits for it, rung 12 has it already."""
    waits = []
    for label in ("11", "12"):
        module = rung(label)
        batch = module.DataLoaderLite.batch

        def slow_batch(loader, i, batch=batch):
            if i not in getattr(loader, "prefetched", ()):
                time.sleep(0.02)
            return batch(loader, i)

        monkeypatch.setattr(module.DataLoaderLite, "batch", slow_batch)
        waits.append(data_wait.median_wait(module, [*TINY, "--data", str(tokens), "--steps", "5"]))
    assert waits[0] >= 20 > 10 > waits[1] > 0  # ms


EIGHT_BIT = [*TINY, "--steps", "3", "--compile-mode", "none"]


def test_eight_bit_adamw_starts_from_rung_10s_own(tokens, tmp_path):
    size, ms, loss = eight_bit_adamw.train(eight_bit_adamw.own_adamw, [*EIGHT_BIT, "--data", str(tokens)])
    assert size == pytest.approx(8 * N_PARAMETERS, rel=1e-3) and ms > 0
    assert loss == losses(train(rung("10"), tmp_path, tokens, *TINY[4:], "--steps", 3))[-1]


@pytest.mark.slow  # torchao compiles its step
def test_eight_bit_adamw_counts_the_bytes_of_the_state(tokens):
    """Two 8-bit moments, and a scale for each 256 numbers."""
    flags = [*EIGHT_BIT, "--data", str(tokens)]
    *_, loss = eight_bit_adamw.train(eight_bit_adamw.own_adamw, flags)
    size, _, eight_bit_loss = eight_bit_adamw.train(eight_bit_adamw.torchao_adamw, flags)
    assert 2 * N_PARAMETERS < size < 2.2 * N_PARAMETERS
    assert eight_bit_loss == pytest.approx(loss, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.stem for path in FOLDER.glob("*.py")} - NO_FLAGS))
def test_as_a_program(name):
    """Each question can still be asked."""
    run = run_command(sys.executable, "-m", f"experiments.{name}", "--help")
    assert run.returncode == 0 and run.stdout.startswith("usage: "), run.stderr


@pytest.mark.slow
@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here")
def test_memory_pages_take_effect(tokens, tmp_path):
    """Memory that the process keeps, in large pages, is not faulted in again."""
    run = run_command(sys.executable, "-m", "experiments.memory_pages", tmp_path, "--rounds", 1, *TINY,
                      "--data", tokens, "--steps", 12, "--compile-mode", "none")
    assert run.returncode == 0, run.stderr
    ms = read_log(tmp_path / "memory_kept" / "round_1" / "speedup_10_fused_adamw.log").median_ms
    assert f"memory kept: {ms:,.1f} ms/step (" in run.stdout
    faults = [int(number.replace(",", "")) for number in re.findall(r"GB, ([\d,]+) page faults", run.stdout)]
    assert len(faults) == 4 and faults[0] > faults[3] + 30_000


def variant(name, folder):
    return load_module(variants.write_variant(variants.PATCHES / "variants" / f"{name}.patch", folder).path)


def test_variants_are_what_they_say(tmp_path):
    """Each against torch, or in its parameters; and the last rung still has the lines that they replace."""
    base = load_module(variants.BASE.path)
    config = new_gpt(base).config
    n_parameters = sum(p.numel() for p in base.GPT(config).parameters())

    x = torch.randn(12, 64, requires_grad=True)
    weight, targets = torch.randn(1024, 64, requires_grad=True), torch.randint(0, 1000, (12,))
    loss = variant("label_smoothing", tmp_path).ChunkedCrossEntropy.apply(x, weight, targets, 1000, 5)
    logits = (x @ weight.T)[:, :1000]
    smoothed = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits, targets))  # what the log shows
    for ours, truth in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(smoothed, (x, weight)),
                           strict=True):
        assert torch.allclose(ours, truth, atol=1e-5)

    module = variant("relu_squared", tmp_path)
    mlp, x = module.MLP(new_gpt(module).config), torch.randn(1, 3, 64)
    expected = torch.relu(x @ mlp.up_proj.weight.T) ** 2 @ mlp.down_proj.weight.T
    assert torch.allclose(mlp(x), expected, atol=1e-6) and mlp.up_proj.weight.shape == (256, 64)

    module = variant("untied", tmp_path)
    model = new_gpt(module)
    assert sum(p.numel() for p in model.parameters()) == n_parameters + 50304 * 64
    groups = model.configure_optimizers(0.1).param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert any(p is model.lm_head.weight for p in groups[2]["params"])

    module = variant("adamw", tmp_path)
    assert type(new_gpt(module).configure_optimizers(0.1)) is torch.optim.AdamW

    module = variant("qkv_apart", tmp_path)
    model = module.GPT(config)
    optimizer = model.configure_optimizers(0.0)
    block = model.transformer.h[0]
    c_attn, up_proj = block.attn.c_attn.weight, block.mlp.up_proj.weight
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    base.autocast_dtype = module.autocast_dtype = lambda device: torch.float32  # on any CPU
    expected = {c_attn: 0.2 * 64**0.5 * torch.cat([base.orthogonalize(grad) for grad in c_attn.grad.chunk(3)]),
                up_proj: 0.2 * len(up_proj) ** 0.5 * base.orthogonalize(up_proj.grad)}
    before = {p: p.detach().clone() for p in expected}
    optimizer.step()
    for p, update in expected.items():
        assert torch.allclose(before[p] - p, optimizer.param_groups[0]["lr"] * update, atol=1e-6)


def test_a_patch_that_does_not_fit_is_refused(tmp_path):
    patch = tmp_path / "old.patch"
    fitting = (variants.PATCHES / "variants" / "adamw.patch").read_text()
    patch.write_text(fitting.replace("-        return", "-        yield"))
    with pytest.raises(UserError, match="old.patch: does not fit beyond/rung_24_zero_init.py: "):
        variants.write_variant(patch, tmp_path)
    assert [*tmp_path.iterdir()] == [patch]


def test_the_python_corpus(tmp_path):
    """Sources that parse, without installed packages and tests."""
    run_command(sys.executable, "-m", "experiments.python_corpus", tmp_path / "python.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "python.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(texts) > 400 and sum(map(len, texts)) > 8e6
    assert Path(json.__file__).read_text(encoding="utf-8") in texts
    assert Path(pytest.__file__).read_text(encoding="utf-8") not in texts
    for text in texts[::40]:
        ast.parse(text)


@pytest.mark.parametrize("T", [256, 700])
def test_causal_attention_in_blocks_is_causal_attention(T):
    q, k, v = torch.randn(3, 1, 2, T, causal_attention.HS)
    expected = causal_attention.flash(q, k, v)
    for name, attention in causal_attention.CONTESTANTS.items():
        same = torch.allclose(attention(q, k, v), expected, atol=1e-5)
        assert same == (name != "flash kernel, no mask"), name


@pytest.mark.parametrize("patch", variants.patches("past_qwen3"), ids=lambda patch: patch.stem)
def test_trials_past_qwen3_train(patch, tmp_path):
    """Each starts with a loss near rung 24's, all that it adds gets a gradient, and no token sees a later one."""
    module = load_module(variants.write_variant(patch, tmp_path).path)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(block_size=16, vocab_size=257, n_layer=4, n_head=2, n_embd=32))
    model.recompute_blocks = 0
    optimizer = model.configure_optimizers(0.1)
    x = torch.randint(0, 257, (2, 16))
    for step in range(3):  # what ends the branches is zero in the first, and so are the gradients before it
        loss = model(x, x.roll(-1, dims=1))
        loss.backward()
        if step == 0:
            assert abs(loss.item() - math.log(257)) < (1 if patch.stem == "wide_init" else 0.2)
        if step == 2:
            idle = {part for part, p in model.named_parameters() if p.grad is None or not p.grad.any()}
            assert idle <= {"transformer.h.0.attn.mix"}  # of the first block, which has none before it
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    changed = torch.cat((x[:, :10], x[:, 10:].roll(1, dims=1)), dim=1)
    with torch.no_grad():
        assert torch.allclose(model(x)[:, :10], model(changed)[:, :10], atol=1e-5)
