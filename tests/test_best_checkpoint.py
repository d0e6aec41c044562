"""Rung 27: the model with the lowest validation loss is kept, also by a run that is stopped, killed and resumed."""
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import losses, new_gpt, run_command, rung, train
from test_beyond import Crash, checkpoints_of, cut_in_half, flip_a_byte, val_lines
from test_ddp import RANK, TWO_RANKS
from torch.nn import functional as F

from ladder.scripts.stages import BY_LABEL

BEST = "27"
LOG = "rung_27_best_checkpoint.log"
T = 16
# 400 tokens are memorized in a few steps: the lowest validation loss is that of step 12 of 30.
RATES = ("--max-lr", 1e-2, "--muon-lr", 2e-2)
FLAGS = ("-B", 4, "-T", T, "--total-batch", 4 * T, "--steps", 30, "--val-every", 3, "--val-sequences", 0,
         "--checkpoint-every", 10, *RATES)
STEP_10, STEP_20, STEP_30 = (f"checkpoints/step_00000{step}.pt" for step in (10, 20, 30))


@pytest.fixture(scope="module")
def small(tmp_path_factory, tokens):
    """A folder with 400 tokens to train on, single bytes."""
    folder = tmp_path_factory.mktemp("data") / "small"
    shutil.copytree(tokens, folder)
    meta = json.loads((tokens / "meta.json").read_text()) | {"vocab_size": 256}
    for split, start, n in (("train", 20_000, 400), ("val", 5_000, 300)):
        part = np.fromfile(tokens / f"{split}.bin", dtype="<u2")[start : start + n]
        part.tofile(folder / f"{split}.bin")
        meta[f"{split}_tokens"] = n
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def float32_rung():
    module = rung(BEST)
    module.autocast_dtype = lambda device: torch.float32
    return module


def run_in(folder, data, *more, module=None):
    """Train in `folder`; returns it."""
    folder.mkdir(exist_ok=True)
    train(module or float32_rung(), folder, data, *FLAGS, "--save", folder / "model.pt", *more)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small):
    """A folder with a run that nothing disturbed; its checkpoints are of steps 20 and 30, and best.pt."""
    return run_in(tmp_path_factory.mktemp("whole"), small)


def val_losses(folder):
    """{step: validation loss} of a run's log."""
    return dict(val_lines(folder / LOG))


def saved(path):
    return torch.load(path, weights_only=True)


def loss_of(file, data):
    """The validation loss of the model in a file, computed here, from val.bin."""
    checkpoint, module = saved(file), rung(BEST)
    model = module.GPT(module.GPTConfig(**checkpoint["config"])).eval()
    model.load_state_dict(checkpoint["model"])
    ids = torch.from_numpy(np.fromfile(data / "val.bin", dtype="<u2").astype(np.int64))
    n = (len(ids) - 1) // T
    with torch.no_grad():
        logits = model(ids[: n * T].view(n, T))
    return F.cross_entropy(logits.flatten(0, 1).double(), ids[1 : n * T + 1]).item()


def assert_same_model(file, truth):
    """The weights to the bit, and the step that they are of."""
    ours, truth = saved(file), saved(truth)
    assert ours["step"] == truth["step"]
    assert all(torch.equal(ours["model"][key], truth["model"][key]) for key in truth["model"]), file


def assert_same_best(folder, whole):
    """The models that --save and best.pt have, and the losses of all steps."""
    for name in ("model.pt", "checkpoints/best.pt"):
        assert_same_model(folder / name, whole / name)
    assert losses(folder / LOG) == losses(whole / LOG) and val_losses(folder) == val_losses(whole)
    best = [re.search("^# best: .*", (path / LOG).read_text(), re.M)[0] for path in (folder, whole)]
    assert best[0] == best[1]


def test_27_the_best_is_the_one_with_the_lowest_validation_loss(whole, small):
    found = val_losses(whole)
    step = min(found, key=found.get)
    assert list(found) == list(range(3, 31, 3)) and step == 12
    assert f"# best: step 12, validation loss {found[12]:.6f}\n" in (whole / LOG).read_text()
    files = {"model.pt": 12, "checkpoints/best.pt": 12, STEP_30: 30}
    for name, step in files.items():
        assert saved(whole / name)["step"] == step
        assert loss_of(whole / name, small) == pytest.approx(found[step], abs=1e-5)
    remembered = saved(whole / STEP_30)["best"]
    assert (remembered["step"], round(remembered["loss"], 6)) == (12, found[12])


def test_27_best_pt_is_a_model_like_that_of_save(whole):
    """So that sample.py, convert.py and evaluations take it."""
    keys = [set(saved(whole / name)) for name in ("checkpoints/best.pt", "model.pt")]
    assert keys[0] == keys[1] and not list(whole.glob("checkpoints/*.partial"))
    sizes = [(whole / name).stat().st_size for name in ("checkpoints/best.pt", "model.pt")]
    assert sizes[0] == sizes[1]
    assert all(BY_LABEL[label].exports_to == "qwen3" for label in ("26", BEST))


def test_27_keeping_the_best_changes_no_step(whole, small, tmp_path):
    module = rung("26")
    module.autocast_dtype = lambda device: torch.float32
    log = train(module, tmp_path, small, *FLAGS)
    assert losses(log) == losses(whole / LOG)


def test_27_a_tied_matrix_is_copied_once():
    module = rung("27")
    model = new_gpt(module)
    copied, load = [], model.load_state_dict
    best = SimpleNamespace(loss=9.0, model=SimpleNamespace(
        load_state_dict=lambda weights, strict: copied.extend(weights) or load(weights, strict)))
    kept = SimpleNamespace(best=best, parts={"model": model})
    module.Checkpoints.keep_best(kept, 3, 8.0)
    assert len(copied) == len(list(model.parameters())) and (best.step, best.loss) == (3, 8.0)


def test_27_without_checkpoints_save_still_writes_the_best(whole, small, tmp_path):
    folder = run_in(tmp_path / "run", small, "--checkpoint-every", 0)
    assert not checkpoints_of(folder / "checkpoints")
    assert_same_model(folder / "model.pt", whole / "model.pt")


def test_27_without_validation_the_last_one_is_saved(whole, small, tmp_path):
    folder = run_in(tmp_path / "run", small, "--val-every", 0)
    assert_same_model(folder / "model.pt", whole / STEP_30)
    assert not (folder / "checkpoints/best.pt").exists() and "# best" not in (folder / LOG).read_text()
    (folder / "model.pt").unlink()  # and again by the run that finds itself finished
    run_in(folder, small, "--val-every", 0, "--resume")
    assert_same_model(folder / "model.pt", whole / STEP_30)


@pytest.mark.parametrize("patience, last", [(1, 15), (2, 18), (3, 21)])
def test_27_patience_counts_validations(patience, last, whole, small, tmp_path):
    """Without a lower loss than that of step 12; its steps are those of the run that goes on."""
    folder = run_in(tmp_path / "run", small, "--patience", patience)
    assert losses(folder / LOG) == losses(whole / LOG)[:last] and list(val_losses(folder))[-1] == last
    newest = f"newest checkpoint: step {last}"
    assert f"# ended by --patience after step {last}; {newest}\n" in (folder / LOG).read_text()
    assert "# best: step 12, " in (folder / LOG).read_text()
    assert saved(folder / "model.pt")["step"] == saved(folder / "checkpoints/best.pt")["step"] == 12
    assert saved(folder / f"checkpoints/step_00000{last}.pt")["step"] == last


def test_27_a_new_lowest_loss_starts_the_count_again(small, tmp_path):
    """Losses made up: the first validation, then one that is not lower, then ties, of which the first counts."""
    module, made_up = float32_rung(), iter([5.0, 6.0, 4.0, 4.0, 4.5, 3.0])
    module.evaluate = lambda *args: next(made_up)
    folder = run_in(tmp_path / "run", small, "--patience", 2, module=module)
    assert list(val_losses(folder).values()) == [5, 6, 4, 4, 4.5]
    assert "# best: step 9, validation loss 4.000000\n" in (folder / LOG).read_text()


def test_27_a_run_out_of_patience_is_finished_until_it_gets_more(whole, small, tmp_path, capsys):
    folder = run_in(tmp_path / "run", small, "--patience", 2)
    (folder / "model.pt").unlink()
    capsys.readouterr()
    run_in(folder, small, "--patience", 2, "--resume")
    assert "step : " not in capsys.readouterr().out
    assert losses(folder / LOG) == losses(whole / LOG)[:18]
    assert_same_model(folder / "model.pt", whole / "model.pt")
    run_in(folder, small, "--patience", 0, "--resume")
    assert_same_best(folder, whole)


def test_27_the_decay_can_follow_where_patience_ended_the_run(small, tmp_path):
    """As docs/modern.md says: --steps such that the decay begins there; until then the steps are the same."""
    folder = run_in(tmp_path / "run", small, "--steps", 1000, "--patience", 2)
    before = losses(folder / LOG)
    assert len(before) == 18
    run_in(folder, small, "--steps", 30, "--patience", 0, "--resume")  # 18 = 30 * (1 - 0.4)
    text = (folder / LOG).read_text()
    rates = [float(rate) for rate in re.findall(r"\| lr: (\S+)", text)]
    assert losses(folder / LOG)[:18] == before and len(rates) == 30
    decaying = [1e-2 * (31 - step) / 12 for step in range(19, 31)]
    assert rates[17] == 1e-2 and rates[18:] == pytest.approx(decaying, rel=1e-4)


def test_27_a_crash_between_two_files_changes_nothing(whole, small, tmp_path, monkeypatch):
    """best.pt is then of a later step than the newest checkpoint."""
    save = torch.save

    def crashing_save(contents, file):
        if "run" in contents and contents["step"] == 20:  # best.pt is not a checkpoint
            raise Crash
        return save(contents, file)

    monkeypatch.setattr(torch, "save", crashing_save)
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        run_in(folder, small)
    monkeypatch.undo()
    assert saved(folder / "checkpoints/best.pt")["step"] == 12
    assert checkpoints_of(folder / "checkpoints") == {"best.pt", "step.partial", STEP_10.split("/")[1]}
    run_in(folder, small, "--resume")
    assert_same_best(folder, whole)


def remove(path):
    path.unlink()


def make_stale(path):
    """Another model, as if of a later step that a repetition on a GPU did not reproduce."""
    other = saved(path)
    torch.save(other | {"step": 25, "model": {key: weight + 1 for key, weight in other["model"].items()}}, path)


@pytest.mark.parametrize("damage", [remove, make_stale, flip_a_byte, cut_in_half])
def test_27_best_pt_is_not_needed_to_resume(damage, whole, small, tmp_path):
    """From step 20 on no loss is lower than that of step 12, and yet its model is what is kept."""
    (tmp_path / "checkpoints").mkdir()
    for name in (STEP_20, "checkpoints/best.pt"):
        shutil.copy(whole / name, tmp_path / name)
    damage(tmp_path / "checkpoints/best.pt")
    run_in(tmp_path, small, "--resume")
    assert "# resumed after step 20 of 30 | device: cpu" in (tmp_path / LOG).read_text()
    assert_same_best(tmp_path, whole)


def test_27_a_full_disk_costs_the_file_and_not_the_run(whole, small, tmp_path, monkeypatch):
    """best.pt is written first, so there is no newer checkpoint either."""
    write = Path.write_bytes

    def full_disk(path, contents):
        if path.name == "best.pt.partial":
            raise OSError(28, "No space left on device")
        return write(path, contents)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    folder = run_in(tmp_path / "run", small)
    assert len(re.findall(r"^# WARNING: no checkpoint of step [123]0", (folder / LOG).read_text(), re.M)) == 3
    assert not checkpoints_of(folder / "checkpoints")
    assert_same_model(folder / "model.pt", whole / "model.pt")


def test_27_a_signal_saves_the_best_so_far(whole, small, tmp_path):
    """It comes during the validation after step 15, when step 12 is the best; resumed, it is as if it had not come."""
    module = float32_rung()
    evaluate, calls = module.evaluate, []

    def evaluate_and_stop(*args):
        calls.append(args)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    module.evaluate = evaluate_and_stop
    folder = run_in(tmp_path / "run", small, module=module)
    assert "# ended by a signal after step 15; newest checkpoint: step 15\n" in (folder / LOG).read_text()
    assert_same_model(folder / "model.pt", whole / "model.pt")
    run_in(folder, small, "--resume")
    assert_same_best(folder, whole)


def test_27_a_signal_before_the_first_validation(small, tmp_path):
    """There is no best yet: the current model is what --save writes."""
    module = float32_rung()
    batch = module.DataLoaderLite.batch
    module.DataLoaderLite.batch = lambda self, i: (i == 2 and os.kill(os.getpid(), signal.SIGTERM)) or batch(self, i)
    folder = run_in(tmp_path / "run", small, module=module)
    newest = folder / "checkpoints/step_0000002.pt"
    assert_same_model(folder / "model.pt", newest)
    assert saved(newest)["best"]["step"] == 0 and not (folder / "checkpoints/best.pt").exists()


def test_27_patience_without_validation_is_refused(small, tmp_path):
    with pytest.raises(SystemExit, match="^error: --patience 2: --val-every 0 turns validation off; change one$"):
        run_in(tmp_path / "run", small, "--patience", 2, "--val-every", 0)
    assert not (tmp_path / "run" / LOG).exists()


def test_27_losses_on_other_sequences_are_not_compared(whole, small, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(whole / STEP_20, tmp_path / STEP_20)
    with pytest.raises(SystemExit, match="has val_sequences 0, not 4; make them equal"):
        run_in(tmp_path, small, "--resume", "--val-sequences", 4)


@pytest.mark.slow
def test_27_two_ranks_stop_at_the_same_step(whole, small, tmp_path):
    """Each rank's process ends, after as many batches, and with the best of the run in one process."""
    flags = [*FLAGS, "-B", 2, "--patience", 2, "--save", tmp_path / "model.pt", "--model", "tiny", "--device", "cpu",
             "--compile-mode", "none", "--data", small, "--log-dir", tmp_path, "--checkpoint-dir", tmp_path / "best"]
    run = run_command(*TWO_RANKS, RANK, tmp_path, BEST, *flags)
    assert run.returncode == 0, run.stderr
    assert "# ended by --patience after step 18; newest checkpoint: step 18\n" in (tmp_path / LOG).read_text()
    assert losses(tmp_path / LOG) == pytest.approx(losses(whole / LOG)[:18], abs=1e-3)
    assert [step for step, _ in val_lines(tmp_path / LOG)] == [3, 6, 9, 12, 15, 18]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert all(torch.equal(ranks[0][key], ranks[1][key]) for key in ranks[0])
    assert saved(tmp_path / "model.pt")["step"] == 12
    resumed = run_command(*TWO_RANKS, RANK, tmp_path, BEST, *flags, "--resume")
    assert resumed.returncode == 0 and "step : " not in resumed.stdout, resumed.stderr
    assert loss_of(tmp_path / "model.pt", small) == pytest.approx(val_losses(whole)[12], abs=1e-3)
