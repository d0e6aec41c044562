"""The data of charts."""
from ladder.records.step_profile import KINDS
from ladder.rungs.list import BY_LABEL
from ladder.show.charts import profile_bars


def test_a_profile_s_times_are_found_by_their_kind():
    """Not by their order in the file."""
    times = {kind: 10 + place for place, kind in enumerate(KINDS)}
    found = {"name": BY_LABEL["0"].name, "parts_ms": dict(reversed(times.items())), "products_ms": 1, "step_ms": 1,
             "plain_ms": 1}
    [bar] = profile_bars({"rungs": [found]})
    assert bar.parts == [*times.values()]
