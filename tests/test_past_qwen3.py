"""Past Qwen3: what rungs 30 and up add to the model, in plain Python, and that they start where rung 24 does."""
import itertools

import numpy as np
import pytest
import torch
from conftest import ROOT, converted, load_module, losses, new_gpt, rung, train
from torch.nn import functional as F

PRIOR, N_GRAMS = "30", "31"
PAST = [PRIOR, N_GRAMS]
FLAGS = ("-B", 1, "-T", 16, "--total-batch", 32, "--steps", 6, "--checkpoint-every", 2, "--val-every", 0)


def tiny(label):
    torch.manual_seed(0)
    return new_gpt(rung(label)).eval()


IDS = torch.randint(0, 50257, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("label", PAST)
@torch.no_grad()
def test_at_first_the_model_is_rung_24s(label):
    """Bit by bit, with the same embedding and seed: what is new starts at zero, after everything else is drawn."""
    old, new = tiny("24"), tiny(label)
    new.lm_head.weight.copy_(old.lm_head.weight)
    for model in (old, new):
        for block in model.transformer.h:  # they start at zero, too, and would hide the blocks
            torch.nn.init.normal_(block.attn.c_proj.weight, generator=torch.Generator().manual_seed(1))
    assert torch.equal(old(IDS), new(IDS))
    assert new.state_dict().keys() > old.state_dict().keys()


def test_30_the_prior_is_counted():
    """Of 3 a, 1 b and no c: their shares, with 0.1 added to each count."""
    shares = rung(PRIOR).count_log_frequencies(np.frombuffer(b"abaa", dtype=np.uint8), 384).exp()
    assert shares.sum() == pytest.approx(1)
    assert [shares[ord(letter)].item() * (4 + 38.4) for letter in "abc"] == pytest.approx([3.1, 1.1, 0.1])


def test_30_the_first_loss_is_the_entropy_of_the_frequencies(tmp_path, tokens):
    """But for the current token, which a tied model expects again, with a logit of 1 at any width."""
    ids = np.fromfile(tokens / "train.bin", dtype="<u2").astype(int)
    shares = np.bincount(ids, minlength=50304) + 0.1
    logits = np.tile(np.log(shares / shares.sum()), (512, 1))
    logits[np.arange(512), ids[:512]] += 1
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(512), ids[1:513]]
    log = train(rung(PRIOR), tmp_path, tokens, "-B", 1, "-T", 512, "--total-batch", 512, "--steps", 1, "--val-every", 0)
    assert losses(log)[0] == pytest.approx(expected.mean(), abs=0.02)


@pytest.mark.parametrize("bias", [False, True])
def test_30_loss_and_gradients_are_those_of_torch(bias):
    module = rung(PRIOR)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 32, generator=generator, requires_grad=True)
    weight = torch.randn(1024, 32, generator=generator, requires_grad=True)
    prior, targets = bias * torch.randn(1024, generator=generator), torch.randint(0, 1000, (50,), generator=generator)
    ours = module.ChunkedCrossEntropy.apply(x, weight, prior, targets, 1000, 7)
    truth = F.cross_entropy((x @ weight.T + prior)[:, :1000], targets)
    assert torch.allclose(ours, truth, atol=1e-5)
    for got, expected in zip(*(torch.autograd.grad(loss, (x, weight)) for loss in (ours, truth)), strict=True):
        assert torch.allclose(got, expected, atol=1e-6)


@torch.no_grad()
def test_30_sampling_knows_the_prior():
    """The logits that the loss is computed from are those that a sample is drawn from."""
    model = tiny(PRIOR)
    torch.nn.init.normal_(model.log_frequency)
    logits = model(IDS)
    assert torch.allclose(F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()),
                          model(IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()), atol=1e-4)


@pytest.mark.parametrize("label", PAST)
@torch.no_grad()
def test_what_is_new_takes_part_and_no_token_sees_a_later_one(label):
    model = tiny(label)
    before = model(IDS)
    for name, weight in model.state_dict().items():
        if name not in tiny("24").state_dict():
            torch.nn.init.normal_(weight)
            assert not torch.allclose(model(IDS), before), name
    changed = IDS.clone()
    changed[:, 8:] = 7
    assert torch.allclose(model(IDS)[:, :8], model(changed)[:, :8], atol=1e-5)
    assert not torch.allclose(model(IDS)[:, 8:], model(changed)[:, 8:], atol=1e-2)


class Embedded(Exception):
    """Carries what the first block gets."""


def embedded(model, ids):
    """The input of the first block, (B, T, C)."""
    def stop(block, inputs):
        raise Embedded(inputs[0])

    with model.transformer.h[0].register_forward_pre_hook(stop), pytest.raises(Embedded) as caught:
        model(ids)
    return caught.value.args[0]


@torch.no_grad()
def test_31_one_token_is_enough():
    """As sample.py begins without a prompt."""
    model = tiny(N_GRAMS)
    for table in model.n_grams:
        torch.nn.init.normal_(table.weight)
    assert torch.allclose(model(IDS[:, :1])[:, 0], model(IDS)[:, 0], atol=1e-5)


@torch.no_grad()
def test_31_rows_of_pairs_and_triples():
    """The rows that a loop over the tokens finds with Python's integers."""
    model = tiny(N_GRAMS)
    pairs, triples = model.n_grams
    for table in model.n_grams:
        torch.nn.init.normal_(table.weight)
    expected = model.transformer.wte(IDS)
    for b, tokens in enumerate(IDS.tolist()):
        for t, token in enumerate(tokens):
            one, two = (tokens[t - n] if t >= n else 0 for n in (1, 2))
            expected[b, t] += pairs.weight[(36313 * token + one) % 8191]
            expected[b, t] += triples.weight[(36313 * (36313 * token + one) + two) % 8191]
    assert torch.allclose(embedded(model, IDS), expected, atol=1e-6)


def test_31_the_hash_spreads_the_pairs_of_real_text(real_text):
    """Close to what random rows would do: of n pairs in r rows r * (1 - (1 - 1/r)^n) are used."""
    text = real_text.encode()
    pairs = set(itertools.pairwise(text))
    used = {(36313 * token + before) % 8191 for before, token in pairs}
    assert len(used) > 0.9 * 8191 * (1 - (1 - 1 / 8191) ** len(pairs)), (len(used), len(pairs))


def test_31_the_tables_are_adamws():
    """The embeddings' group, with their decay: Muon would make rows that no token has met as long as the others."""
    model = tiny(N_GRAMS)
    matrices, others, embeddings = (group["params"] for group in model.configure_optimizers(0.1).param_groups)
    assert {id(p) for p in model.n_grams.parameters()} <= {id(p) for p in embeddings}
    assert sum(map(len, (matrices, others, embeddings))) == len(list(model.parameters()))


@torch.no_grad()
def test_a_qwen3_is_the_start_and_not_the_end(tmp_path, tokens):
    """Converted for a rung it gives the same logits; as it is it does not fit, and what comes out is no Qwen3."""
    convert = load_module(ROOT / "convert.py").main
    with torch.enable_grad():
        train(rung("24"), tmp_path, tokens, *FLAGS, "--save", tmp_path / "24.pt")
    convert([str(tmp_path / "24.pt"), str(tmp_path / "hf")])
    truth = tiny("24")
    truth.load_state_dict(torch.load(tmp_path / "24.pt", weights_only=True)["model"])
    for label in PAST:
        file = tmp_path / f"{label}.pt"
        assert torch.allclose(converted(tmp_path / "hf", label, file)(IDS), truth(IDS), rtol=0, atol=1e-5)
        with pytest.raises(SystemExit, match="^error: --pretrained: not a model of this script; rung_24_zero_init.py "):
            train(rung(label), tmp_path / label, tokens, *FLAGS, "--pretrained", tmp_path / "24.pt")
        with pytest.raises(SystemExit, match=f"^error: {file}: "):
            convert([str(file), str(tmp_path / "no")])
        assert not (tmp_path / "no").exists()


def test_the_last_one_resumes_bit_by_bit(tmp_path, tokens):
    whole = train(rung(PAST[-1]), tmp_path / "whole", tokens, *FLAGS)
    module, steps = rung(PAST[-1]), []
    step = module.Log.step

    def crashing_step(self, *args, **more):
        steps.append(args)
        if len(steps) == 5:
            raise KeyboardInterrupt
        step(self, *args, **more)

    module.Log.step = crashing_step
    with pytest.raises(KeyboardInterrupt):
        train(module, tmp_path / "parts", tokens, *FLAGS)
    resumed = train(rung(PAST[-1]), tmp_path / "parts", tokens, *FLAGS, "--resume")
    assert losses(resumed) == losses(whole)
