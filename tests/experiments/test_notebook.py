"""notebooks/ladder.ipynb: it runs from its first cell to its last, and the tool has the commands that it names."""
import re
import shlex
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import nbformat
import pytest
from load_script import ROOT
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from run_script import run_command

from ladder.__main__ import parse_args
from ladder.rungs.list import load_script, parse_rungs


@pytest.fixture
def notebook():
    return nbformat.read(ROOT / "notebooks" / "ladder.ipynb", as_version=4)


def run_notebook(notebook, folder):
    """Run it in `folder`; returns what its cells printed. Here a shell command that fails raises, too."""
    for cell in notebook.cells:
        cell.source = re.sub(r"(?ms)^( *)!.+?(?<!\\)$", r"\g<0>\n\1assert not _exit_code, _exit_code", cell.source)
    NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


def test_the_tool_has_each_command_of_the_notebook(notebook):
    text = "\n".join(cell.source for cell in notebook.cells)
    flags = re.search(r'"LADDER_FLAGS", "(.+?)"', text)[1]
    commands = re.findall(r"!python -m ladder (.+)", text)
    assert len(commands) == text.count("python -m ladder") == 5
    for command in commands:
        args = parse_args(shlex.split(command.replace("{FLAGS}", flags)))
        for entry in parse_rungs(args.rungs) if args.verb == "run" else []:
            load_script(entry).parse_args(args.flags)


class Sessions(BaseHTTPRequestHandler):
    """Colab's list of open notebooks: one, opened from GitHub."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'[{"path": "fileId=https%3A%2F%2Fgithub.com%2Fsomeone%2Fladder%2Fblob%2Fmain%2Fa.ipynb"}]')


@pytest.fixture
def colab(monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Sessions) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("COLAB_JUPYTER_IP", "127.0.0.1")
        monkeypatch.setenv("KMP_TARGET_PORT", str(server.server_port))
        yield
        server.shutdown()


@pytest.mark.slow
def test_a_second_text_of_one_s_own_is_not_silently_the_first(notebook, byte_tokens, tmp_path, monkeypatch):
    """Nor is one that is not there; and no file that somebody has uploaded is lost."""
    (tmp_path / "data").mkdir()
    shutil.copytree(byte_tokens, tmp_path / "data" / "notebook")
    for name in ("beyond", "sample.py", "evaluate.py", "data/prepare.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "mine.txt").write_text("To be, or not to be? " * 99)
    monkeypatch.setenv("LADDER_RECIPE", "--model 1x2x32 -B 1 -T 64 --steps 2 --val-every 2 --device cpu "
                                        "--compile-mode none")
    notebook.cells = [cell for cell in notebook.cells if cell.id == "code-own"]
    source = f"import os\n{notebook.cells[0].source}"
    notebook.cells[0].source = source.replace('TEXT = ""', 'TEXT = "--text mine.txt"')
    printed = run_notebook(notebook, tmp_path)
    assert "mine.txt (bytes tokens)" in printed and "val.bin (mine.txt): " in printed
    assert (tmp_path / "mine.txt").read_text().startswith("To be")
    notebook.cells[0].source = source.replace('TEXT = ""', 'TEXT = "--text nowhere.txt"')
    with pytest.raises(CellExecutionError):
        run_notebook(notebook, tmp_path)
    assert "nowhere.txt: no such file" in str(notebook.cells[0].outputs)
    assert "bits per byte" not in str(notebook.cells[0].outputs)


@pytest.mark.slow
@pytest.mark.parametrize("n_gpus", [1, 2])
def test_two_gpus_train_together(n_gpus, notebook, tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("LADDER_FLAGS", f"--model tiny -T 64 --steps 4 --device cpu --compile-mode none --data {tokens}")
    (tmp_path / "ddp_run.py").symlink_to(ROOT / "ddp_run.py")
    notebook.cells = [cell for cell in notebook.cells if cell.id == "code-ranks"]
    source = notebook.cells[0].source.replace("torch.cuda.device_count()", str(n_gpus))
    notebook.cells[0].source = f"import os\nFLAGS = os.environ['LADDER_FLAGS']\n{source}"
    printed = run_notebook(notebook, tmp_path)
    assert ("# ranks: 2" in printed and "median : dt" in printed) == (n_gpus == 2)


@pytest.mark.slow
def test_the_notebook_runs_in_a_clone_that_it_makes(notebook, colab, tokens, tmp_path, monkeypatch):
    """All of it but the smoke test and the five rounds, as on Colab, where it lies outside the repository."""
    origin, folder = tmp_path / "origin", tmp_path / "content"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "logs", "checkpoints", "*.bin", "meta.json", "tokenizer.json")
    shutil.copytree(ROOT, origin, ignore=ignored)
    for words in ("init --quiet", "add --all", "-c user.name=a -c user.email=a@b commit --quiet --message a"):
        assert run_command("git", *words.split(), cwd=origin).returncode == 0
    folder.mkdir()
    monkeypatch.setenv("LADDER_FLAGS", f"--model tiny -T 64 --steps 4 --device cpu --compile-mode none --data {tokens}")
    monkeypatch.setenv("LADDER_RECIPE", "--model 1x2x32 -B 1 -T 64 --steps 4 --val-every 2 --val-sequences 4 "
                                        "--device cpu --compile-mode none")
    for name, value in (("COUNT", "1"), ("KEY_0", f"url.{origin}.insteadOf"),
                        ("VALUE_0", "https://github.com/someone/ladder")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    printed = run_notebook(notebook, folder)
    assert "+ torch: " in printed and "flash attention" in printed and "Rung 3, bfloat16 autocast" in printed
    assert "val : step 4 |" in printed and "ROMEO:" in printed and "bits per byte: " in printed
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert (folder / "gpt2-speed-ladder" / "results.zip").exists()
