"""The fixtures that tests share: texts, token folders, models, one process's settings."""
import os
import signal
import time

import pytest
import torch
import torch._dynamo  # its import must not see what a test has patched
from load_script import ROOT, load_module
from ranks import GROUP_OF_ONE
from run_script import own_settings
from run_tool import call, fake_run, imported_here, mine  # noqa: F401, fixtures
from token_folders import data_with

from data import vocabulary

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # where a plugin has imported it before
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored,
if hasattr(signal, "SIGHUP"):  # not on Windows
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup with this


@pytest.fixture(scope="session")
def real_text():
    """466 kB of English, bundled with every Python."""
    return load_module(ROOT / "data" / "prepare.py").fallback_text()


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """A fresh data/prepare.py in an empty folder, with single bytes, which need no network."""
    monkeypatch.chdir(tmp_path)
    module = load_module(ROOT / "data" / "prepare.py")
    module.load_tokenizer = lambda name: vocabulary.of_bytes("bytes" if name == "bytes" else "gpt2-bytes")
    return module


@pytest.fixture(scope="session")
def tokens(tmp_path_factory, real_text):
    """A folder of token files of real text, with GPT-2's vocabulary; single bytes, so that no network is needed."""
    tokenizer = vocabulary.of_bytes("gpt2-bytes")
    return data_with(tokenizer, real_text, tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture(scope="session")
def byte_tokens(tmp_path_factory, real_text):
    """The same text with a vocabulary of 257: so few rows train ten times as fast as GPT-2's 50,257."""
    return data_with(vocabulary.of_bytes(), real_text, tmp_path_factory.mktemp("data") / "byte_tokens")


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A randomly initialized transformers GPT-2 of byte tokens; no weight is left at a trivial value."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_inner=4 * 64, n_layer=2, n_head=2, n_positions=128,
                                       vocab_size=257))  # which may spell out the usual width
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("hf") / "gpt2-random"
    model.save_pretrained(folder)
    vocabulary.of_bytes().to_transformers().save_pretrained(folder)
    return folder


@pytest.fixture
def group_of_one(monkeypatch):
    """The environment that torchrun gives to a single process."""
    for name, value in GROUP_OF_ONE.items():
        monkeypatch.setenv(name, value)
    # A script sleeps at its end until gloo's threads have ended; without that one sometimes waits for this one forever.
    monkeypatch.setattr("time.sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))


@pytest.fixture
def huge_scale(monkeypatch):
    """Makes the scale of float16's gradients so large that all overflow at first; the scalers that were made."""
    scaler, made = torch.amp.GradScaler, []
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **more: (
        made.append(scaler(*args, init_scale=2.0**60, **more)) or made[-1]))
    return made


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts with torch's and Python's own settings."""
    with own_settings():
        yield
    torch.compiler.reset()
    if torch.distributed.is_initialized():  # of a run that ended with an error
        torch.distributed.destroy_process_group()
