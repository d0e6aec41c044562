"""Each optimization, shown on the thing itself, and that the pure speed rungs compute what the rung before did."""
import math
from functools import partial

import pytest
import torch
from conftest import losses, read_steps, run_command, rung, train
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ladder.stages import STAGES

SHORT = ("-B", 2, "-T", 64, "--steps", 5)
# bfloat16 keeps 8 bits of mantissa: each activation is off by up to 2^-9 = 0.2 %, and so is the loss of about 10.8 at
# most. Runs that differ only in where they round to bfloat16 stay closer than that.
BFLOAT16_LOSS_TOLERANCE = 0.02


class RecordedForward:
    """Records the dtype of the logits and parameters that a rung's main() really computes with."""

    def __init__(self, module):
        self.dtypes = set()
        forward = module.GPT.forward

        def recorded(model, *args):
            logits, loss = forward(model, *args)
            self.dtypes.add((logits.dtype, loss.dtype, *{p.dtype for p in model.parameters()}))
            return logits, loss

        module.GPT.forward = recorded


def track(number, tmp_path, tokens, tolerance):
    """Five steps of rung number-1 and of rung number, eagerly: the same losses within `tolerance`."""
    before = losses(train(rung(number - 1), tmp_path / "before", tokens, *SHORT))
    after = losses(train(rung(number), tmp_path / "after", tokens, *SHORT))
    assert after == pytest.approx(before, abs=tolerance)
    assert before[-1] < before[0]  # the weights moved, so the backward pass was compared too


def test_01_weights_are_tied():
    for number, tied in ((0, False), (1, True)):
        module = rung(number)
        model = module.GPT(module.MODELS["tiny"])
        same_storage = model.transformer.wte.weight.data_ptr() == model.lm_head.weight.data_ptr()
        assert same_storage is tied
        assert (model.transformer.wte.weight is model.lm_head.weight) is tied


def test_01_tied_weight_gets_both_gradients():
    module = rung(1)
    model = module.GPT(module.MODELS["tiny"])
    x = torch.tensor([[1, 2, 3]])
    model(x, x + 10)[1].backward()
    output_only = torch.autograd.grad(model(x, x + 10)[0].sum(), model.transformer.wte.weight)[0]
    assert model.transformer.wte.weight.grad is model.lm_head.weight.grad
    assert output_only[4].abs().sum() > 0  # a token that is not in the input: its row serves the output


def test_02_has_no_effect_on_a_cpu_and_says_so(tmp_path, tokens):
    """Bit by bit: without TF32 hardware "high" must not change a product."""
    before = train(rung(1), tmp_path / "before", tokens, *SHORT)
    assert torch.get_float32_matmul_precision() == "highest"
    after = train(rung(2), tmp_path / "after", tokens, *SHORT)
    assert torch.get_float32_matmul_precision() == "high"
    assert losses(before) == losses(after)
    assert "no TF32 on this device: no effect" in after.read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="TF32 is a format of NVIDIA GPUs")
def test_02_rounds_products_to_tf32_on_cuda():
    a, b = torch.randn(2, 1024, 1024, device="cuda")
    exact = a.double() @ b.double()
    torch.set_float32_matmul_precision("highest")
    full = ((a @ b) - exact).abs().mean()
    torch.set_float32_matmul_precision("high")
    tf32 = ((a @ b) - exact).abs().mean()
    assert tf32 > 10 * full


def test_03_computes_in_bfloat16_and_keeps_float32_parameters(tmp_path, tokens):
    module = rung(3)
    recorded = RecordedForward(module)
    train(module, tmp_path, tokens, *SHORT)
    assert recorded.dtypes == {(torch.bfloat16, torch.float32, torch.float32)}


def test_03_tracks_rung_2(tmp_path, tokens):
    track(3, tmp_path, tokens, BFLOAT16_LOSS_TOLERANCE)


@pytest.mark.parametrize("number", [3, 10])
def test_float16_path_tracks_the_bfloat16_one(number, tmp_path, tokens):
    """What a T4 or V100 runs: float16 with a GradScaler, in float16's own arithmetic, here on the CPU."""
    before = read_steps(train(rung(number), tmp_path / "bfloat16", tokens, *SHORT))
    module = rung(number)
    module.autocast_dtype = lambda device: torch.float16
    recorded = RecordedForward(module)
    log = train(module, tmp_path / "float16", tokens, *SHORT)
    after = read_steps(log)
    assert recorded.dtypes == {(torch.float16, torch.float32, torch.float32)}
    assert "float16 autocast" in log.read_text() and "bfloat16" not in log.read_text()
    for key in ("loss", "norm")[: 1 if number == 3 else 2]:  # the norm shows that clipping sees unscaled gradients
        tolerance = BFLOAT16_LOSS_TOLERANCE
        assert [s[key] for s in after] == pytest.approx([s[key] for s in before], abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("number", [3, 10])
def test_float16_overflow_skips_the_step(number, tmp_path, tokens, monkeypatch):
    """A scale far too large makes the gradients infinite: no step may be taken, and the scale must come down."""
    module = rung(number)
    module.autocast_dtype = lambda device: torch.float16
    scalers = []

    def scaler_with_huge_scale(*args, **kwargs):
        scalers.append(scaler_class(*args, init_scale=2.0**60, **kwargs))
        return scalers[-1]

    scaler_class = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", scaler_with_huge_scale)
    train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 3, "--save", tmp_path / "model.pt")
    trained = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    torch.manual_seed(1337)
    start = module.GPT(module.MODELS["tiny"]).state_dict()
    assert scalers[0].get_scale() == 2.0**57
    assert all(torch.equal(trained[name], start[name]) for name in start)


@pytest.mark.parametrize("number", [3, 10])
def test_gpus_without_native_bfloat16_get_float16(number, monkeypatch):
    asked = {}

    def is_bf16_supported(including_emulation=True):
        asked["including_emulation"] = including_emulation
        return including_emulation  # a T4: bfloat16 only by emulation

    module = rung(number)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert module.autocast_dtype("cuda") is torch.float16
    assert asked == {"including_emulation": False}
    assert module.autocast_dtype("cpu") is torch.bfloat16 and module.autocast_dtype("mps") is torch.bfloat16


def residual_growth(number, n_layer):
    """How much variance the layers of a fresh model add to the residual stream."""
    module = rung(number)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(n_layer=n_layer, n_head=4, n_embd=256))
    stream = []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].var().item()))
    model.transformer.ln_f.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].var().item()))
    with torch.no_grad():
        model(torch.randint(0, 50257, (2, 64)))
    return stream[-1] - stream[0]


def test_04_residual_projections_start_smaller():
    module = rung(4)
    model = module.GPT(module.GPTConfig(n_layer=6, n_head=4, n_embd=256))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            expected = 0.02 / math.sqrt(2 * 6) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.02), name


def test_04_the_residual_stream_stops_growing_with_depth():
    """2 * n_layer branches, each read from normalized inputs: scaled, together they add 1 / (2 * n_layer) as much.

    The branches are not quite independent of each other, hence the wide tolerance.
    """
    n_layer = 12
    assert residual_growth(3, n_layer) / residual_growth(4, n_layer) == pytest.approx(2 * n_layer, rel=0.35)
    # unscaled they add in proportion to the depth, scaled the same at every depth
    assert residual_growth(3, 24) / residual_growth(3, 6) == pytest.approx(4, rel=0.25)
    assert residual_growth(4, 24) / residual_growth(4, 6) == pytest.approx(1, rel=0.25)


def test_05_compiles_the_whole_model_and_tracks_rung_4(tmp_path, tokens):
    """The compiler may keep float32 where eager code rounds to bfloat16: same tolerance as for bfloat16 itself."""
    from torch._dynamo.utils import counters

    before = losses(train(rung(4), tmp_path / "before", tokens, *SHORT))
    counters.clear()
    log = train(rung(5), tmp_path / "after", tokens, *SHORT, compile_mode="default")
    assert losses(log) == pytest.approx(before, abs=BFLOAT16_LOSS_TOLERANCE)
    assert counters["stats"]["unique_graphs"] == 2  # the probe and the model, in one piece
    assert not counters["graph_break"]
    text = log.read_text()
    first_ms = read_steps(log)[0]["ms"]
    assert "# compile: default" in text
    assert f"# first step, compilation included: {first_ms / 1000:.2f} s" in text


@pytest.mark.parametrize("number", [5, 11])
def test_05_runs_eagerly_without_a_compiler(number, tmp_path, tokens):
    script = STAGES[number].path
    flags = ["--model", "tiny", "--data", tokens, "--log-dir", tmp_path, "--steps", 3, "-T", 32]
    run = run_command(
        "python", script, *flags, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")
    )
    assert run.returncode == 0, run.stderr
    assert "# compile: not possible here, running eagerly (" in run.stdout
    assert len(losses(tmp_path / f"{script.stem}.log")) == 3


def test_05_compile_mode_without_effect_is_named(tmp_path, tokens):
    log = train(rung(5), tmp_path, tokens, "-T", 16, "--steps", 1, compile_mode="reduce-overhead")
    assert "# compile: reduce-overhead (CUDA graphs: no effect on this device)" in log.read_text()


def test_05_the_uncompiled_model_stays_usable(tmp_path, tokens):
    """The checkpoint has the plain names and loads into the plain model."""
    module = rung(5)
    train(module, tmp_path, tokens, "-T", 16, "--steps", 2, "--save", tmp_path / "model.pt", compile_mode="default")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    assert model(torch.tensor([[1, 2, 3]]))[0].shape == (1, 3, 50257)


def attention_pair(T=64):
    """The attention of rung 5 (explicit) and rung 6 (flash) with the same weights, and an input."""
    explicit, flash = rung(5), rung(6)
    config = explicit.GPTConfig(n_head=4, n_embd=64, block_size=T)
    torch.manual_seed(0)
    one, other = explicit.CausalSelfAttention(config), flash.CausalSelfAttention(config)
    other.load_state_dict(one.state_dict())
    return one, other, torch.randn(2, T, 64)


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
    one, other, x = attention_pair(T)
    kept = {}
    for name, attention in (("explicit", one), ("flash", other)):
        shapes = kept[name] = []

        def remember(tensor, shapes=shapes):
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            attention(x.clone().requires_grad_())
    assert any(shape[-2:] == (T, T) for shape in kept["explicit"])
    assert not any(shape[-2:] == (T, T) for shape in kept["flash"])
    assert dict(one.named_buffers()) and not dict(other.named_buffers())  # the mask is gone too


def test_06_tracks_rung_5(tmp_path, tokens):
    track(6, tmp_path, tokens, BFLOAT16_LOSS_TOLERANCE)


def test_07_padding_is_inert(hf_folder):
    module = rung(7)
    assert module.GPTConfig().vocab_size == 50304 and 50304 % 128 == 0
    model = module.GPT.from_pretrained(hf_folder)
    before = rung(6).GPT.from_pretrained(hf_folder)
    x, y = torch.randint(0, 50257, (2, 2, 32))
    logits, loss = model(x, y)
    loss.backward()
    assert torch.allclose(logits[..., :50257], before(x)[0], rtol=0, atol=1e-5)
    assert logits.softmax(-1)[..., 50257:].max() == 0  # never sampled
    assert model.lm_head.weight.grad[50257:].abs().max() == 0  # never trained
    assert model.lm_head.weight.shape == (50304, 64)


class RecordedSteps:
    """The optimizer's settings and the length of the whole gradient, as each optimizer step of a run finds them."""

    def __enter__(self):
        self.norms, self.groups = [], []
        self.handle = register_optimizer_step_pre_hook(self.record)
        return self

    def record(self, optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())
        settings = [{key: v for key, v in group.items() if key != "params"} for group in optimizer.param_groups]
        self.groups.append(settings)

    def __exit__(self, *exception):
        self.handle.remove()


def test_08_clips_the_gradient_and_logs_its_length(tmp_path, tokens):
    with RecordedSteps() as before:
        train(rung(7), tmp_path, tokens, *SHORT)
    with RecordedSteps() as after:
        log = train(rung(8), tmp_path, tokens, *SHORT)
    logged = [step["norm"] for step in read_steps(log)]
    assert before.norms[0] > 1.5  # there was something to clip
    assert logged[0] == pytest.approx(before.norms[0], rel=1e-3)  # the length before clipping
    assert all(norm <= 1.0 + 1e-4 for norm in after.norms)
    assert before.groups[0][0]["betas"] == (0.9, 0.999)
    assert after.groups[0][0]["betas"] == (0.9, 0.95) and after.groups[0][0]["eps"] == 1e-8


@pytest.mark.parametrize("step, expected", [
    (1, 6e-5),  # a tenth of the way up
    (5, 3e-4),
    (10, 6e-4),  # the end of the warm-up
    (20, 6e-5 + 0.5 * (1 + math.sqrt(0.5)) * 5.4e-4),  # cos(45 degrees)
    (30, 3.3e-4),  # the middle: half-way between the largest and the smallest
    (50, 6e-5),  # the end: a tenth
])
def test_09_schedule_in_closed_form(step, expected):
    assert rung(9).get_lr(step, max_steps=50) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("number", [9, 10, 11])
def test_09_the_optimizer_gets_the_scheduled_rate(number, tmp_path, tokens):
    module = rung(number)
    with RecordedSteps() as steps:
        log = train(module, tmp_path, tokens, "-T", 16, "--steps", 12)
    expected = [module.get_lr(step, 12) for step in range(1, 13)]
    assert [groups[0]["lr"] for groups in steps.groups] == expected
    assert [step["lr"] for step in read_steps(log)] == pytest.approx(expected, rel=1e-4)


def test_10_decays_matrices_only():
    module = rung(10)
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig())
    decayed, others = model.configure_optimizers(weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert (len(decayed["params"]), len(others["params"])) == (50, 98)
    # 124,475,904 parameters: biases are 2304 + 768 + 3072 + 768 a layer, LayerNorms 25 x 2 x 768
    n_others = 12 * (2304 + 768 + 3072 + 768) + 25 * 2 * 768
    assert sum(p.numel() for p in others["params"]) == n_others == 121_344
    assert sum(p.numel() for p in decayed["params"]) == 124_475_904 - n_others


def test_10_one_step_equals_the_unfused_optimizer():
    """The same formula in another order of operations: equal to float32 rounding of an update of size lr."""
    module = rung(10)
    torch.manual_seed(0)
    fused_model = module.GPT(module.MODELS["tiny"])
    plain_model = module.GPT(module.MODELS["tiny"])
    plain_model.load_state_dict(fused_model.state_dict())
    fused = fused_model.configure_optimizers(weight_decay=0.1)
    named = list(plain_model.named_parameters())
    plain = torch.optim.AdamW(
        [{"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False,
    )
    x, y = torch.randint(0, 50257, (2, 2, 32))
    for _ in range(3):
        for model, optimizer in ((fused_model, fused), (plain_model, plain)):
            optimizer.zero_grad()
            model(x, y)[1].backward()
        for fused_p, plain_p in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
            plain_p.grad.copy_(fused_p.grad)  # compare the optimizers, not what a difference grows into
        fused.step()
        plain.step()
        for fused_p, plain_p in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
            assert torch.allclose(fused_p, plain_p, rtol=1e-5, atol=1e-3 * 1e-3)  # lr is 1e-3 here


def test_10_runs_the_fused_kernel():
    kernels = {}
    for number in (9, 10):
        module = rung(number)
        model = module.GPT(module.MODELS["tiny"])
        plain = partial(torch.optim.AdamW, model.parameters(), betas=(0.9, 0.95), eps=1e-8)
        optimizer = model.configure_optimizers(0.1) if number == 10 else plain()
        model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]]))[1].backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        kernels[number] = {event.name for event in profile.events()}
    assert "aten::_fused_adamw_" in kernels[10]
    assert "aten::_fused_adamw_" not in kernels[9]


def test_10_tracks_rung_9(tmp_path, tokens):
    """The decay differs (0.1 against torch's default 0.01), by at most lr * 0.09 = 5e-5 of a weight a step."""
    track(10, tmp_path, tokens, BFLOAT16_LOSS_TOLERANCE)


def test_explicit_loss_is_the_one_logged(tmp_path, tokens):
    """The first logged loss is the cross-entropy of the first batch under the initial weights."""
    module = rung(0)
    log = train(module, tmp_path, tokens, *SHORT)
    torch.manual_seed(1337)
    model = module.GPT(module.MODELS["tiny"])
    x, y = module.DataLoaderLite(tokens, 2, 64).next_batch()
    expected = F.nll_loss(model(x)[0].double().log_softmax(-1).flatten(0, 1), y.flatten())
    assert losses(log)[0] == pytest.approx(expected.item(), abs=1e-5)
