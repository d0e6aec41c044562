"""Several recipes against the first: a sentence and a row for each, a picture, and what they cannot say."""
import math
from pathlib import Path

import pandas

from ladder.records.logs import run_of, stage_of
from ladder.records.recipes import doubts, effects, rates_of
from ladder.records.significance import BEYOND_CHANCE, FEWEST_SEEDS
from ladder.show.plots import colors_of
from ladder.show.standings import show_rates
from ladder.show.terminal import print_texts

POWER = 0.8  # with which a difference "would be seen"


def called(name):
    """What a reader calls a script: a rung's label, or the file."""
    return stage_of(name).label or f"{name}.py"


def signed(number):
    return f"{number:+.3f}".replace("-", "−")


def times(logarithm):
    return f"{math.exp(logarithm):.2f}"


def between(effect, show):
    """An effect's mean and, in brackets, its interval."""
    return f"{show(effect.mean)} ({show(effect.low)} to {show(effect.high)})" if effect else "–"


def p_of(effect):
    if effect.p >= 0.001:
        return f"p = {effect.p:.2g}"
    return "p < 0.001"


def detectable(effect):
    """The difference that a test of so many pairs, spread as these are, sees with probability POWER."""
    from scipy.stats import t

    freedom = effect.pairs - 1
    error = (effect.high - effect.low) / 2 / t.ppf(0.975, freedom)
    return error * (t.ppf(1 - BEYOND_CHANCE / 2, freedom) + t.ppf(POWER, freedom))


def loss_sentence(name, first, effect, n_seeds, seeds):
    """How the losses of a script compare with the first's."""
    if n_seeds < seeds:
        return f"{name} finished {n_seeds} of {seeds} seeds; where some diverge, a mean over the others says nothing."
    if effect is None:
        return f"{name} against {first}: too few seeds, or one that diverged; no interval."
    if effect.low == effect.high == 0:
        return f"{name} ends with the same losses as {first}, to the last digit, with every seed."
    interval = f"95 % interval {signed(effect.low)} to {signed(effect.high)}"
    numbers = f"{signed(effect.mean)} nats ({interval}, {p_of(effect)}, {effect.pairs} seeds)"
    if effect.significant:
        return f"{name} ends {'lower' if effect.mean < 0 else 'higher'} than {first}: {numbers}."
    if effect.pairs < FEWEST_SEEDS:
        return f"{name} against {first}: {numbers}; fewer than {FEWEST_SEEDS} seeds, too few to call it a difference."
    return f"No significant difference between {name} and {first}: {numbers}."


def limits(record, found):
    """What a comparison of this size cannot say."""
    run, first = run_of(Path("x.log"), record.facts), record.ends.iloc[0]
    text = run.data.partition(" | ")[0]
    yield (f"This says nothing about other sizes: {first.parameters / 1e6:.2f}M parameters, {first.step:.0f} steps, "
           f"{first.tokens / 1e6:.2f}M tokens of {text} in windows of {run.T}.")
    if len(record.sweep):
        seeds = " and ".join(map(str, sorted(record.part("search").seed.unique().astype(int))))
        yield (f"The rates are from searches with other seeds ({seeds}); their luck is not part of the intervals.")
    seen = [detectable(effect) for effect in found.values() if effect and effect.high > effect.low]
    if seen:
        yield f"Differences below about {max(seen):.2g} nats would mostly go unnoticed with these seeds."
    for name, why in doubts(record):
        yield f"Doubtful: {f'the rates of {called(name)} ' if name else ''}{why}."


def seconds_to(record, loss):
    """{script: the median over its seeds of the seconds to a validation loss}."""
    seconds = record.steps_to(loss).mul(record.step_ms(), level="rung") / 1000
    return seconds.groupby("rung", sort=False).median()


class Verdict:
    """All scripts of a record beside its first."""

    def __init__(self, record):
        self.record, self.names = record, record.names
        self.first = called(self.names[0])
        self.losses = effects(self.record.ends.val_loss, against_first=True)
        ms = self.record.timed.set_index(["rung", "round"]).ms
        self.times = effects(ms[self.names].map(math.log), against_first=True)
        self.step_ms = self.record.step_ms()
        self.target = max(map(self.record.target, self.names))  # half of each script's seeds get there
        self.seconds = seconds_to(self.record, self.target)

    def row(self, name):
        """A script's row: {heading: text}."""
        ends, loss, ratio = self.record.ends.loc[name], self.losses.get(name), self.times.get(name)
        return {
            "": called(name),
            "learning rates": show_rates(rates_of(ends.iloc[0])),
            "tries": str(len(self.record.sweep.get(name, ()))),
            "val loss": f"{ends.val_loss.mean():.3f} ({ends.val_loss.min():.3f}–{ends.val_loss.max():.3f})",
            f"− {self.first}'s (95 %)": between(loss, signed),
            "p": p_of(loss).removeprefix("p ").removeprefix("= ") + "*" * loss.significant if loss else "–",
            "ms/step": f"{self.step_ms[name]:.1f}",
            f"/ {self.first}'s (95 %)": between(ratio, times),
            f"s to {self.target:.2f}": f"{self.seconds[name]:.1f}",
            "parameters": f"{ends.parameters.iloc[0] / 1e6:.2f}M",
        }

    def sentence(self, name):
        """What was found about a script."""
        n_seeds, seeds = len(self.record.ends.loc[name]), self.record.tested.seed.nunique()
        reached = " and ".join(f"{called(one)} {self.seconds[one]:.1f} s" for one in (name, self.names[0]))
        ratio, steps = self.times[name], "Steps were not timed."
        if ratio:
            interval = f"{times(ratio.low)} to {times(ratio.high)}"
            doubt = "" if ratio.significant else "; not significant"
            steps = f"A step takes {times(ratio.mean)} times as long ({interval}{doubt})."
        return " ".join([loss_sentence(called(name), self.first, self.losses[name], n_seeds, seeds), steps,
                         f"To {self.target:.2f} nats: {reached}."])


def verdict_of(record):
    """(the table: a DataFrame of strings, the sentences) of a comparison with the first script."""
    verdict = Verdict(record)
    sentences = [verdict.sentence(name) for name in verdict.names[1:]]
    sentences += [f"{called(name)} finished 0 of {record.tested.seed.nunique()} seeds."
                  for name in record.points.rung.unique() if name not in verdict.names]
    return (pandas.DataFrame([verdict.row(name) for name in verdict.names]),
            [*sentences, *limits(record, verdict.losses)])


def print_verdict(record, console):
    """The sentences below their table."""
    texts, sentences = verdict_of(record)
    holm = f", by Holm over {len(texts) - 1} comparisons" if len(texts) > 2 else ""
    key = ("val loss: the mean over the seeds, lowest to highest. p: of the paired t-test of the mean difference"
           f"{holm}; * marks p < {BEYOND_CHANCE}.")
    print_texts(texts, console, "Training recipes", key, min_width=12)
    for sentence in sentences:
        console.print(sentence, soft_wrap=True)


def verdict_picture(record):
    """The validation losses on the way, the means of the seeds."""
    colors, curves = colors_of(record.names), []
    for name, runs in record.tested.groupby("rung", sort=False):
        curve = runs.groupby("step").val_loss.mean()
        curves.append({"title": called(name), "steps": curve.index.tolist(), "loss": curve.tolist(),
                       "color": colors[name]})
    panel = {"curves": curves, "x": "steps", "xlabel": "step", "ylabel": "validation loss (nats)"}
    return {"title": "Training recipes", "caption": "The mean of the seeds.", "height": 4.2, "panels": [panel],
            "legend": "curves"}
