"""All formats of numbers: tables, pictures, the page and sentences take them from here, so that a number looks alike.

A value that is not known is None or NaN, and shown as NOTHING.
"""
import math

NOTHING = "–"


def known(form):
    """A format that shows NOTHING where there is no value."""
    return lambda value: NOTHING if value is None or math.isnan(value) else form(value)


@known
def ms(value):
    """Milliseconds, with three digits or more, so that rounding does not hide a gain."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 2}f}"


@known
def ratio(value):
    """How many times as fast; with a digit more where two would round it to 1."""
    return f"{value:.{3 if value != 1 and round(value, 2) == 1 else 2}f}"


@known
def share(value):
    return f"{value:.0%}"


@known
def number(value):
    """Tokens, tokens/s, parameters."""
    return f"{value:,.0f}"


@known
def seconds(value):
    return f"{value:,.1f}"


@known
def gigabytes(value):
    """Bytes / 1e9."""
    return f"{value:.2f}"


@known
def traffic(value):
    """Bytes / 1e9 that a step moves: hundreds."""
    return f"{value:,.1f}"


@known
def trillions(value):
    """FLOPs / 1e12, or FLOP/s."""
    return f"{value:.2f}"


@known
def millions(value):
    """Parameters, tokens, bytes."""
    return f"{value / 1e6:.2f}"


def loss(value):
    """Nats; a loss that is not a number is shown as that."""
    return "nan" if value is None else f"{value:.3f}"


@known
def logged_loss(value):
    """Nats, with all digits that a log has."""
    return f"{value:.6f}"


@known
def logged_difference(value):
    """Nats, between two logs."""
    return f"{value:+.6f}"


@known
def difference(value):
    """Nats, with a sign."""
    return f"{value:+.3f}".replace("-", "−")


def bound(value):
    """An upper bound of a difference in nats: two significant digits, rounded up."""
    digits = 1 - math.floor(math.log10(value))
    return f"{math.ceil(round(value * 10**digits, 6)) / 10**digits:.{max(digits, 0)}f}"


@known
def p(value):
    """The p of a test, in a table."""
    return "<0.001" if value < 0.001 else f"{value:.2g}"


def p_is(value):
    """The same in a sentence: "p = 0.012"."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def spread(low, high, form=ms):
    return f"{form(low)}–{form(high)}"


def with_spread(middle, low, high, form=ms):
    """The lowest and the highest value in brackets, where there are several."""
    return form(middle) if low == high else f"{form(middle)} ({spread(low, high, form)})"


def with_interval(mean, low, high, form=difference):
    """A confidence interval in brackets; its ends may have signs."""
    return f"{form(mean)} ({form(low)} to {form(high)})"
