"""Environment variables that make a script on a CPU keep freed memory; the tool sets them for all scripts it runs.

    env $(python -m ladder.measure.allocator) python speedup_03_bf16_autocast.py        # a script by itself, on Linux

On a GPU torch's allocator keeps freed memory. On a CPU glibc returns every large tensor's memory to Linux, which zeroes
the pages again when the next tensor touches them: up to 28 % of an eager step on an Intel Xeon (experiments/README.md).
mimalloc, a wheel in requirements.txt, keeps freed memory when told never to purge; without it glibc's own variables do
so, with more memory in use. torch's wheels for Windows have mimalloc built in; macOS is left as it is.
"""
import importlib.metadata
import os
import re
import sys

KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}  # mallopt(3): one heap, which never shrinks


def mimalloc():
    """The path of mimalloc's library, None where its wheel is not installed."""
    try:
        files = importlib.metadata.files("cmeel-mimalloc") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name == "libmimalloc.so"), None)


def keeping_freed_memory():
    """Environment variables that make a child keep freed memory; {} where there are none, or the user has set one."""
    if sys.platform != "linux" or {"LD_PRELOAD", *KEPT} & os.environ.keys():
        return {}
    library = mimalloc()
    if library is None or {" ", ":"} & set(library):  # LD_PRELOAD is a list of paths, separated by either
        return KEPT
    return {"LD_PRELOAD": library, "MIMALLOC_PURGE_DELAY": "-1"}


def allocator_name(environment):
    """What hands out a CPU's memory under these variables; "default" is what the system and this torch have."""
    preloaded = re.search(r"lib(tcmalloc|jemalloc|mimalloc)", environment.get("LD_PRELOAD", ""))
    if preloaded:
        return preloaded[1]
    return "glibc without trimming" if KEPT.keys() <= environment.keys() else "default"


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in keeping_freed_memory().items()))
