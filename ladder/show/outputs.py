"""What the tool prints and writes of reports: the table, files, or the measured effect of one lesson."""
from ladder.count.cards import find_card
from ladder.errors import UserError
from ladder.rungs.list import ROOT
from ladder.show.chance import BEYOND_CHANCE, speed_p
from ladder.show.profile import print_profile
from ladder.show.report import build_report
from ladder.show.standings import print_race
from ladder.show.tables import print_table, where


def print_report(report, console, card=None):
    """A report, with the profile and the race of its folder, if any; `card` is the GPU of logs that name none."""
    print_table(report, console, card)
    if report.profile:
        print_profile(report.profile, console)
    if report.race:
        print_race(report, console)


def write_reports(args, newest_run, reference_folders, console, messages):
    """What the parsed `args` of `report` ask for; the two functions give the folders where none is named."""
    from ladder.show.tables import as_csv, as_json, write_tables

    published = args.readme or args.html
    if args.readme and (args.folders or args.logs):
        raise UserError("--readme: shows all folders of logs/reference; name none")
    folders = [*args.folders, *args.logs] or (reference_folders() if published else [newest_run()])
    reports = [build_report(folder) for folder in folders]
    if not (published or args.png or args.json or args.csv):
        for one in reports:
            print_report(one, console, args.gpu and find_card(args.gpu))
        return
    for reason in dict.fromkeys(reason for one in reports for reason in one.skipped):
        messages.print(f"! skipped: {reason}", soft_wrap=True)  # which a table says itself
    if args.readme:
        from ladder.show.plots import shown_in_docs, write_plots

        write_tables(reports)
        messages.print("README.md, docs/*.md: tables rewritten")
        write_plots(reports, ROOT / "docs", only=shown_in_docs(ROOT))
    if args.png:
        from ladder.show.plots import write_plots

        for path in write_plots(reports, args.png):
            messages.print(str(path))
    if args.html:
        from ladder.show.page import write_page

        write_page(reports, args.html)
        messages.print(f"{args.html}: {args.html.stat().st_size / 1e6:.2f} MB")
    if args.json:
        print(as_json(reports))
    elif args.csv:
        print(as_csv(reports), end="")


def times_text(row):
    return f"{row.ms:,.0f} ({row.ms_low:,.0f}–{row.ms_high:,.0f})"


def loss_effect(old, new):
    """The losses that both rungs end with: those of validations, where both have them."""
    if old.last_val_loss and new.last_val_loss:
        return f"validation loss: {old.last_val_loss:.3f} -> {new.last_val_loss:.3f}"
    return f"loss at step {new.last_step}: {old.last_loss:.3f} -> {new.last_loss:.3f}"


def verdict(p):
    if p is None:
        return "too few rounds to tell a gain from chance"
    return f"p = {p:.2g}" if p < BEYOND_CHANCE else f"no significant difference: p = {p:.2g}"


def print_effect(before, rung, folders, console):
    """What a rung's change did, a line for each reference machine that has both; `before` is the other rung."""
    for reference in map(build_report, folders):
        rows, runs = {row.name: row for row in reference.rows}, reference.runs
        if not {before.name, rung.name} <= rows.keys():
            continue
        old, new = rows[before.name], rows[rung.name]
        memory = f", {old.peak_memory_gb:.2f} -> {new.peak_memory_gb:.2f} GB" if new.peak_memory_gb else ""
        ratio = new.tokens_per_second / old.tokens_per_second
        in_table = before.label == rung.before
        chance = verdict(new.p_before if in_table else speed_p(runs[before.name], runs[rung.name]))
        console.print(f"Measured, {where(reference)}:", style="bold", soft_wrap=True)
        console.print(f"  {times_text(old)} -> {times_text(new)} ms/step ({ratio:.2f} x the tokens/sec; {chance})"
                      f"{memory}, {loss_effect(old, new)}", soft_wrap=True)
