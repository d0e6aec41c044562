"""Write important files under a temporary name, then rename: neither a kill nor a full disk leaves half a file."""


def write_whole(path, text):
    """Write `text` to the Path `path`, all of it or nothing; OSError if it cannot."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
