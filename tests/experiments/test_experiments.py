"""experiments/: each program finds what is known in closed form."""
import itertools
import time
from types import SimpleNamespace

import pandas
import pytest
import torch
import torch.distributed as dist
from load_script import ROOT
from log_files import MEDIAN, write_log

from experiments import python_corpus
from experiments.data_wait import __main__ as data_wait
from experiments.exercises import __main__ as exercises
from experiments.fair_comparison import null
from experiments.growth import __main__ as growth
from experiments.network import __main__ as network
from experiments.sharded_step import __main__ as sharded_step
from ladder.rungs.list import BY_LABEL, load_script


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


def test_network_takes_the_median_of_the_tries_after_the_first(clock, alone, monkeypatch):
    """Of each the slowest rank's."""
    dist.init_process_group("gloo")
    operations, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *op: operations.append(op) or all_reduce(tensor, *op))
    clock(0, 100, 200, 201, 300, 302, 400, 403, 500, 509, 600, 608)  # 100 s, then 1, 2, 3, 9, 8
    assert network.all_reduce_seconds(1024, "cpu") == 3 and operations == [()] * 6 + [(dist.ReduceOp.MAX,)]


def test_network_prints_the_rates_of_its_times(alone, monkeypatch, capsys):
    rates = {1e6: 1e9, 25e6: 2e9}  # those of the second size, DDP's, are what a step's gradients take
    monkeypatch.setattr(network, "all_reduce_seconds", lambda n_bytes, device: n_bytes / rates[n_bytes])
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    network.main(["1", "25"])
    out = capsys.readouterr().out
    assert "    25     12.50    2.000      3.000" in out  # each of four sends 3/4 of the buffer twice
    assert f"gpt2 {497.9:18.1f} {497.9 / 2000:8.3f}" in out


def test_data_wait_is_what_lies_between_zero_grad_and_the_model(tokens, monkeypatch):
    """A loader that takes 50 ms longer is seen; the model's own time is not, nor how slow the first two steps are."""
    module = load_script(BY_LABEL["gradient_accumulation"])
    batch, forward = module.DataLoaderLite.batch, module.GPT.forward

    sleeps = iter([0.3, 0.3, 0.05, 0.05, 0.05])

    def late(*args):
        time.sleep(next(sleeps))
        return batch(*args)

    def slow(*args):
        time.sleep(0.15)
        return forward(*args)

    monkeypatch.setattr(module.DataLoaderLite, "batch", late)
    monkeypatch.setattr(module.GPT, "forward", slow)
    flags = ["--data", str(tokens), "--model", "tiny", "-B", "1", "-T", "8", "--steps", "5", "--device", "cpu"]
    assert 50 <= data_wait.median_wait(module, flags) < 150


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


@pytest.mark.slow
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


def test_a_resumed_run_repeats_the_second_half(monkeypatch, byte_tokens):
    monkeypatch.setitem(exercises.QUICK, "data", str(byte_tokens))
    monkeypatch.setitem(exercises.QUICK, "T", 32)
    first, second, n_bytes = exercises.crash_and_resume(exercises.script("checkpoints"), steps=4)
    assert len(first) == 4 and second == first[2:]
    assert n_bytes > 12 * 64 * 384


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


def test_a_sharded_optimizer_saves_the_moments_of_the_others():
    """Alone nothing, with two ranks half, with eight less than 7/8: one rank has all of the embedding's."""
    assert growth.sharded_optimizer_bytes(1) == growth.ddp_bytes(1)
    embedding, blocks = 8 * 50304 * 768, 4 * 12 * (4 * 768**2 + 3 * 768 * 2048)
    for ranks, left in ((2, (embedding + blocks) / 2), (8, embedding)):
        saved = growth.ddp_bytes(ranks) - growth.sharded_optimizer_bytes(ranks)
        assert saved == pytest.approx(embedding + blocks - left, rel=0.01)


# ---- p of equal recipes ----------------------------------------------------------------------------------------------

def test_contests_of_a_recipe_with_itself_have_seeds_of_their_own(tmp_path, monkeypatch):
    """Each needs fewer than a hundred around its first; the copy adds 10,000 to them."""
    seeds, job = [], SimpleNamespace(name=BY_LABEL["zero_init"].name, command=["python", "script", "--seed", "1338"])
    monkeypatch.setattr(null, "load_script", lambda rung: SimpleNamespace(
        parse_args=lambda words: SimpleNamespace(seed=int(words[1])), train=lambda args: seeds.append(args.seed)))
    for number in range(300):
        null.InThisProcess([BY_LABEL["zero_init"]], number).run([job])
    assert "manual_seed(args.seed + 10_000" in null.copy_of(BY_LABEL["zero_init"], tmp_path / "a.py").path.read_text()
    assert all(after - before >= 100
               for before, after in itertools.pairwise(sorted([*seeds, *(seed + 10_000 for seed in seeds)])))
