"""What the tests share: token files of real text, the scripts as modules, and runs of the tiny model."""
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ladder.stages import BY_LABEL  # noqa: E402

STEP_LINE = re.compile(
    r"step : (?P<step>\d+) \| loss: (?P<loss>\S+) \| dt: (?P<ms>[\d.]+) ms \| tokens/sec: (?P<tokens_per_second>[\d.]+)"
    r"( \| norm: (?P<norm>\S+))?( \| lr: (?P<lr>\S+))?"
)


def load_module(path):
    """Import a file of the project under its own name, fresh."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rung(label):
    """A fresh module of the rung "0" to "10", "ddp", "11" and up, safe to patch."""
    return load_module(BY_LABEL[str(label)].path)


def read_steps(log):
    """The step lines of a log file as dictionaries of numbers."""
    lines = [STEP_LINE.fullmatch(line) for line in Path(log).read_text().splitlines() if line.startswith("step")]
    return [{key: float(value) for key, value in line.groupdict().items() if value is not None} for line in lines]


def losses(log):
    return [step["loss"] for step in read_steps(log)]


def train(module, folder, data, *flags, compile_mode="none"):
    """Run a rung's main() with the tiny model on a CPU, and return the path of its log."""
    if "compile_model" in vars(module):
        flags = (*flags, "--compile-mode", compile_mode)
    folder.mkdir(exist_ok=True)
    module.main(["--model", "tiny", "--device", "cpu", "--data", str(data), "--log-dir", str(folder), *map(str, flags)])
    return folder / f"{Path(module.__file__).stem}.log"


def run_command(*command, timeout=300, cwd=ROOT, **environment):
    """Run a program as a user would; returns the finished process with its text output."""
    # Offline, so that no test waits for a network; and without what torchrun or a caller may have left behind.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    command = [str(word) for word in command]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment)


def peak_memory():
    """MiB that this process has had at most. Not getrusage's, which begins with that of the process that started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here to read the peak memory from")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) / 1024


def make_tokens(folder, text, tokenizer=None):
    """Token files of `text` in `folder`, by the project's own data/prepare.py, without touching the network."""
    prepare = load_module(ROOT / "data" / "prepare.py")
    prepare.load_tokenizer = lambda: tokenizer or prepare.ByteTokenizer()
    source = folder.with_name(folder.name + ".txt")
    source.write_bytes(text.encode("utf-8"))
    prepare.prepare(source, folder)
    return folder


@pytest.fixture(scope="session")
def real_text():
    """466 kB of English that every Python carries."""
    return load_module(ROOT / "data" / "prepare.py").fallback_text()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory, real_text):
    """A folder of token files of real text (single-byte tokens, so that no network is needed)."""
    return make_tokens(tmp_path_factory.mktemp("data") / "tokens", real_text)


@pytest.fixture(scope="session")
def hf_folder(tmp_path_factory):
    """A randomly initialized transformers GPT-2, saved to a folder; no weight is left at a trivial value."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("hf") / "gpt2-random"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts with torch's own settings."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.compiler.reset()
