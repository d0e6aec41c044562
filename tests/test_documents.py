"""The documents: each link leads somewhere, and each printed command is one that its program takes."""
import contextlib
import importlib.util
import io
import re
import shlex
from pathlib import Path

import pytest
from load_script import ROOT, load_module

from ladder.__main__ import VERBS, parse_args
from ladder.errors import UserError
from ladder.rungs.list import BY_NAME, load_script, parse_rungs

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), ROOT / "logs" / "reference" / "README.md"]
MADE_BY_THE_READER = ("mine.py", "filter_corpus.py")
ADDRESS, FENCE = re.compile(r"\]\(([^)\s]+)\)"), re.compile(r"(?ms)^```.*?^```")
# What may stand in front of a program: an environment, a time limit, torchrun and its flags, a loop's `do`.
IN_FRONT = re.compile(r"^(?:do |env \S+ |\$\S+ |[A-Z_]+=\S* |\$\(.*?\) |timeout .*?(?=python)|torchrun (?:--\S+ )*)+")


def anchors_of(page):
    """The #names of its headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")))
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    wrong = []
    for link in ADDRESS.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if link.startswith("http"):
            continue
        if not target.exists() or target.suffix == ".md" and anchor and anchor not in anchors_of(target):
            wrong.append(link)
    assert wrong == []


def commands_of(text):
    """The commands in a page's blocks and `code`, a line each, without comments and what stands before a program."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"(?m)^(?: {4}|\t)(.+)$", text) + "\n".join(FENCE.findall(text)).split("\n")
    lines = blocks + re.findall(r"`((?:python|torchrun) [^`]+)`", FENCE.sub("", text))
    for line in lines:
        for part in re.split(r"&& |; (?=done|python)|[>|] ", re.sub(r"\s# .*", "", " ".join(line.split()))):
            part = IN_FRONT.sub("", re.sub(r"^ladder (?!\()", "python -m ladder ", part.strip()))
            part = re.sub(r"\$\w+|…", "1", part.removesuffix("...")).strip(" ;")
            if re.match(r"(python|python3) (-m [\w.]+|[\w./]+\.py)( |$)|[\w./]+\.py ", part) and "<" not in part:
                yield part


def refusal(command):
    """What its program says against a command, without running it; "" where it takes it."""
    words = shlex.split(command)
    words = words[1:] if words[0].startswith("python") else words
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            parse(words)
        except SystemExit as end:
            return f"{end.code} {said.getvalue()}" if end.code else ""
        except UserError as error:
            return str(error)
    return ""


def parse(words):
    if words[:2] == ["-m", "ladder"]:
        if len(words) <= 3:  # its name, in a sentence
            assert {*words[2:]} <= {*VERBS}, f"no verb {words[2]}"
            return
        args = parse_args(words[2:])
        if "rungs" in args and args.verb == "run" and "--resume" not in words:
            for rung in parse_rungs(args.rungs):
                load_script(rung).parse_args(args.flags)
    elif words[0] == "-m":
        ours = re.match(r"(ladder|experiments)\.[a-z]", words[1])
        assert not ours or importlib.util.find_spec(words[1]), f"no module {words[1]}"
    elif Path(words[0]).stem in BY_NAME:
        assert (ROOT / words[0]).exists(), f"no file {words[0]}"
        load_script(BY_NAME[Path(words[0]).stem]).parse_args(words[1:])
    elif words[0] not in MADE_BY_THE_READER:
        assert (ROOT / words[0]).exists(), f"no file {words[0]}"
        module = load_module(ROOT / words[0])
        if hasattr(module, "parse_args"):
            module.parse_args(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_printed_command_is_one_that_its_program_takes(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = list(commands_of(page.read_text(encoding="utf-8")))
    refused = {command: why for command in commands if (why := refusal(command))}
    assert refused == {}


def test_commands_are_found_in_blocks_and_in_sentences():
    text = """
    cd here && python3 baseline.py --steps 2  # a remark
    ladder run --rungs 0 \\
        -B 1 | tee log
    A=1 torchrun --nproc_per_node=2 ddp_run.py -B 2

In words: `python sample.py mine.pt --prompt
"To be"`.
"""
    assert list(commands_of(text)) == ["python3 baseline.py --steps 2", "python -m ladder run --rungs 0 -B 1",
                                       "ddp_run.py -B 2", 'python sample.py mine.pt --prompt "To be"']
    assert "--stepz" in refusal("python3 baseline.py --stepz 2") and not refusal("python3 baseline.py --steps 2")
