"""Every wrong value ends in one clear line and a non-zero exit, never in a traceback or a damaged file.

All of it is plumbing, the same in every script (test_ladder_laws.py), so one script or two stand for all.
"""
import json
import resource
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, data_with, load_module, new_gpt, read_steps, rung, train

from data import vocabulary
from ladder.scripts.stages import BY_LABEL

TWO_RUNGS = pytest.mark.parametrize("label", ["0", "16"])
STEP = ("-B", 1, "-T", 16, "--steps", 1)
STRICT = (sys.executable, "-W", "error", "-W", "ignore::ResourceWarning")  # the log is open to the end


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
@pytest.mark.parametrize("flags", [
    ("-B", 0), ("-B", -3), ("-T", 0), ("--steps", 0), ("--seed", -1), ("--seed", 2**70),
])
def test_wrong_numbers(label, flags, stopped):
    code, line = stopped(label, *flags)
    assert code == 2 and line.endswith("error: -B, -T and --steps must be at least 1, and no number below 0")


@pytest.mark.parametrize("flags", [("--max-lr", -1), ("--max-lr", "nan"), ("--max-lr", "inf"), ("--warmup-steps", -1)])
def test_wrong_numbers_of_the_schedule(flags, stopped):
    code, line = stopped("10", *flags)
    assert code == 2 and "no number below 0" in line


@pytest.mark.parametrize("label", ["0", "10", "24"])
def test_long_sequences_train(label, tokens, tmp_path):
    """GPT-2's table of positions is as long as -T where that is more than its own 1024."""
    more = ("--val-every", 0, "--total-batch", 1100) if label == "24" else ()
    train(rung(label), tmp_path, tokens, "-B", 1, "-T", 1100, "--steps", 1, "--save", tmp_path / "model.pt", *more)
    assert torch.load(tmp_path / "model.pt", weights_only=True)["config"]["block_size"] == 1100


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
    ("4x3x128", "where width / heads is an even number"),
    ("4x4x12", "where width / heads is an even number"),  # in even parts: RoPE rotates pairs
])
@TWO_RUNGS
def test_models_that_do_not_exist(label, model, reason, stopped):
    assert reason in stopped(label, "--model", model)[1]


def test_long_names_of_b_and_t():
    settings = rung(0).parse_settings(["--batch-size", "3", "--seq-len", "5", "--device", "cpu"])
    assert (settings.B, settings.T) == (3, 5)


def test_defaults_depend_on_the_device(monkeypatch):
    for there, B in ((True, 4), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.mps, "is_available", lambda: False)
        settings = rung(0).parse_settings([])
        assert (settings.device, settings.B, settings.T, settings.steps) == ("cuda" if there else "cpu", B, 1024, 50)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_missing_device(device, stopped, monkeypatch):
    monkeypatch.setattr(getattr(torch, device), "is_available", lambda: False)
    code, line = stopped("0", "--device", device)
    assert code == 2 and f"--device: invalid choice: '{device}'" in line


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
    tokens[-1] = 50_257  # the vocabulary ends before it
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
    assert code == 1 and f"--data {folder}: no token files (" in line
    assert f"make them: python data/prepare.py --out {folder}" in line


def test_damaged_validation_data(stopped, tokens, tmp_path):
    folder = copy_of(tokens, tmp_path / "tokens")
    (folder / "val.bin").unlink()
    assert f"--data {folder}: no token files (" in stopped("16", "--data", folder)[1]


def test_missing_data(stopped, tmp_path):
    assert f"--data {tmp_path / 'nowhere'}: no token files (" in stopped("0", "--data", tmp_path / "nowhere")[1]


@pytest.mark.parametrize("label", ["0", "11"])
def test_missing_default_data_is_prepared_first(label, tmp_path, monkeypatch):
    """By the data/prepare.py beside the scripts, whatever the working directory is; what it says comes first."""
    module, called = rung(label), []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.subprocess, "run", called.append)
    with pytest.raises(SystemExit, match="no token files"):
        module.open_tokens(module.parse_settings([]).data, "train", 1)
    assert called == [[sys.executable, ROOT / "data" / "prepare.py"]]


def test_a_data_folder_without_its_tokenizer(stopped, tmp_path):
    folder = data_with(vocabulary.of_bytes(), "text" * 100, tmp_path / "data")
    (folder / "tokenizer.json").unlink()
    line = stopped("0", "--data", folder)[1]
    assert "no token files (" in line and "tokenizer.json" in line


@pytest.fixture(scope="module")
def model_of(tmp_path_factory, tokens):
    """model_of(label): the file that --save of a short run of the rung has written."""
    folder = tmp_path_factory.mktemp("models")

    def make(label):
        path = folder / f"{label}.pt"
        if not path.exists():
            more = ("--val-every", 0, "--checkpoint-every", 0, "--total-batch", 16) if int(label) > 10 else ()
            train(rung(label), folder / label, tokens, *STEP, "--save", path, *more)
        return path

    return make


@TWO_RUNGS
def test_what_is_no_models_file_is_answered_with_the_command(label, stopped, tmp_path):
    (tmp_path / "text.pt").write_text("weights")
    for name in ("gpt2", tmp_path, tmp_path / "text.pt"):
        line = stopped(label, "--pretrained", name)[1]
        assert f"{name}: not a model's file" in line and f"python convert.py {name} model.pt" in line


def test_a_model_is_trained_further(model_of, stopped, tokens, tmp_path):
    """By every rung with the same model; any other names the script that loads it."""
    first = read_steps(train(rung(10), tmp_path, tokens, *STEP, "--pretrained", model_of("10")))[0]["loss"]
    last = read_steps(train(rung(19), tmp_path, tokens, *STEP, "--pretrained", model_of("10"), "--total-batch", 16,
                            "--val-every", 0))[0]["loss"]
    fresh = read_steps(train(rung(10), tmp_path / "fresh", tokens, *STEP))[0]["loss"]
    assert first == pytest.approx(last, abs=0.02) and first < fresh - 0.01
    for label, source, script in [("0", "10", "speedup_10_fused_adamw.py"), ("1", "0", "baseline.py"),
                                  ("10", "1", "speedup_01_weight_tying.py"), ("24", "10", "speedup_10_fused_adamw.py"),
                                  ("24", "31", "rung_31_ngram_embeddings.py"), ("10", "24", "rung_24_zero_init.py")]:
        line = stopped(label, *STEP, "--pretrained", model_of(source))[1]
        assert line == f"error: --pretrained: not a model of this script; {script} loads it"


def test_a_pretrained_model_with_a_shorter_context(stopped, model_of):
    line = stopped("10", *STEP, "-T", 1100, "--pretrained", model_of("10"))[1]
    assert line == "error: -T 1100: the model's longest sequence is 1024; lower -T"


def test_a_pretrained_model_with_other_tokens_than_the_data(stopped, model_of, tmp_path):
    """Of another size, or two vocabularies of one size, trained on different texts: only the merges tell them apart."""
    words = [" ".join(map(str, range(first, 2000))) for first in (0, 1000)]
    ours, theirs = (vocabulary.trained([text], 300) for text in words)
    folders = [data_with(each, words[0], tmp_path / f"data{n}") for n, each in enumerate((ours, theirs))]
    train(rung(0), tmp_path / "logs", folders[0], *STEP, "--save", tmp_path / "model.pt")
    train(rung(0), tmp_path / "logs", folders[0], *STEP, "--pretrained", tmp_path / "model.pt")
    for model, data in [(model_of("0"), folders[0]), (tmp_path / "model.pt", folders[1])]:
        line = stopped("0", *STEP, "--pretrained", model, "--data", data)[1]
        assert "its tokens are not the data's; data/prepare.py --tokenizer takes this file" in line
    meta = prepared_like(tmp_path / "model.pt", tmp_path / "again")
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bpe-300", 300)
    train(rung(0), tmp_path / "logs", tmp_path / "again", *STEP, "--pretrained", tmp_path / "model.pt")


def prepared_like(model, folder):
    """The metadata of a text that data/prepare.py has prepared in a model's own tokens."""
    text = folder.with_suffix(".txt")
    text.write_text(" ".join(map(str, range(3000))))
    load_module(ROOT / "data" / "prepare.py").main(
        ["--text", str(text), "--tokenizer", str(model), "--out", str(folder)])
    return json.loads((folder / "meta.json").read_text())


def test_save_replaces_only_a_model_of_its_script(stopped, model_of, tokens, tmp_path):
    (tmp_path / "README.md").write_text("precious")
    for path, reason in [(tmp_path / "README.md", "not a model's file"),
                         (model_of("10"), "exists, and is not a model of this script")]:
        before = path.read_bytes()
        assert reason in stopped("0", *STEP, "--save", path)[1]
        assert path.read_bytes() == before
    copy = tmp_path / "own.pt"
    copy.write_bytes(model_of("0").read_bytes())
    train(rung(0), tmp_path / "logs", tokens, *STEP[:-1], 2, "--save", copy)
    assert torch.load(copy, weights_only=True)["step"] == 2


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
    assert stopped("0", *STEP)[1] == "error: out of memory; try half the -B, or a lower -T"


def test_other_errors_keep_their_traceback(stopped, monkeypatch):
    def fail(*_):
        raise RuntimeError("a mistake of ours, an illegal memory access")

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
    assert run.stderr.strip() == "error: out of memory; try half the -B, or a lower -T"


def limited(resource_, limit, script, *flags):
    """A script of the tiny model as a program that may use no more than `limit` of a resource."""
    command = [*STRICT, ROOT / script, "--model", "tiny", "--device", "cpu", *flags]
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
    line = stopped("0", *STEP, "--save", tmp_path / place)[1]
    assert str((tmp_path / place).parent) in line
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
    meta = json.loads((tokens / "meta.json").read_text())
    assert set(saved) == {"script", "config", "model", "step", "T", "tokenizer_json", "name", *meta}
    assert (saved["script"], saved["step"], saved["tokenizer"]) == (BY_LABEL[label].file, 2, "gpt2-bytes")
    assert saved["config"] == {"block_size": 1024, "vocab_size": 50257, "n_layer": 2, "n_head": 2, "n_embd": 64}
    model = module.GPT(module.GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])  # strict: every weight, and nothing else
    torch.manual_seed(1337)
    start = new_gpt(module).state_dict()
    assert not torch.equal(saved["model"]["transformer.wte.weight"], start["transformer.wte.weight"])  # it is trained
    assert not (tmp_path / "model.pt.partial").exists()


def test_a_full_disk_neither_ends_the_training_nor_damages_a_file(tokens, tmp_path):
    """The limit, bytes a file, cuts the log's first lines and the model. Under -W error: and nothing else warns."""
    train(rung(10), tmp_path / "older", tokens, *STEP, "--save", tmp_path / "model.pt")
    older = (tmp_path / "model.pt").read_bytes()
    run = limited(resource.RLIMIT_FSIZE, 300, "speedup_10_fused_adamw.py", *STEP[:-1], 3, "--compile-mode", "none",
                  "--data", tokens, "--log-dir", tmp_path, "--save", tmp_path / "model.pt")
    assert run.returncode == 1 and run.stdout.count("\nstep : ") == 3 and "\nmedian : " in run.stdout
    *lost, last = run.stderr.splitlines()
    assert last == "error: [Errno 27] File too large"
    warning = f"WARNING: {tmp_path / 'speedup_10_fused_adamw.log'}: this line is lost (File too large)"
    assert len(lost) >= 3 and set(lost) == {warning}
    assert run.stdout.startswith((tmp_path / "speedup_10_fused_adamw.log").read_text()[:250])
    assert (tmp_path / "model.pt").read_bytes() == older


def test_a_whole_run_warns_of_nothing(tokens, tmp_path):
    """Under -W error."""
    runs = []
    for script, *flags in (["baseline.py"], ["speedup_10_fused_adamw.py", "--compile-mode", "none"]):
        command = [*STRICT, ROOT / script, "--model", "tiny", "--device", "cpu", *STEP, *flags,
                   "--data", tokens, "--log-dir", tmp_path, "--save", tmp_path / f"{script}.pt"]
        runs.append(subprocess.Popen(
            [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for run in runs:
        _, errors = run.communicate(timeout=300)
        assert (run.returncode, errors) == (0, "")
