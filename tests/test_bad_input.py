"""Every wrong value ends in one clear line and a non-zero exit, never in a traceback or a damaged file."""
import json
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, rung, run_command, train

from ladder.stages import STAGES

ALL_RUNGS = pytest.mark.parametrize("number", range(len(STAGES)), ids=[stage.name for stage in STAGES])


def refused(number, *flags):
    """The line with which a rung's main() refuses its flags."""
    with pytest.raises(SystemExit) as stop:
        rung(number).main([str(flag) for flag in flags])
    line = stop.value.code
    assert isinstance(line, str) and line.startswith("error: ") and "\n" not in line
    return line


def tiny(tokens, tmp_path, *flags):
    return ("--model", "tiny", "--device", "cpu", "--data", tokens, "--log-dir", tmp_path, *flags)


@ALL_RUNGS
def test_wrong_numbers(number, tokens, tmp_path):
    for flags, reason in [
        (("-B", 0), "-B 0: must be at least 1"),
        (("-B", -3), "-B -3: must be at least 1"),
        (("-T", 0), "-T 0: must be at least 1"),
        (("--steps", 0), "--steps 0: must be at least 1"),
        (("--seed", 2**70), "must be at least 0 and below 2^63"),
        (("-T", 1025, "-B", 1), "-T 1025 is longer than this model's longest sequence, 1024"),
        (("-B", 100_000, "-T", 1024), "needs 102400001"),
    ]:
        assert reason in refused(number, *tiny(tokens, tmp_path, *flags))


@ALL_RUNGS
def test_missing_device(number, tokens, tmp_path):
    for device, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not there:
            assert "finds no such device here" in refused(number, *tiny(tokens, tmp_path, "--device", device))


def damage_meta(folder):
    (folder / "meta.json").write_text('{"source": "x"')


def drop_a_key(folder):
    (folder / "meta.json").write_text('{"source": "x"}')


def not_an_object(folder):
    (folder / "meta.json").write_text("[1, 2]")


def drop_train(folder):
    (folder / "train.bin").unlink()


def truncate_train(folder):
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])


def impossible_token(folder):
    tokens = np.fromfile(folder / "train.bin", dtype="<u2")
    tokens[7] = 60_000
    tokens.tofile(folder / "train.bin")


@pytest.mark.parametrize("number", [0, 11])
@pytest.mark.parametrize("damage", [
    damage_meta, drop_a_key, not_an_object, drop_train, truncate_train, impossible_token,
])
def test_damaged_data(damage, number, tokens, tmp_path):
    folder = tmp_path / "tokens"
    folder.mkdir()
    for file in tokens.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    compile_mode = ("--compile-mode", "none") if number else ()
    line = refused(number, *tiny(folder, tmp_path, *compile_mode))
    assert "no usable token files" in line or "train.bin is damaged" in line


@pytest.mark.parametrize("number", [0, 11])
def test_missing_data(number, tmp_path):
    line = refused(number, *tiny(tmp_path / "nowhere", tmp_path))
    assert "no usable token files" in line and f"python data/prepare.py [--text FILE] --out {tmp_path}" in line


@pytest.mark.parametrize("number", [0, 7])
def test_missing_checkpoint(number, tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "--pretrained" in refused(number, *tiny(tokens, tmp_path, "--pretrained", tmp_path / "nowhere"))


@pytest.mark.parametrize("number", [0, 11])
def test_a_file_of_save_is_no_pretrained_folder(number, tokens, tmp_path):
    (tmp_path / "model.pt").write_text("weights")
    line = refused(number, *tiny(tokens, tmp_path, "--pretrained", tmp_path / "model.pt"))
    assert "model.pt: a file: export.py makes a Hugging Face folder of it" in line


@pytest.mark.parametrize("number", [0, 10])
def test_checkpoint_with_a_shorter_context(number, hf_folder, tokens, tmp_path):
    line = refused(number, *tiny(tokens, tmp_path, "--pretrained", hf_folder, "-T", 256))
    assert "-T 256 is longer than this model's longest sequence, 128" in line


@pytest.mark.parametrize("number", [0, 7, 14])
def test_checkpoint_with_fewer_tokens_than_the_data(number, tokens, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=2)).save_pretrained(tmp_path / "small")
    line = refused(number, *tiny(tokens, tmp_path, "--pretrained", tmp_path / "small"))
    assert "tokens are too few for --data" in line


@ALL_RUNGS
def test_a_loss_that_is_not_finite(number, tokens, tmp_path):
    """The line of the broken step is still logged."""
    module = rung(number)
    init_weights = module.GPT._init_weights

    def broken_init(self, part):
        init_weights(self, part)
        if isinstance(part, torch.nn.LayerNorm):
            torch.nn.init.constant_(part.weight, float("nan"))

    module.GPT._init_weights = broken_init
    with pytest.raises(SystemExit, match="error: the loss is nan at step 1"):
        train(module, tmp_path, tokens, "-B", 1, "-T", 16)
    assert "step : 1 | loss: nan" in (tmp_path / f"{STAGES[number].name}.log").read_text()


@pytest.mark.parametrize("flags", [
    ["--model", "gpt5"], ["-B", "two"], ["--steps", "1.5"], ["--no-such-flag"], ["--device", "tpu"],
])
def test_unknown_flags_and_words(flags):
    run = run_command(sys.executable, ROOT / "baseline.py", *flags)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr and "baseline.py: error: " in run.stderr.splitlines()[-1]


def test_places_that_cannot_be_written(tokens, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for flags, reason in [
        (("--log-dir", tmp_path / "file" / "logs"), "error: "),
        (("--save", tmp_path / "nowhere" / "model.pt"), "in a folder that exists"),
        (("--save", tmp_path), "give the name of a file"),
    ]:
        run = run_command(sys.executable, ROOT / "baseline.py", *tiny(tokens, tmp_path, "--steps", 1, *flags))
        assert run.returncode == 1
        assert reason in run.stderr and "Traceback" not in run.stderr and run.stderr.count("\n") == 1


def test_out_of_memory(tokens, tmp_path):
    """A batch for which this machine cannot even reserve the memory."""
    meta = json.loads((tokens / "meta.json").read_text())
    B = meta["train_tokens"] // 64 - 1
    run = subprocess.run(
        [sys.executable, ROOT / "baseline.py", *map(str, tiny(tokens, tmp_path, "-B", B, "-T", 64, "--steps", 1))],
        capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    assert run.returncode == 1
    assert run.stderr.strip() == "error: out of memory: try half the -B, or a shorter -T"


def test_saved_model_is_plain_and_complete(tokens, tmp_path):
    for number in (0, 1, 7, 10):
        module = rung(number)
        train(module, tmp_path, tokens, "-B", 1, "-T", 16, "--steps", 2, "--save", tmp_path / "model.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=True)
        assert set(saved) == {"script", "config", "model", "step", "tokenizer"}
        assert (saved["script"], saved["step"]) == (STAGES[number].file, 2)
        model = module.GPT(module.GPTConfig(**saved["config"]))
        model.load_state_dict(saved["model"])  # strict: every weight, and nothing else
        assert not (tmp_path / "model.pt.partial").exists()


def test_a_full_disk_keeps_the_older_checkpoint(tokens, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"older")
    limit = 1_000_000  # bytes a file: enough for the log, not for the model
    run = subprocess.run(
        [sys.executable, ROOT / "baseline.py",
         *map(str, tiny(tokens, tmp_path, "-B", 1, "-T", 16, "--steps", 1, "--save", tmp_path / "model.pt"))],
        capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert run.returncode == 1
    assert run.stderr.startswith("error: --save") and "Traceback" not in run.stderr
    assert (tmp_path / "model.pt").read_bytes() == b"older"
    assert not (tmp_path / "model.pt.partial").exists()
