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
from conftest import ROOT, run_command
from rich.console import Console
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from ladder.errors import UserError
from ladder.measure import runner, step_profile, survey
from ladder.measure.runner import check_flags
from ladder.measure.step_profile import (
    CLIP,
    DATA,
    STEP,
    STEPS_ON_A_CPU,
    Probe,
    by_kind,
    check_profile,
    floor_ms,
    kind_of,
    logit_widths,
    profile_ladder,
    shapes_in,
)
from ladder.scripts.stages import BY_LABEL
from ladder.show.logs import read_log
from ladder.show.charts import profile_bars
from ladder.show.profile import KINDS, UNRELIABLE, is_reliable, print_profile, read_profile
from ladder.show.report import build_report

WHOLE = ROOT / "logs" / "reference" / "amd_epyc_avx2_2_cores_B1_T1024"
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


def profiled(*functions, times=1, record_shapes=False):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=record_shapes) as profiler:
        for _ in range(times):
            with record_function(STEP):
                for function in functions:
                    function()
    return profiler.events()


def kinds_of(*functions, times=1):
    """by_kind as a profile has it: the shapes are those of a step before."""
    shapes = shapes_in(profiled(*functions, record_shapes=True))
    return by_kind(profiled(*functions, times=times), shapes, {N_ROWS}, "cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_one_kind_is_all_of_that_kind(work, kind):
    work[kind]()
    rounds = [kinds_of(*[work[kind]] * 5) for _ in range(3)]
    parts, step = max(rounds, key=lambda found: found[0][kind] / found[1])  # other work may interrupt one of them
    assert sum(parts.values()) == pytest.approx(step)
    # Each call costs a few operators' worth of Python, and gradients are added up outside of the kind.
    assert parts[kind] > 0.6 * step, parts
    others = {other: ms for other, ms in parts.items() if other not in (kind, "waiting", "normalization and pointwise")}
    assert max(others.values()) < 0.02 * step, others


def test_parts_are_as_large_as_the_clock_says(work):
    """All kinds in one step; the truth is a clock read around each, inside the same step."""
    clock = dict.fromkeys(work, 0.0)

    def timed(kind):
        started = time.perf_counter()
        for _ in range(5):
            work[kind]()
        clock[kind] += 1000 * (time.perf_counter() - started)

    everything = [lambda kind=kind: timed(kind) for kind in work]
    shapes = shapes_in(profiled(*everything, record_shapes=True))
    clock = dict.fromkeys(work, 0.0)
    parts, step = by_kind(profiled(*everything, times=3), shapes, {N_ROWS}, "cpu")
    truth = {kind: ms / 3 for kind, ms in clock.items()}
    assert sum(truth.values()) == pytest.approx(step, rel=0.05)
    assert sum(parts.values()) == pytest.approx(step)
    for kind in work:
        assert parts[kind] == pytest.approx(truth[kind], rel=0.25, abs=0.05 * step), (kind, parts, truth)


def test_shapes_of_one_step_are_those_of_the_next():
    """By the place of an operator among those of its name, whatever else runs between them."""
    x, narrow, wide = torch.ones(8, 16), torch.ones(16, 4), torch.ones(16, N_ROWS)
    shapes = shapes_in(profiled(lambda: x @ narrow, lambda: x @ wide, record_shapes=True))
    assert shapes["aten::mm", 1] == [[8, 16], [16, 4]] and shapes["aten::mm", 2] == [[8, 16], [16, N_ROWS]]
    parts, _ = by_kind(profiled(lambda: x @ narrow, lambda: x + 1, lambda: x @ wide), shapes, {N_ROWS}, "cpu")
    assert parts["matrix products"] > 0 and parts["head"] > 0


class Steps:
    """A GPT and a `train` of nothing but its steps, which the Probe follows."""

    def __init__(self, device):
        self.probe, self.recorded = Probe(device), []

    def run(self, monkeypatch):
        def profiler(activities, record_shapes):
            self.recorded.append(record_shapes)
            return SimpleNamespace(start=lambda: None, stop=lambda: None, events=list)

        monkeypatch.setattr(torch.profiler, "profile", profiler)
        monkeypatch.setattr(step_profile, "shapes_in", lambda events: {})
        for step in range(1, self.probe.steps + 1):
            self.probe.after_step(step)
        return self.recorded


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_timed_steps_record_no_shapes(device, monkeypatch):
    assert Steps(device).run(monkeypatch) == [True, False]


def test_a_gpus_products_are_the_heads_also_where_inductor_pads_them():
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=50257), lm_head=torch.nn.Linear(2, 50257))
    for width in (50257, 50260, 50264):
        assert kind_of("aten::mm", [[4096, 768], [768, width]], [], logit_widths(model)) == "head"
    assert kind_of("aten::mm", [[4096, 768], [768, 3072]], [], logit_widths(model)) == "matrix products"


@pytest.mark.parametrize("device, named", [("cpu", True), ("cuda", False)])
def test_kernels_get_their_names_only_where_that_costs_no_compilation(device, named, monkeypatch, tmp_path):
    """The setting is part of the key of Inductor's cache: on a GPU a profile would compile everything again."""
    from torch._inductor import config

    class Ended(Exception):
        pass

    def train(settings):
        raise Ended

    script = SimpleNamespace(parse_settings=lambda flags: SimpleNamespace(device=device), train=train, Log=object,
                             DataLoaderLite=SimpleNamespace(batch=None))
    monkeypatch.setattr(step_profile, "load_script", lambda stage: script)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    with config.patch({"cpp.enable_kernel_profile": False}):
        with pytest.raises(Ended):
            step_profile.profile_rung("10", [], tmp_path)
        assert config.cpp.enable_kernel_profile is named


def fake_rung(name, step_ms, plain_ms):
    parts = dict.fromkeys(KINDS, 0.0) | {"matrix products": step_ms}
    return {"name": name, "step_ms": step_ms, "plain_ms": plain_ms, "floor_ms": 50.0, "parts_ms": parts}


def profile_with(answers, folder, monkeypatch, stages, repeat):
    """profile_ladder where the k-th profile of a rung is (under the profiler, plain) of `answers`; what it printed."""
    answers = {label: iter(times) for label, times in answers.items()}

    def once(stage, *_):
        return fake_rung(stage.name, *next(answers[stage.label])), SimpleNamespace(status="ok")

    monkeypatch.setattr(step_profile, "profile_once", once)
    settings = SimpleNamespace(model="gpt2", B=1, T=64, device="cpu")
    monkeypatch.setattr(step_profile, "check_profile", lambda *_: settings)
    (folder / "machine.json").write_text(json.dumps({"rates": {"float32": 1e12}, "device": "cpu", "name": "a CPU"}))
    console = Console(file=io.StringIO(), width=140)
    assert profile_ladder([BY_LABEL[label] for label in stages], [], folder, console, repeat) == []
    assert all(next(rest, None) is None for rest in answers.values()), "fewer profiles than expected"
    return console.file.getvalue()


def test_an_unreliable_profile_is_repeated_then_marked(tmp_path, monkeypatch):
    """In the table and the bars."""
    text = profile_with({"0": [(125.0, 100.0), (104.0, 100.0)], "3": [(250.0, 100.0), (240.0, 100.0)]},
                        tmp_path, monkeypatch, ["0", "3"], 1)
    assert text.count("once more") == 2 and text.count("more than 10 % apart") == 1
    found = read_profile(tmp_path)
    assert [rung["step_ms"] for rung in found["rungs"]] == [104.0, 250.0]
    assert [is_reliable(rung) for rung in found["rungs"]] == [True, False]
    console = Console(file=io.StringIO(), width=140)
    print_profile(found, console)
    table = console.file.getvalue()
    assert "bfloat16 autocast (!)" in table and "baseline (!)" not in table and UNRELIABLE in table
    assert [(bar["end"], bar["pale"]) for bar in profile_bars(found)] == [("104", False), ("250 (!)", True)]


def test_the_median_round_is_one_of_the_reliable_ones(tmp_path, monkeypatch):
    profile_with({"0": [(101.0, 100.0), (300.0, 100.0), (102.0, 100.0), (99.0, 100.0)]}, tmp_path, monkeypatch, "0", 3)
    assert [rung["step_ms"] for rung in read_profile(tmp_path)["rungs"]] == [101.0]


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


def profile_of(label, tokens, folder, *flags):
    done = run_command(sys.executable, "-m", "ladder.measure.step_profile", label, folder / "out.json",
                       "--model", "tiny", "-B", 2, "-T", 128, "--device", "cpu", "--data", tokens, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    rung = json.loads((folder / "out.json").read_text())
    return rung, read_log(folder / f"{rung['name']}.log")


def check_parts(rung, log):
    parts, step = rung["parts_ms"], rung["step_ms"]
    assert list(parts) == list(KINDS) and all(ms >= 0 for ms in parts.values())
    assert sum(parts.values()) == pytest.approx(step)
    assert step == pytest.approx(statistics.mean(log.ms[-STEPS_ON_A_CPU[2] :]), rel=0.05)  # by the script's own clock
    assert min(parts[kind] for kind in ("matrix products", "head", "attention", "cross-entropy", "optimizer")) > 0
    assert parts["waiting"] < 0.5 * step, parts


def test_the_profile_of_the_baseline(tokens, tmp_path):
    rung, log = profile_of("0", tokens, tmp_path)
    check_parts(rung, log)
    assert rung["name"] == "baseline"


@pytest.mark.slow
@pytest.mark.parametrize("label", ["5", "10"])
def test_the_profile_of_a_compiled_rung(tokens, tmp_path, label):
    check_parts(*profile_of(label, tokens, tmp_path))


def test_the_floor_is_the_arithmetic_at_the_rate_of_the_rungs_format(tmp_path):
    """In closed form, for gpt2 at B=2 T=1024: 6 FLOPs per weight and token, and attention's, halved from rung 6 on."""
    weights = 50257 * 768 + 12 * 12 * 768**2
    attention = 12 * 12 * 768 * 1024
    rates = {"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12}
    for name, precision, rate, share in [
        ("baseline", "float32", 1e12, 1), ("speedup_02_tf32", "float32, products in TF32", 2e12, 1),
        ("speedup_02_tf32", "float32 (no TF32 on this device: no effect)", 1e12, 1),
        ("speedup_05_compile", "bfloat16 autocast", 4e12, 1),
        ("speedup_06_flash_attn", "bfloat16 autocast", 4e12, 0.5),
        ("speedup_10_fused_adamw", "bfloat16 autocast", 4e12, 0.5),
        ("speedup_10_fused_adamw", "float32 (no bfloat16 on this CPU)", 1e12, 0.5),
    ]:
        log = tmp_path / f"{name}.log"
        log.write_text(f"# model: gpt2\n# device: x | precision: {precision}\n# batch: B=2 T=1024\n"
                       "step : 1 | loss: 1.0 | dt: 1.0 ms | tokens/sec: 1.0\n")
        assert floor_ms(read_log(log), rates) == pytest.approx(1000 * (6 * weights + share * attention) * 2048 / rate)


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
    for bad, reason in [(["--rungs", "ddp"], "rungs 0 to 10"), (["--steps", "3"], "leave it out"),
                        (["-T", "0"], "must be at least 1"), (["--data", "nowhere"], "no token files")]:
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


@pytest.mark.slow
def test_a_survey_ends_in_time_and_leaves_folders_to_commit(tokens, tmp_path):
    words = ["--model", "tiny", "--device", "cpu", "--data", tokens, "-B", 1, "-T", 32, "--steps", 3]
    command = [sys.executable, "-m", "ladder", "survey"]
    started = time.monotonic()
    done = run_command(*command, "--minutes", 1.5, "--out", tmp_path / "short", *words)
    assert time.monotonic() - started < 90 + 30
    assert done.returncode == 0, done.stdout + done.stderr
    [main] = (tmp_path / "short").glob("*_B1_T32")
    report = build_report(main)
    assert report.rows[0].name == "baseline" and all(row.complete for row in report.rows)
    assert {"name", "rates", "torch"} <= report.machine.keys()
    assert "torch" in (tmp_path / "short" / "check.txt").read_text(encoding="utf-8")
    done = run_command(*command, "--out", tmp_path / "short", *words)
    assert done.returncode == 1 and "is not empty" in done.stderr
    done = run_command(*command, "--minutes", 0, *words)
    assert done.returncode == 2 and "must be more than 0" in done.stderr


@pytest.mark.parametrize("device, does", [
    ("cpu", ["first round", "profile", "other rounds", "beyond"]),
    ("mps", ["first round", "other rounds", "largest", "beyond"]),  # torch.profiler and CUDA graphs: not there
    ("cuda", ["first round", "profile", "other rounds", "largest", "beyond", "CUDA graphs"]),
])
def test_a_survey_does_what_the_device_can(device, does, monkeypatch, tmp_path):
    done = []
    monkeypatch.setattr(survey, "check_flags", lambda *_: SimpleNamespace(device=device, B=1, T=32))
    monkeypatch.setattr(survey, "with_defaults", lambda flags, minutes: flags)
    monkeypatch.setattr(survey, "name_machine", lambda out, *_: (out / "machine").mkdir() or "name")
    names = {"first round": "first_round", "profile": "profile", "other rounds": "other_rounds",
             "largest": "largest_batches", "beyond": "beyond", "CUDA graphs": "cuda_graphs"}
    for title, name in names.items():
        monkeypatch.setattr(survey.Survey, name, lambda self, title=title: done.append(title))
    survey.survey(1, tmp_path / "out", [], Console(file=io.StringIO()))
    assert done == does


def test_a_survey_gives_the_search_for_a_batch_its_deadline(monkeypatch, tmp_path):
    got = []
    monkeypatch.setattr(survey, "largest_batch", lambda *arguments: got.append(arguments[-1]) or (1, 1.0, ""))
    deadline = time.monotonic() + 60
    this = survey.Survey([], tmp_path, "name", SimpleNamespace(B=1, T=32), deadline, Console(file=io.StringIO()))
    this.main.mkdir()
    this.largest_batches()
    assert got == [deadline] * 4


@pytest.mark.parametrize("flags, minutes, chosen", [
    ([], 10, ("gpt2", 1, 256, 5)), ([], 60, ("gpt2", 1, 1024, 5)), (["-T", "64"], 60, ("gpt2", 1, 64, 5)),
    (["--model", "tiny", "--batch-size", "3", "--steps", "7"], 10, ("tiny", 3, 256, 7)),
])
def test_a_survey_chooses_what_the_flags_leave_open(monkeypatch, tokens, flags, minutes, chosen):
    monkeypatch.setattr(survey, "run_module", lambda *_: "20_000_000_000")
    flags = survey.with_defaults([*flags, "--device", "cpu", "--data", str(tokens)], minutes)
    settings = check_flags([BY_LABEL["10"]], flags)
    assert (settings.model, settings.B, settings.T, settings.steps) == chosen


def test_a_machine_keeps_its_highest_rates(monkeypatch, tmp_path):
    for rate in (2e12, 3e12, 1e12):
        monkeypatch.setattr(runner, "run_module", lambda *_, rate=rate: json.dumps({"rates": {"float32": rate}}))
        runner.write_machine(tmp_path, "cpu", arguments=["run"])
    assert json.loads((tmp_path / "machine.json").read_text()) == {"rates": {"float32": 3e12}, "arguments": ["run"]}
