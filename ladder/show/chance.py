"""Is a difference significant? A paired t-test over rounds or seeds, and Holm's correction for several at once."""
import math
import warnings

BEYOND_CHANCE = 0.01  # a p below it: the NanoGPT speedrun's rule for a new record
FEWEST_ROUNDS = 5  # of a ladder: three against three do not overlap by chance one time in ten
FEWEST_SEEDS = 3  # of a race


def paired_p(before, after, fewest):
    """p of a two-sided paired t-test of two lists of numbers; None for fewer than `fewest` pairs."""
    from scipy.stats import ttest_rel

    if len(before) < fewest:
        return None
    with warnings.catch_warnings():  # about differences that are all the same
        warnings.simplefilter("ignore")
        p = float(ttest_rel(before, after).pvalue)
    return None if math.isnan(p) else p


def speed_p(before, after):
    """p of the difference in speed between two rungs, from the logarithms of their rounds' times per token.

    `before` and `after` are the Runs of the rounds; None for too few of them, or where a log does not say its batch.
    """
    first, second = log_times(before), log_times(after)
    shared = sorted(first.keys() & second.keys())
    return paired_p([first[name] for name in shared], [second[name] for name in shared], FEWEST_ROUNDS)


def holm(ps):
    """{name: p} of the tests of one family, corrected for their number, so that chance alone rarely makes any small.

    S. Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6 (1979).
    """
    corrected, largest = {}, 0
    for n_smaller, name in enumerate(sorted(ps, key=ps.get)):
        largest = max(largest, min(1, (len(ps) - n_smaller) * ps[name]))
        corrected[name] = largest
    return corrected


def log_times(runs):
    """{round: the logarithm of its time per token}."""
    known = [run for run in runs if run.tokens_per_step and run.ms]
    return {run.path.parent.name: math.log(run.median_ms / run.tokens_per_step) for run in known}
