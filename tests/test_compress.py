"""compress.py and the measuring commands around it: what they change, and that their numbers are true."""
import sys

import pytest
import torch
from conftest import ROOT, load_module, make_tokens, run_command, rung, train
from torch import nn

from ladder import eight_bit_adamw, sampling_speed


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokens):
    """A checkpoint of a short run of rung 10."""
    folder = tmp_path_factory.mktemp("saved")
    train(rung(10), folder, tokens, "-B", 2, "-T", 64, "--steps", 8, "--save", folder / "model.pt")
    return folder / "model.pt"


@pytest.fixture
def compress(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    module = load_module(ROOT / "compress.py")
    monkeypatch.setattr(module, "NEW_TOKENS", 3)
    return module


@pytest.fixture
def model(compress, saved):
    return compress.with_linear_layers(compress.load_model(str(saved))[0])


def some_tokens():
    return torch.randint(0, 50257, (2, 48), generator=torch.Generator().manual_seed(0))


def block_weights(compress, model):
    return {name: layer.weight for name, layer in model.named_modules() if compress.is_in_block(layer, name)}


def test_linear_layers_compute_what_conv1d_did(compress, saved):
    original = compress.load_model(str(saved))[0]
    with torch.no_grad():
        expected = original(some_tokens()).logits
        changed = compress.with_linear_layers(original)
        assert torch.allclose(changed(some_tokens()).logits, expected, atol=1e-5)
    assert sorted(block_weights(compress, changed)) == sorted(
        f"transformer.h.{i}.{part}" for i in range(2)
        for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))


def test_validation_loss_is_the_scripts_own(compress, model, saved, tokens):
    module = rung(10)
    checkpoint = torch.load(saved, weights_only=True)
    own = module.GPT(module.GPTConfig(**checkpoint["config"]))
    own.load_state_dict(checkpoint["model"])
    _, sequences = compress.read_sequences(tokens, 64, 5, 50257)
    assert sequences.shape == (5, 65)
    with torch.no_grad():
        expected = own(sequences[:, :-1], sequences[:, 1:].contiguous())[1].item()
    assert compress.validation_loss(model, sequences) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("amount", [0.3, 0.9])
def test_pruning_takes_the_smallest_of_all_blocks(amount, compress, model):
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    compress.prune_blocks(model, amount)
    pruned = torch.cat([weight.detach().flatten() for weight in block_weights(compress, model).values()])
    original = torch.cat([before[f"{name}.weight"].flatten() for name in block_weights(compress, model)])
    gone = pruned == 0
    assert gone.float().mean() == pytest.approx(amount, abs=1e-4)
    assert original[gone].abs().max() <= original[~gone].abs().min()
    assert torch.equal(pruned[~gone], original[~gone])
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in block_weights(compress, model):
            assert torch.equal(parameter, before[name])


def test_int8_keeps_the_model_and_a_quarter_of_its_blocks(compress, model):
    n_weights = sum(weight.numel() for weight in block_weights(compress, model).values())
    before = compress.file_sizes(model)[0]
    original = {name: weight.detach().clone() for name, weight in block_weights(compress, model).items()}
    compress.import_torchao()
    compress.to_int8(model, compress.is_in_block)
    for name, weight in block_weights(compress, model).items():
        step = original[name].abs().amax(dim=1, keepdim=True) / 127  # each row has its own
        error = (weight.dequantize() - original[name]).abs()
        assert error.max() > 0 and (error <= 0.51 * step).all()
    saved_bytes = before - compress.file_sizes(model)[0]
    assert saved_bytes == pytest.approx(3 * n_weights, rel=0.1)  # less the scales
    assert model.lm_head.weight is model.transformer.wte.weight


def test_the_whole_table_and_its_picture(compress, saved, tokens, tmp_path, capsys):
    compress.main([str(saved), "--data", str(tokens), "-T", "64", "--val-sequences", "4", "--device", "cpu",
                   "--png", str(tmp_path / "c.png")])
    out = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in out.splitlines() if line.startswith("|")][2:]
    assert [row[0].strip() for row in rows] == list(compress.VARIANTS)
    sizes = [float(row[1]) for row in rows]
    n_parameters = sum(p.numel() for p in compress.load_model(str(saved))[0].parameters())
    assert sizes[0] == pytest.approx(4 * n_parameters / 1e6, abs=0.2)
    assert sizes[1] == pytest.approx(2 * n_parameters / 1e6, abs=0.2)
    assert all(float(row[4]) > 0 for row in rows)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert f"{n_parameters:,} parameters; 4 sequences of 64 tokens" in out


@pytest.mark.parametrize("flags, reason", [
    (["-T", 0], "-T 0: must be at least 1"),
    (["--val-sequences", 0], "--val-sequences 0: must be at least 1"),
    (["-T", 1025], "-T 1025: this model's longest sequence is 1024"),
    (["--data", "nowhere"], "no usable token files in nowhere"),
    (["--png", "nowhere/c.png"], "give the name of a file in a folder that exists"),
    (["--device", "abacus"], "--device abacus is not there"),
])
def test_wrong_values(flags, reason, compress, saved, tokens):
    with pytest.raises(SystemExit, match=reason):
        compress.main([str(saved), "--data", str(tokens), *map(str, flags)])


def test_wrong_data(compress, saved, tmp_path):
    short = make_tokens(tmp_path / "short", "too short " * 50)
    with pytest.raises(SystemExit, match="val.bin has 50 tokens, one sequence takes 65: lower -T"):
        compress.main([str(saved), "--data", str(short), "-T", "64"])
    with pytest.raises(SystemExit, match="tokens that this model does not know"):
        compress.read_sequences(make_tokens(tmp_path / "long", "long enough " * 100), 8, 1, vocab_size=5)
    run = run_command(sys.executable, "compress.py", tmp_path / "nowhere.pt")
    assert run.returncode == 1 and run.stderr.strip().endswith("cannot be read (No such file or directory)")


def test_sampling_speed_compares_the_same_text(saved, capsys):
    sampling_speed.main(str(saved), 20)
    out = capsys.readouterr().out
    assert out.startswith("20 tokens: ") and out.rstrip().endswith("the same text")
    with pytest.raises(SystemExit, match="from 1 to 1023 fit"):
        sampling_speed.main(str(saved), 1024)
    model, _ = sampling_speed.load_model(str(saved))
    _, ids = sampling_speed.tokens_per_second(model, 20, use_cache=False)
    with torch.no_grad():  # by hand: always the likeliest, <|endoftext|> left out
        expected = [50256]
        for _ in range(20):
            logits = model(torch.tensor([expected])).logits[0, -1]
            expected.append(int(logits[:50256].argmax()))
    assert ids == expected


def test_eight_bit_states(tokens):
    """The comparison's own AdamW is rung 10's; torchao's keeps two 8-bit moments and a scale per 256 numbers."""
    flags = ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "2", "-T", "64", "--steps", "3",
             "--compile-mode", "none"]
    size, log = eight_bit_adamw.train(eight_bit_adamw.own_adamw, flags)
    n_parameters = sum(p.numel() for p in rung(10).GPT(rung(10).MODELS["tiny"]).parameters())
    assert size == pytest.approx(8 * n_parameters, rel=1e-3)
    assert len(log.losses) == 3
    small, eight_bit_log = eight_bit_adamw.train(eight_bit_adamw.torchao_adamw, flags)
    assert 2 * n_parameters < small < 2.2 * n_parameters
    assert eight_bit_log.losses == pytest.approx(log.losses, abs=0.01)
    tensor = nn.Parameter(torch.zeros(3, 4))
    assert eight_bit_adamw.bytes_of(tensor) == 48


def test_a_library_that_is_not_there_gets_its_line(monkeypatch, tokens, capsys):
    def missing(groups):
        raise ModuleNotFoundError("No module named 'imaginary'")

    monkeypatch.setattr(eight_bit_adamw, "OPTIMIZERS", {"imaginary": missing})
    eight_bit_adamw.main(["--model", "tiny", "--device", "cpu", "--data", str(tokens), "--compile-mode", "none"])
    assert "does not run: No module" in capsys.readouterr().out
