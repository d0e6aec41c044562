"""The lessons of rungs 1 to 10, each shown on the thing itself; what they do in `train` is in test_train.py."""
import math
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import (
    Crash, attention_pair, builds_on, converted, known_flags, losses, new_gpt, norm_of, read_steps, rung,
    rungs_that_change, saved_model, train, train_in_float32, watch)
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

FEW = ("-B", 1, "-T", 32, "--steps", 2)  # for arithmetic that a CPU may have to emulate
# bfloat16 keeps 8 bits of mantissa: each activation is off by up to 2^-9 = 0.2 %, and so is the loss of about 10.8 at
# most. Runs that differ only in where they round to bfloat16 stay closer than that.
BFLOAT16_LOSS_TOLERANCE = 0.02


@pytest.mark.parametrize("label", ["0", "10"])
def test_fifty_steps_on_real_text_lower_the_loss(label, tmp_path, byte_tokens):
    """The rungs between learn as these do: test_train.py compares each with the one before."""
    found = losses(train(rung(label), tmp_path, byte_tokens, "-B", 1, "-T", 64))
    assert len(found) == 50
    assert found[0] == pytest.approx(np.log(257), abs=0.3)  # at the start every token is as likely as any other
    assert np.mean(found[-5:]) < found[0] - 0.5


@pytest.mark.parametrize("label, tied", [("0", False), ("1", True)])
def test_01_weights_are_tied(label, tied):
    model = new_gpt(rung(label))
    embedding, head = model.transformer.wte.weight, model.lm_head.weight
    assert (embedding.data_ptr() == head.data_ptr()) is (embedding is head) is tied


def test_01_tied_weight_gets_both_gradients():
    model = new_gpt(rung("1"))
    x = torch.tensor([[1, 2, 3]])
    model(x, x + 10).backward()
    output_only = torch.autograd.grad(model(x).sum(), model.transformer.wte.weight)[0]
    assert model.transformer.wte.weight.grad is model.lm_head.weight.grad
    assert output_only[4].abs().sum() > 0  # a token that is not in the input: its row serves the output


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_03_tracks_rung_2_in_other_types(dtype, tmp_path, tokens):
    """float16 with a GradScaler is what a T4 or V100 runs; test_train.py has bfloat16. A CPU may emulate it."""
    module = rung("3")
    module.autocast_dtype = lambda device: dtype
    with watch() as seen:
        log = train(module, tmp_path / "after", tokens, *FEW)
    assert {kind[2:4] for kind in seen.forward} == {(dtype, torch.float32)}
    name = "float32 (no bfloat16 on this CPU)" if dtype == torch.float32 else f"{str(dtype)[6:]} autocast"
    assert f"| precision: {name}\n" in log.read_text()
    tolerance = 0 if dtype == torch.float32 else BFLOAT16_LOSS_TOLERANCE
    assert losses(log) == pytest.approx(losses(train(rung("2"), tmp_path / "before", tokens, *FEW)), abs=tolerance)


# The rungs in which a step with the scaler differs from that of the rung before.
SCALED = [label for label in rungs_that_change("train", "optimizer_step", "MuonAdamW") if builds_on(label, "3")
          and (not builds_on(label, "11") or label in rungs_that_change("optimizer_step", "MuonAdamW"))]


@pytest.mark.parametrize("label", [label for label in SCALED if builds_on(label, "8")])
def test_03_float16_gradients_are_unscaled_before_they_are_clipped(label, tmp_path, byte_tokens):
    """The scale starts at 65536: a norm that forgets it is as much too large."""
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float16
    one_step = (*FEW[:-1], 1)
    with watch() as seen:
        log = train(module, tmp_path / "float16", byte_tokens, *one_step,
                    *known_flags(module, total_batch=32, val_every=0))
    exact = train_in_float32(label, tmp_path / "float32", byte_tokens, *one_step,
                             *known_flags(module, total_batch=32, val_every=0))
    assert read_steps(log)[0]["norm"] == pytest.approx(read_steps(exact)[0]["norm"], rel=BFLOAT16_LOSS_TOLERANCE)
    assert norm_of(seen.gradients[0]) <= 1 + 1e-4


@pytest.mark.parametrize("label", SCALED)
def test_03_float16_overflow_skips_the_step(label, tmp_path, byte_tokens, monkeypatch):
    """A scale far too large makes the gradients infinite: no step may be taken, and the scale must come down."""
    module, scalers, scaler_class = rung(label), [], torch.amp.GradScaler
    module.autocast_dtype = lambda device: torch.float16

    def scaler_with_huge_scale(*args, **kwargs):
        scalers.append(scaler_class(*args, init_scale=2.0**60, **kwargs))
        return scalers[-1]

    monkeypatch.setattr(torch.amp, "GradScaler", scaler_with_huge_scale)
    train(module, tmp_path, byte_tokens, *known_flags(module, B=1, T=8, steps=2, total_batch=8, val_every=0),
          "--save", tmp_path / "model.pt")
    trained = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    torch.manual_seed(1337)
    start = new_gpt(module, vocab_size=257).state_dict()
    assert scalers[0].get_scale() == 2.0**58
    assert all(torch.equal(trained[name], start[name]) for name in start)


def test_03_each_device_gets_the_type_that_it_has(monkeypatch):
    choose = rung("3").autocast_dtype
    for native, dtype in ((False, torch.float16), (True, torch.bfloat16)):  # a T4 has it only by emulation
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, native=native: (
            native or including_emulation))
        assert choose("cuda") is dtype
    for has_instructions, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has_instructions: has)
        assert choose("cpu") is dtype
    assert choose("mps") is torch.bfloat16


@pytest.mark.parametrize("supported, said", [(True, "products in TF32"), (False, "no TF32 on this device")])
def test_02_the_log_says_where_there_is_tf32(supported, said, byte_tokens, monkeypatch):
    """A T4 has none."""
    module = rung("2")
    module.new_model, module.Log = mock.MagicMock(), mock.Mock(side_effect=Crash)  # a CPU cannot go on
    monkeypatch.setattr(torch.optim, "AdamW", mock.Mock())
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: supported)
    args = module.parse_args(["--data", str(byte_tokens), "-B", "1", "-T", "8"])
    args.device = "cuda"
    with pytest.raises(Crash):
        module.train(args)
    assert said in str(module.Log.call_args)


@pytest.mark.slow
def test_05_compiles_the_whole_model_and_tracks_rung_4(tmp_path, tokens):
    before = losses(train(rung("4"), tmp_path / "before", tokens, *FEW))
    counters.clear()
    log = train(rung("5"), tmp_path, tokens, *FEW, compile_mode="default")
    # The compiler may keep float32 where eager code rounds to bfloat16.
    assert losses(log) == pytest.approx(before, abs=BFLOAT16_LOSS_TOLERANCE)
    assert_one_graph(log)


def assert_one_graph(log):
    assert counters["stats"]["unique_graphs"] == 2  # the probe and the model, in one piece
    assert not counters["graph_break"] and "# compile: default" in log.read_text()


@pytest.mark.parametrize("label", ["5", "6", "10", "ddp", "16", "17", "24"])
def test_05_the_model_is_one_graph(label, tmp_path, byte_tokens, monkeypatch):
    """With a backend that writes no C++: seconds instead of half a minute. And what is saved has plain names.

    Validation compiles nothing.
    """
    module, compile_ = rung(label), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: compile_(model, backend="eager"))
    counters.clear()
    flags = known_flags(module, B=1, T=8, steps=2, total_batch=8, val_sequences=1, save=tmp_path / "model.pt")
    assert_one_graph(train(module, tmp_path, byte_tokens, *flags, compile_mode="default"))
    assert saved_model(module, tmp_path / "model.pt")(torch.tensor([[1, 2, 3]])).shape == (1, 3, 257)


@pytest.mark.parametrize("label", ["5", "ddp", "24", "fsdp"])
def test_05_ends_where_nothing_can_be_compiled(label, tmp_path, byte_tokens):
    """With one line, before the first step. A real missing compiler; no Triton or an old Python raise as it does."""
    module = rung(label)
    line = r"error: torch.compile does not work here \([^\n]+\): --compile-mode none trains without it; [^\n]+"
    with (torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}), fresh_cache(),
          pytest.raises(SystemExit, match=f"^{line}$")):
        train(module, tmp_path, byte_tokens, *known_flags(module, B=1, T=32, total_batch=32), compile_mode="default")
    assert not list(tmp_path.glob("*.log"))


def test_05_nothing_is_compiled_for_those_who_do_not_want_it(tmp_path, byte_tokens, monkeypatch):
    """Nor, unless it is asked for, on an Apple GPU."""
    monkeypatch.setattr(torch, "compile", None)  # must not be called
    assert "# compile: none\n" in train(rung("5"), tmp_path, byte_tokens, *FEW).read_text()
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    assert rung("5").parse_args([]).compile_mode == "none"
    assert rung("5").parse_args(["--compile-mode", "default"]).compile_mode == "default"


def test_06_output_and_gradients_equal_the_explicit_attention():
    """float32 against float32: only the order of the sums differs, a few units of 2^-23."""
    one, other, x = attention_pair()
    results = []
    for attention in (one, other):
        inputs = x.clone().requires_grad_()
        output = attention(inputs)
        output.square().sum().backward()
        results.append([output, inputs.grad, *(p.grad for p in attention.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_06_keeps_no_score_matrix():
    T = 96
    *pair, x = attention_pair(T)
    keeps = []
    for attention in pair:
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=shapes: kept.append(t.shape) or t, lambda t: t):
            attention(x.clone().requires_grad_())
        keeps.append(any(shape[-2:] == (T, T) for shape in shapes))
    assert keeps == [True, False]
    assert [bool(dict(attention.named_buffers())) for attention in pair] == [True, False]  # the mask is gone too


@pytest.mark.parametrize("label", [label for label in rungs_that_change("GPT.__init__", "GPT.forward")
                                   if builds_on(label, "7") and not builds_on(label, "20")])
def test_07_padding_is_inert(label, hf_folder, tmp_path):
    """More rows, and no other logits, loss or gradients: no row of padding is ever predicted or trained."""
    model, before = (converted(hf_folder, each, tmp_path / f"{each}.pt") for each in (label, "6"))
    assert model.config.vocab_size == 257 and model.lm_head.weight.shape == (3 * 128, 64)
    x, y = torch.randint(0, 257, (2, 2, 32))
    logits, loss = model(x), model(x, y)
    loss.backward()
    expected = before(x, y)
    expected.backward()
    assert logits.shape == (2, 32, 257)
    assert torch.allclose(logits, before(x), rtol=0, atol=1e-5)
    assert torch.allclose(loss, expected, rtol=1e-6)
    gradient = model.lm_head.weight.grad
    assert torch.allclose(gradient[:257], before.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
    assert gradient[257:].abs().max() == 0


def test_07_no_padding_where_there_is_nothing_to_pad():
    module = rung("7")
    assert module.GPT(module.GPTConfig(vocab_size=256, n_layer=1, n_head=1, n_embd=8)).lm_head.weight.shape == (256, 8)
    assert len(new_gpt(module, vocab_size=257).lm_head.weight) == 3 * 128


@pytest.mark.parametrize("max_steps, max_lr, warmup_steps, expected", [
    (50, 6e-4, 10, {1: 6e-5, 5: 3e-4, 10: 6e-4, 30: 3.3e-4, 50: 6e-5,  # a tenth of the way up, the top, half-way down
                    20: 6e-5 + 0.5 * (1 + math.sqrt(0.5)) * 5.4e-4}),  # cos(45 degrees)
    (4, 1.0, 0, {1: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 2: 0.55, 3: 0.1 + 0.45 * (1 - math.sqrt(0.5)), 4: 0.1}),
    (3, 0.3, 3, {1: 0.1, 2: 0.2, 3: 0.3}),  # all of it is warm-up
    (2, 1.0, 4, {1: 0.25, 2: 0.5}),  # the run ends inside the warm-up
    (2, 0.0, 1, {1: 0.0, 2: 0.0}),
])
def test_09_schedule_in_closed_form(max_steps, max_lr, warmup_steps, expected):
    found = {step: rung("9").get_lr(step, max_steps, max_lr, warmup_steps) for step in expected}
    assert found == pytest.approx(expected, rel=1e-12)


def test_10_decays_matrices_only():
    module = rung("10")
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig())
    decayed, others = model.configure_optimizers(lr=6e-4, weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (len(decayed["params"]), len(others["params"])) == (50, 98)
    # 124,475,904 parameters: biases are 2304 + 768 + 3072 + 768 a layer, LayerNorms 25 x 2 x 768
    n_others = 12 * (2304 + 768 + 3072 + 768) + 25 * 2 * 768
    assert sum(p.numel() for p in others["params"]) == n_others == 121_344
    assert sum(p.numel() for p in decayed["params"]) == 124_475_904 - n_others
