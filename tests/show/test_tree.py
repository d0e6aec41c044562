"""The tree of rungs."""
from ladder.rungs.list import RUNGS
from ladder.show.tree import chains


def test_chains_have_each_rung_once_behind_the_one_that_it_starts_from():
    pairs = [pair for chain in chains(RUNGS[0]) for pair in zip(chain, chain[1:], strict=False)]
    assert sorted((rung.label, start.label) for start, rung in pairs) == sorted(
        (rung.label, rung.start.label) for rung in RUNGS[1:])
