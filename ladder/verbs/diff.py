"""`python -m ladder diff`: one lesson: the text, the change, the measured effect; or the tree of all rungs."""
import contextlib

from ladder import formats
from ladder.errors import UserError
from ladder.records.logs import newest_run, reference_folders
from ladder.records.significance import is_significant, speed_p
from ladder.records.summary import build_report
from ladder.rungs.lessons import read_lesson
from ladder.rungs.list import find_rung
from ladder.show.facts import where
from ladder.show.lesson_text import print_lesson
from ladder.show.tree import tree_lines


def add_flags(parser):
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help="the rung to compare with the one before it, or two "
                        "rungs to compare with each other (default: list all rungs)")


def main(args, console):
    if len(args.rungs) > 2:
        raise UserError("diff: takes one rung or two; leave the others out")
    if not args.rungs:
        for line, rung in tree_lines():
            console.print(f"{line:<36} {rung.brings or rung.title}", soft_wrap=True)
        return
    rung = find_rung(args.rungs[-1])
    before = find_rung(args.rungs[0]) if len(args.rungs) == 2 else rung.start
    old = before.path.read_text(encoding="utf-8") if before else None
    print_lesson(read_lesson(old, rung.path.read_text(encoding="utf-8")), console)
    if before:
        for report in map(build_report, reference_folders()):
            print_effect(before, rung, report, console, "Measured")
        with contextlib.suppress(UserError):  # there is none, or it cannot be shown
            report = build_report(newest_run())
            print_effect(before, rung, report, console, f"Your newest run, {report.name}")


def print_effect(before, rung, report, console, whose):
    """What a rung's change did on a machine that ran both; `before` is the other rung."""
    if not {before.name, rung.name} <= report.runs.keys():
        return
    rows = {row.name: row for row in report.rows}
    old, new = rows[before.name], rows[rung.name]
    sizes = [formats.gigabytes(row.peak_memory_gb) for row in (old, new)]
    memory = f", {' -> '.join(sizes)} GB" if new.peak_memory_gb else ""
    losses = f"loss at step {new.last_step}: {formats.loss(old.last_loss)} -> {formats.loss(new.last_loss)}"
    if old.last_val_loss and new.last_val_loss:
        losses = f"validation loss: {formats.loss(old.last_val_loss)} -> {formats.loss(new.last_val_loss)}"
    times = [formats.with_spread(row.ms, row.ms_low, row.ms_high) for row in (old, new)]
    whose += ", with older code" * (old.older_code or new.older_code)
    ratio = new.tokens_per_second / old.tokens_per_second
    p = new.p_before if before == rung.start else speed_p(report.rounds, before.name, rung.name)
    console.print(f"{whose}, {where(report)}:", style="bold", soft_wrap=True)
    console.print(f"  {' -> '.join(times)} ms/step ({formats.ratio(ratio)} x the tokens/sec; "
                  f"{verdict(p)}){memory}, {losses}", soft_wrap=True)


def verdict(p):
    if p is None:
        return "too few rounds to tell a gain from chance"
    return formats.p_is(p) if is_significant(p) else f"no significant difference: {formats.p_is(p)}"
