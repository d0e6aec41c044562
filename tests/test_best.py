"""Rung 27: the model with the lowest validation loss is kept, also by a run that is stopped, killed and resumed."""
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    assert_same_weights, cut_in_half, files_in, flip_a_byte, losses, rung, saved_model, tokens_of, train,
    val_losses)
from torch.nn import functional as F

LOG = "rung_27_best_checkpoint.log"
T = 16
# 400 tokens are memorized in a few steps: the lowest validation loss is that of step 12 of 30.
FLAGS = ("-B", 4, "-T", T, "--total-batch", 4 * T, "--steps", 30, "--val-every", 3, "--val-sequences", 0,
         "--checkpoint-every", 10, "--max-lr", 1e-2, "--muon-lr", 2e-2)
BEST, STEP_20, STEP_30 = (f"checkpoints/{name}.pt" for name in ("best", "step_0000020", "step_0000030"))


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokens):
    """A folder with 400 tokens to train on, single bytes."""
    train_ids, val_ids = (np.fromfile(tokens / f"{split}.bin", dtype="<u2") for split in ("train", "val"))
    folder = tmp_path_factory.mktemp("data") / "small"
    return tokens_of(folder, train_ids[20_000:20_400], val_ids[5_000:5_300], vocab_size=256)


def run_in(folder, data, *more, module=None):
    """Train in `folder`; returns it."""
    module = module or rung("27")
    module.autocast_dtype = lambda device: torch.float32
    folder.mkdir(exist_ok=True)
    train(module, folder, data, *FLAGS, "--save", folder / "model.pt", *more)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small):
    """A folder with a run that nothing disturbed; its checkpoints are of steps 20 and 30, and best.pt."""
    return run_in(tmp_path_factory.mktemp("whole"), small)


def step_of(path):
    return torch.load(path, weights_only=True)["step"]


def assert_same_model(file, truth):
    """The weights to the bit, and the step that they are of."""
    assert step_of(file) == step_of(truth)
    assert_same_weights(file, truth)


def assert_same_best(folder, whole):
    """The models that --save and best.pt have, and the losses of all steps."""
    for name in ("model.pt", BEST):
        assert_same_model(folder / name, whole / name)
    assert losses(folder / LOG) == losses(whole / LOG) and val_losses(folder / LOG) == val_losses(whole / LOG)
    best = [re.search("^# best: .*", (path / LOG).read_text(), re.M)[0] for path in (folder, whole)]
    assert best[0] == best[1]


def test_27_the_best_is_the_one_with_the_lowest_validation_loss(whole, small):
    """In the log, and computed here from val.bin. best.pt is a model like that of --save."""
    found = val_losses(whole / LOG)
    assert list(found) == list(range(3, 31, 3)) and min(found, key=found.get) == 12
    assert f"# best: step 12, validation loss {found[12]:.6f}\n" in (whole / LOG).read_text()
    ids = torch.from_numpy(np.fromfile(small / "val.bin", dtype="<u2").astype(np.int64))
    n = (len(ids) - 1) // T
    for name, step in {"model.pt": 12, BEST: 12, STEP_30: 30}.items():
        with torch.no_grad():
            logits = saved_model(rung("27"), whole / name)(ids[: n * T].view(n, T)).double()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[1 : n * T + 1]).item()
        assert step_of(whole / name) == step and loss == pytest.approx(found[step], abs=1e-5)
    assert files_in(whole / "checkpoints") == {"best.pt", "step_0000020.pt", "step_0000030.pt"}


def test_27_without_checkpoints_save_still_writes_the_best(whole, small, tmp_path):
    folder = run_in(tmp_path / "run", small, "--checkpoint-every", 0)
    assert not (folder / "checkpoints").exists()
    assert_same_model(folder / "model.pt", whole / "model.pt")


def test_27_without_validation_the_last_one_is_saved(whole, small, tmp_path):
    """And again by a run that finds itself finished."""
    for _ in range(2):
        folder = run_in(tmp_path / "run", small, "--val-every", 0, "--resume")
        assert_same_model(folder / "model.pt", whole / STEP_30)
        assert not (folder / BEST).exists() and "# best" not in (folder / LOG).read_text()
        (folder / "model.pt").unlink()


@pytest.mark.parametrize("patience, last", [(1, 15), (3, 21)])
def test_27_patience_counts_validations(patience, last, whole, small, tmp_path, capsys):
    """Without a lower loss than that of step 12; its steps are those of the run that goes on.

    Out of patience it is finished, until it gets more.
    """
    for _ in range(2):
        folder = run_in(tmp_path / "run", small, "--patience", patience, "--resume")
        assert losses(folder / LOG) == losses(whole / LOG)[:last] and list(val_losses(folder / LOG))[-1] == last
        assert "# best: step 12, " in (folder / LOG).read_text()
        assert step_of(folder / f"checkpoints/step_00000{last}.pt") == last
        assert_same_model(folder / "model.pt", whole / "model.pt")
        (folder / "model.pt").unlink()
    output = capsys.readouterr().out
    assert output.count("\nstep : ") == last  # the second run repeats nothing
    assert_same_best(run_in(folder, small, "--patience", 0, "--resume"), whole)


def test_27_a_new_lowest_loss_starts_the_count_again(small, tmp_path):
    """Losses made up: the first validation, then one that is not lower, then ties, of which the first counts."""
    module, made_up = rung("27"), iter([5.0, 6.0, 4.0, 4.0, 4.5, 3.0])
    module.evaluate = lambda *args: next(made_up)
    folder = run_in(tmp_path / "run", small, "--patience", 2, module=module)
    assert list(val_losses(folder / LOG).values()) == [5, 6, 4, 4, 4.5]
    assert "# best: step 9, validation loss 4.000000\n" in (folder / LOG).read_text()


def make_stale(path):
    """Another model of a later step: the run was killed between two files, or a GPU did not repeat its steps."""
    other = torch.load(path, weights_only=True)
    torch.save(other | {"step": 25, "model": {key: weight + 1 for key, weight in other["model"].items()}}, path)


@pytest.mark.parametrize("damage", [Path.unlink, make_stale, flip_a_byte, cut_in_half])
def test_27_best_pt_is_not_needed_to_resume(damage, whole, small, tmp_path):
    """From step 20 on no loss is lower than that of step 12, and yet its model is what is kept."""
    (tmp_path / "checkpoints").mkdir()
    for name in (STEP_20, BEST):
        shutil.copy(whole / name, tmp_path / name)
    log = (whole / LOG).read_text().replace(str(whole), str(tmp_path))
    (tmp_path / LOG).write_text(log.partition("# checkpoint: step 30 ")[0])
    damage(tmp_path / BEST)
    run_in(tmp_path, small, "--resume")
    assert "# resumed after step 20 of 30" in (tmp_path / LOG).read_text()
    assert_same_best(tmp_path, whole)


def test_27_a_signal_saves_the_best_so_far(whole, small, tmp_path):
    """It comes during the validation after step 15, when step 12 is the best, and ends the run after step 16.

    Resumed, it is as if it had not come.
    """
    module = rung("27")
    evaluate, calls = module.evaluate, []

    def evaluate_and_stop(*args):
        calls.append(args)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    module.evaluate = evaluate_and_stop
    folder = run_in(tmp_path / "run", small, module=module)
    assert step_of(folder / "checkpoints/step_0000016.pt") == 16 and len(losses(folder / LOG)) == 16
    assert_same_model(folder / "model.pt", whole / "model.pt")
    assert_same_best(run_in(folder, small, "--resume"), whole)


def test_27_a_signal_before_the_first_validation(small, tmp_path):
    """There is no best yet: the current model is what --save writes."""
    module = rung("27")
    batch = module.DataLoaderLite.batch
    module.DataLoaderLite.batch = lambda self, i: (i == 2 and os.kill(os.getpid(), signal.SIGTERM)) or batch(self, i)
    folder = run_in(tmp_path / "run", small, module=module)
    newest = folder / "checkpoints/step_0000002.pt"
    assert_same_model(folder / "model.pt", newest)
    assert torch.load(newest, weights_only=True)["best"]["step"] == 0 and not (folder / BEST).exists()


def test_27_patience_without_validation_is_refused(small, tmp_path):
    with pytest.raises(SystemExit, match="^error: --patience: .*--val-every 0 "):
        run_in(tmp_path / "run", small, "--patience", 2, "--val-every", 0)
    assert not (tmp_path / "run" / LOG).exists()
