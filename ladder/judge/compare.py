"""Two logs step by step, and a verdict in words: do the losses agree, does the speedup exceed the noise."""
import statistics
from dataclasses import dataclass

from ladder.scripts.stages import BY_LABEL, BY_NAME
from ladder.show.report import spread

SAME_RUN_TOLERANCE = 1e-6
MIN_COUNTED = 10  # steps after the warm-up, for a verdict on the speed


@dataclass
class Comparison:
    """Pairs of common steps and the verdicts. `faster` is how many times faster the second log is."""

    rows: list  # (step, loss A, loss B, B - A, ms A, ms B, A / B)
    faster: float
    beyond_noise: bool
    sentences: list


def loss_tolerance(one, other):
    """How far apart the losses of two runs may be if the change should not affect them; None if it should."""
    if one.name == other.name:
        return SAME_RUN_TOLERANCE
    for first, last in ((one.name, other.name), (other.name, one.name)):
        stage, between = BY_NAME.get(last), []
        while stage and stage.name != first:
            between.append(stage.same_losses)
            stage = BY_LABEL.get(stage.before)
        if stage:
            return None if None in between else sum(between)
    return None


def gap(rows):
    """How far apart the losses are at most."""
    return max(abs(row[3]) for row in rows)


def loss_verdict(one, other, rows):
    tolerance = loss_tolerance(one, other)
    difference = gap(rows)
    if tolerance is None:
        return f"The losses differ by up to {difference:.4f}: the rungs from one to the other are meant to change them."
    if all(abs(row[3]) <= tolerance for row in rows):  # which NaN never is
        return f"The same losses: at most {difference:.6f} apart; this change allows {tolerance:g}."
    first = next(i for i, row in enumerate(rows) if not abs(row[3]) <= tolerance)
    verdict = f"NOT the same losses: up to {difference:.4f} apart; this change allows {tolerance:g}"
    if first == 0:
        return verdict + ", from the first step on."
    before = max(abs(row[3]) for row in rows[:first])
    return (f"{verdict}. Before step {rows[first][0]} they were at most {before:.4f} apart: if the loss jumps there, "
            "the training is unstable and small rounding differences grow; if it does not, look for a bug.")


def differing(one, other):
    """{what: (A's, B's)} for the settings in which two runs are known to differ."""
    a, b = (run.setting() | {"tokens per step": run.tokens_per_step, "seed": run.headers.get("seed")}
            for run in (one, other))
    known = {what: (a[what], b[what]) for what in a if None not in (a[what], b[what]) and a[what] != b[what]}
    allocators = tuple(run.allocator or "unknown" for run in (one, other))
    on_gpu = "torch" in allocators  # which has no other
    return known | ({"allocator": allocators} if len(set(allocators)) > 1 and not on_gpu else {})


def counted_steps(run):
    return len(run.ms) - run.warm_up


def speed_verdict(one, other, faster, beyond_noise, different):
    unit = "tokens/sec" if one.tokens_per_step and other.tokens_per_step else "steps/sec"
    word = f"{faster:.2f} times the {unit} of" if abs(faster - 1) >= 0.005 else f"the same {unit} as"
    verdict = f"The second has {word} the first ({one.median_ms:.2f} -> {other.median_ms:.2f} ms/step, medians)"
    if work := [what for what in ("model", "B", "T") if what in different]:
        return f"{verdict}, with a different {' and '.join(work)}: this does not measure a change in the code."
    if too_few := [run for run in (one, other) if counted_steps(run) < MIN_COUNTED]:
        counts = " and ".join(f"{run.path} has {counted_steps(run)}" for run in too_few)
        return f"{verdict}: too few steps to say. After the warm-up {counts}; at least {MIN_COUNTED} are needed."
    overlap = "within the noise (the middle halves of the steps' times overlap)"
    memory = ", and part of it may be the allocator's" if "allocator" in different else ""
    return f"{verdict}: {'larger than the noise' if beyond_noise else overlap}{memory}."


def compare(one, other):
    """Compare two runs over the steps that both have."""
    b_loss, b_ms = dict(zip(other.steps, other.losses, strict=True)), dict(zip(other.steps, other.ms, strict=True))
    rows = [
        (step, loss, b_loss[step], b_loss[step] - loss, ms, b_ms[step], ms / b_ms[step])
        for step, loss, ms in zip(one.steps, one.losses, one.ms, strict=True)
        if step in b_loss
    ]
    known = one.tokens_per_step and other.tokens_per_step
    work = (one.tokens_per_step, other.tokens_per_step) if known else (1, 1)
    faster = one.median_ms / work[0] / (other.median_ms / work[1])
    (one_low, one_high), (other_low, other_high) = (
        [ms / done for ms in spread([run])] for run, done in zip((one, other), work, strict=True)
    )
    enough = min(counted_steps(one), counted_steps(other)) >= MIN_COUNTED
    beyond_noise = enough and (one_low > other_high or other_low > one_high)
    different = differing(one, other)
    apart = [what for what in different if what not in ("device", "allocator")]
    if not rows:
        losses = "The logs have no step in common."
    elif apart == ["B"]:  # compensated by ranks or micro-steps
        losses = f"The losses of the same tokens, in batches of different B, are at most {gap(rows):.6f} apart."
    elif apart:
        losses = f"The losses do not compare step by step: different {', '.join(apart)}."
    else:
        losses = loss_verdict(one, other, rows)
    sentences = [
        *(f"Different {what}: {a} against {b}." for what, (a, b) in different.items()),
        *(f"{run.path} is not complete: its run was stopped at step {run.steps[-1]}."
          for run in (one, other) if not run.complete),
        losses,
        speed_verdict(one, other, faster, beyond_noise, different),
    ]
    return Comparison(rows, faster, beyond_noise, sentences)


def print_comparison(one, other, console):
    from rich.markup import escape
    from rich.table import Table

    result = compare(one, other)
    table = Table(title=escape(f"{one.path}  against  {other.path}"))
    for heading in ("step", "loss A", "loss B", "B - A", "ms A", "ms B", "A / B"):
        table.add_column(heading, justify="right")
    for step, loss_a, loss_b, difference, ms_a, ms_b, ratio in result.rows:
        table.add_row(str(step), f"{loss_a:.6f}", f"{loss_b:.6f}", f"{difference:+.6f}", f"{ms_a:.2f}", f"{ms_b:.2f}",
                      f"{ratio:.2f}")
    if result.rows:
        middle = [statistics.median(row[i] for row in result.rows) for i in (3, 4, 5, 6)]
        table.add_section()
        table.add_row("median", "", "", f"{middle[0]:+.6f}", f"{middle[1]:.2f}", f"{middle[2]:.2f}", f"{middle[3]:.2f}")
    console.print(table)
    for sentence in result.sentences:
        console.print(sentence, markup=False)
