"""What is beyond chance: a paired t-test over rounds or seeds."""
import math
import warnings

BEYOND_CHANCE = 0.01  # a p below it: the NanoGPT speedrun's rule for a new record
FEWEST_ROUNDS = 5  # of a ladder: three against three do not overlap by chance one time in ten
FEWEST_SEEDS = 3  # of a race


def paired_p(before, after, fewest):
    """p of a two-sided paired t-test of two lists of numbers; NaN for fewer than `fewest` pairs."""
    from scipy.stats import ttest_rel

    if len(before) < fewest:
        return math.nan
    with warnings.catch_warnings():  # about differences that are all the same
        warnings.simplefilter("ignore")
        return float(ttest_rel(before, after).pvalue)


def speed_p(before, after):
    """p of the difference in speed between two rungs, from the logarithms of their rounds' times per token.

    `before` and `after` are the Runs of the rounds; NaN for too few of them, or where a log does not say its batch.
    """
    by_round = []
    for runs in (before, after):
        known = (run for run in runs if run.tokens_per_step)
        by_round.append({run.path.parent.name: math.log(run.median_ms / run.tokens_per_step) for run in known})
    shared = sorted(by_round[0].keys() & by_round[1].keys())
    return paired_p(*([times[name] for name in shared] for times in by_round), FEWEST_ROUNDS)
