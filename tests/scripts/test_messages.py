"""Every wrong value ends in one clear line and a non-zero exit, never in a traceback or a damaged file.

All of it is plumbing, the same in every script (test_check_laws.py), so one script or two stand for all.
"""
import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from damaged_files import Attack, cut_in_half
from load_script import ROOT, known_flags, rung, rungs_that_change, validates
from log_files import losses
from run_script import as_program, train
from saved_models import save_as_from_a_gpu, saved_model
from token_folders import data_with, edit_json, tokens_of

from data import vocabulary
from ladder.rungs.list import BY_LABEL

STEP = ("-B", 1, "-T", 16, "--steps", 1)


@pytest.fixture
def stopped(byte_tokens, tmp_path):
    """stopped(label, *flags): the exit code and the last line of a script that must stop."""

    def run(label, *flags, compile_mode="none"):
        eager = known_flags(rung(label), compile_mode=compile_mode)
        run = as_program(label, "--data", byte_tokens, "--log-dir", tmp_path / "logs", *eager, *flags)
        lines = run.stderr.splitlines()
        assert run.returncode == 2 or run.returncode == len(lines) == 1 and lines[0].startswith("error: ")
        return run.returncode, lines[-1]

    return run


@pytest.mark.parametrize("label, words, named", [
    *(("0", f"-{name} {value}", f"{name}: give at least 1, not {value}") for name in ("B", "T", "-steps")
      for value in (0, -8)),
    *((label, f"{flag} {value}", f"argument {flag}: give at least 0, not {value}") for label, flag, value in (
        ("documents_apart", "--val-sequences", -1), ("distributed_validation", "--val-every", -5),
        ("checkpoints", "--checkpoint-every", -1),
        ("chunked_cross_entropy", "--loss-chunk", -1), ("trapezoid_lr", "--decay-share", "nan"),
        ("9", "--max-lr", "inf"))),
    *((label, f"--model {model}", f"error: --model {model}: ") for label in rungs_that_change("model_config")
      for model in ("gpt5", "4x4", "4x3x128", "0x2x16", "2x0x16")),
    ("0", "--step 5", "unrecognized arguments: --step"),  # not short for --steps
    ("0", "--pretrained gpt2", "--pretrained gpt2: not a file of --save or convert.py"),
    ("0", "--data nowhere", "--data nowhere: no complete token files ([Errno 2]"),
    ("documents_apart", "--data nowhere", "beside baseline.py, run python data/prepare"),
    ("0", "--device cuda:1", "argument --device: give one of ['cpu']; python -m ladder check says why"),
    ("0", "-B 100000 -T 1024", "-T, -B: a batch needs 102400001 train tokens; there are"),
    *(("gradient_accumulation", f"-B 2 -T 32 --total-batch {n}", f"error: --total-batch {n}: not a multiple of B * T")
      for n in (100, 0)),
    ("best_checkpoint", "--patience 2 --val-every 0", "error: --patience: needs validations"),
    *(("grouped_query_attention", words, "error: --kv-heads ") for words in (
        "--kv-heads 3", "--kv-heads 0", "--head-size 17")),
    # the graphs do not take tied weights under DDP, and later they would overwrite gradients that accumulate
    *((label, f"--compile-mode {mode}", f"argument --compile-mode: invalid choice: '{mode}'")
      for label in rungs_that_change("add_flags", since="ddp") for mode in ("reduce-overhead", "max-autotune")),
])
def test_wrong_words(label, words, named, stopped, tmp_path):
    assert named in stopped(label, *words.split())[1]
    assert not list(tmp_path.glob("logs/*"))  # nor did a run begin


@pytest.mark.parametrize("damage, named", [
    (lambda folder: (folder / "meta.json").unlink(), "[Errno 2]"),  # it comes last
    (lambda folder: (folder / "meta.json").write_text("{"), "Expecting"),
    (lambda folder: (folder / "meta.json").write_text("{}"), "'train_tokens'"),
    (lambda folder: os.truncate(folder / "train.bin", 20_000), "mmap length is greater than file size")])
def test_token_files_that_are_not_whole(damage, named, stopped, byte_tokens, tmp_path):
    folder = shutil.copytree(byte_tokens, tmp_path / "tokens")
    damage(folder)
    assert f"--data {folder}: no complete token files ({named}" in stopped("0", "--data", folder, *STEP)[1]


@pytest.mark.parametrize("label", rungs_that_change("DataLoaderLite.batch"))
def test_an_id_beyond_the_vocabulary(label, tmp_path, capsys):
    """Wherever it stands. A padded vocabulary has a row for it, so nothing else would notice from rung 7 on."""
    data = tokens_of(tmp_path / "data", [1] * 480 + [300] + [1] * 200, vocab_size=300)
    more = known_flags(rung(label), total_batch=16, val_every=0)
    with pytest.raises(SystemExit, match=r"error: --data: token 300 is beyond vocab_size"):
        train(rung(label), tmp_path, data, *STEP, "--steps", 40, *more)
    assert capsys.readouterr().out.count("step : ") >= 1


def test_a_log_folder_that_is_a_file(stopped, byte_tokens, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert f"error: [Errno 17] File exists: '{tmp_path}/file'" in stopped("0", *STEP, "--log-dir", tmp_path / "file")[1]


def test_a_log_folder_that_is_a_link_to_nothing_is_made(byte_tokens, tmp_path):
    """A cluster empties its scratch disk; the links in the home folders stay."""
    (tmp_path / "logs").symlink_to(tmp_path / "scratch" / "logs")
    train(rung("0"), tmp_path / "logs", byte_tokens, *STEP)
    assert [path.name for path in (tmp_path / "scratch" / "logs").iterdir()] == ["baseline.log"]


def test_names_that_are_not_utf8_cost_nothing(byte_tokens, tmp_path):
    """Of an archive from Windows: as the text's name in the log, and as the folder of the checkpoints."""
    folder = shutil.copytree(byte_tokens, tmp_path / "tokens")
    name = os.fsdecode(b"Gr\xf6\xdfe")
    edit_json(folder / "meta.json", source=name)
    log = train(rung("checkpoints"), tmp_path / name, folder, *STEP, "--total-batch", 16, "--val-every", 0)
    assert (tmp_path / name / "checkpoints" / "step_0000001.pt").exists()
    assert "# data: Gr\\udcf6\\udcdfe (bytes tokens)" in log.read_text(encoding="utf-8")


def test_a_full_disk_costs_what_it_cannot_hold(byte_tokens, stopped, tmp_path, capsys):
    """The log or the model, not the run; and of the model no half of a file stays."""
    module = rung("0")
    module.open = lambda path, *how, **more: open("/dev/full", *how, **more)
    train(module, tmp_path, byte_tokens, *STEP, "--save", tmp_path / "model.pt")
    assert re.search(r"step : 1 \| .* \| not logged: \[Errno 28\] No space left", capsys.readouterr().out)
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == 1
    (tmp_path / "other.pt.partial").symlink_to("/dev/full")
    line = stopped("0", *STEP, "--save", tmp_path / "other.pt")[1]
    assert f"error: --save {tmp_path}/other.pt: not written; is the disk full? (" in line
    assert not [*tmp_path.glob("other*")]


def test_a_folder_that_is_deleted_meanwhile_is_made_again(byte_tokens, tmp_path):
    module, folder = rung("0"), tmp_path / "models"
    folder.mkdir()
    module.Log.finish = lambda log, step: folder.rmdir()
    train(module, tmp_path, byte_tokens, *STEP, "--save", folder / "model.pt")
    assert [path.name for path in folder.iterdir()] == ["model.pt"]


def test_a_name_that_stdout_cannot_encode(byte_tokens, tmp_path, monkeypatch):
    folder = shutil.copytree(byte_tokens, tmp_path / "tokens")
    edit_json(folder / "meta.json", source="дневник.txt")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
    log = train(rung("0"), tmp_path, folder, *STEP)
    assert "# data: дневник.txt " in log.read_text(encoding="utf-8") and len(losses(log)) == 1


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, byte_tokens):
    """model_of(label): the file that --save of a short run of the rung has written, as on a GPU."""
    folder = tmp_path_factory.mktemp("models")

    def make(label):
        path = folder / f"{label}.pt"
        if not path.exists():
            more = ("--val-every", 0) if validates(label) else ()
            train(rung(label), folder / label, byte_tokens, *STEP, "--save", path, *more)
            save_as_from_a_gpu(torch.load(path, weights_only=True), path)
        return path

    return make


@pytest.mark.parametrize("content", [b"weights", b"", "half", "archive", "another program's", "code"])
def test_what_is_no_models_file(content, stopped, model_of, tmp_path):
    """Its code must not run."""
    path = tmp_path / "model.pt"
    shutil.copy(model_of("0"), path)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "half":
        cut_in_half(path)
    elif content == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "a")
    elif content == "code":
        saved = torch.load(path, map_location="cpu", weights_only=True)
        torch.save(saved | {"T": Attack(tmp_path / "attacked")}, path)
    else:
        torch.save({"lm_head.weight": torch.ones(2, 2)}, path)
    assert f"error: --pretrained {path}: not a file of --save or convert.py" in stopped("0", "--pretrained", path)[1]
    assert not (tmp_path / "attacked").exists()


def test_a_model_is_trained_further(model_of, stopped, byte_tokens, tmp_path):
    """By every rung with the same model; any other names the script that loads it. In no longer context.

    Rung 0's model does not tie its two matrices, and those have the names and shapes of rung 1's.
    """
    first = train(rung("10"), tmp_path, byte_tokens, *STEP, "--pretrained", model_of("10"))
    last = train(rung("trapezoid_lr"), tmp_path, byte_tokens, *STEP, "--pretrained", model_of("10"), "--val-every", 0)
    fresh = train(rung("10"), tmp_path / "fresh", byte_tokens, *STEP)
    assert losses(first) == pytest.approx(losses(last), abs=0.02) and losses(first)[0] < losses(fresh)[0] - 0.01
    for label, source in [("0", "10"), ("1", "0"), ("10", "1"), ("zero_init", "10"),
                          ("zero_init", "ngram_embeddings"), ("10", "zero_init")]:
        line = stopped(label, *STEP, "--pretrained", model_of(source))[1]
        assert "--pretrained: not a model of this script; " in line and f"{BY_LABEL[source].path.name}" in line
    train(rung("10"), tmp_path / "longest", byte_tokens, *STEP, "-T", 1024, "--pretrained", model_of("10"))
    line = stopped("10", *STEP, "-T", 1100, "--pretrained", model_of("10"))[1]
    assert "-T: the model takes at most 1024 tokens" in line


def test_a_pretrained_model_with_other_tokens_than_the_data(stopped, model_of, tmp_path):
    """Of another size, or two vocabularies of one size, trained on different texts: only the merges tell them apart.

    Not their names either: two folders of Hugging Face's may both be called "mine". Those of GPT-2 and of the single
    bytes in its place, as without a network, do: they have no file.
    """
    words = [" ".join(map(str, range(first, 2000))) for first in (0, 1000)]
    folders = [data_with(vocabulary.trained([text], 300), text, tmp_path / f"data{text[0]}") for text in words]
    same_name = shutil.copytree(folders[1], tmp_path / "same_name")
    edit_json(same_name / "meta.json", tokenizer=json.loads((folders[0] / "meta.json").read_text())["tokenizer"])
    gpt2 = tokens_of(tmp_path / "gpt2", [7] * 200)
    bytes_of_gpt2 = data_with(vocabulary.of_bytes("gpt2-bytes"), 200 * "x", tmp_path / "bytes")
    models = {data: tmp_path / f"{data.name}.pt" for data in (folders[0], bytes_of_gpt2)}
    for data, model in models.items():
        train(rung("0"), tmp_path / "logs", data, *STEP, "--save", model)
    for model, data in [(model_of("0"), folders[0]), (models[folders[0]], folders[1]), (models[folders[0]], same_name),
                        (models[bytes_of_gpt2], gpt2)]:
        line = stopped("0", *STEP, "--pretrained", model, "--data", data)[1]
        assert "--pretrained: its tokenizer is not that of --data" in line and f"--tokenizer {model}" in line


@pytest.mark.parametrize("label", ["0", "checkpoints", "documents_apart"])
def test_token_ids_of_ones_own(label, tmp_path):
    """As docs/own_text.md describes them. A missing end of text costs no model, for which alone it is needed."""
    text = (ROOT / "docs" / "own_text.md").read_text(encoding="utf-8")
    meta = json.loads(re.search(r'{"source": "mine".*?}', text, re.DOTALL)[0])
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "val"):
        (np.arange(meta[f"{split}_tokens"]) % meta["vocab_size"]).astype("<u2").tofile(folder / f"{split}.bin")
    (folder / "tokenizer.json").write_text("{}")
    if label == "0":
        del meta["end_of_text"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert len(losses(train(rung(label), tmp_path, folder, *STEP, "--save", tmp_path / "model.pt"))) == 1
    assert torch.load(tmp_path / "model.pt", weights_only=True)["end_of_text"] == meta.get("end_of_text")


def test_save_replaces_nothing(byte_tokens, tmp_path):
    (tmp_path / "model.pt").write_text("precious")
    train(rung("0"), tmp_path / "logs", byte_tokens, *STEP, "--save", tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == 1
    [earlier] = tmp_path.glob("model.pt.20*")
    assert earlier.read_text() == "precious"


def test_files_set_aside_within_a_second_are_all_kept(tmp_path):
    path = tmp_path / "a.log"
    for text in "abc":
        path.write_text(text)
        rung("0").set_aside(path)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("place", ["", "folder", "nowhere/model.pt", "file/model.pt", "model.safetensors"])
def test_where_save_cannot_write_is_refused_at_the_start(place, stopped, tmp_path, monkeypatch):
    """Before the first step, not after the last one; and a folder is not set aside as a file of that name would be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    code, line = stopped("0", *STEP, "--save", place)
    assert code == 2 and f"argument --save: {Path(place)}: " in line
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_saved_model_is_plain_and_complete(byte_tokens, tmp_path):
    module = rung("0")
    train(module, tmp_path, byte_tokens, *STEP, "--save", tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    meta = json.loads((byte_tokens / "meta.json").read_text())
    del saved["model"], saved["config"]
    assert saved == {
        "script": "baseline.py", "step": 1, "T": 16,
        "tokenizer": "bytes", "tokenizer_json": (byte_tokens / "tokenizer.json").read_text(encoding="utf-8"),
        "end_of_text": meta["end_of_text"]}
    saved_model(module, tmp_path / "model.pt")  # strict: every weight, and nothing else


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_a_loss_that_is_not_finite(loss, stopped, tmp_path, monkeypatch):
    """The line of the broken step is still logged."""
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda logits, _: logits.square().sum() * float(loss))
    code, line = stopped("0", *STEP)
    assert code == 1 and f"the loss is {loss} at step 1" in line
    assert f"step : 1 | loss: {loss}" in (tmp_path / "logs" / "baseline.log").read_text()


@pytest.mark.parametrize("label", ["distributed_validation", "documents_apart"])
def test_a_validation_loss_that_is_not_finite(label, stopped, tmp_path):
    """After an update that breaks the model: it is not saved."""
    line = stopped(label, *STEP, "--max-lr", 1e38, "--warmup-steps", 0, "--save", tmp_path / "model.pt")[1]
    assert "error: the validation loss is nan; " in line and not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` for 2.00 GiB"),
    RuntimeError("backend='inductor' raised: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: ... 2.00 GiB"),
])
def test_out_of_memory(error, stopped, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    code, line = stopped("0", *STEP)
    assert code == 1 and "error: out of memory; try half the -B, or a lower -T" in line and "2.00 GiB" in line


@pytest.mark.parametrize("error, line", [
    (RuntimeError("no C++ compiler"), "error: torch.compile does not work here (no C++ compiler); --compile-mode none"),
    (NotADirectoryError("cache"), "error: torch.compile does not work here (cache); --compile-mode none trains"),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "error: out of memory; try half the -B"),
])
def test_a_compiler_that_fails(error, line, stopped, monkeypatch):
    """Or whose cache cannot be written."""
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "compile", fail)
    code, last = stopped("5", *STEP, compile_mode="default")
    assert code == 1 and line in last


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_compiler_that_is_turned_off(name, stopped, monkeypatch):
    """Else the log would say that the model is compiled."""
    monkeypatch.setenv(name, "1")
    assert f"error: {name}=1 forbids torch.compile; unset it, or add --compile-mode none" in stopped(
        "5", *STEP, compile_mode="default")[1]


def test_another_error_of_torch_is_not_called_out_of_memory(byte_tokens, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    with pytest.raises(RuntimeError, match="mat1"):
        as_program("0", "--data", byte_tokens, "--log-dir", tmp_path, *STEP)
