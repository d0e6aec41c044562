"""Floors and cards: what is counted equals closed forms, and no floor lies above what was measured."""
import itertools
import json
import math

import pytest
import torch
from load_script import builds_on, new_gpt, rung
from torch._subclasses.fake_tensor import FakeTensorMode

from ladder.__main__ import main
from ladder.count import floors, kernels
from ladder.count.cards import CARDS, card_of, find_card
from ladder.count.flops import SHAPES, flops_per_token
from ladder.errors import UserError
from ladder.records.impossible import fastest_ms
from ladder.records.logs import read_log
from ladder.records.machine import measured_card
from ladder.rungs.lessons import code_of
from ladder.rungs.list import BY_LABEL, LADDER, RUNGS

B, T = 2, 64
EAGER = {"compile_mode": "none"}
aten = torch.ops.aten


@pytest.fixture(scope="module")
def counted():
    """counted(label, **args): a step of the tiny model; each is counted once."""
    found = {}

    def counted(label, **args):
        if (label, *args) not in found:
            found[label, *args] = kernels.count(label, "tiny", B, T, **args)
        return found[label, *args]

    return counted


@pytest.fixture
def no_records(monkeypatch):
    """What a step takes of its floor, without reading all records for it."""
    monkeypatch.setattr("ladder.verbs.floor.measured_over_floors", lambda: (1.0, 2.0))


def flops(step):
    return sum(n * kernel.flops for kernel, n in step.items())


def test_explicit_attention_has_the_closed_forms_flops(counted):
    assert flops(counted("0")) == flops_per_token("tiny", T) * B * T


def test_causal_attention_has_half_the_flops_and_computes_the_scores_twice(counted):
    n_layer, _, n_embd = SHAPES["tiny"]
    recomputed = n_layer * n_embd * T  # of each token: the scores again, in the backward pass
    expected = (flops_per_token("tiny", T, causal=True) + recomputed) * B * T
    assert flops(counted("6", **EAGER)) == expected


@pytest.mark.parametrize("label, number_format", [("0", "float32"), ("2", "tf32"), ("3", "16 bits")])
def test_products_count_in_the_rungs_number_format(label, number_format, counted):
    assert {kernel.number_format for kernel in counted(label) if kernel.flops} == {number_format}
    assert torch.get_float32_matmul_precision() == "highest"  # what a script sets is undone


@pytest.mark.parametrize("op, shapes, expected", [
    (aten.add.Tensor, [(8, 4), (8, 4)], 3 * 128),
    (aten.add.Tensor, [(8, 4), (4,)], 2 * 128 + 16),  # a bias is read once
    (aten.mul_.Tensor, [(8, 4), (8, 4)], 3 * 128),  # in place: two reads, one write
    (aten.copy_.default, [(8, 4), (8, 4)], 2 * 128),
    (aten.mm.default, [(8, 4), (4, 2)], 4 * (32 + 8 + 16)),
    (aten.gelu.default, [(8, 4)], 2 * 128),
    (aten.ones_like.default, [(8, 4)], 128),
])
def test_bytes_of_an_operation(op, shapes, expected):
    with FakeTensorMode():
        args = [torch.empty(shape) for shape in shapes]
        assert kernels.count_bytes(op, args, op(*args)) == expected


def test_what_is_not_read_or_written_does_not_count():
    """Rows and logits that are not looked up, what expand() repeats, gradients that AdamW only reads."""
    with FakeTensorMode():
        table, ids, logits = torch.empty(50257, 8), torch.empty(16, dtype=torch.int64), torch.empty(16, 50257)
        lists = [[torch.empty(1000)] for _ in range(4)]
        for op, args, expected in (
            (aten.embedding.default, (table, ids), 8 * 16 + 2 * 512),
            (aten.nll_loss_forward.default, (logits, ids, None, 1, -100), 2 * 8 * 16),
            (aten._fused_adamw_.default, (*lists, [], []), 7 * 4000),
        ):
            assert kernels.count_bytes(op, args, torch.empty(16, 8)) == expected
        assert kernels.size(torch.empty(1, 4).expand(100, 4)) == 16
    views = aten.view.default, aten.t.default, aten._unsafe_view.default, aten.detach.default, aten.expand.default
    assert not any(map(kernels.is_kernel, views))
    assert all(map(kernels.is_kernel, (aten.clone.default, aten.mul_.Tensor, aten._fused_adamw_.default)))


def test_a_card_by_the_word_that_tells_it_from_others():
    assert find_card("4090") is find_card("rtx 4090") is CARDS["RTX 4090"]
    with pytest.raises(UserError, match="no such card"):
        find_card("40")


def test_a_run_s_folder_is_a_card_with_the_rates_measured_in_it(no_records, tmp_path, call):
    rates = {"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12}
    (tmp_path / "machine.json").write_text(json.dumps({"name": "mine", "rates": rates, "bytes_per_second": 1e12}))
    assert find_card("mine:1,2,4,1000").rate("tf32") == measured_card(tmp_path).rate("tf32") == 2e12
    assert measured_card(tmp_path).bandwidth == 1000
    code, output, _ = call("floor", "--gpu", tmp_path, "--rungs", "10")
    alone = call("floor", "--gpu", "mine:1,2,4,1000", "--rungs", "10")[1]
    assert code == 0 and output.partition("needs the most")[0] == alone.partition("needs the most")[0]


def test_floor_is_the_slower_of_arithmetic_and_memory_kernel_by_kernel():
    card = find_card("mine:1,2,4,1000")
    step = {floors.Kernel("16 bits", 8 * 10**12, 10**12): 2, floors.Kernel("", 0, 10**12, 3): 2}
    assert floors.floor_of(step, card) == pytest.approx({"floor": 6000, "products": 4000, "traffic": 4000})
    row = floors.floor_row(step, [card])
    assert (row["tflop"], row["gb"], row["launches"]) == ({"16 bits": 16}, 4000, 8)


def test_stored_counts_belong_to_the_scripts_as_they_are():
    stored, code = floors.read_store(), code_of(RUNGS)
    stale = [label for label in floors.COUNTED
             if label not in stored or stored[label]["lesson"] != code[BY_LABEL[label].name]]
    again = f"python -m ladder.count.kernels --rungs {','.join(stale)}"
    assert not stale, f"{stale} have changed, or are new: {again}"
    assert list(stored) == floors.COUNTED  # in the order of the ladder


def test_stored_products_are_the_closed_forms():
    """Of a step's tokens; from `muon` on also Muon's: 5 iterations of three products for each matrix of a block."""
    n_layer, _, n_embd = SHAPES["gpt2"]
    for label, row in floors.stored_floors([]).items():
        causal = BY_LABEL[label].causal
        with torch.device("meta"):
            model = new_gpt(rung(label), "gpt2")
        matrices = [weight.shape for weight in model.transformer.h.parameters() if weight.dim() == 2]
        # one row for each token, and others
        n_rows = 16 * 1024 + 1024 if label == "sampled_softmax" else len(model.lm_head.weight)
        attention = (7 if causal else 12) * n_layer * n_embd * 1024  # 7: half, and the scores again
        expected = (6 * (n_rows * n_embd + sum(map(math.prod, matrices))) + attention) * 16 * 1024
        muon = sum(4 * max(shape) * min(shape) ** 2 + 2 * min(shape) ** 3 for shape in matrices)
        expected += 5 * muon * builds_on(label, "muon")
        assert sum(row["tflop"].values()) == pytest.approx(expected / 1e12, rel=1e-9), label


def test_every_floor_lies_below_the_published_step_and_falls_with_it():
    rows = {label: row["ms"]["A100"] for label, row in floors.stored_floors([CARDS["A100"]]).items()}
    for entry in (entry for entry in LADDER if entry.lecture_ms):
        assert 0.3 * entry.lecture_ms < rows[entry.label]["floor"] < entry.lecture_ms
        assert max(rows[entry.label]["products"], rows[entry.label]["traffic"]) <= rows[entry.label]["floor"]
    lowest = [rows[entry.label]["floor"] for entry in LADDER if entry.lecture_ms]
    assert all(before > 0.99 * after for before, after in itertools.pairwise(lowest))


@pytest.mark.parametrize("device, name", [
    ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("A100-SXM-80GB", "A100 80GB"),
    ("Tesla T4", "T4"), ("Tesla V100-SXM2-32GB", "V100"), ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("T4", "T4"),
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"), ("NVIDIA L4", "L4"),
    # other products: some are faster than the card on the list
    ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA H100 PCIe", None),
    ("NVIDIA H100 NVL", None), ("NVIDIA H200 NVL", None), ("NVIDIA A100-PCIE-40GB", None),
    ("NVIDIA A100 80GB PCIe", None), ("NVIDIA A100-SXM-64GB", None), ("Tesla V100-PCIE-16GB", None),
    ("NVIDIA L40S", None), ("NVIDIA GH200 480GB", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("AMD EPYC", None), (None, None),
])
def test_cards_are_known_by_the_drivers_name(device, name):
    card = card_of(device)
    assert (card and card.name) == name


def write_log(path, ms, precision="bfloat16 autocast", device="NVIDIA GeForce RTX 3080", more=""):
    path.write_text(f"# script: speedup_10_fused_adamw.py\n# model: gpt2\n"
                    f"# device: {device} | precision: {precision}{more}\n"
                    f"# batch: B=4 T=1024 | steps: 1 | seed: 1\nstep : 1 | loss: 9.0 | dt: {ms} ms\n")
    return path


def test_a_log_in_tf32_is_held_to_the_rate_of_tf32(tmp_path):
    slow, fast = (fastest_ms(read_log(write_log(tmp_path / "a.log", 100, precision, "NVIDIA A100-SXM4-40GB")))[0]
                  for precision in ("float32", "float32, products in TF32"))
    assert slow / fast == pytest.approx(156 / 19.5)


@pytest.mark.parametrize("more, times", [(" | ranks: 2", 1.4), (" | float8: 3 layers", 0.7)])
def test_an_honest_log_is_not_called_impossible(more, times, tmp_path, capsys):
    """Two cards do twice the arithmetic; float8 has another rate, which no card's row has."""
    path = tmp_path / "speedup_10_fused_adamw.log"
    products, _ = fastest_ms(read_log(write_log(path, 100)))
    write_log(path, times * products, more=more)
    assert main(["report", str(tmp_path)]) == 0
    assert "matrix products alone take" not in " ".join(capsys.readouterr().out.split())


def test_command_prints_what_is_stored_for_several_cards(capsys):
    assert main(["floor", "--gpu", "a100", "mine:19.5,156,312,1555", "--rungs", "0,10"]) == 0
    out = capsys.readouterr().out
    assert "0 baseline" in out and "10 fused" in out and "mine, ms" in out
    row = floors.stored_floors([CARDS["A100"]])["0"]
    assert out.count(f"{row['ms']['A100']['floor']:,.1f}") == 2


def test_command_counts_another_setting(counted, no_records, capsys):
    assert main(["floor", "--model", "tiny", "-B", str(B), "-T", str(T), "--rungs", "0"]) == 0
    launches, out = sum(n * kernel.launches for kernel, n in counted("0").items()), capsys.readouterr().out
    assert f"tiny, B={B} T={T}" in out and f" {launches:,} " in out


def test_what_is_stored_is_of_one_setting(no_records, monkeypatch):
    """With another --model, -B or -T kernels are counted anew."""
    counted = []
    monkeypatch.setattr(kernels, "count_all", lambda labels, setting, _: (
        counted.append(setting) or {"0": floors.read_store()["0"]["kernels"]}))
    changes = {"model": "tiny"}, {"B": 4}, {"T": 512}
    for change in ({}, *changes):
        words = [(f"--{name}" if name == "model" else f"-{name}", str(value)) for name, value in change.items()]
        assert main(["floor", "--rungs", "0", *itertools.chain(*words)]) == 0
    assert counted == [floors.STORED | change for change in changes]


def compiled_kernels(function, *shapes):
    """What `function`, compiled, launches on float32 tensors of these shapes."""
    module, recorder = torch.nn.Module(), kernels.Recorder()
    module.forward = function
    with kernels.recording(recorder):
        args = [torch.empty(shape) for shape in shapes]
        kernels.compiler(recorder)(module, mode="default")
        recorder.on = True
        module(*args)
    return recorder.kernels


@pytest.mark.parametrize("function, shapes, expected", [
    (lambda x, y: torch.relu(x * 2 + y).exp(), [(64, 128)] * 2, [3 * 32768]),  # what is fused stays inside
    (lambda x, y: (x @ y).exp(), [(64, 128), (128, 64)], [2 * 32768 + 16384, 2 * 16384]),  # a product is a call
    (lambda x, y: x[:4] + y, [(64, 128), (4, 128)], [3 * 2048]),  # of a slice only what is used
    (lambda x, _: x.sum(1), [(64, 64), (1,)], [16384 + 256]),
    (lambda x, _: (x - x.amax(1, keepdim=True)).exp(), [(64, 128), (1,)], [2 * 32768]),  # nor does the maximum leave
])
def test_bytes_of_compiled_kernels(function, shapes, expected):
    assert [kernel.bytes for kernel in compiled_kernels(function, *shapes).elements()] == expected


def most_alive(graph, numel):
    """How many buffers of so many elements exist at once, in the order that Inductor has scheduled."""
    nodes = graph.scheduler.nodes
    last_use = {dep.name: when for when, node in enumerate(nodes) for dep in node.read_writes.reads}
    ends, most = [], 0
    for when, node in enumerate(nodes):
        ends += [last_use[name] for name in node.get_buffer_names()
                 if graph.get_numel(name) == numel and last_use.get(name, when) > when]
        most = max(most, sum(end >= when for end in ends))
    return most


def test_chunked_cross_entropy_the_logits_of_all_chunks_never_exist_at_once_when_compiled_for_a_gpu(monkeypatch):
    """Of four chunks only those of one, and their gradients: an H100's peak had those of all four."""
    most, schedule = [], kernels.scheduled_kernels
    monkeypatch.setattr(kernels, "scheduled_kernels", lambda graph: (
        most.append(most_alive(graph, 4096 * 50304)) or schedule(graph)))
    kernels.count("chunked_cross_entropy", "tiny", 16, 1024, loss_chunk=4096)
    assert most == [2, 0]  # forward, backward
