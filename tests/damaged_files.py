"""What becomes of files: cut off, or made by somebody who wants to run code."""
from pathlib import Path


class Attack:
    """Unpickled, as torch.load does with weights_only=False, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
