"""convert.py and sample.py: the same model in transformers' hands, there and back."""
import argparse
import json
import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, load_module, make_tokens, run_command, rung, train

from data import vocabulary
from ladder.scripts.stages import BY_LABEL

GPT2_BYTES = vocabulary.of_bytes("gpt2-bytes")
PROMPT = "The value of an object"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokens):
    """{rung: checkpoint file} of short runs: untied, tied, padded, and checkpoints of beyond/."""
    folder = tmp_path_factory.mktemp("saved")
    for label in ("0", "1", "10"):
        train(rung(label), folder, tokens, "-B", 2, "-T", 32, "--steps", 8, "--save", folder / f"{label}.pt")
    for label in ("16", "19", "20", "22", "23", "30"):
        train(rung(label), folder, tokens, "-B", 1, "-T", 32, "--steps", 1, "--val-every", 0, "--checkpoint-dir",
              folder / label)
    checkpoints = {path.parent.name: path for path in folder.glob("*/step_0000001.pt")}
    return checkpoints | {path.stem: path for path in folder.glob("*.pt")}


@pytest.fixture
def sample():
    return load_module(ROOT / "sample.py")


@pytest.fixture
def convert():
    return load_module(ROOT / "convert.py")


def own_model(label, path):
    """The model of the rung's own GPT class."""
    module = rung(label)
    checkpoint = torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    return model.eval()


@pytest.mark.parametrize("label", ["0", "1", "10", "16", "19"])
@torch.no_grad()
def test_the_folder_has_the_same_logits_and_so_has_the_way_back(label, saved, tmp_path, convert):
    from transformers import GPT2LMHeadModel

    convert.main([str(saved[label]), str(tmp_path / "hf")])
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    x = torch.randint(0, 50257, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = own_model(label, saved[label])(x)
    assert expected.shape == (2, 48, 50257)
    assert torch.allclose(theirs(x).logits, expected, atol=1e-4)
    convert.main([str(tmp_path / "hf"), str(tmp_path / "back.pt"), "--script", BY_LABEL[label].file])
    assert torch.equal(own_model(label, tmp_path / "back.pt")(x), expected)
    assert theirs.config.tie_word_embeddings == (label != "0")
    if label == "0":
        for later in ("1", "7", "16"):
            with pytest.raises(SystemExit, match="its embeddings are untied; give --script baseline.py"):
                convert.main([str(tmp_path / "hf"), str(tmp_path / "no.pt"), "--script", BY_LABEL[later].file])


@pytest.mark.parametrize("label, config", [
    ("10", {"model_type": "gpt2", "n_positions": 1024, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    ("23", {"model_type": "qwen3", "max_position_embeddings": 1024, "attention_dropout": 0.0, "rms_norm_eps": 1e-6}),
])
def test_the_written_config(label, config, saved, tmp_path, convert):
    """What the logits do not show: who trains it further meets the dropout, who generates the end of a document."""
    convert.main([str(saved[label]), str(tmp_path / "hf")])
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written.items() >= {**config, "bos_token_id": 50256, "eos_token_id": 50256, "vocab_size": 50257}.items()
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 50256


@pytest.fixture
def numbers(monkeypatch, sample):
    """Let sample.py print token ids: most tokens are no bytes, in which the tests' text is written."""
    monkeypatch.setattr(vocabulary.Tokenizer, "decode", lambda self, ids: "".join(f"{i} " for i in ids))


@pytest.mark.parametrize("label", ["20", "22", "30"])
def test_other_models_are_not_transformers(label, saved, tmp_path, convert):
    with pytest.raises(SystemExit, match=r"neither a GPT-2 \(rungs 0 to 19\) nor a Qwen3 \(23 to 29\)"):
        convert.main([str(saved[label]), str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("label", ["0", "10", "20", "22", "23", "30"])
@torch.no_grad()
def test_greedy_text_is_that_of_the_rungs_own_model(label, saved, sample, numbers, tmp_path, capsys):
    """The rung's own model, without a cache, against generate() with one."""
    checkpoint = torch.load(saved[label], weights_only=True)
    generator = torch.Generator().manual_seed(0)
    for name, weight in checkpoint["model"].items():
        if name.endswith(("wpe.weight", "c_attn.weight", "c_proj.weight")):  # for variety
            weight.normal_(generator=generator)
        elif name == "log_frequency":  # as large as the logits: the counted one decides alone after a single step
            weight.normal_(std=0.05, generator=generator)
    torch.save(checkpoint, tmp_path / "model.pt")
    model, ids = own_model(label, tmp_path / "model.pt"), GPT2_BYTES.encode(PROMPT).tolist()
    for _ in range(30):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert len(set(ids[-30:])) > 5
    sample.main([str(tmp_path / "model.pt"), "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "30",
                 "--device", "cpu"])
    assert capsys.readouterr().out == PROMPT + "".join(f"{i} " for i in ids[-30:]) + "\n"


def test_sampling_flags(saved, sample, numbers, capsys):
    def text(*flags):
        capsys.readouterr()
        sample.main([str(saved["10"]), "--max-new-tokens", "12", "--device", "cpu", *map(str, flags)])
        return capsys.readouterr().out

    assert text("--seed", 1, "--top-k", 50) == text("--seed", 1, "--top-k", 50) != text("--seed", 2, "--top-k", 50)
    assert text("--top-k", 1) == text("--temperature", 0)  # of one token there is no choice
    first, second = text("--num-samples", 2).split("--- sample ")[1:]
    assert first.split()[3:] != second.split()[3:]  # the seed is set once, before all of them
    assert text("--top-p", 1e-6) == text("--temperature", 0.001) == text("--temperature", 0)
    assert len({text("--temperature", 0.8), text("--temperature", 5), text("--temperature", 0)}) == 3
    assert text("--top-p", 0.5, "--prompt", "").strip()


def test_what_the_model_is_given(sample, monkeypatch):
    """Of an empty prompt the token that begins a document."""
    given = []
    config = SimpleNamespace(max_position_embeddings=100)
    model = SimpleNamespace(
        config=config, generate=lambda x, **more: given.append((x.tolist(), more["max_new_tokens"])))
    monkeypatch.setattr(sample, "load_model", lambda name, device: (model, GPT2_BYTES))
    for prompt in ("", "ab"):
        sample.main(["model", "--prompt", prompt, "--max-new-tokens", "3", "--device", "cpu"])
    assert given == [([[50256]], 3), ([GPT2_BYTES.encode("ab").tolist()], 3)]


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_a_prompt_that_spells_the_end_of_a_document_is_text(sample):
    for tokenizer in (vocabulary.GPT2(), GPT2_BYTES, vocabulary.of_bytes()):
        ids = tokenizer.encode("<|endoftext|>")
        assert len(ids) > 1 and tokenizer.decode(ids) == "<|endoftext|>"


def test_a_prompt_is_cut_at_its_front(saved, sample, capsys):
    assert sample.fit(list(range(10)), 5, 16) == sample.fit(list(range(10)), 6, 16) == list(range(10))
    assert capsys.readouterr().err == ""
    assert sample.fit(list(range(10)), 13, longest=16) == [7, 8, 9]
    assert "first 7 tokens do not fit" in capsys.readouterr().err
    sample.main([str(saved["10"]), "--prompt", "word " * 300, "--max-new-tokens", "5", "--device", "cpu"])
    assert "first 481 tokens do not fit" in capsys.readouterr().err


def test_a_script_s_own_model_stops_at_the_end_of_a_text(saved, sample):
    checkpoint = torch.load(saved["22"], weights_only=True) | {"end_of_text": 256}
    assert sample.to_model(checkpoint).config.eos_token_id == 256


def test_text_longer_than_what_the_model_was_trained_on_is_warned_of(saved, sample, capsys):
    for label, tokens, warned in (("10", 31, False), ("10", 32, True), ("19", 31, False), ("19", 32, True)):
        sample.main([str(saved[label]), "--prompt", "x", "--max-new-tokens", str(tokens), "--device", "cpu"])  # T is 32
        assert ("was trained on sequences of 32 tokens" in capsys.readouterr().err) == warned


def test_the_end_of_a_document_is_not_printed():
    assert GPT2_BYTES.decode([*GPT2_BYTES.encode("the end"), 50256]) == "the end"


@pytest.mark.parametrize("flags, reason", [
    (["--top-p", 0], "--top-p 0: out of range; give more than 0"),
    (["--top-p", 1.5], "--top-p 1.5: out of range"),
    (["--top-k", -1], "--top-k -1: out of range; give at least 0"),
    (["--temperature", -1], "--temperature -1: out of range; give 0 or"),
    (["--temperature", "nan"], "--temperature nan: out of range"),
    (["--temperature", 1e-40], "--temperature 1e-40: out of range"),
    (["--seed", -1], "--seed -1: out of range; give at least 0"),
    (["--num-samples", 0], "--num-samples 0: out of range; give at least 1"),
    (["--max-new-tokens", 0], "--max-new-tokens 0: out of range; give at least 1"),
    (["--max-new-tokens", 1024], "longest sequence, with the prompt, is 1024; give fewer"),
    (["--device", "abacus"], "--device abacus: not available here .*; try --device cpu"),
])
def test_values_out_of_range(flags, reason, saved, sample):
    with pytest.raises(SystemExit, match=f"^error: .*{reason}"):
        sample.main([str(saved["10"]), "--device", "cpu", *map(str, flags)])


def test_no_flipped_byte_changes_the_model(saved, sample, convert, tmp_path):
    """torch writes check sums, but does not look at them when it loads."""
    path, original = tmp_path / "flipped.pt", saved["10"].read_bytes()
    expected = convert.load_checkpoint(saved["10"])[0].state_dict()
    draw = random.Random(1337)
    places = [*range(0, 1000, 100), *(draw.randrange(len(original)) for _ in range(10)), *range(-1000, 0, 100)]
    refused = 0
    for place in places:
        flipped = bytearray(original)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            weights = convert.load_checkpoint(path)[0].state_dict()
        except SystemExit as error:
            assert error.code == f"error: {path}: damaged, or not a model's file; give a file that a rung wrote"
            refused += 1
        else:  # a byte that means nothing, as those that align the numbers
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert refused >= 15
    path.write_bytes(original[: len(original) // 2] + bytes([original[len(original) // 2] ^ 1])
                     + original[len(original) // 2 + 1 :])  # within the weights
    for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.main, [])]:
        with pytest.raises(SystemExit, match="damaged"):
            main([str(path), *more])
    assert not (tmp_path / "out").exists()


def test_other_files(saved, sample, convert, tmp_path):
    (tmp_path / "text.pt").write_text("not a checkpoint")
    (tmp_path / "half.pt").write_bytes(saved["10"].read_bytes()[:1_000_000])
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    torch.save(argparse.Namespace(), tmp_path / "code.pt")  # torch.load advises to load it without weights_only
    checkpoint = torch.load(saved["10"], weights_only=True)
    torch.save({**checkpoint, "config": {**checkpoint["config"], "n_kv_head": 1}}, tmp_path / "config.pt")
    torch.save({**checkpoint, "config": {**checkpoint["config"], "n_embd": 32}}, tmp_path / "shape.pt")
    for name, reason in [("nowhere", "cannot be read .No such file"), ("config", "neither a GPT-2 .* nor a Qwen3"),
                         ("shape", "neither a GPT-2 .* nor a Qwen3"), ("text", "damaged, or not a model's file"),
                         ("half", "damaged, or not a model's file"), ("other", "damaged, or not a model's file"),
                         ("code", "damaged, or not a model's file")]:
        for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.main, [])]:
            with pytest.raises(SystemExit, match=f"^error: .*{name}.pt: .*{reason}") as caught:
                main([str(tmp_path / f"{name}.pt"), *more])
            assert "weights_only" not in caught.value.code and "\n" not in caught.value.code
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit, match="cannot be loaded"):
        sample.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="exists already; name a new file or folder"):
        convert.main([str(saved["10"]), str(tmp_path)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_checkpoints(saved, sample, convert, tmp_path):
    """As a sharded script and as the others leave them: neither is a model, and one line says where it is."""
    from torch.distributed import checkpoint

    (tmp_path / "sharded").mkdir()
    sharded = tmp_path / "sharded" / "step_0000001"
    checkpoint.save({"model": {"weight": torch.ones(2)}}, checkpoint_id=sharded, no_dist=True)
    for folder, advice in [("sharded", "resume with --save FILE"), ("sharded/step_0000001", "resume with --save FILE"),
                           (saved["16"].parent, f"give {saved['16']}$")]:
        for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.main, [])]:
            with pytest.raises(SystemExit, match=f"^error: .*{folder}: .* not a model; {advice}"):
                main([str(tmp_path / folder), *more])


@pytest.mark.parametrize("there, expected", [(["cuda", "mps"], "cuda"), (["mps"], "mps"), ([], "cpu")])
def test_the_device_is_the_accelerator_if_there_is_one(there, expected, sample, monkeypatch):
    for name in ("cuda", "mps"):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda name=name: name in there)
    assert sample.parse_args(["model.pt"]).device == expected


def test_other_models_are_not_sampled(sample, tmp_path):
    """transformers loads them all, and draws what is missing at random."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    small = {"vocab_size": 50257, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    GPTNeoXForCausalLM(GPTNeoXConfig(**small, intermediate_size=8)).save_pretrained(tmp_path / "neox")
    GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "small")
    vocabulary.of_bytes().to_transformers().save_pretrained(tmp_path / "large")
    GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "large")
    for name, reason in [
        ("neox", "neither a GPT-2 nor a Qwen3"),
        ("small", "small: no usable tokenizer .is missing, or has fewer than 257 tokens.; give a folder that has one"),
        ("large", "large: its tokenizer has 257 tokens, more than the model, 256; give a folder"),
    ]:
        with pytest.raises(SystemExit, match=reason):
            sample.main([str(tmp_path / name)])


def test_a_conversion_that_fails_leaves_nothing(saved, convert, tmp_path, monkeypatch):
    (tmp_path / "hf.partial").mkdir()  # nor takes what is not its own

    def full_disk(tokenizer):
        raise OSError("No space left on device")

    monkeypatch.setattr(vocabulary.Tokenizer, "to_transformers", full_disk)
    with pytest.raises(SystemExit, match="cannot be written .*No space left"):
        convert.main([str(saved["10"]), str(tmp_path / "hf")])
    assert [path.name for path in tmp_path.iterdir()] == ["hf.partial"]


def with_tokenizer(path, target, *tokenizer):
    """The same checkpoint with another tokenizer: its name, its json, its end of text."""
    keys = ("tokenizer", "tokenizer_json", "end_of_text")
    torch.save({**torch.load(path, weights_only=True), **dict(zip(keys, tokenizer, strict=True))}, target)
    return str(target)


def test_no_merges_for_a_model_that_needs_them(saved, sample, convert, tmp_path, monkeypatch, capsys):
    """Without them there is no text; the model can be exported."""
    def no_network(name):
        raise ConnectionError

    monkeypatch.setattr(vocabulary.tiktoken, "get_encoding", no_network)
    path = with_tokenizer(saved["10"], tmp_path / "gpt2.pt", "gpt2", None, 50256)
    with pytest.raises(SystemExit, match="gpt2.pt: no usable tokenizer .tiktoken could not fetch .*connect to the net"):
        sample.main([path])
    convert.main([path, str(tmp_path / "hf")])
    assert "WARNING: tiktoken could not fetch" in capsys.readouterr().err
    assert (tmp_path / "hf" / "model.safetensors").exists() and not (tmp_path / "hf" / "tokenizer.json").exists()


def test_a_tokenizer_that_cannot_be_restored(saved, sample, convert, tmp_path):
    for name, json_ in [("mine", "{"), ("mine", None), ("mine", vocabulary.of_bytes().json[:-100])]:
        path = with_tokenizer(saved["10"], tmp_path / "model.pt", name, json_, 256)
        for main, more in [(convert.main, [str(tmp_path / "out")]), (sample.main, [])]:
            with pytest.raises(SystemExit, match="^error: .*model.pt: .*mine is damaged .*; give a f[^\n]*$"):
                main([path, *more])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("label, size", [("10", 257), ("23", 300)])
def test_the_tokenizer_of_the_data_goes_all_the_way(label, size, sample, convert, tmp_path, real_text, capsys):
    """Trained on bytes or on tokens of the text itself, then in transformers' hands, then in sample.py's again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    text = "naïve 日本語 🙂 's . , ! \r\n" + real_text[:20_000]
    tokenizer = vocabulary.of_bytes() if size == 257 else vocabulary.trained([text], size)
    tokens, path = make_tokens(tmp_path / "tokens", text, tokenizer), str(tmp_path / "model.pt")
    train(rung(label), tmp_path, tokens, "-B", 2, "-T", 32, "--steps", 2, "--save", path,
          *(["--val-every", 0, "--checkpoint-dir", tmp_path] if label == "23" else []))
    convert.main([path, str(tmp_path / "hf")])

    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = tokenizer.encode(text).tolist()
    assert theirs.encode(text) == ids and theirs.decode(ids) == text
    assert theirs.encode("<|endoftext|>") == [tokenizer.end_of_text]
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end_of_text
    config, end = json.loads((tmp_path / "hf" / "config.json").read_text()), tokenizer.end_of_text
    assert [config[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")] == [size, end, end]

    x = torch.tensor([ids[:64]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(x).logits
        assert torch.allclose(logits, own_model(label, path)(x)[..., :size], atol=1e-4)
    again = vocabulary.from_hugging_face(str(tmp_path / "hf"))  # what prepare.py --tokenizer does with it
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist() and again.end_of_text == tokenizer.end_of_text

    written = []
    for name in (path, str(tmp_path / "hf")):
        capsys.readouterr()
        sample.main([name, "--prompt", "日本", "--temperature", "0", "--max-new-tokens", "20", "--device", "cpu"])
        written.append(capsys.readouterr().out.removesuffix("\n"))
    piped = pipeline("text-generation", model=str(tmp_path / "hf"))("日本", max_new_tokens=20, do_sample=False)
    assert written == [piped[0]["generated_text"]] * 2 and len(written[0]) > 4


@pytest.mark.parametrize("tokenizer", [vocabulary.of_bytes(), vocabulary.trained(["naïve"], 258)])
def test_no_character_is_printed_in_part(tokenizer, sample, monkeypatch, capsys):
    """A model that writes one byte after the other, in scripts with and without blanks."""
    text, shown = "naïve 日本語 🙂🙂 ไทย\n\nД \u2028 é", []

    def generate(x, streamer, **_):
        streamer.put(x)
        for i in tokenizer.encode(text).tolist():
            streamer.put(torch.tensor([i]))
            shown.append(capsys.readouterr().out)
        streamer.end()
        shown.append(capsys.readouterr().out)

    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1000), generate=generate)
    monkeypatch.setattr(sample, "load_model", lambda name, device: (model, tokenizer))
    sample.main(["model", "--device", "cpu"])
    assert "".join(shown) == text + "\n" and len([*filter(None, shown)]) > 5


def test_as_programs(saved, tmp_path):
    """From another folder, on a terminal without the characters, for a reader that goes away; an error in one line."""
    flags = "--prompt 日本 --num-samples 9 --max-new-tokens 20 --device cpu | head -c 50"
    words = [sys.executable, ROOT / "sample.py", saved["10"], flags]
    run = run_command("bash", "-c", " ".join(map(str, ["set -o pipefail;", *words])), cwd=tmp_path,
                      PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and run.stdout.startswith("--- sample 1 of 9\n??") and not run.stderr, run.stderr
    run = run_command(sys.executable, "convert.py", saved["10"], tmp_path / "日本", PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "/??: 3,382,080 parameters" in run.stdout, run.stderr
    run = run_command(sys.executable, "sample.py", "nowhere.pt")
    assert run.returncode == 1 and run.stderr.startswith("error: nowhere.pt") and run.stderr.count("\n") == 1


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
@pytest.mark.parametrize("label", ["10", "23"])
def test_pipeline_and_tokenizer(label, saved, convert, tmp_path, real_text):
    import tiktoken
    from transformers import AutoTokenizer, pipeline

    checkpoint = torch.load(saved[label], weights_only=True)
    torch.save({**checkpoint, "tokenizer": "gpt2"}, tmp_path / "merges.pt")  # its run had single bytes
    convert.main([str(tmp_path / "merges.pt"), str(tmp_path / "hf")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode(real_text[:50_000]) == tiktoken.get_encoding("gpt2").encode(real_text[:50_000])
    text = pipeline("text-generation", model=str(tmp_path / "hf"))(PROMPT, max_new_tokens=5)[0]["generated_text"]
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
