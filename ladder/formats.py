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


share = known("{:.0%}".format)
number = known("{:,.0f}".format)  # of tokens, tokens/s, parameters
seconds = known("{:,.1f}".format)
gigabytes = known("{:.2f}".format)  # bytes / 1e9
traffic = known("{:,.1f}".format)  # bytes / 1e9 that a step moves: hundreds
trillions = known("{:.2f}".format)  # FLOPs / 1e12, or FLOP/s
millions = known(lambda value: f"{value / 1e6:.2f}")  # of parameters, tokens, bytes
# Losses in nats; the logged ones have all digits of a log.
logged_loss = known("{:.6f}".format)
logged_difference = known("{:+.6f}".format)
difference = known(lambda value: f"{value:+.3f}".replace("-", "−"))


def loss(value):
    """Nats; a loss that is not a number is shown as that."""
    return "nan" if value is None else f"{value:.3f}"


def bound(value):
    """An upper bound of a difference in nats: two significant digits, rounded up."""
    digits = 1 - math.floor(math.log10(value))
    return f"{math.ceil(round(value * 10**digits, 6)) / 10**digits:.{max(digits, 0)}f}"


@known
def p(value):
    """The p of a test."""
    return "<0.001" if value < 0.001 else f"{value:.2g}"


def p_is(value):
    """The p of a test in a sentence: "p = 0.012"."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.2g}"


def spread(low, high, form=ms):
    return f"{form(low)}–{form(high)}"


def with_spread(middle, low, high, form=ms):
    """The lowest and the highest value in brackets, where there are several."""
    return f"{form(middle)} ({spread(low, high, form)})" if low < high else form(middle)


def with_interval(mean, low, high, form=difference):
    """A confidence interval in brackets; its ends may have signs."""
    return f"{form(mean)} ({form(low)} to {form(high)})"
