"""The search for learning rates: on parabolas, and in contests with known answers."""
import math

import numpy
import pytest

from ladder.measure.learning_rates import Search
from ladder.records.significance import paired_effect


def search_of(losses, start=(6e-4, 2e-3), most=24, tries=None):
    """A Search driven as a contest does: of losses(rates), one for each seed; with `tries` it goes on so far."""
    search = Search(start)
    for limit, finest in ((most, 1.0), (tries or 0, 0.0)):
        while points := search.wanted(limit, finest):
            for point in points:
                search.add(point, dict(enumerate(numpy.atleast_1d(losses(search.rates(point))))))
    return search


def parabola(lowest, bend=0.1):
    return lambda rates: sum(bend * math.log2(rate / best) ** 2 for rate, best in zip(rates, lowest, strict=True))


@pytest.mark.parametrize("start", [(6e-4, 2e-3), (9.6e-3, 2e-3), (4.8e-3, 8e-3)])
@pytest.mark.parametrize("lowest", [(1.1e-3, 5e-3), (4.8e-3, 8e-3), (5e-4, 1.3e-3)])
def test_the_search_finds_the_lowest_point_of_a_parabola(start, lowest):
    """Between the rates that it tries; none twice, and no more than allowed."""
    search = search_of(parabola(lowest), start)
    assert search.chosen(0) == pytest.approx(lowest, rel=2e-3) and len(search.losses) < 24
    assert max(abs(math.log2(a / b)) for a, b in zip(search.rates(search.best), lowest, strict=True)) <= 0.5
    further = search_of(parabola(lowest), start, tries=20)
    assert len({further.rates(point) for point in further.losses}) == 20
    assert further.chosen(0) == pytest.approx(lowest, rel=2e-3)


def test_the_search_ends_where_it_must():
    """At the edge of what it may try it takes the best try; a rate that diverges is no neighbor."""
    few = search_of(parabola((0.6, 2.0)), most=6)
    assert len(few.losses) == 6 and few.chosen(0) == few.rates(few.best)
    cliff = search_of(lambda rates: math.inf if rates[0] > 1e-3 else parabola((2e-3, 2e-3))(rates))
    assert 5e-4 < cliff.chosen(0)[0] < 1e-3


def simulated(random, shift=0.0, noise=0.015, seeds=8):
    """The Effect of a contest of two recipes whose best losses differ by `shift`; each search has its own luck."""
    lowest = 6e-4 * 2 ** random.uniform(-1, 3), 2e-3 * 2 ** random.uniform(-1, 3)
    true = parabola(lowest)

    def try_rates(rates):
        return true(rates) + noise * random.normal(size=seeds)

    searches = [search_of(try_rates) for _ in range(2)]
    tries = max(len(search.losses) for search in searches)
    for search in searches:
        while points := search.wanted(tries, 0.0):
            for point in points:
                search.add(point, dict(enumerate(try_rates(search.rates(point)))))
    before, after = ([true(search.chosen(seed)) + noise * random.normal() for seed in range(seeds)]
                     for search in searches)
    return paired_effect(before, [loss + shift for loss in after])


def test_p_is_uniform_for_equal_recipes_whose_rates_have_one_smooth_minimum():
    """Though each has its own search. With the best pair of rates for all seeds nine of a hundred are below 0.05."""
    ps = numpy.array([simulated(numpy.random.default_rng(seed)).p for seed in range(300)])
    shares = [numpy.mean(ps < limit) for limit in (0.05, 0.5)]
    assert shares == [pytest.approx(0.05, abs=0.025), pytest.approx(0.5, abs=0.07)]


def test_a_known_difference_is_found_and_its_interval_holds_it():
    found = [simulated(numpy.random.default_rng(seed), shift=0.1) for seed in range(100)]
    assert numpy.mean([effect.mean for effect in found]) == pytest.approx(0.1, abs=0.003)
    assert numpy.mean([effect.low < 0.1 < effect.high for effect in found]) == pytest.approx(0.99, abs=0.02)
    assert numpy.mean([effect.significant for effect in found]) > 0.95
