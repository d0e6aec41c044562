"""Does everything work here? Every script trains a small model for four steps:

    python -m pytest --device cuda tests/scripts/test_smoke.py

Also what scripts do only on other machines or when asked: ranks, float16, no compilation, CUDA graphs, resuming,
sampling from a trained model and exporting it. Losses that must be equal are compared. The times mean nothing, since
several scripts share the machine. Without --device these are slow tests on the CPU, where only the last script of
each branch is compiled: it holds what those before it have added.
"""
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from load_script import LEAVES, ROOT, known_flags, rung

from ladder.measure.problems import compile_problem
from ladder.measure.processes import Job, Outcome, run_job
from ladder.measure.script_flags import ONE_MACHINE
from ladder.records.logs import STEP_LINE
from ladder.rungs.list import BY_LABEL, RUNGS

STEPS, SECONDS = 4, 600  # of a script: its training steps, the time that it may take (beside others, on slow cores)
SAME = 0.05  # nats: how close losses stay where only the place or the order of the arithmetic changes
FLOAT16 = """import sys, torch  # as on a T4
from ladder.rungs.list import BY_LABEL, load_script
script = load_script(BY_LABEL[sys.argv[1]])
script.autocast_dtype = lambda device: torch.float16
script.train(script.parse_args(sys.argv[2:]))"""
LABELS = [entry.label for entry in RUNGS]
ENDS = [entry.label for entry in LEAVES]
RANKS = [entry.label for entry in RUNGS if entry.torchrun] + ["long_run"]
RESUMED = [("long_run", "")] + [(entry.label, "torchrun") for entry in RUNGS if entry.torchrun and entry.label != "ddp"]
USED = list({(entry.exports_to, entry.tied): entry.label for entry in RUNGS}.values())  # the last of its kind
pytestmark = pytest.mark.timeout(4 * SECONDS)  # a test may wait for the script that it compares with
KEPT = [*RESUMED, *((label, "") for label in USED)]  # whose files are needed after the training


@dataclass
class Machine:
    """The device, and what was run on it: each command once, whichever worker asks first."""

    device: str
    data: Path
    folder: Path  # of all workers
    compile_mode: str
    compiled: list  # the labels that are

    def run(self, name, command):
        """The lines that a command has printed, without errors."""
        result = self.folder / f"{name}.json"
        with FileLock(self.folder / f"{name}.lock"):
            if not result.exists():
                (self.folder / name).mkdir(exist_ok=True)
                job = Job(name, [sys.executable, *map(str, command)], self.folder / name, {"PYTHONPATH": str(ROOT)})
                result.write_text(json.dumps(asdict(run_job(job, SECONDS, self.device))))
        outcome = Outcome(**json.loads(result.read_text()))
        if outcome.status != "ok":
            pytest.fail("\n".join([f"{name}: {outcome.status}: {outcome.reason}", *outcome.lines]), pytrace=False)
        return outcome.lines

    def command(self, label, how="", **changes):
        """How a script is started, as it is or as `how` says. What it writes goes to its own folder."""
        folder, small = self.folder / f"{label}{how}", self.device == "cpu"
        B, T, n_ranks, start = 4, 64 if small else 256, 1, [BY_LABEL[label].path]
        if how == "float16":
            start = ["-c", FLOAT16, label]
        if how == "torchrun":
            n_ranks = 2 if small else min(2, max(1, torch.cuda.device_count()))
            start = ["-m", "torch.distributed.run", *ONE_MACHINE, f"--nproc_per_node={n_ranks}", *start]
        flags = {
            "model": "1x2x64" if small else "mini", "device": self.device, "data": self.data, "T": T, "steps": STEPS,
            "B": B // n_ranks, "total_batch": 2 * B * T, "loss_chunk": T, "recompute_blocks": 1, "val_every": 2,
            "val_sequences": 2, "checkpoint_every": STEPS // 2, "float8_from": 1, "log_dir": folder,
            "checkpoint_dir": folder, "save": folder / "model.pt",
            "compile_mode": self.compile_mode if label in self.compiled else "none"}
        if how in ("eager", "graphs"):
            flags["compile_mode"] = {"eager": "none", "graphs": "reduce-overhead"}[how]
        return [*start, *known_flags(rung(label), **flags | changes)]

    def train(self, label, how="", **changes):
        """{step: loss} of a script."""
        folder = self.folder / f"{label}{how}"
        lines = self.run(folder.name, self.command(label, how, **changes))
        if (label, how) not in KEPT and not changes:
            shutil.rmtree(folder, ignore_errors=True)
        return losses_in(lines, last=changes.get("steps", STEPS))

    def use(self, name, exported):
        """Sample from the model of a training, and export it if it is of a kind that is."""
        folder = self.folder / name
        words = folder / "model.pt", "--device", self.device, "--max-new-tokens", 8
        self.run(f"{name}-sample", [ROOT / "sample.py", *words])
        if exported:
            self.run(f"{name}-convert", [ROOT / "convert.py", folder / "model.pt", folder / "converted"])


def losses_in(lines, first=1, last=STEPS):
    """{step: loss}, where a script has printed each step from `first` to `last`."""
    losses = {int(step[1]): float(step[2]) for step in map(STEP_LINE.match, lines) if step}
    assert [*losses] == [*range(first, last + 1)]
    return losses


def assert_near(losses, others, within=SAME):
    assert losses == pytest.approx({step: others[step] for step in losses}, abs=within)


@pytest.fixture(scope="module")
def machine(request, byte_tokens, tokens, tmp_path_factory):
    device, base = request.config.option.device or "cpu", tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smoke"
    folder.mkdir(exist_ok=True)
    compile_mode = "none" if compile_problem(device) else "default"
    compiled = LABELS if request.config.option.device else ENDS
    return Machine(device, byte_tokens if device == "cpu" else tokens, folder, compile_mode, compiled)


@pytest.fixture
def needs_torchrun(machine):
    if machine.device == "mps" or sys.platform == "win32":
        pytest.skip("no DDP, or no torchrun, here")


@pytest.mark.parametrize("label", LABELS)
def test_a_script_trains(label, machine):
    """With the losses of the script that it starts from where these must be equal."""
    entry, losses = BY_LABEL[label], machine.train(label)
    within = SAME if entry.torchrun else entry.same_losses  # without torchrun it is the script before
    if "autocast_dtype" in entry.may_change and rung("10").autocast_dtype(machine.device) is torch.float16:
        within = None  # float16's scaler skips the first steps
    if within:
        assert_near(losses, machine.train(entry.start.label), within)


@pytest.mark.parametrize("label, how, alike", [
    ("3", "float16", False), ("10", "float16", False), ("10", "graphs", True), ("zero_init", "float16", True),
    ("mup", "eager", True), ("long_run", "float16", True)])
def test_a_script_trains_in_another_way(label, how, alike, machine):
    if how == "graphs" and (machine.device != "cuda" or machine.compile_mode == "none"):
        pytest.skip("CUDA graphs need a GPU, and torch.compile")
    losses = machine.train(label, how)
    if alike:
        assert_near(losses, machine.train(label))


@pytest.mark.parametrize("label", RANKS)
def test_a_script_trains_on_ranks(label, machine, needs_torchrun):
    assert_near(machine.train(label, "torchrun"), machine.train(label))


@pytest.mark.parametrize("label, how", RESUMED)
def test_a_run_resumes_from_a_checkpoint(label, how, machine, request):
    if how:
        request.getfixturevalue("needs_torchrun")
    losses, folder = machine.train(label, how), machine.folder / f"{label}{how}"
    newest = max(folder.glob("step_*"), key=lambda path: path.name)  # after the last step, so nothing would be left
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    lines = machine.run(f"{folder.name}-resumed", [*machine.command(label, how), "--resume"])
    assert_near(losses_in(lines, first=STEPS // 2 + 1), losses)


@pytest.mark.parametrize("label", USED)
def test_a_trained_model_is_sampled_and_exported(label, machine):
    machine.train(label)
    machine.use(label, exported=BY_LABEL[label].exports_to)


def test_a_text_of_one_s_own(machine):
    """docs/own_text.md in small: documents are prepared in bytes, a model is trained on them, and used.

    `documents_apart` starts from a model whose attention matters already: without its mask, as in `dropout`, the loss
    would differ.
    """
    data, text = machine.folder / "own-text", machine.folder / "documents.jsonl"
    lines = (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()  # a text that nobody edits
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines if line), encoding="utf-8")
    machine.run("prepare", [ROOT / "data" / "prepare.py", "--text", text, "--tokenizer", "bytes", "--out", data])
    own = {"data": data, "model": "2x2x64", "dropout": 0}
    machine.train("dropout", "-start", **own, steps=200, muon_lr=0.02, max_lr=0.01, compile_mode="none")
    own["pretrained"] = machine.folder / "dropout-start" / "model.pt"
    eager = machine.train("documents_apart", "-own", **own, compile_mode="none")
    unmasked = machine.train("dropout", "-own", **own, compile_mode="none")
    assert abs(eager[1] - unmasked[1]) > 0.02
    assert_near(machine.train("documents_apart", "-compiled", **own), eager, 0.01)
    machine.use("documents_apart-own", exported=True)
    model = machine.folder / "documents_apart-own" / "model.pt"
    machine.run("evaluate", [ROOT / "evaluate.py", model, "--data", data, "--device", machine.device])
