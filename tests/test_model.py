"""The model of every rung is GPT-2: checked against transformers' GPT2LMHeadModel and against closed-form counts."""
import json

import pytest
import torch
from conftest import load_module, rung
from torch.nn import functional as F

from ladder.stages import STAGES

ALL_RUNGS = range(len(STAGES))
ids = [stage.name for stage in STAGES]


def gpt2_parameters(vocab_size, tied, n_layer=12, n_embd=768, block_size=1024):
    """The closed form, from the shapes in the GPT-2 paper."""
    layer_norm = 2 * n_embd
    attention = n_embd * 3 * n_embd + 3 * n_embd + n_embd * n_embd + n_embd
    mlp = n_embd * 4 * n_embd + 4 * n_embd + 4 * n_embd * n_embd + n_embd
    embeddings = (1 if tied else 2) * vocab_size * n_embd + block_size * n_embd
    return embeddings + n_layer * (2 * layer_norm + attention + mlp) + layer_norm


@pytest.mark.parametrize("number", ALL_RUNGS, ids=ids)
def test_logits_and_loss_equal_hugging_face(number, hf_folder):
    from transformers import GPT2LMHeadModel

    model = rung(number).GPT.from_pretrained(hf_folder)
    truth = GPT2LMHeadModel.from_pretrained(hf_folder).eval()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 50257, (2, 2, 128), generator=generator)
    with torch.no_grad():
        logits, loss = model(x, y)
        expected = truth(x).logits
    assert expected.std() > 0.1  # the weights are not trivial
    assert torch.allclose(logits[..., :50257], expected, rtol=0, atol=1e-4)
    assert torch.allclose(loss, F.cross_entropy(expected.flatten(0, 1), y.flatten()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("number", ALL_RUNGS, ids=ids)
def test_parameter_count(number):
    module = rung(number)
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig())
    expected = gpt2_parameters(vocab_size=50304 if number >= 7 else 50257, tied=number >= 1)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert {0: 163_037_184, 1: 124_439_808}.get(number, expected) == expected


@pytest.mark.parametrize("name, millions", [("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6)])
def test_sizes_of_the_family(name, millions):
    module = rung(1)
    with torch.device("meta"):
        model = module.GPT(module.MODELS[name])
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("number", ALL_RUNGS, ids=ids)
def test_the_future_is_hidden(number):
    module = rung(number)
    torch.manual_seed(0)
    model = module.GPT(module.MODELS["tiny"])
    x = torch.randint(0, 50257, (1, 16))
    changed = x.clone()
    changed[0, 8:] = torch.randint(0, 50257, (8,))
    with torch.no_grad():
        before, after = model(x)[0], model(changed)[0]
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


@pytest.mark.parametrize("number", ALL_RUNGS, ids=ids)
def test_neighbours_start_from_the_same_weights(number):
    """Except where the change is about the weights: tying (1), their scale (4), the table's shape (7)."""
    if number in (0, 1, 4, 7):
        pytest.skip("this rung changes the weights")
    states = []
    for module in (rung(number - 1), rung(number)):
        torch.manual_seed(1337)
        states.append(module.GPT(module.MODELS["tiny"]).state_dict())
    before, after = states
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_models_are_refused(tmp_path, hf_folder, capsys):
    """A folder whose weights are not GPT-2's, whose activation differs, or whose file is damaged: one line each."""
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(
        tmp_path / "bert"
    )
    for name in ("relu", "damaged"):
        (tmp_path / name).mkdir()
        for file in hf_folder.iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    config = json.loads((hf_folder / "config.json").read_text())
    (tmp_path / "relu" / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    weights = (hf_folder / "model.safetensors").read_bytes()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(weights[:1000])

    gpt = load_module(STAGES[0].path).GPT
    for name in ("bert", "relu", "damaged"):
        with pytest.raises(SystemExit) as stop:
            gpt.from_pretrained(tmp_path / name)
        assert str(stop.value).startswith("error: --pretrained") and "\n" not in str(stop.value)
