"""Up to trapezoid_lr the model is GPT-2, from swiglu on Qwen3: against transformers' models and closed-form counts.

What the parts of the later ones are, test_transformer.py shows.
"""
import shutil
from pathlib import Path

import pytest
import torch
from load_script import ROOT, load_module, rung, rungs_that_change, tiny
from saved_models import saved_model
from token_folders import edit_json
from torch.nn import functional as F

from data import vocabulary
from ladder.rungs.list import BY_LABEL

OTHER_MODELS = rungs_that_change("CausalSelfAttention", "MLP", "Block", "GPT", "GPTConfig")  # than the one before
GPT2 = [label for label in OTHER_MODELS if BY_LABEL[label].exports_to == "gpt2"]
QWEN3 = [label for label in OTHER_MODELS if BY_LABEL[label].exports_to == "qwen3"]
QWEN3 += ["frequency_prior", "ngram_embeddings"]  # what they add starts at zero
SIZES = {  # {--model: (layers, heads, width, parameters)}: of the last four as OpenAI released them
    "tiny": (2, 2, 64, None), "mini": (6, 3, 192, None), "small": (6, 6, 384, None),
    "gpt2": (12, 12, 768, 124_439_808), "gpt2-medium": (24, 16, 1024, 354_823_168),
    "gpt2-large": (36, 20, 1280, 774_030_080), "gpt2-xl": (48, 25, 1600, 1_557_611_200),
}


@pytest.mark.parametrize("label", ["1", "rope", "grouped_query_attention"])  # whose model_config is their own
def test_the_sizes_are_those_of_the_released_models(label):
    module = rung(label)
    assert module.MODELS.keys() == SIZES.keys()
    for name, (*shape, n_parameters) in SIZES.items():
        config = module.model_config(module.parse_args(["--model", name]), 50257)
        assert [config.n_layer, config.n_head, config.n_embd, config.block_size] == [*shape, 1024]
        if label == "1" and n_parameters:
            with torch.device("meta"):
                assert sum(p.numel() for p in module.GPT(config).parameters()) == n_parameters


def test_the_first_weights():
    """Matrices N(0, 0.02), gains 1, biases 0. What later rungs change, their exercises and test_transformer.py see."""
    module = rung("0")
    model = module.GPT(module.GPTConfig(vocab_size=1024, n_layer=3, n_head=4, n_embd=128))
    for name, weight in model.named_parameters():
        mean, std = (0.0, 0.02) if weight.dim() == 2 else (float("bias" not in name), 0.0)
        assert weight.mean().item() == pytest.approx(mean, abs=1e-3), name
        assert weight.std().item() == pytest.approx(std, rel=0.03), name


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A randomly initialized transformers Qwen3 of the tiny model's shape; no weight is left at a trivial value."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=192, vocab_size=257, max_position_embeddings=128, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("hf") / "qwen3-random"
    model.save_pretrained(folder)
    vocabulary.of_bytes().to_transformers().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def truth(hf_folder, qwen3):
    """Token ids, targets, and for each folder the logits of transformers' own model."""
    from transformers import AutoModelForCausalLM

    x, y = torch.randint(0, 257, (2, 2, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = {folder: AutoModelForCausalLM.from_pretrained(folder).eval()(x).logits
                  for folder in (hf_folder, qwen3)}
    assert all(each.std() > 0.1 for each in logits.values())  # the weights are not trivial
    return x, y, logits


def converted(source, label, path):
    """The model of a rung's script that convert.py makes of a Hugging Face folder, in the new file `path`."""
    load_module(ROOT / "convert.py").main([str(source), str(path), "--script", BY_LABEL[label].file])
    return saved_model(rung(label), path)


@pytest.mark.parametrize("label", [*GPT2, *QWEN3])
@torch.no_grad()
def test_logits_and_loss_equal_hugging_face(label, hf_folder, qwen3, truth, tmp_path):
    x, y, logits = truth
    folder = qwen3 if label in QWEN3 else hf_folder
    model = converted(folder, label, tmp_path / "model.pt")
    found, expected = model(x), logits[folder]
    other = f"{label} is not transformers' {BY_LABEL[label].exports_to}: exports_to=None in ladder/rungs/list.py?"
    assert found.shape == (2, 128, 257) and model(x, y).shape == ()
    assert torch.allclose(found, expected, rtol=0, atol=1e-4), other
    assert torch.allclose(model(x, y), F.cross_entropy(expected.flatten(0, 1), y.flatten()), rtol=0, atol=1e-4)


@pytest.mark.parametrize("label", ["rope", "qk_norm", "ngram_embeddings"])
def test_the_future_is_hidden(label):
    """Also where transformers has no such model."""
    model = tiny(label)
    for weight in model.state_dict().values():
        if weight.abs().max() == 0:  # a part that starts at zero would hide what it does
            torch.nn.init.normal_(weight, std=0.02)
    x = torch.arange(16)[None]
    with torch.no_grad():
        before, after = model(x), model(torch.where(x < 8, x, x + 9))
    assert torch.allclose(before[:, :8], after[:, :8], atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], atol=1e-3)


@pytest.mark.parametrize("label", ["qk_norm", "mup"])
def test_what_a_rung_adds_leaves_the_other_weights_as_they_were(label):
    """Where the losses do not show it: test_train.py and test_transformer.py see the other rungs' weights."""
    before, after = tiny(BY_LABEL[label].start.label).state_dict(), tiny(label).state_dict()
    assert before.keys() < after.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.fixture
def refusal(hf_folder, qwen3, tmp_path):
    """refusal(kind, label, **changes): the line with which convert.py refuses the rung a changed "gpt2" or "qwen3"."""

    def refuse(kind, label, damage=lambda folder: None, **changes):
        folder = shutil.copytree(hf_folder if kind == "gpt2" else qwen3, tmp_path / "folder", dirs_exist_ok=True)
        edit_json(folder / "config.json", **changes)
        damage(folder / "model.safetensors")
        with pytest.raises(SystemExit, match=rf"^error: {folder}: [^\n]*$") as stop:
            converted(folder, label, tmp_path / "refused.pt")
        assert not (tmp_path / "refused.pt").exists()
        return stop.value.code

    return refuse


@pytest.mark.parametrize("kind, name, value", [
    ("gpt2", "activation_function", "relu"), ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "layer_norm_epsilon", 1e-6), ("gpt2", "n_inner", 48),
    ("qwen3", "num_key_value_heads", 1), ("qwen3", "head_dim", 64), ("qwen3", "hidden_act", "gelu"),
    ("qwen3", "sliding_window", 64),
    ("qwen3", "rms_norm_eps", 1e-5), ("qwen3", "tie_word_embeddings", False), ("qwen3", "attention_bias", True),
    ("qwen3", "rope_parameters", {"rope_type": "default", "rope_theta": 1_000_000}),
])
def test_variants_are_refused(kind, name, value, refusal):
    """By their configuration, before an 8B model is loaded: most of them would load, and compute something else."""
    changes = {name: value, "use_sliding_window": True} if name == "sliding_window" else {name: value}
    assert f"its {name} is " in refusal(kind, "0" if kind == "gpt2" else "swiglu", Path.unlink, **changes)


def test_other_kinds_of_models_are_refused(refusal, capfd):
    """With the rungs that they fit; without transformers' tables of missing weights."""
    capfd.readouterr()
    assert "neither a GPT-2 nor a Qwen3" in refusal("gpt2", "0", model_type="bert", architectures=["BertForMaskedLM"])
    for label in ("0", "10", "qk_norm"):
        assert "a Qwen3; it fits swiglu and what follows it" in refusal("qwen3", label)
    assert "a GPT-2; it fits rung 10 and scripts before rope" in refusal("gpt2", "swiglu")
    assert capfd.readouterr() == ("", "")
