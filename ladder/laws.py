"""The laws of the ladder: a rung changes what `stages.py` allows it to, and below the banner nothing else."""
import ast
import difflib
import functools
import itertools

from ladder.stages import BANNER, BY_LABEL, STAGES


def first_line(node):
    """Where a definition starts: at its first decorator, if it has one."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


@functools.cache
def definitions(source):
    """{name: source} of everything in a script but its docstring; methods one by one, imports as one.

    To each belong its decorators and the comments after it.
    """
    body = ast.parse(source).body[1:]
    lines = source.splitlines()

    def text_from(first, following, end):
        return "\n".join(lines[first - 1 : first_line(following) - 1 if following else end]).rstrip()

    found = {"imports": ""}
    for node, following in itertools.zip_longest(body, body[1:]):
        text = text_from(first_line(node), following, len(lines))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found["imports"] += text + "\n"
        elif isinstance(node, ast.ClassDef):
            # What of the class is not a method: its first lines, docstring and fields.
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            end = first_line(following) - 1 if following else len(lines)
            found[node.name] = text_from(first_line(node), methods[0] if methods else following, len(lines))
            for method, later in itertools.zip_longest(methods, methods[1:]):
                found[f"{node.name}.{method.name}"] = text_from(first_line(method), later, end)
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = text
        elif isinstance(node, ast.Assign):
            found[node.targets[0].id] = text
        else:
            found[text.splitlines()[0]] = text  # the __main__ guard
    return found


def changed_definitions(before, after):
    """The names of the definitions that differ between two sources."""
    before, after = definitions(before), definitions(after)
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def forbidden_changes(before, after, may_change):
    """The changed definitions that are allowed neither by their own name nor by their class's."""
    changed = changed_definitions(before, after)
    return {name for name in changed if name not in may_change and name.split(".")[0] not in may_change}


def plumbing(source):
    """What stands below the banner, the banner included; ValueError unless there is exactly one."""
    head, found, rest = source.partition("\n" + BANNER)
    if not found or "\n" + BANNER in rest:
        raise ValueError("needs exactly one banner line")
    return BANNER + rest


def changed_lines(before, after):
    """The lines of a lesson: all that differ between docstring and banner, as "+..." and "-..."."""
    lesson, banner, _ = after.partition("\n" + BANNER)
    after = lesson + banner + before.partition("\n" + BANNER)[2]
    old, new = (source.splitlines()[ast.parse(source).body[0].end_lineno :] for source in (before, after))
    return [line for line in difflib.unified_diff(old, new, n=0, lineterm="") if line[0] in "+-"][2:]


def without(text, source, names):
    """`text`, a part of `source`, without the definitions `names` of it."""
    for name in names:
        text = text.replace(definitions(source)[name], "")
    return text


def violations(sources):
    """The breaches of the laws among the ladder's sources ({file: text}), one line each."""
    first = sources[STAGES[0].file]
    shared, own = plumbing(first), []  # own: the definitions below the banner that a rung up to here may change
    for stage in STAGES[1:]:
        own += [name for name in stage.may_change & definitions(first).keys() if definitions(first)[name] in shared]
        before = BY_LABEL[stage.before]
        for name in sorted(forbidden_changes(sources[before.file], sources[stage.file], stage.may_change)):
            yield f"{before.file} -> {stage.file}: {name} differs, which this rung may not change"
        if without(plumbing(sources[stage.file]), sources[stage.file], own) != without(shared, first, own):
            yield f"{stage.file}: below the banner it differs from {STAGES[0].file}"
