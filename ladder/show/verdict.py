"""Several recipes against the first: a sentence and a row for each, and what they cannot say."""
from pathlib import Path

from ladder import formats
from ladder.records.logs import run_of
from ladder.records.recipes import doubts, recipe_table
from ladder.records.significance import FEWEST_SEEDS
from ladder.show.standings import (
    BRACKETS, FOR_ALL, SCRIPT, TRIES, as_ratio, how_sure, label_of, recipe_columns)
from ladder.show.terminal import print_table


def loss_sentence(name, first, effect, n_seeds, seeds):
    """How the losses of a script compare with the first's."""
    if n_seeds < seeds:
        return f"{name} finished {n_seeds} of {seeds} seeds, and the test needs all."
    if effect is None:
        return f"{name} against {first}: too few seeds, or one that diverged; no interval."
    if not effect.mean and not effect.error:
        return f"{name} ends with the same losses as {first}, to the last digit, with every seed."
    interval = f"99 % interval {formats.difference(effect.low)} to {formats.difference(effect.high)}"
    numbers = f"{formats.difference(effect.mean)} nats ({interval}, {formats.p_is(effect.p)}, {effect.pairs} seeds)"
    if effect.significant:
        return f"{name} ends {'lower' if effect.mean < 0 else 'higher'} than {first}: {numbers}."
    if effect.pairs < FEWEST_SEEDS:
        return f"{name} against {first}: {numbers}; fewer than {FEWEST_SEEDS} seeds, too few to call it a difference."
    return (f"No significant difference between {name} and {first}: {numbers}. Not excluded are differences of up to "
            f"{formats.bound(effect.largest)} nats.")


def time_sentence(effect):
    """How long a script's step takes beside the first's."""
    if effect is None:
        return "Steps were not timed often enough to compare."
    numbers = f"99 % interval {as_ratio(effect.low)} to {as_ratio(effect.high)}, {formats.p_is(effect.p)}"
    doubt = "" if effect.significant else "; not significant"
    return f"A step takes {as_ratio(effect.mean)} times as long ({numbers}{doubt})."


def cautions(record, table):
    """What a reader should know before the result."""
    finished, planned = record.tested.seed.nunique(), record.planned
    if finished < planned:
        yield f"Only {finished} of {planned} seeds have finished, so there is no p; rerun the command with --resume."
    for name, why in doubts(record):
        yield f"Doubtful: {f'the rates of {label_of(name)} ' if name else ''}{why}."
    for name in record.points.rung.unique():
        if name not in table.name:
            yield f"{label_of(name)} finished 0 of {planned} seeds."
    first, *others = table.itertuples()
    differences = {label_of(row.name): row.parameters - first.parameters for row in others}
    unequal = ", ".join(f"{name} {n:+,}" for name, n in differences.items() if n)
    if unequal:
        yield (f"The numbers of parameters differ from {label_of(first.name)}'s ({unequal}). Part of a difference in "
               "loss may come from that.")


def limits(record, table):
    """What a comparison of this size cannot say."""
    run, first = run_of(Path("x.log"), record.facts), record.ends.iloc[0]
    effects = [effect for effect in table.change if effect]
    if effects:
        yield how_sure(record)
    yield (f"This says nothing about other sizes: {formats.millions(first.parameters)}M parameters, "
           f"{formats.number(first.step)} steps, {formats.millions(first.tokens)}M tokens of {run.data} in windows "
           f"of {run.T}.")
    detectable = [effect.detectable() for effect in effects if effect.error]
    if detectable:
        yield f"With these seeds a test finds a difference of {max(detectable):.2g} nats four times in five."


def verdict_of(record):
    """(the rows of the table, its columns, what comes before it, the sentences) of a comparison."""
    table = recipe_table(record, against_first=True)
    first, seeds = label_of(record.names[0]), record.planned
    sentences = [f"{loss_sentence(label_of(row.name), first, row.change, row.seeds, seeds)} "
                 f"{time_sentence(row.times)}" for row in table.iloc[1:].itertuples()]
    columns = [SCRIPT, TRIES, *recipe_columns(first)]
    return [*table.itertuples()], columns, [*cautions(record, table)], [*sentences, *limits(record, table)]


def print_verdict(record, console):
    rows, columns, before, sentences = verdict_of(record)
    caption = f"{BRACKETS} {FOR_ALL}" if len(rows) > 2 else BRACKETS
    for sentence in before:
        console.print(f"! {sentence}", style="yellow", soft_wrap=True)
    print_table(rows, columns, console, "Training recipes", caption)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)
