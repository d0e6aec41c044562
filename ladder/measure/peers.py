"""The peers of `run --peers`: other people's GPT-2, which rung 10's `train` trains.

transformers' is installed. Those of nanoGPT and build-nanogpt are files that the user has fetched into a folder:
model.py of github.com/karpathy/nanoGPT, train_gpt2.py of github.com/karpathy/build-nanogpt.
"""
import ast
import sys
import types

from ladder.errors import UserError
from ladder.show.logs import PEER, PEERS

FETCHED = {"model.py": "peer_nanogpt", "train_gpt2.py": "peer_build_nanogpt"}  # {file: its log}
IMPORTED = {"dataclasses", "inspect", "math", "torch"}  # what their models use


def is_definition(node):
    """Whether a statement at the top of a file defines a class, or imports what the classes use."""
    if isinstance(node, ast.Import):
        return all(name.name.partition(".")[0] in IMPORTED for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.module.partition(".")[0] in IMPORTED
    return isinstance(node, ast.ClassDef)


def definitions(file):
    """The classes of a fetched file with their imports, as a syntax tree: train_gpt2.py as a whole would train."""
    problem = f"--peers {file}: does not define GPT and GPTConfig; fetch the file that docs/running.md names"
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except SyntaxError:  # the web page around the file
        raise UserError(problem) from None
    tree.body = [node for node in tree.body if is_definition(node)]
    if not {"GPT", "GPTConfig"} <= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}:
        raise UserError(problem)
    return tree


def load_classes(file):
    """A module with the classes of a fetched file."""
    module = types.ModuleType(f"fetched_{file.stem}")
    sys.modules[module.__name__] = module  # torch.compile looks it up
    exec(compile(definitions(file), file, "exec"), vars(module))
    return module


def find_peers(wanted):
    """{log's name: script and file} of the peers that are `wanted`: None, True (transformers'), or a folder."""
    if wanted is None:
        return {}
    peers = {PEER: [PEERS[PEER].path]}
    if wanted is True:
        return peers
    for name, peer in FETCHED.items():
        file = wanted / name
        if file.exists():
            definitions(file)
            peers[peer] = [PEERS[peer].path, file.resolve()]
    if len(peers) == 1:
        raise UserError(f"--peers {wanted}: holds no {' or '.join(FETCHED)}; docs/running.md says where they are")
    return peers
