"""The laws of the ladder: a rung changes only what `list.py` allows, and below the banner nothing."""
import ast
import functools
import itertools
import re
from collections import Counter

from ladder.rungs.list import BANNER, RUNGS

MOST_LINES = 150  # below the banner
# What no plumbing names: how a script would ask which rung it is, and the formats and libraries of later ones.
LATER = ("globals()", "hasattr", "rung_", "speedup_", "RANK", "distributed", "torchrun", "transformers", "Qwen", "qwen",
         "compile", "heckpoint", "resume", "filelock", "signal", "autocast", "scaler")


def first_line(node):
    """Where a definition starts: at its first decorator, if it has one."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def name_of(node, lines):
    """What a statement at the top level is called: a definition's own name, "imports", or its first line."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return "imports"
    if isinstance(node, (ast.If, ast.Try)) and isinstance(node.body[0], (ast.FunctionDef, ast.Import)):
        return name_of(node.body[0], lines)  # what needs a library that may be missing
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return getattr(node, "name", lines[node.lineno - 1].rstrip())  # the __main__ guard has no name


@functools.cache
def pieces(source):
    """{name: source} of everything after the docstring, in order: joined, the pieces are the source again.

    Methods are pieces of their own, the imports are one. Each includes its decorators, and what follows it.
    """
    docstring, *body = ast.parse(source).body
    lines, starts, texts = source.splitlines(keepends=True), [], {}  # starts: (first line, name)
    for node in body:
        starts.append((first_line(node), name_of(node, lines)))
        if isinstance(node, ast.ClassDef):  # its docstring and fields are a piece of its own name
            starts += [(first_line(method), f"{node.name}.{method.name}") for method in node.body
                       if isinstance(method, ast.FunctionDef)]
    starts[0] = (docstring.end_lineno + 1, starts[0][1])  # with the empty lines above it
    for (first, name), (after, _) in itertools.pairwise([*starts, (len(lines) + 1, "")]):
        texts[name] = texts.get(name, "") + "".join(lines[first - 1 : after - 1])
    return texts


@functools.cache
def definitions(source):
    """The pieces of a script without the blank lines between them."""
    return {name: text.rstrip() for name, text in pieces(source).items()}


def changed_definitions(starts, after):
    """The names of the definitions of a source that are in none of those that it starts from, and of those it lost."""
    starts, after = [definitions(source) for source in starts], definitions(after)
    lost = set().union(*starts) - after.keys()
    return lost | {name for name, text in after.items() if text not in [before.get(name) for before in starts]}


def plumbing(source):
    """The part below the banner, the banner included; ValueError unless there is exactly one."""
    _, *below = source.split("\n" + BANNER)
    if len(below) != 1:
        raise ValueError("needs exactly one banner line")
    return BANNER + below[0]


def flags(source):
    """The long names of a script's own flags."""
    return set(re.findall(r'"(--[a-z-]+)"', definitions(source)["add_flags"]))


def foreign(sources):
    """What stands below the banner without being the baseline's own business, one line each."""
    first, below = sources[RUNGS[0].file], plumbing(sources[RUNGS[0].file])
    used = Counter(getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(ast.parse(first)))
    for name in definitions(below):
        method = name.rpartition(".")[2]
        if not (used[method] or method.startswith("__") or name.startswith("if ")):
            yield f"below the banner: {name} is not used by {RUNGS[0].file}"
    later = set.union(*(flags(source) for source in sources.values())) - flags(first)
    words = [*LATER, *sorted(later), *(f"args.{flag[2:].replace('-', '_')}" for flag in sorted(later))]
    yield from (f"below the banner: {word!r} is a later rung's business" for word in words if word in below)
    n_lines = len(below.splitlines())
    if n_lines > MOST_LINES:
        yield f"below the banner: {n_lines} lines, more than {MOST_LINES}"


def rung_violations(rung, sources):
    """The breaches of the laws in the source of a rung ({file: text}), one line each.

    What it may change is named itself, or its class is.
    """
    after, starts = sources[rung.file], [sources[start.file] for start in rung.starts]
    names = " and ".join(start.file for start in rung.starts)
    for name in sorted(changed_definitions(starts, after)):
        if not {name, name.split(".")[0]} & rung.may_change:
            yield f"{names} -> {rung.file}: {name} differs, which its may_change in ladder/rungs/list.py does not name"
    if plumbing(after) != plumbing(starts[0]):
        yield f"{rung.file}: below the banner it differs from {rung.start.file}"
