"""experiments/: each patch still fits its rung and trains; each program finds what is known in closed form."""
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, load_module
from log_files import MEDIAN, write_log

from experiments import python_corpus, runs, variants, widths
from experiments.causal_attention import __main__ as causal_attention
from experiments.chunked_loss import __main__ as chunked_loss
from experiments.cpu_bfloat16 import __main__ as cpu_bfloat16
from experiments.data_wait import __main__ as data_wait
from experiments.exercises import __main__ as exercises
from experiments.fair_comparison import null
from experiments.growth import __main__ as growth
from experiments.nanogpt import __main__ as nanogpt
from experiments.network import __main__ as network
from experiments.own_text import __main__ as own_text
from experiments.residual_scaling import __main__ as residual_scaling
from experiments.sharded_step import __main__ as sharded_step
from ladder.errors import UserError
from ladder.rungs.list import BY_LABEL, load_script

BASES = {"evidence": "preemption", "variants": "zero_init"}  # the rung that the patches in a folder change


# ---- patches ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("patch", sorted((ROOT / "experiments").rglob("*.patch")), ids=lambda patch: patch.stem)
def test_patches_train(patch, tmp_path):
    """Each starts with a loss near its rung's, all that it adds gets a gradient, and no token sees a later one."""
    module = load_module(variants.write_variant(patch, tmp_path, BY_LABEL[BASES[patch.parent.name]]).path)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(block_size=16, vocab_size=257, n_layer=4, n_head=2, n_embd=32))
    rates = {"lr": 1e-3, "muon_lr": 2e-3} if hasattr(module, "MuonAdamW") else {"lr": 1e-3}
    optimizer = model.configure_optimizers(**rates, weight_decay=0.1)
    x = torch.randint(0, 257, (2, 16))
    for step in range(3):  # what ends the branches is zero in the first, and so are the gradients before it
        loss = model(x, x.roll(-1, dims=1))
        loss.backward()
        if step == 0:
            assert abs(loss.item() - math.log(257)) < 0.2
        if step == 2:
            assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    changed = torch.cat((x[:, :10], x[:, 10:].roll(1, dims=1)), dim=1)
    with torch.no_grad():
        assert torch.allclose(model(x)[:, :10], model(changed)[:, :10], atol=1e-5)


def test_variants_of_nosuch_are_refused():
    """They would have compared the base with nothing."""
    with pytest.raises(UserError, match="--patches nosuch: no patches of this name; give one of evidence, variants"):
        variants.main(["--patches", "nosuch"])


def test_variants_are_compared_with_their_rung(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "ladder", lambda words: words)
    verb, base, *files, flag, value = variants.main(["--patches", "evidence", "--base", "preemption", "--steps", "3"])
    assert (verb, base, flag, value) == ("compare", "preemption", "--steps", "3")
    assert [Path(file).stem for file in files] == [patch.stem for patch in variants.patches("evidence")]


# ---- times and rates -------------------------------------------------------------------------------------------------

@pytest.fixture
def clock(monkeypatch):
    """Makes time.perf_counter() say what is given: its readings, one after another."""
    def set_readings(*readings):
        monkeypatch.setattr(time, "perf_counter", iter(readings).__next__)
    return set_readings


@pytest.fixture
def alone(group_of_one, monkeypatch):
    """One rank, whose process group ends with the test."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_cpu_bfloat16_counts_two_flops_for_each_multiplication(clock):
    clock(10.0, 10.5)
    assert cpu_bfloat16.gflops(torch.float32, 2, 3, 5) == pytest.approx(2 * 2 * 3 * 5 / 0.5 / 1e9)


def test_network_takes_the_median_of_the_tries_after_the_first(clock, alone, monkeypatch):
    """Of each the slowest rank's."""
    dist.init_process_group("gloo")
    operations, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *op: operations.append(op) or all_reduce(tensor, *op))
    clock(0, 100, 200, 201, 300, 302, 400, 403, 500, 509, 600, 608)  # 100 s, then 1, 2, 3, 9, 8
    assert network.all_reduce_seconds(1024, "cpu") == 3 and operations == [()] * 6 + [(dist.ReduceOp.MAX,)]


def test_network_counts_four_bytes_a_parameter():
    assert network.gradient_bytes("gpt2") == 4 * 124_475_904


def test_network_prints_the_rates_of_its_times(alone, monkeypatch, capsys):
    rates = {1e6: 1e9, 25e6: 2e9}  # those of the second size, DDP's, are what a step's gradients take
    monkeypatch.setattr(network, "all_reduce_seconds", lambda n_bytes, device: n_bytes / rates[n_bytes])
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    network.main(["1", "fp8"])
    out = capsys.readouterr().out
    assert "    25     12.50    2.000      3.000" in out  # each of four sends 3/4 of the buffer twice
    assert f"gpt2 {497.9:18.1f} {497.9 / 2000:8.3f}" in out


def test_data_wait_is_what_lies_between_zero_grad_and_the_model(tokens, monkeypatch):
    """A loader that takes 50 ms longer is seen; the model's own time is not, nor how slow the first two steps are."""
    module = load_script(BY_LABEL["gradient_accumulation"])
    batch, forward = module.DataLoaderLite.batch, module.GPT.forward

    sleeps = iter([0.4, 0.4, 0.05, 0.05, 0.05])

    def late(*args):
        time.sleep(next(sleeps))
        return batch(*args)

    def slow(*args):
        time.sleep(0.2)
        return forward(*args)

    monkeypatch.setattr(module.DataLoaderLite, "batch", late)
    monkeypatch.setattr(module.GPT, "forward", slow)
    flags = ["--data", str(tokens), "--model", "tiny", "-B", "1", "-T", "8", "--steps", "5", "--device", "cpu"]
    assert 50 <= data_wait.median_wait(module, flags) < 200


def test_sharded_step_counts_the_moments(alone, monkeypatch, capsys):
    """AdamW has two numbers a parameter, Muon one; alone, `sharded_optimizer` has all of them, too."""
    monkeypatch.setattr("sys.argv", ["sharded_step", "--model", "tiny", "--rounds", "1"])
    sizes = []
    monkeypatch.setattr(sharded_step, "state_bytes", lambda optimizer, count=sharded_step.state_bytes:
                        sizes.append(count(optimizer)) or sizes[-1])
    sharded_step.main()
    n_block, n_all = 2 * (4 * 64**2 + 3 * 64 * 192), 50304 * 64
    vectors = 2 * (2 * 64 + 2 * 32) + 64
    moments = 4 * (n_block + 2 * n_all + 2 * vectors)
    counters = 4 * (2 * (5 + 4) + 2)  # each tensor has its `step`
    assert sizes == [moments + counters] * 2
    assert "rank 0 of 1, tiny, cpu, sharded_optimizer: " in capsys.readouterr().out


# ---- attention, losses -----------------------------------------------------------------------------------------------

def test_causal_attention_in_blocks_is_causal_attention():
    q, k, v = torch.randn(3, 1, 2, 700, causal_attention.HS)
    expected = causal_attention.flash(q, k, v)
    for name in ("flash kernel in blocks", "written out in blocks"):
        assert torch.allclose(causal_attention.CONTESTANTS[name](q, k, v), expected, atol=1e-5), name


@pytest.mark.parametrize("name", ["F.cross_entropy", "chunked_cross_entropy", "F.linear_cross_entropy, float32"])
def test_chunked_losses_are_the_uniform_ones(name):
    """Of logits that are all zero: ln(number of tokens), and softmax less the target as their gradient."""
    x, n = torch.ones(4, 8, requires_grad=True), chunked_loss.VOCAB_SIZE
    weight = torch.nn.Parameter(torch.zeros(n, 8))
    script = load_script(BY_LABEL["chunked_cross_entropy"])
    loss = chunked_loss.LOSSES[name](script, x, weight, torch.tensor([0, 0, 0, 5]))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(n))
    assert torch.allclose(weight.grad[[0, 5, 9]], torch.tensor([[-0.75], [-0.25], [0.0]]) + 1 / n, atol=1e-7)


# ---- the exercises ---------------------------------------------------------------------------------------------------

def test_every_change_of_an_exercise_finds_its_place():
    for rows in exercises.LONGER.values():
        for _, label, edits, _ in rows:
            assert (exercises.edited(label, edits) == exercises.edited(label, [])) == (not edits)
    with pytest.raises(SystemExit, match="0 places for the change: nowhere"):
        exercises.edited("3", [("nowhere", "")])


def test_rounding_to_the_mantissa_of_tf32():
    x = torch.tensor([1 + 2**-10, 1 + 2**-12, -(1 + 3 * 2**-11)])
    assert exercises.rounded(x, 10).tolist() == [1 + 2**-10, 1, -(1 + 2**-9)]


def test_a_run_is_summed_up_by_its_end():
    steps = SimpleNamespace(losses=[100.0] * 30 + [2.0, 4.0] * 10, vals=[])
    assert exercises.last_loss(steps) == 3
    assert exercises.last_loss(SimpleNamespace(losses=[1.0], vals=[9.0, 7.0, 8.0])) == 8


def test_what_a_layer_keeps():
    """A linear layer its input, exp its result; nothing counts twice."""
    layer, x = torch.nn.Linear(8, 3), torch.zeros(5, 8, requires_grad=True)
    assert exercises.kept(lambda: layer(x).exp(), layer) == [((5, 8), 160), ((5, 3), 60)]


def test_exercises_short_answers(capsys, monkeypatch, tokens):
    """Those that follow from arithmetic."""
    exercises.main(["4", "gradient_checkpointing", "qk_norm", "swiglu", "--short"])
    out = capsys.readouterr().out
    assert "a block keeps 1 tensors, 1.00 times its input: 1x256x64" in out
    assert "gate without SiLU: 10 times the input gives 100.0 times the output" in out
    assert "constant gate: 10 times the input gives 10.0 times the output" in out
    scores = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("c_attn times")]
    assert max(scores) <= 32**0.5
    added = {line.partition(":")[0]: list(map(float, line.split()[-3:])) for line in out.splitlines()
             if "added by" in line}
    assert added["rung 3"][2] / added["rung 3"][0] == pytest.approx(4, rel=0.15)  # 16 times the layers
    assert added["rung 4"][2] / added["rung 4"][0] == pytest.approx(1, rel=0.15)
    assert added["1 / n in place of 1 / sqrt(n)"][2] / added["1 / n in place of 1 / sqrt(n)"][0] == pytest.approx(
        1 / 4, rel=0.15)


def test_a_resumed_run_repeats_the_second_half(monkeypatch, tokens):
    monkeypatch.setitem(exercises.QUICK, "data", str(tokens))
    monkeypatch.setitem(exercises.QUICK, "T", 32)
    first, second, n_bytes = exercises.crash_and_resume(exercises.script("checkpoints"), steps=4)
    assert len(first) == 4 and second == first[2:]
    assert n_bytes > 12 * 64 * 50304


# ---- small texts -----------------------------------------------------------------------------------------------------

def test_finished_runs_are_not_repeated(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(runs.subprocess, "run", lambda words, **more: started.append(words) or write_log(
        tmp_path / "4_documents_apart.log", tail=MEDIAN))
    for _ in range(2):
        assert runs.finished(BY_LABEL["documents_apart"], ["--steps", 3], tmp_path).losses == [10, 9, 8]
    assert [words[2:] for words in started] == [["--steps", "3", "--log-dir", str(tmp_path)]]


def test_own_text_takes_the_lowest_losses(monkeypatch, tmp_path, capsys):
    """The rates of the lowest loss anywhere in a run, medians of seeds, differences seed by seed."""
    def val_losses(row, data, rates, seed, out):
        if row == "zero_init":
            return [1.5, 1.0, 3.0] if rates == (0.01, 0.005) else [1.2, 1.1, 1.1]
        return [9.0, {1337: 0.5, 1338: 0.9, 1339: 0.75}[seed], 2.0]

    pool = SimpleNamespace(starmap=lambda function, jobs: [function(*job) for job in jobs])
    monkeypatch.setattr(own_text, "val_losses", val_losses)
    assert own_text.search(tmp_path, tmp_path, pool) == (0.01, 0.005)
    found = own_text.train_all(tmp_path, (0.01, 0.005), tmp_path, pool)
    first, *others = own_text.table(found)
    assert first == ("| 24 | 3.000 (3.000 to 3.000) | 1.000 (1.000 to 1.000) | +0.000 (+0.000 to +0.000) |")
    assert others[0].endswith("| 2.000 (2.000 to 2.000) | 0.750 (0.500 to 0.900) | -0.250 (-0.500 to -0.100) |")
    panel = own_text.draw({"text": found}, tmp_path / "losses.png").axes[0]
    assert panel.lines[1].get_xdata().tolist() == [100, 200, 300]
    assert panel.lines[1].get_ydata().tolist() == [9.0, 0.75, 2.0]


def test_own_text_runs_of_other_seeds_are_other_runs(tmp_path, monkeypatch):
    """A finished run is not repeated, so each needs a folder of its own."""
    seen = []
    monkeypatch.setattr(own_text, "finished", lambda rung, flags, folder: (
        seen.append((folder, flags[flags.index("--seed") + 1])) or SimpleNamespace(val_losses=[])))
    for point in [(row, tmp_path, rates, seed, tmp_path)
                  for row in own_text.ROWS for rates in own_text.RATES for seed in own_text.SEEDS]:
        own_text.val_losses(*point)
    folders, seeds = zip(*seen, strict=True)
    assert len({*folders}) == len(seen) == 60 and [*seeds] == own_text.SEEDS * 20


NANO_TRAIN = """
import shutil, sys, torch
assert torch.manual_seed(1337 + 0).initial_seed() == 1338
flags = dict(word[2:].split("=") for word in sys.argv[2:])
assert float(flags["min_lr"]) == float(flags["learning_rate"]) / 10
for i in range(int(flags["max_iters"]) + 1):
    print(f"iter {i}: loss 4, time {1000 if i < 5 else 20 + i % 2 * 8}.00ms, mfu 1%")
model = {"bias": torch.zeros(7)}
torch.save({"model": model, "model_args": {"block_size": 8, "vocab_size": 7}}, flags["out_dir"] + "/ckpt.pt")
"""
NANO_MODEL = """
import torch
class GPTConfig:
    def __init__(self, **fields):
        vars(self).update(fields)
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(config.vocab_size))
    def forward(self, x, y):
        logits = self.bias.expand(*x.shape, -1)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def test_nanogpt_is_run_and_measured_as_its_readme_says(tmp_path):
    """A stand-in whose model gives seven characters the same probability, and whose first steps are slow."""
    data = tmp_path / "nanoGPT" / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    (np.arange(1100) % 7).astype(np.uint16).tofile(data / "val.bin")
    (tmp_path / "nanoGPT" / "train.py").write_text(NANO_TRAIN)
    (tmp_path / "nanoGPT" / "model.py").write_text(NANO_MODEL)
    found = nanogpt.nano(tmp_path / "nanoGPT", tmp_path / "run", 1e-3, 1338)
    assert found == {"loss": pytest.approx(math.log(7)), "ms": 28 if nanogpt.NANO_STEPS % 2 == 1 else 24}
    assert nanogpt.steps_in_its_time(28, 51) == 1098


def test_nanogpt_weighs_every_window_alike(tmp_path):
    """66 windows, so the second call has two: a model that is sure of character 0, which the first 64 windows have."""
    data = tmp_path / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    np.array([0] * (64 * 8 + 1) + [1] * 16, np.uint16).tofile(data / "val.bin")
    (tmp_path / "model.py").write_text(NANO_MODEL)
    bias = torch.tensor([math.log(9.0), 0.0])  # probabilities 0.9 and 0.1
    torch.save({"model": {"bias": bias}, "model_args": {"block_size": 8, "vocab_size": 2}}, tmp_path / "ckpt.pt")
    expected = -(64 * math.log(0.9) + 2 * math.log(0.1)) / 66
    assert nanogpt.whole_loss(tmp_path, tmp_path / "ckpt.pt") == pytest.approx(expected)


def test_corpora_of_python_files(tmp_path, monkeypatch):
    """In the order of names, in the encoding that a file declares, without tests; each docstring once."""
    long, other = "a docstring of a hundred characters. " * 3 + "End", "another that is long enough. " * 4 + "End"
    (tmp_path / "test").mkdir()
    (tmp_path / "b.py").write_text(f'"""{long}"""\ndef f():\n    """{other}"""\ndef g():\n    """short"""\n')
    (tmp_path / "a.py").write_bytes(f'# -*- coding: latin-1 -*-\n"""{long}"""\nx = "\xe9"\n'.encode("latin-1"))
    (tmp_path / "test" / "c.py").write_text('"""never seen"""\n')
    texts = list(python_corpus.sources(tmp_path))
    assert [text.splitlines()[0][:4] for text in texts] == ["# -*", '"""a'] and "é" in texts[0]
    monkeypatch.setattr(python_corpus.sysconfig, "get_path", lambda name: tmp_path)
    assert sorted(python_corpus.docstrings()) == [long, other]


# ---- how cost grows --------------------------------------------------------------------------------------------------

def grown(name, ms, peak_gb=None):
    """A record of `ms(value, rung, round)` in each point of a curve, in five rounds."""
    rows = [{"curve": name, "value": value, "rung": rung, "round": number, "ms": ms(value, rung, number),
             "peak_gb": peak_gb or curve.rungs[rung][2](value) / 1e9}
            for curve in [growth.CURVES[name]] for value in curve.values for rung in curve.rungs
            for number in range(1, 6)]
    return pandas.DataFrame(rows)


def test_growth_reads_what_the_logs_say(tmp_path):
    """The log's median, in which the step that compiles is not, and its peak."""
    folder = growth.folder_of(tmp_path, "length", 512, "rung 10") / "round_3"
    header = "# machine: a CPU\n# torch: 2\n# batch: B=1 T=512 | steps: 3 | seed: 1\n"
    write_log(folder / "speedup_10_fused_adamw.log", ms=(9000, 60, 50), header=header, tail=MEDIAN)
    assert growth.read(tmp_path).to_dict("records") == [{
        "curve": "length", "value": 512, "rung": "rung 10", "round": 3, "ms": 50.0, "peak_gb": 1.0,
        "machine": "a CPU", "torch": "2"}]


def test_growth_runs_each_point_of_a_curve(tmp_path):
    job = growth.job_of(tmp_path, "ranks", 4, "rung 33, sharded optimizer", 2)
    words = " ".join(map(str, job.command))
    assert "--nproc_per_node=4" in words
    assert "--model gpt2 -B 1 -T 128 --steps 3 --val-every 0 --total-batch 512" in words
    assert job.log_dir == tmp_path / "ranks" / "4_rung_33,_sharded_optimizer" / "round_2"


def test_growth_draws_a_quadratic_on_its_law():
    """Where rung 0 takes T² / 1,024 ms, its curve is parallel to the dotted T²; so is rung 10's to the T."""
    from matplotlib import pyplot as plt

    record = grown("length", lambda T, rung, number: (T**2 / 1024 if rung == "rung 0" else T) * (1 + (number - 3) / 10))
    figure, axes = plt.subplots()
    growth.draw_times(axes, record, "length")
    curves = {line.get_label(): line for line in axes.lines}
    assert curves["rung 0"].get_xdata().tolist() == [256, 512, 1024, 2048, 4096]
    assert curves["rung 0"].get_ydata().tolist() == [64, 256, 1024, 4096, 16384]
    squared, linear = (line.get_ydata() for line in axes.lines if line.get_linestyle() == ":")
    assert squared == pytest.approx([1.15 * 64, 1.15 * 16384]) and linear == pytest.approx([1.15 * 256, 1.15 * 4096])
    plt.close(figure)


def test_growth_draws_the_counted_memory_through_the_measured():
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots()
    growth.draw_memory(axes, grown("depth", lambda *point: 1.0), "depth")
    lines = {kind: [line for line in axes.lines if line.get_linestyle() == kind] for kind in ("--", "None")}
    assert len(lines["--"]) == len(lines["None"]) == 2
    for counted, measured in zip(lines["--"], lines["None"], strict=True):
        at = dict(zip(counted.get_xdata(), counted.get_ydata(), strict=True))
        assert [at[depth] for depth in measured.get_xdata()] == pytest.approx(measured.get_ydata())
    plt.close(figure)


def test_growth_counts_what_was_measured():
    record = pandas.read_csv(ROOT / "docs" / "growth.csv")
    for (name, value, rung), rows in record[record.curve.isin(["depth", "ranks"])].groupby(["curve", "value", "rung"]):
        counted = growth.CURVES[name].rungs[rung][2](value) / 1e9
        assert rows.peak_gb.median() == pytest.approx(counted, rel=0.15), (name, value, rung)


def test_growth_keeps_the_curves_that_are_not_measured_now(tmp_path, monkeypatch):
    """Of those that are, nothing old."""
    record = tmp_path / "growth.csv"
    pandas.concat([grown("length", lambda *_: 1.0), grown("depth", lambda *_: 1.0)]).to_csv(record, index=False)
    monkeypatch.setattr("sys.argv", ["growth", str(record), "--logs", str(tmp_path), "--curves", "depth"])
    monkeypatch.setattr(growth, "measure", lambda *_: None)
    monkeypatch.setattr(growth, "read", lambda logs: grown("depth", lambda *_: 2.0))
    for name in ("print_table", "print_gains", "draw"):
        monkeypatch.setattr(growth, name, lambda *_: None)
    growth.main()
    kept = pandas.read_csv(record)
    assert kept.groupby("curve").ms.agg(["min", "max"]).to_dict("index") == {
        "depth": {"min": 2, "max": 2}, "length": {"min": 1, "max": 1}}


def test_growth_names_gains_by_round(capsys):
    """The median of the rounds' ratios: here 2, although the medians of the times are 2.5 apart."""
    before, after = [100, 200, 300, 400, 500], [50, 100, 120, 200, 250]
    record = grown("length", lambda T, rung, number: (before if rung == "rung 0" else after)[number - 1])
    growth.print_gains(record, "length", "rung 0", "rung 10")
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "length 256: rung 10, 2.00 times as fast as rung 0 (2.00 to 2.50, p = 0.000)"


def test_growth_prints_measured_and_counted(capsys):
    growth.print_table(grown("batch", lambda value, rung, number: number * 100, peak_gb=2.5))
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("batch 1024: rung 16: 300 ms (100-500), 2.50 GB (counted ")


def test_a_sharded_optimizer_saves_the_moments_of_the_others():
    """Alone nothing, with two ranks half, with eight less than 7/8: one rank has all of the embedding's."""
    assert growth.sharded_optimizer_bytes(1) == growth.ddp_bytes(1)
    embedding, blocks = 8 * 50304 * 768, 4 * 12 * (4 * 768**2 + 3 * 768 * 2048)
    for ranks, left in ((2, (embedding + blocks) / 2), (8, embedding)):
        saved = growth.ddp_bytes(ranks) - growth.sharded_optimizer_bytes(ranks)
        assert saved == pytest.approx(embedding + blocks - left, rel=0.01)


def test_the_windows_of_residual_scaling():
    """Losses whose differences are known: none in the first 25 steps, 0.5 and a little for each seed in the next."""
    rows = [{"rung": rung, "seed": seed, "step": step, "loss": 9 - step / 50 + seed - (0.5 + seed / 100) * lower}
            for rung in "mup" for seed in (1, 2, 3) for step in range(1, 51)
            for lower in [rung == "4" and step > 25]]
    first, second = residual_scaling.window_effects(pandas.DataFrame(rows)).items()
    assert (first[0], first[1].mean, first[1].p) == ("1 to 25", 0, 1)
    assert second[0] == "26 to 50" and second[1].mean == pytest.approx(-0.52)
    assert second[1].p == pytest.approx(2 * (1 - (8112 / 8114) ** 0.5))  # t**2 = 52**2 * 3; twice for Holm


# ---- learning rates at several widths, and p of equal recipes --------------------------------------------------------

def test_widths_trains_wide_models_with_their_own_rates_and_with_those_carried_over(tmp_path, monkeypatch):
    monkeypatch.setattr(widths.Contest, "find_rates", lambda contest: {
        rung.name: (int(contest.folder.name) / 1e6, 0.1) for rung in contest.scripts})
    monkeypatch.setattr(widths.Contest, "run_shared", lambda *_: None)
    monkeypatch.setattr(widths, "last_val_loss", lambda log: float(log.parent.name.startswith("own")))
    found = widths.train(tmp_path, 2, 1)
    assert {(row.part, row.width, row.max_lr, row.val_loss) for row in found.itertuples()} == {
        ("own", 256, 256e-6, 1), ("own", 512, 512e-6, 1), ("carried", 256, 128e-6, 0), ("carried", 512, 128e-6, 0)}
    assert {*found.seed} == {1338, 1339} and {*found.rung} == {*widths.RUNGS} and len(found) == 16


def test_widths_finds_the_lowest_point_between_the_rates(capsys):
    """Of a parabola over log2 of each rate; and a positive difference is one that the rates carried over lose by."""
    def loss(*rates):
        return sum(math.log2(rate / lowest) ** 2 for rate, lowest in zip(rates, (0.006, 0.003), strict=True))

    tried = [(0.005 * a, 0.004 * b) for a, b in ((1, 1), (0.5, 1), (2, 1), (1, 0.5), (1, 2))]
    rows = [("search", rung, width, *rates, 1337, loss(*rates))
            for rung in widths.RUNGS for width in widths.WIDTHS for rates in tried]
    rows += [(part, rung, width, 0.005, 0.004, seed, seed % 7 + lost * (1 + seed % 3 / 100))
             for part, lost in (("own", 0), ("carried", 0.1)) for rung in widths.RUNGS for width in widths.TO
             for seed in range(1338, 1343)]
    record = pandas.DataFrame(rows, columns=["part", "rung", "width", "max_lr", "muon_lr", "seed", "val_loss"])
    for place, lowest in enumerate((0.006, 0.003)):
        assert widths.best_rates(record, "rung 24", place) == pytest.approx([lowest] * 4)
    widths.show(record)
    assert "rung 24, width 512, carried less own: +0.101 (+0.100 to +0.102; 5 seeds, p = " in capsys.readouterr().out


def test_contests_of_a_recipe_with_itself_have_seeds_of_their_own(tmp_path, monkeypatch):
    """Else all forty were one; the copy adds 10,000 to them."""
    seeds, job = [], SimpleNamespace(name=BY_LABEL["zero_init"].name, command=["python", "script", "--seed", "1338"])
    monkeypatch.setattr(null, "load_script", lambda rung: SimpleNamespace(
        parse_args=lambda words: SimpleNamespace(seed=int(words[1])), train=lambda args: seeds.append(args.seed)))
    for number in range(40):
        null.runner([BY_LABEL["zero_init"]], number)([job] * 2)
    assert len({*seeds}) == 40 and len(seeds) == 80
    assert "manual_seed(args.seed + 10_000" in null.copy_of(BY_LABEL["zero_init"], tmp_path / "a.py").path.read_text()
