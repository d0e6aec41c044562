"""Read the logs of the training scripts.

A round's logs are files of a folder, `round_1/baseline.log`, or, as records have them, one file, `round_1.log`: one log
after another, each from its line `# script:` on. In such a file a log's path is `round_1.log/baseline.log`.

A resumed run appends to its log: of the steps that it repeated the last ones count, and of two headers the later.

A step line is `step : 3 | loss: 9.5 | dt: 93.1 ms | tokens/sec: 43995.7`, with or without further fields. Everything
else is optional: what a log does not say is None.
"""
import contextlib
import functools
import itertools
import math
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from ladder.count.flops import VOCAB_SIZE
from ladder.errors import UserError
from ladder.rungs.list import ORDER, ROOT, today

RUNS = Path("logs/ladder")  # one subfolder per run
REFERENCE = ROOT / "logs" / "reference"  # one subfolder per machine and setting
A_RUN = f"give the folder of one run, such as {RUNS}/DATE_TIME"
THREADS_OF = re.compile(r" \((\d+) threads\)")  # a CPU, in a header
NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
INTEGER = r"(\d{1,12})"
STEP_LINE = re.compile(rf"\s*step\s*:?\s*{INTEGER}\s*\|\s*loss:?\s*{NUMBER}\s*\|\s*dt:?\s*{NUMBER}\s*ms"
                       rf"(?:\s*\|\s*tok(?:ens)?/s(?:ec)?:?\s*{NUMBER})?")
VAL_LINE = re.compile(rf"val : step {INTEGER} \| loss: {NUMBER}")
RESUMED_LINE = re.compile(rf"# resumed after step {INTEGER} of {INTEGER}")
MEDIAN_LINE = re.compile(rf"median : dt: [\d.]+ ms .*\| steps {INTEGER}-")
PEAK = re.compile(rf"peak memory: {NUMBER} GB|process memory: {NUMBER} GB")


class NoStep(UserError):
    """A log without a step."""


@dataclass
class Run:
    """One log: what was run, and each step's loss (nats) and time (milliseconds)."""

    path: Path
    name: str  # the script's of today, without its suffix
    headers: dict
    B: int | None
    T: int | None
    ranks: int
    steps: list = field(default_factory=list)  # the numbers in the step lines
    losses: list = field(default_factory=list)
    ms: list = field(default_factory=list)
    val_steps: list = field(default_factory=list)  # after which of the steps there was a validation
    val_losses: list = field(default_factory=list)
    peak_memory_gb: float | None = None
    last_speed: float | None = None  # the last step's tokens/sec, as the log says
    first_counted_step: int | None = None  # from the log's median line, which a killed run lacks
    model: str | None = None
    data: str | None = None

    @property
    def complete(self):
        """It has its median line, and its last step is the one that the header promises.

        A run that a signal stopped also has a median line.
        """
        promised = re.match(INTEGER, self.headers.get("steps", ""))
        return self.first_counted_step is not None and (not promised or int(promised[1]) == self.steps[-1])

    @property
    def warm_up(self):
        """How many steps at the start the median leaves out: as the log says, else the first half, as scripts do."""
        if self.first_counted_step in self.steps:
            return self.steps.index(self.first_counted_step)
        return len(self.ms) // 2

    @property
    def counted(self):
        """How many steps the median is of."""
        return len(self.ms) - self.warm_up

    @property
    def median_ms(self):
        return statistics.median(self.ms[self.warm_up :])

    @property
    def tokens_per_step(self):
        """Tokens over all ranks and micro-steps."""
        total = re.match(rf"{INTEGER} tokens", self.headers.get("total batch", ""))
        if total:
            return int(total[1])
        return None if self.B is None or self.T is None else self.B * self.T * self.ranks

    @property
    def tokens_per_second(self):
        return None if self.tokens_per_step is None else self.tokens_per_step / self.median_ms * 1000

    @property
    def seconds(self):
        """{step: seconds of training at its end}."""
        return {step: ms / 1000 for step, ms in zip(self.steps, itertools.accumulate(self.ms), strict=True)}

    @property
    def number_format(self):
        """Of the matrix products: "float32", "tf32", "bfloat16" or "float16"; 16 bits where the log does not say."""
        precision = self.headers.get("precision", "bfloat16")
        return "tf32" if "in TF32" in precision else re.match(r"\w*", precision)[0]

    @property
    def device(self):
        """The device, on a CPU its name where it is known, without the number of threads, which torchrun changes."""
        name = self.headers.get("machine") or self.headers.get("device")
        return THREADS_OF.sub("", name) if name else None

    @property
    def threads(self):
        """Of a CPU; 0 where the log does not say."""
        found = THREADS_OF.search(self.headers.get("machine") or self.headers.get("device", ""))
        return int(found[1]) if found else 0

    @property
    def on_cpu(self):
        device = self.headers.get("device", "")
        return device == "cpu" or bool(THREADS_OF.search(device))

    @property
    def allocator(self):
        """What hands out the device's memory: torch on an accelerator; on a CPU None where nobody has recorded it."""
        default = None if self.on_cpu or "device" not in self.headers else "torch"
        return self.headers.get("allocator", default)

    @property
    def vocab_size(self):
        """How many tokens the vocabulary has, as far as its name says so; None for others."""
        name = re.search(r" \((\S+) tokens\)", self.data or " (gpt2 tokens)")
        if not name:
            return None
        trained = re.fullmatch(r"bpe-(\d+)(-\w+)?", name[1])
        return int(trained[1]) if trained else {"gpt2": VOCAB_SIZE, "gpt2-bytes": VOCAB_SIZE, "bytes": 257}.get(name[1])

    def setting(self):
        """What two runs must share to be compared, None where it is not known."""
        device = None if self.device == "cpu" else self.device  # a script alone, or one that was stopped, names no CPU
        return {"data": self.data, "model": self.model, "B": self.B, "T": self.T, "device": device}


def allocators_of(runs):
    """The memory allocators of runs on a CPU, where it matters; none of a GPU's runs, which all have torch's."""
    names = {run.allocator or "unknown" for run in runs}
    return [] if "torch" in names else sorted(names)


def read_headers(lines):
    """{"model": "gpt2", "parameters": "124,439,808", ...} from lines like `# model: gpt2 | parameters: 124,439,808`."""
    headers = {}
    for line in lines:
        for part in line.removeprefix("#").split(" | ") if line.startswith("# ") else []:
            key, colon, value = part.partition(": ")
            if colon:
                headers[key.strip()] = value.strip()
    return headers


def text_of(path):
    """The text of a log, which may be one of several in the file of a round."""
    if path.parent.is_file():
        return parts_of(path.parent).get(path, "")
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; name the log that a script has written") from None


@functools.cache  # a record does not change
def parts_of(file):
    """{path: text} of the logs in a round's file; a resumed run has written two parts of its log."""
    parts = {}
    for part in re.split("(?m)^(?=# script: )", file.read_text(encoding="utf-8", errors="replace"))[1:]:
        name = part.partition("\n")[0].removeprefix("# script: ").removesuffix(".py")
        parts[file / f"{name}.log"] = parts.get(file / f"{name}.log", "") + part
    return parts


def lines_of(text):
    """Its lines; without the last one if it is incomplete, as when a run was killed while writing."""
    text = re.sub(r"(?m)^\[\w+\]:", "", text)  # torchrun --tee writes "[default0]:" before each line
    return text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]


def run_of(path, headers):
    """A Run without a step."""
    batch = re.search(rf"B={INTEGER} T={INTEGER}", headers.get("batch", ""))
    B, T = map(int, batch.groups()) if batch else (None, None)
    name = today(Path(headers.get("script", "")).stem or path.stem)
    ranks = re.fullmatch(INTEGER, headers.get("ranks", "1"))
    return Run(path, name, headers, B, T, int(ranks[1]) if ranks else 1, model=headers.get("model"),
               data=headers.get("data"))


def read_log(path):
    """The Run of a log. UserError if it has no step, or the lines of two runs."""
    path = Path(path)
    lines = lines_of(text_of(path))
    run = run_of(path, read_headers(lines))
    for line in lines:
        add_line(run, line)
    if not run.ms:
        raise NoStep(f"{path} has no step line: not the log of a training run, or of one without a step")
    for before, step in itertools.pairwise(run.steps):
        if step <= before:
            raise UserError(f"{path} is damaged: step {step} follows step {before}, as when two runs write one log; "
                            "rerun the script, alone")
    return run


def add_line(run, line):
    """Add what a line says about a step, a validation, the median or a resumed run; other lines say nothing."""
    step, validation, median = STEP_LINE.match(line), VAL_LINE.match(line), MEDIAN_LINE.match(line)
    resumed = RESUMED_LINE.match(line)
    if resumed:  # what it had done after this step, it does again
        for numbers, *others in ((run.steps, run.losses, run.ms), (run.val_steps, run.val_losses)):
            kept = sum(number <= int(resumed[1]) for number in numbers)
            for values in (numbers, *others):
                del values[kept:]
        if int(resumed[1]) < int(resumed[2]):
            run.first_counted_step = None
    if step:
        run.steps.append(int(step[1]))
        run.losses.append(float(step[2]))
        run.ms.append(float(step[3]))
        run.last_speed = float(step[4]) if step[4] else None
    if validation:
        run.val_steps.append(int(validation[1]))
        run.val_losses.append(float(validation[2]))
    if median:
        run.first_counted_step = int(median[1])
    peak = PEAK.search(line)
    if peak and math.isfinite(float(peak[1] or peak[2])):
        run.peak_memory_gb = float(peak[1] or peak[2])


def logs_in(folder):
    """The paths of the logs in a folder and in its rounds."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; {A_RUN}")
    rounds = sorted(folder.glob("round_*.log"))  # each holds its logs one after another
    single = {*folder.glob("*.log"), *folder.glob("round_*/*.log")} - {*rounds}
    return sorted(single) + [path for file in rounds for path in parts_of(file)]


def read_folder(folder):
    """({script name: [Run, ...]} in the ladder's order, why other logs were skipped) of a folder and its rounds.

    Logs that cannot be read or have no step are skipped. Raises UserError when none is left.
    """
    runs, skipped, without = {}, [], []
    for path in logs_in(folder):
        try:
            run = read_log(path)
            runs.setdefault(run.name, []).append(run)
        except NoStep:
            without.append(path.relative_to(folder).as_posix())
        except UserError as error:
            skipped.append(str(error))
    if without:  # of runs that waited for their turn, when they were stopped
        skipped.append(f"no step line in {', '.join(without)}")
    if not runs:
        raise UserError(": ".join([f"{folder}: no log there has a step", *skipped[:1]]) + f"; {A_RUN}")
    order = sorted(runs, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
    return {name: runs[name] for name in order}, skipped


def has_steps(folder):
    """Whether a log in `folder` or its rounds has a step: without one nothing can be shown."""
    with contextlib.suppress(UserError):
        return any(STEP_LINE.match(line) for path in logs_in(folder) for line in lines_of(text_of(path)))
    return False


def newest_run(wanted=has_steps):
    """The folder of the newest run that is `wanted`."""
    for path in sorted(RUNS.glob("*/machine.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        if wanted(path.parent):
            return path.parent
    raise UserError(f"{RUNS} holds no run; start one with python -m ladder run")


def reference_folders():
    return sorted(path for path in REFERENCE.glob("*") if path.is_dir())
