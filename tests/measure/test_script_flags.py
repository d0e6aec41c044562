"""The flags that a script gets from the tool, and what is refused before it starts."""
import shutil
from pathlib import Path
from types import SimpleNamespace

from log_files import MEDIAN, write_log
from rich.console import Console

from ladder.measure import problems, runner, script_flags
from ladder.measure.script_flags import command_for, eager_flags, split_flags
from ladder.rungs.list import BY_LABEL, PEER, load_script


def test_a_rung_gets_the_flags_that_it_has_and_saves_no_checkpoints():
    def command(label, *flags, **more):
        return command_for(BY_LABEL[label], list(flags), Path("x"), **more)[1:]

    assert command("4", "--compile-mode", "none", "-B", "1")[1:] == ["-B", "1", "--log-dir", "x"]
    assert "--compile-mode" in command("5", "--compile-mode", "none")
    assert "--nproc_per_node=3" in command("ddp", processes=3) and "--nproc_per_node=3" in command("fsdp", processes=3)
    assert "--checkpoint-every" not in command("distributed_validation")
    assert command("checkpoints")[1:3] == command("gradient_checkpointing")[1:3] == ["--checkpoint-every", "0"]


def test_where_torch_cannot_compile_scripts_run_eagerly_and_that_is_said(fake_run, monkeypatch, capsys):
    monkeypatch.setattr(script_flags, "compile_problem", lambda device: (
        problems.compile_problem("mps") if device == "mps" else "No working C++ compiler"))
    modes = {}

    def do(job):
        modes[job.name] = split_flags(job.command, "--compile-mode")[0]
        write_log(job.log, tail=MEDIAN)

    assert eager_flags([BY_LABEL["5"]], [], "mps", Console()) == ["--compile-mode", "none"]
    assert eager_flags([BY_LABEL["4"]], [], "mps", Console()) == []  # which has no such flag
    assert "152155" in capsys.readouterr().out
    code, output, _ = fake_run(do, "--rungs", "4,5", "--peers")
    assert code == 0
    assert modes == {BY_LABEL["4"].name: [], BY_LABEL["5"].name: ["none"], PEER: ["none"]}
    assert output.count("--compile-mode none") == 1 and "No working C++ compiler" in output


def test_a_quick_look_prepares_its_text_and_says_what_comes_next(byte_tokens, tmp_path, monkeypatch, call):
    """With its own flags, unless others are given."""
    monkeypatch.chdir(tmp_path)
    started, prepared = [], []

    def prepare(command):
        prepared.append([str(word) for word in command])
        shutil.copytree(byte_tokens, command[-1])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script_flags.subprocess, "run", prepare)
    monkeypatch.setattr(runner, "run_jobs", lambda jobs, *rest: started.extend(job.command for job in jobs))
    for number in (1, 2):
        code, output, error = call("run", "--quick", "-T", 64, "--device", "cpu", "--logs", tmp_path / str(number))
        assert code == 0 and "python -m ladder run --rungs 0,5,6 --steps 10" in output, error
    assert [words[-4:] for words in prepared] == [["--tokenizer", "bytes", "--out", "data/bytes"]]
    assert [Path(command[1]).stem for command in started] == 2 * [BY_LABEL[label].name for label in ("0", "5", "6")]
    settings = load_script(BY_LABEL["6"]).parse_args(started[2][2:])
    assert (settings.T, settings.model, settings.data) == (64, "2x4x128", Path("data/bytes"))
