"""What the tests share: token files of real text, the scripts as modules, and runs of the tiny model."""
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# One thread, here and in the programs that the tests start: a second one makes so small a model hardly faster, and on
# a machine that also does something else it makes it many times slower. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes, which import torch
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, its import must not see what a test has patched
from torch.multiprocessing import start_processes  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.modules.module import register_module_forward_hook  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # where a plugin has imported it before

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import vocabulary  # noqa: E402
from ladder.rungs.list import BY_LABEL, load_script  # noqa: E402

STEP_HEAD = re.compile(
    r"step : (?P<step>\d+) \| loss: (?P<loss>\S+) \| dt: (?P<ms>[\d.]+) ms"
    r" \| tokens/sec: (?P<tokens_per_second>[\d.]+)")
STEP_LINE = re.compile(STEP_HEAD.pattern + r"( \| norm: \S+)?( \| lr: \S+)?( \| left: .+)?")
VAL_LINE = re.compile(r"val : step (\d+) \| loss: (\S+) \| time: \S+ s")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
GROUP_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0"}  # what torchrun tells a single process

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored,
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup with this


def pytest_addoption(parser):
    parser.addoption("--device", choices=["cuda", "mps", "cpu"], help="run the smoke test there, and only that")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two processes; of a smoke test as many as cores and a GPU's memory allow."""
    from ladder.count.memory import free_memory

    device = config.option.device
    if not device:
        return 2
    if not torch.get_device_module(device).is_available():
        raise pytest.UsageError(f"--device {device}: torch cannot use one; python -m ladder check may say why")
    n_workers = max(2, min(8, os.cpu_count() // 2))
    return n_workers if device == "cpu" else max(1, min(n_workers, int(free_memory(device) // 2e9)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The smoke test is one file, whose tests all processes share."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.device else None


def pytest_collection_modifyitems(config, items):
    """The files that take longest first, so that two processes end at about the same time."""
    items.sort(key=lambda item: item.path.name not in ("test_lowered.py", "test_smoke.py", "test_fake_cuda.py"))
    smoke = [item for item in items if item.path.name == "test_smoke.py"]
    if TRIED:
        items[:] = [item for item in items if item.name.startswith(f"test_{TRIED.zfill(2)}_")]
        EXERCISE.update(dict.fromkeys(items, "it did not run"))
    if config.option.device:
        items[:] = smoke
    else:
        for item in smoke:
            item.add_marker("slow")


# ---- an exercise: python -m ladder try -------------------------------------------------------------------------------

TRIED, _, TRIED_FILE = os.environ.get("LADDER_TRY", "").partition("=")  # a rung's label, and the file in its place
EXERCISE = {}  # {test: why it is not green, or ""}


def reason_of(report, error):
    """Why a test is not green, in a line."""
    first, *more = re.sub("^(AssertionError|Skipped): ", "", error.exconly()).split("\n")
    if error.errisinstance(SystemExit) and report.capstderr.strip():  # of argparse, which has written why
        first, more = report.capstderr.strip().splitlines()[-1], []
    return " ".join([first, *(line for line in more if line.startswith(("assert ", "Greatest absolute")))])[:200]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # noqa: F811, pytest calls it so
    report = yield
    if item in EXERCISE and (report.when == "call" or call.excinfo):
        EXERCISE[item] = reason_of(report, call.excinfo) if call.excinfo else ""
    return report


def pytest_terminal_summary(terminalreporter):
    """What `try` shows: each test of an exercise, and of those that are red the hint and the (first) reason."""
    from ladder.measure.exercise import VERDICT

    lines = [VERDICT] if TRIED else []
    for function, items in itertools.groupby(EXERCISE, key=lambda item: item.function):
        sentence = function.__name__.removeprefix(f"test_{TRIED.zfill(2)}_").replace("_", " ")
        found = next((EXERCISE[item] for item in items if EXERCISE[item]), None)
        lines += [f"  ok   {sentence}"] if found is None else [
            f"  RED  {sentence}", f"       look: {function.__doc__}", f"       found: {found}"]
    for line in lines:
        terminalreporter.write_line(line)


# ---- rungs -----------------------------------------------------------------------------------------------------------

def load_module(path):
    """Import a file of the project under its own name, fresh."""
    return load_script(SimpleNamespace(name=path.stem, path=path))


def rung(label):
    """A fresh module of the rung with this label ("0" to "10", "ddp", "gradient_accumulation" and up), safe to patch.

    LADDER_TRY=LABEL=FILE, of `python -m ladder try`, puts another file in the place of one rung.
    """
    entry = BY_LABEL[str(label)]
    return load_script(SimpleNamespace(name=entry.name, path=Path(TRIED_FILE)) if TRIED == entry.label else entry)


def rungs_that_change(*definitions, since="0"):
    """The labels of rungs whose lesson may lie in one of these definitions; in others it is that of the rung before.

    test_laws.py holds the scripts to that, so these stand for all: `since`, and those that go back to it.
    """
    def overlap(one, other):
        return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")

    return [entry.label for entry in BY_LABEL.values() if builds_on(entry.label, since) and (
        entry.start is None or any(overlap(*pair) for pair in itertools.product(definitions, entry.may_change)))]


def builds_on(label, first):
    """Whether a rung is `first` or goes back to it."""
    return label == first or any(builds_on(start.label, first) for start in BY_LABEL[label].starts)


def validates(label):
    """Whether a rung has a validation loss."""
    return builds_on(label, "distributed_validation") or builds_on(label, "validation")


def known_flags(module, **wanted):
    """The words for these settings, as far as a script has them."""
    known = vars(module.parse_args([]))
    return [word for name, value in wanted.items() if name in known
            for word in (f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}", str(value))]


def new_gpt(module, size="tiny", vocab_size=50257):
    """A fresh model of a script, of one of the shapes that --model names."""
    return module.GPT(module.model_config(module.parse_args(["--model", size]), vocab_size))


def tiny(label, size="tiny", vocab_size=257):
    """A fresh small model of a rung, always with the same weights."""
    torch.manual_seed(0)
    return new_gpt(rung(label), size, vocab_size)


def saved_model(module, path):
    """The model in a file of --save, in evaluation mode."""
    saved = torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    return model


@pytest.fixture
def huge_scale(monkeypatch):
    """Makes the scale of float16's gradients so large that all overflow at first; the scalers that were made."""
    scaler, made = torch.amp.GradScaler, []
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *args, **more: (
        made.append(scaler(*args, init_scale=2.0**60, **more)) or made[-1]))
    return made


def assert_untrained(module, path):
    """That a file of --save holds the weights that a run of byte tokens starts from."""
    torch.manual_seed(1337)
    start, saved = new_gpt(module, vocab_size=257), torch.load(path, weights_only=True)["model"]
    assert all(torch.equal(saved[name], weight) for name, weight in start.named_parameters())


@torch.no_grad()
def attended(model, tokens):
    """What the attention kernel gets for these tokens in each block: queries, keys and values, (B, nh, T, hs) each."""
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as kernel:
        model(tokens)
    return [made.args[:3] for made in kernel.call_args_list]


# ---- runs ------------------------------------------------------------------------------------------------------------

def main(module, *words):
    """Run a script as its command line would, and leave nothing of it behind in this process."""
    with own_settings():
        module.train(module.parse_args([str(word) for word in words]))


def train(module, folder, data, *flags, compile_mode="none"):
    """Train the tiny model of a rung on a CPU, and return the path of its log. `flags` may override all."""
    own = ["--model", "tiny", "--device", "cpu", "--data", data, "--log-dir", folder]
    own += known_flags(module, compile_mode=compile_mode, checkpoint_dir=folder / "checkpoints")
    main(module, *own, *flags)
    return folder / f"{Path(module.__file__).stem}.log"


def train_in_float32(label, folder, data, *flags):
    """Train a rung without autocast, so that results that differ in the order of sums agree to the last digits."""
    module = rung(label)
    module.autocast_dtype = lambda device: torch.float32
    return train(module, folder, data, *flags)


def lines_that_count(log):
    """The lines of a log file, without what a resumed run did again, and without its earlier headers."""
    lines = []
    for line in Path(log).read_text().splitlines():
        resumed = re.match(r"# resumed after step (\d+)", line)
        if resumed:
            begun = max(i for i, earlier in enumerate(lines) if earlier.startswith("# script: "))
            steps = [(re.match(r"(?:val : step|step :) (\d+) ", earlier), earlier) for earlier in lines[:begun]]
            lines = lines[begun:] + [line for found, line in steps if found and int(found[1]) <= int(resumed[1])]
        lines.append(line)
    return lines


def read_steps(log):
    """The step lines of a log file as dictionaries of numbers; of repeated ones, of a resumed run, the last."""
    steps = {}
    for line in Path(log).read_text().splitlines():
        if line.startswith("step"):
            found = STEP_HEAD.match(line)
            assert found, f"not a line of Log.step: {line}"
            steps[int(found["step"])] = {key: float(value) for key, value in found.groupdict().items()} | {
                key: float(value) for key, value in re.findall(r"\| (norm|lr): (\S+)", line)}
    return list(steps.values())


def losses(log):
    return [step["loss"] for step in read_steps(log)]


def val_losses(log):
    """{step: validation loss} of a log."""
    lines = [line for line in Path(log).read_text().splitlines() if line.startswith("val")]
    found = [VAL_LINE.fullmatch(line) for line in lines]
    assert None not in found, f"not as `val : step N | loss: 5.123456 | time: 0.12 s`: {lines}"
    return {int(match[1]): float(match[2]) for match in found}


def assert_same_losses(log, truth, after=0):
    """That a log has the steps of another after this one, with its losses, validation losses, norms and rates.

    Float32 sums in another order: losses agree to 1e-5 of 5.5.
    """
    ours, theirs = read_steps(log), read_steps(truth)[after:]
    assert [step["step"] for step in ours] == [step["step"] for step in theirs] and ours
    for key, tolerance in (("loss", 1e-4), ("norm", 1e-3), ("lr", 0)):
        assert [step[key] for step in ours] == pytest.approx([step[key] for step in theirs], abs=tolerance)
    expected = {step: loss for step, loss in val_losses(truth).items() if step > after}
    assert val_losses(log) == pytest.approx(expected, abs=1e-4)


def assert_same_weights(file, truth, atol=0):
    """That two files of --save, or checkpoints, hold the same weights, to the bit unless a tolerance is given."""
    ours, truth = (torch.load(path, weights_only=True)["model"] for path in (file, truth))
    assert ours.keys() == truth.keys()
    assert [name for name in truth if not torch.allclose(ours[name], truth[name], rtol=0, atol=atol)] == []


@contextlib.contextmanager
def watch():
    """What models and optimizers do meanwhile, through torch's own hooks.

    inputs     of each forward pass of a model in training, (B, T)
    forward    a set of (training?, gradients?, type under autocast, type of the loss, precision of matrix products)
    gradients  as each optimizer step finds them
    groups     of the optimizer at each step
    leftover   the largest entry of the gradients that each forward pass of a model in training finds
    """
    seen = SimpleNamespace(inputs=[], forward=set(), gradients=[], groups=[], leftover=[])

    def see_forward(model, inputs, output):
        if type(model).__name__ == "GPT":
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            seen.forward.add((model.training, torch.is_grad_enabled(), dtype, output.dtype,
                              torch.get_float32_matmul_precision()))
            if model.training:
                seen.inputs.append(inputs[0].clone())
                found = [p.grad.abs().max().item() for p in model.parameters() if p.grad is not None]
                seen.leftover.append(max(found, default=0))

    def see_step(optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if not any(gradient is None for gradient in gradients):  # else it is AdamW's step within `muon`'s
            seen.gradients.append([gradient.clone() for gradient in gradients])
            seen.groups.append([group | {"lr": float(group["lr"])} for group in optimizer.param_groups])

    handles = [register_module_forward_hook(see_forward), register_optimizer_step_pre_hook(see_step)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def norm_of(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()


class Crash(Exception):
    """What ends a run in the middle of a step."""


def crash_in_step(module, n):
    """Make runs of this script end in the n-th step, before it is logged."""
    step = module.Log.step

    def crash(log, number, *args, **more):
        if number == n:
            raise Crash
        step(log, number, *args, **more)

    module.Log.step = crash


class FakeClock:
    """A module `time` whose clock stands still, but for what the parts of a training step add to it."""

    def __init__(self, module):
        self.now = 0.0
        module.time = SimpleNamespace(perf_counter=lambda: self.now, sleep=lambda seconds: None)

    def slow(self, function, seconds):
        """`function`, taking so long on this clock."""

        def slowed(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slowed


def as_program(label, *words):
    """A rung's script as a program, but in this process: to import torch takes longer than to train a tiny model.

    What a process has that ended: returncode, stdout, stderr. A traceback is not caught.
    """
    output, errors, code = io.StringIO(), io.StringIO(), 0
    words = [BY_LABEL[label].path, "--model", "tiny", "--device", "cpu", *words]
    with (own_settings(), mock.patch("sys.argv", [str(word) for word in words]), contextlib.redirect_stdout(output),
          contextlib.redirect_stderr(errors)):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as stop:  # of a line Python prints it and exits with 1
            code = stop.code if isinstance(stop.code, int) else print(stop.code, file=sys.stderr) or 1
    return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr=errors.getvalue())


def run_command(*command, timeout=300, cwd=ROOT, **environment):
    """Run a program as a user would; returns the finished process with its text output."""
    from ladder.measure.processes import stop

    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, cwd=cwd, env=environment)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:  # of time, or Ctrl-C: with it the ranks of a torchrun, which have sessions of their own
        stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def start_forkserver(*modules):
    """Processes of the start method "forkserver" are forks of one that has imported torch, and in which nothing ran."""
    forkserver.set_forkserver_preload(["rank", *modules])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])):
        forkserver.ensure_running()


def write_runs(folder, data, runs):
    """What tests/rank.py is to run in a folder: {name: (label, dtype, flags)}."""
    own = ["--model", "tiny", "--device", "cpu", "--data", data, "--compile-mode", "none"]
    runs = {name: (*kind, [str(word) for word in (*own, *flags)]) for name, (*kind, flags) in runs.items()}
    folder.mkdir(exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))


def on_ranks(n, folder, data, runs):
    """Make these runs on n ranks, one after the other. Each leaves FOLDER/NAME; what each rank printed is returned."""
    write_runs(folder, data, runs)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_forkserver()
    start_processes(forked_rank, (n, port, folder), nprocs=n, start_method="forkserver")
    return [(folder / f"printed_{rank}.txt").read_text() for rank in range(n)]


def forked_rank(rank, n, port, folder):
    """One of n ranks."""
    import rank as program

    sys.stdout = open(folder / f"printed_{rank}.txt", "w", buffering=1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_PORT": port}
    os.environ.update(GROUP_OF_ONE | {name: str(number) for name, number in numbers.items()})
    try:
        program.run_all(folder)
    except SystemExit as stop:
        raise RuntimeError(f"error: {stop.code}") from stop


# ---- files and data --------------------------------------------------------------------------------------------------

def files_in(folder):
    """The names of what a folder of checkpoints holds."""
    return {path.name for path in folder.iterdir()} - {"lock"}


def save_as_from_a_gpu(content, path):
    """torch.save, as if the tensors were on a GPU: a machine without one reads them only with map_location."""
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(content, path)


class Attack:
    """Unpickled, as torch.load does with weights_only=False, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def tokens_of(folder, ids, val_ids=None, tokenizer=None, **meta):
    """A data folder with these token ids as train and, unless `val_ids` are given, as val."""
    folder.mkdir()
    meta = {"source": "made up", "sha256": "", "tokenizer": "gpt2", "vocab_size": 50257, "end_of_text": 50256,
            "documents": 1} | meta
    if tokenizer and tokenizer.json:
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    if tokenizer:
        meta |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text}
    for split, own in {"train": ids, "val": ids if val_ids is None else val_ids}.items():
        np.array(own, dtype="<u2").tofile(folder / f"{split}.bin")
        meta[f"{split}_tokens"] = len(own)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def data_with(tokenizer, text, folder):
    """A data folder of a text in the tokens of one of data/vocabulary.py's tokenizers."""
    ids = tokenizer.encode(text)
    n_train = len(ids) * 9 // 10
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    return tokens_of(folder, ids[:n_train], ids[n_train:], tokenizer, sha256=sha256)


def tokens_in(folder, *splits):
    """The token ids of a data folder, of train and then val unless others are asked for."""
    files = [Path(folder, f"{split}.bin") for split in splits or ("train", "val")]
    return np.concatenate([np.fromfile(file, dtype="<u2") for file in files])


def edit_json(path, **changes):
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture(scope="session")
def real_text():
    """466 kB of English, bundled with every Python."""
    return load_module(ROOT / "data" / "prepare.py").fallback_text()


NEEDS_GPT2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="tiktoken would download its merges")


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
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, vocab_size=257))
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


@contextlib.contextmanager
def own_settings():
    """Undo what a script sets for its whole process: the precision of products, signal handlers."""
    precision = torch.get_float32_matmul_precision()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for number, handler in handlers.items():
            signal.signal(number, handler)  # a script's handler holds its model, and the lock of its folder


@pytest.fixture(autouse=True)
def same_start():
    """Every test starts with torch's and Python's own settings."""
    with own_settings():
        yield
    torch.compiler.reset()
    if torch.distributed.is_initialized():  # of a run that ended with an error
        torch.distributed.destroy_process_group()


from run_tool import call, fake_run  # noqa: E402, F401, fixtures: they need what stands above
