"""Reading logs: whole, killed, damaged, or of two runs at once."""
import json
import random
import re
import shutil

import pytest
from conftest import ROOT
from log_files import MEDIAN, write_log

from ladder.count.flops import flops_per_token, mfu
from ladder.show.logs import read_log
from ladder.show.report import build_report

WHOLE = ROOT / "logs" / "reference" / "intel_xeon_amx_2_cores_B1_T1024"


@pytest.mark.parametrize("header, tail, complete", [
    ("some chatter\n", MEDIAN, True),
    ("# batch: B=4 T=1024 | steps: 3\n", MEDIAN, True),
    ("# batch: B=4 T=1024 | steps: 8\n", MEDIAN, False),  # a signal: rung 15 prints its median then, too
    ("# batch: B=4 T=1024 | steps: 3\n", "\n", False),
    ("# batch: B=4 T=1024 | steps: 3\n", "\nstep : 4 | loss: 5 | dt: 1 ms", False),  # killed while it wrote this line
])
def test_a_whole_run(header, tail, complete, tmp_path):
    run = read_log(write_log(tmp_path / "a.log", header=header, tail=tail))
    assert run.steps == [1, 2, 3] and run.complete == complete


@pytest.mark.parametrize("steps, warm_up", [(1, 0), (2, 1), (3, 1), (6, 3), (11, 5)])
def test_the_warm_up_is_the_first_half_where_no_median_line_says_otherwise(steps, warm_up, tmp_path):
    run = read_log(write_log(tmp_path / "a.log", ms=[900] * warm_up + [50] * (steps - warm_up)))
    assert (run.warm_up, run.median_ms) == (warm_up, 50)
    tail = MEDIAN.replace("steps 3-", f"steps {steps}-")
    assert read_log(write_log(tmp_path / "a.log", ms=[50] * steps, tail=tail)).warm_up == steps - 1


def test_validations_are_no_steps_and_take_no_time(tmp_path):
    """Three steps of 100 ms, a validation after the second and the third."""
    log = write_log(tmp_path / "rung_13_validation.log", ms=[100] * 3, losses=[9.0, 8.0, 7.0])
    log.write_text(re.sub("(step : ([23]) .*)", r"\1\nval : step \2 | loss: 7.\2 | time: 60.00 s", log.read_text()))
    run = read_log(log)
    assert (run.losses, run.val_steps, run.val_losses) == ([9.0, 8.0, 7.0], [2, 3], [7.2, 7.3])
    assert run.seconds_to(7.1, run.val_steps, run.val_losses) is run.seconds_to(None, run.steps, run.losses) is None
    row = build_report(tmp_path).rows[0]
    assert (row.last_val_loss, row.seconds_to_common_val_loss) == (7.3, pytest.approx(0.2))


@pytest.mark.parametrize("tokens, vocab_size", [
    ("gpt2", 50257), ("gpt2-bytes", 50257), ("bytes", 257), ("bpe-4096-0a1b2c", 4096), ("my-model", None)])
def test_mfu_counts_the_vocabulary_of_the_data(tokens, vocab_size, tmp_path):
    run = read_log(write_log(tmp_path / "baseline.log", header="# model: 4x4x128\n# batch: B=4 T=64 | steps: 3\n"
                             f"# data: my text ({tokens} tokens) | loaded 9 tokens\n"))
    assert run.vocab_size == vocab_size
    share = mfu(run, {"float32": 1e12}, 1000)
    run.name = "rung_32_grouped_query_attention"
    assert mfu(run, {"float32": 1e12}, 1000) is None  # its flags change the matrices
    assert share == (vocab_size and flops_per_token("4x4x128", 64, vocab_size=vocab_size) * 1000 / 1e12)


def test_mfu_of_ranks_counts_their_gpus(tmp_path):
    header = "# model: gpt2\n# device: {}\n# ranks: 2 | x: y\n# batch: B=4 T=1024 | steps: 3\n"
    gpu, cpu = (read_log(write_log(tmp_path / "a.log", header=header.format(device)))
                for device in ("NVIDIA H200", "AMD EPYC (1 threads)"))
    assert mfu(cpu, {"bfloat16": 1e15}, 1000) == pytest.approx(2 * mfu(gpu, {"bfloat16": 1e15}, 1000))


DAMAGED = {
    "binary.log": (bytes(range(256)), "not a text file"),
    "empty.log": (b"", "no step line"),
    "ranks.log": (b"# ranks: x\nstep : 1 | loss: 9 | dt: 1 ms\n", "'x'"),
    "two_runs.log": (b"".join(b"step : %d | loss: 9 | dt: 1 ms\n" % step for step in (1, 2, 1, 3, 2)), "two runs"),
    "machine.json": (b'{"rates": {}}', "is damaged"),
}


def test_damaged_files_are_named_and_the_others_reported(tmp_path, call):
    write_log(tmp_path / "baseline.log", tail=MEDIAN)
    for name, (content, _) in DAMAGED.items():
        (tmp_path / name).write_bytes(content)
    code, out, _ = call("report", tmp_path)
    named = out.split("! skipped: ")[1:]
    assert code == 0 and len(named) == len(DAMAGED)
    for name, (_, reason) in DAMAGED.items():
        assert sum(name in line and reason in line for line in named) == 1, (name, named)


def mutated(data, rng):
    """A file's bytes with one thing wrong with them."""
    lines = data.splitlines(keepends=True) or [b""]
    i, at = rng.randrange(len(lines)), rng.randrange(len(data) + 1)
    odd = [b"nan", b"inf", b"-1", b"0", b"1e400", b"9" * 5000, b"", b"x", b"\xff", b"\0", b" | ", b"$", b"[/b]"]
    number = rng.choice(list(re.finditer(rb"\d+(?:\.\d+)?", data)) or [re.match(b"", data)])
    return rng.choice([
        lambda: data[:at],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: b"".join(lines[:i] + lines[i + 1 :]),
        lambda: data[: number.start()] + rng.choice(odd) + data[number.end() :],
        lambda: data.replace(lines[i].split(b": ")[-1], rng.choice(odd)),
        lambda: bytes(rng.randrange(256) for _ in range(rng.randrange(200))),
        lambda: rng.choice([b"", b"{}", b"[]", b"null", b'{"rates": {"x": "y"}}', b'{"rates": {"x": 0}}']),
    ])()


def test_no_damage_ends_in_a_traceback(tmp_path, call):
    """A report says in one line that it cannot compare, or shows what is left; the numbers are valid JSON."""
    source = tmp_path / "source"
    for number in (1, 2):
        for name in ("baseline", "speedup_10_fused_adamw", "ddp_run"):
            (source / f"round_{number}").mkdir(parents=True, exist_ok=True)
            shutil.copy(WHOLE / f"round_{number}" / f"{name}.log", source / f"round_{number}")
    for name in ("machine.json", "profile.json"):
        shutil.copy(WHOLE / name, source)
    for seed in range(60):
        rng, folder = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(source, folder)
        for path in rng.sample(sorted(path for path in folder.rglob("*") if path.is_file()), 2):
            path.write_bytes(mutated(path.read_bytes(), rng))
        code, output, error = call("report", folder, *(["--json"] if seed % 2 else []))
        assert code == 0 or error.startswith("error: ") and error.count("\n") == 1, seed
        if seed % 2 and code == 0:
            json.loads(output, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_a_line_that_a_kill_cut_short_says_nothing(tmp_path):
    """Its loss would be 7, not 7.25."""
    assert read_log(write_log(tmp_path / "a.log", tail="\nval : step 3 | loss: 7")).val_losses == []
