"""Two logs step by step, and a verdict in words: do the losses agree, how do the times compare."""
import pandas

from ladder import formats
from ladder.records.impossible import impossible
from ladder.records.logs import allocators_of
from ladder.records.significance import FEWEST_ROUNDS
from ladder.rungs.list import BY_NAME, rung_of

SAME_RUN_TOLERANCE = 1.5e-6  # a unit of the last digit of a log, with float's rounding
ROUNDING = 0.1  # nats: of one script where its numbers are rounded differently, as rungs 3, 5 and 6 do
ARITHMETIC = ("device", "machine", "torch", "precision", "compile")  # headers that tell how they are rounded
MIN_COUNTED = 10  # steps after the warm-up, for a verdict on the speed


def loss_tolerance(first, second):
    """How far apart the losses of two runs may be if the change should not affect them; None if it may."""
    if first.name == second.name:
        pairs = [(first.headers.get(key), second.headers.get(key)) for key in ARITHMETIC]
        apart = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        return ROUNDING if apart else SAME_RUN_TOLERANCE
    for earlier, later in ((first.name, second.name), (second.name, first.name)):
        rung, between = BY_NAME.get(later), []
        while rung and rung.name != earlier:
            between.append(rung.same_losses)
            rung = rung.start
        if rung:
            return None if None in between else sum(between)
    return None


def common_steps(first, second):
    """The steps that both runs have, with both losses (nats) and times (ms)."""
    a, b = [pandas.DataFrame({"step": run.steps, "loss": run.losses, "ms": run.ms}) for run in (first, second)]
    steps = a.merge(b, on="step", suffixes=(" A", " B"))
    steps["B - A"] = steps["loss B"] - steps["loss A"]
    steps["A / B"] = steps["ms A"] / steps["ms B"]
    return steps


def loss_verdict(first, second, steps, different):
    tolerance, apart = loss_tolerance(first, second), steps["B - A"].abs()
    most = formats.logged_loss(apart.max())
    unlike = [what for what in different if what not in ("device", "allocator")]
    if steps.empty:
        return "The logs have no step in common."
    if unlike == ["B"]:  # compensated by ranks or micro-steps
        return f"The losses of the same tokens, in batches of different B, are at most {most} apart."
    if unlike:
        return f"The losses do not compare step by step: different {', '.join(unlike)}."
    if tolerance is None:
        verdict = "The same losses, though" if (apart == 0).all() else f"The losses differ by up to {most}:"
        return f"{verdict} what lies between the two scripts may change them."
    wrong = ~(apart <= tolerance)  # as NaN is
    if not wrong.any():
        return f"The same losses: at most {most} apart; this change allows {tolerance:g}."
    verdict = f"NOT the same losses: up to {most} apart; this change allows {tolerance:g}"
    place = wrong.idxmax()
    if place == 0:
        return verdict + ", from the first step on."
    before = formats.logged_loss(apart[:place].max())
    return (f"{verdict}. Before step {steps['step'][place]} they were at most {before} apart: if the loss jumps there, "
            "the training is unstable and small rounding differences grow; if it does not, look for a bug.")


def differing(first, second):
    """{what: (A's, B's)} for the settings in which two runs are known to differ."""
    a, b = first.setting(), second.setting()
    for run, setting in ((first, a), (second, b)):
        setting |= {"tokens per step": run.tokens_per_step, "seed": run.headers.get("seed")}
        if rung_of(first.name).scheduled or rung_of(second.name).scheduled:
            setting["steps"] = run.headers.get("steps")
    different = {what: (a[what], b[what]) for what in a if None not in (a[what], b[what]) and a[what] != b[what]}
    if len(allocators_of([first, second])) > 1:
        different["allocator"] = first.allocator or "unknown", second.allocator or "unknown"
    return different


def speed_verdict(first, second, different):
    faster, unit = first.median_ms / second.median_ms, "steps/sec"
    if first.tokens_per_step and second.tokens_per_step:
        faster, unit = second.tokens_per_second / first.tokens_per_second, "tokens/sec"
    word = f"{formats.ratio(faster)} times the {unit} of" if abs(faster - 1) >= 0.005 else f"the same {unit} as"
    times = f"{formats.ms(first.median_ms)} -> {formats.ms(second.median_ms)} ms/step, medians"
    verdict = f"The second has {word} the first ({times})"
    work = [what for what in ("model", "B", "T") if what in different]
    if work:
        return f"{verdict}, with a different {' and '.join(work)}: this does not measure a change in the code."
    too_few = [run for run in (first, second) if run.counted < MIN_COUNTED]
    if too_few:
        counts = " and ".join(f"{run.path} has {run.counted}" for run in too_few)
        return f"{verdict}: too few steps to say. After the warm-up {counts}; at least {MIN_COUNTED} are needed."
    memory = "; part of it may be the allocator's" if "allocator" in different else ""
    return (f"{verdict}{memory}. One run each: to tell whether that is significant takes {FEWEST_ROUNDS} rounds "
            "(python -m ladder run --rungs N,M --repeat 5).")


def compare(first, second):
    """(the steps that both runs have, as a DataFrame; the verdicts)."""
    steps, different = common_steps(first, second), differing(first, second)
    sentences = [f"Different {what}: {a} against {b}." for what, (a, b) in different.items()]
    sentences += [f"{run.path} is not complete: its run was stopped at step {run.steps[-1]}."
                  for run in (first, second) if not run.complete]
    sentences += [f"{run.path}: {sentence}." for run in (first, second) for sentence in impossible(run)]
    sentences += [loss_verdict(first, second, steps, different), speed_verdict(first, second, different)]
    return steps, sentences
