"""Is a difference significant? Paired t-tests over rounds or seeds, and Holm's correction for several at once."""
import math
import statistics
import warnings
from dataclasses import dataclass, replace

BEYOND_CHANCE = 0.01  # a p below it; the intervals hold with the rest of the probability, 99 %
FEWEST_ROUNDS = 5  # of a ladder: three against three do not overlap by chance one time in ten
FEWEST_SEEDS = 5  # for a star; with fewer, only the numbers are shown
FEWEST_PAIRS = 3  # for an interval: with two it says next to nothing


def is_significant(p):
    """Whether a difference with this p is significant; p is None where nothing could be tested."""
    return p is not None and p < BEYOND_CHANCE


@dataclass
class Effect:
    """The mean of paired differences, and p of the paired t-test of that mean."""

    mean: float
    error: float  # the standard error of the mean
    p: float  # after Holm's correction where it belongs to a family
    pairs: int
    family: int = 1  # how many effects are tested together

    @property
    def significant(self):
        return self.pairs >= FEWEST_SEEDS and is_significant(self.p)

    def quantile(self, level):
        from scipy.stats import t

        return float(t.ppf(level, self.pairs - 1))

    @property
    def margin(self):
        """Half of the 99 % interval, which holds for all effects of the family at once (Bonferroni)."""
        return self.quantile(1 - BEYOND_CHANCE / self.family / 2) * self.error

    @property
    def low(self):
        return self.mean - self.margin

    @property
    def high(self):
        return self.mean + self.margin

    @property
    def largest(self):
        """The largest difference, in either direction, that the interval does not exclude."""
        return abs(self.mean) + self.margin

    def detectable(self, power=0.8):
        """The difference that a test of so many pairs and effects, with this spread, finds with such a probability."""
        from scipy.optimize import brentq
        from scipy.stats import nct

        freedom, limit = self.pairs - 1, self.quantile(1 - BEYOND_CHANCE / self.family / 2)
        return self.error * brentq(lambda errors: nct.sf(limit, freedom, errors) - power, 0, 10 * limit)


def paired_effect(before, after):
    """The Effect from two lists of numbers, pair by pair; None for too few pairs, or where a number is not finite."""
    from scipy.stats import ttest_rel

    differences = [b - a for a, b in zip(before, after, strict=True)]
    pairs = len(differences)
    if pairs < FEWEST_PAIRS or not all(map(math.isfinite, differences)):
        return None
    mean = math.fsum(differences) / pairs
    if max(differences) == min(differences):  # the same script twice, whose t would be 0 / 0
        return Effect(mean, 0.0, 0.0 if mean else 1.0, pairs)
    with warnings.catch_warnings():  # about differences that are nearly the same
        warnings.simplefilter("ignore")
        p = float(ttest_rel(after, before).pvalue)
    return Effect(mean, statistics.stdev(differences) / math.sqrt(pairs), p, pairs)


def speed_p(rounds, before, after):
    """p of the difference in speed between two scripts, from the logarithms of their rounds' times per token.

    `rounds` has a row for each name and round; None for too few of them, for the same times, or where a log does not
    say its batch.
    """
    times = (rounds.ms / rounds.tokens).astype(float).map(math.log).unstack("name")[[before, after]].dropna()
    effect = paired_effect(times[before].tolist(), times[after].tolist())
    return effect.p if effect and effect.error and effect.pairs >= FEWEST_ROUNDS else None


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
    return {name: effect and replace(effect, p=corrected[name], family=len(corrected))
            for name, effect in effects.items()}
