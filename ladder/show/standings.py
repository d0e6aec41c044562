"""A race's standings: how many tokens and seconds each rung needs to reach the same validation loss.

The target is the median of the first rung's final losses, rounded up to two digits.
"""
import itertools
import math
import textwrap

import pandas

from ladder.show.chance import BEYOND_CHANCE, FEWEST_SEEDS, paired_p
from ladder.show.logs import stage_of
from ladder.show.race_table import rates_of
from ladder.show.terminal import print_texts

FEWEST_STEPS = 50  # of a race: below, most of a run is warm-up
WIDE = 130  # characters of a terminal wide enough for all columns
IN_A_LINK = ["label", "the one change"]  # columns of the standings in Markdown; elsewhere "rung" says it


def show_rates(rates, between=", "):
    """(0.0048, 0.002) as "0.0048, 0.002"."""
    return between.join(f"{rate:g}" for rate in rates)


def neighbors(rates):
    """Half and twice of each learning rate, the others fixed."""
    return [(*rates[:i], rate * factor, *rates[i + 1 :]) for i, rate in enumerate(rates) for factor in (0.5, 2)]


def steps_to(points, loss):
    """Steps until the validation loss reaches `loss`, interpolated between two validations; inf if it never does."""
    before = None
    for step, now in zip(points.step, points.val_loss, strict=True):
        if now <= loss:
            certain = before is None or before[1] == math.inf
            return step if certain else before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - now)
        before = step, now
    return math.inf


def median_and_range(values):
    """(median, lowest, highest) of a Series."""
    return float(values.median()), float(values.min()), float(values.max())


def chances(values):
    """[p, ...] of each rung against the one before; NaN where too few seeds have both.

    `values` is a Series by rung and seed. The first rung has none before it.
    """
    rungs = list(values.unstack("seed", sort=False).itertuples(index=False))
    p = [math.nan]
    for before, after in itertools.pairwise(rungs):
        pairs = [pair for pair in zip(before, after, strict=True) if not any(map(math.isnan, pair))]
        p.append(paired_p([one for one, _ in pairs], [other for _, other in pairs], FEWEST_SEEDS))
    return p


def standings(report):
    """(the target, a row for each rung) of a report's race.

    A row has its `name`, `label` and `title`; `rates`, AdamW's, and Muon's if it has Muon; `ms`, the time of a step;
    (median, lowest, highest) over the seeds of `val_loss`, of `tokens` and `seconds` to the target, inf if a run never
    reached it, and of the seconds as a `percent`age of the first rung's median; `p_loss` and `p_tokens`, of `chances`;
    `parameters`.
    """
    runs, step_ms = report.race.part("round").groupby(["rung", "seed"], sort=False), report.race.step_ms()
    ends = runs.tail(1).set_index(["rung", "seed"])
    first = ends.index[0][0]
    target = ends.val_loss[first].quantile(interpolation="higher")  # half of the seeds reach it
    target = math.ceil(round(100 * target, 6)) / 100
    steps = runs.apply(steps_to, target)
    seconds = steps.mul(step_ms, level="rung") / 1000
    ends = ends.assign(tokens_to=steps * ends.tokens / ends.step, seconds=seconds,
                       percent=100 * seconds / seconds[first].median())
    rows = ends.groupby("rung", sort=False).agg(
        val_loss=("val_loss", median_and_range), tokens=("tokens_to", median_and_range),
        seconds=("seconds", median_and_range), percent=("percent", median_and_range),
        parameters=("parameters", "first"),
    )
    stages = [stage_of(name) for name in rows.index]
    rows = rows.assign(
        label=[stage.label for stage in stages], title=[stage.title for stage in stages], ms=step_ms,
        rates=[rates_of(run) for run in runs.head(1).drop_duplicates("rung").itertuples()],
        p_loss=chances(ends.val_loss),
        # A run that never gets there counts with its whole length: the test then sees less of a difference, not more.
        p_tokens=chances(ends.tokens_to.clip(upper=ends.tokens)),
    )
    return target, [*rows.reset_index(names="name").itertuples(index=False)]


def doubts(race, racers):
    """Yields the reasons to doubt the learning rates of a race, as short clauses."""
    steps = race.part("round").step.max()
    if steps < FEWEST_STEPS:
        yield f"{steps} steps are too few to choose a learning rate, take {FEWEST_STEPS} or more"
    for racer in (racer for racer in racers if racer.name in race.sweep):
        losses = race.sweep[racer.name]
        finite = list(filter(math.isfinite, losses.values()))
        _, low, high = racer.val_loss
        if not losses.keys() >= set(neighbors(racer.rates)):
            yield f"rung {racer.label}'s rates, whose search was cut off after {len(losses)} tries"
        if len(finite) == len(losses) and max(finite) - min(finite) <= high - low:
            yield f"rung {racer.label}'s rates, which differ by no more than its seeds do"


def race_curves(report):
    """Yields (name, steps, seconds, losses) of each rung's validations: the median over the seeds at each step."""
    ms = report.race.step_ms()
    for name, points in report.race.part("round").groupby("rung", sort=False):
        losses = points.groupby("step").val_loss.median()
        yield name, losses.index.tolist(), (losses.index * ms[name] / 1000).tolist(), losses.tolist()


def race_texts(report):
    """(the standings as short strings: a DataFrame with one row per rung, the caption)."""
    target, racers = standings(report)
    first = racers[0]

    def column(name, pattern, spread=True):
        """Each racer's median, and in brackets its lowest and highest."""
        for values in (getattr(racer, name) for racer in racers):
            middle, low, high = (pattern.format(value) if math.isfinite(value) else "never" for value in values)
            yield f"{middle} ({low}–{high})" if spread and low != high else middle

    def chance(name):
        for p in (getattr(racer, name) for racer in racers):
            yield "–" if math.isnan(p) else ("<0.001" if p < 0.001 else f"{p:.3f}") + "*" * (p < BEYOND_CHANCE)

    texts = pandas.DataFrame({
        "rung": [f"{racer.label} {racer.title}".strip() for racer in racers],
        "label": [racer.label for racer in racers],
        "the one change": [f"[{racer.title}]({stage_of(racer.name).file})" for racer in racers],
        "learning rates": [show_rates(racer.rates) for racer in racers],
        "val loss": [*column("val_loss", "{:.3f}")],
        "p of the loss": [*chance("p_loss")],
        f"tokens to {target:.2f}": [*column("tokens", "{:,.0f}", spread=False)],
        "p of the tokens": [*chance("p_tokens")],
        "ms/step": [f"{racer.ms:,.0f}" if racer.ms >= 100 else f"{racer.ms:.1f}" for racer in racers],
        "seconds": [*column("seconds", "{:,.0f}" if first.seconds[0] >= 20 else "{:.1f}", spread=False)],
        f"% of rung {first.label}'s": [*column("percent", "{:.0f}")],
        "parameters": [f"{racer.parameters / 1e6:.2f}M" for racer in racers],
    })
    return texts, caption(report.race, racers)


KEY = (
    "Each rung has the best of the learning rates tried with the first seed (AdamW's, and Muon's if it has Muon). The "
    "numbers are medians over the seeds, and in brackets the lowest and highest. The target is the median of the first "
    "rung's final losses, rounded up. Tokens to it are interpolated between two validations; a run that is there at "
    "the first may have been sooner, one that never gets there counts with all its tokens. Seconds are steps times "
    "ms/step: compiling and validating do not count. p: how likely so large a difference from the row before would be "
    f"by chance alone, a paired t-test over the seeds; * marks p < {BEYOND_CHANCE}, the NanoGPT speedrun's rule."
)


def caption(race, racers):
    """What a reader of these standings needs to know beside KEY."""
    searched = "rates given"
    if tries := [len(losses) for losses in race.sweep.values()]:
        low, high, shorter = min(tries), max(tries), race.part("search").step.max()
        length = f" in {shorter:,} steps" if shorter < race.part("round").step.max() else ""
        searched = f"{low if low == high else f'{low} to {high}'} tries of rates{length}"
    n_seeds, n_timings = (race.part(part)["round"].nunique() for part in ("round", "timing"))
    timed = f"timed {n_timings} times, alone" if race.timing else "ms/step of the same runs"
    doubtful = "; ".join(doubts(race, racers))
    return f"{n_seeds} seeds; {searched}; {timed}." + f" Doubtful: {doubtful}." * bool(doubtful)


def print_race(report, console):
    """The standings in a terminal, without what print_table shows; a narrow one gets no ranges."""
    texts, caption = race_texts(report)
    texts = texts.drop(columns=[*IN_A_LINK, "ms/step", "parameters"])
    if console.width < WIDE:
        texts = texts.drop(columns="p of the tokens").replace({r" \(.*": "", ", ": ",\n"}, regex=True)
    texts = texts.rename(columns=lambda heading: textwrap.fill(heading, 7, break_long_words=False))
    print_texts(texts, console, "To the same validation loss", f"{caption} {KEY}", min_width=16)
