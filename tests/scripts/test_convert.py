"""convert.py and sample.py: the same model in transformers' hands, there and back; its text."""
import io
import json
import logging
import re
import runpy
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from damaged_files import Attack, cut_in_half
from load_script import ROOT, load_module, new_gpt, rung, rungs_that_change
from run_script import train
from safetensors.torch import load_file, save_file
from saved_models import assert_same_weights, save_as_from_a_gpu, saved_model
from token_folders import NEEDS_GPT2, data_with, edit_json

from data import vocabulary
from ladder.rungs.list import BY_LABEL

BYTES = vocabulary.of_bytes()
PROMPT = "\0 The value of an object"  # the id 0 must not be taken for padding
# Untied, padded, without a cache; where the type in transformers or the shape's fields change, and without a type.
LABELS = ["0", "10", "rope", *rungs_that_change("GPTConfig")[1:], "frequency_prior", "qk_norm"]
NEITHER = [label for label in LABELS if BY_LABEL[label].exports_to is None]


def save(label, path, tokenizer=BYTES):
    """A model's file of a rung's script; no weight is at a trivial value."""
    module = rung(label)
    torch.manual_seed(0)
    model = new_gpt(module, vocab_size=tokenizer.vocab_size)
    for weight in model.state_dict().values():
        weight.add_(torch.randn_like(weight), alpha=0.2)
    meta = {"tokenizer": tokenizer.name, "tokenizer_json": tokenizer.json, "end_of_text": tokenizer.end_of_text}
    module.save_model(path, model, SimpleNamespace(meta=meta, T=32), 1)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{rung: model's file}."""
    folder = tmp_path_factory.mktemp("saved")
    return {label: save(label, folder / f"{label}.pt") for label in LABELS}


@pytest.fixture
def gpt2(hf_folder, tmp_path):
    """A Hugging Face folder of a GPT-2 with random weights, of byte tokens, that a test may change."""
    return shutil.copytree(hf_folder, tmp_path / "gpt2")


@pytest.fixture
def convert():
    return load_module(ROOT / "convert.py")


@pytest.fixture
def sample(capsys):
    """sample.py as a function of its command line: what it prints."""
    module = load_module(ROOT / "sample.py")

    def text(*flags):
        capsys.readouterr()
        module.main([*map(str, flags), "--device", "cpu"])
        return capsys.readouterr().out

    text.module = module
    return text


@pytest.fixture
def refusals(convert, sample, tmp_path):
    """refusals(model): the lines in which convert.py and sample.py refuse it."""
    def lines(model):
        destination = tmp_path / ("out" if str(model).endswith(".pt") else "out.pt")
        with pytest.raises(SystemExit) as by_convert:
            convert.main([str(model), str(destination)])
        with pytest.raises(SystemExit) as by_sample:
            sample(model)
        assert not destination.exists()
        return [by_convert.value.code, by_sample.value.code]

    return lines


@pytest.fixture
def numbers(monkeypatch):
    """Let sample.py print token ids: most tokens are no bytes."""
    monkeypatch.setattr(vocabulary.Bytes, "decode", lambda self, ids: "".join(f"{i} " for i in ids))


def changed(path, target, **changes):
    """The same model's file with other contents, as written on a GPU."""
    save_as_from_a_gpu({**torch.load(path, weights_only=True), **changes}, target)
    return target


@pytest.fixture(scope="module", params=["0", "10", "swiglu"])
def exported(request, tmp_path_factory, real_text):
    """A rung's model, of a GPT-2 or a Qwen3, as a file and as a Hugging Face folder."""
    text = "naïve 日本語 🙂 's . , ! \r\n" + real_text[:20_000]
    tokenizer = vocabulary.trained([text], 300) if request.param == "swiglu" else BYTES
    folder = tmp_path_factory.mktemp("exported")
    path = save(request.param, folder / "model.pt", tokenizer)
    load_module(ROOT / "convert.py").main([str(path), str(folder / "hf")])
    return SimpleNamespace(label=request.param, text=text, tokenizer=tokenizer, path=path, folder=folder / "hf",
                           x=torch.tensor([tokenizer.encode(text)[:64].tolist()]))


@torch.no_grad()
def test_the_model_of_a_folder(exported):
    """Its logits, and of the configuration what they do not show."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exported.folder).eval()
    logits, expected = model(exported.x).logits, saved_model(rung(exported.label), exported.path)(exported.x)
    assert logits.shape == expected.shape
    assert torch.allclose(logits, expected, atol=1e-4 * expected.abs().max())
    config, end = model.config, exported.tokenizer.end_of_text
    assert (config.model_type, config.max_position_embeddings) == (BY_LABEL[exported.label].exports_to, 1024)
    assert config.tie_word_embeddings is BY_LABEL[exported.label].tied
    assert config.bos_token_id == config.eos_token_id == model.generation_config.eos_token_id == end
    shares = [value for name, value in config.to_dict().items() if name in (
        "embd_pdrop", "resid_pdrop", "attn_pdrop", "attention_dropout")]
    assert set(shares) == {0.0}


def test_the_tokenizer_of_a_folder(exported):
    from transformers import AutoTokenizer

    text, end = exported.text, exported.tokenizer.end_of_text
    ids = exported.tokenizer.encode(text).tolist()
    theirs = AutoTokenizer.from_pretrained(exported.folder)
    assert theirs.encode(text) == ids and theirs.decode(ids) == text
    assert theirs.encode("<|endoftext|>") == [end] == [theirs.bos_token_id] == [theirs.eos_token_id]
    again = vocabulary.from_hugging_face(str(exported.folder))
    assert again.encode(text).tolist() == ids and again.end_of_text == end


def test_the_text_of_a_folder(exported, sample):
    from transformers import pipeline

    generate = pipeline("text-generation", model=str(exported.folder))
    piped = generate("日本", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert len(piped) > 4
    flags = ("--prompt", "日本", "--temperature", 0, "--max-new-tokens", 20)
    assert sample(exported.path, *flags) == sample(exported.folder, *flags) == f"{piped}\n"


@torch.no_grad()
def test_a_folder_becomes_the_file_that_it_was(exported, convert, tmp_path):
    """Twice the same one, padding included; with exactly what --save writes."""
    module = rung(exported.label)
    for name in ("back.pt", "again.pt"):
        convert.main([str(exported.folder), str(tmp_path / name), "--script", BY_LABEL[exported.label].file])
    back, expected = saved_model(module, tmp_path / "back.pt"), saved_model(module, exported.path)
    assert torch.equal(back(exported.x), expected(exported.x))
    assert_same_weights(tmp_path / "back.pt", tmp_path / "again.pt")
    ours, theirs = (torch.load(path, weights_only=True) for path in (exported.path, tmp_path / "back.pt"))
    assert list(theirs) == list(ours)


@pytest.mark.parametrize("heads", [(32, 2), (16, 4)])
def test_a_published_qwen3_becomes_a_rungs_start_and_its_checkpoint_comes_back(heads, convert, sample, tmp_path):
    """A longer context, a larger base of RoPE, more rows than its tokenizer has tokens; with shared heads or not."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        head_dim=heads[0], num_key_value_heads=heads[1], max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=256, eos_token_id=256, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000}))
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = vocabulary.of_bytes()
    tokenizer.to_transformers().save_pretrained(tmp_path / "theirs")
    convert.main([str(tmp_path / "theirs"), str(tmp_path / "theirs.pt")])

    assert torch.load(tmp_path / "theirs.pt", weights_only=True)["config"]["block_size"] == 2048
    data = data_with(tokenizer, "To be, or not to be? " * 999, tmp_path / "data")
    train(rung("grouped_query_attention"), tmp_path, data, "-T", 64, "--total-batch", 64, "--steps", 3, "--max-lr", 0,
          "--muon-lr", 0, "--pretrained", tmp_path / "theirs.pt")
    path = next((tmp_path / "checkpoints").glob("step_*.pt"))
    assert sample(path, "--prompt", "To be", "--max-new-tokens", 8).startswith("To be")
    convert.main([str(path), str(tmp_path / "mine")])
    x = torch.randint(0, 257, (1, 32))
    with torch.no_grad():
        expected = theirs(x).logits
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "mine").eval()(x).logits
    assert back.shape == (1, 32, 257)
    assert torch.allclose(back, expected[..., :257], atol=1e-5)


@torch.no_grad()
def test_mup_the_factor_of_the_logits_goes_into_the_last_norms_gains(convert, tmp_path):
    """There and back; with a width of 64 it is 2."""
    from transformers import AutoModelForCausalLM

    path, x = save("mup", tmp_path / "model.pt"), torch.randint(0, 257, (1, 32))
    expected = saved_model(rung("mup"), path)(x)
    convert.main([str(path), str(tmp_path / "hf")])
    assert torch.allclose(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(x).logits, expected, atol=1e-4)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "back.pt"), "--script", BY_LABEL["mup"].file])
    back = saved_model(rung("mup"), tmp_path / "back.pt")
    assert back.logit_scale == 2 and torch.allclose(back(x), expected, atol=1e-4)


def test_a_gpt2_without_a_tokenizer_has_gpt_2s_tokens(convert, tmp_path, capsys):
    """As a Trainer saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8)).save_pretrained(tmp_path / "hf")
    convert.main([str(tmp_path / "hf"), str(tmp_path / "model.pt")])
    assert "taken for GPT-2's" in capsys.readouterr().err
    assert torch.load(tmp_path / "model.pt", weights_only=True)["tokenizer"] == "gpt2"


def edit_weights(folder, **changes):
    """Change weights of a folder."""
    weights = load_file(folder / "model.safetensors") | changes
    save_file({name: w for name, w in weights.items() if w is not None}, folder / "model.safetensors", {"format": "pt"})


def add_a_token(folder):
    tokenizer = BYTES.to_transformers()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("damage, reason", [
    (lambda folder: edit_json(folder / "config.json", n_layer=1), "its configuration has no place for its "),
    (lambda folder: edit_json(folder / "config.json", vocab_size=300), "(257, 64), its config.json says (300, 64)"),
    (lambda folder: cut_in_half(folder / "config.json"), "config.json"),
    (lambda folder: (folder / "adapter_config.json").touch(), "a LoRA adapter: merge it"),
    (lambda folder: cut_in_half(folder / "model.safetensors"), "cannot be loaded ("),
    (lambda folder: edit_weights(folder, **{"transformer.ln_f.bias": None}), "it lacks weights"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
    (add_a_token, "its tokenizer has 258 tokens, more than the model, 257"),
])
def test_damaged_folders_are_refused(damage, reason, gpt2, refusals):
    """And those whose weights, configuration and tokenizer disagree."""
    damage(gpt2)
    assert all(f"error: {gpt2}: " in line and reason in line for line in refusals(gpt2))


def test_embeddings_that_are_untied_whatever_the_configuration_says(convert, gpt2, tmp_path):
    """The weights are what was trained. baseline.py has room for both."""
    from transformers import AutoModelForCausalLM

    edit_weights(gpt2, **{"lm_head.weight": torch.randn(257, 64)})
    for tied in (False, True):
        edit_json(gpt2 / "config.json", tie_word_embeddings=tied)
        with pytest.raises(SystemExit, match=f"^error: {gpt2}: .*untied.*; .*baseline.py"):
            convert.main([str(gpt2), str(tmp_path / "no.pt")])
    convert.main([str(gpt2), str(tmp_path / "model.pt"), "--script", "baseline.py"])
    x = torch.randint(0, 257, (1, 32))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(gpt2).eval()(x).logits
        assert torch.allclose(saved_model(rung("0"), tmp_path / "model.pt")(x), expected, atol=1e-4)


@pytest.mark.parametrize("from_folder, destination, why", [
    (False, "", "exists already"), (False, "model.pt", "becomes a folder"), (False, "nowhere/model", "its folder"),
    (True, "model", "becomes a file")])
def test_where_a_model_cannot_go(from_folder, destination, why, saved, gpt2, convert, tmp_path):
    source = gpt2 if from_folder else saved["10"]
    with pytest.raises(SystemExit, match=f"^error: {tmp_path / destination}: .*{why}.*; "):
        convert.main([str(source), str(tmp_path / destination)])
    assert list(tmp_path.iterdir()) == [gpt2]


def test_a_writing_that_fails_leaves_nothing(saved, convert, tmp_path, monkeypatch):
    def fail(model, folder):
        assert folder.parent.parent == tmp_path  # of another file system it could not be renamed
        folder.mkdir()
        raise OSError("no space")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", fail)
    with pytest.raises(SystemExit, match=f"^error: {tmp_path}/out: cannot be written .no space.;"):
        convert.main([str(saved["10"]), str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def greedy(label, path, ids, n_new):
    """The tokens that the rung's own model, without a cache, finds likeliest after `ids`."""
    model = saved_model(rung(label), path)
    for _ in range(n_new):
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return [str(i) for i in ids[-n_new:]]


@pytest.mark.parametrize("label", LABELS)
def test_greedy_text_is_that_of_the_rungs_own_model(label, saved, sample, numbers, tmp_path):
    """Also if generate() has a cache. A token that is taken for the end of a text is the last."""
    expected = greedy(label, saved[label], BYTES.encode(PROMPT).tolist(), 20)
    assert len(set(expected)) > 2
    flags = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 20)
    assert sample(saved[label], *flags) == PROMPT + " ".join(expected) + " \n"
    path = changed(saved[label], tmp_path / "model.pt", end_of_text=int(expected[8]))
    stopped = expected[: expected.index(expected[8]) + 1]
    assert sample(path, *flags).removeprefix(PROMPT).split() == stopped


def test_sampling_flags(saved, sample, numbers):
    def text(*flags):
        return sample(saved["10"], "--max-new-tokens", 8, *flags)

    likeliest = text("--temperature", 0)
    assert likeliest.split() == greedy("10", saved["10"], [256], 8)  # without a prompt: the start of a document
    first = text("--seed", 1, "--top-k", 50)
    assert first == text("--seed", 1, "--top-k", 50) != text("--seed", 2, "--top-k", 50)
    assert text("--top-k", 1) == text("--top-p", 1e-6) == text("--temperature", 0.001) == likeliest
    assert len({text("--temperature", 0.8), text("--temperature", 5), likeliest}) == 3
    one, two = text("--num-samples", 2).split("--- sample ")[1:]
    assert one.split()[3:] != two.split()[3:]  # the seed is set once, before all of them


def test_without_top_k_any_token_may_come(saved, sample, numbers):
    """At a temperature where all are alike: generate()'s own default is the 50 likeliest."""
    model = saved_model(rung("10"), saved["10"])
    likeliest = model(torch.tensor([BYTES.encode(PROMPT).tolist()]))[0, -1].topk(50).indices.tolist()
    flags = ("--prompt", PROMPT, "--temperature", 999, "--max-new-tokens", 1, "--seed")
    drawn = {int(sample(saved["10"], *flags, seed).removeprefix(PROMPT)) for seed in range(5)}
    assert not drawn <= set(likeliest)


def test_of_a_folders_generation_config_only_the_ends_of_a_text_are_taken(gpt2, sample):
    from transformers import AutoModelForCausalLM

    def texts(**generation_config):
        (gpt2 / "generation_config.json").write_text(json.dumps(generation_config))
        flags = ("--prompt", "To be", "--max-new-tokens", 20, "--top-k", 50, "--temperature")
        return [sample(gpt2, *flags, temperature) for temperature in (0, 1)]

    tokenizer = vocabulary.of_bytes()
    x = torch.tensor([tokenizer.encode("To be").tolist()])
    model = AutoModelForCausalLM.from_pretrained(gpt2)
    ids = model.generate(x, do_sample=False, max_new_tokens=20, eos_token_id=256)[0].tolist()
    greedy, drawn = texts(eos_token_id=256)
    assert greedy == tokenizer.decode(ids) + "\n" != drawn
    assert texts(num_beams=4, repetition_penalty=5.0, min_p=0.9) == [greedy, drawn]
    shorter = ids[: ids.index(ids[12], 5) + 1]
    assert texts(eos_token_id=[256, ids[12]])[0] == tokenizer.decode(shorter) + "\n"


def test_special_tokens_in_a_prompt(sample):
    """Each is one token, unlike in a training text; without any, or with none known, the prompt is ordinary text."""
    chat = vocabulary.trained(["one two " * 9], 270).tokenizer
    chat.add_special_tokens(["<|im|>", "<|im|>2"])
    tokenizer, encode_prompt = vocabulary.Tokenizer("chat", chat.to_str(), 0), sample.module.encode_prompt
    one, two = tokenizer.encode("one").tolist(), tokenizer.encode(" two").tolist()
    ids = [*tokenizer.special_tokens.values()]
    assert len(ids) == 3 and encode_prompt(tokenizer, "<|im|>one<|im|>2 two<|endoftext|>") == [
        tokenizer.special_tokens["<|im|>"], *one, tokenizer.special_tokens["<|im|>2"], *two, 0]
    tokenizer.special_tokens = {}
    assert encode_prompt(tokenizer, "one two") == one + two and encode_prompt(BYTES, "<|endoftext|>") == [256]


def test_how_long_prompt_and_text_may_be(saved, sample, capsys):
    """The longest sequence cuts the prompt at its front; beyond the training's -T text is worse."""
    fit_prompt = sample.module.fit_prompt
    assert fit_prompt([*range(10)], 6, 16) == [*range(10)] and fit_prompt([*range(10)], 13, 16) == [7, 8, 9]
    assert "first 7 tokens" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="^error: --max-new-tokens 1024: .* 1024; give fewer"):
        sample(saved["10"], "--max-new-tokens", 1024)
    for n, warned in ((31, False), (32, True)):
        sample.module.main([str(saved["10"]), "--prompt", "x", "--device", "cpu", "--max-new-tokens", str(n)])
        assert ("sequences of 32 tokens" in capsys.readouterr().err) is warned


@pytest.mark.parametrize("flag, value", [
    ("--top-p", 0), ("--top-p", 1.5), ("--top-k", -1), ("--temperature", -1), ("--temperature", 1e-40),
    ("--num-samples", 0), ("--max-new-tokens", 0)])
def test_values_out_of_range(flag, value, sample):
    with pytest.raises(SystemExit) as stop:
        sample("model.pt", flag, value)
    assert stop.value.code == 2  # argparse's


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_model_s_file(saved, refusals, tmp_path):
    """One line that names the file, and what is wrong with it; its code does not run."""
    from torch.distributed import checkpoint

    (tmp_path / "text.pt").write_text("not a checkpoint")
    shutil.copy(saved["10"], tmp_path / "cut.pt")
    cut_in_half(tmp_path / "cut.pt")
    torch.save({"model": {}, "optimizer": {}}, tmp_path / "foreign.pt")
    changed(saved["10"], tmp_path / "attack.pt", T=Attack(tmp_path / "attacked"))
    changed(saved["10"], tmp_path / "tokenizer.pt", tokenizer="mine", tokenizer_json="{")
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "sharded/step_0000001", no_dist=True)
    for folder in ("checkpoints", "lfs"):
        (tmp_path / folder).mkdir()
    for name in ("step_0000001.pt", "step_0000020.pt", "step_keep.pt"):
        shutil.copy(saved["10"], tmp_path / "checkpoints" / name)
    for name in ("lfs/model.safetensors", "lfs.pt"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    save_file({"weight": torch.ones(2)}, tmp_path / "only.safetensors")
    for name, reason in [
        ("lfs.pt", "git lfs pull"), ("lfs", "/model.safetensors: .*git lfs pull"), ("text.pt", "damaged"),
        ("only.safetensors", "give the folder"), ("nowhere.pt", "no such file"), ("nowhere", "no such file or folder"),
        ("cut.pt", "damaged"), ("foreign.pt", "it has no 'script'"), ("attack.pt", "damaged"),
        ("tokenizer.pt", "mine is damaged"), ("sharded", "--save FILE"), ("sharded/step_0000001", "--save FILE"),
        ("checkpoints", f"give {tmp_path}/checkpoints/step_0000020.pt"),
    ]:
        for line in refusals(tmp_path / name):
            assert re.fullmatch(f"error: {tmp_path / name}.*{reason}.*", line) and "; " in line, line
            assert "weights_only" not in line
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("script", ["this.py", "../baseline.py", "sample.py", "beyond/x.py"])
def test_a_file_names_a_rung_and_no_other_module(script, saved, sample, tmp_path):
    sys.modules.pop("this", None)
    path = changed(saved["qk_norm"], tmp_path / "model.pt", script=script)
    with pytest.raises(SystemExit, match=f"^error: {path}: {script} is not a script of the ladder"):
        sample(path)
    assert "this" not in sys.modules


@pytest.mark.parametrize("label", NEITHER)
def test_what_has_no_model_in_transformers(label, saved, convert, tmp_path):
    with pytest.raises(SystemExit, match="neither a GPT-2 .* nor a Qwen3"):
        convert.main([str(saved[label]), str(tmp_path / "out")])


@pytest.mark.parametrize("model_type", ["mine", "gpt2"])
def test_a_folder_s_own_code_does_not_run(model_type, gpt2, convert, sample, tmp_path, monkeypatch):
    """Not even for somebody who answers yes when transformers asks; a GPT-2 is loaded without it."""
    (gpt2 / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    edit_json(gpt2 / "config.json", model_type=model_type, auto_map=own)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    said = []
    for program in (convert, sample.module):
        words = [str(tmp_path / "out.pt")] if program is convert else ["--max-new-tokens", "1"]
        try:
            program.main([str(gpt2), *words])
        except SystemExit as stop:
            said.append(stop.code)
    assert ["cannot be loaded (" in line for line in said] == ([True, True] if model_type == "mine" else [])
    assert not (tmp_path / "ran").exists()


def test_a_text_that_the_output_s_encoding_lacks(saved, tmp_path, monkeypatch):
    """On Windows a file takes cp1252."""
    def printed(*words):
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        logging.disable(logging.NOTSET)
        sys.stdout.seek(0)
        return sys.stdout.read()

    assert printed("convert.py", saved["10"], tmp_path / "日本").startswith(f"{tmp_path}/??: ")
    assert printed("sample.py", saved["10"], "--prompt", "日本", "--max-new-tokens", 2, "--num-samples", 2, "--device",
                   "cpu").startswith("--- sample 1 of 2\n??")


def test_a_published_model_in_16_bits_becomes_float32(gpt2, convert, sample, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.bfloat16).save_pretrained(gpt2)
    assert sample.module.load_model(str(gpt2), "cpu")[0].dtype == torch.float32
    convert.main([str(gpt2), str(tmp_path / "model.pt")])
    weights = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@NEEDS_GPT2
def test_a_model_of_gpt2_s_tokens_needs_no_network(sample, convert, tmp_path, monkeypatch):
    """Trained online, sampled on a laptop on a train."""
    monkeypatch.setattr(vocabulary, "KEPT", tmp_path / "kept.txt")
    vocabulary.GPT2()
    monkeypatch.setattr("tiktoken.get_encoding", None)
    path = save("10", tmp_path / "model.pt", vocabulary.GPT2())
    assert sample(path, "--prompt", "Hello", "--max-new-tokens", 4).startswith("Hello")
    convert.main([str(path), str(tmp_path / "hf")])
    assert (tmp_path / "hf" / "tokenizer.json").exists()


@NEEDS_GPT2
def test_a_prompt_that_ends_in_a_blank(saved, sample, tmp_path, capsys):
    """Its last token is rare in training text, where the blank belongs to the next word; not among single bytes."""
    path = save("10", tmp_path / "model.pt", vocabulary.GPT2())
    for model, prompt, warns in ((path, "Once upon a ", True), (path, "Once upon", False), (saved["10"], "a ", False)):
        sample.module.main([str(model), "--prompt", prompt, "--max-new-tokens", "1", "--device", "cpu"])
        assert ("ends in a blank" in capsys.readouterr().err) is warns


def test_the_device_is_the_accelerator_if_there_is_one(sample, monkeypatch):
    for cuda, mps, device in ((False, False, "cpu"), (False, True, "mps"), (True, True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=cuda: there)
        monkeypatch.setattr(torch.mps, "is_available", lambda there=mps: there)
        assert sample.module.parse_args(["model.pt"]).device == device
