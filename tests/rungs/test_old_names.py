"""What scripts are called: by their files, and in records and models of before."""
import re

import pytest
from load_script import ROOT, load_module

from ladder.rungs.list import BY_LABEL, BY_NAME, PEERS, RUNGS, TRACKS, today
from ladder.rungs.old_names import OLD_LABELS, OLD_NAMES

GONE = {"rung_37_triton_cross_entropy", "rung_38_fp8_head"}  # what an experiment tried
RECORDS = [path for folder in ("logs/reference", "experiments") for path in sorted((ROOT / folder).rglob("*"))
           if path.suffix in (".log", ".csv", ".json")]
SCRIPT = re.compile(r"# script: (?P<log>\S+)\.py|\"name\": \"(?P<json>[a-z_0-9]+)\""
                    r"|^(?:search|round|timing),(?P<csv>\w+),", re.M)


def test_a_label_is_its_files_name_without_the_number():
    beyond = [entry for entry in RUNGS if entry.track]
    assert [entry.label for entry in beyond] == [entry.name.lstrip("0123456789_") for entry in beyond]
    assert len(BY_LABEL) == len(RUNGS) and not {*TRACKS} & {*BY_LABEL} - {"long_run"}


def test_the_numbers_of_a_track_follow_what_starts_from_what():
    for track in TRACKS:
        numbered = [entry for entry in RUNGS if entry.track == track and entry.name[0].isdigit()]
        firsts = [int(entry.name.partition("_")[0]) for entry in numbered]
        assert firsts == [*range(firsts[0], firsts[0] + len(firsts))] if firsts else True
        assert [entry.before for entry in numbered[1:]] == [entry.label for entry in numbered[:-1]]


def test_each_script_of_a_record_is_one_of_today():
    assert len(RECORDS) > 70
    for path in RECORDS:
        found = {match[match.lastgroup] for match in SCRIPT.finditer(path.read_text(encoding="utf-8"))}
        names = {today(name) for name in found if "_" in name or name in OLD_NAMES}
        assert names - {*BY_NAME, *PEERS, *GONE} == set(), path


def test_an_old_label_is_no_label_of_today():
    assert not OLD_LABELS.keys() & BY_LABEL.keys() and {*OLD_NAMES.values()} <= BY_LABEL.keys()


@pytest.mark.parametrize("old", ["rung_24_zero_init", "validation", "fsdp_run", "rung_34_rates_that_carry_over"])
def test_a_model_of_before_finds_its_script(old):
    script = load_module(ROOT / "convert.py").load_script(f"{old}.py")
    assert script.SCRIPT.stem == today(old)
