"""The laws of the ladder: self-contained scripts, and between neighbours one idea and nothing else."""
import ast
import statistics
import sys

import pytest
from conftest import ROOT

from ladder.scripts.laws import changed_definitions, changed_lines, definitions, plumbing, violations
from ladder.scripts.stages import BANNER, BY_LABEL, STAGES

SOURCES = {stage.file: stage.path.read_text(encoding="utf-8") for stage in STAGES}
EACH = pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
EACH_RUNG = pytest.mark.parametrize("stage", STAGES[1:], ids=lambda stage: stage.name)


def before(stage):
    return SOURCES[BY_LABEL[stage.before].file]


def test_the_whole_ladder_obeys():
    assert list(violations(SOURCES)) == []


def test_below_the_banner_all_scripts_are_the_same():
    """Byte for byte, and without the help of ladder/scripts/laws.py."""
    ends = {stage.path.read_bytes().partition(b"\n# ---- the same in every rung ")[2] for stage in STAGES}
    assert len(ends) == 1 and ends.pop().count(b"\n") > 150


@EACH_RUNG
def test_a_rung_changes_something_and_all_that_it_may(stage):
    changed = changed_definitions(before(stage), SOURCES[stage.file])
    assert changed, "a rung that changes nothing"
    used = {name for name in stage.may_change if any(name in (part, part.split(".")[0]) for part in changed)}
    assert stage.may_change - used == set(), "may change, and does not"
    docstrings = [ast.get_docstring(ast.parse(source)) for source in (before(stage), SOURCES[stage.file])]
    assert docstrings[0] != docstrings[1]


@EACH
def test_every_line_belongs_to_a_definition(stage):
    """So that the law, which compares definitions, sees all of it: decorators and comments, too."""
    source = SOURCES[stage.file]
    body = source.splitlines()[ast.parse(source).body[0].end_lineno :]
    seen = [line for text in definitions(source).values() for line in text.splitlines()]
    assert sorted(filter(None, seen)) == sorted(filter(None, body))


# (a rung, a line of it, what becomes of the line, what the law then says)
STRAY_EDITS = [
    ("0", "    n_head: int = 12", "    n_head: int = 16", "speedup_01_weight_tying.py: GPTConfig differs"),
    ("5", "        return self.c_proj(self.gelu(self.c_fc(x)))", "        return self.c_fc(x)", "MLP.forward differs"),
    ("9", "import json", "import json, string", "speedup_09_cosine_lr.py: imports differs"),
    ("10", '    seed: Annotated[int, "random', '    seed: Annotated[int, "some', "fused_adamw.py: Settings differs"),
    ("13", "@torch.no_grad()", "", "rung_14_checkpoint_resume.py: evaluate differs"),
    ("16", "@torch.no_grad()", "# without gradients", "rung_16_gradient_checkpointing.py: evaluate differs"),
    ("7", "class GPT(nn.Module):", "# a comment\nclass GPT(nn.Module):", "vocab_pad.py: Block.forward differs"),
    ("4", "def train(settings):", "EXTRA = 1\n\n\ndef train(settings):", "residual_scaling.py: EXTRA differs"),
    ("8", "SCRIPT = Path(__file__)", "SCRIPT = Path('x')", "speedup_08_adamw_clip.py: below the banner it differs"),
    ("0", "        main()", "        main([])", "speedup_01_weight_tying.py: below the banner it differs"),
    ("16", "RANK = int(", "RANK  = int(", "gradient_checkpointing.py: below the banner it differs from baseline.py"),
    ("ddp", "RANK = int(", "# ranks\nRANK = int(", "ddp_run.py: below the banner it differs from baseline.py"),
    ("22", "        model = GPT(config_of", "        model = GPT (config_of", "22_qk_norm.py: below the banner"),
    ("23", "RANK = int(", "RANK  = int(", "rung_23_swiglu.py: below the banner it differs from baseline.py"),
    ("24", "        hf = AutoConfig", "        hf  = AutoConfig", "rung_24_zero_init.py: below the banner it differs"),
]


@pytest.mark.parametrize("label, line, edited, verdict", STRAY_EDITS)
def test_the_law_notices_a_stray_edit(label, line, edited, verdict):
    file = BY_LABEL[label].file
    assert SOURCES[file].count("\n" + line) == 1
    found = list(violations({**SOURCES, file: SOURCES[file].replace("\n" + line, "\n" + edited)}))
    assert any(verdict in text for text in found), found


def test_the_law_notices_space_at_the_end_and_a_missing_or_second_banner():
    source = SOURCES["ddp_run.py"]
    assert list(violations({**SOURCES, "ddp_run.py": source + "\n"})) == [
        "ddp_run.py: below the banner it differs from baseline.py"]
    for broken in (source.replace(BANNER, "# ---- no banner "), source + BANNER + "\n"):
        with pytest.raises(ValueError, match="exactly one banner"):
            plumbing(broken)


def test_lessons_are_short():
    """Changed lines outside the docstring; the laws' counting is tested below."""
    lengths = {stage.label: len(changed_lines(before(stage), SOURCES[stage.file])) for stage in STAGES[1:]}
    ten = [lengths[str(number)] for number in range(1, 11)]
    assert statistics.median(ten) <= 8 and max(ten) <= 20, lengths
    assert lengths.pop("fsdp") <= 67 and lengths.pop("dcp") <= 76, lengths  # sharding; a save that survives kills
    assert max(lengths.values()) <= 40, lengths


def test_changed_lines_counts_both_sides_and_no_docstring():
    old = '"""One\nlesson."""\nimport a\nb = 1\nc = 2\n'
    new = '"""Another."""\nimport a\nb = 2\nc = 2\nd = 3\n'
    assert changed_lines(old, new) == ["-b = 1", "+b = 2", "+d = 3"]
    assert changed_lines(old, old) == []


@EACH
def test_scripts_import_nothing_of_the_project(stage):
    allowed = set(sys.stdlib_module_names) | {"torch", "numpy", "transformers", "filelock", "torchao"}
    tree = ast.parse(SOURCES[stage.file])
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {"." * node.level + (node.module or "") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= allowed


@EACH_RUNG
def test_definitions_come_in_the_same_order(stage):
    """What both scripts have; a reader finds everything where it was."""
    old, new = definitions(before(stage)), definitions(SOURCES[stage.file])
    assert [name for name in old if name in new] == [name for name in new if name in old]


@EACH
def test_the_lesson_comes_first(stage):
    names = list(definitions(SOURCES[stage.file]))
    assert ast.get_docstring(ast.parse(SOURCES[stage.file])).startswith("Rung ")
    model = ["imports", "Settings", "GPTConfig", "CausalSelfAttention", "MLP", "Block", "GPT", "DataLoaderLite"]
    assert [name for name in names if name in model] == model
    assert names[names.index("train") + 1] == "SCRIPT"  # the first line below the banner
    assert names[-2:] == ["main", 'if __name__ == "__main__":']


@EACH
def test_lines_are_not_longer_than_120_characters(stage):
    assert [line for line in SOURCES[stage.file].splitlines() if len(line) > 120 or line != line.rstrip()] == []


def test_every_script_is_a_stage():
    scripts = {path.relative_to(ROOT).as_posix() for folder in (ROOT, ROOT / "beyond") for path in folder.glob("*.py")}
    assert scripts - {"sample.py", "export.py", "evaluate.py"} == {stage.file for stage in STAGES}


def test_the_ladder_is_one_chain():
    """With branches from rung 24: 25 is for other cards, 26 to 29 for small texts, 30 goes on; FSDP shards it."""
    *chain, fsdp, dcp = STAGES
    starts = [None, *(stage.label for stage in chain[:-1])]
    starts[starts.index("25")] = starts[starts.index("29")] = "24"  # of rungs 26 and 30
    assert [stage.before for stage in chain] == starts
    assert (fsdp.label, fsdp.before, dcp.label, dcp.before) == ("fsdp", "24", "dcp", "fsdp")
    assert len(BY_LABEL) == len(STAGES)
