"""Freed memory stays with the process: the environment in which the tool runs scripts on a CPU.

    env $(python -m ladder.measure.allocator) python speedup_03_bf16_autocast.py        # a script by itself, on Linux

On a GPU torch's allocator keeps what tensors free. On a CPU glibc gives every large tensor back to Linux, which zeroes
its pages again when the next tensor touches them: up to a third of an eager step. mimalloc, a wheel in
requirements.txt, keeps freed memory when it is told never to purge; without it glibc's own variables do, with more
memory in use. torch's wheels for Windows have mimalloc built in; macOS is left as it is.
"""
import importlib.metadata
import os
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


if __name__ == "__main__":
    print(*(f"{name}={value}" for name, value in keeping_freed_memory().items()))
