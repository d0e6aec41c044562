"""Is a difference significant? Paired t-tests over rounds or seeds, and Holm's correction for several at once."""
import math
import warnings
from dataclasses import dataclass, replace

BEYOND_CHANCE = 0.01  # a p below it: the NanoGPT speedrun's rule for a new record
FEWEST_ROUNDS = 5  # of a ladder: three against three do not overlap by chance one time in ten
FEWEST_SEEDS = 5  # for a star; with fewer, only the numbers are shown
FEWEST_PAIRS = 3  # for an interval: with two it says next to nothing


@dataclass
class Effect:
    """What a change brings: the mean of paired differences, its 95 % interval, and p of the t-test of that mean."""

    mean: float
    low: float
    high: float
    p: float  # after Holm's correction where it is of a family
    pairs: int

    @property
    def significant(self):
        return self.pairs >= FEWEST_SEEDS and self.p < BEYOND_CHANCE


def paired_effect(before, after):
    """The Effect from two lists of numbers, pair by pair; None for too few pairs, or where a number is not finite."""
    from scipy.stats import ttest_rel

    differences = [b - a for a, b in zip(before, after, strict=True)]
    if len(differences) < FEWEST_PAIRS or not all(map(math.isfinite, differences)):
        return None
    mean = math.fsum(differences) / len(differences)
    if max(differences) == min(differences):  # the same script twice, whose t would be 0 / 0
        return Effect(mean, mean, mean, 0.0 if mean else 1.0, len(differences))
    with warnings.catch_warnings():  # about differences that are nearly the same
        warnings.simplefilter("ignore")
        test = ttest_rel(after, before)
        low, high = test.confidence_interval(0.95)
    return Effect(mean, float(low), float(high), float(test.pvalue), len(differences))


def paired_p(before, after, fewest):
    """p of a two-sided paired t-test of two lists of numbers; None for fewer than `fewest` pairs, or the same twice."""
    effect = paired_effect(before, after)
    return None if effect is None or effect.pairs < fewest or effect.low == effect.high else effect.p


def speed_p(rounds, before, after):
    """p of the difference in speed between two scripts, from the logarithms of their rounds' times per token.

    `rounds` has a row for each name and round; None for too few of them, or where a log does not say its batch.
    """
    times = (rounds.ms / rounds.tokens).astype(float).map(math.log).unstack("name")[[before, after]].dropna()
    return paired_p(times[before].tolist(), times[after].tolist(), FEWEST_ROUNDS)


def holm(ps):
    """{name: p} of the tests of one family, corrected for their number, so that chance alone rarely makes any small.

    S. Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected, largest = {}, 0
    for n_smaller, name in enumerate(sorted(ps, key=ps.get)):
        largest = max(largest, min(1, (len(ps) - n_smaller) * ps[name]))
        corrected[name] = largest
    return corrected


def holm_effects(effects):
    """{name: Effect} of one family, with corrected p; what could not be tested is None and does not count."""
    corrected = holm({name: effect.p for name, effect in effects.items() if effect})
    return {name: effect and replace(effect, p=corrected[name]) for name, effect in effects.items()}
