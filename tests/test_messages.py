"""Every wrong value ends in one clear line and a non-zero exit, never in a traceback or a damaged file.

All of it is plumbing, the same in every script (test_laws.py), so one script or two stand for all.
"""
import argparse
import json
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import (
    ROOT, as_program, data_with, edit_json, load_module, losses, rung, rungs_that_change, saved_model, train)

from data import vocabulary
from ladder.scripts.stages import BY_LABEL

TWO_RUNGS = pytest.mark.parametrize("label", ["0", "16"])
STEP = ("-B", 1, "-T", 16, "--steps", 1)


@pytest.fixture
def stopped(byte_tokens, tmp_path):
    """stopped(label, *flags): the exit code and the last line of a script that must stop."""

    def run(label, *flags):
        run = as_program(label, "--data", byte_tokens, "--log-dir", tmp_path / "logs", *flags)
        lines = run.stderr.splitlines()
        assert run.returncode == 2 or run.returncode == len(lines) == 1 and lines[0].startswith("error: ")
        return run.returncode, lines[-1]

    return run


def program(*flags, **more):
    """baseline.py as a process that also fails if anything warns."""
    strict = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning"]  # the log is open to the end
    command = [*strict, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", *flags]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300, **more)


@pytest.mark.parametrize("label, words, named", [
    *((label, words, "-B, -T and --steps must be at least 1, other numbers at least 0") for label in ("0", "16")
      for words in ("-B 0", "-T 0", "--steps 0", "--seed -1", f"--seed {2**70}")),
    *(("10", words, "other numbers at least 0 and below") for words in ("--max-lr nan", "--max-lr inf")),
    *((label, f"--model {model}", f"--model {model}: ") for label in ("0", "16")
      for model in ("gpt5", "4x4", "0x4x128", "4x3x128", "4x4x12")),  # RoPE rotates pairs
    *(("0", words, "baseline.py: error: ") for words in (
        "-B two", "--steps 1.5", "--no-such-flag", "--device tpu", "--step 5", "--seed", "a_file.txt")),
    ("0", "--data nowhere", "--data nowhere: no token files ("),
    ("0", "-B 100000 -T 1024", "a batch needs 102400001; lower -B or -T"),
])
def test_wrong_words(label, words, named, stopped):
    assert named in stopped(label, *words.split())[1]


@pytest.mark.parametrize("label", [label for label in rungs_that_change("add_flags") if label != "0"])
def test_numbers_below_zero_are_refused(label, capsys):
    """Of every flag, by argparse's two lines, which say what the numbers must be."""
    module, parser = rung(label), argparse.ArgumentParser()
    module.add_flags(parser)
    flags = [action.option_strings[0] for action in parser._actions if action.type in (int, float)]
    assert len(flags) >= 4
    for flag in flags:
        with pytest.raises(SystemExit) as stop:
            module.parse_args([flag, "-1"])
        assert stop.value.code == 2 and "other numbers at least 0 and below" in capsys.readouterr().err.splitlines()[-1]


def test_defaults_depend_on_the_device_and_a_missing_one_is_refused(stopped, monkeypatch):
    for there, B in ((True, 4), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.mps, "is_available", lambda: False)
        settings = rung("0").parse_args([])
        assert (settings.device, settings.B, settings.T, settings.steps) == ("cuda" if there else "cpu", B, 1024, 50)
    for device in ("cuda", "mps"):
        assert f"--device: invalid choice: '{device}'" in stopped("0", "--device", device)[1]


@pytest.mark.parametrize("label, name, damage", [
    ("0", "meta.json", lambda text: text[:20]), ("0", "meta.json", lambda text: b"\xff\xfe\x00"),
    ("0", "meta.json", lambda text: b"[1, 2]"), ("0", "meta.json", lambda text: text.replace(b"257", b"null")),
    *(("0", "meta.json", lambda text, key=key: text.replace(key, b"other"))
      for key in (b"vocab_size", b"train_tokens", b"source", b"tokenizer")),
    ("0", "train.bin", lambda ids: b""), ("0", "train.bin", lambda ids: ids[:-2]),
    ("0", "train.bin", lambda ids: ids[:-1]),
    ("0", "train.bin", lambda ids: ids[:-2] + np.uint16(257).tobytes()),  # the vocabulary ends before it
    *(("0", name, None) for name in ("meta.json", "train.bin", "tokenizer.json")),
    ("16", "val.bin", None),
])
def test_damaged_data(label, name, damage, stopped, byte_tokens, tmp_path):
    folder = shutil.copytree(byte_tokens, tmp_path / "tokens")
    if damage:
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    else:
        (folder / name).unlink()
    code, line = stopped(label, "--data", folder, *(["--compile-mode", "none"] if label == "16" else []))
    assert code == 1 and f"--data {folder}: no token files (" in line
    assert f"make them: python data/prepare.py --out {folder}" in line


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, byte_tokens):
    """model_of(label): the file that --save of a short run of the rung has written."""
    folder = tmp_path_factory.mktemp("models")

    def make(label):
        path = folder / f"{label}.pt"
        if not path.exists():
            more = ("--val-every", 0, "--checkpoint-every", 0, "--total-batch", 16) if int(label) > 10 else ()
            train(rung(label), folder / label, byte_tokens, *STEP, "--save", path, *more)
        return path

    return make


@TWO_RUNGS
def test_what_is_no_models_file_is_answered_with_the_command(label, stopped, tmp_path):
    (tmp_path / "text.pt").write_text("weights")
    for name in ("gpt2", tmp_path, tmp_path / "text.pt"):
        line = stopped(label, "--pretrained", name)[1]
        assert f"{name}: not a model's file" in line and f"python convert.py {name} model.pt" in line


def test_a_model_is_trained_further(model_of, stopped, byte_tokens, tmp_path):
    """By every rung with the same model; any other names the script that loads it. In no longer context."""
    first = train(rung("10"), tmp_path, byte_tokens, *STEP, "--pretrained", model_of("10"))
    last = train(rung("19"), tmp_path, byte_tokens, *STEP, "--pretrained", model_of("10"), "--total-batch", 16,
                 "--val-every", 0)
    fresh = train(rung("10"), tmp_path / "fresh", byte_tokens, *STEP)
    assert losses(first) == pytest.approx(losses(last), abs=0.02) and losses(first)[0] < losses(fresh)[0] - 0.01
    for label, source in [("0", "10"), ("1", "0"), ("10", "1"), ("24", "10"), ("24", "31"), ("10", "24")]:
        line = stopped(label, *STEP, "--pretrained", model_of(source))[1]
        assert "--pretrained: " in line and f"{BY_LABEL[source].path.name} loads it" in line
    line = stopped("10", *STEP, "-T", 1100, "--pretrained", model_of("10"))[1]
    assert "-T 1100: " in line and "1024; lower -T" in line


def test_a_pretrained_model_with_other_tokens_than_the_data(stopped, model_of, tmp_path):
    """Of another size, or two vocabularies of one size, trained on different texts: only the merges tell them apart."""
    words = [" ".join(map(str, range(first, 2000))) for first in (0, 1000)]
    folders = [data_with(vocabulary.trained([text], 300), words[0], tmp_path / f"data{text[0]}") for text in words]
    model = tmp_path / "model.pt"
    train(rung("0"), tmp_path / "logs", folders[0], *STEP, "--save", model)
    for path, data in [(model_of("0"), folders[0]), (model, folders[1])]:
        line = stopped("0", *STEP, "--pretrained", path, "--data", data)[1]
        assert "--pretrained: " in line and "data/prepare.py --tokenizer FILE" in line
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(3000))))
    load_module(ROOT / "data" / "prepare.py").main(
        ["--text", str(tmp_path / "text.txt"), "--tokenizer", str(model), "--out", str(tmp_path / "again")])
    train(rung("0"), tmp_path / "logs", tmp_path / "again", *STEP, "-T", 1024, "--pretrained", model)  # its longest


def test_save_replaces_nothing(byte_tokens, tmp_path):
    (tmp_path / "model.pt").write_text("precious")
    train(rung("0"), tmp_path / "logs", byte_tokens, *STEP, "--save", tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["step"] == 1
    [earlier] = tmp_path.glob("model.pt.20*")
    assert earlier.read_text() == "precious"


@pytest.mark.parametrize("flag, place, named", [
    ("--save", "nowhere/model.pt", "nowhere"), ("--save", "", ""), ("--save", "file/model.pt", "file"),
    ("--save", "/dev/full", "/dev/full"),
    ("--log-dir", "file", "file"), ("--log-dir", "/proc/logs", "/proc")])
def test_what_cannot_be_written_is_refused_at_the_start(flag, place, named, stopped, tmp_path):
    """Before the first step, not after the last one."""
    (tmp_path / "file").write_text("not a folder")
    line = stopped("0", *STEP, flag, tmp_path / place)[1]
    assert str(tmp_path / named) in line and not (tmp_path / "logs").exists()


@pytest.mark.parametrize("label", ["0", "7", "10"])
def test_saved_model_is_plain_and_complete(label, byte_tokens, tmp_path):
    module = rung(label)
    train(module, tmp_path, byte_tokens, *STEP, "--save", tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    meta = json.loads((byte_tokens / "meta.json").read_text())
    assert set(saved) == {"script", "config", "model", "step", "T", "tokenizer_json", "name", *meta}
    assert (saved["script"], saved["step"], saved["tokenizer"]) == (BY_LABEL[label].path.name, 1, "bytes")
    saved_model(module, tmp_path / "model.pt")  # strict: every weight, and nothing else


@TWO_RUNGS
def test_a_loss_that_is_not_finite(label, stopped, tmp_path, monkeypatch):
    """The line of the broken step is still logged."""
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda logits, _: logits.sum() * float("nan"))
    more = ("--compile-mode", "none", "--checkpoint-dir", tmp_path) if label == "16" else ()
    code, line = stopped(label, *STEP, *more)
    assert code == 1 and "the loss is nan at step 1" in line and "docs/measuring.md" in line
    assert "step : 1 | loss: nan" in (tmp_path / "logs" / f"{BY_LABEL[label].name}.log").read_text()


@pytest.mark.parametrize("error, message", [(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate"),
                                            (RuntimeError, "can't allocate memory: you tried to")])
def test_what_torch_says_when_memory_is_out(error, message, stopped, monkeypatch):
    def fail(*_):
        raise error(message)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    code, line = stopped("0", *STEP)
    assert code == 1 and "out of memory" in line and "-B" in line and "-T" in line


def test_a_full_disk_neither_ends_the_training_nor_damages_a_file(byte_tokens, tmp_path):
    """The limit, bytes a file, cuts the log's first lines and the model."""
    train(rung("0"), tmp_path / "older", byte_tokens, *STEP, "--save", tmp_path / "model.pt")
    older = (tmp_path / "model.pt").read_bytes()
    run = program(*STEP[:-1], 3, "--data", byte_tokens, "--log-dir", tmp_path, "--save", tmp_path / "model.pt",
                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150)))
    assert run.returncode == 1 and run.stdout.count("\nstep : ") == 3 and "\nmedian : " in run.stdout
    assert run.stderr == "error: [Errno 27] File too large\n"
    log = tmp_path / "baseline.log"
    assert run.stdout.count(f"\nWARNING: {log}: this line is lost (") >= 3
    assert run.stdout.startswith(log.read_text()[:100])
    assert (tmp_path / "model.pt").read_bytes() == older


def test_the_training_goes_on_when_stdout_is_full(byte_tokens, tmp_path):
    """As that of nohup is, when it lies on the full disk."""
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, ROOT / "baseline.py", "--model", "tiny", "--device", "cpu", *map(str, STEP),
                        "--data", byte_tokens, "--log-dir", tmp_path, "--save", tmp_path / "model.pt"],
                       stdout=full, stderr=full, timeout=300)
    assert "median : " in (tmp_path / "baseline.log").read_text() and (tmp_path / "model.pt").exists()


def test_a_log_folder_of_any_name_and_data_of_any_name(byte_tokens, tmp_path):
    """Blanks, no ASCII, levels that do not exist yet; a terminal without the characters. The log has the name as it is.
    """
    folder, data = tmp_path / "my logs" / "Läufe 日本", shutil.copytree(byte_tokens, tmp_path / "tokens")
    edit_json(data / "meta.json", source="naïve.txt")
    run = program(*STEP, "--data", data, "--log-dir", folder, env={"PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stderr) == (0, "") and "# data: na?ve.txt (bytes tokens)" in run.stdout
    assert "# data: naïve.txt (bytes tokens)" in (folder / "baseline.log").read_text(encoding="utf-8")
