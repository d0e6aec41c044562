"""convert.py and sample.py: the same model in transformers' hands, there and back; the text that it writes."""
import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, data_with, flip_a_byte, load_module, new_gpt, run_command, rung, saved_model, train

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
    """{rung: model's file}: untied, padded; neither a GPT-2 nor a Qwen3 (20, 22, 30)."""
    folder = tmp_path_factory.mktemp("saved")
    return {label: save(label, folder / f"{label}.pt") for label in ("0", "10", "20", "22", "23", "30")}


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
def numbers(monkeypatch):
    """Let sample.py print token ids: most tokens are no bytes, in which the tests' text is written."""
    monkeypatch.setattr(vocabulary.Tokenizer, "decode", lambda self, ids: "".join(f"{i} " for i in ids))


def changed(path, target, **changes):
    """The same model's file with other contents."""
    torch.save({**torch.load(path, weights_only=True), **changes}, target)
    return target


@pytest.mark.parametrize("label, size, config", [
    ("0", 257, {"model_type": "gpt2", "embd_pdrop": 0.0, "tie_word_embeddings": False}),
    ("10", 257, {"n_positions": 1024, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True}),
    ("23", 300, {"model_type": "qwen3", "max_position_embeddings": 1024, "attention_dropout": 0.0}),
])
@torch.no_grad()
def test_a_model_and_its_tokenizer_there_and_back(label, size, config, sample, convert, tmp_path, real_text):
    """Logits, tokens and text in transformers' hands; in the configuration what none of them shows, dropout."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    text = "naïve 日本語 🙂 's . , ! \r\n" + real_text[:20_000]
    tokenizer = vocabulary.of_bytes() if size == 257 else vocabulary.trained([text], size)
    end, ids = tokenizer.end_of_text, tokenizer.encode(text).tolist()
    path, folder = save(label, tmp_path / "model.pt", tokenizer), str(tmp_path / "hf")
    convert.main([str(path), folder])
    x = torch.tensor([ids[:64]])
    expected = saved_model(rung(label), path)(x)
    logits = AutoModelForCausalLM.from_pretrained(folder).eval()(x).logits
    assert logits.shape == (1, 64, size) and torch.allclose(logits, expected, atol=1e-4 * expected.abs().max())
    written, generation = (json.loads((tmp_path / "hf" / name).read_text())
                           for name in ("config.json", "generation_config.json"))
    assert written.items() >= {**config, "vocab_size": size, "bos_token_id": end, "eos_token_id": end}.items()
    assert generation["eos_token_id"] == end
    theirs, again = AutoTokenizer.from_pretrained(folder), vocabulary.from_hugging_face(folder)
    assert theirs.encode(text) == ids == again.encode(text).tolist() and theirs.decode(ids) == text
    assert theirs.encode("<|endoftext|>") == [end] == [theirs.eos_token_id] == [theirs.bos_token_id]
    assert again.end_of_text == end
    flags = ("--prompt", "日本", "--temperature", 0, "--max-new-tokens", 20)
    piped = pipeline("text-generation", model=folder)("日本", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert [sample(path, *flags), sample(folder, *flags)] == [f"{piped}\n"] * 2 and len(piped) > 4
    models = []
    for name in ("back.pt", "again.pt"):
        convert.main([folder, str(tmp_path / name), "--script", BY_LABEL[label].file])
        models.append(saved_model(rung(label), tmp_path / name))
    assert torch.equal(models[0](x), expected)
    assert all(map(torch.equal, *(model.state_dict().values() for model in models)))  # the padding, too
    if label == "0":
        with pytest.raises(SystemExit, match="untied.*--script baseline.py"):
            convert.main([folder, str(tmp_path / "no.pt"), "--script", BY_LABEL["16"].file])


def test_a_published_qwen3_becomes_a_rungs_start_and_its_checkpoint_comes_back(convert, sample, tmp_path):
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
          "--pretrained", tmp_path / "theirs.pt")
    path, = (tmp_path / "checkpoints").glob("step_*.pt")
    assert sample(path, "--prompt", "To be", "--max-new-tokens", 8).startswith("To be")
    convert.main([str(path), str(tmp_path / "mine")])
    x = torch.randint(0, 257, (1, 32))
    with torch.no_grad():
        expected, back = theirs(x).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "mine").eval()(x).logits
    assert back.shape == (1, 32, 257) and torch.allclose(back, expected[..., :257], atol=1e-5)
    for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.module.main, [])]:
        with pytest.raises(SystemExit, match=f"^error: .*checkpoints: .* give {path}$"):
            main([str(path.parent), *more])


def test_a_conversion_that_fails_leaves_nothing(saved, convert, tmp_path, monkeypatch):
    def full_disk(tokenizer):
        raise OSError("No space left on device")

    monkeypatch.setattr(vocabulary.Tokenizer, "to_transformers", full_disk)
    for name, reason in [("hf", "No space left"), ("", "exists already")]:
        with pytest.raises(SystemExit, match=f"error: {tmp_path / name}: .*{reason}"):
            convert.main([str(saved["10"]), str(tmp_path / name)])
    assert os.listdir(tmp_path) == []


@torch.no_grad()
def greedy(label, path, ids, n_new):
    """The tokens that the rung's own model, without a cache, finds likeliest after `ids`, as words."""
    model = saved_model(rung(label), path)
    for _ in range(n_new):
        ids = [*ids, int(model(torch.tensor([ids]))[0, -1].argmax())]
    return [str(i) for i in ids[-n_new:]]


@pytest.mark.parametrize("label", ["0", "10", "20", "22", "23", "30"])
def test_greedy_text_is_that_of_the_rungs_own_model(label, saved, sample, numbers, tmp_path):
    """Also if generate() has a cache. A token that is taken for the end of a text is the last one."""
    expected = greedy(label, saved[label], GPT2_BYTES.encode(PROMPT).tolist(), 20)
    assert len(set(expected)) > 5
    flags = ("--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 20)
    assert sample(saved[label], *flags) == PROMPT + " ".join(expected) + " \n"
    path = changed(saved[label], tmp_path / "model.pt", end_of_text=int(expected[8]))
    stopped = expected[: expected.index(expected[8]) + 1]
    assert sample(path, *flags).removeprefix(PROMPT).split() == stopped


def test_sampling_flags(saved, sample, numbers):
    def text(*flags):
        return sample(saved["10"], "--max-new-tokens", 8, *flags)

    likeliest = text("--temperature", 0)
    assert likeliest.split() == greedy("10", saved["10"], [50256], 8)  # without a prompt: the start of a document
    assert text("--seed", 1, "--top-k", 50) == text("--seed", 1, "--top-k", 50) != text("--seed", 2, "--top-k", 50)
    assert text("--top-k", 1) == text("--top-p", 1e-6) == text("--temperature", 0.001) == likeliest
    first, second = text("--num-samples", 2).split("--- sample ")[1:]
    assert first.split()[3:] != second.split()[3:]  # the seed is set once, before all of them
    assert len({text("--temperature", 0.8), text("--temperature", 5), likeliest}) == 3


def test_how_long_prompt_and_text_may_be(saved, sample, capsys):
    """The longest sequence cuts the prompt at its front; beyond the -T of the training, here 32, text gets worse."""
    fit = sample.module.fit
    assert fit([*range(10)], 6, 16) == [*range(10)] and not capsys.readouterr().err
    assert fit([*range(10)], 13, 16) == [7, 8, 9] and "first 7 tokens" in capsys.readouterr().err
    for prompt, n_new, warned in (("x", 31, ""), ("x", 32, "sequences of 32 tokens")):
        sample.module.main(
            [str(saved["10"]), "--prompt", prompt, "--max-new-tokens", str(n_new), "--device", "cpu"])
        said = capsys.readouterr().err
        assert warned in said and bool(said) == bool(warned)


def test_as_a_program(saved, tmp_path):
    """From another folder, on a terminal without the characters, for a reader that goes away."""
    flags = "--prompt 日本 --num-samples 9 --max-new-tokens 5 --device cpu"
    command = f"set -o pipefail; {sys.executable} {ROOT / 'sample.py'} {saved['10']} {flags} | head -c 50"
    run = run_command("bash", "-c", command, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and run.stdout.startswith("--- sample 1 of 9\n??") and not run.stderr, run.stderr


def test_values_out_of_range(saved, sample):
    for flag, value, need in [
        ("--top-p", 0, "more than 0"), ("--top-p", 1.5, "at most 1"), ("--top-k", -1, "at least 0"),
        ("--temperature", -1, "0 or"), ("--temperature", "nan", "0 or"), ("--temperature", 1e-40, "0 or"),
        ("--seed", -1, "at least 0"), ("--num-samples", 0, "at least 1"), ("--max-new-tokens", 0, "at least 1"),
        ("--max-new-tokens", 1024, "1024; give fewer"), ("--device", "abacus", "--device cpu"),
        ("--prompt", "caf\udce9", "iconv"),  # as Python gives the bytes of Latin-1
    ]:
        with pytest.raises(SystemExit, match=f"^error: {flag}( {value})?: .*; .*") as stop:
            sample.module.main([str(saved["10"]), "--device", "cpu", flag, str(value)])
        assert need in stop.value.code


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_model_s_file(saved, sample, convert, tmp_path):
    """By convert.py and by sample.py, in one line that names the file and what is wrong with it."""
    from torch.distributed import checkpoint

    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "flipped.pt").write_bytes(saved["10"].read_bytes())
    flip_a_byte(tmp_path / "flipped.pt")  # torch writes check sums, but does not look at them when it loads
    torch.save(SimpleNamespace(), tmp_path / "code.pt")  # torch.load advises to load it without weights_only
    changed(saved["22"], tmp_path / "script.pt", script="os.py")
    changed(saved["10"], tmp_path / "tokenizer.pt", tokenizer="mine", tokenizer_json="{")
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=tmp_path / "sharded/step_0000001", no_dist=True)
    for name, reason in [
        ("nowhere.pt", "No such file"), ("script.pt", "neither"),
        ("text.pt", "damaged"), ("flipped.pt", "damaged"), ("code.pt", "damaged"),
        ("tokenizer.pt", "mine is damaged"), ("sharded", "--save FILE"), ("sharded/step_0000001", "--save FILE"),
    ]:
        for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.module.main, [])]:
            with pytest.raises(SystemExit, match=f"^error: .*{name}: .*{reason}[^\n]*$") as stop:
                main([str(tmp_path / name), *more])
            assert "; " in stop.value.code and "weights_only" not in stop.value.code
    for label in ("20", "22", "30"):
        with pytest.raises(SystemExit, match="neither a GPT-2 .* nor a Qwen3"):
            convert.main([str(saved[label]), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_stopped_conversion_leaves_nothing(convert, hf_folder, tmp_path, monkeypatch):
    def stopped(contents, path):
        path.write_text("half a model")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert.main([str(hf_folder), str(tmp_path / "model.pt")])
    assert not list(tmp_path.iterdir())


def test_no_merges_for_a_model_that_needs_them(saved, sample, convert, tmp_path, monkeypatch, capsys):
    """Without them there is no text; the model can be exported."""
    monkeypatch.setattr(vocabulary.tiktoken, "get_encoding", lambda name: 1 / 0)
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


def test_without_top_k_any_token_may_come(saved, sample, numbers):
    """At a temperature where all are alike: generate()'s own default is the 50 likeliest."""
    model = saved_model(rung("10"), saved["10"])
    likeliest = model(torch.tensor([GPT2_BYTES.encode(PROMPT).tolist()]))[0, -1].topk(1000)
    text = sample(saved["10"], "--prompt", PROMPT, "--temperature", 999, "--max-new-tokens", 1)
    assert int(text.removeprefix(PROMPT)) not in likeliest.indices
