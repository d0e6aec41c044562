"""Both fsdp scripts: ranks that share one model compute what one process computes, each with its share of bytes."""
import json
import shutil
from unittest import mock

import pytest
import torch
from damaged_files import cut_in_half
from load_script import rung
from log_files import assert_same_losses, losses, val_losses
from ranks import on_ranks
from run_script import train, train_in_float32
from saved_models import assert_same_weights, names_in
from tensor_bytes import Watch

from experiments.growth.__main__ import split_parameters
from ladder.count.flops import VOCAB_SIZE
from ladder.rungs.list import BY_LABEL

pytestmark = pytest.mark.slow
LOG, LOG_OF_SHARDS = (f"{BY_LABEL[label].name}.log" for label in ("fsdp", "sharded_checkpoint"))
RUN = ("-T", 16, "--val-every", 2, "--val-sequences", 3, "--checkpoint-every", 2)
SIX = (*RUN, "--total-batch", 64, "--steps", 6)
STEP_4, STEP_6 = "step_0000004", "step_0000006"
KINDS = pytest.mark.parametrize("label, suffix", [("fsdp", ".pt"), ("sharded_checkpoint", "")])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, byte_tokens, tokens):
    """The folder of runs of two ranks: float32, shards, compiled (6 steps, saved), bfloat16, float16 (2 steps each).

    The one in bfloat16 has GPT-2's vocabulary, for which the tool counts.
    """
    folder = tmp_path_factory.mktemp("two_ranks")
    two = ["-B", 1, *RUN, "--total-batch", 64, "--steps", 2]
    printed = on_ranks(2, folder, byte_tokens, {
        "float32": ("fsdp", "float32", ["-B", 1, *SIX, "--save", folder / "model.pt"]),
        "shards": ("sharded_checkpoint", "float32", ["-B", 1, *SIX, "--save", folder / "shards.pt"]),
        "compiled": ("fsdp", "float32", ["-B", 1, *SIX, "--compile-mode", "default", "--save", folder / "compiled.pt"]),
        "float16": ("fsdp", "float16", two),
        "bfloat16": ("fsdp", "bfloat16", [*two, "--val-every", 0, "--checkpoint-every", 0, "--data", tokens])})
    assert [text.count("step : 6 |") for text in printed] == [3, 0]  # only rank 0 speaks
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, byte_tokens):
    """The log of `zero_init`, alone with twice the batch, in float32: the truth; and its model beside it."""
    folder = tmp_path_factory.mktemp("one")
    return train_in_float32("long_run", folder, byte_tokens, "-B", 2, *SIX, "--save", folder / "model.pt")


@pytest.mark.parametrize("run, file, log", [("float32", "model.pt", LOG), ("shards", "shards.pt", LOG_OF_SHARDS)])
def test_two_ranks_track_one_process_with_twice_the_batch(run, file, log, two_ranks, one_process):
    """Through 6 steps of 2 micro-steps, and 3 sequences of validation, which 2 ranks cannot share evenly."""
    assert_same_losses(two_ranks / run / log, one_process)
    assert len(losses(one_process)) == 6 and list(val_losses(one_process)) == [2, 4, 6]
    assert_same_weights(two_ranks / file, one_process.with_name("model.pt"), atol=2e-5)
    saved = torch.load(two_ranks / file, weights_only=True)["model"]
    assert saved["lm_head.weight"].data_ptr() == saved["transformer.wte.weight"].data_ptr()


def test_the_other_types_track_float32(two_ranks, one_process, tmp_path, tokens):
    """To 0.2 %, one rounding to bfloat16. Before its first step, that is: float16 skips this one.

    Rank 1 has met the overflow; rank 0, whose scaler is saved, has halved its scale, too. The second step counts again.
    """
    alone = train_in_float32("long_run", tmp_path, tokens, "-B", 2, *RUN, "--total-batch", 64, "--steps", 1)
    for dtype, truth in (("bfloat16", alone), ("float16", one_process)):
        log = two_ranks / dtype / LOG
        assert losses(log)[0] == pytest.approx(losses(truth)[0], abs=0.02)
        assert ("| norm: inf |" in log.read_text()) == (dtype == "float16")
    scaler = torch.load(two_ranks / "float16/checkpoints/step_0000002.pt", weights_only=True)["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (32768.0, 1)


def test_what_a_step_moves(two_ranks):
    """Two micro-steps: each gathers root and blocks, the blocks again, and reduces all; then Muon gathers by shape."""
    moved = json.loads((two_ranks / "bfloat16" / "rank0.json").read_text())["moved"]
    embedding, block, _ = split_parameters("tiny")
    gathered, reduced, for_muon = ([n for name, n in moved if name == wanted] for wanted in (
        "c10d._allgather_base_", "c10d._reduce_scatter_base_", "_c10d_functional.all_gather_into_tensor"))
    norms = 2 * 64 + 2 * 32  # of a block
    assert sorted(gathered) == sorted(2 * [2 * (embedding + 64), *4 * [2 * (block + norms)]])
    assert sorted(reduced) == sorted(2 * [4 * (embedding + 64), *2 * [4 * (block + norms)]])
    assert sum(for_muon) == 4 * 2 * block and len(for_muon) == 3
    assert len(moved) == len(gathered) + len(reduced) + len(for_muon)


def test_compiled_as_eagerly(two_ranks):
    """Each block and the loss, in one graph each, without gradients, too. test_smoke.py lowers them."""
    assert_same_losses(two_ranks / "compiled" / LOG, two_ranks / "float32" / LOG)
    assert_same_weights(two_ranks / "compiled.pt", two_ranks / "model.pt", atol=2e-5)
    for rank in (0, 1):
        found = json.loads((two_ranks / "compiled" / f"rank{rank}.json").read_text())
        assert (found["graphs"], found["breaks"]) == (1 + 2 * 2, 0)  # the probe; block and loss, twice


@pytest.mark.parametrize("save", [False, True])
def test_the_model_is_gathered_only_to_be_saved(save, tmp_path, byte_tokens):
    """At the end of a run without checkpoints."""
    module = rung("fsdp")
    module.gather = mock.Mock(wraps=module.gather)
    flags = ["-B", 1, "-T", 16, "--total-batch", 16, "--steps", 1, "--val-every", 0, "--checkpoint-every", 0]
    train(module, tmp_path, byte_tokens, *flags, *(["--save", tmp_path / "model.pt"] if save else []))
    assert module.gather.call_count == save


def test_the_peak_is_what_docs_long_runs_md_counts(two_ranks, tmp_path, tokens):
    """In bfloat16, of all tensors alive at once: of a rank of two, and of one process, which holds what DDP does."""
    embedding, block, n_layer = split_parameters("tiny")
    state, vectors = 16 * embedding + 12 * block * n_layer, 36 * 64  # bytes of a block's activations for a token
    logits = 4 * VOCAB_SIZE
    found = json.loads((two_ranks / "bfloat16" / "rank0.json").read_text())["peak"]
    assert found == pytest.approx(
        state / 2 + 10 * block + 10 * embedding + 16 * (2 * 64 * n_layer + vectors + logits), rel=0.2)
    module = rung("long_run")
    module.autocast_dtype = lambda device: torch.bfloat16
    with Watch() as seen:
        train(module, tmp_path, tokens, "-B", 1, *RUN[:2], "--total-batch", 16, "--steps", 2)
    assert seen.peak == pytest.approx(
        state + 2 * block * n_layer + 10 * embedding + 16 * (4 * 64 * n_layer + vectors + logits), rel=0.2)


def test_a_checkpoint_before_the_first_update_resumes(tmp_path, byte_tokens, huge_scale):
    """With a scale far too large float16 skips the first steps: the optimizer has no moments yet."""
    for steps in (1, 2):
        module = rung("sharded_checkpoint")
        module.autocast_dtype = lambda device: torch.float16
        log = train(module, tmp_path, byte_tokens, "-B", 1, "-T", 16, "--total-batch", 16, "--steps", steps,
                    "--decay-share", 0, "--checkpoint-every", 1, "--resume")
    assert "# resumed after step 1 of 2" in log.read_text()


def copy_checkpoints(two_ranks, folder, *names):
    """A folder with these checkpoints of the float32 runs of two ranks, one file or one folder each."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in names:
        run, copy = ("float32", shutil.copy) if name.endswith(".pt") else ("shards", shutil.copytree)
        copy(two_ranks / run / "checkpoints" / name, folder / "checkpoints" / name)
    return folder / "checkpoints"


@KINDS
def test_a_checkpoint_of_two_ranks_resumes_alone(label, suffix, two_ranks, one_process, tmp_path, byte_tokens):
    checkpoints = copy_checkpoints(two_ranks, tmp_path, STEP_4 + suffix)
    log = train_in_float32(label, tmp_path, byte_tokens, "-B", 2, *SIX, "--resume", "--save", tmp_path / "model.pt")
    assert "# resumed after step 4 of 6" in log.read_text()
    assert_same_losses(log, one_process, after=4)
    assert names_in(checkpoints) == {STEP_4 + suffix, STEP_6 + suffix}
    assert_same_weights(tmp_path / "model.pt", one_process.with_name("model.pt"), atol=2e-5)


@KINDS
def test_checkpoints_resume_on_other_numbers_of_ranks(label, suffix, one_process, tmp_path, byte_tokens):
    """Made alone, continued by two, and by four."""
    train_in_float32(label, tmp_path / "run", byte_tokens, "-B", 2, *SIX)
    newest = tmp_path / "run" / "checkpoints" / (STEP_6 + suffix)
    for n in (2, 4):
        newest.rename(tmp_path / f"removed before {n}")
        printed = on_ranks(n, tmp_path, byte_tokens, {"run": (label, "float32", ["-B", 1, *SIX, "--resume"])})
        assert "# resumed after step 4 of 6" in printed[0]
        assert_same_losses(tmp_path / "run" / f"{BY_LABEL[label].name}.log", one_process)


@pytest.mark.parametrize("damage", [
    lambda folder: cut_in_half(next(folder.glob("*.distcp"))), lambda folder: (folder / ".metadata").unlink(),
], ids=["half a file", "no metadata"])
def test_a_damaged_checkpoint_is_named(damage, two_ranks, tmp_path, byte_tokens):
    newest = copy_checkpoints(two_ranks, tmp_path, STEP_6, STEP_4) / STEP_6
    damage(newest)
    line = fr"error: --resume: {newest} cannot be read \(.+\); if it is damaged, delete it to resume from the older one"
    with pytest.raises(SystemExit, match=f"^{line}$"):
        train_in_float32("sharded_checkpoint", tmp_path, byte_tokens, "-B", 2, *SIX, "--resume")
    assert not list(tmp_path.glob("*.log*"))
