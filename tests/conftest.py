"""What the tests share: token files of real text, the scripts as modules, and runs of the tiny model."""
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

# One thread, here and in the programs that the tests start: a second one makes so small a model hardly faster, and on
# a machine that also does something else it makes it many times slower. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test waits for a network

import filelock  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402, its import must not see what a test has patched
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # where a plugin has imported it before

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ladder.scripts.stages import BY_LABEL  # noqa: E402

STEP_LINE = re.compile(
    r"step : (?P<step>\d+) \| loss: (?P<loss>\S+) \| dt: (?P<ms>[\d.]+) ms \| tokens/sec: (?P<tokens_per_second>[\d.]+)"
    r"( \| norm: (?P<norm>\S+))?( \| lr: (?P<lr>\S+))?( \| left: .+)?"
)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored


def load_module(path):
    """Import a file of the project under its own name, fresh."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rung(label):
    """A fresh module of the rung with this label ("0" to "10", "ddp", "11" and up), safe to patch."""
    return load_module(BY_LABEL[str(label)].path)


def converted(source, label, path):
    """The model of a rung's script that convert.py makes of a Hugging Face folder, in the new file `path`."""
    load_module(ROOT / "convert.py").main([str(source), str(path), "--script", BY_LABEL[str(label)].file])
    module, saved = rung(label), torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    return model


def read_steps(log):
    """The step lines of a log file as dictionaries of numbers."""
    lines = [STEP_LINE.fullmatch(line) for line in Path(log).read_text().splitlines() if line.startswith("step")]
    return [{key: float(value) for key, value in line.groupdict().items() if value is not None} for line in lines]


def losses(log):
    return [step["loss"] for step in read_steps(log)]


def has_flag(module, name):
    """Whether a script has the flag whose value its settings have under `name`."""
    return hasattr(module.parse_settings([]), name)


def new_gpt(module, size="tiny", vocab_size=50257):
    """A fresh model of a script, of one of the shapes that --model names."""
    return module.GPT(module.config_of(module.parse_settings(["--model", size]), vocab_size))


def main(module, *words):
    """Run a script as its command line would, and leave nothing of it behind in this process."""
    with own_settings():
        module.train(module.parse_settings([str(word) for word in words]))


def train(module, folder, data, *flags, compile_mode="none"):
    """Train the tiny model of a rung on a CPU, and return the path of its log. `flags` may override all."""
    own = ["--model", "tiny", "--device", "cpu", "--data", data, "--log-dir", folder]
    own += ["--compile-mode", compile_mode] if has_flag(module, "compile_mode") else []
    own += ["--checkpoint-dir", folder / "checkpoints"] if has_flag(module, "checkpoint_dir") else []
    main(module, *own, *flags)
    return folder / f"{Path(module.__file__).stem}.log"


def data_with(tokenizer, text, folder):
    """A data folder of a text in the tokens of one of data/vocabulary.py's tokenizers."""
    folder.mkdir()
    ids = tokenizer.encode(text)
    n_train = len(ids) * 9 // 10
    ids[:n_train].tofile(folder / "train.bin")
    ids[n_train:].tofile(folder / "val.bin")
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    (folder / "meta.json").write_text(json.dumps({
        "source": "a text", "sha256": hashlib.sha256(text.encode()).hexdigest(), "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size, "end_of_text": tokenizer.end_of_text, "train_tokens": n_train,
        "val_tokens": len(ids) - n_train}))
    return folder


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


@dataclass
class Run:
    """What a short training run of a rung did."""

    log: Path = None
    lines: list = None  # of the log
    printed: list = None
    steps: list = None  # as read_steps gives them
    batches: list = field(default_factory=list)  # (B, index) of those that it asked its loaders for
    norms: list = field(default_factory=list)  # of all gradients together, as each optimizer step finds them
    groups: list = field(default_factory=list)  # the optimizer's groups at each step, without their parameters
    matmul_precision: set = field(default_factory=set)
    dtypes: set = field(default_factory=set)  # of (logits, loss, parameters)


# What one step costs on the fake clock: (seconds, part). Reading the loss is not the step's work.
STEP_SECONDS = {"batch": 1, "forward": 10, "synchronize": 100, "item": 1000}


def record_run(module, folder, data, *flags):
    """Train as `train` does, on a fake clock and with every CUDA call forbidden, and look at what happens."""
    run = Run()
    clock = FakeClock(module)
    new_model = module.new_model

    logits = []

    def log_softmax(x, *args, compute=torch.nn.functional.log_softmax, **kwargs):
        logits.append(x.dtype)  # from rung 17 on the model's lm_head is not called in training
        return compute(x, *args, **kwargs)

    def hooked_model(*args):
        model = new_model(*args)
        model.lm_head.register_forward_hook(lambda part, inputs, output: logits.append(output.dtype))

        def see(part, inputs, loss):
            run.dtypes.add((logits.pop(), loss.dtype, *{p.dtype for p in model.parameters()}))
            run.matmul_precision.add(torch.get_float32_matmul_precision())

        model.register_forward_hook(see)
        return model

    def see_step(optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if any(gradient is None for gradient in gradients):
            return  # AdamW's step within that of rung 18
        run.norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        run.groups.append([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    def forbidden(*args, **kwargs):
        raise AssertionError("a CUDA call on a CPU")

    item = torch.Tensor.item

    def item_of_train(tensor):
        if inspect.currentframe().f_back.f_code.co_name == "train":
            clock.now += STEP_SECONDS["item"]
        return item(tensor)

    module.new_model = hooked_model
    module.GPT.forward = clock.slow(module.GPT.forward, STEP_SECONDS["forward"])
    batch = module.DataLoaderLite.batch

    def see_batch(loader, i):
        if i in getattr(loader, "prefetched", ()):
            return batch(loader, i)  # seen when it was fetched
        run.batches.append((loader.B, i))
        return clock.slow(batch, STEP_SECONDS["batch"])(loader, i)

    module.DataLoaderLite.batch = see_batch
    hook = register_optimizer_step_pre_hook(see_step)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("synchronize", "get_device_name", "get_device_capability", "max_memory_allocated",
                     "max_memory_reserved", "is_bf16_supported", "set_device", "current_device", "init", "_lazy_init"):
            patch.setattr(torch.cuda, name, forbidden)
        patch.setattr(torch.cpu, "synchronize", clock.slow(torch.cpu.synchronize, STEP_SECONDS["synchronize"]))
        patch.setattr(torch.Tensor, "item", item_of_train)
        patch.setattr(torch.nn.functional, "log_softmax", log_softmax)
        patch.setattr("builtins.print", lambda *words, **kwargs: run.printed.append(words[0]))
        run.printed = []
        try:
            run.log = train(module, folder, data, *flags)
        finally:
            hook.remove()
    run.lines = run.log.read_text().splitlines()
    run.steps = read_steps(run.log)
    return run


def run_command(*command, timeout=300, cwd=ROOT, **environment):
    """Run a program as a user would; returns the finished process with its text output."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
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
    prepare.load_tokenizer = lambda name: tokenizer or prepare.vocabulary.of_bytes("gpt2-bytes")
    source = folder.with_name(folder.name + ".txt")
    source.write_bytes(text.encode("utf-8"))
    prepare.prepare(source, folder)
    return folder


@pytest.fixture(scope="session")
def real_text():
    """466 kB of English, bundled with every Python."""
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


SHORT = ("-B", 2, "-T", 64, "--steps", 5)


@pytest.fixture(scope="session")
def short_run(tmp_path_factory, tokens):
    """short_run(label): five steps of that rung, as record_run sees them; each rung runs once a session.

    On disk, so that pytest-xdist's workers share them: two files ask for all rungs.
    """
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared

    def record(label):
        module = rung(label)
        more = ["--total-batch", 128] if has_flag(module, "total_batch") else []  # one micro-step
        more += ["--val-sequences", 2] if has_flag(module, "val_sequences") else []
        with own_settings():
            return record_run(module, tmp_path_factory.mktemp("run"), tokens, *SHORT, *more)

    def run(label):
        path = shared / f"short_run_{label}.pickle"
        with filelock.FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_bytes(pickle.dumps(record(label)))
        return pickle.loads(path.read_bytes())

    return run


@contextlib.contextmanager
def own_settings():
    """Undo what a script sets for its whole process: the precision of products, signal handlers."""
    precision = torch.get_float32_matmul_precision()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
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
