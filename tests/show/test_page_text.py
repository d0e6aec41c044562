"""What the page is made of: references that become links."""
import pytest

from ladder.show.page_text import prose


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
