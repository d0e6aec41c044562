"""Reports in a terminal: a ladder or a race, two logs, a profile, the end of a run."""
from ladder import formats
from ladder.records.logs import has_steps
from ladder.records.summary import build_report, warnings
from ladder.records.two_logs import compare
from ladder.records.step_profile import KINDS, UNRELIABLE, is_reliable
from ladder.rungs.list import BY_NAME
from ladder.show.columns import Column, all_columns, columns_of
from ladder.show.facts import conditions, few_rounds, remarks_of
from ladder.show.standings import BRACKETS, FOR_ALL, race_caption, race_columns
from ladder.show.terminal import print_table

FORMATS = {"step": str, "loss A": formats.logged_loss, "loss B": formats.logged_loss,
           "B - A": formats.logged_difference, "ms A": formats.ms, "ms B": formats.ms, "A / B": formats.ratio}
SHORT_KINDS = {"matrix products": "matmul", "normalization and pointwise": "pointwise", "cross-entropy": "loss"}


def print_report(report, console):
    """A report in a terminal: its warnings, its table, and its profile if it has one; or a race."""
    if report.race:
        print_table([*report.race.race_table.itertuples()], race_columns(report), console, f"{report.name}: a race",
                    f"{race_caption(report)} {BRACKETS} {FOR_ALL}")
        return
    for warning in warnings(report):
        console.print(f"! {warning}", style="yellow")
    print_table(report.rows, all_columns(report), console, " — ".join(filter(None, [report.name, few_rounds(report)])),
                f"{conditions(report)}{remarks_of(report)}")
    if report.profile:
        print_profile(report.profile, console)


def print_comparison(first, second, console):
    steps, sentences = compare(first, second)
    warm = {*first.steps[first.warm_up :]} & {*second.steps[second.warm_up :]}
    counted = steps[steps["step"].isin(warm)]
    median = (counted if len(counted) else steps).median()
    texts = [{name: form(row[name]) for name, form in FORMATS.items()} for row in (*steps.to_dict("records"), median)]
    texts[-1] |= {"step": "median", "loss A": "", "loss B": ""}
    columns = columns_of(texts, ["loss A", "loss B", "ms A", "ms B"])
    print_table(texts, columns, console, f"{first.path}  against  {second.path}")
    for sentence in sentences:
        console.print(sentence)


def print_profile(profile, console):
    """The profile as a table: ms per step, by kind of work."""
    goes = {"plain_ms": 1, "data": 2, "waiting": 3, "products_ms": 4}

    def ms_column(heading, key, explains=""):
        return Column(heading, lambda row: formats.ms((row | row["parts_ms"])[key]), explains, goes.get(key, 99))

    columns = [Column("rung", lambda row: BY_NAME[row["name"]].row + " (!)" * (not is_reliable(row))),
               *(ms_column(SHORT_KINDS.get(kind, kind), kind) for kind in KINDS),
               ms_column("step", "step_ms", "step: under the profiler"),
               ms_column("plain", "plain_ms", "plain: without it"),
               ms_column("products", "products_ms", "products: all of its matrix products at the rate measured")]
    caption = "" if all(map(is_reliable, profile["rungs"])) else f"(!) {UNRELIABLE}"
    print_table(profile["rungs"], columns, console, f"ms per step, {profile['name']}, {profile['model']}, "
                f"B={profile['B']} T={profile['T']}", caption, padding=(0, 1, 0, 0), pad_edge=False)


def print_end(runner, console, quick):
    """The table, and what failed; after a quick look, what comes next."""
    if has_steps(runner.log_dir):
        print_report(build_report(runner.log_dir), console)
        console.print(f"logs: {runner.log_dir}")
    else:
        console.print("no rung finished a step, so there is no table")
    failed = runner.failed()
    if failed:
        console.print(f"{len(failed)} of {runner.n_jobs} runs did not finish:", style="red")
        for outcome in failed:
            console.print(f"  {outcome.name}: {outcome.status}: {outcome.reason}")
    elif quick:
        steps = 10 if runner.device == "cpu" else 200
        console.print("\nThat was a small model. The same with GPT-2 (124M): "
                      f"python -m ladder run --rungs 0,5,6 --steps {steps}", soft_wrap=True)


def print_largest(found, console):
    """The largest batch of each rung, as max_batch.py found it: {rung: (B, tokens/s, why not the next)}."""
    columns = [Column("rung", lambda row: row[0].row), Column("largest B", lambda row: str(row[1])),
               Column("tokens/s", lambda row: formats.number(row[2])),
               Column("what stopped the next one tried", lambda row: row[3], has_words=True)]
    print_table([(rung, *best) for rung, best in found.items()], columns, console,
                "The largest batch, to within an eighth")
