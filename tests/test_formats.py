"""One format for each kind of number."""
import ast
import math

import pytest
from load_script import ROOT

from ladder import formats


@pytest.mark.parametrize("form, value, text", [
    (formats.ms, 42.04, "42.0"), (formats.ms, 999.94, "999.9"), (formats.ms, 1280.4, "1,280"),
    (formats.ms, 1.234, "1.23"), (formats.ms, None, "–"), (formats.ms, math.nan, "–"),
    (formats.ratio, 1.0034, "1.003"), (formats.ratio, 0.9966, "0.997"), (formats.ratio, 1.0, "1.00"),
    (formats.ratio, 2.1, "2.10"), (formats.p, 0.00099, "<0.001"), (formats.p, 0.0457, "0.046"),
    (formats.bound, 0.0351, "0.036"), (formats.bound, 0.00041, "0.00041"), (formats.bound, 0.0999, "0.100"),
    (formats.difference, -0.0314, "−0.031"), (formats.loss, None, "nan"), (formats.share, 0.567, "57%"),
])
def test_a_number_has_one_format(form, value, text):
    assert form(value) == text


def test_a_gain_of_five_percent_shows_in_its_milliseconds():
    texts = [formats.with_spread(*ms) for ms in ((42.0, 41.8, 42.2), (40.0, 39.8, 40.2))]
    assert texts == ["42.0 (41.8–42.2)", "40.0 (39.8–40.2)"]


@pytest.mark.parametrize("room", ["show", "verbs"])
def test_what_is_shown_takes_its_formats_from_one_file(room):
    """Else the same number has other digits at another place."""
    texts = [(path.name, ast.unparse(node)) for path in ROOT.glob(f"ladder/{room}/*.py")
             for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.FormattedValue) and node.format_spec
             and getattr(node.format_spec.values[-1], "value", "").endswith("f")]
    assert texts == []
