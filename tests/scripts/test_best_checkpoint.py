"""best_checkpoint: the model with the lowest validation loss is what --save holds, after a crash, too; patience."""
import numpy as np
import pytest
import torch
from load_script import rung
from log_files import losses, val_losses
from run_script import Crash, train
from saved_models import assert_same_weights, names_in, saved_model
from token_folders import tokens_of
from torch.nn import functional as F

LOG = "2_best_checkpoint.log"
T = 16
# 400 tokens are memorized in a few steps: the lowest validation loss is that of step 12 of 30.
FLAGS = ("-B", 4, "-T", T, "--steps", 30, "--val-every", 3, "--val-sequences", 0, "--max-lr", 1e-2, "--muon-lr", 2e-2)


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokens):
    """A folder with 400 tokens to train on, single bytes."""
    train_ids, val_ids = (np.fromfile(tokens / f"{split}.bin", dtype="<u2") for split in ("train", "val"))
    folder = tmp_path_factory.mktemp("data") / "small"
    return tokens_of(folder, train_ids[20_000:20_400], val_ids[5_000:5_300], vocab_size=256)


def run_in(folder, data, *more, module=None):
    """Train in `folder`; returns it."""
    module = module or rung("best_checkpoint")
    module.autocast_dtype = lambda device: torch.float32
    folder.mkdir(exist_ok=True)
    train(module, folder, data, *FLAGS, "--save", folder / "model.pt", *more)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small):
    """A folder with a run that nothing disturbed."""
    return run_in(tmp_path_factory.mktemp("whole"), small)


def step_of(path):
    return torch.load(path, weights_only=True)["step"]


def test_best_checkpoint_the_best_is_the_one_with_the_lowest_validation_loss(whole, small):
    """In the log, and computed here from val.bin. Of the ones before it no file is left."""
    found = val_losses(whole / LOG)
    assert list(found) == list(range(3, 31, 3)) and min(found, key=found.get) == 12
    assert f"# best: step 12, validation loss {found[12]:.6f}\n" in (whole / LOG).read_text()
    ids = torch.from_numpy(np.fromfile(small / "val.bin", dtype="<u2").astype(np.int64))
    n = (len(ids) - 1) // T * T
    with torch.no_grad():
        logits = saved_model(rung("best_checkpoint"), whole / "model.pt")(ids[:n].view(-1, T)).double()
    loss = F.cross_entropy(logits.flatten(0, 1), ids[1 : n + 1]).item()
    assert step_of(whole / "model.pt") == 12 and loss == pytest.approx(found[12], abs=1e-5)
    assert names_in(whole) == {LOG, "model.pt"}


def test_best_checkpoint_a_crash_while_the_file_is_written_leaves_the_one_before(small, tmp_path, monkeypatch):
    """Of step 9, when the fourth is written: it is there before the run ends."""
    save, calls = torch.save, []

    def half(content, path):
        calls.append(path)
        save(content, path)
        if len(calls) == 4:
            path.write_bytes(path.read_bytes()[:1000])
            raise Crash

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(Crash):
        run_in(tmp_path / "run", small)
    assert step_of(tmp_path / "run" / "model.pt") == 9


def test_best_checkpoint_an_earlier_runs_model_is_set_aside(small, tmp_path):
    """Once, not at each better model."""
    (tmp_path / "model.pt").write_text("an earlier one")
    run_in(tmp_path, small, "--steps", 9)
    assert step_of(tmp_path / "model.pt") == 9
    aside, = tmp_path.glob("model.pt.*")
    assert aside.read_text() == "an earlier one"


def test_best_checkpoint_what_is_saved_without_save_or_validation(small, tmp_path):
    """Nothing, and the last one."""
    train(rung("best_checkpoint"), tmp_path / "none", small, *FLAGS, "--steps", 6)
    assert names_in(tmp_path / "none") == {LOG} and "# best: step " in (tmp_path / "none" / LOG).read_text()
    folder = run_in(tmp_path / "run", small, "--val-every", 0, "--steps", 6)
    assert step_of(folder / "model.pt") == 6 and "# best" not in (folder / LOG).read_text()


def test_best_checkpoint_patience_counts_validations(whole, small, tmp_path):
    """Three without a lower loss than that of step 12; its steps are those of the run that goes on."""
    folder = run_in(tmp_path / "run", small, "--patience", 3)
    assert losses(folder / LOG) == losses(whole / LOG)[:21] and list(val_losses(folder / LOG))[-1] == 21
    assert "# best: step 12, " in (folder / LOG).read_text()
    assert step_of(folder / "model.pt") == 12
    assert_same_weights(folder / "model.pt", whole / "model.pt")


def test_best_checkpoint_a_new_lowest_loss_starts_the_count_again(small, tmp_path):
    """Losses made up: the first validation, then one that is not lower, then ties, of which the first counts."""
    module, made_up = rung("best_checkpoint"), iter([5.0, 6.0, 4.0, 4.0, 4.5, 3.0])
    module.evaluate = lambda *args: next(made_up)
    folder = run_in(tmp_path / "run", small, "--patience", 2, module=module)
    assert list(val_losses(folder / LOG).values()) == [5, 6, 4, 4, 4.5]
    assert "# best: step 9, validation loss 4.000000\n" in (folder / LOG).read_text()
    assert step_of(folder / "model.pt") == 9
