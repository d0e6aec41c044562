"""The profile: each operation counts for its kind of work, with its time, and the parts add up to the step."""
import gzip
import io
import json
import shutil
from types import SimpleNamespace

import pytest
from load_script import ROOT
from log_files import write_log
from rich.console import Console
from run_tool import flags, is_one_error, ladder
from token_folders import edit_json

from ladder.errors import UserError
from ladder.measure import profiler, script_flags
from ladder.measure.profiler import (
    CLIP,
    DATA,
    STEP,
    by_kind,
    check_profile,
    kind_of,
    logit_widths,
    products_ms,
    profile_ladder,
)
from ladder.records.logs import read_log
from ladder.records.summary import build_report
from ladder.records.step_profile import KINDS, is_reliable, read_profile
from ladder.rungs.list import BY_LABEL
from ladder.show.charts import profile_bars
from ladder.show.print_report import print_profile
from ladder.verbs import profile as profile_verb

WHOLE = ROOT / "logs" / "reference" / "intel_xeon_amx_2_cores_B1_T1024"


def test_unreliable_profiles_are_marked_and_the_median_of_the_others_counts(tmp_path, monkeypatch):
    """Each answer is a step (under the profiler, without it)."""
    answers = {"0": iter([(101.0, 100.0), (80.0, 100.0), (102.0, 100.0), (99.0, 100.0), (98.0, 100.0)]),
               "3": iter([(260.0, 100.0), (240.0, 100.0), (270.0, 100.0), (250.0, 100.0), (230.0, 100.0)])}

    def once(entry, *_):
        step_ms, plain_ms = next(answers[entry.label])
        rung = {"name": entry.name, "step_ms": step_ms, "plain_ms": plain_ms, "products_ms": 50.0,
                "parts_ms": dict.fromkeys(reversed(KINDS), 0.0) | {"matrix products": step_ms}}
        return rung, SimpleNamespace(status="ok")

    monkeypatch.setattr(profiler, "profile_once", once)
    settings = SimpleNamespace(model="gpt2", B=1, T=64, device="cpu")
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"float32": 1e12}, "device": "cpu", "name": "a CPU"}))
    console = Console(file=io.StringIO(), width=150)
    assert profile_ladder([BY_LABEL["0"], BY_LABEL["3"]], [], settings, tmp_path, console, 5) == []
    assert all(next(rest, None) is None for rest in answers.values()), "fewer profiles than expected"
    found = read_profile(tmp_path)
    assert [(rung["step_ms"], is_reliable(rung)) for rung in found["rungs"]] == [(101.0, True), (250.0, False)]
    print_profile(found, console)
    table = console.file.getvalue()
    assert "bfloat16 autocast (!)" in table and "baseline (!)" not in table
    assert [(bar.end, bar.pale, bar.parts[0]) for bar in profile_bars(found)] == [
        ("101.0", False, 101), ("250.0 (!)", True, 250)]


@pytest.mark.parametrize("device, parts_ms", [
    ("cuda", {"matrix products": 0.1, "waiting": 0.9}),
    ("cpu", {"matrix products": 0.6, "optimizer": 0.1, "waiting": 0.3})])
def test_the_work_inside_the_steps_counts_once(device, parts_ms):
    """A GPU's kernel, though the step's range has it, too; on a CPU an operator without those that it calls."""
    def event(name, start, end, own=0.0, shapes=(), annotation=False, parent=None):
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name="CPU"), cpu_parent=parent,
                               input_shapes=shapes, self_cpu_time_total=own, is_user_annotation=annotation,
                               kernels=kernels if shapes or annotation else [])

    kernels = [SimpleNamespace(name="gemm", duration=100.0)] if device == "cuda" else []
    step = event(STEP, 0.0, 1000.0, 300.0, annotation=True)
    clip = event(CLIP, 650.0, 850.0, annotation=True)
    linear = event("aten::linear", 10.0, 610.0, 200.0, parent=step)
    events = [step, linear, event("aten::mm", 20.0, 420.0, 400.0, [[8, 8], [8, 8]], parent=linear),
              event("aten::copy_", 700.0, 800.0, 100.0, parent=event("aten::norm", 650.0, 850.0, parent=clip)),
              event("aten::mm", 2000.0, 2100.0, 100.0, [[8, 8], [8, 8]])]  # after the step
    parts, ms = by_kind(events, {257}, device)
    assert ms == 1 and parts == pytest.approx(dict.fromkeys(KINDS, 0.0) | parts_ms)


@pytest.mark.parametrize("name, shapes, around, kind", [
    # names as torch 2.13 gives them: compiled kernels of a CPU and of a GPU, attention of both, autograd
    ("graph_1_cpp_fused__log_softmax__unsafe_view_nll_loss_forward_slice_view_6", [], [], "cross-entropy"),
    ("graph_0_cpp_fused__softmax__to_copy_bitwise_not_masked_fill_mul_3", [], [], "attention"),
    ("graph_1_cpp_fused__scaled_dot_product_flash_attention_for_cpu_backward_sum_view_4", [], [],
     "normalization and pointwise"),
    ("triton_red_fused__log_softmax_nll_loss_forward_5", [], [], "cross-entropy"),
    ("triton_poi_fused_addmm_gelu_view_3", [], [], "normalization and pointwise"),
    ("triton_tem_fused_addmm_4", [[768], [1024, 768], [768, 768]], [], "matrix products"),
    ("aten::mm", [[1024, 768], [768, 50304]], [], "head"),
    ("aten::mm", [[1024, 768], [768, 50264]], [], "head"),  # Inductor pads a GPU's products to 4 or 8 columns
    ("aten::addmm", [[3072], [1024, 768], [768, 3072]], [], "matrix products"),
    ("aten::bmm", [[12, 1024, 64], [12, 64, 1024]], [], "attention"),
    ("aten::copy_", [[50304, 768], [50304, 768]], [], "normalization and pointwise"),  # a weight, for autocast
    ("aten::masked_fill", [[1, 12, 1024, 1024], [1024, 1024], []], [], "attention"),  # of the baseline
    ("aten::mm", [[1024, 768], [768, 768]], ["Optimizer.step#Muon.step"], "optimizer"),
    ("Memcpy HtoD (Pageable -> Device)", [], [], "data"),
    ("aten::to", [], [DATA], "data"), ("aten::linalg_vector_norm", [], [CLIP], "optimizer"),
    ("autograd::engine::evaluate_function: MmBackward0", [], [], "waiting"),
])
def test_an_operator_counts_for_its_kind_of_work(name, shapes, around, kind):
    assert kind_of(name, shapes, around, logit_widths(50257)) == kind


def test_the_plain_step_is_of_those_without_the_profiler(byte_tokens, tmp_path, monkeypatch):
    """Not of those that warm up, nor of those that it slows: else each profile were reliable."""
    monkeypatch.setattr(profiler, "read_log", lambda path: SimpleNamespace(
        name="baseline", ms=[900.0] * 2 + [10.0, 11.0, 12.0] + [500.0] * 4))
    words = ["--model", "tiny", "--device", "cpu", "-B", "1", "-T", "8", "--data", str(byte_tokens)]
    found = profiler.profile_rung("0", words, tmp_path)
    assert found["plain_ms"] == 11 and found["vocab_size"] == 257 and 0 < found["step_ms"] < 500


@pytest.mark.slow
def test_the_parts_of_a_rungs_profile_add_up_to_its_step(tokens, tmp_path, call):
    words = ["profile", "--logs", tmp_path, "--model", "tiny", "--device", "cpu", "-B", 2, "-T", 128]
    data = shutil.copytree(tokens, tmp_path / "data")
    edit_json(data / "meta.json", tokenizer="of my own")  # whose size a log does not tell
    done = ladder(*words, "--rungs", "0,10", "--repeat", 1, "--traces", "--data", data, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_profile(tmp_path)
    assert [rung["name"] for rung in found["rungs"]] == [BY_LABEL[label].name for label in ("0", "10")]
    for rung in found["rungs"]:
        parts, step = rung["parts_ms"], rung["step_ms"]
        assert sum(parts.values()) == pytest.approx(step)
        assert rung["plain_ms"] / 4 < step < 4 * rung["plain_ms"]  # other tests run beside it, and not all the time
        assert min(parts[kind] for kind in ("matrix products", "head", "attention", "cross-entropy", "optimizer")) > 0
        assert parts["waiting"] < 0.5 * step and rung["products_ms"] > 0, parts
    assert (tmp_path / "profile.png").exists()
    with gzip.open(tmp_path / "speedup_10_fused_adamw.trace.json.gz", "rt") as trace:
        names = {event.get("name", "") for event in json.load(trace)["traceEvents"]}
    assert any("cpp_fused" in name for name in names) and any(name.startswith("ProfilerStep") for name in names)
    assert is_one_error(call(*words, "--data", "nowhere"), "no complete token files")
    assert read_profile(tmp_path) == found  # the failure has not touched it


@pytest.mark.parametrize("name, precision, rate, share", [
    ("baseline", "float32", 1e12, 1), ("speedup_02_tf32", "float32, products in TF32", 2e12, 1),
    ("speedup_02_tf32", "float32 (no TF32 on this device: no effect)", 1e12, 1),
    ("speedup_05_compile", "bfloat16 autocast", 4e12, 1), ("speedup_06_flash_attn", "bfloat16 autocast", 4e12, 0.5),
    ("speedup_10_fused_adamw", "float32 (no bfloat16 on this CPU)", 1e12, 0.5),
])
def test_the_floor_is_the_products_at_the_rate_of_the_rungs_format(name, precision, rate, share, tmp_path):
    """PaLM's formula, for GPT-2's shape and bytes at B=2 T=1024: 6 FLOPs per weight and token, and attention's, halved
    from rung 6 on."""
    header = f"# model: 12x12x768\n# device: x | precision: {precision}\n# batch: B=2 T=1024\n"
    log = read_log(write_log(tmp_path / f"{name}.log", header=header))
    flops = 6 * (257 * 768 + 12 * 12 * 768**2) + share * 12 * 12 * 768 * 1024
    found = products_ms(log, {"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12}, 257)
    assert found == pytest.approx(2048e3 * flops / rate)
    with pytest.raises(UserError, match="--logs: .* no rate "):
        products_ms(log, {}, 50257)


def test_where_torch_cannot_compile_the_profile_is_of_eager_runs(tmp_path, tokens, monkeypatch, call):
    seen = []
    monkeypatch.setattr(script_flags, "compile_problem", lambda device: "no compiler here")
    monkeypatch.setattr(profile_verb, "profile_ladder", lambda entries, flags, *_: seen.append(flags))
    code, output, _ = call("profile", "--rungs", "5", "--logs", tmp_path / "new", *flags(tokens)[:-2])
    assert code == 0 and "--compile-mode none: no compiler here" in output
    assert seen[0][-2:] == ["--compile-mode", "none"]


def test_a_profile_goes_with_the_logs_beside_it(tmp_path, tokens):
    """Before it is made, by its machine; when it is shown, by their batch."""
    words, entries = flags(tokens)[:-2], [BY_LABEL["0"], BY_LABEL["10"]]
    shutil.copy(WHOLE / "round_1.log", tmp_path)
    (tmp_path / "profile.json").write_text(json.dumps(read_profile(WHOLE) | {"T": 64}))
    report = build_report(tmp_path)
    assert report.profile is None and "B=1 T=64, but the logs are not" in report.skipped[0]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 1e12}, "device": "cuda"}))
    with pytest.raises(UserError, match="from a different device"):
        check_profile(entries, words, tmp_path / "new")
