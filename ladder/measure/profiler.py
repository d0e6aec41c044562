"""Where the time of a step goes: some steady steps of a rung under torch.profiler, by kind of work.

    python -m ladder profile --rungs 10                         # runs, once for each round:
    python -m ladder.measure.profiler 10 FILE TRACE --model gpt2 -B 1 -T 1024

The rung's own `train` runs in a separate process. FILE gets the milliseconds as JSON, TRACE, if not "", the events. On
a CPU an operator's time is what it spends outside the operators that it calls; on a GPU, the time of the kernels that
it launches. A generated kernel (torch.compile) is classified by the operations that its name lists. What no operator
accounts for is "waiting", so the parts add up to the step.
"""
import json
import math
import re
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from ladder import formats
from ladder.count.flops import flops_per_token
from ladder.errors import UserError
from ladder.files import write_whole
from ladder.measure.processes import Job, run_job
from ladder.measure.run_folder import write_machine
from ladder.measure.script_flags import check_flags, own_flags, split_flags
from ladder.records.logs import read_log
from ladder.records.machine import read_machine
from ladder.records.step_profile import KINDS, UNRELIABLE, is_reliable, read_profile
from ladder.rungs.list import BY_LABEL, BY_NAME, load_script

STEP, DATA, CLIP = "ProfilerStep*", "ladder: data", "ladder: clip"  # ranges: torch.profiler's own, and two of ours
PRODUCT = re.compile(r"(\b|_)(addmm|mm|matmul|linear)\b|triton_tem_")
GENERATED = re.compile(r"cpp_fused_|triton_[a-z]+_fused_")
# Steps that warm up, that run without the profiler, and that it times; it also drops one of its own before these.
STEPS_ON_A_CPU, STEPS_ON_A_GPU = (2, 3, 3), (20, 30, 10)


def kind_of(name, shapes, around, logit_widths):
    """The kind of work of an operator or kernel, a key of KINDS.

    `shapes` are its inputs', `around` the names of the ranges and operators that it is part of, `logit_widths` the
    possible last dimensions of the logits. In GPT-2 only attention has batched products and four dimensions.
    """
    if DATA in around or name == DATA or name.startswith("Memcpy HtoD"):
        return "data"
    if any(part == CLIP or part.startswith("Optimizer.") for part in (name, *around)) or "_amp_" in name:
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


def names_around(event):
    """The names of the ranges and operators that an event is part of."""
    parent = event.cpu_parent
    return [parent.name, *names_around(parent)] if parent else []


def by_kind(events, logit_widths, device):
    """({kind: ms}, ms) of one step: from the profiler's `events` inside its steps, and the steps' own ms."""
    on_cpu = [event for event in events if event.device_type.name == "CPU"]
    steps = [event.time_range for event in on_cpu if event.name == STEP]
    parts = dict.fromkeys(KINDS, 0.0)
    for event in on_cpu:
        if not any(step.start <= event.time_range.start < step.end for step in steps):
            continue
        around = names_around(event)
        if device == "cpu":
            parts[kind_of(event.name, event.input_shapes, around, logit_widths)] += event.self_cpu_time_total / 1000
        for kernel in event.kernels if not event.is_user_annotation else []:  # a range does no work itself
            name = kernel.name if kernel.name.startswith("Mem") else event.name
            kind = kind_of(name, event.input_shapes, around, logit_widths)
            parts["normalization and pointwise" if kind == "waiting" else kind] += kernel.duration / 1000
    total = sum(step.elapsed_us() for step in steps) / 1000
    if device != "cpu":
        if not any(parts.values()):
            raise UserError("the profiler saw no kernels; allow it to use CUPTI, which containers often forbid")
        parts["waiting"] = max(0.0, total - sum(parts.values()))
    return {kind: ms / len(steps) for kind, ms in parts.items()}, total / len(steps)


def logit_widths(vocab_size):
    """The possible last dimensions of the logits: a rung pads them to 128, Inductor a GPU's products to 4 or 8."""
    return {math.ceil(vocab_size / multiple) * multiple for multiple in (1, 4, 8, 128)}


def profile_rung(label, flags, folder, trace=None):
    """Train the rung `label` with `flags`, its log in `folder`, a trace in a file; the measured times as a dict."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    script = load_script(BY_LABEL[label])
    settings = script.parse_args([*flags, "--log-dir", str(folder)])
    if settings.device == "cpu":
        torch._inductor.config.cpp.enable_kernel_profile = True  # else a CPU's generated kernels have no names
    warm_up, plain, timed = STEPS_ON_A_CPU if settings.device == "cpu" else STEPS_ON_A_GPU
    settings.steps = warm_up + plain + 1 + timed
    log_step = script.Log.step

    def step(*values, **more):  # between two calls there is exactly one step of training
        log_step(*values, **more)
        profiler.step()

    script.Log.step = step
    script.DataLoaderLite.batch = record_function(DATA)(script.DataLoaderLite.batch)
    torch.nn.utils.clip_grad_norm_ = record_function(CLIP)(torch.nn.utils.clip_grad_norm_)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if settings.device == "cuda" else [])
    phases = schedule(wait=warm_up + plain, warmup=1, active=timed, repeat=1)
    # Records of shapes slow steps down under glibc's malloc, whose heap they scatter; under mimalloc they do not.
    with profile(activities=activities, record_shapes=True, schedule=phases) as profiler:
        script.train(settings)
    if trace:
        profiler.export_chrome_trace(trace)

    run = read_log(folder / f"{script.SCRIPT.stem}.log")
    _, meta = script.load_tokens(settings.data, "train", 1)
    vocab_size = meta["vocab_size"]  # a log does not have it for your own tokenizer
    parts, step_ms = by_kind(profiler.events(), logit_widths(vocab_size), settings.device)
    plain_ms = statistics.median(run.ms[warm_up : warm_up + plain])
    return {"name": run.name, "step_ms": step_ms, "plain_ms": plain_ms, "parts_ms": parts, "vocab_size": vocab_size}


def products_ms(run, rates, vocab_size):
    """Milliseconds that the matrix products of a step take at the measured rate (FLOP/s) of the rung's format."""
    if run.number_format not in rates:
        raise UserError(f"--logs: its machine.json has no rate in {run.number_format}; give another folder")
    per_token = flops_per_token(run.model, run.T, BY_NAME[run.name].causal, vocab_size)
    return 1000 * per_token * run.tokens_per_step / rates[run.number_format]


def check_profile(rungs, flags, folder):
    """The settings of a profile in `folder`; raises UserError if it cannot be made or belongs elsewhere."""
    if any(rung.torchrun or rung.file.startswith("beyond/") for rung in rungs):
        raise UserError("--rungs: only rungs 0 to 10 can be profiled; leave out the others")
    if split_flags(flags, "--steps", "--compile-mode", "--pretrained")[0]:
        raise UserError("--steps, --compile-mode, --pretrained: a profile does not allow them; leave them out")
    settings = check_flags(rungs, flags)
    if settings.device == "mps":
        raise UserError("--device mps: torch.profiler does not see Apple GPUs; give --device cpu")
    if read_profile(folder):
        raise UserError(f"--logs {folder}: holds a profile already; give another folder")
    if read_machine(folder).get("device", settings.device) != settings.device:
        raise UserError(f"--logs {folder}: its machine.json is from a different device; give another folder")
    return settings


def profile_once(rung, flags, machine, trace):
    """(one profile of a rung, None if it failed; the job's Outcome); `trace`: a file for its steps, or ""."""
    with TemporaryDirectory() as scratch:
        folder, result = Path(scratch), Path(scratch) / "result.json"
        command = [sys.executable, "-m", "ladder.measure.profiler", rung.label, str(result), str(trace)]
        job = Job(rung.name, [*command, *own_flags(rung, flags, folder)], folder)
        outcome = run_job(job, math.inf, machine["device"])
        if outcome.status != "ok":
            return None, outcome
        times = json.loads(result.read_text())
        run = read_log(folder / f"{rung.name}.log")
        times["products_ms"] = products_ms(run, machine.get("rates", {}), times.pop("vocab_size"))
    return times, outcome


def profile_ladder(rungs, flags, settings, folder, console, repeat, traces=False):
    """Profile the rungs, one after another, into folder/profile.json; returns the outcomes of those that failed.

    Rates are those of folder/machine.json, which are measured first if it does not exist.
    """
    if not (folder / "machine.json").exists():
        write_machine(folder, settings.device)
    machine = {"device": settings.device, "name": None} | read_machine(folder)
    profile = {"model": settings.model, "B": settings.B, "T": settings.T, "name": machine["name"],
               "device": settings.device, "rounds": repeat}
    rounds, failed, jobs = {rung.name: [] for rung in rungs}, [], list(rungs) * repeat
    for number, rung in enumerate(jobs, 1):
        with console.status(f"{number} of {len(jobs)} {rung.name}"):
            trace = folder / f"{rung.name}.trace.json.gz" if traces else ""  # of the last round
            times, outcome = profile_once(rung, flags, machine, trace)
        if times is None:
            failed.append(outcome)
            console.print(f"{rung.name}: {outcome.status}: {outcome.reason}", style="red")
            continue
        rounds[rung.name].append(times)
        profile["rungs"] = [median_round(of_rung) for of_rung in rounds.values() if of_rung]
        write_whole(folder / "profile.json", json.dumps(profile, indent=1) + "\n")
        console.print(f"{rung.name}: {formats.ms(times['step_ms'])} ms/step under the profiler, "
                      f"{formats.ms(times['plain_ms'])} without{'' if is_reliable(times) else ': ' + UNRELIABLE}")
    return failed


def median_round(rounds):
    """The round with the median step, of the reliable ones if there are any."""
    counted = list(filter(is_reliable, rounds)) or rounds
    return sorted(counted, key=lambda times: times["step_ms"])[len(counted) // 2]


if __name__ == "__main__":
    label, file, trace, *rest = sys.argv[1:]
    try:
        Path(file).write_text(json.dumps(profile_rung(label, rest, Path(file).parent, trace)))
    except UserError as error:
        sys.exit(f"error: {error}")
