"""The laws of the ladder: self-contained scripts, and between neighbours one idea and nothing else."""
import ast
import difflib
import statistics
import sys

import pytest
from load_script import ROOT, builds_on

from ladder.rungs.check_laws import changed_definitions, definitions, foreign, plumbing, rung_violations
from ladder.rungs.list import BANNER, BY_LABEL, LADDER, RUNGS

SOURCES = {entry.file: entry.path.read_text(encoding="utf-8") for entry in RUNGS}


def before(entry):
    """The source that a rung is compared with: of long_run that of the first of two."""
    return SOURCES[entry.start.file]


def violations(sources):
    """The breaches of the laws among the sources of all rungs ({file: text}), one line each."""
    return [*foreign(sources), *(text for entry in RUNGS[1:] for text in rung_violations(entry, sources))]


def test_the_whole_ladder_obeys():
    assert violations(SOURCES) == []


@pytest.mark.parametrize("line, edited, verdict", [
    ("def set_aside(path):", "def idle():\n    pass\n\n\ndef set_aside(path):", "idle is not used by baseline.py"),
    ("    add_flags(parser)", '    add_flags(parser) if "get_lr" in globals() else None', "'globals()' is a later"),
    ("    add_flags(parser)", '    add_flags(parser)\n    "--muon-lr"', "'--muon-lr' is a later rung's business"),
    ("    add_flags(parser)", "    add_flags(parser)" + 30 * "\n    pass", "lines, more than 150"),
])
def test_the_law_notices_what_the_baseline_does_not_need(line, edited, verdict):
    source = SOURCES["baseline.py"]
    assert source.count("\n" + line) == 1 and list(foreign(SOURCES)) == []
    found = list(foreign({**SOURCES, "baseline.py": source.replace("\n" + line, "\n" + edited)}))
    assert any(verdict in text for text in found), found


def code(lines):
    """Without comments and blank lines: they cost a reader nothing."""
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def test_scripts_are_short():
    """Lines, docstring included; of `train` lines of code: 40 up to rung 10, 60 in one process, 80 in a long run."""
    for entry in RUNGS:
        lines = definitions(SOURCES[entry.file])["train"].splitlines()
        assert len(code(lines)) <= (40 if entry in LADDER else 80 if builds_on(entry.label, "ddp") else 60), entry.label
    lines = {entry.label: len(SOURCES[entry.file].splitlines()) for entry in RUNGS}
    most = {"0": 393, "10": 485, "ddp": 520, "zero_init": 620, "documents_apart": 720}
    assert {label: lines[label] for label in most if lines[label] > most[label]} == {}


def test_a_rung_changes_something_and_all_that_it_may():
    for entry in RUNGS[1:]:
        changed = changed_definitions([SOURCES[start.file] for start in entry.starts], SOURCES[entry.file])
        assert changed, f"{entry.label} changes nothing"
        used = {name for name in entry.may_change if any(name in (part, part.split(".")[0]) for part in changed)}
        assert entry.may_change - used == set(), f"{entry.label} may change it, and does not"


# (a rung, a line of it, its replacement, what the law then says)
STRAY_EDITS = [
    ("0", "        self.gelu = nn.GELU(approximate", "        self.relu = nn.GELU(approximate",
     "speedup_01_weight_tying.py: MLP.__init__ differs"),
    ("10", "    flag(\"--seed\", type=int", "    flag(\"--seed\", type=float", "fused_adamw.py: add_flags differs"),
    ("gradient_checkpointing", "@torch.no_grad()", "# no gradients", "6_gradient_checkpointing.py: evaluate differs"),
    ("7", "class GPT(nn.Module):", "# a comment\nclass GPT(nn.Module):", "vocab_pad.py: Block.forward differs"),
    ("4", "def train(args):", "EXTRA = 1\n\n\ndef train(args):", "residual_scaling.py: EXTRA differs"),
    ("4", "def train(args):", "torch.x = 1\n\n\ndef train(args):", "residual_scaling.py: torch.x = 1 differs"),
    ("long_run", "class MLP(nn.Module):", "# a comment\nclass MLP(nn.Module):",
     "7_chunked_cross_entropy.py and beyond/modern/7_zero_init.py -> beyond/long_run/long_run.py: "
     "CausalSelfAttention.forward differs"),
    ("long_run", "def on_any_rank(condition, device):", "def on_one(condition, device):", "on_any_rank differs"),
    ("ddp", "class Log:", "# a comment\nclass Log:", "ddp_run.py: below the banner it differs from speedup_10"),
]


@pytest.mark.parametrize("label, line, edited, verdict", STRAY_EDITS)
def test_the_law_notices_a_stray_edit(label, line, edited, verdict):
    file = BY_LABEL[label].file
    assert SOURCES[file].count("\n" + line) == 1
    found = violations({**SOURCES, file: SOURCES[file].replace("\n" + line, "\n" + edited)})
    assert any(verdict in text for text in found), found


def test_the_law_notices_a_missing_or_second_banner():
    source = SOURCES["ddp_run.py"]
    for broken in (source.replace(BANNER, "# ---- no banner "), source + BANNER + "\n"):
        with pytest.raises(ValueError, match="exactly one banner"):
            plumbing(broken)


def changed_lines(before, after):
    """The lines of code of a lesson: what differs between docstring and banner, each with its "+" or "-"."""
    lesson, banner, _ = after.partition("\n" + BANNER)
    after = lesson + banner + before.partition("\n" + BANNER)[2]
    old, new = (source.splitlines()[ast.parse(source).body[0].end_lineno :] for source in (before, after))
    return [line for line in difflib.unified_diff(code(old), code(new), n=0, lineterm="") if line[0] in "+-"][2:]


def test_lessons_are_short():
    """Changed lines of code outside the docstring."""
    lengths = {entry.label: len(changed_lines(before(entry), SOURCES[entry.file]))
               for entry in RUNGS[1:] if len(entry.starts) == 1}
    assert statistics.median(lengths[str(number)] for number in range(1, 11)) <= 8, lengths
    most = {str(number): 28 for number in range(1, 11)}
    # Where a class is born or grows:
    most |= {"muon": 80}  # a class is born, and works in batches
    most |= dict.fromkeys(["fp8", "sharded_optimizer", "cuda_graphs", "sharded_checkpoint"], 70)
    most |= {"checkpoints": 88, "fsdp": 95}  # in functions that can be read alone
    assert {label: n for label, n in lengths.items() if n > most.get(label, 52)} == {}


def test_scripts_import_nothing_of_the_project():
    for source in SOURCES.values():
        nodes = [*ast.walk(ast.parse(source))]
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in imported} <= {*sys.stdlib_module_names, "torch", "numpy", "filelock"}


def test_definitions_come_in_the_same_order():
    """What both scripts have; a reader finds everything where it was."""
    for entry in RUNGS:
        for start in entry.starts:
            old, new = definitions(SOURCES[start.file]), definitions(SOURCES[entry.file])
            assert [name for name in old if name in new] == [name for name in new if name in old], entry.label


def test_every_script_is_a_stage():
    files = [*ROOT.glob("*.py"), *ROOT.glob("beyond/**/*.py")]
    scripts = {path.relative_to(ROOT).as_posix() for path in files}
    listed = {entry.file for entry in RUNGS}
    assert scripts - {"sample.py", "convert.py", "evaluate.py", "mine.py"} == listed, "correct ladder/rungs/list.py"
    silent = [entry.file for entry in RUNGS if entry.track and not entry.brings]
    assert silent == [], "say in ladder/rungs/list.py what they bring: beyond/README.md shows it"
