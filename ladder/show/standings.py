"""A race's standings: how many tokens and seconds each rung needs to reach the same validation loss.

`python -m experiments.race` runs a race, and writes what is shown here to race.json.
"""
import math
import textwrap

import pandas

from ladder.records.logs import stage_of
from ladder.records.recipes import show_rates
from ladder.records.significance import BEYOND_CHANCE
from ladder.show.terminal import WIDE, print_texts

IN_A_LINK = ["label", "the one change"]  # columns of the standings in Markdown; elsewhere "rung" says it


def number_or_never(value, pattern):
    return pattern.format(value) if math.isfinite(value) else "never"


def with_range(values, pattern):
    """The median, and in brackets the lowest and highest."""
    middle, low, high = [number_or_never(value, pattern) for value in values]
    return middle if low == high else f"{middle} ({low}–{high})"


def p_text(racer):
    if racer.p_loss is None:
        return "–"
    return ("<0.001" if racer.p_loss < 0.001 else f"{racer.p_loss:.3f}") + "*" * racer.significant


def change_text(change):
    if change is None:
        return "–"
    mean, low, high = (f"{value:+.3f}".replace("-", "−") for value in change)
    return f"{mean} ({low} to {high})"


def racer_texts(racer, first, target):
    """A rung of the standings as {heading: text}; `first` is the first rung."""
    return {
        "rung": stage_of(racer.name).row,
        "label": racer.label,
        "the one change": f"[{racer.title}]({stage_of(racer.name).file})",
        "learning rates": show_rates(racer.rates),
        "val loss": with_range(racer.val_loss, "{:.3f}"),
        "change (95 %)": change_text(racer.change),
        "p": p_text(racer),
        f"tokens to {target:.2f}": number_or_never(racer.tokens[0], "{:,.0f}"),
        "ms/step": f"{racer.ms:,.0f}" if racer.ms >= 100 else f"{racer.ms:.1f}",
        "seconds": number_or_never(racer.seconds[0], "{:,.0f}" if first.seconds[0] >= 20 else "{:.1f}"),
        f"% of {first.called}'s": with_range(racer.percent, "{:.0f}"),
        "parameters": f"{racer.parameters / 1e6:.2f}M",
    }


def race_texts(report):
    """(the standings as short strings: a DataFrame with one row per rung, the caption)."""
    race = report.race
    texts = [racer_texts(racer, race.racers[0], race.target) for racer in race.racers]
    return pandas.DataFrame(texts), race.caption


KEY = (
    "Each rung has learning rates of its own (AdamW's, and Muon's if it has Muon), from as many tries as the others "
    "have, with seeds that are not tested (in older races: the best of the tries that the caption counts). val loss: "
    "the mean over the seeds, in brackets the lowest and highest. change: from the row before, the mean of the "
    "differences with the same seed, and its 95 % interval; p: of the paired t-test of that mean, by Holm over the "
    f"race; * marks p < {BEYOND_CHANCE}, the NanoGPT speedrun's rule, with five seeds or more. The target is the "
    "median of the first rung's final losses, rounded up. Tokens, seconds and percentages are medians, and not "
    "tested. Tokens to the target are interpolated between two validations; a run that is there at the first may have "
    "been sooner. Seconds are steps times ms/step: compiling and validating do not count."
)


def print_race(report, console):
    """The standings in a terminal; a narrow one gets no ranges."""
    texts, caption = race_texts(report)
    texts = texts.drop(columns=IN_A_LINK)
    if console.width < WIDE:
        texts = texts[[heading for heading in texts if not heading.startswith(("ms", "parameters", "tokens"))]]
        texts = texts.replace({r" \(.*": "", ", ": ",\n"}, regex=True)
    texts = texts.rename(columns=lambda heading: textwrap.fill(heading, 7, break_long_words=False))
    print_texts(texts, console, f"{report.name}: to the same validation loss", f"{caption} {KEY}", min_width=16)
