"""experiments/: each program finds what is known in closed form."""
import itertools
import time
from types import SimpleNamespace

import pandas
import pytest
import torch.distributed as dist
from load_script import ROOT
from log_files import MEDIAN, write_log
from matplotlib.figure import Figure
from run_script import FakeClock

from experiments.data_wait import __main__ as data_wait
from experiments.exercises import __main__ as exercises
from experiments.fair_comparison import null
from experiments.growth import __main__ as growth
from experiments.network import __main__ as network
from experiments.sharded_step import __main__ as sharded_step
from ladder.rungs.list import BY_LABEL, load_script


# ---- times and rates -------------------------------------------------------------------------------------------------

def test_network_takes_the_median_of_the_tries_after_the_first(group_of_one, monkeypatch):
    """Of each the slowest rank's."""
    dist.init_process_group("gloo")
    operations, all_reduce = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, *op: operations.append(op) or all_reduce(tensor, *op))
    readings = iter([0, 100, 200, 201, 300, 302, 400, 403, 500, 509, 600, 608])  # 100 s, then 1, 2, 3, 9, 8
    monkeypatch.setattr(time, "perf_counter", readings.__next__)
    assert network.all_reduce_seconds(1024, "cpu") == 3 and operations == [()] * 6 + [(dist.ReduceOp.MAX,)]


def test_network_prints_the_rates_of_its_times(group_of_one, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    rates = {1e6: 1e9, 25e6: 2e9}  # those of the second size, DDP's, are what a step's gradients take
    monkeypatch.setattr(network, "all_reduce_seconds", lambda n_bytes, device: n_bytes / rates[n_bytes])
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    network.main(["1", "25"])
    out = capsys.readouterr().out
    assert "    25     12.50    2.000      3.000" in out  # each of four sends 3/4 of the buffer twice
    assert f"gpt2 {497.9:18.1f} {497.9 / 2000:8.3f}" in out


def test_data_wait_is_what_lies_between_zero_grad_and_the_model(tokens, monkeypatch):
    """A loader that takes 50 ms is seen; the model's own time is not."""
    module = load_script(BY_LABEL["gradient_accumulation"])
    monkeypatch.setattr(data_wait, "time", time)  # undoes the next line
    clock = FakeClock(data_wait)
    for part, name, seconds in ((module.DataLoaderLite, "batch", 0.05), (module.GPT, "forward", 0.15)):
        setattr(part, name, clock.slow(getattr(part, name), seconds))
    flags = ["--data", str(tokens), "--model", "tiny", "-B", "1", "-T", "8", "--steps", "5", "--device", "cpu"]
    assert data_wait.median_wait(module, flags) == pytest.approx(50)


def test_sharded_step_counts_the_moments(group_of_one, monkeypatch, capsys):
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

@pytest.mark.slow
def test_answers_that_follow_from_arithmetic(capsys):
    exercises.main(["4", "qk_norm", "swiglu"])
    out = capsys.readouterr().out
    assert "gate without SiLU: 10 times the input gives 100.0 times the output" in out
    assert "constant gate: 10 times the input gives 10.0 times the output" in out
    scores = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("c_attn times")]
    assert max(scores) <= 32**0.5
    added = [list(map(float, line.split()[-3:])) for line in out.splitlines() if "added by" in line]
    growths = [most / least for least, _, most in added]  # with 16 times the layers
    assert growths == pytest.approx([4, 1, 1 / 4], rel=0.15)  # in rung 3, in rung 4, and with 1 / n


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
    record = grown("length", lambda T, rung, number: (T**2 / 1024 if rung == "rung 0" else T) * (1 + (number - 3) / 10))
    axes = Figure().subplots()
    growth.draw_times(axes, record, "length")
    curves = {line.get_label(): line for line in axes.lines}
    assert curves["rung 0"].get_xdata().tolist() == [256, 512, 1024, 2048, 4096]
    assert curves["rung 0"].get_ydata().tolist() == [64, 256, 1024, 4096, 16384]
    squared, linear = (line.get_ydata() for line in axes.lines if line.get_linestyle() == ":")
    assert squared == pytest.approx([1.15 * 64, 1.15 * 16384]) and linear == pytest.approx([1.15 * 256, 1.15 * 4096])


def test_growth_draws_the_counted_memory_through_the_measured():
    axes = Figure().subplots()
    growth.draw_memory(axes, grown("depth", lambda *point: 1.0), "depth")
    lines = {kind: [line for line in axes.lines if line.get_linestyle() == kind] for kind in ("--", "None")}
    assert len(lines["--"]) == len(lines["None"]) == 2
    for counted, measured in zip(lines["--"], lines["None"], strict=True):
        at = dict(zip(counted.get_xdata(), counted.get_ydata(), strict=True))
        assert [at[depth] for depth in measured.get_xdata()] == pytest.approx(measured.get_ydata())


def test_growth_counts_what_was_measured():
    record = pandas.read_csv(ROOT / "docs" / "growth.csv")
    for (name, value, rung), rows in record[record.curve.isin(["depth", "ranks"])].groupby(["curve", "value", "rung"]):
        counted = growth.CURVES[name].rungs[rung][2](value) / 1e9
        assert rows.peak_gb.median() == pytest.approx(counted, rel=0.15), (name, value, rung)


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
