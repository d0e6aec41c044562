"""The model of rungs 0 to 19 is GPT-2: checked against transformers' GPT2LMHeadModel and against closed-form counts.

What the later ones are, test_modern.py shows.
"""
import json

import pytest
import torch
from conftest import converted, new_gpt, rung
from torch.nn import functional as F

from ladder.scripts.stages import BY_LABEL

ALL_RUNGS = pytest.mark.parametrize("label", BY_LABEL)
LABELS = list(BY_LABEL)
GPT2 = LABELS[: LABELS.index("20")]
# The rungs whose model may differ from the one before; test_ladder_laws.py holds the others to it.
MODEL = ("CausalSelfAttention", "MLP", "Block", "GPT", "GPTConfig")
OTHER_MODELS = [
    stage.label for stage in BY_LABEL.values()
    if stage.before is None or any(name.split(".")[0] in MODEL for name in stage.may_change)
]
TIED = [label for label in BY_LABEL if label != "0"]
PADDED = TIED[TIED.index("7") :]
OTHER_WEIGHTS = ["0", "1", "4", "7", "20", "21", "22", "23", "24"]


def gpt2_parameters(vocab_size, tied, n_layer=12, n_embd=768, block_size=1024):
    """The closed form, from the shapes in the GPT-2 paper."""
    layer_norm = 2 * n_embd
    attention = n_embd * 3 * n_embd + 3 * n_embd + n_embd * n_embd + n_embd
    mlp = n_embd * 4 * n_embd + 4 * n_embd + 4 * n_embd * n_embd + n_embd
    embeddings = (1 if tied else 2) * vocab_size * n_embd + block_size * n_embd
    return embeddings + n_layer * (2 * layer_norm + attention + mlp) + layer_norm


LATER_PARAMETERS = {  # {rung: what it adds to GPT-2 (124M)}
    "20": -1024 * 768,  # no positions
    "21": -12 * 11 * 768 - 768,  # no biases
    "22": 12 * 2 * 64,  # gains of queries and keys
    "23": 0,  # three matrices of 768 * 2048 instead of two of 768 * 3072
}


@pytest.fixture(scope="module")
def truth(hf_folder):
    """Token ids, targets, and the logits of transformers' own model for them."""
    from transformers import GPT2LMHeadModel

    x, y = torch.randint(0, 50257, (2, 2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = GPT2LMHeadModel.from_pretrained(hf_folder).eval()(x).logits
    assert logits.std() > 0.1  # the weights are not trivial
    return x, y, logits


@pytest.mark.parametrize("label", [label for label in OTHER_MODELS if label in GPT2])
def test_logits_and_loss_equal_hugging_face(label, hf_folder, truth, tmp_path):
    x, y, expected = truth
    model = converted(hf_folder, label, tmp_path / "model.pt")
    with torch.no_grad():
        logits, loss = model(x), model(x, y)
    assert logits.shape == (2, 128, 50257) and loss.shape == ()
    assert torch.allclose(logits, expected, rtol=0, atol=1e-4)
    assert torch.allclose(loss, F.cross_entropy(expected.flatten(0, 1), y.flatten()), rtol=0, atol=1e-4)


@ALL_RUNGS
def test_parameter_count(label):
    module = rung(label)
    with torch.device("meta"):
        model = module.GPT(module.GPTConfig())
    expected = gpt2_parameters(vocab_size=50304 if label in PADDED else 50257, tied=label in TIED)
    expected += sum(change for first, change in LATER_PARAMETERS.items() if label in LABELS[LABELS.index(first) :])
    expected += 2 * 8191 * 768 if label == "31" else 0  # two tables of n-grams
    assert sum(p.numel() for p in model.parameters()) == expected
    assert {"0": 163_037_184, "1": 124_439_808}.get(label, expected) == expected


@pytest.mark.parametrize("name, millions", [
    ("gpt2", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6), ("small", 30.3), ("tiny", 3.4),
])
def test_sizes_of_the_family(name, millions):
    module = rung(1)
    with torch.device("meta"):
        model = new_gpt(module, name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize("label", OTHER_MODELS)
def test_the_future_is_hidden(label):
    module = rung(label)
    torch.manual_seed(0)
    model = module.GPT(module.GPTConfig(vocab_size=128, n_layer=2, n_head=2, n_embd=64))
    x = torch.randint(0, 128, (1, 16))
    changed = x.clone()
    changed[0, 8:] = (x[0, 8:] + 1) % 128
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


@pytest.mark.parametrize("label", [label for label in BY_LABEL if label not in OTHER_WEIGHTS])
def test_neighbours_start_from_the_same_weights(label):
    """Except where the change is about the weights: tying (1), their scale (4, 24), shapes (7) or number (20 to 23).

    Rungs 30 and 31 add some, and draw the others as before, but for rung 30's smaller embedding.
    """
    states = []
    for module in (rung(BY_LABEL[label].before), rung(label)):
        torch.manual_seed(1337)
        states.append(new_gpt(module).state_dict())
    before, after = states
    added = {"30": {"log_frequency"}, "31": {"n_grams.0.weight", "n_grams.1.weight"}}.get(label, set())
    assert after.keys() - before.keys() == added and before.keys() <= after.keys()
    smaller = {name for name in before if not torch.equal(before[name], after[name])}
    assert smaller == ({"lm_head.weight", "transformer.wte.weight"} if label == "30" else set())
    assert all(after[name].std().item() == pytest.approx(1 / 64, rel=0.01) for name in smaller)


def refusal(label, folder):
    """The line with which convert.py refuses to make a folder's model one of the rung."""
    with pytest.raises(SystemExit) as stop:
        converted(folder, label, folder.with_name(f"refused_{label}.pt"))
    assert stop.value.code.startswith(f"error: {folder}: ") and "\n" not in stop.value.code
    assert not folder.with_name(f"refused_{label}.pt").exists()
    return stop.value.code


def copy_with(hf_folder, folder, **changes):
    """A copy of a Hugging Face model with other settings."""
    folder.mkdir()
    for file in hf_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("change", [
    {"activation_function": "relu"}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True},
    {"layer_norm_epsilon": 1e-6},
], ids=lambda change: next(iter(change)))
def test_variants_of_gpt2_are_refused(change, hf_folder, tmp_path):
    """Their weights would load, and compute something else."""
    (name, value), = change.items()
    assert f"its {name} is {value};" in refusal("0", copy_with(hf_folder, tmp_path / "variant", **change))


def test_other_shapes_are_refused(tmp_path):
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    small = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    BertForMaskedLM(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
                    ).save_pretrained(tmp_path / "bert")
    GPT2LMHeadModel(GPT2Config(**small, n_inner=48)).save_pretrained(tmp_path / "narrow")
    for name, reason in [("bert", "neither a GPT-2 nor a Qwen3"), ("narrow", "its n_inner is 48")]:
        assert reason in refusal("0", tmp_path / name)


def test_a_damaged_file_is_refused(hf_folder, tmp_path):
    folder = copy_with(hf_folder, tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    assert "cannot be loaded (" in refusal("0", folder)


def test_untied_weights_need_the_untied_model(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "untied")
    model = converted(tmp_path / "untied", "0", tmp_path / "model.pt")
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    for label in ("1", "10"):
        assert "its embeddings are untied; give --script baseline.py" in refusal(label, tmp_path / "untied")
