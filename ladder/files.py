"""Write important files under a temporary name, then rename: a kill leaves no half of a file."""


def write_whole(path, text):
    """Write `text` to the Path `path`, all of it or nothing; OSError if it cannot."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    partial.replace(path)
