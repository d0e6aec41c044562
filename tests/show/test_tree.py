"""The tree of rungs."""
from ladder.rungs.list import BY_LABEL, RUNGS
from ladder.show import tree


def test_the_parts_hold_each_rung_once_and_indent_branches():
    found = [(part.id, [one.label for one in rungs]) for part, rungs in tree.parts()]
    assert [label for _, labels in found for label in labels] == [one.label for one in RUNGS], (
        "give each folder its Part in ladder/show/tree.py, and keep its scripts together in ladder/rungs/list.py")
    assert dict(found)["ladder"] == [*map(str, range(11)), "ddp"]
    expected = {"0": 0, "10": 0, "gradient_accumulation": 1, "zero_init": 1, "fp8": 2, "long_run": 2, "fsdp": 3,
                "sharded_checkpoint": 3}
    assert {label: tree.depth(BY_LABEL[label]) for label in expected} == expected
