"""python -m ladder: every verb on real short runs of the tiny model, and on everything a user can get wrong."""
import io
import itertools
import json
import random
import re
import shutil
import signal
import sys
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, new_gpt, own_settings, rung, train
from rich.console import Console

import ladder.__main__ as tool
from ladder.errors import UserError
from ladder.measure import rates, runner
from ladder.count.flops import SHAPES, flops_per_token, mfu
from ladder.scripts.lessons import print_lesson, read_lesson
from ladder.count.memory import PROCESS_BYTES, RUN_BY_DEFAULT, largest_fitting, recommend, step_bytes
from ladder.scripts.stages import BY_LABEL, BY_NAME, STAGES
from ladder.judge.compare import compare
from ladder.show.logs import PEER, read_log
from ladder.show.plots import shown_in_docs
from ladder.show.report import beyond_table, build_report, check_comparable, markdown_table, warnings, write_tables

REFERENCE = sorted(path for path in (ROOT / "logs" / "reference").iterdir() if path.is_dir())
WHOLE = max((folder for folder in REFERENCE if (folder / "round_1" / "baseline.log").exists()),
            key=lambda folder: len(list(folder.rglob("*.log"))))  # a whole ladder, in rounds


def flags(tokens):
    return ["--model", "tiny", "--device", "cpu", "--data", str(tokens), "-B", "1", "-T", "32", "--steps", "4"]


@pytest.fixture
def call(monkeypatch, capsys):
    """The tool in this process, without measuring the machine: call(words) gives (exit code, stdout, stderr)."""
    monkeypatch.setattr(tool.console, "width", 200)
    monkeypatch.setattr(runner, "run_module", lambda name, *words: json.dumps({"rates": {"float32": 1e12}}))
    handler = signal.getsignal(signal.SIGTERM)

    def call(*words):
        try:
            code = tool.main([str(word) for word in words])
        except SystemExit as stop:  # of argparse, and of the scripts' own checks
            code = stop.code if isinstance(stop.code, int) else print(stop.code, file=sys.stderr) or 1
        return code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, handler)


def is_one_error(answer, *reasons):
    code, _, error = answer
    assert code == 1 and error.startswith("error: ") and error.count("\n") == 1, answer
    return all(reason in error for reason in reasons)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tokens):
    """Two rounds of rungs 0 and 1, run by the tool in this process; the machine's rates are not measured."""
    logs = tmp_path_factory.mktemp("measured") / "logs"
    words = ["run", "--rungs", "0,1", "--repeat", 2, "--logs", logs, "--compile-mode", "none", *flags(tokens)]
    machine = json.dumps({"rates": {"float32": 1e12}, **rates.describe("cpu")})
    output = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with pytest.MonkeyPatch.context() as patch, own_settings(), redirect_stdout(output):
        patch.setattr(tool.console, "width", 200)
        patch.setattr(runner, "run_module", lambda name, *words: machine)
        assert tool.main([str(word) for word in words]) == 0
        output.flush()
    return logs, output.buffer.getvalue().decode()


MEDIAN = "\nmedian : dt: 50.00 ms | tokens/sec: 1.00 | peak memory: 1.00 GB | steps 3-3\n"


def write_log(path, ms=(100, 50, 50), losses=None, header="# batch: B=4 T=1024 | steps: 3 | seed: 1\n", tail="\n"):
    losses = losses or [10 - i for i in range(len(ms))]
    lines = [f"step : {i + 1} | loss: {losses[i]} | dt: {ms[i]} ms | tokens/sec: 1.0" for i in range(len(ms))]
    path.write_text(header + "\n".join(lines) + tail)
    return path


def test_a_log_of_a_foreign_script(tmp_path, call):
    """Step lines without headers: B, T and model come from flags, and units in the file are not believed."""
    log = write_log(tmp_path / "foreign.log", header="some chatter\n")
    run = read_log(log, B=8, T=512, model="gpt2")
    assert (run.name, run.median_ms, run.tokens_per_second) == ("foreign", 50, 8 * 512 / 0.05)
    assert read_log(log).tokens_per_second is None
    for where in ([tmp_path], ["--logs", tmp_path]):
        code, output, _ = call("report", *where, "-B", 8, "-T", 512, "--model", "gpt2")
        assert code == 0 and "81,920" in output


def test_tokens_per_millisecond_are_called_so(tmp_path, call):
    """The log of a script that reads the clock too early and divides by milliseconds: 6 * 1024 tokens in 4.5 ms."""
    path = tmp_path / "train_gpt2.log"
    path.write_text("".join(f"step : {i} | loss: 9.0 | dt: 4.50 ms | tokens/sec: 1365.50\n" for i in range(20)))
    code, output, _ = call("report", tmp_path, "-B", 6, "-T", 1024, "--model", "gpt2")
    assert code == 0 and "1,365.5 tokens/sec where B * T * ranks / dt is 1,365,333.3: " in output
    assert "tokens per millisecond" in output and "no MFU; --peak-tflops can stand in" in output
    path.write_text(path.read_text().replace("1365.50", "682666.67"))
    assert "off by a factor of 2" in call("report", tmp_path, "-B", 6, "-T", 1024)[1]
    path.write_text(path.read_text().replace("682666.67", "1365333.33"))
    assert "B * T" not in call("report", tmp_path, "-B", 6, "-T", 1024)[1]


def test_a_log_cut_in_the_middle_of_a_line(tmp_path):
    log = write_log(tmp_path / "cut.log", tail="\nstep : 4 | loss: 5 | dt: 1")
    assert read_log(log).steps == [1, 2, 3] and not read_log(log).complete


def test_a_run_that_a_signal_stopped_is_not_complete(tmp_path):
    """Rung 15 prints its median then, too: the header's number of steps decides."""
    header = "# batch: B=4 T=1024 | steps: {} | seed: 1\n"
    assert read_log(write_log(tmp_path / "a.log", header=header.format(3), tail=MEDIAN)).complete
    assert not read_log(write_log(tmp_path / "a.log", header=header.format(8), tail=MEDIAN)).complete
    assert not read_log(write_log(tmp_path / "a.log", header=header.format(3))).complete


def test_the_median_is_the_log_s_own(tmp_path):
    """On a GPU the scripts leave out at least 3 seconds; their median line says which steps count."""
    tail = MEDIAN.replace("3-3", "6-8")
    log = read_log(write_log(tmp_path / "a.log", ms=[900] * 5 + [50, 51, 52], tail=tail))
    assert (log.warm_up, log.median_ms) == (5, 51)


def test_the_first_step_is_cold_or_warm(tmp_path, call):
    lines = {"a": "\n# first step: 0.10 s | graphs compiled: 3, from the cache: 0\n",
             "b": "\n# first step: 0.50 s | graphs compiled: 0, from the cache: 3\n",
             "c": "\n# first step: 0.10 s | graphs compiled: 0, from the cache: 0\n", "d": "\n"}
    logs = {name: write_log(tmp_path / f"{name}.log", tail=tail) for name, tail in lines.items()}
    assert [read_log(log).start for log in logs.values()] == ["cold", "warm", None, None]
    for number, name in ((1, "a"), (2, "b")):
        (tmp_path / f"round_{number}").mkdir()
        shutil.copy(logs[name], tmp_path / f"round_{number}" / "speedup_05_compile.log")
    row = [row for row in build_report(tmp_path).rows if row.name == "speedup_05_compile"][0]
    assert (row.cold_first_step_s, row.warm_first_step_s) == (0.1, 0.1)
    output = " ".join(call("report", tmp_path)[1].split())
    assert "0.1 cold, 0.1 warm" in output and "1st step s: cold compiled its graphs, warm found them in" in output
    shutil.rmtree(tmp_path / "round_1")
    shutil.rmtree(tmp_path / "round_2")
    logs["a"].unlink()
    logs["b"].unlink()
    assert "compiled" not in call("report", tmp_path)[1]


def test_logs_of_several_runs_are_not_taken_for_rounds(tmp_path, call):
    for name in ("one_run", "another"):
        (tmp_path / name).mkdir()
        write_log(tmp_path / name / "baseline.log")
    assert is_one_error(call("report", tmp_path), "holds no logs")


@pytest.mark.parametrize("content, reason", [
    (None, "no such log"), (b"", "no step line"), (b"\xff\x00\xfe" * 50, "not a text file"),
    (b"hello\n", "no step line"),
])
def test_logs_that_are_none(content, reason, tmp_path, call):
    log = tmp_path / "x.log"
    if content is not None:
        log.write_bytes(content)
    good = write_log(tmp_path / "good.log")
    assert is_one_error(call("compare", good, log), reason)


def test_a_rung_without_a_step_does_not_hide_the_others(tmp_path):
    write_log(tmp_path / "baseline.log")
    (tmp_path / "speedup_02_tf32.log").write_text("# script: speedup_02_tf32.py\n")
    report = build_report(tmp_path)
    assert [row.name for row in report.rows] == ["baseline"]
    assert any("speedup_02_tf32.log has no step line" in warning for warning in warnings(report))


def test_damaged_files_are_named_and_the_others_reported(tmp_path, call):
    write_log(tmp_path / "baseline.log", tail=MEDIAN)
    (tmp_path / "binary.log").write_bytes(bytes(range(256)))
    (tmp_path / "folder.log").mkdir()
    write_log(tmp_path / "ranks.log", header="# batch: B=4 T=1024 | steps: 3\n# ranks: x\n")
    write_log(tmp_path / "no_ranks.log", header="# batch: B=4 T=1024 | steps: 3\n# ranks: 0\n")
    write_log(tmp_path / "still.log", ms=(100, 0, 50))
    (tmp_path / "machine.json").write_text('{"rates": {}}')
    code, output, _ = call("report", tmp_path)
    assert code == 0 and "81,920" in output
    lines = [line for line in output.splitlines() if line.startswith("! skipped: ")]
    named = {"binary.log": "not a text file", "folder.log": "is a folder", "ranks.log": "'x' is not a number",
             "no_ranks.log": "'0' is not a number", "still.log": "0.0 ms", "machine.json": "is damaged"}
    for name, why in named.items():
        assert sum(f"/{name} " in line and why in line for line in lines) == 1, output
    assert len(lines) == 6


def mutated(data, rng):
    """A file's bytes with one thing wrong with them."""
    lines = data.splitlines(keepends=True) or [b""]
    i, at = rng.randrange(len(lines)), rng.randrange(len(data) + 1)
    odd = [b"nan", b"inf", b"-1", b"0", b"1e400", b"9" * 5000, b"", b"x", b"\xff", b"\0", b" | ", b"$", b"[/b]"]
    not_machines = [b"", b"{}", b"[]", b"null", b'{"rates": 1}', b'{"rates": {"x": "y"}}', b'{"rates": {"x": 0}}']
    numbers = list(re.finditer(rb"\d+(?:\.\d+)?", data)) or [re.match(b"", data)]
    number = rng.choice(numbers)
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: b"".join(lines[:i] + lines[i + 1 :]),
        lambda: b"".join([*lines[:i], lines[i], *lines[i:]]),
        lambda: data[: number.start()] + rng.choice(odd) + data[number.end() :],
        lambda: data.replace(lines[i].split(b": ")[-1], rng.choice(odd)),
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
        lambda: rng.choice(not_machines),
    ])()


def test_no_damage_ends_in_a_traceback(tmp_path, call):
    """A report says in one line that it cannot compare, or shows what is left; the numbers are valid JSON."""
    source = tmp_path / "source"
    shutil.copytree(WHOLE / "round_1", source / "round_1")
    shutil.copytree(WHOLE / "round_2", source / "round_2")
    for name in ("machine.json", "profile.json"):
        shutil.copy(WHOLE / name, source)
    for path in source.glob("round_*/speedup_0[1-9]*.log"):
        path.unlink()
    for seed in range(100):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        shutil.copytree(source, folder)
        (folder / "round_2" / "peer_transformers.log").rename(folder / "ddp_run.log")
        for path in rng.sample(sorted(path for path in folder.rglob("*") if path.is_file()), 2):
            path.write_bytes(mutated(path.read_bytes(), rng))
        code, output, error = call("report", folder, *(["--json"] if seed % 2 else []))
        assert code == 0 or is_one_error((code, output, error)), seed
        if seed % 2 and code == 0:
            json.loads(output, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_different_machines_are_not_mixed(tmp_path, call):
    for name, device in (("a", "H200"), ("b", "T4")):
        header = f"# script: {name}.py\n# device: {device} | torch: 2\n# batch: B=4 T=1024 | steps: 3\n"
        write_log(tmp_path / f"{name}.log", header=header)
    assert is_one_error(call("report", tmp_path), "different device")


def test_impossible_speeds_are_marked(tmp_path):
    write_log(tmp_path / "baseline.log", ms=(4.5,) * 12, header="# model: gpt2\n# batch: B=4 T=1024 | steps: 12\n")
    (tmp_path / "machine.json").write_text(json.dumps({"rates": {"bfloat16": 119e12}}))
    report = build_report(tmp_path)
    assert report.rows[0].mfu > 5
    assert any("impossible measurement" in warning for warning in warnings(report))


@pytest.mark.parametrize("devices, refused", [
    (("EPYC (2 threads)", "cpu"), False), (("EPYC (2 threads)", "EPYC (1 threads)"), False),
    (("EPYC (2 threads)", "Xeon (2 threads)"), True)])
def test_a_cpu_that_nobody_named_may_be_the_same(devices, refused, tmp_path):
    """A script alone does not name it, nor does the log of one that was stopped; a resumed run has both."""
    for stage, device in zip(STAGES[:2], devices, strict=True):
        header = f"# script: {stage.name}.py\n# device: {device}\n# batch: B=1 T=8\n"
        write_log(tmp_path / f"{stage.name}.log", header=header)
    if refused:
        with pytest.raises(UserError, match="different device"):
            build_report(tmp_path)
    else:
        assert len(build_report(tmp_path).rows) == 2


@pytest.mark.parametrize("device, ms, warned", [
    ("NVIDIA A100", [2000, *[100] * 19], True), ("NVIDIA A100", [2200, *[100] * 19], False),
    ("EPYC (2 threads)", [2000, *[100] * 19], False)])
def test_a_short_warm_up_of_a_gpu_is_said(device, ms, warned, tmp_path):
    header = f"# script: baseline.py\n# device: {device}\n# batch: B=4 T=1024\n"
    write_log(tmp_path / "baseline.log", ms=ms, header=header)
    assert any("less than 3 s" in warning for warning in warnings(build_report(tmp_path))) == warned


def test_flops_in_closed_form():
    """PaLM's formula on GPT-2's published shapes; the scripts' sizes are the same."""
    assert {name: tuple(map(int, shape.split("x"))) for name, shape in rung(0).MODELS.items()} == SHAPES
    n_matrix = 50257 * 768 + 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    assert flops_per_token("gpt2", 1024) == 6 * n_matrix + 12 * 12 * 768 * 1024
    assert flops_per_token("gpt2", 1024, causal=True) == 6 * n_matrix + 6 * 12 * 768 * 1024
    assert flops_per_token("unknown", 1024) is None
    assert flops_per_token("4x4x128", 64, vocab_size=257) == 6 * (257 * 128 + 4 * 12 * 128**2) + 12 * 4 * 128 * 64
    assert largest_fitting("4x4x128", 64, ["10"], 4e9) > largest_fitting("gpt2", 64, ["10"], 4e9) > 0


@pytest.mark.parametrize("tokens, vocab_size", [
    ("gpt2", 50257), ("gpt2-bytes", 50257), ("bytes", 257), ("bpe-4096", 4096), ("my-model", None)])
def test_mfu_counts_the_vocabulary_of_the_data(tokens, vocab_size, tmp_path):
    write_log(tmp_path / "baseline.log", header="# model: 4x4x128\n# batch: B=4 T=64 | steps: 3\n"
                                                f"# data: my text ({tokens} tokens) | loaded 9 tokens\n")
    run = read_log(tmp_path / "baseline.log")
    assert run.vocab_size == vocab_size
    share = mfu(run, {"float32": 1e12}, 1000)
    assert share == (vocab_size and flops_per_token("4x4x128", 64, vocab_size=vocab_size) * 1000 / 1e12)


def test_compare_in_words(tmp_path, tokens, call):
    small = ("-B", 1, "-T", 64, "--steps", 12)
    tied = read_log(train(rung(1), tmp_path, tokens, *small))
    tf32 = read_log(train(rung(2), tmp_path, tokens, *small))
    base = read_log(train(rung(0), tmp_path, tokens, *small))
    assert "The same losses" in compare(tied, tf32).sentences[0]
    assert "meant to change them" in compare(base, tied).sentences[0]
    tf32.losses[3] += 1
    assert "NOT the same losses" in compare(tied, tf32).sentences[0]

    slow = read_log(write_log(tmp_path / "slow.log", ms=[100, 101, 102, 100] * 5))
    fast = read_log(write_log(tmp_path / "fast.log", ms=[50, 51, 52, 50] * 5))
    assert "larger than the noise" in compare(slow, fast).sentences[-1]
    assert compare(slow, fast).faster == pytest.approx(2, rel=0.02)
    noisy = read_log(write_log(tmp_path / "noisy.log", ms=[60, 90, 120, 150] * 5))
    assert "within the noise" in compare(slow, noisy).sentences[-1]
    code, output, _ = call("compare", tmp_path / "slow.log", tmp_path / "fast.log")
    assert code == 0 and "2.0" in output and "larger than the noise" in output


def test_compare_does_not_judge_what_does_not_compare(tmp_path):
    """Of different work neither the speed nor the losses; of other data or seeds not the losses; of devices both."""
    first = "# model: gpt2\n# device: T4\n# batch: B=4 T=1024 | steps: 20 | seed: 1\n# data: a (gpt2 tokens)\n"

    def sentences(change):
        one = read_log(write_log(tmp_path / "a.log", ms=[100] * 20, header=first, tail=MEDIAN))
        other = read_log(write_log(tmp_path / "b.log", ms=[50] * 20, header=first.replace(*change), tail=MEDIAN))
        result = compare(one, other)
        return " ".join(result.sentences), result

    text, result = sentences(("x", "x"))
    assert "larger than the noise" in text and result.faster == pytest.approx(2) and "Different" not in text
    for change, what in ((("gpt2\n", "tiny\n"), "model"), (("B=4", "B=8"), "B"), (("T=1024", "T=512"), "T")):
        text, result = sentences(change)
        assert f"Different {what}: " in text and f"with a different {what}: this does not measure" in text, text
        assert "noise" not in text and "The losses do not compare step by step" in text
    assert "4.00 times" in sentences(("B=4", "B=8"))[0]
    for change, what in ((("a (gpt2", "b (gpt2"), "data"), (("seed: 1", "seed: 2"), "seed")):
        text, _ = sentences(change)
        assert f"The losses do not compare step by step: different {what}." in text and "larger than the noise" in text
    text, _ = sentences(("T4", "H200"))
    assert "Different device: T4 against H200." in text and "larger than the noise" in text
    assert "do not compare" not in text


def test_compare_counts_the_tokens_of_all_ranks(tmp_path):
    """Twice the tokens in the same time, to within the noise of a step, is twice the speed beyond the noise."""
    header = "# batch: B=4 T=1024 | steps: 20\n# ranks: {}\n"
    one, two = (read_log(write_log(tmp_path / f"{ranks}.log", ms=[100, 105, 95, 101] * 5, header=header.format(ranks)))
                for ranks in (1, 2))
    result = compare(one, two)
    assert result.faster == pytest.approx(2) and "larger than the noise" in result.sentences[-1]
    assert "Different tokens per step: 4096 against 8192." in result.sentences
    half = read_log(write_log(tmp_path / "half.log", ms=[100] * 20, header=header.format(2).replace("B=4", "B=2")))
    text = " ".join(compare(one, half).sentences)
    assert "Different B: 4 against 2." in text and "The losses of the same tokens" in text and "per step" not in text


@pytest.mark.parametrize("ms, verdict", [
    ((500,), "too few steps to say"), ((500, *[50] * 17), "too few steps to say"),  # the first half warms up
    ((500, *[50] * 18), "larger than the noise"),
])
def test_compare_needs_steps_after_the_warm_up(ms, verdict, tmp_path):
    one = read_log(write_log(tmp_path / "one.log", ms=ms))
    other = read_log(write_log(tmp_path / "other.log", ms=[2 * one for one in ms]))
    result = compare(one, other)
    assert verdict in result.sentences[-1] and result.beyond_noise == (verdict == "larger than the noise")


ALLOCATORS = "# script: {}.py\n# device: {} | allocator: {}\n# batch: B=4 T=1024 | steps: 20 | seed: 1\n"


@pytest.mark.parametrize("device, one, other, different", [
    ("EPYC (2 threads)", "malloc", "tcmalloc", "malloc against tcmalloc"),
    ("EPYC (2 threads)", "", "tcmalloc", "unknown against tcmalloc"), ("EPYC (2 threads)", "malloc", "malloc", None),
    ("NVIDIA H200", "", "torch", None),
])
def test_compare_names_different_allocators(device, one, other, different, tmp_path):
    logs = [read_log(write_log(tmp_path / f"{side}.log", ms=[ms] * 20, tail=MEDIAN,
                               header=ALLOCATORS.format("baseline", device, name).replace(" | allocator: \n", "\n")))
            for side, ms, name in (("a", 100, one), ("b", 50, other))]
    text = " ".join(compare(*logs).sentences)
    assert "The same losses" in text  # which no allocator changes
    assert (f"Different allocator: {different}." in text) == bool(different) == ("may be the allocator's" in text)


def test_a_report_names_its_allocators_and_warns_of_several(tmp_path, call):
    for number, names in enumerate((("malloc", "malloc"), ("malloc", "tcmalloc")), 1):
        (tmp_path / f"round_{number}").mkdir()
        for script, name in zip(("baseline", "speedup_01_weight_tying"), names, strict=True):
            write_log(tmp_path / f"round_{number}" / f"{script}.log", header=ALLOCATORS.format(script, "EPYC", name))
    output = " ".join(call("report", tmp_path)[1].split())
    assert "! the runs had different memory allocators (malloc: baseline, weight tying; tcmalloc: weight " in output
    assert "EPYC (allocator: malloc and tcmalloc)" in output
    output = " ".join(call("report", tmp_path / "round_1")[1].split())
    assert "allocators" not in output and "EPYC (allocator: malloc), unknown model" in output


def test_a_ratio_within_the_noise_is_called_so(tmp_path, monkeypatch, call):
    """Rungs 11, 12 and 13: the second as fast as the first, the third faster than the spread of either."""
    names = [BY_LABEL[label].name for label in ("11", "12", "13")]
    for number, times in enumerate(((100, 98, 50), (110, 109, 52)), 1):
        folder = tmp_path / "machine" / f"round_{number}"
        folder.mkdir(parents=True)
        for name, ms in zip(names, times, strict=True):
            write_log(folder / f"{name}.log", ms=[ms] * 8, header="# batch: B=4 T=1024 | steps: 8\n", tail=MEDIAN)
    report = build_report(tmp_path / "machine")
    assert [row.before_within_noise for row in report.rows] == [None, True, False]
    table = beyond_table(report)
    assert "| 1.01 (noise) |" in table and "| 2.03 |" in table and "the spreads of the two rungs overlap" in table
    assert "1.01 (noise)" in call("report", tmp_path / "machine")[1]
    monkeypatch.setattr(tool, "REFERENCE", tmp_path)
    assert ("105 (100–110) -> 104 (98–109) ms/step (1.01 x the tokens/sec, within the noise: the spreads overlap)"
            in call("diff", 12)[1])
    assert "104 (98–109) -> 51 (50–52) ms/step (2.03 x the tokens/sec), 1.00" in call("diff", 13)[1]


def test_compare_does_not_pass_over_nan(tmp_path):
    logs = [read_log(write_log(tmp_path / f"{name}.log", losses=losses))
            for name, losses in (("speedup_04_residual_scaling", [3, 2, 1]), ("speedup_05_compile", [3, 2, "nan"]))]
    assert compare(*logs).sentences[-2].startswith("NOT the same losses")


def test_compare_knows_what_lies_between_two_rungs(tmp_path):
    def verdict(one, other, losses):
        logs = [read_log(write_log(tmp_path / f"{BY_LABEL[label].name}.log", losses=loss, tail=MEDIAN))
                for label, loss in ((one, None), (other, losses))]
        return compare(*logs).sentences[0]

    nearly = [10.0001, 9.001, 8.0]
    assert verdict("1", "3", nearly).startswith("The same losses") and "0.15" in verdict("1", "3", nearly)
    assert verdict("16", "11", nearly).startswith("The same losses")  # in either order
    assert verdict("13", "14", [10, 9, 7]).startswith("NOT the same losses")
    for one, other in (("3", "4"), ("10", "ddp"), ("2", "9"), ("ddp", "11")):
        assert "meant to change them" in verdict(one, other, nearly)


def test_csv_and_json(measured, call):
    logs, _ = measured
    code, output, _ = call("report", logs, "--json")
    report = json.loads(output)[0]
    assert code == 0 and "PaLM" in report["mfu"]
    assert [row["name"] for row in report["rows"]] == ["baseline", "speedup_01_weight_tying"]
    row = build_report(logs).rows[1]
    for name in ("ms", "mfu", "mfu_causal", "last_loss", "last_val_loss"):
        assert report["rows"][1][name] == pytest.approx(getattr(row, name))
    lines = call("report", logs, "--csv")[1].splitlines()
    assert len(lines) == 3 and lines[0].startswith("machine,name,title,ms,") and lines[1].startswith("logs,baseline,")


def test_plots_are_pictures(measured, tmp_path, call):
    logs, _ = measured
    code, _, error = call("report", logs, "--png", tmp_path)
    assert code == 0, error
    pictures = sorted(tmp_path.glob("*.png"))
    assert [p.name for p in pictures] == ["logs_ladder.png", "logs_loss.png", "logs_memory.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in pictures)


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("logs/reference/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)


def test_every_picture_is_shown_somewhere():
    assert {path.name for path in ROOT.glob("docs/*.png")} == shown_in_docs(ROOT)


def test_the_committed_tables_are_the_reference_logs(tmp_path, measured):
    """README.md and docs/ say what the committed logs say."""
    (tmp_path / "docs").mkdir()
    tables = ["README.md", "docs/results.md", "docs/long_runs.md", "docs/race.md"]
    for file in tables:
        shutil.copy(ROOT / file, tmp_path / file)
    write_tables([build_report(folder) for folder in REFERENCE], tmp_path)
    for file in tables:
        assert (tmp_path / file).read_text() == (ROOT / file).read_text(), "run python -m ladder report --readme"
    table = markdown_table(build_report(measured[0]))
    assert "| 1 | [`speedup_01_weight_tying.py`](speedup_01_weight_tying.py) | weight tying |" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and {row.count("|") for row in rows} == {12} and "PaLM" in table
    (tmp_path / "docs" / "race.md").write_text("no markers")
    with pytest.raises(UserError, match="docs/race.md must hold"):
        write_tables([], tmp_path)


def test_seconds_to_a_validation_loss(tmp_path, call):
    """Three steps of 100 ms, a validation after the second and the third; the time of validating does not count."""
    lines = ["# batch: B=1 T=10", "# model: tiny | parameters: 1"]
    for step, loss in ((1, 9.0), (2, 8.0), (3, 7.0)):
        lines.append(f"step : {step} | loss: {loss} | dt: 100.00 ms | tokens/sec: 100.00")
        lines += [f"val : step {step} | loss: {loss + 0.5} | time: 60.00 s"] if step > 1 else []
    (tmp_path / "rung_13_validation.log").write_text("\n".join(lines) + "\n")
    run = read_log(tmp_path / "rung_13_validation.log")
    assert (run.val_steps, run.val_losses) == ([2, 3], [8.5, 7.5])
    assert run.losses == [9.0, 8.0, 7.0]  # a validation is not a step
    assert run.seconds_to_val(8.5) == pytest.approx(0.2) and run.seconds_to_val(7.4) is None
    row = build_report(tmp_path).rows[0]
    assert (row.last_val_loss, row.seconds_to_common_val_loss) == (7.5, pytest.approx(0.3))
    assert "| 7.000 | 7.500 |" in beyond_table(build_report(tmp_path))
    shown = call("report", tmp_path)[1]
    assert "val loss" in shown and "s to val 7.50" in shown
    shown = " ".join(shown.split())
    assert "s to 7.00: seconds to the first step with this loss, the lowest that all reach" in shown
    assert "s to val 7.50: seconds to the first validation with this loss" in shown
    assert "s to 7.00" not in beyond_table(build_report(tmp_path))  # which has no such column


def test_reference_logs_are_possible():
    assert REFERENCE
    for folder in REFERENCE:
        report = build_report(folder)
        check_comparable(report.runs, folder)
        for rounds in report.runs.values():
            for run in rounds:
                assert run.complete and run.name in {*BY_NAME, PEER}
                assert not report.machine or 0 < mfu(run, report.machine["rates"], run.tokens_per_second) < 1


RECOMPUTING = list(BY_LABEL)[list(BY_LABEL).index("16") :]


def test_memory_model_against_measured_peaks():
    """Within 30 % for the rungs that recompute nothing, on every reference machine, as one process."""
    checked = set()
    for folder in REFERENCE:
        for name, rounds in build_report(folder).runs.items():
            label = BY_NAME[name].label if name in BY_NAME else None
            if label not in (None, "ddp", *RECOMPUTING):
                for run in rounds:
                    expected = step_bytes(run.model, run.B, run.T, label) / 1e9
                    assert run.peak_memory_gb == pytest.approx(expected, rel=0.3)
                    checked.add(label)
    assert {"0", "5", "10", "14"} <= checked


def test_memory_model_against_what_autograd_keeps():
    """The bytes of all tensors that the baseline's forward pass saves, its gradients of the logits left out."""
    module, B, T = rung(0), 2, 128
    model = new_gpt(module)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    x = torch.randint(0, 50257, (B, T))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x, x)
    gradients = 8 * B * T * 50257
    expected = step_bytes("tiny", B, T, "0") - step_bytes("tiny", 0, T, "0") - gradients
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("GB", [8, 16, 24, 40, 80, 141])
def test_the_recommended_batch_fits_every_rung(GB):
    model, B, T = recommend(GB * 1e9, accelerator=True)
    assert (model, T) == ("gpt2", 1024)
    worst = max(step_bytes(model, B, T, label) for label in RUN_BY_DEFAULT)
    assert worst <= 0.8 * GB * 1e9
    assert B == 64 or max(step_bytes(model, 2 * B, T, label) for label in RUN_BY_DEFAULT) > 0.8 * GB * 1e9
    assert PROCESS_BYTES < step_bytes("tiny", 1, 32, "10") < step_bytes("tiny", 1, 32, "0")


@pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.label)
def test_lessons_are_the_diff(stage):
    """Applying a lesson's rows to the old file gives the new one, and the marks lie inside the lines."""
    before, after = BY_LABEL[stage.before].path.read_text(), stage.path.read_text()
    lesson = read_lesson(before, after)
    new, old = after.splitlines(), before.splitlines()
    assert lesson.title in after and lesson.added + lesson.removed > 0
    for hunk in lesson.hunks:
        for left, right in hunk:
            assert left is None or old[left.number - 1] == left.text
            assert right is None or new[right.number - 1] == right.text
            for line in (left, right):
                assert line is None or all(0 <= a < b <= len(line.text) for a, b in line.marks)
    shown = {right.text for hunk in lesson.hunks for _, right in hunk if right is not None and right.changed}
    body = after.split('"""', 2)[2]
    missing = {line for line in body.splitlines() if line.strip()} - set(before.splitlines())
    assert missing <= shown


def test_diff_shows_text_change_and_effect(call):
    code, output, _ = call("diff", "06")
    assert code == 0 and "Rung 6, flash attention" in output
    assert "+         y = F.scaled_dot_product_attention(q, k, v, is_causal=True)" in output
    assert "-         att = F.softmax(att, dim=-1)" in output
    assert "Measured: " in output and "ms/step" in output
    assert "+ " in call("diff", "ddp", "rung_12_prefetch.py")[1] and "@@" not in call("diff", 0)[1]
    for wrong in (["99"], ["x"], ["1", "2", "3"]):
        assert is_one_error(call("diff", *wrong))


def test_diff_fills_the_lines_of_a_narrow_terminal():
    """A line ends where the next word would no longer fit; code keeps its lines."""
    for label, code in (("20", None), ("16", "    python beyond/rung_16_gradient_checkpointing.py -B 16 --recompute")):
        before, after = (BY_LABEL[name].path.read_text(encoding="utf-8") for name in (BY_LABEL[label].before, label))
        console = Console(width=80, record=True, file=io.StringIO())
        print_lesson(read_lesson(before, after), console)
        text = console.export_text().split("@@")[0]
        for line, following in itertools.pairwise(text.splitlines()):
            if line[:1].strip() and following[:1].strip():  # not code
                assert len(line.rstrip()) + 1 + len(following.split()[0]) > 80
        assert code is None or code in text


def test_without_folders_each_output_shows_its_own(tmp_path, monkeypatch, call):
    """One's own newest run in the table and the plots, the reference machines in page and README."""
    made = {}
    monkeypatch.setattr(tool, "RUNS", tmp_path)
    (tmp_path / "mine").mkdir()
    write_log(tmp_path / "mine" / "baseline.log", tail=MEDIAN)
    (tmp_path / "mine" / "machine.json").write_text('{"rates": {"x": 1}}')

    def maker(kind):
        def make(reports, *where):
            made[kind] = [report.name for report in reports]
            return where[0].write_text("") if kind == "html" else []

        return make

    monkeypatch.setitem(sys.modules, "ladder.show.plots", SimpleNamespace(
        write_plots=maker("png"), shown_in_docs=lambda root: set()))
    monkeypatch.setitem(sys.modules, "ladder.show.page", SimpleNamespace(write_page=maker("html")))
    monkeypatch.setattr("ladder.show.report.write_tables", maker("readme"))
    own, reference, page = ["mine"], [folder.name for folder in REFERENCE], ["--html", tmp_path / "page.html"]
    for words, expected in (
        (["--png", "x"], {"png": own}),
        (["--png", "x", *page], {"png": own, "html": reference}),
        (page, {"html": reference}),
        (["--readme", *page, "--png", "x"], {"readme": reference, "html": reference, "png": reference}),
        ([REFERENCE[0], "--png", "x", *page], {"png": reference[:1], "html": reference[:1]}),
    ):
        made.clear()
        assert call("report", *words)[0] == 0 and made == expected, words
    assert json.loads(call("report", "--json", *page)[1])[0]["name"] == "mine"
    assert "Without LOG_FOLDER" in call("report", "--help")[1]


def test_mfu_of_ranks_counts_their_gpus(tmp_path):
    header = "# model: gpt2\n# device: {}\n# ranks: 2 | x: y\n# batch: B=4 T=1024 | steps: 3\n"
    gpu = read_log(write_log(tmp_path / "a.log", header=header.format("NVIDIA H200")))
    cpu = read_log(write_log(tmp_path / "b.log", header=header.format("AMD EPYC (1 threads)")))
    rates = {"bfloat16": 1e15}
    assert mfu(cpu, rates, 1000) == pytest.approx(2 * mfu(gpu, rates, 1000))
