"""convert.py and sample.py: the same model in transformers' hands, there and back; the text that it writes."""
import argparse
import json
import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, data_with, load_module, new_gpt, run_command, rung, train

from data import vocabulary
from ladder.scripts.stages import BY_LABEL

GPT2_BYTES = vocabulary.of_bytes("gpt2-bytes")
PROMPT = "! The value of an object"  # "!" has the id 0, which generate() must not take for padding


def save(label, path, tokenizer=GPT2_BYTES):
    """A model's file of a rung's script, which no training has made dull: no weight is at a trivial value."""
    module = rung(label)
    torch.manual_seed(0)
    model = new_gpt(module, vocab_size=tokenizer.vocab_size)
    for weight in model.state_dict().values():
        weight.add_(torch.randn_like(weight), alpha=0.2)
    meta = dict(zip(vocabulary.FIELDS, (tokenizer.name, tokenizer.json, tokenizer.end_of_text), strict=True))
    module.save_model(path, model, SimpleNamespace(meta=meta, T=32), 1)
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{rung: model's file}: untied, tied, padded; neither a GPT-2 nor a Qwen3 (20, 22, 30)."""
    folder = tmp_path_factory.mktemp("saved")
    return {label: save(label, folder / f"{label}.pt") for label in ("0", "1", "10", "20", "22", "23", "30")}


@pytest.fixture
def convert():
    return load_module(ROOT / "convert.py")


@pytest.fixture
def sample(monkeypatch, capsys):
    """sample.py as a function of its command line: what it prints."""
    module = load_module(ROOT / "sample.py")

    def text(*flags):
        capsys.readouterr()
        module.main([*map(str, flags), "--device", "cpu"])
        return capsys.readouterr().out

    text.module = module
    return text


@pytest.fixture
def numbers(monkeypatch):
    """Let sample.py print token ids: most tokens are no bytes, in which the tests' text is written."""
    monkeypatch.setattr(vocabulary.Tokenizer, "decode", lambda self, ids: "".join(f"{i} " for i in ids))


def own_model(label, path):
    """The model of the rung's own GPT class."""
    module = rung(label)
    contents = torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**contents["config"]))
    model.load_state_dict(contents["model"])
    return model.eval()


def changed(path, target, **changes):
    """The same model's file with other contents."""
    torch.save({**torch.load(path, weights_only=True), **changes}, target)
    return target


# There and back


@pytest.mark.parametrize("label, config", [
    *[(label, {"model_type": "gpt2", "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
      for label in ("0", "1", "10")],
    ("23", {"model_type": "qwen3", "max_position_embeddings": 1024, "attention_dropout": 0.0, "rms_norm_eps": 1e-6}),
])
@torch.no_grad()
def test_the_folder_has_the_same_logits_and_so_has_the_way_back(label, config, saved, tmp_path, convert):
    """And in its configuration what logits do not show: dropout, the end of a document."""
    from transformers import AutoModelForCausalLM

    convert.main([str(saved[label]), str(tmp_path / "hf")])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    x = torch.randint(0, 50257, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = own_model(label, saved[label])(x)
    assert expected.shape == (2, 48, 50257)
    assert torch.allclose(theirs(x).logits, expected, atol=1e-4 * expected.abs().max())
    convert.main([str(tmp_path / "hf"), str(tmp_path / "back.pt"), "--script", BY_LABEL[label].file])
    assert torch.equal(own_model(label, tmp_path / "back.pt")(x), expected)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "again.pt"), "--script", BY_LABEL[label].file])
    back, again = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("back.pt", "again.pt"))
    assert all(map(torch.equal, back.values(), again.values()))  # the padding, too
    written, generation = (json.loads((tmp_path / "hf" / name).read_text())
                           for name in ("config.json", "generation_config.json"))
    assert written.items() >= {**config, "bos_token_id": 50256, "eos_token_id": 50256, "vocab_size": 50257}.items()
    assert generation["eos_token_id"] == 50256 and theirs.config.tie_word_embeddings == (label != "0")
    if label == "0":
        for later in ("1", "7", "16"):
            with pytest.raises(SystemExit, match="untied.*--script baseline.py"):
                convert.main([str(tmp_path / "hf"), str(tmp_path / "no.pt"), "--script", BY_LABEL[later].file])


@pytest.mark.parametrize("label, size", [("10", 257), ("23", 300)])
def test_the_tokenizer_of_the_data_goes_all_the_way(label, size, sample, convert, tmp_path, real_text):
    """Bytes or tokens trained on the text itself, then in transformers' hands, then in sample.py's again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    text = "naïve 日本語 🙂 's . , ! \r\n" + real_text[:20_000]
    tokenizer = vocabulary.of_bytes() if size == 257 else vocabulary.trained([text], size)
    path, folder, end = save(label, tmp_path / "model.pt", tokenizer), str(tmp_path / "hf"), tokenizer.end_of_text
    convert.main([str(path), folder])
    theirs, ids = AutoTokenizer.from_pretrained(folder), tokenizer.encode(text).tolist()
    assert theirs.encode(text) == ids and theirs.decode(ids) == text
    assert theirs.encode("<|endoftext|>") == [end] == [theirs.eos_token_id] == [theirs.bos_token_id]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")] == [size, end, end]
    x = torch.tensor([ids[:64]])
    with torch.no_grad():
        logits, expected = AutoModelForCausalLM.from_pretrained(folder).eval()(x).logits, own_model(label, path)(x)
    assert torch.allclose(logits, expected[..., :size], atol=1e-4 * expected.abs().max())
    again = vocabulary.from_hugging_face(folder)  # what prepare.py --tokenizer does with it
    assert again.encode(text).tolist() == ids and again.end_of_text == end

    flags = ("--prompt", "日本", "--temperature", 0, "--max-new-tokens", 20)
    piped = pipeline("text-generation", model=folder)("日本", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert [sample(path, *flags), sample(folder, *flags)] == [f"{piped}\n"] * 2 and len(piped) > 4


def test_a_checkpoint_is_a_model_s_file(convert, sample, tokens, tmp_path):
    train(rung("23"), tmp_path, tokens, "-B", 1, "-T", 32, "--steps", 1, "--val-every", 0)
    path, = (tmp_path / "checkpoints").glob("step_*.pt")
    convert.main([str(path), str(tmp_path / "hf")])
    assert sample(path, "--prompt", PROMPT, "--max-new-tokens", 2).startswith(PROMPT)
    for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.module.main, [])]:
        with pytest.raises(SystemExit, match=f"^error: .*checkpoints: .* give {path}$"):
            main([str(path.parent), *more])


def test_a_conversion_that_fails_leaves_nothing(saved, convert, tmp_path, monkeypatch):
    (tmp_path / "hf.partial").mkdir()  # nor takes what is not its own

    def full_disk(tokenizer):
        raise OSError("No space left on device")

    monkeypatch.setattr(vocabulary.Tokenizer, "to_transformers", full_disk)
    with pytest.raises(SystemExit, match="error: .*hf: .*No space left"):
        convert.main([str(saved["10"]), str(tmp_path / "hf")])
    with pytest.raises(SystemExit, match="error: .*hf.partial: exists already"):
        convert.main([str(saved["10"]), str(tmp_path / "hf.partial")])
    assert os.listdir(tmp_path) == ["hf.partial"]


# The text


@pytest.mark.parametrize("label", ["0", "10", "20", "22", "23", "30"])
@torch.no_grad()
def test_greedy_text_is_that_of_the_rungs_own_model(label, saved, sample, numbers):
    """The rung's own model, without a cache, against generate() with one."""
    model, ids = own_model(label, saved[label]), GPT2_BYTES.encode(PROMPT).tolist()
    for _ in range(20):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert len(set(ids[-20:])) > 5
    text = sample(saved[label], "--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 20)
    assert text == PROMPT + "".join(f"{i} " for i in ids[-20:]) + "\n"


@pytest.mark.parametrize("label", ["10", "22", "23"])
def test_text_stops_at_the_end_of_a_document(label, saved, sample, numbers, tmp_path):
    """A token that the model writes, taken for the end of a text, is the last one."""
    flags = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 20)
    ids = sample(saved[label], *flags).removeprefix(PROMPT).split()
    path = changed(saved[label], tmp_path / "model.pt", end_of_text=int(ids[8]))
    assert sample(path, *flags).removeprefix(PROMPT).split() == ids[: ids.index(ids[8]) + 1] != ids


def test_sampling_flags(saved, sample, numbers):
    def text(*flags):
        return sample(saved["10"], "--max-new-tokens", 8, *flags)

    greedy = text("--temperature", 0)
    assert text("--seed", 1, "--top-k", 50) == text("--seed", 1, "--top-k", 50) != text("--seed", 2, "--top-k", 50)
    assert text("--top-k", 1) == text("--top-p", 1e-6) == text("--temperature", 0.001) == greedy  # there is no choice
    first, second = text("--num-samples", 2).split("--- sample ")[1:]
    assert first.split()[3:] != second.split()[3:]  # the seed is set once, before all of them
    assert len({text("--temperature", 0.8), text("--temperature", 5), greedy}) == 3


def test_how_long_prompt_and_text_may_be(saved, sample, capsys):
    """The longest sequence cuts the prompt at its front; beyond the -T of the training, here 32, text gets worse."""
    fit = sample.module.fit
    assert fit([*range(10)], 5, 16) == fit([*range(10)], 6, 16) == [*range(10)] and not capsys.readouterr().err
    assert fit([*range(10)], 13, longest=16) == [7, 8, 9] and "first 7 tokens" in capsys.readouterr().err
    for label, prompt, new, warned in (("10", "x", 31, ""), ("10", "x", 32, "sequences of 32 tokens"),
                                       ("10", "word " * 300, 5, "first 481 tokens")):
        sample.module.main([str(saved[label]), "--prompt", prompt, "--max-new-tokens", str(new), "--device", "cpu"])
        said = capsys.readouterr().err
        assert warned in said and bool(said) == bool(warned)


@pytest.mark.parametrize("tokenizer", [vocabulary.of_bytes(), vocabulary.trained(["naïve"], 258)])
def test_no_character_is_printed_in_part(tokenizer, sample, monkeypatch, capsys):
    """A model that writes one byte after the other, in scripts with and without blanks; it is asked for a document."""
    text, shown = "naïve 日本語 🙂🙂 ไทย\n\nД \u2028 é", []

    def generate(x, streamer, **_):
        assert x.tolist() == [[tokenizer.end_of_text]]
        streamer.put(x)
        for i in tokenizer.encode(text).tolist():
            streamer.put(torch.tensor([i]))
            shown.append(capsys.readouterr().out)
        streamer.end()

    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1000), generate=generate)
    monkeypatch.setattr(sample.module, "load_model", lambda name, device: (model, tokenizer))
    shown.append(sample("model"))
    assert "".join(shown) == text + "\n" and len([*filter(None, shown)]) > 5


def test_as_programs(saved, tmp_path):
    """From another folder, on a terminal without the characters, for a reader that goes away."""
    flags = "--prompt 日本 --num-samples 9 --max-new-tokens 5 --device cpu | head -c 50"
    words = [sys.executable, ROOT / "sample.py", saved["10"], flags]
    run = run_command("bash", "-c", " ".join(map(str, ["set -o pipefail;", *words])), cwd=tmp_path,
                      PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and run.stdout.startswith("--- sample 1 of 9\n??") and not run.stderr, run.stderr
    run = run_command(sys.executable, "convert.py", saved["10"], tmp_path / "日本", PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "/??: 3,382,080 parameters" in run.stdout, run.stderr


# What is refused


@pytest.mark.parametrize("flag, value, need", [
    ("--top-p", 0, "more than 0"), ("--top-p", 1.5, "at most 1"), ("--top-k", -1, "at least 0"),
    ("--temperature", -1, "0 or"), ("--temperature", "nan", "0 or"), ("--temperature", 1e-40, "0 or"),
    ("--seed", -1, "at least 0"), ("--num-samples", 0, "at least 1"), ("--max-new-tokens", 0, "at least 1"),
    ("--max-new-tokens", 1024, "1024; give fewer"), ("--device", "abacus", "--device cpu"),
])
def test_values_out_of_range(flag, value, need, saved, sample):
    with pytest.raises(SystemExit, match=f"^error: {flag} {value}: .*; .*") as stop:
        sample.module.main([str(saved["10"]), "--device", "cpu", flag, str(value)])
    assert need in stop.value.code


def test_ids_of_one_s_own(sample, tokens, tmp_path):
    """Token files that are no text, of chess moves for example: a tokenizer.json of numbers makes them readable."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = Tokenizer(models.WordLevel({str(number): number for number in range(90)}))
    numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (torch.arange(2000) * 7 % 89).numpy().astype("<u2").tofile(tmp_path / "train.bin")
    meta = {"source": "moves", "tokenizer": "numbers", "vocab_size": 90, "end_of_text": 89, "train_tokens": 2000}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    flags = ("-B", 4, "-T", 16, "--steps", 30, "--save", tmp_path / "model.pt")
    with pytest.raises(SystemExit, match=f"error: --data {tmp_path}: .*tokenizer.json"):
        train(rung("10"), tmp_path, tmp_path, *flags)
    numbers.save(str(tmp_path / "tokenizer.json"))
    train(rung("10"), tmp_path, tmp_path, *flags, "--max-lr", 0.01)
    text = sample(tmp_path / "model.pt", "--prompt", "7 14 21 ", "--temperature", 0, "--max-new-tokens", 3)
    assert text == "7 14 21 28 35 42\n"


def test_no_flipped_byte_changes_the_model(saved, convert, tmp_path):
    """torch writes check sums, but does not look at them when it loads."""
    path, original = tmp_path / "flipped.pt", saved["10"].read_bytes()
    expected = convert.load_checkpoint(saved["10"])[0].state_dict()
    draw = random.Random(1337)
    refused = 0
    for place in [*range(0, 1000, 100), *(draw.randrange(len(original)) for _ in range(10)), *range(-1000, 0, 100)]:
        flipped = bytearray(original)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            weights = convert.load_checkpoint(path)[0].state_dict()
        except SystemExit as error:
            assert error.code.startswith(f"error: {path}: damaged")
            refused += 1
        else:  # a byte that means nothing, as those that align the numbers
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert refused >= 15


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_model_s_file(saved, sample, convert, tmp_path):
    """By convert.py and by sample.py, in one line that names the file and what is wrong with it."""
    from torch.distributed import checkpoint

    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "half.pt").write_bytes(saved["10"].read_bytes()[:1_000_000])
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    torch.save(argparse.Namespace(), tmp_path / "code.pt")  # torch.load advises to load it without weights_only
    config = torch.load(saved["10"], weights_only=True)["config"]
    changed(saved["10"], tmp_path / "config.pt", config={**config, "n_kv_head": 1})
    changed(saved["10"], tmp_path / "shape.pt", config={**config, "n_embd": 32})
    changed(saved["22"], tmp_path / "script.pt", script="os.py")
    for number, json_ in enumerate(["{", None, vocabulary.of_bytes().json[:-100]]):
        changed(saved["10"], tmp_path / f"tokenizer{number}.pt", tokenizer="mine", tokenizer_json=json_)
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "sharded/step_0000001", no_dist=True)
    for name, reason in [
        ("nowhere.pt", "No such file"), ("config.pt", "neither"), ("shape.pt", "neither"), ("script.pt", "neither"),
        ("text.pt", "damaged"), ("half.pt", "damaged"), ("other.pt", "damaged"), ("code.pt", "damaged"),
        *[(f"tokenizer{number}.pt", "mine is damaged") for number in range(3)],
        ("sharded", "--save FILE"), ("sharded/step_0000001", "--save FILE"),
    ]:
        for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.module.main, [])]:
            with pytest.raises(SystemExit, match=f"^error: .*{name}: .*{reason}[^\n]*$") as stop:
                main([str(tmp_path / name), *more])
            assert "; " in stop.value.code and "weights_only" not in stop.value.code
    for label in ("20", "22", "30"):
        with pytest.raises(SystemExit, match="neither a GPT-2 .* nor a Qwen3"):
            convert.main([str(saved[label]), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_other_models_are_not_sampled(sample, tmp_path):
    """transformers loads them all, and draws what is missing at random."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, GPTNeoXConfig, GPTNeoXForCausalLM

    small = {"vocab_size": 50257, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    GPTNeoXForCausalLM(GPTNeoXConfig(**small, intermediate_size=8)).save_pretrained(tmp_path / "neox")
    GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "small")
    vocabulary.of_bytes().to_transformers().save_pretrained(tmp_path / "large")
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "large")
    untied = GPT2Config(vocab_size=256, n_embd=8, n_layer=1, n_head=1, tie_word_embeddings=False)
    GPT2Model(untied).save_pretrained(tmp_path / "headless")
    for name, reason in [("neox", "neither a GPT-2 nor a Qwen3"), ("small", "tokenizer .*fewer than 257 tokens"),
                         ("large", "257 tokens, more than the model, 256"), ("headless", "lacks weights")]:
        with pytest.raises(SystemExit, match=f"error: .*{name}: .*{reason}.*; give "):
            sample(tmp_path / name)


def test_no_merges_for_a_model_that_needs_them(saved, sample, convert, tmp_path, monkeypatch, capsys):
    """Without them there is no text; the model can be exported."""
    def no_network(name):
        raise ConnectionError

    monkeypatch.setattr(vocabulary.tiktoken, "get_encoding", no_network)
    path = changed(saved["10"], tmp_path / "gpt2.pt", tokenizer="gpt2")
    with pytest.raises(SystemExit, match="gpt2.pt: .*tiktoken.*network"):
        sample(path)
    convert.main([str(path), str(tmp_path / "hf")])
    assert "WARNING: tiktoken" in capsys.readouterr().err
    assert (tmp_path / "hf" / "model.safetensors").exists() and not (tmp_path / "hf" / "tokenizer.json").exists()


@pytest.mark.parametrize("there, expected", [(["cuda", "mps"], "cuda"), (["mps"], "mps"), ([], "cpu")])
def test_the_device_is_the_accelerator_if_there_is_one(there, expected, sample, monkeypatch):
    for name in ("cuda", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda name=name: name in there)
    assert sample.module.parse_args(["model.pt"]).device == expected


def test_a_published_qwen3_becomes_a_rungs_start_and_comes_back(convert, sample, tmp_path):
    """One with shared heads, a larger base of RoPE, and more rows than its tokenizer has tokens."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    theirs = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=256,
        eos_token_id=256, rope_parameters={"rope_type": "default", "rope_theta": 1_000_000}))
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer = vocabulary.of_bytes()
    tokenizer.to_transformers().save_pretrained(tmp_path / "theirs")
    convert.main([str(tmp_path / "theirs"), str(tmp_path / "theirs.pt")])
    data = data_with(tokenizer, "To be, or not to be? " * 999, tmp_path / "data")
    train(rung("32"), tmp_path, data, "-T", 64, "--steps", 3, "--max-lr", 0, "--muon-lr", 0, "--total-batch", 64,
          "--checkpoint-every", 0, "--pretrained", tmp_path / "theirs.pt", "--save", tmp_path / "mine.pt")
    sample(tmp_path / "mine.pt", "--prompt", "To be", "--max-new-tokens", 8)
    convert.main([str(tmp_path / "mine.pt"), str(tmp_path / "mine")])
    x = torch.randint(0, 257, (1, 32))
    with torch.no_grad():
        expected, back = theirs(x).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "mine").eval()(x).logits
    assert back.shape == (1, 32, 257) and torch.allclose(back, expected[..., :257], atol=1e-5)


def test_without_top_k_any_token_may_come(saved, sample, numbers):
    """At a temperature where all are alike: generate()'s own default is the 50 likeliest."""
    likeliest = own_model("10", saved["10"])(torch.tensor([GPT2_BYTES.encode(PROMPT).tolist()]))[0, -1].topk(1000)
    text = sample(saved["10"], "--prompt", PROMPT, "--temperature", 999, "--max-new-tokens", 1)
    assert int(text.removeprefix(PROMPT)) not in likeliest.indices
