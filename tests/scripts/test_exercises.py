"""What each exercise asks for: `python -m ladder try 6 FILE` runs the tests of rung 6 with the file in its place.

A name says what must be true; the docstring is the hint for a test that is red: where to look, not what to write. The
tests look at what a script does, through torch's hooks and its log, so that any right solution passes;
docs/exercises.md names the few functions and flags that they need.
"""
import contextlib
import functools
import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from load_script import known_flags, new_gpt, rung, tiny
from log_files import losses, read_steps, val_losses
from ranks import on_ranks
from run_script import Crash, crash_in_step, train
from saved_models import assert_same_weights, assert_untrained, saved_model
from tensor_bytes import Watch
from token_folders import tokens_of
from torch._dynamo.utils import counters
from torch.multiprocessing.spawn import ProcessException
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from watch_training import norm_of, watch

SMALL = {"B": 2, "T": 32, "steps": 3, "total_batch": 64, "val_every": 0, "checkpoint_every": 0}
BFLOAT16_TOLERANCE = 0.02  # it keeps 8 bits: each activation is off by up to 0.2 %, and so is a loss of up to 10.8


def script(label, dtype=torch.float32):
    """A rung whose products are in this type, from rung 3 on."""
    module = rung(label)
    module.autocast_dtype = lambda device: dtype
    return module


@pytest.fixture(scope="module")
def run(tmp_path_factory, byte_tokens):
    """run(label, *words, **settings): what a short run shows, see `watch`; its `log` and `steps`. Each once."""

    @functools.cache
    def run(label, *words, folder=None, data=byte_tokens, dtype=torch.float32, **settings):
        module = script(label, dtype)
        with watch() as seen:
            seen.log = train(module, folder or tmp_path_factory.mktemp("run"), data,
                             *known_flags(module, **SMALL | settings), *words)
        seen.steps = read_steps(seen.log)
        return seen

    return run


def ids(*shape, vocab_size=257):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


def draw_anew(model, std=1.0):
    """Give all matrices of the blocks random numbers: zeros would hide what a part does."""
    for parameter in model.transformer.h.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=std)


# ---- 1 to 10 ---------------------------------------------------------------------------------------------------------

def test_01_embedding_and_output_layer_share_one_parameter():
    """Both modules, wte and lm_head, have a `weight`: is it the same object? A misspelled attribute raises no error."""
    model = tiny("1")
    shared = [name for name, p in model.named_parameters(remove_duplicate=False) if p is model.lm_head.weight]
    assert shared == ["transformer.wte.weight", "lm_head.weight"]


def test_01_there_are_124_439_808_parameters():
    """Rung 0 has 163,037,184. How many numbers are in the matrix that is not needed any more? Has something grown?"""
    with torch.device("meta"):
        model = new_gpt(rung("1"), "gpt2")
    n_parameters = sum(p.numel() for p in model.parameters())
    assert n_parameters == 124_439_808


def test_02_products_of_float32_may_run_in_tf32(run):
    """torch has one setting for the precision of float32 matrix products. Which value has it when a step begins?"""
    assert {kind[4] for kind in run("2").forward} == {"high"}


def test_02_nothing_else_changes(run):
    """TF32 is no type of a tensor: weights, activations and the loss stay float32, and on a CPU so do all numbers."""
    before, after = (run(label) for label in "12")
    assert {kind[2:4] for kind in after.forward} == {(torch.float32, torch.float32)}
    assert losses(after.log) == losses(before.log)


def test_02_the_log_says_whether_the_device_has_tf32(byte_tokens, monkeypatch):
    """A T4 has none. What does `Log` get as `precision`, and what does torch.cuda.is_tf32_supported() return?"""
    module, said = rung("2"), []
    module.new_model, module.Log = mock.MagicMock(), mock.Mock(side_effect=Crash)  # a CPU cannot go on
    monkeypatch.setattr(torch.optim, "AdamW", mock.Mock())
    args = module.parse_args(["--data", str(byte_tokens), "-B", "1", "-T", "8"])
    args.device = "cuda"
    for supported in (True, False):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda supported=supported: supported)
        with pytest.raises(Crash):
            module.train(args)
        _, *told = module.Log.call_args.args
        said.append([text for text in [*told, *module.Log.call_args.kwargs.values()] if isinstance(text, str)])
    assert said[0] != said[1], "the same with TF32 and without"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_03_the_forward_pass_runs_in_16_bits(run, dtype):
    """autocast_dtype(device) names the type. Is the model called inside `with torch.autocast(...)`, with that type?"""
    assert {kind[2] for kind in run("3", dtype=dtype).forward} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_03_the_loss_stays_close_to_that_of_float32(run, dtype):
    """Weights, gradients and the loss stay float32: autocast casts copies, nothing needs .to(...) or .half()."""
    before, after = run("2"), run("3", dtype=dtype)
    assert {kind[3] for kind in after.forward} == {torch.float32}
    assert losses(after.log) == pytest.approx(losses(before.log), abs=BFLOAT16_TOLERANCE)


def test_03_each_device_gets_the_type_that_it_has(monkeypatch):
    """autocast_dtype(device): a T4 has bfloat16 only by emulation, which a question to torch.cuda can leave out."""
    choose = rung("3").autocast_dtype
    for native, dtype in ((False, torch.float16), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True, native=native: (
            native or including_emulation))
        assert choose("cuda") is dtype
    for has_instructions, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has_instructions: has)
        assert choose("cpu") is dtype
    assert choose("mps") is torch.bfloat16


def test_03_where_autocast_dtype_is_float32_nothing_changes(run):
    """CPUs that would have to emulate bfloat16: torch.autocast has an argument to switch it off."""
    before, after = (run(label) for label in "23")
    assert losses(after.log) == losses(before.log)


def test_03_in_float16_a_step_that_overflows_is_skipped(run, tmp_path, huge_scale):
    """torch.amp.GradScaler: it scales the loss before backward(), makes the optimizer's step, and then adapts."""
    seen = run("3", dtype=torch.float16, steps=2, save=tmp_path / "model.pt")
    assert [scaler.get_scale() for scaler in huge_scale] == [2.0**58], "the scale is not halved at each overflow"
    assert len(seen.steps) == 2
    assert_untrained(rung("3"), tmp_path / "model.pt")


def stds(label):
    """{name: standard deviation} of the matrices of a model of six layers."""
    module = rung(label)
    model = module.GPT(module.GPTConfig(vocab_size=2048, n_layer=6, n_head=4, n_embd=128))
    return {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}


def not_near(expected, found, rel):
    """Those of {name: standard deviation} that are not near the expected one."""
    return {name: round(std, 4) for name, std in found.items() if std != pytest.approx(expected, rel=rel)}


def test_04_projections_that_end_a_residual_branch_start_smaller():
    """By 1 / sqrt(N), where N counts what is added to the stream, not the layers. Which two layers end a branch?"""
    found = {name: std for name, std in stds("4").items() if name.endswith("c_proj.weight")}
    assert len(found) == 12
    assert not_near(0.02 / 12**0.5, found, rel=0.03) == {}, "for six layers"


def test_04_all_other_matrices_start_as_before():
    """N(0, 0.02): _init_weights sees every module. How does it know the ones that end a branch?"""
    found = {name: std for name, std in stds("4").items() if not name.endswith("c_proj.weight")}
    assert not_near(0.02, found, rel=0.05) == {}


def test_05_the_training_loop_calls_the_compiled_model(tmp_path, byte_tokens, monkeypatch):
    """torch.compile returns a new object, and compiles when it is first called. Which one does the loop call?"""
    compile_, compiled = torch.compile, []

    def see(function=None, **options):  # with a backend that writes no C++
        compiled.append(function)
        return compile_(function, backend="eager")

    monkeypatch.setattr(torch, "compile", see)
    counters.clear()
    module = rung("5")
    train(module, tmp_path, byte_tokens, "-B", 1, "-T", 8, "--steps", 2, compile_mode="default")
    assert compiled, "torch.compile is not called"
    assert counters["stats"]["unique_graphs"] == len(compiled) and not counters["graph_break"]


def test_05_the_saved_model_keeps_its_names(tmp_path, byte_tokens, monkeypatch):
    """The compiled model shares its weights with the one that it was made of, and puts a prefix before their names."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile_(function, backend="eager"))
    module = rung("5")
    flags = ("-B", 1, "-T", 8, "--steps", 1, "--save", tmp_path / "model.pt")
    train(module, tmp_path, byte_tokens, *flags, compile_mode="default")
    assert saved_model(module, tmp_path / "model.pt")(ids(1, 4)).shape == (1, 4, 257)


def attention_pair(T=64):
    """The attention of rung 5 (explicit) and rung 6 (flash) with the same weights, and an input."""
    explicit, flash = rung("5"), rung("6")
    config = explicit.GPTConfig(n_head=4, n_embd=64, block_size=T)
    torch.manual_seed(0)
    one, other = explicit.CausalSelfAttention(config), flash.CausalSelfAttention(config)
    other.load_state_dict(one.state_dict())
    return one, other, torch.randn(2, T, 64)


def test_06_the_future_is_hidden():
    """As the mask did: the kernel has an argument for it. Here the last 8 of 48 tokens are others."""
    _, attention, x = attention_pair(48)
    changed = x.clone()
    changed[:, 40:] += 1
    differences = (attention(x) - attention(changed)).abs().amax((0, 2))
    assert differences[:40].max().item() == 0, "earlier tokens' outputs change by up to this"


def test_06_output_and_gradients_are_those_of_the_explicit_attention():
    """Same weights, same input. Which axis holds the heads before the kernel, and after? Is the scale hs**-0.5?"""
    one, other, x = attention_pair(48)
    results = []
    for attention in (one, other):
        inputs = x.clone().requires_grad_()
        output = attention(inputs)
        output.square().sum().backward()
        results.append([output, inputs.grad, *(p.grad for p in attention.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_06_no_matrix_of_scores_is_kept():
    """Of T x T, for the backward pass. A mask that is handed to the kernel counts, too."""
    T, kept = 48, []
    _, attention, x = attention_pair(T)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        attention(x.requires_grad_())
    assert [shape for shape in kept if shape[-2:] == (T, T)] == []


def test_06_no_mask_is_stored():
    """In __init__: what does the module still register that nobody uses?"""
    _, attention, _ = attention_pair(48)
    assert {name: tuple(buffer.shape) for name, buffer in attention.named_buffers()} == {}


@pytest.mark.parametrize("vocab_size, rows", [(50257, 50304), (257, 384), (256, 256)])
def test_07_the_matrix_has_a_multiple_of_128_rows(vocab_size, rows):
    """The next one, whatever the vocabulary: --data may have another tokenizer than GPT-2's."""
    with torch.device("meta"):
        model = new_gpt(rung("7"), vocab_size=vocab_size)
    assert len(model.lm_head.weight) == len(model.transformer.wte.weight) == rows


def test_07_padding_changes_no_logit_loss_or_gradient():
    """The extra rows belong to no token: may the caller see their logits, and may the softmax?"""
    before, after = tiny("6"), tiny("7")
    weights = before.state_dict()
    extra = len(after.lm_head.weight) - 257
    for name in ("lm_head.weight", "transformer.wte.weight"):
        weights[name] = F.pad(weights[name], (0, 0, 0, extra), value=1.0)
    after.load_state_dict(weights)
    x, y = ids(2, 2, 16)
    assert after(x).shape == before(x).shape
    torch.testing.assert_close(after(x), before(x))
    for model in (before, after):
        model(x, y).backward()
    torch.testing.assert_close(after(x, y), before(x, y))
    gradient = after.lm_head.weight.grad
    torch.testing.assert_close(gradient[:257], before.lm_head.weight.grad)
    assert not gradient[257:].any()


def test_08_the_optimizer_gets_gradients_of_norm_1_at_most(run):
    """Clip between backward() and the optimizer's step, all parameters as one vector."""
    assert norm_of(run("7").gradients[0]) > 1.5  # there is something to clip
    norms = [norm_of(gradients) for gradients in run("8").gradients]
    assert norms == pytest.approx([1, 1, 1], abs=1e-3)


def test_08_the_log_has_the_norm_before_clipping(run):
    """log.step takes more fields, norm=... What does the function that clips return?"""
    before, after = (run(label) for label in "78")
    assert after.steps[0].get("norm") == pytest.approx(norm_of(before.gradients[0]), rel=1e-3)


def test_08_the_betas_are_gpt3s(run):
    """Its appendix B. AdamW's argument has both; the second decides over how many steps squares are averaged."""
    groups = [group for groups in run("8").groups for group in groups]
    assert {tuple(group["betas"]) for group in groups} == {(0.9, 0.95)}


def test_08_in_float16_the_norm_is_that_of_unscaled_gradients(run):
    """The scaler's factor, 65536 at first, is still in the gradients after backward(): it can divide it out itself."""
    exact = run("8", steps=1)
    seen = run("8", steps=1, dtype=torch.float16)
    assert norm_of(seen.gradients[0]) == pytest.approx(norm_of(exact.gradients[0]), rel=BFLOAT16_TOLERANCE)
    assert seen.steps[0].get("norm") == pytest.approx(exact.steps[0].get("norm", 1), rel=BFLOAT16_TOLERANCE)


def rates(seen):
    """The learning rates of all steps, as the optimizer finds them, in thousandths."""
    return [round(1000 * groups[-1]["lr"], 3) for groups in seen.groups]


COSINE = {"steps": 12, "warmup_steps": 4, "max_lr": 1e-3}


def test_09_the_rate_climbs_linearly_to_the_peak(run):
    """Over --warmup-steps, to --max-lr. Steps count from 1: is the first one's rate zero? Which step is at the peak?"""
    found = rates(run("9", **COSINE))
    assert found[:4] == [0.25, 0.5, 0.75, 1]


def test_09_then_it_follows_half_a_cosine_to_a_tenth_of_the_peak(run):
    """From the end of the warm-up to the last step: what is the progress at both, and half-way? What is the lowest?"""
    found = rates(run("9", **COSINE))
    assert found[4:] == [round(0.1 + 0.45 * (1 + math.cos(math.pi * n / 8)), 3) for n in range(1, 9)]


@pytest.mark.parametrize("steps, warmup_steps, expected", [(2, 0, [0.55, 0.1]), (2, 2, [0.5, 1]), (2, 4, [0.25, 0.5])])
def test_09_without_a_warm_up_and_in_a_run_no_longer_than_it(run, steps, warmup_steps, expected):
    """--warmup-steps 0 must not divide by it; a run as long as the warm-up, or shorter, only climbs."""
    found = rates(run("9", **COSINE | {"steps": steps, "warmup_steps": warmup_steps}))
    assert found == expected


def test_09_the_log_has_the_rate(run):
    """That of its step: log.step takes more fields, lr=f"{lr:.4e}"."""
    seen = run("9", **COSINE)
    assert [round(1000 * step.get("lr", 0), 3) for step in seen.steps] == rates(seen)


def test_10_matrices_decay_by_a_tenth_and_vectors_do_not(run):
    """AdamW takes groups of parameters, each with a weight_decay. How many dimensions has a bias, how many wte?"""
    groups = run("10").groups[0]
    found = {"matrices": set(), "vectors": set()}
    for group in groups:
        for p in group["params"]:
            found["matrices" if p.dim() >= 2 else "vectors"].add(group["weight_decay"])
    assert found == {"matrices": {0.1}, "vectors": {0.0}}


def test_10_each_parameter_is_in_one_group(run):
    """Also LayerNorms and biases, which do not decay, are trained. Tied weights count once."""
    parameters = [id(p) for group in run("10").groups[0] for p in group["params"]]
    assert len(set(parameters)) == len(parameters) == len(list(tiny("10").parameters()))


def test_10_the_betas_are_still_gpt3s(run):
    """Of rung 8: they belong into the new call, too."""
    assert {tuple(group["betas"]) for group in run("10").groups[0]} == {(0.9, 0.95)}


def test_10_one_kernel_makes_the_update(run):
    """An argument of torch.optim.AdamW."""
    assert {group["fused"] for group in run("10").groups[0]} == {True}


# ---- ddp to 14 -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, byte_tokens):
    """two_ranks(label, **settings): the folder of a run on two ranks, with what they printed. Each once."""

    @functools.cache
    def two_ranks(label, **settings):
        folder = tmp_path_factory.mktemp("two")
        flags = known_flags(rung(label), **SMALL | settings, save=folder / "model.pt")
        try:
            on_ranks(2, folder, byte_tokens, {"run": (label, "float32", flags)})
        except ProcessException as error:  # with the traceback of a rank
            pytest.fail(f"the ranks do not reach the end: {str(error).strip().splitlines()[-1]}")
        return folder

    return two_ranks


@pytest.fixture
def first_of_two(group_of_one, monkeypatch):
    """A group of one that says it is of two. (With one rank, a script need not care what crosses the ranks.)"""
    group = functools.partial(torch.distributed.init_process_group, store=torch.distributed.HashStore(), rank=0,
                              world_size=1)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **how: group("gloo"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args: 2)
    monkeypatch.setenv("WORLD_SIZE", "2")


def log_of(folder):
    log, = (folder / "run").glob("*.log")
    return log


def test_ddp_only_rank_0_prints(two_ranks):
    """Every rank runs the whole script. What must only one of them do? The log, its header, its last line, --save."""
    printed = [(two_ranks("ddp", steps=4) / f"printed_{rank}.txt").read_text() for rank in (0, 1)]
    assert [text.count("step : 1 |") for text in printed] == [1, 0]


def test_ddp_both_ranks_end_with_the_same_weights(two_ranks):
    """DDP averages gradients in its own forward and backward pass: is it the wrapped model that the loop calls?"""
    run = two_ranks("ddp", steps=4) / "run"
    digests = {json.loads((run / f"rank{rank}.json").read_text())["digest"] for rank in (0, 1)}
    assert len(digests) == 1


def test_ddp_two_ranks_learn_as_one_process_with_twice_the_batch(run, two_ranks, tmp_path):
    """Each rank takes other batches: which, so that together they read the text as one does? The loss is their mean."""
    alone, folder = run("10", B=4, steps=4, save=tmp_path / "model.pt"), two_ranks("ddp", steps=4)
    assert losses(log_of(folder)) == pytest.approx(losses(alone.log), abs=1e-4)
    assert_same_weights(folder / "model.pt", tmp_path / "model.pt", atol=3e-5)


def test_ddp_the_tokens_of_both_ranks_count(two_ranks):
    """tokens/sec: how many tokens are in a step of all ranks?"""
    step = read_steps(log_of(two_ranks("ddp", steps=4)))[-1]
    assert step["tokens_per_second"] * step["ms"] / 1000 == pytest.approx(2 * 2 * 32, rel=0.01)


def test_ddp_without_torchrun_it_is_rung_10(run):
    """What tells a process that torchrun has started it?"""
    before, after = (run(label) for label in ("10", "ddp"))
    assert losses(after.log) == losses(before.log)


def test_gradient_accumulation_micro_batches_add_up_to_the_gradient_of_one_batch(run):
    """--total-batch 256 is one batch of 8 x 32 or four of 2 x 32: what scales each loss? When are gradients cleared?"""
    one, parts = (run("gradient_accumulation", B=B, total_batch=256, steps=1) for B in (8, 2))
    assert [len(seen.inputs) for seen in (one, parts)] == [1, 4], "forward passes in a step"
    for expected, actual in zip(one.gradients[0], parts.gradients[0], strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm() + 1e-12


def test_gradient_accumulation_the_log_has_the_loss_and_the_norm_of_the_whole_batch(run):
    """The mean over the micro-batches, not the last one's; clipping comes once, after all of them."""
    one, parts = (run("gradient_accumulation", B=B, total_batch=256).steps for B in (8, 2))
    for key in ("loss", "norm"):
        assert [step[key] for step in parts] == pytest.approx([step[key] for step in one], abs=2e-4)


def test_gradient_accumulation_the_logged_loss_keeps_no_activations(run, monkeypatch):
    """A sum of losses that are not detached keeps the graphs of all micro-batches."""
    item, graphs = torch.Tensor.item, []

    def losses_behind(function):
        """How many losses a graph holds."""
        if function is None:
            return 0
        if "NllLoss" in type(function).__name__:
            return 1
        return sum(losses_behind(before) for before, _ in function.next_functions)

    monkeypatch.setattr(
        torch.Tensor, "item", lambda tensor: graphs.append(losses_behind(tensor.grad_fn)) or item(tensor))
    run("gradient_accumulation", total_batch=256, steps=1)
    assert graphs
    assert max(graphs) <= 1, "losses in the graph of a number that is logged"


def test_gradient_accumulation_gradients_cross_the_ranks_once_a_step(run, first_of_two, monkeypatch):
    """DDP averages in each backward pass unless `no_sync` is on. In which micro-steps, and around which passes?"""
    forward, synchronized = DistributedDataParallel.forward, []

    def see(ddp, *args, **kwargs):
        synchronized.append(ddp.require_backward_grad_sync)
        return forward(ddp, *args, **kwargs)

    monkeypatch.setattr(DistributedDataParallel, "forward", see)
    run("gradient_accumulation", B=1, T=16, total_batch=128, steps=2)
    assert synchronized == [False, False, False, True] * 2


def test_gradient_accumulation_two_ranks_share_the_batch(run, two_ranks):
    """--total-batch counts all ranks' tokens. How many micro-steps are left for each, and with which batches?"""
    alone = run("gradient_accumulation", B=2, total_batch=256)
    assert losses(log_of(two_ranks("gradient_accumulation", total_batch=256))) == pytest.approx(
        losses(alone.log), abs=1e-4)


def test_distributed_validation_the_loss_is_that_of_val_bin(run, tmp_path, byte_tokens):
    """After the update of every second step and of the last: the mean over all of the file, --val-sequences 0."""
    text = np.fromfile(byte_tokens / "train.bin", dtype="<u2")
    folder = tokens_of(tmp_path / "tokens", text[:1000], text[1000:1257], vocab_size=257)
    seen = run("distributed_validation", data=folder, val_every=2, val_sequences=0, save=tmp_path / "model.pt")
    found = val_losses(seen.log)
    assert list(found) == [2, 3], "the steps that are validated after"
    model = saved_model(rung("distributed_validation"), tmp_path / "model.pt")
    val = torch.from_numpy(text[1000:1257].astype(np.int64))
    with torch.no_grad():
        expected = F.cross_entropy(model(val[:256].view(8, 32)).flatten(0, 1), val[1:])
    assert found[3] == pytest.approx(expected.item(), abs=1e-4)


def test_distributed_validation_it_runs_without_gradients_in_evaluation_mode(run):
    """And training goes on in training mode."""
    seen = run("distributed_validation", val_every=1, val_sequences=2)
    assert {kind[:2] for kind in seen.forward} == {(True, True), (False, False)}  # (training?, gradients?)


def test_distributed_validation_two_ranks_share_the_sequences(run, two_ranks):
    """Two ranks and five sequences: do all of them count, each once? The sum of losses has to cross the ranks."""
    settings = {"steps": 2, "total_batch": 128, "val_every": 1, "val_sequences": 5}
    alone, folder = run("distributed_validation", **settings), two_ranks("distributed_validation", **settings)
    assert val_losses(log_of(folder)) == pytest.approx(val_losses(alone.log), abs=1e-4)


def test_distributed_validation_a_rank_takes_every_second_of_two_ranks_sequences(run, first_of_two):
    """Of five sequences rank 0 of 2 takes 0, 2 and 4, in one forward pass each."""
    passes = []
    hook = register_module_forward_hook(
        lambda module, inputs, output: passes.append(inputs[0].clone()) if type(module).__name__ == "GPT" else None)
    run("distributed_validation", steps=1, total_batch=128, val_every=1, val_sequences=5)
    hook.remove()
    assert [len(x) for x in passes[-4:]] == [2, 1, 1, 1], "sequences in the last training pass, and in validation"


def test_distributed_validation_training_does_not_notice(run):
    """The same batches, the same weights: does validation take a batch of training, or leave gradients?"""
    plain, validated = (run("distributed_validation", val_every=n, val_sequences=2) for n in (0, 1))
    assert losses(validated.log) == losses(plain.log)
    assert list(val_losses(plain.log)) == [] and len(val_losses(validated.log)) == 3


SIX = {"steps": 6, "checkpoint_every": 2}


def crash(folder, data, step):
    """A run of `checkpoints` that ends in a step, or in torch.save."""
    module = script("checkpoints")
    crash_in_step(module, step)
    with pytest.raises(Crash):
        train(module, folder, data, *known_flags(module, **SMALL | SIX))


def test_checkpoints_a_resumed_run_repeats_only_what_came_after_the_checkpoint(run, tmp_path, byte_tokens):
    """Which step is saved in a checkpoint of --checkpoint-every 2? With which does the loop go on after --resume?"""
    crash(tmp_path, byte_tokens, 5)
    seen = run("checkpoints", "--resume", folder=tmp_path, **SIX)
    assert [step["step"] for step in seen.steps][-2:] == [5, 6]
    assert len(seen.inputs) == 2, "how many steps it computes"


def test_checkpoints_without_a_checkpoint_a_resumed_run_starts_at_step_1(run, tmp_path):
    """So that one command starts a run and continues it."""
    seen = run("checkpoints", "--resume", folder=tmp_path, steps=2)
    assert [step["step"] for step in seen.steps] == [1, 2]


def test_checkpoints_a_resumed_run_ends_as_one_that_never_stopped(run, tmp_path, byte_tokens):
    """To the last digit. What does the next step depend on beside the weights? Which batch comes next?"""
    whole = run("checkpoints", folder=tmp_path / "whole", **SIX, save=tmp_path / "whole.pt")
    crash(tmp_path, byte_tokens, 5)
    seen = run("checkpoints", "--resume", folder=tmp_path, **SIX, save=tmp_path / "model.pt")
    assert losses(seen.log)[-2:] == losses(whole.log)[-2:]
    assert_same_weights(tmp_path / "model.pt", tmp_path / "whole.pt")


def test_checkpoints_a_crash_while_a_checkpoint_is_written_costs_only_that_one(run, tmp_path, byte_tokens, monkeypatch):
    """Half of a file must never have the name that --resume looks for: write it aside, then rename it."""
    save, calls = torch.save, []

    def half_of_the_second(contents, file, **options):
        calls.append(file)
        if len(calls) == 1:
            return save(contents, file, **options)
        file.write(b"half") if hasattr(file, "write") else Path(file).write_bytes(b"half")
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half_of_the_second)
        crash(tmp_path, byte_tokens, 5)
    seen = run("checkpoints", "--resume", folder=tmp_path, **SIX)
    assert len(seen.inputs) == 4, "how many steps it computes after the first checkpoint, of step 2"


# ---- the others ----------------------------------------------------------------------------------------------------

def block_calls(folder, data, **settings):
    """Whether the model is in training at each call of a block, in a run of `gradient_checkpointing`."""
    module, seen = rung("gradient_checkpointing"), []
    forward = module.Block.forward
    module.Block.forward = lambda block, *args: seen.append(block.training) or forward(block, *args)
    train(module, folder, data, *known_flags(module, **SMALL | settings))
    return seen


@pytest.mark.parametrize("blocks, calls", [(0, 2), (1, 3), (9, 4)])
def test_gradient_checkpointing_each_checkpointed_block_runs_twice(blocks, calls, tmp_path, byte_tokens):
    """Once in the forward pass, again in the backward pass; --recompute-blocks says how many, of two here."""
    assert block_calls(tmp_path, byte_tokens, steps=1, recompute_blocks=blocks) == [True] * calls


def test_gradient_checkpointing_validation_recomputes_nothing(tmp_path, byte_tokens):
    """There is no backward pass."""
    seen = block_calls(tmp_path, byte_tokens, steps=2, recompute_blocks=2, val_every=1, val_sequences=1)
    assert seen == ([True] * 4 + [False] * 2) * 2


def peak(run, label, **settings):
    """(the most bytes that the tensors of a run held at once, what it showed)."""
    with Watch() as bytes_held:
        seen = run(label, **settings)
    return bytes_held.peak, seen


def test_gradient_checkpointing_memory_falls_and_gradients_do_not_change(run):
    """A checkpointed block keeps only its input, (B, T, C). Is all of the block inside, and is it in training mode?"""
    big = {"B": 8, "T": 64, "total_batch": 512, "steps": 1}
    (plain, one), (lean, other) = (peak(run, "gradient_checkpointing", **big, recompute_blocks=n) for n in (0, 2))
    assert plain - lean > 8 * (8 * 64 * 64) * 4, "bytes saved: at least 8 tensors of (B, T, C)"
    for expected, actual in zip(one.gradients[0], other.gradients[0], strict=True):
        torch.testing.assert_close(actual, expected)


def test_gradient_checkpointing_a_resumed_run_may_recompute_other_blocks(run, tmp_path):
    """It changes what is kept in memory, not what is learned: which flags does --resume compare?"""
    run("gradient_checkpointing", folder=tmp_path, steps=2, checkpoint_every=1)
    run("gradient_checkpointing", "--resume", folder=tmp_path, steps=2, checkpoint_every=1, recompute_blocks=2)


@pytest.mark.parametrize("chunk", [24, 4096])
def test_chunked_cross_entropy_loss_and_gradients_are_those_of_all_logits_at_once(run, chunk):
    """The mean is over all tokens, not over a chunk's; padding gets no probability; backward() gets a factor."""
    before = run("gradient_checkpointing", steps=1, total_batch=128)
    after = run("chunked_cross_entropy", steps=1, total_batch=128, loss_chunk=chunk)
    assert losses(after.log) == pytest.approx(losses(before.log), abs=2e-6)
    assert after.steps[0]["norm"] == pytest.approx(before.steps[0]["norm"], rel=1e-3)
    for expected, actual in zip(before.gradients[0], after.gradients[0], strict=True):
        assert (actual - expected).norm() <= 1e-4 * expected.norm() + 1e-9


def test_chunked_cross_entropy_memory_falls_with_loss_chunk(run, tokens):
    """With --loss-chunk 16 the logits of 16 tokens exist at once. Does the backward pass still need those of others?"""
    big = {"data": tokens, "T": 64, "total_batch": 128, "steps": 1}
    plain, _ = peak(run, "chunked_cross_entropy", **big, loss_chunk=128)
    with Watch() as lean:
        run("chunked_cross_entropy", **big, loss_chunk=16)
    assert plain - lean.peak > 112 * 50304 * 4, "bytes saved: at least the logits of 112 of 128 tokens"
    assert lean.largest == 64 * 50304 * 4, "bytes of the largest tensor, which is the embedding"


@pytest.fixture(scope="module")
def muon(tmp_path_factory, byte_tokens):
    """{name: (weight before, after, as torch.optim.Muon or AdamW leaves it, first gradient, first update, rate)}."""
    module, steps = script("muon"), []

    def before(optimizer, args, kwargs):
        parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is not None for p, _ in parameters):  # else it is a part of another optimizer's step
            steps.append([optimizer, [(p, p.detach().clone(), p.grad.clone(), group["lr"]) for p, group in parameters]])

    def after(optimizer, args, kwargs):
        if steps and steps[-1][0] is optimizer:
            steps[-1][2:] = [[p.detach().clone() for p, _, _, _ in steps[-1][1]]]  # of the outermost call

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    flags = SMALL | {"warmup_steps": 1, "muon_lr": 0.01, "max_lr": 1e-3}
    train(module, tmp_path_factory.mktemp("muon"), byte_tokens, *known_flags(module, **flags))
    for handle in handles:
        handle.remove()
    return steps


def first_updates(steps):
    """[(gradient, update without decay, rate)] of the first step."""
    _, parts, after = steps[0]
    return [(gradient, (old * (1 - 0.1 * rate * (old.dim() == 2)) - new) / rate, rate)
            for (_, old, gradient, rate), new in zip(parts, after, strict=True)]


def is_muons(tensor):
    """Of the blocks: not the embeddings, whose rows are the tokens or positions."""
    return tensor.dim() == 2 and len(tensor) not in (384, 1024)


def test_muon_the_update_of_a_blocks_matrix_is_orthogonal(muon):
    """All singular values about 1, times 0.2 * max(m, n) ** 0.5: how many iterations, from a matrix of which norm?"""
    compared = [(gradient, update) for gradient, update, _ in first_updates(muon) if is_muons(update)]
    assert len(compared) >= 8
    for gradient, update in compared:
        values = torch.linalg.svdvals(update) / (0.2 * max(update.shape) ** 0.5)
        kept = values[torch.linalg.svdvals(gradient) > 0.03 * gradient.norm()]  # smaller ones take more iterations
        assert 0.65 < kept.min() and kept.max() < 1.25, f"singular values from {kept.min():.2f} to {kept.max():.2f}"


def test_muon_embeddings_and_vectors_stay_with_adamw(muon):
    """Its first update is the sign of the gradient, whatever its size: which group are they in, at which rate?"""
    compared = [(update, rate) for _, update, rate in first_updates(muon) if not is_muons(update)]
    assert len(compared) >= 10
    for update, rate in compared:
        assert rate == pytest.approx(1e-3) and update.abs().max() == pytest.approx(1, abs=0.02)


def test_muon_three_steps_are_those_of_torch_muon(muon):
    """With momentum 0.95, Nesterov's, and adjust_lr_fn="match_rms_adamw". What is kept from one step to the next?"""
    errors = {True: [], False: []}  # in updates, with and without Nesterov's form
    apart = length = 0  # how far the weights are from theirs along the start, where only the decay takes them
    for i, (p, start, _, first_rate) in enumerate(muon[0][1]):
        if not is_muons(start):
            continue
        assert first_rate == pytest.approx(0.01), "the rate of --muon-lr"
        rates = sum(parts[i][3] for _, parts, _ in muon)
        for nesterov, found in errors.items():
            theirs = torch.nn.Parameter(start.clone())
            torch_muon = torch.optim.Muon([theirs], lr=first_rate, weight_decay=0.1, nesterov=nesterov,
                                          adjust_lr_fn="match_rms_adamw")
            for _, parts, _ in muon:
                theirs.grad, torch_muon.param_groups[0]["lr"] = parts[i][2], parts[i][3]
                torch_muon.step()
            error = (p - theirs).detach()
            found.append(error.square().mean().sqrt().item() / (0.2 * first_rate))
            if nesterov:
                apart, length = apart + (error * start).sum(), length + start.square().sum()
    decay = 0.1 - apart / length / rates
    # torch's is in bfloat16, which alone makes 0.1 of an update
    assert max(errors[True]) < 0.25, f"off by {max(errors[True]):.2f} of an update"
    assert sum(errors[True]) < sum(errors[False]), "closer to the steps without Nesterov's form"
    assert decay == pytest.approx(0.1, abs=0.05), "the weight decay"


def test_muon_in_float16_a_step_that_overflows_is_skipped(run, tmp_path, huge_scale):
    """The scaler calls a fused optimizer's `step` even then. What does it set before?"""
    run("muon", dtype=torch.float16, steps=2, save=tmp_path / "model.pt")
    assert_untrained(rung("muon"), tmp_path / "model.pt")


TRAPEZOID = {"steps": 10, "warmup_steps": 2, "decay_share": 0.4, "muon_lr": 0.01, "max_lr": 1e-3}


def test_trapezoid_lr_after_the_warm_up_the_rate_stays_at_the_peak(run):
    """For how many of 10 steps, with --warmup-steps 2 and --decay-share 0.4?"""
    found = rates(run("trapezoid_lr", **TRAPEZOID))
    assert found[:7] == [0.5, 1, 1, 1, 1, 1, 1]


def test_trapezoid_lr_then_it_falls_linearly_to_zero(run):
    """It would be zero after the last step, not in it: such a step would be wasted."""
    found = rates(run("trapezoid_lr", **TRAPEZOID))
    assert found[7:] == [0.75, 0.5, 0.25]


@pytest.mark.parametrize("settings, expected", [
    ({"steps": 3, "warmup_steps": 1, "decay_share": 0.0}, [1, 1, 1]),
    ({"steps": 5, "warmup_steps": 5, "decay_share": 1.0}, [0.2, 0.4, 0.6, 0.4, 0.2])])
def test_trapezoid_lr_without_a_decay_and_where_rise_and_fall_meet(run, settings, expected):
    """--decay-share 0 must not divide by it; a rate is never above the rise, nor above the fall."""
    found = rates(run("trapezoid_lr", **TRAPEZOID | settings))
    assert found == expected


@torch.no_grad()
def attended(model, tokens):
    """What the attention kernel gets for these tokens in each block: queries, keys and values, (B, nh, T, hs) each."""
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as kernel:
        model(tokens)
    return [made.args[:3] for made in kernel.call_args_list]


@contextlib.contextmanager
def linear_outputs():
    """What linear layers return meanwhile."""
    made = []
    hook = register_module_forward_hook(
        lambda module, inputs, output: made.append(output) if isinstance(module, torch.nn.Linear) else None)
    try:
        yield made
    finally:
        hook.remove()


def one_token_everywhere(label):
    """The queries, keys and values of one head of the first block, (T, hs) each: what differs is the position's."""
    model = tiny(label)
    draw_anew(model)
    for parameter in model.parameters():
        if parameter.shape == (32,):  # gains that differ from number to number
            torch.nn.init.uniform_(parameter, 0.5, 2)
    return [vectors[0, 0] for vectors in attended(model, ids(1, 1).expand(1, 64))[0]]


def test_rope_scores_depend_on_the_distance_alone():
    """One token at all positions: a query and a key, turned by the angles of their positions, in pairs of numbers."""
    q, k, _ = one_token_everywhere("rope")
    scores = q @ k.T
    along = [scores.diagonal(-distance) for distance in range(64)]
    for same in along:
        torch.testing.assert_close(same, same[0].expand_as(same), rtol=1e-4, atol=1e-4 * scores.abs().max().item())
    assert torch.stack([same[0] for same in along]).std() > 0.1, "they do not depend on it at all"


def test_rope_a_rotation_changes_no_length():
    """cos for both numbers of a pair, sin with the sign of a rotation."""
    for vectors in one_token_everywhere("rope"):
        torch.testing.assert_close(vectors.norm(dim=-1), vectors[0].norm().expand(64))


def test_rope_pairs_and_angles_are_those_of_the_text():
    """The pair (i, i + hs/2) turns by position * 10000 ** (-2 i / hs): which numbers are a pair? Which is slowest?"""
    angles = torch.arange(64)[:, None] * 10000.0 ** (-torch.arange(16) / 16)  # (T, hs/2)
    with linear_outputs() as made:
        q, k, _ = one_token_everywhere("rope")
    for vectors, before in zip((q, k), made[0][0].split(64, dim=-1), strict=False):  # (T, hs), (T, C)
        pairs, start = (torch.complex(*x.chunk(2, dim=-1)) for x in (vectors, before[:, :32]))  # (T, hs/2)
        direction = (pairs / start)[1, 0].imag.sign()  # of queries and keys alike, either gives the same scores
        turned = start * torch.polar(torch.ones_like(angles), direction * angles)
        torch.testing.assert_close(pairs, turned, rtol=1e-3, atol=1e-3 * pairs.abs().max().item())


@torch.no_grad()
def test_rope_what_is_averaged_is_the_same_everywhere():
    """One token at all positions: an average of equal vectors is that vector. What else has been turned?"""
    model = tiny("rope")
    draw_anew(model)
    logits = model(ids(1, 1).expand(1, 64))
    torch.testing.assert_close(logits, logits[:, :1].expand_as(logits), rtol=1e-3, atol=1e-3)


def test_rope_no_weight_belongs_to_a_position():
    """What did the table of positions do that the rotation does now?"""
    assert [name for name, weight in tiny("rope").state_dict().items() if 1024 in weight.shape] == []


@torch.no_grad()
def test_rmsnorm_norms_divide_by_the_root_mean_square():
    """Two in a block, one at the end; with eps=1e-6, and without subtracting the mean."""
    norms = [part for part in tiny("rmsnorm").modules() if "Norm" in type(part).__name__]
    assert len(norms) == 2 * 2 + 1
    x = torch.randn(2, 3, 64) * torch.tensor([1e-4, 1.0, 1e4])[:, None]  # eps matters for the smallest
    for norm in norms:
        torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_rmsnorm_no_bias_is_left():
    """In linear layers, too: only the norms still have a vector, their gains."""
    model = tiny("rmsnorm")
    norms = [part for part in model.modules() if "Norm" in type(part).__name__]
    vectors = [name for name, p in model.named_parameters() if p.dim() == 1]
    assert not [name for name in vectors if "bias" in name] and len(vectors) == len(norms)


def test_qk_norm_queries_and_keys_have_a_root_mean_square_of_1():
    """Whatever the weights are: each head's vector by itself, over hs numbers. An RMSNorm subtracts no mean."""
    model = tiny("qk_norm")
    draw_anew(model, std=10.0)
    with linear_outputs() as made:
        found = attended(model, ids(2, 12))
    lengths = torch.stack([vectors.square().mean(-1).sqrt() for block in found for vectors in block[:2]])
    torch.testing.assert_close(lengths, torch.ones(4, 2, 2, 12), rtol=1e-3, atol=0)  # of two blocks: (B, nh, T)
    q, k, _ = (x[:, 0].view(2, 2, 32) for x in made[0].split(64, dim=-1))  # (B, nh, hs) at position 0: not turned
    for vectors, before in zip(found[0], (q, k), strict=False):
        torch.testing.assert_close(vectors[:, :, 0], F.rms_norm(before, (32,)), rtol=1e-3, atol=1e-3)


def test_qk_norm_the_norm_comes_before_the_rotation():
    """Its gains differ from number to number: after a rotation they would depend on the position."""
    for vectors in one_token_everywhere("qk_norm")[:2]:
        torch.testing.assert_close(vectors.norm(dim=-1), vectors[0].norm().expand(64), rtol=1e-3, atol=0)


def test_qk_norm_each_block_has_a_gain_for_queries_and_one_for_keys():
    """Of hs numbers: all heads share them."""
    before, after = ([p.shape for p in tiny(label).parameters() if p.dim() == 1] for label in ("rmsnorm", "qk_norm"))
    assert sorted(after) == sorted([*before, *[torch.Size([32])] * 4])


@torch.no_grad()
def test_swiglu_the_mlp_is_down_of_silu_of_gate_times_up():
    """gate_proj, up_proj and down_proj are Qwen3's names. On which of the two products does SiLU act?"""
    mlp, x = tiny("swiglu").transformer.h[0].mlp, torch.randn(2, 3, 64)
    for part in mlp.parameters():
        torch.nn.init.normal_(part)
    torch.testing.assert_close(mlp(x), mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)))


def test_swiglu_what_ends_a_branch_still_starts_smaller():
    """Rung 4's mark: which of the three matrices needs it?"""
    found = {name: std for name, std in stds("swiglu").items() if name.endswith(("c_proj.weight", "down_proj.weight"))}
    assert found == pytest.approx(dict.fromkeys(found, 0.02 / 12**0.5), rel=0.03) and len(found) == 12


@pytest.mark.parametrize("n_embd, hidden", [(64, 192), (768, 2048), (1024, 2752)])
def test_swiglu_three_matrices_have_as_many_weights_as_two_had(n_embd, hidden):
    """A width of 8/3 n_embd, rounded up to a multiple of 64."""
    module = rung("swiglu")
    with torch.device("meta"):
        mlp = module.GPT(module.GPTConfig(vocab_size=257, n_layer=1, n_head=4, n_embd=n_embd)).transformer.h[0].mlp
    expected = [(hidden, n_embd), (hidden, n_embd), (n_embd, hidden)]
    assert sorted(tuple(p.shape) for p in mlp.parameters()) == sorted(expected)


def test_zero_init_every_block_starts_as_the_identity():
    """What goes into the stream at the end of each branch? Of the two, has one been missed?"""
    model, pairs = tiny("zero_init"), []
    for block in model.transformer.h:
        block.register_forward_hook(lambda part, args, output: pairs.append((args[0], output)))
    model(ids(2, 12))
    assert len(pairs) == 2 and all(torch.equal(*pair) for pair in pairs)


def test_zero_init_everything_else_starts_as_before_and_learns(run, tmp_path):
    """With one seed the same random numbers: draw them also where they are then not used. And zeros get gradients."""
    before, after = (dict(tiny(label).named_parameters()) for label in ("swiglu", "zero_init"))
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert len(before) - len(same) == 4, "the matrices that differ: two of each block"
    run("zero_init", save=tmp_path / "model.pt")
    trained = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    ends = [name for name in before if name not in same]
    assert all(trained[name].any() for name in ends), "they stay zero"


def grouped(n_kv_head):
    """The attention of `grouped_query_attention` with 4 heads of 16 numbers, of which keys and values have fewer."""
    module = rung("grouped_query_attention")
    words = ["--model", "1x4x64", *known_flags(module, kv_heads=n_kv_head)]
    return module.GPT(module.model_config(module.parse_args(words), 257)).transformer.h[0].attn


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
def test_grouped_query_attention_fewer_keys_and_values_are_computed(n_kv_head):
    """--kv-heads: c_attn computes 4 heads of queries, and that many of keys and of values, one after the other."""
    assert grouped(n_kv_head).c_attn.weight.shape == ((4 + 2 * n_kv_head) * 16, 64)


@pytest.mark.parametrize("n_kv_head", [1, 2])
@torch.no_grad()
def test_grouped_query_attention_neighbours_among_the_query_heads_share_keys_and_values(n_kv_head):
    """Of 4 query heads and 2 others, 0 and 1 use the first. As `zero_init`'s attention does with rows that repeat."""
    full, fewer = tiny("zero_init", "1x4x64"), grouped(n_kv_head)
    attention = full.transformer.h[0].attn
    for part in fewer.parameters():
        torch.nn.init.normal_(part, mean=float(part.dim() == 1), std=0.2)
    heads = fewer.c_attn.weight.view(-1, 16, 64).split([4, n_kv_head, n_kv_head])
    repeated = [part.repeat_interleave(4 // len(part), dim=0) for part in heads]
    weights = fewer.state_dict() | {"c_attn.weight": torch.cat(repeated).flatten(0, 1)}
    attention.load_state_dict(weights)
    x, angles = torch.randn(2, 12, 64), [table[:12] for table in (full.cos, full.sin)]
    torch.testing.assert_close(fewer(x, *angles), attention(x, *angles))
