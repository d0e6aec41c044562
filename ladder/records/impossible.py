"""Numbers that no run can have: tokens/sec that are something else, steps faster than the card's arithmetic."""
import math

from ladder import formats
from ladder.count.cards import card_of
from ladder.count.flops import flops_per_token

CLOCKED_HIGHER = 1.25  # how many times its datasheet's rate a card may reach; an RTX 5090 was measured at 1.21
CLOCK = "an impossible measurement: the clock was probably read before the GPU had finished"
ROUNDED = 0.05  # how far the digits of a log may put tokens/sec off


def wrong_speed(run):
    """What is wrong with the last step's tokens/sec, in a sentence; None where they fit its time and the batch."""
    ms, speed, expected = run.ms[-1], run.last_speed, run.tokens_per_step
    if not ms or speed is None or expected is None or math.isclose(speed * ms / 1000, expected, rel_tol=ROUNDED):
        return None
    text = (f"{speed:.2f} tokens/sec times {ms:.2f} ms are {speed * ms / 1000:,.3g} tokens a step, and its header says "
            f"{expected:,}")
    return text + "; they are tokens per millisecond" * math.isclose(speed * ms, expected, rel_tol=ROUNDED)


def fastest_ms(run):
    """(ms, card): what a log's matrix products take on its card at more than the datasheet's rate; None if unknown.

    A log that names no model counts as GPT-2 (124M) at T=1024. Not the whole floor: small tensors stay in a card's
    cache, which the floor ignores.
    """
    card, tokens = card_of(run.device), run.tokens_per_step
    per_token = flops_per_token(run.model or "gpt2", run.T or 1024, True, run.vocab_size)
    if card is None or per_token is None or tokens is None or "float8" in run.headers:
        return None
    rate = CLOCKED_HIGHER * run.ranks * card.rate(run.number_format)
    return 1000 * per_token * tokens / rate, card


def impossible(run):
    """Yields sentences about a log's impossible numbers: its tokens/sec, a median step that cannot take so little."""
    wrong, fastest = wrong_speed(run), fastest_ms(run)
    if wrong:
        yield wrong
    if fastest and run.median_ms < fastest[0]:
        least, card = fastest
        yield (f"{formats.ms(run.median_ms)} ms, and the matrix products alone take {formats.ms(least)} ms at "
               f"{CLOCKED_HIGHER:g} times the datasheet's rate of the {card.name}: {CLOCK}")
