"""The search for a recipe's learning rates: points 2 and 3 of the rule in ladder/measure/contest.py."""
import math
import statistics

import numpy

from ladder.measure.script_flags import defaults
from ladder.records.recipes import TUNING_SEEDS

RATE_FLAGS = {"max_lr": "--max-lr", "muon_lr": "--muon-lr"}  # AdamW's, and Muon's where a script has Muon
SEED = max(TUNING_SEEDS) + 1  # of the first round


class Search:
    """A pattern search over learning rates; a point is where it stands, in octaves (factors of 2) from the start."""

    def __init__(self, start):
        self.start, self.step = start, 2.0
        self.losses, self.by_seed = {}, {}  # {point: the mean over its seeds}, {point: {seed: loss}}

    def add(self, point, by_seed):
        self.by_seed[point], self.losses[point] = by_seed, statistics.fmean(by_seed.values())

    def rates(self, point):
        return tuple(float(f"{rate * 2**octaves:.4g}") for rate, octaves in zip(self.start, point, strict=True))

    @property
    def best(self):
        """The point with the lowest loss; of equals, the higher."""
        return min(sorted(self.losses, reverse=True), key=self.losses.get)

    def wanted(self, most, finest=1.0):
        """The points to try next: none once there are `most`, or no neighbor at a distance of `finest` is better."""
        if not self.losses:
            return [(0.0,) * len(self.start)]
        while True:
            new = [point for point in neighbors(self.best, self.step) if point not in self.losses]
            if new or self.step <= finest:
                return new[: max(0, most - len(self.losses))]
            self.step /= 2

    def chosen(self, seed):
        """The rates at the lowest point of a parabola through a seed's tries within an octave of the best of all."""
        best = numpy.array(self.best)
        losses = {point: by_seed[seed] for point, by_seed in self.by_seed.items()}
        tries = [(numpy.array(point) - best, loss) for point, loss in losses.items() if math.isfinite(loss)]
        tries = [(offset, loss) for offset, loss in tries if abs(offset).max() <= 1]
        if len(tries) < 1 + 2 * len(best):
            return self.rates(self.best)
        terms = numpy.array([[1, *offset, *offset**2] for offset, _ in tries])
        _, *factors = numpy.linalg.lstsq(terms, numpy.array([loss for _, loss in tries]), rcond=None)[0]
        slopes, bends = numpy.split(numpy.array(factors), 2)
        lowest = [-slope / (2 * bend) if bend > 0 else 0.0 for slope, bend in zip(slopes, bends, strict=True)]
        return self.rates(best + numpy.clip(lowest, -1, 1))


def neighbors(point, step):
    """A step down and up in each direction, the others fixed."""
    return [(*point[:i], octaves + move, *point[i + 1 :]) for i, octaves in enumerate(point) for move in (-step, step)]


def tuning_seeds(n):
    """The seeds of the searches of a contest of n rounds: one for each, and none that is tested."""
    return range(SEED - 1, SEED - 1 - n, -1)


def rate_flags(rung):
    """The flags of a script's learning rates: AdamW's, and Muon's if it has Muon."""
    return [flag for name, flag in RATE_FLAGS.items() if name in defaults(rung)]
