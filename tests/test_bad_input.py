"""Every wrong value ends in one clear line and a non-zero exit, never in a traceback or a damaged file.

All of it is plumbing, the same in every script (test_ladder_laws.py), so one script or two stand for all.
"""
import json
import re
import resource
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, data_with, rung, train

from data import vocabulary
from ladder.scripts.stages import BY_LABEL

TWO_RUNGS = pytest.mark.parametrize("label", ["0", "16"])
STEP = ("-B", 1, "-T", 16, "--steps", 1)


@pytest.fixture
def stopped(tokens, tmp_path, monkeypatch, capsys):
    """stopped(label, *flags): the exit code and the last line of a script that is run as a program and must stop."""

    def run(label, *flags):
        flags = [BY_LABEL[label].path, "--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir",
                 tmp_path / "logs", *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in flags])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(sys.argv[0], run_name="__main__")
        if stop.value.code == 2:  # argparse has printed the line
            return 2, capsys.readouterr().err.splitlines()[-1]
        assert isinstance(stop.value.code, str) and "\n" not in stop.value.code  # Python prints it and exits with 1
        assert stop.value.code.startswith("error: ")
        return 1, stop.value.code

    return run


@TWO_RUNGS
@pytest.mark.parametrize("flags, reason", [
    (("-B", 0), "-B 0: out of range; give at least 1"),
    (("-B", -3), "-B -3: out of range; give at least 1"),
    (("-T", 0), "-T 0: out of range; give at least 1"),
    (("--steps", 0), "--steps 0: out of range; give at least 1"),
    (("--seed", -1), "--seed -1: out of range; give at least 0"),
    (("--seed", 2**70), "out of range"),
    (("-T", 1025, "-B", 1), "-T 1025: the model's longest sequence is 1024; lower -T"),
])
def test_wrong_numbers(label, flags, reason, stopped):
    code, line = stopped(label, *flags)
    assert code == 1 and reason in line


@pytest.mark.parametrize("flags, reason", [
    (("--max-lr", -1), "--max-lr -1.0: out of range; give at least 0"),
    (("--max-lr", "nan"), "--max-lr nan: out of range"),
    (("--max-lr", "inf"), "--max-lr inf: out of range"),
    (("--warmup-steps", -1), "--warmup-steps -1: out of range; give at least 0"),
])
def test_wrong_numbers_of_the_schedule(flags, reason, stopped):
    assert reason in stopped("10", *flags)[1]


def test_a_batch_larger_than_the_data(stopped):
    line = stopped("0", "-B", 100_000, "-T", 1024)[1]
    assert "train tokens, a batch needs 102400001; lower -B or -T" in line


@pytest.mark.parametrize("flags", [
    ["-B", "two"], ["--steps", "1.5"], ["--no-such-flag"], ["--device", "tpu"], ["--step", "5"],
    ["--seed"], ["a_file.txt"], ["--max-lr", "high"],
])
def test_unknown_flags_and_words(flags, stopped):
    code, line = stopped("0", *flags)
    assert code == 2 and line.startswith("baseline.py: error: ")


@pytest.mark.parametrize("model, reason", [
    ("gpt5", "--model gpt5: give tiny, mini, small, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or layers x heads x width"),
    ("4x4", "--model 4x4: give tiny"),
    ("0x4x128", "--model 0x4x128: give tiny"),
    ("4x3x128", "--model 4x3x128: 128 cannot be split into 3 heads of even width; change one"),
    ("4x4x12", "--model 4x4x12: 12 cannot be split into 4 heads of even width"),  # RoPE rotates pairs
])
@TWO_RUNGS
def test_models_that_do_not_exist(label, model, reason, stopped):
    assert reason in stopped(label, "--model", model)[1]


def test_long_names_of_b_and_t():
    settings = rung(0).parse_settings(["--batch-size", "3", "--seq-len", "5", "--device", "cpu"])
    assert (settings.B, settings.T) == (3, 5)


def test_defaults_depend_on_the_device(monkeypatch):
    module = rung(0)
    for there, B in ((True, 4), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.mps, "is_available", lambda: False)
        settings = module.parse_settings([])
        assert (settings.device, settings.B, settings.T, settings.steps) == ("cuda" if there else "cpu", B, 1024, 50)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_missing_device(device, stopped, monkeypatch):
    monkeypatch.setattr(getattr(torch, device), "is_available", lambda: False)
    assert f"--device {device}: torch {torch.__version__} has only [" in stopped("0", "--device", device)[1]


def test_an_unused_nvidia_gpu_is_noticed(monkeypatch, capsys):
    """Its driver too old for this torch: a run without --device would use the CPU in silence."""
    module = rung(0)
    for found in ("cuda", "mps"):
        monkeypatch.setattr(getattr(torch, found), "is_available", lambda: False)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert module.parse_settings([]).device == "cpu"
    error = capsys.readouterr().err
    assert error == "WARNING: the NVIDIA GPU is not being used; python -m ladder check says why\n"
    module.parse_settings(["--device", "cpu"])
    assert capsys.readouterr().err == ""  # a CPU on purpose
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    module.parse_settings([])
    assert capsys.readouterr().err == ""


def no_json(folder):
    (folder / "meta.json").write_text('{"source": "x"')


def no_text(folder):
    (folder / "meta.json").write_bytes(b"\xff\xfe\x00")


def not_an_object(folder):
    (folder / "meta.json").write_text("[1, 2]")


def drop(key):
    def damage(folder):
        meta = json.loads((folder / "meta.json").read_text())
        del meta[key]
        (folder / "meta.json").write_text(json.dumps(meta))

    damage.__name__ = f"without_{key}"
    return damage


def no_number(folder):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "vocab_size": None}))


def drop_meta(folder):
    (folder / "meta.json").unlink()


def drop_train(folder):
    (folder / "train.bin").unlink()


def empty_train(folder):
    (folder / "train.bin").write_bytes(b"")


def truncated_train(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])


def half_a_token(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-1])


def impossible_token(folder):
    tokens = np.fromfile(folder / "train.bin", dtype="<u2")
    tokens[7] = 50_257  # the vocabulary ends before it
    tokens.tofile(folder / "train.bin")


def copy_of(tokens, folder):
    folder.mkdir()
    for file in tokens.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize("damage", [
    no_json, no_text, not_an_object, no_number, drop_meta, drop_train, empty_train, truncated_train, half_a_token,
    impossible_token, *map(drop, ("vocab_size", "train_tokens", "source", "tokenizer")),
])
def test_damaged_data(damage, stopped, tokens, tmp_path):
    folder = copy_of(tokens, tmp_path / "tokens")
    damage(folder)
    code, line = stopped("0", "--data", folder)
    assert code == 1 and f"--data {folder}: no usable token files (" in line
    assert f"make them with python data/prepare.py [--text FILE] --out {folder}" in line


def test_damaged_validation_data(stopped, tokens, tmp_path):
    folder = copy_of(tokens, tmp_path / "tokens")
    (folder / "val.bin").unlink()
    assert f"--data {folder}: no usable token files (" in stopped("16", "--data", folder)[1]


def test_missing_data(stopped, tmp_path):
    assert f"--data {tmp_path / 'nowhere'}: no usable token files (" in stopped("0", "--data", tmp_path / "nowhere")[1]


@pytest.mark.parametrize("label", ["0", "11"])
@pytest.mark.parametrize("returncode", [0, 1])
def test_missing_default_data_is_prepared_first(label, returncode, tmp_path, monkeypatch):
    """By the data/prepare.py beside the scripts, whatever the working directory is."""
    module = rung(label)
    called = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        module.subprocess, "run", lambda command: called.append(command) or subprocess.CompletedProcess([], returncode)
    )
    with pytest.raises(SystemExit, match="could not be prepared; see above" if returncode else "no usable token files"):
        module.open_tokens(module.Settings.data, "train", 1)
    assert called == [[sys.executable, ROOT / "data" / "prepare.py"]]


def test_a_data_folder_without_its_tokenizer(stopped, tmp_path):
    folder = data_with(vocabulary.of_bytes(), "text" * 100, tmp_path / "data")
    (folder / "tokenizer.json").unlink()
    line = stopped("0", "--data", folder)[1]
    assert "no usable token files (" in line and "tokenizer.json" in line


@TWO_RUNGS
def test_missing_pretrained_model(label, stopped, tmp_path):
    line = stopped(label, "--pretrained", tmp_path / "nowhere")[1]
    assert f"--pretrained {tmp_path / 'nowhere'}: cannot be loaded (" in line


def test_a_file_of_save_is_no_pretrained_folder(stopped, tmp_path):
    (tmp_path / "model.pt").write_text("weights")
    line = stopped("0", "--pretrained", tmp_path / "model.pt")[1]
    assert "--pretrained" in line and "model.pt: cannot be loaded (" in line


def test_a_pretrained_model_with_a_shorter_context(stopped, hf_folder):
    line = stopped("0", "--pretrained", hf_folder, "-T", 256)[1]
    assert "-T 256: the model's longest sequence is 128; lower -T" in line


def test_a_pretrained_model_with_other_tokens_than_the_data(stopped, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2)).save_pretrained(tmp_path / "small")
    line = stopped("0", "--pretrained", tmp_path / "small")[1]
    assert "its 50257 tokens are not the model's 300; prepare it again with --tokenizer" in line


def test_a_pretrained_model_with_as_many_tokens_but_others(stopped, tokens, tmp_path):
    """Two vocabularies trained on different texts: equal in size, so only the merges tell them apart."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    small.save_pretrained(tmp_path / "small")
    words = [" ".join(map(str, range(first, 2000))) for first in (0, 1000)]
    ours, theirs = (vocabulary.trained([text], 300) for text in words)
    assert ours.vocab_size == theirs.vocab_size == 300
    folder = data_with(ours, words[0], tmp_path / "data")
    flags = (*STEP, "--pretrained", tmp_path / "small", "--data", folder)
    (tmp_path / "small" / "tokenizer.json").write_text(theirs.json)
    assert "are not the model's 300; prepare it again with --tokenizer" in stopped("0", *flags)[1]
    (tmp_path / "small" / "tokenizer.json").write_text(ours.json)
    train(rung(0), tmp_path, folder, *flags)


@TWO_RUNGS
def test_a_loss_that_is_not_finite(label, stopped, tmp_path, monkeypatch):
    """The line of the broken step is still logged."""
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda logits, _: logits.sum() * float("nan"))
    more = ("--compile-mode", "none", "--checkpoint-dir", tmp_path) if label == "16" else ()
    code, line = stopped(label, *STEP, *more)
    assert code == 1 and line.startswith("error: the loss is nan at step 1")
    assert "step : 1 | loss: nan" in (tmp_path / "logs" / f"{BY_LABEL[label].name}.log").read_text()


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate", "can't allocate memory: you tried to"])
def test_what_torch_says_when_memory_is_out(message, stopped, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    assert stopped("0", *STEP)[1] == "error: out of memory; try half the -B, or a shorter -T"


@TWO_RUNGS
def test_a_gpu_for_which_this_torch_was_not_built(label, stopped, monkeypatch, tmp_path):
    """As a GTX 1080 with the default wheel; torch.AcceleratorError is a RuntimeError."""
    def fail(*_, **__):
        raise torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device\nSearch for")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    more = ("--compile-mode", "none", "--checkpoint-dir", tmp_path) if label == "16" else ()
    assert stopped(label, *STEP, *more) == (1, "error: --device cuda: this torch was not built for this GPU; see "
                                               "python -m ladder check")


def test_other_errors_keep_their_traceback(stopped, monkeypatch):
    def fail(*_):
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(torch.nn.functional, "cross_entropy", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        stopped("0", *STEP)


@pytest.mark.slow
def test_out_of_memory(tokens, tmp_path):
    """A batch for which this machine cannot even reserve the memory."""
    meta = json.loads((tokens / "meta.json").read_text())
    run = limited(resource.RLIMIT_AS, 8 << 30, "baseline.py", "--data", tokens, "--log-dir", tmp_path,
                  "-B", meta["train_tokens"] // 64 - 1, "-T", 64, "--steps", 1)
    assert run.returncode == 1
    assert run.stderr.strip() == "error: out of memory; try half the -B, or a shorter -T"


def limited(resource_, limit, script, *flags):
    """A script of the tiny model as a program that may use no more than `limit` of a resource."""
    command = [sys.executable, "-W", "error", ROOT / script, "--model", "tiny", "--device", "cpu", *flags]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource_, (limit, limit)),
    )


def test_places_that_cannot_be_written(stopped, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for flags, reason in [
        (("--log-dir", tmp_path / "file"), "file"),
        (("--log-dir", tmp_path / "file" / "logs"), "file"),
        (("--log-dir", "/proc/logs"), "/proc/logs"),
    ]:
        code, line = stopped("0", *STEP, *flags)
        assert code == 1 and reason in line


@pytest.mark.parametrize("place", ["nowhere/model.pt", "", "file/model.pt", "/dev/null/model.pt"])
def test_a_save_that_cannot_be_written_is_refused_at_the_start(place, stopped, tmp_path):
    """Before the first step, not after the last one."""
    (tmp_path / "file").write_text("not a folder")
    code, line = stopped("0", *STEP, "--save", tmp_path / place)
    assert code == 1 and line.startswith(f"error: --save {tmp_path / place}: cannot be written")
    assert not (tmp_path / "logs").exists()


def test_an_odd_log_folder(tokens, tmp_path):
    """Blanks, no ASCII, several levels that do not exist yet; an older log gives way."""
    folder = tmp_path / "my logs" / "Läufe 日本" / "1"
    for steps in (2, 1):
        log = train(rung(0), folder, tokens, "-B", 1, "-T", 8, "--steps", steps)
    assert log.parent == folder and log.read_text().count("\nstep : ") == 1


@pytest.mark.parametrize("label", ["0", "1", "7", "10"])
def test_saved_model_is_plain_and_complete(label, tokens, tmp_path):
    module = rung(label)
    train(module, tmp_path, tokens, "-B", 1, "-T", 8, "--steps", 2, "--save", tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert set(saved) == {"script", "config", "model", "step", "tokenizer", "tokenizer_json", "end_of_text"}
    assert (saved["script"], saved["step"], saved["tokenizer"]) == (BY_LABEL[label].file, 2, "gpt2-bytes")
    assert saved["config"] == {"block_size": 1024, "vocab_size": 50257, "n_layer": 2, "n_head": 2, "n_embd": 64}
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])  # strict: every weight, and nothing else
    torch.manual_seed(1337)
    start = module.GPT(module.MODELS["tiny"]).state_dict()
    assert not torch.equal(saved["model"]["transformer.wte.weight"], start["transformer.wte.weight"])  # it is trained
    assert not (tmp_path / "model.pt.partial").exists()


def test_a_full_disk_neither_ends_the_training_nor_damages_a_file(tokens, tmp_path):
    """The limit, bytes a file, cuts the log's first lines and the model. Under -W error: and nothing else warns."""
    (tmp_path / "model.pt").write_bytes(b"older")
    run = limited(resource.RLIMIT_FSIZE, 300, "speedup_10_fused_adamw.py", *STEP[:-1], 3, "--compile-mode", "none",
                  "--data", tokens, "--log-dir", tmp_path, "--save", tmp_path / "model.pt")
    assert run.returncode == 1 and run.stdout.count("\nstep : ") == 3 and "\nmedian : " in run.stdout
    *lost, last = run.stderr.splitlines()
    assert re.fullmatch(rf"error: --save: {tmp_path / 'model.pt'} could not be written \(.+\)", last)
    warning = f"WARNING: {tmp_path / 'speedup_10_fused_adamw.log'}: this line is lost (File too large)"
    assert len(lost) > 3 and set(lost) == {warning}
    assert run.stdout.startswith((tmp_path / "speedup_10_fused_adamw.log").read_text()[:250])
    assert (tmp_path / "model.pt").read_bytes() == b"older"
    assert not (tmp_path / "model.pt.partial").exists()


def test_a_whole_run_warns_of_nothing(tokens, tmp_path):
    """Under -W error, so that a file that is never closed shows, too."""
    runs = []
    for script, *flags in (["baseline.py"], ["speedup_10_fused_adamw.py", "--compile-mode", "none"]):
        command = [sys.executable, "-W", "error", ROOT / script, "--model", "tiny", "--device", "cpu", *STEP, *flags,
                   "--data", tokens, "--log-dir", tmp_path, "--save", tmp_path / f"{script}.pt"]
        runs.append(subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert (run.returncode, errors) == (0, "")
