"""What a record says of its machine."""
import re
import subprocess

from ladder.measure import this_machine


def test_a_machine_names_the_commit_where_git_tells_it(tmp_path, monkeypatch):
    monkeypatch.setattr(this_machine, "ROOT", tmp_path)
    assert "commit" not in this_machine.describe("cpu")
    (tmp_path / "file").write_text("as committed")
    for words in ("init -q", "add file", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True)
    assert re.fullmatch("[0-9a-f]{7,}", this_machine.describe("cpu")["commit"])
    (tmp_path / "file").write_text("changed")
    assert this_machine.describe("cpu")["commit"].endswith("-dirty")


def test_a_mac_s_chip_has_a_name(monkeypatch):
    """Else all of them would be one machine."""
    monkeypatch.setattr(this_machine.sys, "platform", "darwin")
    monkeypatch.setattr(this_machine.collect_env, "run", lambda command: (0, "Apple M3 Max", ""))
    assert this_machine.device_name("mps") == "Apple M3 Max GPU"
    assert this_machine.device_name("cpu").startswith("Apple M3 Max (")
