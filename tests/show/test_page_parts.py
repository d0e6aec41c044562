"""What the page is made of: the tree of rungs, references that become links, pictures whose numbers are exact."""
import re
from xml.etree import ElementTree

import pytest
import torch
from conftest import new_gpt, rung

from ladder.count.cards import CARDS
from ladder.count.flops import VOCAB_SIZE
from ladder.count.memory import split_parameters, step_bytes
from ladder.count.roofline import floor_data
from ladder.rungs.list import BY_LABEL, RUNGS
from ladder.show import tree
from ladder.show.page_text import prose
from ladder.show.tutorial import HERE


def test_the_parts_hold_each_rung_once_and_indent_branches():
    found = [(part.id, [one.label for one in rungs]) for part, rungs in tree.parts()]
    assert [label for _, labels in found for label in labels] == [one.label for one in RUNGS]
    assert dict(found)["several_cards"] == ["sharded_optimizer", "fsdp", "sharded_checkpoint"]
    expected = {"0": 0, "10": 0, "gradient_accumulation": 1, "zero_init": 1, "fp8": 2, "long_run": 2, "fsdp": 3,
                "sharded_checkpoint": 3}
    assert {label: tree.depth(BY_LABEL[label]) for label in expected} == expected


@pytest.mark.parametrize("text, expected", [
    ("until rung 4 (so", 'until <a href="#rung-4">rung 4</a> (so'),
    ("rung 99 and wrung 4", "rung 99 and wrung 4"),
    ("`rung 4` --max-lr 3e-4", "<code>rung 4</code> <code>--max-lr</code> 3e-4"),
    ("(docs/results.md, like", '(<a href="../docs/results.md">docs/results.md</a>, like'),
    ("See docs/no.md.", "See docs/no.md."),
    ("experiments/README.md#a-b).", '<a href="../experiments/README.md#a-b">experiments/README.md#a-b</a>).'),
    ("like fsdp.py does", "like fsdp.py does"),
    ("use sample.py.", 'use <a href="../sample.py">sample.py</a>.'),
    ("(pytorch issue 169545)", '(<a href="https://github.com/pytorch/pytorch/issues/169545">pytorch issue 169545</a>)'),
    ("Gain: less.", "<b>Gain:</b> less."),
    ("Run:\n\n    python a.py  # rung 4", 'Run:</p>\n<pre tabindex="0"><code>python a.py  # rung 4\n</code></pre>\n'),
])
def test_references_become_links(text, expected):
    assert prose(text).removeprefix("<p>").removesuffix("</p>\n") == expected


def test_papers_become_links_in_the_sources_only():
    page = prose('As Dao 2023 says.\n\nSources: Press & Wolf 2017, "Using the Output"; PyTorch\'s documentation; '
                 "a form of it in Yang, Simon and Bernstein 2023 (muP).")
    links = re.findall(r'<a href="https://scholar.google.com/scholar\?q=(\S+)">(.*?)</a>', page)
    assert links == [
        ("Press+%26+Wolf+2017%2C+%E2%80%9CUsing+the+Output%E2%80%9D", "Press &amp; Wolf 2017, “Using the Output”"),
        ("Yang%2C+Simon+and+Bernstein+2023+%28muP%29", "Yang, Simon and Bernstein 2023 (muP)")]


def texts_of(key):
    """The texts of a picture; its caption is the first one."""
    root = ElementTree.parse(HERE / "pictures" / f"{key}.svg").getroot()
    return ["".join(one.itertext()) for one in root.iter() if one.tag.endswith(("}text", "}desc"))]


def test_the_memory_of_a_step_is_the_memory_models():
    """Its peak, without weights, gradients and moments: 12 blocks, or their inputs, and the logits."""
    B, T, n_embd = 16, 1024, 768
    inputs, logits = 12 * B * T * 4 * n_embd, 4 * VOCAB_SIZE * B * T
    first, recomputed, chunked = "preemption", "gradient_checkpointing", "chunked_cross_entropy"
    blocks = B * T * BY_LABEL[chunked].memory[0] * n_embd  # with chunks the peak is where a block is recomputed
    peaks = {first: step_bytes("gpt2", B, T, first) - step_bytes("gpt2", 0, T, first), recomputed: inputs + logits,
             chunked: inputs + max(logits / 4, blocks)}
    words = {first: "all kept", recomputed: "recomputed", chunked: "in chunks"}
    for key, label in ((recomputed, first), (recomputed, recomputed), (chunked, recomputed), (chunked, chunked)):
        assert f"{words[label]}: {peaks[label] / 1e9:.1f} GB" in texts_of(key)


def test_the_cards_hold_what_the_scripts_keep():
    embedding, block, n_layer = split_parameters("gpt2")
    state = 16 * embedding + 12 * block * n_layer
    with torch.device("meta"):
        model = new_gpt(rung("sharded_optimizer"), "gpt2")
    owned, moments = [0] * 4, [0] * 4  # parameters, bytes: the owners that `sharded_optimizer` gives them
    for p in sorted(model.parameters(), key=torch.numel, reverse=True):
        owner = owned.index(min(owned))
        owned[owner] += p.numel()
        moments[owner] += p.numel() * (8 if p is model.lm_head.weight else 4)
    held = [state] * 4 + [8 * sum(owned) + own for own in moments] + [state / 4] * 4
    shown = [float(text.removesuffix(" GB")) for text in texts_of("several_cards") if text.endswith(" GB")]
    assert shown == pytest.approx([each / 1e9 for each in held], abs=0.006)


def test_the_roofline_is_the_counted_one():
    card = CARDS["H100"]
    floors = {row["label"]: row["ms"]["H100"]["floor"] for row in floor_data([card])["rungs"]}
    caption, *texts = texts_of("10")
    assert f"{floors['0']:.0f} ms a step in rung 0, {floors['5']:.0f} in rung 5, {floors['10']:.0f} in" in caption
    assert f"{card.bandwidth / 1000} TB/s" in texts
