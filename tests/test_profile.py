"""The profile: each operation counts for its kind of work, with its time, and the parts add up to the step."""
import io
import json
import shutil
import statistics
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run_command, rung
from log_files import write_log
from rich.console import Console
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from ladder.errors import UserError
from ladder.measure import step_profile
from ladder.measure.step_profile import (
    CLIP,
    DATA,
    STEP,
    STEPS_ON_A_CPU,
    by_kind,
    check_profile,
    kind_of,
    logit_widths,
    products_ms,
    profile_ladder,
)
from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import read_log
from ladder.show.charts import profile_bars
from ladder.show.profile import KINDS, UNRELIABLE, is_reliable, print_profile, read_profile
from ladder.show.report import build_report

WHOLE = ROOT / "logs" / "reference" / "intel_xeon_amx_2_cores_B1_T1024"
N_ROWS, N_EMBD, T, N_HEAD = 3000, 256, 256, 4


@pytest.fixture(scope="module")
def work():
    """{kind: a function that does work of this kind alone}, forward and backward."""
    def leaf(*shape):
        return torch.randn(*shape, requires_grad=True)

    x, scores, logits = leaf(T, N_EMBD), leaf(1, N_HEAD, T, T), leaf(T, N_ROWS)
    weight, head, vectors = leaf(4 * N_EMBD, N_EMBD), leaf(N_ROWS, N_EMBD), leaf(1, N_HEAD, T, N_EMBD // N_HEAD)
    parameters = [leaf(500, 500) for _ in range(8)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(parameters)
    targets = torch.randint(N_ROWS, (T,))

    def attention():
        att = F.softmax((vectors @ vectors.transpose(-2, -1)).masked_fill(scores > 2, -1e9), dim=-1)
        (att @ vectors).sum().backward()
        F.scaled_dot_product_attention(vectors, vectors, vectors, is_causal=True).sum().backward()

    def optimize():
        with record_function(CLIP):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    def data():
        with record_function(DATA):
            sum(i for i in range(300_000))

    return {
        "matrix products": lambda: F.linear(x, weight).backward(torch.ones(T, 4 * N_EMBD)),
        "head": lambda: F.linear(x, head).backward(logits.detach()),
        "attention": attention,
        "normalization and pointwise": lambda: F.gelu(F.layer_norm(x, (N_EMBD,)), approximate="tanh").sum().backward(),
        "cross-entropy": lambda: F.cross_entropy(logits, targets).backward(),
        "optimizer": optimize,
        "data": data,
        "waiting": lambda: time.sleep(0.02),
    }


def kinds_of(*functions, times=1):
    """by_kind of `times` steps that call these functions."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(times):
            with record_function(STEP):
                for function in functions:
                    function()
    return by_kind(profiler.events(), {N_ROWS}, "cpu")


def test_parts_are_as_large_as_the_clock_says(work):
    """All kinds in one step; the truth is a clock read around each, inside the same step."""
    clock = dict.fromkeys(work, 0.0)

    def timed(kind):
        started = time.perf_counter()
        for _ in range(5):
            work[kind]()
        clock[kind] += 1000 * (time.perf_counter() - started)

    everything = [lambda kind=kind: timed(kind) for kind in work]
    kinds_of(*everything)
    clock = dict.fromkeys(work, 0.0)
    parts, step = kinds_of(*everything, times=3)
    truth = {kind: ms / 3 for kind, ms in clock.items()}
    assert sum(truth.values()) == pytest.approx(step, rel=0.05)
    assert sum(parts.values()) == pytest.approx(step)
    for kind in work:
        assert parts[kind] == pytest.approx(truth[kind], rel=0.25, abs=0.05 * step), (kind, parts, truth)


def test_a_gpus_products_are_the_heads_also_where_inductor_pads_them():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=50257), lm_head=torch.nn.Linear(2, 50257))
    for width in (50257, 50260, 50264):
        assert kind_of("aten::mm", [[4096, 768], [768, width]], [], logit_widths(model)) == "head"
    assert kind_of("aten::mm", [[4096, 768], [768, 3072]], [], logit_widths(model)) == "matrix products"


@pytest.mark.parametrize("device, named", [("cpu", True), ("cuda", False)])
def test_kernels_get_their_names_only_where_that_costs_no_compilation(device, named, monkeypatch, tmp_path):
    """The setting is part of the key of Inductor's cache: on a GPU a profile would compile everything again."""
    script, seen = rung(10), []

    def train(settings):
        seen.append(torch._inductor.config.cpp.enable_kernel_profile)
        raise KeyboardInterrupt

    script.parse_settings, script.train = lambda flags: SimpleNamespace(device=device), train
    monkeypatch.setattr(step_profile, "load_script", lambda stage: script)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": False}), pytest.raises(KeyboardInterrupt):
        step_profile.profile_rung("10", [], tmp_path)
    assert seen == [named]


def fake_rung(name, step_ms, plain_ms):
    parts = dict.fromkeys(KINDS, 0.0) | {"matrix products": step_ms}
    return {"name": name, "step_ms": step_ms, "plain_ms": plain_ms, "floor_ms": 50.0, "parts_ms": parts}


def test_unreliable_profiles_are_repeated_and_marked_and_the_median_of_the_others_counts(tmp_path, monkeypatch):
    """In the table, in the picture and on the page. Each answer is a step (under the profiler, without it)."""
    answers = {"0": iter([(101.0, 100.0), (300.0, 100.0), (102.0, 100.0), (99.0, 100.0)]),
               "3": iter([(250.0, 100.0), (240.0, 100.0)] * 3)}

    def once(stage, *_):
        return fake_rung(stage.name, *next(answers[stage.label])), SimpleNamespace(status="ok")

    monkeypatch.setattr(step_profile, "profile_once", once)
    settings = SimpleNamespace(model="gpt2", B=1, T=64, device="cpu")
    monkeypatch.setattr(step_profile, "check_profile", lambda *_: settings)
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"float32": 1e12}, "device": "cpu", "name": "a CPU"}))
    console = Console(file=io.StringIO(), width=140)
    assert profile_ladder([BY_LABEL["0"], BY_LABEL["3"]], [], tmp_path, console, 3) == []
    assert all(next(rest, None) is None for rest in answers.values()), "fewer profiles than expected"
    text, found = console.file.getvalue(), read_profile(tmp_path)
    assert text.count("once more") == 4 and text.count("more than 10 % apart") == 3
    assert [(rung["step_ms"], is_reliable(rung)) for rung in found["rungs"]] == [(101.0, True), (250.0, False)]
    print_profile(found, console)
    table = console.file.getvalue().removeprefix(text)
    assert "bfloat16 autocast (!)" in table and "baseline (!)" not in table and UNRELIABLE in table
    assert [(bar["end"], bar["pale"]) for bar in profile_bars(found)] == [("101", False), ("250 (!)", True)]


@pytest.mark.parametrize("name, shapes, around, kind", [
    # names as torch 2.13 gives them: compiled kernels of a CPU and of a GPU, attention of both, autograd
    ("graph_1_cpp_fused__log_softmax__unsafe_view_nll_loss_forward_slice_view_6", [], [], "cross-entropy"),
    ("graph_0_cpp_fused__softmax__to_copy_bitwise_not_masked_fill_mul_3", [], [], "attention"),
    ("graph_1_cpp_fused__scaled_dot_product_flash_attention_for_cpu_backward_sum_view_4", [], [],
     "normalization and pointwise"),
    ("triton_red_fused__log_softmax_nll_loss_forward_5", [], [], "cross-entropy"),
    ("triton_per_fused_add_native_layer_norm_2", [], [], "normalization and pointwise"),
    ("triton_poi_fused_addmm_gelu_view_3", [], [], "normalization and pointwise"),
    ("triton_tem_fused_addmm_4", [[768], [1024, 768], [768, 768]], [], "matrix products"),
    ("aten::_scaled_dot_product_flash_attention", [], [], "attention"),
    ("aten::mm", [[1024, 768], [768, 50304]], [], "head"),
    ("aten::mm", [[50257, 1024], [1024, 768]], [], "head"),
    ("aten::addmm", [[3072], [1024, 768], [768, 3072]], [], "matrix products"),
    ("aten::bmm", [[12, 1024, 64], [12, 64, 1024]], [], "attention"),
    ("aten::copy_", [[50304, 768], [50304, 768]], [], "normalization and pointwise"),  # a weight, for autocast
    ("aten::copy_", [[1024, 50257], [1024, 50257]], [], "cross-entropy"),
    ("aten::masked_fill", [[1, 12, 1024, 1024], [1024, 1024], []], [], "attention"),  # of the baseline
    ("aten::mm", [[1024, 768], [768, 768]], ["Optimizer.step#Muon.step"], "optimizer"),
    ("aten::_amp_foreach_non_finite_check_and_unscale_", [], [], "optimizer"),
    ("Memcpy HtoD (Pageable -> Device)", [], [], "data"),
    ("autograd::engine::evaluate_function: MmBackward0", [], [], "waiting"),
])
def test_kinds_of_real_names(name, shapes, around, kind):
    assert kind_of(name, shapes, around, {50257, 50304}) == kind


@pytest.mark.parametrize("label", ["0", *(pytest.param(label, marks=pytest.mark.slow) for label in ("5", "10"))])
def test_the_profile_of_a_rung(label, tokens, tmp_path):
    done = run_command(sys.executable, "-m", "ladder.measure.step_profile", label, tmp_path / "out.json",
                       "--model", "tiny", "-B", 2, "-T", 128, "--device", "cpu", "--data", tokens)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["name"] == BY_LABEL[label].name
    log, parts, step = read_log(tmp_path / f"{found['name']}.log"), found["parts_ms"], found["step_ms"]
    assert list(parts) == list(KINDS) and all(ms >= 0 for ms in parts.values())
    assert sum(parts.values()) == pytest.approx(step)
    assert step == pytest.approx(statistics.mean(log.ms[-STEPS_ON_A_CPU[2] :]), rel=0.05)  # by the script's own clock
    assert min(parts[kind] for kind in ("matrix products", "head", "attention", "cross-entropy", "optimizer")) > 0
    assert parts["waiting"] < 0.5 * step, parts


@pytest.mark.parametrize("name, precision, rate, share", [
    ("baseline", "float32", 1e12, 1), ("speedup_02_tf32", "float32, products in TF32", 2e12, 1),
    ("speedup_02_tf32", "float32 (no TF32 on this device: no effect)", 1e12, 1),
    ("speedup_05_compile", "bfloat16 autocast", 4e12, 1), ("speedup_06_flash_attn", "bfloat16 autocast", 4e12, 0.5),
    ("speedup_10_fused_adamw", "float32 (no bfloat16 on this CPU)", 1e12, 0.5),
])
def test_the_floor_is_the_products_at_the_rate_of_the_rungs_format(name, precision, rate, share, tmp_path):
    """In closed form, for gpt2 at B=2 T=1024: 6 FLOPs per weight and token, and attention's, halved from rung 6 on."""
    header = f"# model: gpt2\n# device: x | precision: {precision}\n# batch: B=2 T=1024\n"
    log = read_log(write_log(tmp_path / f"{name}.log", header=header))
    flops = 6 * (50257 * 768 + 12 * 12 * 768**2) + share * 12 * 12 * 768 * 1024
    assert products_ms(log, {"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12}) == pytest.approx(2048e3 * flops / rate)


@pytest.mark.slow
def test_profile_as_a_user_calls_it(tokens, tmp_path):
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "-B", 1, "-T", 32]
    profile = [sys.executable, "-m", "ladder", "profile"]
    done = run_command(*profile, "--rungs", "0", "--repeat", 2, "--logs", tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_profile(tmp_path)
    assert [rung["name"] for rung in found["rungs"]] == ["baseline"]
    assert all(rung["floor_ms"] > 0 for rung in found["rungs"]) and done.stdout.count("under the profiler,") >= 2
    assert (tmp_path / "profile.png").stat().st_size > 10_000 and "matmul" in done.stdout
    for bad, reason in [(["-T", "0"], "must be at least 1"), (["--data", "nowhere"], "no token files")]:
        done = run_command(*profile, "--logs", tmp_path, *words, *bad)
        assert done.returncode in (1, 2) and reason in done.stdout + done.stderr, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    assert read_profile(tmp_path) == found  # the failures have not touched it


def test_a_damaged_profile_is_named(tmp_path):
    assert read_profile(tmp_path) is None
    good = read_profile(WHOLE)
    rung = good["rungs"][0]
    bad = [{"rungs": []}, {"rungs": [rung | {"name": "rung_99"}]}, {"rungs": [rung | {"floor_ms": None}]},
           {"rungs": [rung | {"step_ms": float("nan")}]}, {"rungs": [rung | {"parts_ms": {"sums": 1}}]}]
    texts = [json.dumps(good | change) for change in bad] + ["{", "[]", '{"rungs": 3}', json.dumps({"rungs": [rung]})]
    for text in texts:
        (tmp_path / "profile.json").write_text(text)
        with pytest.raises(UserError, match=r"profile.json is damaged"):
            read_profile(tmp_path)


def test_a_profile_goes_with_the_logs_beside_it(tmp_path, tokens):
    """Before it is made, and when it is shown."""
    flags = ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32"]
    stages = [BY_LABEL["0"], BY_LABEL["10"]]
    assert check_profile(stages, flags, tmp_path / "new").T == 32
    shutil.copytree(WHOLE / "round_1", tmp_path / "round_1")
    with pytest.raises(UserError, match="holds results of gpt2, B=1 T=1024, not of gpt2, B=1 T=32"):
        check_profile(stages, [*flags, "--model", "gpt2"], tmp_path)
    with pytest.raises(UserError, match="holds results of gpt2, B=1 T=1024, not of tiny, B=1 T=32"):
        check_profile(stages, flags, tmp_path)
    assert build_report(tmp_path).profile is None
    (tmp_path / "profile.json").write_text(json.dumps(read_profile(WHOLE) | {"T": 64}))
    report = build_report(tmp_path)
    assert report.profile is None and "B=1 T=64, but the logs are not" in report.skipped[0]
    assert build_report(WHOLE).profile and not build_report(WHOLE).skipped
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 1e12}, "device": "cuda"}))
    with pytest.raises(UserError, match="from a different device"):
        check_profile(stages, flags, tmp_path / "new")


def test_a_step_much_faster_under_the_profiler_is_unreliable_too():
    assert [is_reliable({"step_ms": ms, "plain_ms": 100.0}) for ms in (85, 95, 105, 115)] == [False, True, True, False]
