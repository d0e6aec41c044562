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


def loss_tolerance(one, other):
    """How far apart the losses of two runs may be if the change should not affect them; None if it may."""
    if one.name == other.name:
        pairs = [(one.headers.get(key), other.headers.get(key)) for key in ARITHMETIC]
        apart = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        return ROUNDING if apart else SAME_RUN_TOLERANCE
    for first, last in ((one.name, other.name), (other.name, one.name)):
        rung, between = BY_NAME.get(last), []
        while rung and rung.name != first:
            between.append(rung.same_losses)
            rung = rung.start
        if rung:
            return None if None in between else sum(between)
    return None


def common_steps(one, other):
    """The steps that both runs have, with both losses (nats) and times (ms)."""
    a, b = [pandas.DataFrame({"step": run.steps, "loss": run.losses, "ms": run.ms}) for run in (one, other)]
    rows = a.merge(b, on="step", suffixes=(" A", " B"))
    rows["B - A"] = rows["loss B"] - rows["loss A"]
    rows["A / B"] = rows["ms A"] / rows["ms B"]
    return rows[["step", "loss A", "loss B", "B - A", "ms A", "ms B", "A / B"]]


def loss_verdict(one, other, rows, different):
    tolerance, apart = loss_tolerance(one, other), rows["B - A"].abs()
    most = formats.logged_loss(apart.max())
    unlike = [what for what in different if what not in ("device", "allocator")]
    if rows.empty:
        return "The logs have no step in common."
    if unlike == ["B"]:  # compensated by ranks or micro-steps
        return f"The losses of the same tokens, in batches of different B, are at most {most} apart."
    if unlike:
        return f"The losses do not compare step by step: different {', '.join(unlike)}."
    if tolerance is None:
        found = "The same losses, though" if (apart == 0).all() else f"The losses differ by up to {most}:"
        return f"{found} what lies between the two scripts may change them."
    wrong = ~(apart <= tolerance)  # as NaN is
    if not wrong.any():
        return f"The same losses: at most {most} apart; this change allows {tolerance:g}."
    verdict = f"NOT the same losses: up to {most} apart; this change allows {tolerance:g}"
    first = wrong.idxmax()
    if first == 0:
        return verdict + ", from the first step on."
    before = formats.logged_loss(apart[:first].max())
    return (f"{verdict}. Before step {rows['step'][first]} they were at most {before} apart: if the loss jumps there, "
            "the training is unstable and small rounding differences grow; if it does not, look for a bug.")


def differing(one, other):
    """{what: (A's, B's)} for the settings in which two runs are known to differ."""
    a, b = one.setting(), other.setting()
    a["tokens per step"], b["tokens per step"] = one.tokens_per_step, other.tokens_per_step
    a["seed"], b["seed"] = one.headers.get("seed"), other.headers.get("seed")
    if rung_of(one.name).scheduled or rung_of(other.name).scheduled:
        a["steps"], b["steps"] = one.headers.get("steps"), other.headers.get("steps")
    different = {what: (a[what], b[what]) for what in a if None not in (a[what], b[what]) and a[what] != b[what]}
    if len(allocators_of([one, other])) > 1:
        different["allocator"] = one.allocator or "unknown", other.allocator or "unknown"
    return different


def speed_verdict(one, other, faster, different):
    unit = "tokens/sec" if one.tokens_per_step and other.tokens_per_step else "steps/sec"
    word = f"{formats.ratio(faster)} times the {unit} of" if abs(faster - 1) >= 0.005 else f"the same {unit} as"
    times = f"{formats.ms(one.median_ms)} -> {formats.ms(other.median_ms)} ms/step, medians"
    verdict = f"The second has {word} the first ({times})"
    work = [what for what in ("model", "B", "T") if what in different]
    if work:
        return f"{verdict}, with a different {' and '.join(work)}: this does not measure a change in the code."
    too_few = [run for run in (one, other) if run.counted < MIN_COUNTED]
    if too_few:
        counts = " and ".join(f"{run.path} has {run.counted}" for run in too_few)
        return f"{verdict}: too few steps to say. After the warm-up {counts}; at least {MIN_COUNTED} are needed."
    memory = "; part of it may be the allocator's" if "allocator" in different else ""
    return (f"{verdict}{memory}. One run each: to tell whether that is significant takes {FEWEST_ROUNDS} rounds "
            "(python -m ladder run --rungs N,M --repeat 5).")


def compare(one, other):
    """(the steps that both runs have, as a DataFrame; the verdicts)."""
    rows, different = common_steps(one, other), differing(one, other)
    faster = one.median_ms / other.median_ms  # by steps, where a log does not tell its tokens
    if one.tokens_per_step and other.tokens_per_step:
        faster *= other.tokens_per_step / one.tokens_per_step
    sentences = [f"Different {what}: {a} against {b}." for what, (a, b) in different.items()]
    sentences += [f"{run.path} is not complete: its run was stopped at step {run.steps[-1]}."
                  for run in (one, other) if not run.complete]
    sentences += [f"{run.path}: {found}." for run in (one, other) for found in impossible(run)]
    sentences.append(loss_verdict(one, other, rows, different))
    sentences.append(speed_verdict(one, other, faster, different))
    return rows, sentences
