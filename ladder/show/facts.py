"""Facts about a report, as short texts: the machine, the batch, the rates, what its rows say and do not say."""
from ladder import formats
from ladder.count.cards import card_of
from ladder.count.floors import STORED, floors_on
from ladder.records.significance import FEWEST_ROUNDS
from ladder.show.columns import OLDER


def gain(report):
    """How many times the baseline's speed the fastest rung has; 0 without a baseline."""
    return max((row.times_baseline or 0 for row in report.rows), default=0)


def floors_of(report):
    """{label: ms of its counted floor} of the report's card, for what is stored; {} for other cards and batches."""
    card = card_of(report.setting["device"])
    stored = all(report.setting[key] == value for key, value in STORED.items())
    return floors_on(card) if card and stored else {}


def data_of(report):
    """The name of the text, and the kind of its tokens."""
    return report.setting["data"] or "unknown data"


def machine_of(report):
    """The device, of a CPU its cores and allocator."""
    device, details = report.setting["device"] or "unknown device", []
    if device == "mps":
        device = report.machine.get("name", device)
    if report.cores:
        details.append(f"{report.cores} cores")
    known = [name for name in report.allocators if name != "unknown"]
    if known:
        details.append(f"allocator: {' and '.join(known)}")
    return f"{device} ({', '.join(details)})" if details else device


def batch_of(report):
    return "B={B} T={T}".format(**report.setting) if report.setting["B"] else "unknown batch"


def setting_of(report):
    """The model, the batch and the text."""
    return f"{report.setting['model'] or 'unknown model'}, {batch_of(report)}, {data_of(report)}"


def where(report):
    """One line: the machine, the model, the batch and the text."""
    return f"{machine_of(report)}, {setting_of(report)}"


def fastest(report):
    """What MFU is a share of, in a sentence; "" where it was not measured."""
    rates = report.machine.get("rates")
    if not rates:
        return ""
    best, rate = max(rates.items(), key=lambda item: item[1])
    return f"Fastest matrix products measured: {formats.trillions(rate / 1e12)} TFLOP/s in {best}."


def remarks_of(report):
    """What a reader of the table must know about the record beside the rule: as its machine.json says it."""
    return "".join(f" {remark}" for remark in report.machine.get("remarks", ())) + marks_of(report)


def marks_of(report):
    """What the mark at a row of older code says, if there is one."""
    return f" Scripts marked {OLDER} have changed since." * any(row.older_code for row in report.rows)


def attention_of(report):
    """The kernel that computed attention from rung 6 on, in a sentence: a GPU has several, of different speeds."""
    kernel = report.machine.get("attention")
    return f"torch's attention kernel: {kernel}." if kernel and report.machine.get("device") == "cuda" else ""


def conditions(report):
    """Where and on what the numbers were measured, and what MFU is a share of."""
    return " ".join(filter(None, [f"{where(report)}.", fastest(report), attention_of(report)]))


def few_rounds(report):
    """How many rounds a report has, and what that many cannot say; "" where they are enough."""
    rounds = max((row.rounds for row in report.rows), default=FEWEST_ROUNDS)
    return f"{rounds} round{'s' * (rounds > 1)}: too few to claim a gain" if rounds < FEWEST_ROUNDS else ""


def todays_rows(report):
    """The rows without those that their record gives a title of its own: their scripts have changed, or are gone."""
    return [row for row in report.rows if row.name not in report.machine.get("titles", {})]
