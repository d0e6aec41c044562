"""What `train` does in each rung: five steps, seen through torch's own hooks, on a fake clock and in the log.

In bfloat16, which a CPU without the instructions emulates. Rungs whose `train` is that of the rung before are left out.
"""
import argparse
import contextlib
import functools
import io
import math
import re
import sys

import numpy as np
import pytest
import torch
from load_script import builds_on, known_flags, new_gpt, rung, rungs_that_change, validates
from log_files import losses, read_steps
from run_script import FakeClock, train
from torch.nn import functional as F
from watch_training import norm_of, watch

from ladder.rungs.list import BY_LABEL

B, T, N_STEPS = 2, 32, 5
SHORT = {  # as far as a rung has the flag
    "B": B, "T": T, "steps": N_STEPS, "total_batch": B * T, "val_sequences": 2, "max_lr": 2e-3, "warmup_steps": 2,
    "muon_lr": 0.01, "decay_share": 0.6, "dropout": 0, "seed": 7,
}
# What one step costs on the fake clock: (seconds, part).
STEP_SECONDS = {"batch": 1, "forward": 10, "synchronize": 100}
ITEM_SECONDS = 1000  # of reading a number of the device, which belongs after the step
EACH = pytest.mark.parametrize("label", rungs_that_change(
    "train", "optimizer_step", "DataLoaderLite", "GPT.configure_optimizers", "Checkpoints"))


def from_rung(first):
    """The rungs that build on one."""
    return pytest.mark.parametrize("label", [label for label in EACH.args[1] if builds_on(label, first)])


def mode_of(label):
    """Of --compile-mode: one that is not the default."""
    return "max-autotune" + "-no-cudagraphs" * (builds_on(label, "ddp") or builds_on(label, "cuda_graphs"))


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, byte_tokens):
    """short_run(label): what five steps of that rung do, its log as `lines` and `steps`, what it printed, compiled as.

    From rung 5 on it is told to compile, and what it compiles stays as it is.
    """
    @functools.cache
    def run(label):
        module = rung(label)
        module.autocast_dtype = {"cpu": torch.bfloat16}.__getitem__
        clock = FakeClock(module)
        module.GPT.forward = clock.slow(module.GPT.forward, STEP_SECONDS["forward"])
        batch = module.DataLoaderLite.batch
        slow_batch = clock.slow(batch, STEP_SECONDS["batch"])
        module.DataLoaderLite.batch = lambda loader, i: (
            batch if i in getattr(loader, "prefetched", ()) else slow_batch)(loader, i)
        output, read, modes = io.StringIO(), torch.Tensor.item, []

        def item(tensor):
            clock.now += ITEM_SECONDS * (sys._getframe(1).f_code.co_filename == module.__file__)  # not an optimizer's
            return read(tensor)

        with pytest.MonkeyPatch.context() as patch, watch() as seen, contextlib.redirect_stdout(output):
            patch.setattr(torch.Tensor, "item", item)
            patch.setattr(torch.cpu, "synchronize", clock.slow(torch.cpu.synchronize, STEP_SECONDS["synchronize"]))
            patch.setattr(torch, "compile", lambda function, mode=None: modes.append(mode) or function)
            flags = known_flags(module, **SHORT)
            seen.log = train(module, tmp_path_factory.mktemp("run"), byte_tokens, *flags, compile_mode=mode_of(label))
        seen.modes = modes
        seen.printed, seen.lines = output.getvalue().splitlines(), seen.log.read_text().splitlines()
        seen.steps = read_steps(seen.log)
        return seen

    return run


BFLOAT16_TOLERANCE = 0.01  # it keeps 8 bits: each activation is off by up to 0.2 %, and so is a loss of about 5.6

# The list of rungs says which of them keep the losses of the rung before. In an eager run on a CPU these also do, for
# it has one rank and one micro-step; float8 needs a GPU; nothing is dropped, and the text is one document; long_run
# learns as zero_init does, and so does sampled_softmax, which draws all 257 rows.
ALIKE_HERE = ["10", "ddp", "gradient_accumulation", "fp8", "dropout", "documents_apart", "long_run", "fsdp",
              "sampled_softmax"]
# Or the decay differs (0.1, not torch's 0.01), by at most 2e-4 of a weight a step.
ROUNDED = ["3", "6", "chunked_cross_entropy", "10", "long_run", "bf16_residual", "cuda_graphs", "sampled_softmax"]


@pytest.mark.parametrize("label", [
    label for label, entry in BY_LABEL.items() if entry.same_losses is not None or label in ALIKE_HERE])
def test_a_rung_learns_as_the_one_before(label, short_run):
    tolerance = BFLOAT16_TOLERANCE if label in ROUNDED else 0
    before, after = losses(short_run(BY_LABEL[label].starts[-1].label).log), losses(short_run(label).log)
    assert after == pytest.approx(before, abs=tolerance, rel=0) and len(after) == N_STEPS
    assert abs(before[-1] - before[0]) > 0.02  # the weights moved, so the backward pass was compared, too


def test_five_steps_of_the_baseline_are_those_of_a_plain_loop(short_run, byte_tokens):
    torch.manual_seed(7)
    model = new_gpt(rung("0"), vocab_size=257)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.999), weight_decay=0.01)
    ids, expected = torch.from_numpy(np.fromfile(byte_tokens / "train.bin", dtype="<u2").astype(np.int64)), []
    for start in range(0, N_STEPS * B * T, B * T):
        loss = F.cross_entropy(model(ids[start : start + B * T].view(B, T)).flatten(0, 1), ids[start + 1 :][: B * T])
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses(short_run("0").log) == pytest.approx(expected, abs=2e-6)


@EACH
def test_no_step_finds_the_gradients_of_the_one_before(label, short_run):
    assert short_run(label).leftover == [0] * N_STEPS


@EACH
def test_header_and_steps(label, short_run, byte_tokens):
    run = short_run(label)
    header = run.lines[:13]
    assert run.printed == run.lines  # printed and written alike
    assert header[0] == f"# script: {BY_LABEL[label].path.name}"
    assert re.fullmatch(r"# model: tiny \| parameters: [\d,]{7,}", header[1])
    precision = "bfloat16 autocast" if builds_on(label, "3") else {
        "2": "float32 (no TF32 on this device: no effect)"}.get(label, "float32")
    assert header[2] == f"# device: cpu | torch: {torch.__version__} | precision: {precision}"
    assert f"# batch: B={B} T={T} | steps: {N_STEPS} | seed: 7" in header
    n_tokens = (byte_tokens / "train.bin").stat().st_size // 2
    windows = (n_tokens - 1) // T - 1
    epoch = math.ceil(windows / B) if builds_on(label, "shuffled_windows") else (n_tokens - 1) // (B * T)
    assert f"# data: made up (bytes tokens) | loaded {n_tokens} tokens | 1 epoch = {epoch} batches" in header
    assert [note for first, note in NOTES.items() if builds_on(label, first) and note not in header] == []
    assert [line for line in run.lines if "signal" in line] == []  # nor did anything stop it
    assert [step["step"] for step in run.steps] == list(range(1, N_STEPS + 1))
    for step in run.steps:
        assert ("norm" in step, "lr" in step) == (builds_on(label, "8"), builds_on(label, "9"))


@EACH
def test_what_the_model_is_given(label, short_run, byte_tokens):
    """One batch after the other, in the file's order, or in shuffled_windows's; its types, the precision of products.

    From `distributed_validation` on, and in the modern trunk, a validation follows, under autocast without gradients.
    """
    dtype = torch.bfloat16 if builds_on(label, "3") else torch.float32
    precision = "highest" if label in ("0", "1") else "high"
    expected = {(True, True, dtype, torch.float32, precision)}
    expected |= {(False, False, dtype, torch.float32, precision)} if validates(label) else set()
    assert short_run(label).forward == expected
    text = np.fromfile(byte_tokens / "train.bin", dtype="<u2").astype(np.int64)
    batches = torch.from_numpy(text[: N_STEPS * B * T]).view(-1, T)
    if builds_on(label, "shuffled_windows"):
        loader = rung("shuffled_windows").DataLoaderLite(byte_tokens, B, T, seed=7)
        batches = torch.cat([loader.batch(i)[0] for i in range(N_STEPS)])
    assert torch.equal(torch.cat(short_run(label).inputs), batches)


@EACH
def test_a_step_is_timed_from_its_batch_to_the_synchronized_device(label, short_run):
    """On the fake clock: all of its parts once, no validation, and nothing that waits for a number, as the loss."""
    run = short_run(label)
    expected = sum(STEP_SECONDS.values())
    for step in run.steps:
        prefetches = STEP_SECONDS["batch"] * (builds_on(label, "prefetch") and step["step"] == 1)  # also the next batch
        assert step["ms"] == (expected + prefetches) * 1000
        assert step["tokens_per_second"] == pytest.approx(B * T / (expected + prefetches), abs=0.005)
    rate = f"{B * T / expected:.2f}"
    medians = [line for line in run.lines if line.startswith("median")]
    assert medians == [f"median : dt: {expected * 1000}.00 ms | tokens/sec: {rate} | steps 3-5"]


@from_rung("9")
def test_the_gradient_is_clipped_and_its_norm_logged(label, short_run):
    before, run = short_run("7"), short_run(label)
    assert norm_of(before.gradients[0]) > 1.5  # there was something to clip
    shapes, as_before = (sorted(gradient.shape for gradient in each.gradients[0]) for each in (run, before))
    if shapes == as_before:  # the same model
        assert run.steps[0]["norm"] == pytest.approx(norm_of(before.gradients[0]), rel=1e-3)  # the norm before clipping
    norms = [norm_of(gradients) for gradients in run.gradients]
    assert all(0.9 < norm <= 1.0 + 1e-4 for norm in norms) and len(norms) == N_STEPS


@EACH
def test_the_optimizer_of_train(label, short_run):
    """GPT-3's betas from rung 8, its decay, on the matrices alone, and the fused kernel from rung 10 on."""
    decays = [0.1, 0.0, 0.1] if builds_on(label, "muon") else [0.1, 0.0] if builds_on(label, "10") else [0.01]
    for groups in short_run(label).groups:
        assert [group["weight_decay"] for group in groups] == decays
        for group in groups:
            assert group["betas"] == ((0.9, 0.95) if builds_on(label, "8") else (0.9, 0.999)) and group["eps"] == 1e-8
            assert bool(group["fused"]) is builds_on(label, "10")
        assert builds_on(label, "9") or groups[0]["lr"] == 3e-4


COSINE = [1e-3, 2e-3, 1.55e-3, 0.65e-3, 0.2e-3]  # two steps of warm-up; 60, 120 and 180 degrees
TRAPEZOID = [1e-3, 2e-3, 2e-3, 2e-3 * 2 / 3, 2e-3 / 3]  # 0.6 of the steps decay


@from_rung("9")
def test_the_scheduled_rate_arrives(label, short_run):
    """And is logged; Muon, the first group from `muon` on, has five times as much here."""
    run, expected = short_run(label), TRAPEZOID if builds_on(label, "trapezoid_lr") else COSINE
    assert [step["lr"] for step in run.steps] == pytest.approx(expected, rel=1e-4)
    for groups, lr in zip(run.groups, expected, strict=True):
        factors = [group["lr"] / lr for group in groups]
        digits = 1e-7 if builds_on(label, "cuda_graphs") else 1e-9  # whose rate is a tensor, in float32
        assert factors == pytest.approx([5, 1, 1] if builds_on(label, "muon") else [1, 1][: len(factors)], rel=digits)


@pytest.mark.parametrize("device, ranks, micro_steps", [("cuda", 1, 128), ("cuda", 8, 16), ("cpu", 1, 4)])
def test_the_default_batch_is_that_of_gpt3(device, ranks, micro_steps):
    """2**19 tokens: 128 micro-steps of 4 x 1024 on one GPU, 16 on eight; four of any size on a CPU."""
    module = rung("gradient_accumulation")
    args = module.parse_args(["-B", "4", "-T", "1024"])
    args.device = device
    assert module.batches_per_step(args, ranks) == micro_steps * ranks
    assert args.total_batch == micro_steps * 4 * 1024 * ranks


def flags_of(label):
    """{name: what the parser knows of it, but for the help} of a rung's flags.

    A changed default would change what everybody's next run computes, and what committed logs compare with.
    """
    parser = argparse.ArgumentParser(add_help=False)
    rung(label).add_flags(parser)
    return {flag.dest: (flag.option_strings, flag.type, flag.choices, flag.const,
                        str(flag.default).replace(BY_LABEL[label].name, "this")) for flag in parser._actions}


@pytest.mark.parametrize("label", rungs_that_change("add_flags")[1:])
def test_a_flag_is_that_of_the_rung_before(label):
    """Except for CUDA graphs, which several ranks cannot have and cuda_graphs replaces: those differ."""
    after, others = flags_of(label), {("10", "ddp"), ("zero_init", "long_run"), ("bf16_residual", "cuda_graphs")}
    for start in BY_LABEL[label].starts:
        changed = [name for name, flag in flags_of(start.label).items() if after.get(name) != flag]
        assert changed == ["compile_mode"] * ((start.label, label) in others)


@from_rung("5")
def test_the_compile_mode_arrives(label, short_run):
    """At the model; under FSDP at its blocks and at the loss."""
    n_parts = 2 + 1 if builds_on(label, "fsdp") else 1
    assert short_run(label).modes == [None] + n_parts * [mode_of(label)]  # None: check_compiler's
    assert f"# compile: {mode_of(label)}" in short_run(label).lines


NOTES = {  # {first rung: what the log's header says from there on}; the tool reads it
    "ddp": "# ranks: 1", "gradient_accumulation": f"# total batch: {B * T} tokens",
    "distributed_validation": "# validation: every 25 steps on 2 sequences",
    "validation": "# validation: every 25 steps on 2 sequences",
    "gradient_checkpointing": "# recomputed blocks: 0 of 2", "documents_apart": "# documents: one",
    "cuda_graphs": "# CUDA graph: none (no CUDA)",
}


@pytest.mark.parametrize("cuda, B", [(False, 1), (True, 4)])
def test_the_default_batch_is_larger_on_an_accelerator(cuda, B, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.mps, "is_available", lambda: False)
    args = rung("0").parse_args([])
    assert (args.B, args.device) == (B, "cuda" if cuda else "cpu")
    with pytest.raises(SystemExit):  # argparse's: of devices that are not there
        rung("0").parse_args(["--device", "mps"])
