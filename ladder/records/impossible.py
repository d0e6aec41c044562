"""Numbers that no run can have: tokens/sec that are something else, steps faster than the card's arithmetic."""
import math

from ladder import formats
from ladder.count.cards import card_of
from ladder.count.flops import flops_per_token

CLOCKED_HIGHER = 1.25  # how many times its datasheet's rate a card may reach; an RTX 5090 was measured at 1.21
CLOCK = "an impossible measurement: the clock was probably read before the GPU had finished"


def logged_tokens(run):
    """(fewest, most) tokens of a step by the log's own tokens/sec times dt, as exact as its digits; or None."""
    if run.last_speed is None:
        return None
    ends = []
    for text in run.last_speed:  # of the milliseconds, of the tokens/sec
        last_digit = 10.0 ** -len(text.partition(".")[2])
        ends.append((float(text) - last_digit, float(text) + last_digit))
    (ms_low, ms_high), (speed_low, speed_high) = ends
    return ms_low * speed_low / 1000, ms_high * speed_high / 1000


def wrong_speed(run):
    """What is wrong with a log's tokens/sec, in a sentence; None if nothing is known to be."""
    if logged_tokens(run) is None:
        return None
    fewest, most = logged_tokens(run)
    ms, speed = run.last_speed
    claim = f"{speed} tokens/sec times {ms} ms are {(fewest + most) / 2:,.3g} tokens a step"
    expected = run.tokens_per_step
    if expected and not fewest <= expected <= most:
        per_ms = fewest <= expected / 1000 <= most
        return f"{claim}, and its header says {expected:,}" + ("; they are tokens per millisecond" if per_ms else "")
    if not expected and math.floor(most) < max(1, math.ceil(fewest)):
        return f"{claim}, which is no whole number; tokens per millisecond?"
    return None


def fastest_ms(run, card=None):
    """(ms, card): what a log's matrix products take on its card at more than the datasheet's rate; None if unknown.

    `card` is for logs that name none. Without a header the model counts as GPT-2 (124M) at T=1024. Not the whole floor:
    small tensors stay in a card's cache, which the floor ignores.
    """
    card = card_of(run.device) or card
    tokens = run.tokens_per_step
    if tokens is None and logged_tokens(run) is not None:
        tokens = sum(logged_tokens(run)) / 2 * (1000 if wrong_speed(run) else 1)
    per_token = flops_per_token(run.model or "gpt2", run.T or 1024, True, run.vocab_size)
    if card is None or per_token is None or tokens is None or "float8" in run.headers:
        return None
    rate = CLOCKED_HIGHER * run.ranks * card.rate(run.number_format)
    return 1000 * per_token * tokens / rate, card


def impossible(run, card=None):
    """The sentences about a log's impossible numbers: its tokens/sec, a median step that cannot take so little."""
    sentences = list(filter(None, [wrong_speed(run)]))
    fastest = fastest_ms(run, card)
    if fastest and run.median_ms < fastest[0]:
        least, card = fastest
        sentences.append(f"{formats.ms(run.median_ms)} ms, and the matrix products alone take {formats.ms(least)} ms "
                         f"at {CLOCKED_HIGHER:g} times the datasheet's rate of the {card.name}: {CLOCK}")
    return sentences
