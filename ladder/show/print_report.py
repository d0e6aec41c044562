"""Reports in a terminal: a ladder or a race, two logs, a profile, the end of a run."""
import pandas

from ladder import formats
from ladder.records.logs import has_steps
from ladder.records.summary import build_report, warnings
from ladder.records.two_logs import compare
from ladder.records.step_profile import KINDS, UNRELIABLE, is_reliable
from ladder.rungs.list import BY_NAME
from ladder.show.columns import COLUMNS_TO_GO, all_columns, explained, texts_of
from ladder.show.facts import conditions, few_rounds, remarks_of
from ladder.show.standings import print_race
from ladder.show.terminal import print_texts

FORMATS = {"loss A": formats.logged_loss, "loss B": formats.logged_loss, "B - A": formats.logged_difference,
           "ms A": formats.ms, "ms B": formats.ms, "A / B": formats.ratio}
SHORT_KINDS = {"matrix products": "matmul", "normalization and pointwise": "pointwise", "cross-entropy": "loss"}


def print_report(report, console):
    """A report in a terminal: its warnings, its table, and its profile if it has one; or a race."""
    if report.race:
        print_race(report, console)
        return
    for warning in warnings(report):
        console.print(f"! {warning}", style="yellow")
    columns = all_columns(report)
    print_texts(texts_of(report.rows, columns), console, " — ".join(filter(None, [report.name, few_rounds(report)])),
                f"{conditions(report)}{remarks_of(report)}", explained(columns), COLUMNS_TO_GO)
    if report.profile:
        print_profile(report.profile, console)


def print_comparison(one, other, console):
    steps, sentences = compare(one, other)
    warm = {*one.steps[one.warm_up :]} & {*other.steps[other.warm_up :]}
    counted = steps[steps["step"].isin(warm)]
    median = (counted if len(counted) else steps).median().to_frame().T
    rows, texts = pandas.concat([steps, median]), pandas.DataFrame()
    for name, form in FORMATS.items():
        texts[name] = rows[name].map(form)
    texts.insert(0, "step", [*steps["step"].map(str), "median"])
    texts.iloc[-1, 1:3] = ""
    print_texts(texts, console, f"{one.path}  against  {other.path}", first_to_go=("loss A", "loss B", "ms A", "ms B"))
    for sentence in sentences:
        console.print(sentence)


def print_profile(profile, console):
    """The profile as a table: ms per step, by kind of work."""
    rows = []
    for found in profile["rungs"]:
        times = {SHORT_KINDS.get(kind, kind): found["parts_ms"][kind] for kind in KINDS}
        times |= {"step": found["step_ms"], "plain": found["plain_ms"], "products": found["products_ms"]}
        rows.append({"rung": BY_NAME[found["name"]].row + " (!)" * (not is_reliable(found))}
                    | {word: formats.ms(ms) for word, ms in times.items()})
    caption = "" if all(map(is_reliable, profile["rungs"])) else f"(!) {UNRELIABLE}"
    explains = {"step": "step: under the profiler", "plain": "plain: without it",
                "products": "products: all of its matrix products at the rate measured"}
    print_texts(pandas.DataFrame(rows), console, f"ms per step, {profile['name']}, {profile['model']}, "
                f"B={profile['B']} T={profile['T']}", caption, explains, ("plain", "data", "wait", "products"),
                padding=(0, 1, 0, 0), pad_edge=False)


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
    """The largest batch of each rung, as max_batch.py found it."""
    texts = [{"rung": rung.title, "largest B": str(best), "tokens/s": formats.number(speed),
              "what stopped the next one tried": why} for rung, (best, speed, why) in found.items()]
    print_texts(pandas.DataFrame(texts), console, "The largest batch, to within an eighth", wraps=(0, 3))
