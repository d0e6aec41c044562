"""Where the time of a step goes: some steady steps of a rung under torch.profiler, by kind of work.

    python -m ladder.measure.step_profile 10 FILE --model gpt2 -B 1 -T 1024

The rung's own `train` runs, in a process of its own, and FILE gets the milliseconds as JSON. On a CPU each operator
counts with the time that it spends outside the operators it calls, on a GPU with the time of the kernels it launches. A
generated kernel (torch.compile) counts for the operations that its name lists. What no operator accounts for is
"waiting", so the parts add up to the step.
"""
import json
import math
import re
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.runner import Job, check_flags, own_flags, run_job, split_flags, write_machine
from ladder.scripts.flops import flops_per_token
from ladder.scripts.stages import BY_LABEL, BY_NAME, load_script
from ladder.show.logs import STEP_LINE, has_steps, read_folder, read_log
from ladder.show.machine import read_machine
from ladder.show.profile import KINDS, read_profile

STEP, DATA, CLIP = "ladder: step", "ladder: data", "ladder: clip"  # ranges around parts of `train`
PRODUCT = re.compile(r"(\b|_)(addmm|mm|matmul|linear)\b|triton_tem_")
GENERATED = re.compile(r"cpp_fused_|triton_[a-z]+_fused_")
STEPS_ON_A_CPU, STEPS_ON_A_GPU = (2, 3, 3), (20, 30, 10)  # warm-up, without the profiler, with it


def kind_of(name, shapes, around, logit_widths):
    """The kind of work of an operator or kernel, a key of KINDS.

    `shapes` are its inputs', `around` the names of the ranges and operators that it is part of, `logit_widths` the
    possible last dimensions of the logits. In GPT-2 only attention has batched products and four dimensions.
    """
    if DATA in around or name == DATA or name.startswith("Memcpy HtoD"):
        return "data"
    if any(one == CLIP or one.startswith("Optimizer.") for one in (name, *around)) or "_amp_" in name:
        return "optimizer"
    if re.search("log_softmax|nll_loss|cross_entropy", name):
        return "cross-entropy"
    if GENERATED.search(name) and not PRODUCT.search(name):  # never a fused attention kernel, though it may name one
        return "attention" if "_softmax" in name else "normalization and pointwise"
    if not name.startswith(("aten::", "mkldnn::", "triton_", "Mem")):
        return "waiting"  # a range, autograd's engine, the wrapper of a compiled graph
    if re.search("bmm|attention|bitwise_not", name) or any(len(shape) == 4 for shape in shapes):
        return "attention"
    if PRODUCT.search(name):
        return "head" if any(logit_widths & set(shape) for shape in shapes) else "matrix products"
    if any(len(shape) > 1 and shape[-1] in logit_widths for shape in shapes):
        return "cross-entropy"
    return "normalization and pointwise"


def by_kind(events, logit_widths, device):
    """({kind: ms}, ms) of one step: of the profiler's `events` inside the ranges called STEP, and of these ranges."""
    steps = [event for event in events if event.name == STEP and event.device_type.name == "CPU"]
    parts = dict.fromkeys(KINDS, 0.0)
    for event in events:
        start = event.time_range.start
        if event.device_type.name != "CPU" or not any(
                step.time_range.start <= start < step.time_range.end for step in steps):
            continue
        shapes, around, parent = event.input_shapes or [], [], event.cpu_parent
        while parent is not None:
            around.append(parent.name)
            parent = parent.cpu_parent
        if device == "cpu":
            parts[kind_of(event.name, shapes, around, logit_widths)] += event.self_cpu_time_total / 1000
        for kernel in event.kernels if not event.is_user_annotation else []:  # a range does no work itself
            name = kernel.name if kernel.name.startswith("Mem") else event.name
            kind = kind_of(name, shapes, around, logit_widths)
            parts["normalization and pointwise" if kind == "waiting" else kind] += kernel.duration / 1000
    total = sum(step.time_range.elapsed_us() for step in steps) / 1000
    if device != "cpu":
        if not any(parts.values()):
            raise UserError("the profiler has seen no kernel: is it allowed to here? (CUPTI, in a container)")
        parts["waiting"] = max(0.0, total - sum(parts.values()))
    return {kind: ms / len(steps) for kind, ms in parts.items()}, total / len(steps)


def profile_rung(label, flags, folder):
    """Train the rung `label` with `flags`, its log in `folder`; the measured times as a dict, see `measured`."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    torch._inductor.config.cpp.enable_kernel_profile = True  # else a CPU's generated kernels have no names
    script = load_script(BY_LABEL[label])
    settings = script.parse_settings([*flags, "--log-dir", str(folder)])
    on_cpu = settings.device == "cpu"
    warm_up, plain, profiled = STEPS_ON_A_CPU if on_cpu else STEPS_ON_A_GPU
    settings.steps = warm_up + plain + 1 + profiled  # the profiler's own first step does not count
    seen = SimpleNamespace(range=None, model=None)
    profiler = profile(activities=[ProfilerActivity.CPU] + ([] if on_cpu else [ProfilerActivity.CUDA]),
                       record_shapes=True)

    def in_range(name, function):
        def call(*args, **kwargs):
            with record_function(name):
                return function(*args, **kwargs)
        return call

    class Log(script.Log):
        """The script's own log; between two of its steps lies exactly one step of training."""

        def __init__(self, settings, model, *rest, **more):
            super().__init__(settings, model, *rest, **more)
            seen.model = model

        def step(self, step, *values, **more):
            if seen.range:
                seen.range.__exit__(None, None, None)
            super().step(step, *values, **more)
            if step == warm_up + plain:
                profiler.start()
            if warm_up + plain < step < settings.steps:
                seen.range = record_function(STEP)
                seen.range.__enter__()
            elif step == settings.steps:
                profiler.stop()

    script.Log = Log
    script.DataLoaderLite.batch = in_range(DATA, script.DataLoaderLite.batch)
    torch.nn.utils.clip_grad_norm_ = in_range(CLIP, torch.nn.utils.clip_grad_norm_)
    script.train(settings)

    logit_widths = {seen.model.config.vocab_size, len(seen.model.lm_head.weight)}
    parts, step_ms = by_kind(profiler.events(), logit_widths, settings.device)
    run = read_log(folder / f"{script.SCRIPT.stem}.log")
    return {"name": run.name, "step_ms": step_ms, "plain_ms": statistics.median(run.ms[warm_up : warm_up + plain]),
            "parts_ms": parts}


def floor_ms(run, rates):
    """Milliseconds that the matrix products of a step take at the measured rate (FLOP/s) of the rung's format."""
    precision = run.headers["precision"]
    name = next((name for name in ("bfloat16", "float16") if precision.startswith(name)), "float32")
    name = "tf32" if name == "float32" and "in TF32" in precision else name
    return 1000 * flops_per_token(run.model, run.T, BY_NAME[run.name].causal) * run.tokens_per_step / rates[name]


def check_profile(stages, flags, folder):
    """The Settings of a profile in `folder`; raises UserError if it cannot be made or belongs elsewhere."""
    if set(stages) - {BY_LABEL[str(number)] for number in range(11)}:
        raise UserError("--rungs: a profile is made of rungs 0 to 10")
    for flag in ("--steps", "--compile-mode", "--pretrained"):
        if split_flags(flags, flag)[0]:
            raise UserError(f"{flag}: not for a profile; leave it out")
    settings = check_flags(stages, flags)
    if settings.device == "mps":
        raise UserError("--device mps: torch.profiler does not see Apple GPUs; give --device cpu")
    wanted = settings.model, settings.B, settings.T
    there = [(run.model, run.B, run.T) for rounds in read_folder(folder)[0].values() for run in rounds] \
        if has_steps(folder) else []
    if profile := read_profile(folder):
        there.append((profile["model"], profile["B"], profile["T"]))
    for model, B, T in there:
        if (model, B, T) != wanted:
            raise UserError(f"--logs {folder}: holds results of {model}, B={B} T={T}, and this would be {wanted[0]}, "
                            f"B={wanted[1]} T={wanted[2]}; give the same flags, or another folder")
    if read_machine(folder).get("device", settings.device) != settings.device:
        raise UserError(f"--logs {folder}: its machine.json is of another device; give another folder")
    return settings


def profile_ladder(stages, flags, folder, console, repeat=1, deadline=math.inf):
    """Profile the stages, one after the other, into folder/profile.json; returns the outcomes of those that failed.

    Of `repeat` rounds a rung's median step counts; rungs that folder/profile.json has besides stay. The rates of
    folder/machine.json serve for the floor; where there is none they are measured first. It ends at the `deadline` (of
    time.monotonic), with the rungs that are finished then.
    """
    settings = check_profile(stages, flags, folder)
    if not (folder / "machine.json").exists():
        write_machine(folder, settings.device)
    machine = read_machine(folder)
    profile = {"model": settings.model, "B": settings.B, "T": settings.T, "name": machine.get("name"),
               "device": settings.device, "rounds": repeat}
    before = {rung["name"]: [rung] for rung in (read_profile(folder) or {"rungs": []})["rungs"]}
    failed, found = [], {}
    for number, stage in enumerate(stages * repeat, 1):
        if time.monotonic() > deadline:
            break
        name = f"{number} of {repeat * len(stages)} {stage.name}"
        with console.status(name) as status, TemporaryDirectory() as scratch:
            result = Path(scratch) / "result.json"
            command = [sys.executable, "-m", "ladder.measure.step_profile", stage.label, str(result)]

            def show(line, name=name, status=status):
                if match := STEP_LINE.match(line):
                    status.update(f"{name}: step {match[1]}, {match[3]} ms")

            job = Job(stage.name, [*command, *own_flags(stage, flags, Path(scratch))], Path(scratch))
            outcome = run_job(job, max(1, deadline - time.monotonic()), settings.device, show)
            if outcome.status != "ok":
                failed.append(outcome)
                console.print(f"{stage.name}: {outcome.status}: {outcome.reason}", style="red", markup=False)
                continue
            rung = json.loads(result.read_text())
            rung["floor_ms"] = floor_ms(read_log(Path(scratch) / f"{stage.name}.log"), machine["rates"])
        found.setdefault(stage.name, []).append(rung)
        rounds_of = before | found
        profile["rungs"] = [sorted(rounds_of[name], key=lambda one: one["step_ms"])[len(rounds_of[name]) // 2]
                            for name in BY_NAME if name in rounds_of]
        times = f"{rung['step_ms']:,.1f} ms/step under the profiler, {rung['plain_ms']:,.1f} without"
        console.print(f"{stage.name}: {times}", markup=False)
        write_whole(folder / "profile.json", json.dumps(profile, indent=1) + "\n")
    return failed


if __name__ == "__main__":
    rung, file, *rest = sys.argv[1:]
    try:
        Path(file).write_text(json.dumps(profile_rung(rung, rest, Path(file).parent)))
    except UserError as error:
        sys.exit(f"error: {error}")
