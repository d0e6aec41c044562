"""The peers of `run --peers`: each in its best form, and trained as rung 10 trains its own model."""
from types import SimpleNamespace

import pytest
import torch
from load_script import ROOT, load_module, rung
from log_files import MEDIAN, write_log
from run_script import train
from run_tool import flags, is_one_error
from torch.nn import functional as F

import convert
from ladder.measure import peer as peers
from ladder.records.logs import read_log
from ladder.records.summary import build_report
from ladder.rungs.list import BY_LABEL, PEER, PEERS
from ladder.show.plots import colors_of

STAND_IN = """
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F
from hellaswag import iterate_examples

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    {more}

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02 / math.sqrt(2))
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        logits = self.lm_head(self.ln_f(self.wte(idx)))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

raise SystemExit("it trains")
"""


@pytest.fixture
def fetched(tmp_path):
    """A folder with stand-ins for the files of nanoGPT and build-nanogpt: to import one as a whole fails."""
    folder = tmp_path / "fetched"
    folder.mkdir()
    (folder / "model.py").write_text(STAND_IN.format(more="dropout: float = 0.1; bias: bool = False"))
    (folder / "train_gpt2.py").write_text(STAND_IN.format(more=""))
    return folder


def script():
    """The peers' script, of a fresh rung 10."""
    rung("10")
    return load_module(ROOT / PEERS[PEER].file)


def settings(**more):
    return SimpleNamespace(**{"model": "tiny", "T": 64, "pretrained": None, "save": None} | more)


def vocabulary_of(n):
    return SimpleNamespace(meta={"vocab_size": n})


def compiled_graph(model, *batch):
    """The one graph that torch.compile makes of a forward pass."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return graph

    torch.compile(model, backend=keep)(*batch)
    [graph] = graphs
    return list(graph.nodes)


@pytest.fixture
def transformers_peer(byte_tokens):
    """(the peer in training, a batch)."""
    loader = rung("10").DataLoaderLite(byte_tokens, 2, 64)
    return script().Peer(settings(), loader).train(), loader.batch(0)


def test_no_mask_reaches_the_attention_of_transformers_when_it_is_compiled(transformers_peer):
    """With a mask SDPA computes all scores: on an H100 that is a fifth of a step."""
    peer, batch = transformers_peer
    calls = [node for node in compiled_graph(peer, *batch) if "scaled_dot_product" in str(node.target)]
    assert len(calls) == 2
    for call in calls:
        assert len(call.args) == 3 and call.kwargs["attn_mask"] is None and call.kwargs["is_causal"] is True


def test_the_loss_of_transformers_is_that_of_its_default_attention_and_of_rung_10(transformers_peer):
    """In training, with the same weights: so it has no dropout, and rung 10 is compared with its equal."""
    from transformers import GPT2Config, GPT2LMHeadModel  # a second, which other processes need not wait

    peer, (idx, targets) = transformers_peer
    rows = 384  # 257 tokens, in rows that suit a GPU, as the other peers have
    default = GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_embd=64, n_layer=2, n_head=2))
    assert default.config._attn_implementation == "sdpa"
    default.load_state_dict(peer.model.state_dict())
    with torch.no_grad():
        loss = F.cross_entropy(default.eval()(idx).logits.flatten(0, 1), targets.flatten())
        for one in (peer, torch.compile(peer, backend="eager"),
                    convert.from_transformers(peer.model, BY_LABEL["10"].file)):
            assert torch.allclose(one(idx, targets), loss, rtol=1e-5)


@pytest.mark.parametrize("file", peers.FETCHED)
def test_a_fetched_model_is_built_and_called_as_by_hand(file, fetched, byte_tokens):
    module, loader = script(), rung("10").DataLoaderLite(byte_tokens, 2, 64)
    torch.manual_seed(1)
    peer, (idx, targets) = module.fetched_peer(fetched / file)(settings(), loader), loader.batch(0)
    theirs = peers.load_classes(fetched / file)
    torch.manual_seed(1)
    shape = {"block_size": 1024, "vocab_size": 384, "n_layer": 2, "n_head": 2, "n_embd": 64}
    model = theirs.GPT(theirs.GPTConfig(**shape, **({"dropout": 0.0, "bias": True} if file == "model.py" else {})))
    assert vars(peer.model.config) == vars(model.config)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in model.parameters()) == 384 * 64 + 2 * 64
    assert torch.equal(peer(idx, targets), model(idx, targets)[1])
    decays = [group["weight_decay"] for group in peer.configure_optimizers(1e-3, 0.1).param_groups]
    assert decays == [0.1, 0.0]
    assert module.fetched_peer(fetched / file)(settings(), vocabulary_of(50257)).model.config.vocab_size == 50304


@pytest.mark.parametrize("file", peers.FETCHED)
def test_only_the_loss_leaves_the_compiled_graph(file, fetched):
    """Logits that leave it would need a second tensor of their size in the backward pass."""
    peer = script().fetched_peer(fetched / file)(settings(), vocabulary_of(257))
    *_, output = compiled_graph(peer, torch.zeros(2, 64).long(), torch.zeros(2, 64).long())
    [values] = output.args
    assert len(values) == 1 and values[0].meta["example_value"].shape == ()


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_rung_10_with_another_model(name, fetched, tmp_path, tokens, monkeypatch):
    """With the rungs' own dtype: no bfloat16 where there is none."""
    peer = script()
    monkeypatch.setattr(peer.rung_10, "autocast_dtype", lambda device: torch.float32)
    files = [str(path) for path in peers.find_peers(fetched)[name][1:]]
    peer.main([*files, *flags(tokens), "--log-dir", str(tmp_path), "--compile-mode", "none"])
    log = read_log(tmp_path / f"{name}.log")
    assert log.complete and log.name == name and log.headers["precision"] == "float32 (no bfloat16 on this CPU)"
    assert log.headers["compile"] == "none"
    assert " | norm: " in log.path.read_text() and " | lr: " in log.path.read_text()
    ours = read_log(train(rung(1), tmp_path, tokens, *flags(tokens)[4:]))
    assert log.losses[0] == pytest.approx(ours.losses[0], abs=0.3)  # all start near ln 50257, with tied weights
    assert log.tokens_per_step == ours.tokens_per_step


def test_a_peer_loads_no_weights(fetched):
    for peer in (script().Peer, script().fetched_peer(fetched / "model.py")):
        with pytest.raises(SystemExit, match="--pretrained"):
            peer(settings(pretrained="x"), vocabulary_of(257))


def test_the_tool_runs_the_peers_that_are_there(fetched, fake_run, tmp_path):
    def names(*words):
        commands.clear()
        assert fake_run(do, "--logs", tmp_path / f"logs_{len(list(tmp_path.iterdir()))}", *words)[0] == 0
        return [*commands][1:]

    def do(job):
        commands[job.name] = job.command
        write_log(job.log, tail=MEDIAN)

    commands = {}
    assert names() == [] and names("--peers") == [PEER]
    assert names("--peers", fetched) == [*PEERS]
    for name, file in ((PEER, []), ("peer_nanogpt", ["model.py"]), ("peer_build_nanogpt", ["train_gpt2.py"])):
        start = [str(ROOT / PEERS[name].file), *(str(fetched / one) for one in file)]
        assert commands[name][1 : 1 + len(start)] == start and "--log-dir" in commands[name]
    (fetched / "model.py").unlink()
    assert names("--peers", fetched) == [PEER, "peer_build_nanogpt"]


@pytest.mark.parametrize("text, reason", [
    (None, "holds no model.py or train_gpt2.py"),
    ("<!DOCTYPE html>\n<title>nanoGPT/model.py</title>\n", "model.py: does not define GPT and GPTConfig"),
    ("import math\nclass GPT: pass\n", "model.py: does not define GPT and GPTConfig")])
def test_a_folder_without_their_models_is_refused_before_anything_runs(text, reason, tmp_path, tokens, monkeypatch,
                                                                       call):
    monkeypatch.chdir(tmp_path)
    if text:
        (tmp_path / "model.py").write_text(text)
    before = list(tmp_path.iterdir())
    assert is_one_error(call("run", "--peers", tmp_path, *flags(tokens)), "--peers ", reason, "docs/running.md")
    assert list(tmp_path.iterdir()) == before


def test_a_record_says_what_its_peer_was(tmp_path):
    """The first ones had a mask."""
    for name in (*PEERS, BY_LABEL["10"].name):
        write_log(tmp_path / f"{name}.log")
    titles = [PEERS[name].title for name in PEERS]
    assert titles[0] == "transformers' GPT-2, everything on"
    assert [row.title for row in build_report(tmp_path).rows] == [BY_LABEL["10"].title, *titles]
    assert len(set(colors_of([*PEERS, "baseline"]).values())) == 4
    (tmp_path / "machine.json").write_text('{"rates": {"float32": 1e12}, "titles": {"%s": "with a mask"}}' % PEER)
    assert [row.title for row in build_report(tmp_path).rows][1:] == ["with a mask", *titles[1:]]
