"""A lesson's text, picture, exercise and diff as HTML: markdown-it renders text, Pygments colors code."""
import ast
import functools
import html
import itertools
import re
import textwrap

from markdown_it import MarkdownIt
from pygments import lex
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Operator

from ladder.rungs.check_laws import first_line
from ladder.rungs.lessons import SECTION, part_paragraphs
from ladder.rungs.list import BY_LABEL, ROOT

# A script by its label; other code, which stays as it is; a rung; a file; an issue of PyTorch's.
RUNG_LINK = re.compile(r"(?s)<pre>.*?</pre>|<code>(?P<label>\w+)</code>|<code>.*?</code>|\b[Rr]ungs? (?P<rung>\w+)\b"
                       r"|\b(?P<file>(?:docs|experiments|beyond|ladder|data|tests)/[\w./#-]*\w|\w+\.py)\b"
                       r"|pytorch (?:issue|pull request) (?P<issue>\d+)")


def link_reference(found):
    """The HTML in place of a match of RUNG_LINK: a link where it leads somewhere."""
    file = found["file"]
    label = found["rung"] or found["label"]
    if label in BY_LABEL:
        target = f"#rung-{label}"
    elif file and (ROOT / file.partition("#")[0]).exists():
        target = f"../{file}"
    elif found["issue"]:
        target = f"https://github.com/pytorch/pytorch/issues/{found['issue']}"
    else:
        return found[0]
    return f'<a href="{target}">{found[0]}</a>'


def prose(body):
    """A docstring's text as HTML: paragraphs, lists, code, links, and separate paragraphs for "Gain:" and the like."""
    text = part_paragraphs(body)
    # Fences around code, since after a list Markdown takes indented lines for more of the list; backticks around flags.
    text = re.sub(r"(?m)(?:^    .*\n?)+", lambda code: f"```\n{textwrap.dedent(code[0]).rstrip()}\n```\n", text)
    text = re.sub(r"(```(?s:.*?)```|`.*?`)|(?<!\w)(--[a-z-]+)", lambda found: found[1] or f"`{found[2]}`", text)
    markdown = MarkdownIt("zero", {"typographer": True}).enable(["backticks", "fence", "list", "smartquotes"])
    page = re.sub(f"<p>({SECTION})", r"<p><b>\1</b>", markdown.render(text))
    page = RUNG_LINK.sub(link_reference, page)
    page = re.sub("<p>(<b>Sources?:)", r'<p class="dim">\1', page)
    return page.replace("<pre>", '<pre tabindex="0">')


def picture(path):
    """A picture of an idea as a figure: the SVG, whose <desc> is its caption."""
    svg = path.read_text(encoding="utf-8")
    caption = html.unescape(re.search("(?s)<desc>(.*?)</desc>", svg)[1])
    svg = re.sub("(?s)<desc>.*?</desc>\n", "", svg)
    return f"<figure>\n{svg}<figcaption>\n{prose(caption)}</figcaption>\n</figure>\n"


def color_line(line):
    """A Line as HTML: spans for keywords and comments, <mark> for the changed words."""
    tokens = lex(line.text, PythonLexer(stripnl=False, ensurenl=False))
    classes = ["k" if token in Keyword or token in Operator.Word else "c" if token in Comment else None
               for token, value in tokens for _ in value]
    marked = {place for first, last in line.marks for place in range(first, last)}
    parts = []
    for (css, mark), places in itertools.groupby(range(len(line.text)), lambda at: (classes[at], at in marked)):
        text = html.escape("".join(line.text[at] for at in places), quote=False)
        text = f"<span class={css}>{text}</span>" if css else text
        parts.append(f"<mark>{text}</mark>" if mark else text)
    return "".join(parts)


@functools.cache  # of one script as the one before, and as this one
def blocks_of(source):
    """(name, first line, last line) of each function, class and method of a script, the outer ones first."""
    return [(node.name, first_line(node), node.end_lineno) for node in ast.walk(ast.parse(source))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def hunk_html(hunk, blocks):
    """The definitions that a hunk changes, such as "GPT.forward", then its rows.

    `blocks` are those of the script before ("-") and of this one ("+").
    """
    places = [".".join(name for name, first, last in blocks[line.sign] if first <= line.number <= last)
              for line in hunk if line.sign in blocks]
    heading = ", ".join(dict.fromkeys(filter(None, places)))
    tags = {"-": "<del>{}</del>", "+": "<ins>{}</ins>", " ": "{}"}  # elements of their own
    rows = [tags[line.sign].format(f"{line.sign}{color_line(line)}\n") for line in hunk]
    return f"<b>{heading or 'top level'}</b>" + "".join(rows)


def exercise_html(text):
    """An exercise as HTML, its answers folded as in the file; links start from docs/, where the file lies."""
    markdown = MarkdownIt("commonmark", {"typographer": True}).enable(["smartquotes", "table"])
    page = markdown.render(text).replace('href="#', 'href="exercises.md#')
    return re.sub('href="(?!https?:)', 'href="../docs/', page).replace("<pre>", '<pre tabindex="0">')
