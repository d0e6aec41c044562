"""Both fsdp scripts: ranks that share one model compute what one process computes, each with its share of bytes."""
import json
import math
import re
import shutil
import sys

import pytest
import torch
from conftest import ROOT, load_module, losses, new_gpt, read_steps, run_command, rung, train
from tensor_bytes import Watch
from test_beyond import checkpoints_of, val_lines
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from ladder.measure.check import plan_cards
from ladder.count.flops import SHAPES
from ladder.count.memory import PROCESS_BYTES, card_bytes, sent_bytes, split_parameters, state_bytes
from ladder.scripts.stages import BY_LABEL

LOG, LOG_OF_SHARDS = (f"{BY_LABEL[label].name}.log" for label in ("fsdp", "dcp"))
RUN = ("-T", 16, "--val-every", 2, "--val-sequences", 3, "--checkpoint-every", 2)
SIX = (*RUN, "--total-batch", 64, "--steps", 6)


def on_ranks(n, folder, tokens, runs, *torchrun_flags, **environment):
    """fsdp_rank.py on n ranks, for runs of {name: (label, dtype, flags)}."""
    own = ["--model", "tiny", "--device", "cpu", "--data", tokens, "--compile-mode", "none"]
    lines = {name: (*kind, [str(word) for word in (*own, *flags)]) for name, (*kind, flags) in runs.items()}
    folder.mkdir(exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(lines))
    return run_command(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}",
                       *torchrun_flags, ROOT / "tests" / "fsdp_rank.py", folder, timeout=120, **environment)


def alone(label, folder, tokens, *flags, dtype=torch.float32):
    """A run in this process, without torchrun; returns its log."""
    module = rung(label)
    module.autocast_dtype = lambda device: dtype
    return train(module, folder, tokens, *flags)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, tokens):
    """The folder of runs of two ranks: float32 and shards (6 steps, saved), bfloat16 and float16 (2 steps each)."""
    folder = tmp_path_factory.mktemp("two_ranks")
    two = ("-B", 1, *RUN, "--total-batch", 64, "--steps", 2)
    run = on_ranks(2, folder, tokens, {
        "float32": ("fsdp", "float32", ["-B", 1, *SIX, "--save", folder / "model.pt"]),
        "shards": ("dcp", "float32", ["-B", 1, *SIX, "--save", folder / "shards.pt"]),
        "bfloat16": ("fsdp", "bfloat16", two), "float16": ("fsdp", "float16", two)})
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("step : 6 |") == 2  # only rank 0 speaks
    return folder


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, tokens):
    """The log of rung 24, alone with twice the batch, in float32: the truth; and its model beside it."""
    folder = tmp_path_factory.mktemp("one")
    return alone("24", folder, tokens, "-B", 2, *SIX, "--save", folder / "model.pt")


def assert_same_weights(file, truth):
    """Up to the rounding of float32 sums in another order."""
    ours, truth = (torch.load(path, weights_only=True)["model"] for path in (file, truth))
    assert ours.keys() == truth.keys()
    for name, weight in truth.items():
        assert torch.allclose(ours[name], weight, rtol=0, atol=2e-5), name
    assert ours["lm_head.weight"].data_ptr() == ours["transformer.wte.weight"].data_ptr()


def assert_same_losses(log, truth):
    """Float32 sums in another order: the losses agree to 1e-5 of 10.8, as for DDP (test_ddp.py)."""
    ours, truth_steps = read_steps(log), read_steps(truth)
    assert [step["step"] for step in ours] == [step["step"] for step in truth_steps] == list(range(1, 7))
    for key, tolerance in (("loss", 1e-4), ("norm", 1e-3), ("lr", 0)):
        expected = [step[key] for step in truth_steps]
        assert [step[key] for step in ours] == pytest.approx(expected, abs=tolerance)
    assert [step for step, _ in val_lines(log)] == [2, 4, 6]
    assert [loss for _, loss in val_lines(log)] == pytest.approx([loss for _, loss in val_lines(truth)], abs=1e-4)


def test_two_ranks_track_one_process_with_twice_the_batch(two_ranks, one_process):
    """Through 6 steps of 2 micro-steps, and 3 sequences of validation, which 2 ranks cannot share evenly."""
    assert_same_losses(two_ranks / "float32" / LOG, one_process)
    assert_same_weights(two_ranks / "model.pt", one_process.with_name("model.pt"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_other_types_track_float32(dtype, two_ranks, one_process):
    """To 0.2 %, one rounding to bfloat16. Before its first step, that is: float16 skips this one."""
    assert losses(two_ranks / dtype / LOG)[0] == pytest.approx(losses(one_process)[0], abs=0.02)
    assert ("| norm: inf |" in (two_ranks / dtype / LOG).read_text()) == (dtype == "float16")


def test_an_overflow_on_one_rank_is_one_on_all(two_ranks):
    """Rank 1 has met it; rank 0, whose scaler is saved, has halved its scale, too. The second step counts again."""
    scaler = torch.load(two_ranks / "float16/checkpoints/step_0000002.pt", weights_only=True)["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (32768.0, 1)


def rows_of(n_rows, n, rank):
    """How many rows FSDP2 leaves to a rank: those of torch.chunk."""
    size = math.ceil(n_rows / n)
    return max(0, min(size, n_rows - rank * size))


def assert_shares(folder, n):
    """4 bytes a number: 1 for the parameters and the gradients, 1 moment for matrices of blocks, 2 for the others."""
    shapes = {name: p.shape for name, p in new_gpt(rung("24")).named_parameters()}
    for rank in range(n):
        found = json.loads((folder / f"rank{rank}.json").read_text())
        kept = {name: 4 * rows_of(shape[0], n, rank) * math.prod(shape[1:]) for name, shape in shapes.items()}
        moments = sum(kept[name] * (1 if len(shape) == 2 and ".h." in name else 2) for name, shape in shapes.items())
        assert found["parameters"] == found["gradients"] == sum(kept.values())
        assert found["optimizer"] == moments + 4 * len(shapes)  # and a count of steps each
    return found


def test_each_rank_keeps_its_share(two_ranks):
    """Gradients too, between micro-steps. The tool's closed form leaves out the norms, 0.01 % of tiny."""
    for dtype in ("float32", "bfloat16"):
        found = assert_shares(two_ranks / dtype, 2)
        held = found["parameters"] + found["gradients"] + found["optimizer"]
        assert held == pytest.approx(state_bytes("tiny", 2), rel=1e-3)
    assert state_bytes("tiny", 2) == state_bytes("tiny") / 2


@pytest.mark.slow
def test_three_ranks_that_share_unevenly(tmp_path, tokens):
    """64 rows are 22, 22 and 20."""
    flags = (*RUN, "--total-batch", 48, "--steps", 6)
    run = on_ranks(3, tmp_path, tokens, {"three": ("fsdp", "float32", ["-B", 1, *flags])})
    assert run.returncode == 0, run.stderr
    assert_same_losses(tmp_path / "three" / LOG, alone("24", tmp_path / "one", tokens, "-B", 3, *flags))
    assert_shares(tmp_path / "three", 3)


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_what_a_step_moves(dtype, width, two_ranks):
    """Two micro-steps: each gathers root and blocks, the blocks again, and reduces all; then Muon gathers matrices."""
    moved = json.loads((two_ranks / dtype / "rank0.json").read_text())["moved"]
    embedding, block, _ = split_parameters("tiny")
    gathered = [n for name, n in moved if name == "c10d._allgather_base_"]
    reduced = [n for name, n in moved if name == "c10d._reduce_scatter_base_"]
    for_muon = [n for name, n in moved if name == "_c10d_functional.all_gather_into_tensor"]
    norms = 2 * 64 + 2 * 32  # of a block
    assert sorted(gathered) == sorted(2 * [width * (embedding + 64), *4 * [width * (block + norms)]])
    assert sorted(reduced) == sorted(2 * [4 * (embedding + 64), *2 * [4 * (block + norms)]])
    assert sum(for_muon) == 4 * 2 * block and len(for_muon) == 3  # one for each shape
    assert len(moved) == len(gathered) + len(reduced) + len(for_muon)
    assert sum(n for _, n in moved) / 2 == pytest.approx(sent_bytes("tiny", 2, True, 2, width), rel=1e-3)


def test_the_peak_is_what_the_tool_predicts(two_ranks, tmp_path, tokens):
    """In bfloat16, of all tensors alive at once: of a rank of two, and of one process, which holds what DDP does."""
    found = json.loads((two_ranks / "bfloat16" / "rank0.json").read_text())["peak"]
    assert found == pytest.approx(card_bytes("tiny", 1, 16, 2, True) - PROCESS_BYTES, rel=0.2)
    with Watch() as watch:
        alone("24", tmp_path, tokens, "-B", 1, *RUN[:2], "--total-batch", 16, "--steps", 2, dtype=torch.bfloat16)
    assert watch.peak == pytest.approx(card_bytes("tiny", 1, 16, 1, False) - PROCESS_BYTES, rel=0.2)


STEP_4, STEP_6 = "step_0000004", "step_0000006"


def copy_checkpoints(two_ranks, folder, *names):
    """A folder with these checkpoints of the float32 runs of two ranks, one file or one folder each."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in names:
        if name.endswith(".pt"):
            shutil.copy(two_ranks / "float32" / "checkpoints" / name, folder / "checkpoints")
        else:
            shutil.copytree(two_ranks / "shards" / "checkpoints" / name, folder / "checkpoints" / name)
    return folder / "checkpoints"


KINDS = pytest.mark.parametrize("label, suffix", [("fsdp", ".pt"), ("dcp", "")])


@KINDS
def test_a_checkpoint_of_two_ranks_resumes_alone(label, suffix, two_ranks, one_process, tmp_path, tokens):
    checkpoints = copy_checkpoints(two_ranks, tmp_path, STEP_4 + suffix)
    log = alone(label, tmp_path, tokens, "-B", 2, *SIX, "--resume", "--save", tmp_path / "model.pt")
    assert "# resumed after step 4 of 6" in log.read_text()
    assert_same_losses(log, one_process)
    assert checkpoints_of(checkpoints) == {STEP_4 + suffix, STEP_6 + suffix}
    assert_same_weights(tmp_path / "model.pt", one_process.with_name("model.pt"))


def test_a_file_of_two_ranks_holds_what_that_of_one_process_holds(two_ranks, one_process):
    """Whole; so it is also a model that --pretrained takes."""
    path = f"checkpoints/{STEP_4}.pt"
    found, truth = (torch.load(folder / path, weights_only=True)
                    for folder in (two_ranks / "float32", one_process.parent))
    assert found["step"] == 4 and found.keys() == truth.keys()
    assert_same_weights(two_ranks / "float32" / path, one_process.parent / path)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
@KINDS
def test_a_checkpoint_of_two_ranks_resumes_on_other_numbers(label, suffix, n, two_ranks, one_process, tmp_path, tokens):
    copy_checkpoints(two_ranks, tmp_path / "run", STEP_4 + suffix)
    run = on_ranks(n, tmp_path, tokens, {"run": (label, "float32", ["-B", 1, *SIX, "--resume"])})
    assert run.returncode == 0, run.stderr
    assert "# resumed after step 4 of 6" in run.stdout
    assert_same_losses(tmp_path / "run" / f"{BY_LABEL[label].name}.log", one_process)


@pytest.mark.slow
@KINDS
def test_a_checkpoint_made_alone_resumes_on_two_ranks(label, suffix, one_process, tmp_path, tokens):
    alone(label, tmp_path / "run", tokens, "-B", 2, *SIX)
    (tmp_path / "run" / "checkpoints" / (STEP_6 + suffix)).rename(tmp_path / "removed")
    run = on_ranks(2, tmp_path, tokens, {"run": (label, "float32", ["-B", 1, *SIX, "--resume"])})
    assert run.returncode == 0 and "# resumed after step 4 of 6" in run.stdout, run.stderr
    assert_same_losses(tmp_path / "run" / f"{BY_LABEL[label].name}.log", one_process)


@pytest.mark.slow
def test_a_killed_rank_comes_back(one_process, tmp_path, tokens):
    """torchrun --max-restarts: rank 1 kills itself in step 3, once, and the job ends as one process does."""
    run = on_ranks(2, tmp_path, tokens, {"run": ("dcp", "float32", ["-B", 1, *SIX, "--resume"])}, "--max-restarts=1",
                   DIE_RANK="1", DIE_BATCH="8", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "died").exists() and "# resumed after step 2 of 6" in run.stdout
    assert_same_losses(tmp_path / "run" / LOG_OF_SHARDS, one_process)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")  # meant: what the crash has left
def test_alone_it_is_rung_24(tmp_path, tokens, one_process):
    """To the bit, and after a crash, too: what remains of the save that it interrupted does not matter."""
    whole = alone("dcp", tmp_path, tokens, "-B", 2, *SIX)
    assert losses(whole) == losses(one_process)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / STEP_6).rename(checkpoints / "step.partial")
    cut_in_half(checkpoints / "step.partial")
    again = alone("dcp", tmp_path, tokens, "-B", 2, *SIX, "--resume")
    assert "# resumed after step 4 of 6" in again.read_text() and losses(again) == losses(one_process)
    assert checkpoints_of(checkpoints) == {STEP_4, STEP_6}


def test_a_failed_save_costs_the_checkpoint_and_not_the_run(tmp_path, tokens, monkeypatch, capsys):
    """Also the first one, which leaves nothing to be resumed."""
    write, calls = FileSystemWriter.write_data, []

    def full_disk(self, plan, planner):
        calls.append(self)
        if len(calls) in (1, 3):
            write(self, plan, planner)
            raise OSError(28, "No space left on device")
        return write(self, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", full_disk)
    alone("dcp", tmp_path, tokens, "-B", 2, *SIX)
    output = capsys.readouterr().out
    assert re.findall("# WARNING: no checkpoint of step (.): cannot be written", output) == ["2", "6"]
    assert "# ended by --steps after step 6; newest checkpoint: step 4\n" in output
    assert checkpoints_of(tmp_path / "checkpoints") - {"step.partial"} == {STEP_4}


@pytest.mark.slow
def test_weights_lost_on_one_rank_are_not_saved_by_any(tmp_path, tokens):
    """Also rank 0, which has finite ones, or it would wait for the other for an hour."""
    flags = ["-B", 1, "-T", 16, "--total-batch", 32, "--steps", 1, "--val-every", 0, "--checkpoint-every", 1]
    run = on_ranks(2, tmp_path, tokens, {"run": ("dcp", "float32", flags)}, NAN_RANK="1")
    assert run.returncode == 0, run.stderr
    assert "# WARNING: no checkpoint of step 1: not all weights are finite" in run.stdout
    assert not list((tmp_path / "run" / "checkpoints").glob("step*"))


def cut_in_half(folder):
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [
    cut_in_half, lambda folder: (folder / ".metadata").unlink(), lambda folder: (folder / "notes.json").write_text(""),
], ids=["half a file", "no metadata", "empty notes"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it(damage, two_ranks, tmp_path, tokens):
    for names, before in (([STEP_6, STEP_4], STEP_4), ([STEP_6], "step 0")):
        folder = tmp_path / before
        newest = copy_checkpoints(two_ranks, folder, *names) / STEP_6
        damage(newest)
        line = f"error: --resume: {newest} is damaged; delete it to continue from {before}"
        with pytest.raises(SystemExit, match=f"^{line}$"):
            alone("dcp", folder, tokens, "-B", 2, *SIX, "--resume")
        assert not list(folder.glob("*.log*"))


@KINDS
def test_what_cannot_be_resumed(label, suffix, two_ranks, tmp_path, tokens, capsys):
    """Another run, by one line, before any weight is loaded; a finished run repeats nothing."""
    newest = copy_checkpoints(two_ranks, tmp_path, STEP_6 + suffix) / (STEP_6 + suffix)
    for flags, reason in ((["--model", "mini"], "has model tiny, not mini"), (["--seed", 1], "has seed 1337, not 1"),
                          (["--muon-lr", 0.1], r"has muon_lr 0\.002, not 0\.1")):
        with pytest.raises(SystemExit, match=f"^error: --resume: {newest} {reason}; "):
            alone(label, tmp_path, tokens, "-B", 2, *SIX, "--resume", *flags)
    with pytest.raises(SystemExit, match=f"^error: {newest}: from an earlier run; --resume goes on"):
        alone(label, tmp_path, tokens, "-B", 2, *SIX)
    capsys.readouterr()
    log = alone(label, tmp_path, tokens, "-B", 2, *SIX, "--resume", "--save", tmp_path / "model.pt")
    assert "step : " not in capsys.readouterr().out
    assert losses(log) == losses(two_ranks / ("float32" if suffix else "shards") / log.name)
    ours, truth = (torch.load(path, weights_only=True)["model"] for path in (
        tmp_path / "model.pt", two_ranks / ("model.pt" if suffix else "shards.pt")))
    assert all(torch.equal(ours[name], truth[name]) for name in truth)  # it still owes --save's file


def test_rung_24_does_not_take_a_checkpoint_of_fsdp(two_ranks, tmp_path, tokens):
    copy_checkpoints(two_ranks, tmp_path, STEP_6 + ".pt")
    with pytest.raises(SystemExit, match="has script fsdp_run.py, not rung_24_zero_init.py; "):
        alone("24", tmp_path, tokens, "-B", 2, *SIX, "--resume")


@torch.no_grad()
def test_what_ranks_save_becomes_a_folder_for_transformers(two_ranks, tmp_path):
    from transformers import Qwen3ForCausalLM

    load_module(ROOT / "convert.py").main([str(two_ranks / "model.pt"), str(tmp_path / "hf")])
    saved, module = torch.load(two_ranks / "model.pt", weights_only=True), rung("fsdp")
    model = module.GPT(module.GPTConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    x = torch.randint(0, 50257, (2, 48), generator=torch.Generator().manual_seed(0))
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "hf").eval()(x).logits
    assert torch.allclose(theirs, model(x), rtol=0, atol=1e-4)


def test_cards_on_paper():
    """The largest model is the largest: the next one does not fit. Sharding helps, from two cards on."""
    names, found = list(SHAPES), list(plan_cards(8, [4, 16, 24]))
    assert [(cards.memory, cards.ranks, cards.sharded) for cards in found[:7]] == [
        (4, 1, False), *((4, n, sharded) for n in (2, 4, 8) for sharded in (False, True))]
    for cards in found:
        usable = 0.9e9 * cards.memory
        assert card_bytes(cards.model, 1, 1024, cards.ranks, cards.sharded) <= usable
        if cards.model != names[-1]:
            larger = names[names.index(cards.model) + 1]
            assert card_bytes(larger, 1, 1024, cards.ranks, cards.sharded) > usable
        embedding, block, _ = split_parameters("gpt2-xl")
        if not math.isnan(cards.most):
            fits = round((cards.most - embedding) / block)
            assert card_bytes("gpt2-xl", 1, 1024, cards.ranks, cards.sharded, fits) <= usable
            assert card_bytes("gpt2-xl", 1, 1024, cards.ranks, cards.sharded, fits + 1) > usable
    sixteen = {(cards.ranks, cards.sharded): cards.model for cards in found if cards.memory == 16}
    assert sixteen[8, False] == sixteen[1, False] == "gpt2-large" and sixteen[2, True] == "gpt2-xl"
    assert [cards.ranks for cards in plan_cards(6, [16])] == [1, 2, 2, 4, 4, 6, 6]
    assert all(cards.model is None for cards in plan_cards(2, [0.5]))


@pytest.mark.parametrize("name", SHAPES)
def test_the_parameters_of_the_memory_model_are_the_scripts(name):
    module = rung("fsdp")
    with torch.device("meta"):
        model = new_gpt(module, name)
    embedding, block, n_layer = split_parameters(name)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert embedding + block * n_layer == matrices
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(matrices, rel=1e-3)


def test_the_table_of_cards(capsys):
    from ladder.__main__ import main

    assert main(["check", "--gpus", "8", "--memory", "24"]) == 0
    output = capsys.readouterr().out
    assert len(re.findall(r"[248] x 24 GB .* (?:DDP|FSDP) .* gpt2-", output)) == 6
