"""Each optimization, shown on the thing itself, and that the pure speed rungs compute what the rung before did."""
import math

import pytest
import torch
from conftest import ROOT, SHORT, converted, has_flag, new_gpt, read_steps, record_run, run_command, rung, train
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from ladder.scripts.stages import BY_LABEL

LABELS = list(BY_LABEL)
FEW = ("-B", 2, "-T", 32, "--steps", 2)  # for arithmetic that a CPU may have to emulate
# bfloat16 keeps 8 bits of mantissa: each activation is off by up to 2^-9 = 0.2 %, and so is the loss of about 10.8 at
# most. Runs that differ only in where they round to bfloat16 stay closer than that.
BFLOAT16_LOSS_TOLERANCE = 0.02
CPU_HAS_BFLOAT16 = rung(3).autocast_dtype("cpu") is torch.bfloat16


def from_rung(first):
    return pytest.mark.parametrize("label", LABELS[LABELS.index(first) :])


def total_batch(module, tokens):
    return ["--total-batch", tokens] if has_flag(module, "total_batch") else []


def no_validation(module):
    return ["--val-every", 0] if has_flag(module, "val_every") else []


def losses_of(run):
    return [step["loss"] for step in run.steps]


@pytest.mark.parametrize("label, tolerance", [
    ("3", BFLOAT16_LOSS_TOLERANCE), ("6", BFLOAT16_LOSS_TOLERANCE),
    # The decay differs (0.1 against torch's default 0.01), by at most lr * 0.09 = 5e-5 of a weight a step.
    ("10", BFLOAT16_LOSS_TOLERANCE),
    # On a CPU, eagerly, these compute the very same: "high" changes no product; nothing is compiled; one rank, one
    # micro-step; batches from the same file; validation, checkpoints and recomputation change no weight.
    ("2", 0), ("5", 0), ("ddp", 0), ("11", 0), ("12", 0), ("13", 0), ("14", 0), ("15", 0), ("16", 1e-5), ("27", 0),
    ("17", BFLOAT16_LOSS_TOLERANCE if CPU_HAS_BFLOAT16 else 1e-5),
])
def test_a_rung_learns_as_the_one_before(label, tolerance, short_run):
    if label == "2" and "amx_fp16" in cpu_flags():
        tolerance = BFLOAT16_LOSS_TOLERANCE  # oneDNN may round products there
    before, after = losses_of(short_run(BY_LABEL[label].before)), losses_of(short_run(label))
    assert after == pytest.approx(before, abs=tolerance, rel=0)
    assert abs(before[-1] - before[0]) > 0.02  # the weights moved, so the backward pass was compared, too


def cpu_flags():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def test_00_the_logged_loss_is_the_cross_entropy_of_the_first_batch(short_run, tokens):
    module = rung(0)
    torch.manual_seed(1337)
    model = new_gpt(module)
    x, y = module.DataLoaderLite(tokens, 2, 64).batch(0)
    expected = F.nll_loss(model(x).double().log_softmax(-1).flatten(0, 1), y.flatten())
    assert losses_of(short_run("0"))[0] == pytest.approx(expected.item(), abs=1e-5)


def test_01_weights_are_tied():
    for label, tied in ((0, False), (1, True)):
        module = rung(label)
        model = new_gpt(module)
        same_storage = model.transformer.wte.weight.data_ptr() == model.lm_head.weight.data_ptr()
        assert same_storage is tied
        assert (model.transformer.wte.weight is model.lm_head.weight) is tied


def test_01_tied_weight_gets_both_gradients():
    module = rung(1)
    model = new_gpt(module)
    x = torch.tensor([[1, 2, 3]])
    model(x, x + 10).backward()
    output_only = torch.autograd.grad(model(x).sum(), model.transformer.wte.weight)[0]
    assert model.transformer.wte.weight.grad is model.lm_head.weight.grad
    assert output_only[4].abs().sum() > 0  # a token that is not in the input: its row serves the output


@pytest.mark.parametrize("label", LABELS)
def test_02_train_sets_the_precision_of_products(label, short_run):
    """As the forward pass of `train` finds it."""
    assert short_run(label).matmul_precision == {"highest" if label in ("0", "1") else "high"}


def test_02_a_cpu_is_told_that_it_has_no_effect(short_run):
    assert "precision: float32 (no TF32 on this device: no effect)" in short_run("2").lines[2]
    assert short_run("1").lines[2].endswith("| precision: float32")


@pytest.mark.skipif(not (torch.cuda.is_available() and torch.cuda.is_tf32_supported()), reason="needs a GPU with TF32")
def test_02_rounds_products_to_tf32_on_cuda(tmp_path, tokens):
    """In the forward pass of `train`, against float64: TF32 keeps 10 bits of mantissa, float32 23."""
    errors = {}
    for label in (1, 2):
        module = rung(label)
        forward = module.GPT.forward

        def measured(model, *args, forward=forward, label=label):
            a, b = torch.randn(2, 1024, 1024, device="cuda")
            errors[label] = (a @ b - a.double() @ b.double()).abs().mean().item()
            return forward(model, *args)

        module.GPT.forward = measured
        log = train(module, tmp_path, tokens, *FEW, "--device", "cuda")
    assert errors[2] > 10 * errors[1]
    assert "precision: float32, products in TF32" in log.read_text()


@from_rung("3")
def test_03_autocast_is_what_the_cpu_can_do(label, short_run):
    run = short_run(label)
    dtype = torch.bfloat16 if CPU_HAS_BFLOAT16 else torch.float32
    assert run.dtypes == {(dtype, torch.float32, torch.float32)}
    precision = "bfloat16 autocast" if CPU_HAS_BFLOAT16 else "float32 (no bfloat16 on this CPU)"
    assert run.lines[2].endswith(f"| precision: {precision}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_03_tracks_rung_2_in_every_type(dtype, tmp_path, tokens):
    """float16 with a GradScaler is what a T4 or V100 runs. Where the CPU lacks the arithmetic, torch emulates it."""
    module = rung(3)
    module.autocast_dtype = lambda device: dtype
    run = record_run(module, tmp_path / "after", tokens, *FEW)
    before = read_steps(train(rung(2), tmp_path / "before", tokens, *FEW))
    assert run.dtypes == {(dtype, torch.float32, torch.float32)}
    name = {torch.float32: "float32 (no bfloat16 on this CPU)"}.get(dtype, f"{dtype} autocast".removeprefix("torch."))
    assert run.lines[2].endswith(f"| precision: {name}")
    tolerance = 0 if dtype is torch.float32 else BFLOAT16_LOSS_TOLERANCE
    assert losses_of(run) == pytest.approx([step["loss"] for step in before], abs=tolerance)


@pytest.mark.parametrize("label", ["8", "ddp", "11", "16", "17", "18"])
def test_03_float16_gradients_are_unscaled_before_they_are_clipped(label, tmp_path, tokens, short_run):
    """The scale starts at 65536: a norm that forgets it is as much too large."""
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float16
    flags = (*total_batch(module, 64), *no_validation(module))
    run = record_run(module, tmp_path / "float16", tokens, *FEW[:-1], 1, *flags)
    exact = read_steps(train(rung(8), tmp_path / "float32", tokens, *FEW[:-1], 1))
    assert run.steps[0]["norm"] == pytest.approx(exact[0]["norm"], rel=BFLOAT16_LOSS_TOLERANCE)
    assert run.norms[0] <= 1 + 1e-4


@pytest.mark.parametrize("label", ["3", "10", "18"])
def test_03_float16_overflow_skips_the_step(label, tmp_path, tokens, monkeypatch):
    """A scale far too large makes the gradients infinite: no step may be taken, and the scale must come down."""
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float16
    scalers = []

    def scaler_with_huge_scale(*args, **kwargs):
        scalers.append(scaler_class(*args, init_scale=2.0**60, **kwargs))
        return scalers[-1]

    scaler_class = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", scaler_with_huge_scale)
    flags = (*total_batch(module, 8), *no_validation(module), "--save", tmp_path / "model.pt")
    train(module, tmp_path, tokens, "-B", 1, "-T", 8, "--steps", 2, *flags)
    trained = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    torch.manual_seed(1337)
    start = new_gpt(module).state_dict()
    assert scalers[0].get_scale() == 2.0**58
    assert all(torch.equal(trained[name], start[name]) for name in start)


def test_03_each_device_gets_the_type_that_it_has(monkeypatch):
    asked = {}

    def is_bf16_supported(including_emulation=True):
        asked["including_emulation"] = including_emulation
        return including_emulation  # a T4: bfloat16 only by emulation

    choose = rung(3).autocast_dtype
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert choose("cuda") is torch.float16
    assert asked == {"including_emulation": False}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert choose("cuda") is torch.bfloat16 and choose("mps") is torch.bfloat16
    for has_instructions, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has_instructions: has)
        assert choose("cpu") is dtype


def residual_growth(label, n_layer):
    """How much variance the layers of a fresh model add to the residual stream."""
    module = rung(label)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(vocab_size=1024, n_layer=n_layer, n_head=4, n_embd=256))
    stream = []
    for block in model.transformer.h:
        block.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].var().item()))
    model.transformer.ln_f.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].var().item()))
    with torch.no_grad():
        model(torch.randint(0, 1024, (2, 64)))
    return stream[-1] - stream[0]


def test_04_residual_projections_start_smaller():
    module = rung(4)
    model = module.GPT(module.GPTConfig(vocab_size=4096, n_layer=6, n_head=4, n_embd=256))
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


@pytest.mark.slow
def test_05_compiles_the_whole_model_and_tracks_rung_4(tmp_path, tokens):
    """Cold and from the cache. The compiled model is for the loop alone: what is saved has plain names."""
    before = read_steps(train(rung(4), tmp_path / "before", tokens, *FEW))
    module = rung(5)
    logs = []
    with fresh_cache():
        for _ in ("cold", "cached"):
            counters.clear()
            torch.compiler.reset()
            log = train(module, tmp_path, tokens, *FEW, "--save", tmp_path / "model.pt", compile_mode="default")
            logs.append(log.read_text())
            # The compiler may keep float32 where eager code rounds to bfloat16.
            assert [step["loss"] for step in read_steps(log)] == pytest.approx(
                [step["loss"] for step in before], abs=BFLOAT16_LOSS_TOLERANCE)
            assert counters["stats"]["unique_graphs"] == 2  # the probe and the model, in one piece
            assert not counters["graph_break"]
            assert "# compile: default" in logs[-1]
            # The probe's graph, and of the model forward and backward: compiled at first, then from the cache.
            found = [counters["inductor"][f"fxgraph_cache_{result}"] for result in ("miss", "hit")]
            assert found == ([3, 0] if len(logs) == 1 else [0, 3])
    check_that_it_loads(tmp_path / "model.pt", module)


def check_that_it_loads(path, module):
    saved = torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 50257)


def use_backend(monkeypatch, backend):
    """Compile with a backend that writes no C++: seconds instead of half a minute."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, mode=None: compile_(model, backend=backend))


@pytest.mark.parametrize("label", ["5", "6", "10", "ddp", "16", "17", "24"])
def test_05_the_model_is_one_graph(label, tmp_path, tokens, monkeypatch):
    """And what is saved has plain names."""
    module = rung(label)
    use_backend(monkeypatch, "eager")
    counters.clear()
    flags = ("-B", 1, "-T", 8, "--steps", 2, *total_batch(module, 8), *no_validation(module))
    log = train(module, tmp_path, tokens, *flags, "--save", tmp_path / "model.pt", compile_mode="default")
    assert counters["stats"]["unique_graphs"] == 2  # the probe and the model, in one piece
    assert not counters["graph_break"]
    assert "# compile: default" in log.read_text()
    check_that_it_loads(tmp_path / "model.pt", module)


def test_05_runs_eagerly_where_nothing_can_be_compiled(tmp_path, tokens, short_run):
    """The probe meets a real missing compiler; its other causes (no Triton, an old Python) raise as it does."""
    with torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}), fresh_cache():
        log = train(rung(5), tmp_path, tokens, *SHORT, compile_mode="default")
    note = "not possible here, running eagerly; python -m ladder check says why"
    assert f"# compile: {note}" in log.read_text()
    assert [step["loss"] for step in read_steps(log)] == losses_of(short_run("5"))


@pytest.mark.slow
def test_05_runs_eagerly_without_a_compiler(tmp_path, tokens):
    run = run_command(
        "python", ROOT / "ddp_run.py", "--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", tmp_path,
        "--steps", 3, "-T", 32, CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert "# compile: not possible here, running eagerly" in run.stdout
    assert len(read_steps(tmp_path / "ddp_run.log")) == 3


def test_05_leaves_apple_gpus_and_those_who_do_not_want_it_alone(monkeypatch):
    monkeypatch.setattr(torch, "compile", None)  # must not be called
    module, model = rung(5), torch.nn.Linear(1, 1)
    assert module.compile_model(model, "default", "mps") == (model, "not used on Apple GPUs")
    assert module.compile_model(model, "none", "cpu") == (model, "none")


def logits_sized_tangents(module, folder, tokens, monkeypatch):
    """The gradients as large as the logits that the compiled backward pass of `train` takes from outside."""
    found = {}

    def keep(graph, inputs):
        found["graph"] = graph
        return graph

    use_backend(monkeypatch, aot_autograd(fw_compiler=lambda graph, inputs: graph, bw_compiler=keep))
    train(module, folder, tokens, "-B", 2, "-T", 16, "--steps", 1, *total_batch(module, 32), compile_mode="default")
    tangents = [node.meta["val"] for node in found["graph"].graph.find_nodes(op="placeholder")
                if node.name.startswith("tangents")]
    assert tangents
    return [tuple(tangent.shape) for tangent in tangents if tangent.numel() >= 2 * 16 * 50257]


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
@pytest.mark.parametrize("label", ["5", "10", "16"])
def test_05_the_graph_has_no_second_buffer_of_the_size_of_the_logits(label, tmp_path, tokens, monkeypatch):
    """A model that also returned the logits would be given a gradient for them, all zeros, and would add it."""
    assert logits_sized_tangents(rung(label), tmp_path, tokens, monkeypatch) == []


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")
def test_05_and_would_have_one_if_it_returned_the_logits(tmp_path, tokens, monkeypatch):
    module = rung(10)
    forward, compile_model = module.GPT.forward, module.compile_model

    def with_logits(model, idx, targets):
        logits = forward(model, idx)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def loss_alone(*args):
        compiled, note = compile_model(*args)
        return lambda x, y: compiled(x, y)[1], note

    module.GPT.forward, module.compile_model = with_logits, loss_alone
    assert logits_sized_tangents(module, tmp_path, tokens, monkeypatch) == [(2, 16, 50257)]


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


@pytest.mark.parametrize("label", ["7", "16", "17"])
def test_07_padding_is_inert(label, hf_folder, tmp_path):
    """More rows, and no other logits, loss or gradients: no row of padding is ever predicted or trained."""
    module = rung(label)
    assert module.GPTConfig().vocab_size == 50257
    model, before = (converted(hf_folder, each, tmp_path / f"{each}.pt") for each in (label, "6"))
    assert model.lm_head.weight.shape == (50304, 64) and 50304 % 128 == 0
    x, y = torch.randint(0, 50257, (2, 2, 32))
    logits, loss = model(x), model(x, y)
    loss.backward()
    expected = before(x, y)
    expected.backward()
    assert logits.shape == (2, 32, 50257)
    assert torch.allclose(logits, before(x), rtol=0, atol=1e-5)
    assert torch.allclose(loss, expected, rtol=1e-6)
    gradient = model.lm_head.weight.grad
    assert torch.allclose(gradient[:50257], before.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
    assert gradient[50257:].abs().max() == 0


def test_07_no_padding_where_there_is_nothing_to_pad():
    module = rung(7)
    assert module.GPT(module.GPTConfig(vocab_size=256, n_layer=1, n_head=1, n_embd=8)).lm_head.weight.shape == (256, 8)


@from_rung("8")
def test_08_clips_the_gradient_and_logs_its_norm(label, short_run):
    before, run = short_run("7"), short_run(label)
    assert before.norms[0] > 1.5  # there was something to clip
    if LABELS.index(label) < LABELS.index("20"):  # the same model
        assert run.steps[0]["norm"] == pytest.approx(before.norms[0], rel=1e-3)  # the norm before clipping
    assert all(0.9 < norm <= 1.0 + 1e-4 for norm in run.norms)


@pytest.mark.parametrize("label", LABELS)
def test_08_and_10_the_optimizer_of_train(label, short_run):
    """The betas of GPT-3 from rung 8, its decay, on the matrices alone, and the fused kernel from rung 10 on."""
    place = LABELS.index(label)
    for groups in short_run(label).groups:
        for group in groups:
            assert group["betas"] == ((0.9, 0.95) if place >= LABELS.index("8") else (0.9, 0.999))
            assert group["eps"] == 1e-8
            assert bool(group["fused"]) is (place >= LABELS.index("10"))
        decays = [group["weight_decay"] for group in groups]
        muon = [0.1] * (place >= LABELS.index("18"))
        assert decays == ([*muon, 0.0, 0.1] if muon else [0.1, 0.0] if place >= LABELS.index("10") else [0.01])
        if place < LABELS.index("9"):
            assert groups[0]["lr"] == 3e-4


@pytest.mark.parametrize("step, expected", [
    (1, 6e-5),  # a tenth of the way up
    (5, 3e-4),
    (10, 6e-4),  # the end of the warm-up
    (20, 6e-5 + 0.5 * (1 + math.sqrt(0.5)) * 5.4e-4),  # cos(45 degrees)
    (30, 3.3e-4),  # the middle: half-way between the largest and the smallest
    (50, 6e-5),  # the end: a tenth
])
def test_09_schedule_in_closed_form(step, expected):
    assert rung(9).get_lr(step, 50, max_lr=6e-4, warmup_steps=10) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("max_steps, max_lr, warmup_steps, expected", [
    (4, 1.0, 2, [0.5, 1.0, 0.55, 0.1]),
    (4, 1.0, 0, [0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1]),
    (3, 0.3, 3, [0.1, 0.2, 0.3]),  # all of it is warm-up
    (2, 1.0, 4, [0.25, 0.5]),  # the run ends inside the warm-up
    (2, 0.0, 1, [0.0, 0.0]),
])
def test_09_any_peak_and_any_warm_up(max_steps, max_lr, warmup_steps, expected):
    get_lr = rung(9).get_lr
    found = [get_lr(step, max_steps, max_lr, warmup_steps) for step in range(1, max_steps + 1)]
    assert found == pytest.approx(expected, rel=1e-12)


@from_rung("9")
def test_09_the_optimizer_gets_the_scheduled_rate(label, short_run):
    run = short_run(label)
    expected = [6e-5 * step for step in range(1, 6)]  # 5 of the 10 steps of warm-up
    muon = LABELS.index(label) >= LABELS.index("18")  # its group is the first
    for group in range(muon, len(run.groups[0])):
        assert [groups[group]["lr"] for groups in run.groups] == pytest.approx(expected, rel=1e-12)
    if muon:
        assert [groups[0]["lr"] for groups in run.groups] == pytest.approx([2e-4 * step for step in range(1, 6)])
    assert [step["lr"] for step in run.steps] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("label", LABELS[LABELS.index("9") : LABELS.index("18")])
def test_09_the_flags_arrive(label, tmp_path, tokens):
    module = rung(label)
    flags = ("-B", 1, "-T", 8, "--steps", 4, "--max-lr", 0.001, "--warmup-steps", 2)
    run = record_run(module, tmp_path, tokens, *flags, *total_batch(module, 8), *no_validation(module))
    expected = [5e-4, 1e-3, 5.5e-4, 1e-4]  # up, and half a cosine down
    assert [groups[-1]["lr"] for groups in run.groups] == pytest.approx(expected, rel=1e-12)


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
    fused_model = new_gpt(module)
    plain_model = new_gpt(module)
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
            model(x, y).backward()
        for fused_p, plain_p in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
            plain_p.grad.copy_(fused_p.grad)  # compare the optimizers, not what a difference grows into
        fused.step()
        plain.step()
        for fused_p, plain_p in zip(fused_model.parameters(), plain_model.parameters(), strict=True):
            assert torch.allclose(fused_p, plain_p, rtol=1e-5, atol=1e-3 * 1e-3)  # lr is 1e-3 here


def test_10_runs_the_fused_kernel(tmp_path, tokens):
    """In `train`, and not before this rung."""
    for label in (9, 10):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(rung(label), tmp_path, tokens, "-B", 1, "-T", 8, "--steps", 1)
        assert ("aten::_fused_adamw_" in {event.name for event in profile.events()}) is (label == 10)
