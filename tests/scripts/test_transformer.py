"""The parts of a modern transformer, from RoPE on, each on the thing itself.

That whole models are transformers' own, test_model.py shows.
"""
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from load_script import known_flags, rung, rungs_that_change, tiny
from log_files import losses
from run_script import Crash, train
from token_folders import data_with, tokens_of
from torch.nn import functional as F

from data import vocabulary

SHORT = ("-B", 1, "-T", 16, "--steps", 3, "--val-every", 0)
IDS = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(0))


def test_rope_angles_are_in_float32():
    with torch.autocast("cpu", torch.bfloat16):
        angles, model = rung("rope").rotary_angles(1024, 64), tiny("rope")
    assert angles.dtype == model.cos.dtype == model.sin.dtype == torch.float32 and angles.shape == (1024, 32)
    assert angles[1000, [0, 16]].tolist() == pytest.approx([1000, 10], rel=1e-6)  # 10,000 ** -0.5 radians per token
    assert model.cos[1000, 0].item() == pytest.approx(math.cos(1000), abs=1e-5)
    assert model.sin[1000, [8, 24]].tolist() == pytest.approx([-math.sin(10), math.sin(10)], abs=1e-5)


@pytest.mark.parametrize("label", rungs_that_change("GPT.__init__", since="rope"))
def test_rope_the_angles_are_in_no_checkpoint_and_on_every_device(label):
    """Computed once: Inductor would compute them anew for every element of queries and keys."""
    with torch.device("meta"):
        model = tiny(label)
    buffers = dict(model.named_buffers())
    assert {"cos", "sin"} <= buffers.keys() - model.state_dict().keys()
    assert buffers["cos"].shape == buffers["sin"].shape == (1024, 32) and model.cos.device.type == "meta"


@pytest.mark.parametrize("label, T, block_size", [("trapezoid_lr", 1100, 1100), ("rope", 1100, 1100),
                                                  ("rope", 64, 1024), ("grouped_query_attention", 64, 1024)])
def test_rope_only_the_angles_grow_with_t(label, T, block_size, tmp_path):
    """Beyond 1024, where sample.py and evaluate.py end else. The vocabulary is the data's, the shape any."""
    data = data_with(vocabulary.of_bytes(), "To be, or not to be? " * 999, tmp_path / "data")
    train(rung(label), tmp_path, data, *known_flags(rung(label), B=1, T=T, steps=1, val_every=0, total_batch=T),
          "--model", "1x2x32", "--save", tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert any(block_size in weight.shape for weight in saved["model"].values()) is (label == "trapezoid_lr")
    assert saved["config"].items() >= {
        "block_size": block_size, "vocab_size": 257, "n_layer": 1, "n_head": 2, "n_embd": 32}.items()


@pytest.mark.filterwarnings("error")
def test_qk_norm_norms_are_in_float32_under_autocast():
    """torch warns about a norm whose input and gain have different types."""
    model, types, y = tiny("qk_norm"), [], IDS.roll(1)
    for part in model.modules():
        if isinstance(part, torch.nn.RMSNorm):
            part.register_forward_hook(lambda norm, args, output: types.append((args[0].dtype, output.dtype)))
    expected = model(IDS, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(IDS, y)
    assert set(types) == {(torch.float32, torch.float32)}
    assert torch.allclose(loss, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("label", rungs_that_change("GPT.__init__", "GPT.forward", since="frequency_prior"))
@torch.no_grad()
def test_frequency_prior_at_first_the_model_is_zero_inits(label):
    """Bit by bit, with the same embedding and seed: what is new starts at zero, after everything else is drawn."""
    old, new = tiny("zero_init"), tiny(label)
    new.lm_head.weight.copy_(old.lm_head.weight)
    for model in (old, new):
        for block in model.transformer.h:  # these also start at zero, and would hide the blocks
            torch.nn.init.normal_(block.attn.c_proj.weight, generator=torch.Generator().manual_seed(1))
    before = new(IDS)
    assert torch.equal(old(IDS), before)
    for name in new.state_dict().keys() - old.state_dict().keys():
        torch.nn.init.normal_(new.state_dict()[name])
        assert not torch.allclose(new(IDS), before), name  # and takes part


def test_frequency_prior_the_prior_is_counted():
    """Of 3 a, 1 b and no c: their shares, with 0.1 added to each count."""
    shares = rung("frequency_prior").count_log_frequencies(np.frombuffer(b"abaa", dtype=np.uint8), 384).exp()
    assert shares.sum() == pytest.approx(1)
    assert [shares[ord(letter)].item() * (4 + 38.4) for letter in "abc"] == pytest.approx([3.1, 1.1, 0.1])


def test_frequency_prior_the_first_loss_is_the_entropy_of_the_frequencies(tmp_path, byte_tokens):
    """But for the current token, which a tied model expects again, with a logit of 1 at any width."""
    ids = np.fromfile(byte_tokens / "train.bin", dtype="<u2").astype(int)
    shares = np.bincount(ids, minlength=257) + 0.1
    logits = np.tile(np.log(shares / shares.sum()), (512, 1))
    logits[np.arange(512), ids[:512]] += 1
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(512), ids[1:513]]
    log = train(rung("frequency_prior"), tmp_path, byte_tokens, *SHORT, "-T", 512, "--steps", 1)
    assert losses(log)[0] == pytest.approx(expected.mean(), abs=0.02)


def test_frequency_prior_the_first_ten_million_tokens_are_counted(tmp_path, byte_tokens):
    """Of a corpus of any size."""
    module = rung("frequency_prior")
    module.count_log_frequencies = mock.Mock(side_effect=Crash)
    module.DataLoaderLite = lambda *_: SimpleNamespace(tokens=range(2**33), meta={"vocab_size": 257})
    with pytest.raises(Crash):
        train(module, tmp_path, byte_tokens, *SHORT)
    assert module.count_log_frequencies.call_args[0][0] == range(10_000_000)


def test_frequency_prior_a_pretrained_model_keeps_its_prior(tmp_path, byte_tokens):
    """Which its weights have learned to complete, also on a text with other frequencies."""
    other = tokens_of(tmp_path / "other", [7] * 200, tokenizer=vocabulary.of_bytes())
    train(rung("frequency_prior"), tmp_path, byte_tokens, *SHORT, "--save", tmp_path / "model.pt")
    files = "--pretrained", tmp_path / "model.pt", "--save", tmp_path / "next.pt"
    train(rung("frequency_prior"), tmp_path, other, *SHORT, *files)
    first, then = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("model.pt", "next.pt"))
    assert torch.equal(first["log_frequency"], then["log_frequency"]) and first["log_frequency"].std() > 1


@pytest.mark.parametrize("label", rungs_that_change("GPT.forward", since="chunked_cross_entropy"))
def test_chunked_cross_entropy_a_chunk_of_zero_is_the_cross_entropy_of_all_logits(label, byte_tokens, monkeypatch):
    """Bit by bit, padding left out; else there is none of it."""
    module, calls, cross_entropy = rung(label), [], F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args: calls.append(args) or cross_entropy(*args))
    loader = module.DataLoaderLite(byte_tokens, 2, 16, "cpu")
    x, y = loader.batch(0)
    for chunk in (0, 24):
        args = module.parse_args(known_flags(module, model="tiny", device="cpu"))
        model = module.new_model(args, loader, loss_chunk=chunk)
        loss, expected = model(x, y), cross_entropy(model(x).flatten(0, 1), y.flatten())
        assert torch.equal(loss, expected) if chunk == 0 else torch.allclose(loss, expected)
        assert len(calls) == 1


@torch.no_grad()
def test_ngram_embeddings_rows_of_pairs_and_triples():
    """What the first block gets, with the rows that a loop over the tokens finds in Python's integers.

    Also of a sequence of one token, as sample.py begins without a prompt.
    """
    model, seen = tiny("ngram_embeddings"), []
    pairs, triples = model.pairs.weight, model.triples.weight
    for table in (pairs, triples):
        torch.nn.init.normal_(table)
    model.transformer.h[0].register_forward_pre_hook(lambda block, inputs: seen.append(inputs[0]))
    model(IDS)
    model(IDS[:, :1])
    expected = model.transformer.wte(IDS)
    for b, tokens in enumerate(IDS.tolist()):
        for t, token in enumerate(tokens):
            one, two = (tokens[t - n] if t >= n else 0 for n in (1, 2))
            expected[b, t] += pairs[(36313 * token + one) % 8191]
            expected[b, t] += triples[(36313 * (36313 * token + one) + two) % 8191]
    assert torch.allclose(seen[0], expected, atol=1e-6) and torch.allclose(seen[1], expected[:, :1], atol=1e-6)


def test_ngram_embeddings_the_tables_are_adamws():
    """The embeddings' group, with their decay: Muon would make rows that no token has met as long as the others."""
    model = tiny("ngram_embeddings")
    groups = model.configure_optimizers(lr=1e-3, muon_lr=2e-3, weight_decay=0.1).param_groups
    assert [(group["max_lr"], group["weight_decay"]) for group in groups] == [(2e-3, 0.1), (1e-3, 0.0), (1e-3, 0.1)]
    assert {id(p) for p in groups[2]["params"]} == {id(table.weight) for table in (
        model.lm_head, model.pairs, model.triples)}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("flags, heads", [([], (2, 1, 32)), (["--kv-heads", "2"], (2, 2, 32)),
                                          (["--kv-heads", "1", "--head-size", "48"], (2, 1, 48))])
def test_grouped_query_attention_the_flags_of_the_heads(flags, heads):
    """By default half as many keys and values as queries."""
    module = rung("grouped_query_attention")
    model = module.GPT(module.model_config(module.parse_args(["--model", "tiny", *flags]), 257))
    assert (model.config.n_head, model.config.n_kv_head, model.config.head_size) == heads
    assert model.transformer.h[0].attn.c_attn.weight.shape == ((heads[0] + 2 * heads[1]) * heads[2], 64)
