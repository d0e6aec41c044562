"""sample.py and export.py: the same model in transformers' hands, there and back."""
import os
import sys

import pytest
import torch
from conftest import ROOT, load_module, run_command, rung, train

PROMPT = "The value of an object"


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokens):
    """{rung: checkpoint file} of short runs: untied, tied, padded, and a checkpoint of beyond/."""
    folder = tmp_path_factory.mktemp("saved")
    for number in (0, 1, 10):
        train(rung(number), folder, tokens, "-B", 2, "-T", 64, "--steps", 8, "--save", folder / f"{number}.pt")
    train(rung(15), folder, tokens, "-B", 2, "-T", 64, "--steps", 2, "--checkpoint-every", 2,
          "--checkpoint-dir", folder / "checkpoints")
    return {number: folder / f"{number}.pt" for number in (0, 1, 10)} | {
        15: folder / "checkpoints" / "step_00000002.pt"}


def own_model(number, path):
    module = rung(number)
    checkpoint = torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    return module, model.eval()


@pytest.mark.parametrize("number", [0, 1, 10, 15])
def test_the_folder_has_the_same_logits_and_so_has_the_way_back(number, saved, tmp_path):
    from transformers import GPT2LMHeadModel

    load_module(ROOT / "export.py").main([str(saved[number]), str(tmp_path / "hf")])
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    module, ours = own_model(number, saved[number])
    x = torch.randint(0, 50257, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(x)[0][..., :50257]
        assert torch.allclose(theirs(x).logits, expected, atol=1e-4)
        back = module.GPT.from_pretrained(tmp_path / "hf").eval()
        assert torch.equal(back(x)[0][..., :50257], expected)
    assert theirs.config.tie_word_embeddings == (number > 0)


@pytest.mark.parametrize("number", [0, 10])
def test_greedy_text_is_the_own_models(number, saved):
    """The script's own model, without a cache, against generate() with one."""
    _, model = own_model(number, saved[number])
    tokenizer = load_module(ROOT / "sample.py").Tokenizer("gpt2-bytes")  # what the run was trained on
    ids = tokenizer.encode(PROMPT)
    for _ in range(30):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0]
        ids.append(int(logits[0, -1, :50257].argmax()))
    run = run_command(sys.executable, "sample.py", saved[number], "--prompt", PROMPT, "--temperature", 0,
                      "--max-new-tokens", 30, "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip("\n") == tokenizer.decode(ids).rstrip("\n")


def test_sampling_flags(saved, capsys):
    sample = load_module(ROOT / "sample.py")

    def text(*flags):
        capsys.readouterr()
        sample.main([str(saved[10]), "--max-new-tokens", "12", "--device", "cpu", *map(str, flags)])
        return capsys.readouterr().out

    assert text("--seed", 1, "--top-k", 50) == text("--seed", 1, "--top-k", 50) != text("--seed", 2, "--top-k", 50)
    assert text("--top-k", 1) == text("--temperature", 0)  # of one token there is no choice
    assert text("--num-samples", 2).count("--- sample ") == 2
    assert text("--top-p", 0.5, "--prompt", "").strip()


def test_the_end_of_a_document_is_not_printed():
    tokenizer = load_module(ROOT / "sample.py").Tokenizer("gpt2-bytes")
    assert tokenizer.decode([*tokenizer.encode("the end"), 50256]) == "the end"


def test_a_prompt_is_cut_at_its_front(capsys):
    fit = load_module(ROOT / "sample.py").fit
    assert fit(list(range(10)), 5, longest=16) == fit(list(range(10)), 6, longest=16) == list(range(10))
    assert capsys.readouterr().err == ""
    assert fit(list(range(10)), 13, longest=16) == [7, 8, 9]
    assert "first 7 tokens do not fit" in capsys.readouterr().err


def test_a_long_prompt_works(saved):
    run = run_command(sys.executable, "sample.py", saved[10], "--prompt", "word " * 2000, "--max-new-tokens", 5,
                      "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "tokens do not fit" in run.stderr


@pytest.mark.parametrize("flags, reason", [
    (["--top-p", 0], "--top-p 0: must be above 0 and at most 1"),
    (["--top-p", 1.5], "--top-p 1.5: must be above 0 and at most 1"),
    (["--top-k", -1], "--top-k -1: must be at least 0"),
    (["--temperature", -1], "--temperature -1: must be 0, or at least 0.001"),
    (["--temperature", "nan"], "--temperature nan: must be 0, or at least 0.001"),
    (["--temperature", 1e-40], "--temperature 1e-40: must be 0, or at least 0.001"),
    (["--seed", 2**64], "must be at least 0 and below 2"),
    (["--device", "abacus"], "--device abacus is not there"),
    (["--num-samples", 0], "--num-samples 0: must be at least 1"),
    (["--max-new-tokens", 0], "--max-new-tokens 0: must be at least 1"),
    (["--max-new-tokens", 1024], "longest sequence is 1024"),
])
def test_wrong_values(flags, reason, saved):
    with pytest.raises(SystemExit, match=reason):
        load_module(ROOT / "sample.py").main([str(saved[10]), *map(str, flags)])


def test_wrong_files(saved, tmp_path):
    export = load_module(ROOT / "export.py").main
    (tmp_path / "text.pt").write_text("no checkpoint")
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    checkpoint = torch.load(saved[10], weights_only=True)
    torch.save({**checkpoint, "config": {**checkpoint["config"], "n_kv_head": 1}}, tmp_path / "later.pt")
    torch.save({**checkpoint, "config": {**checkpoint["config"], "n_embd": 32}}, tmp_path / "shape.pt")
    torch.save({"config": [], "model": {}}, tmp_path / "list.pt")
    torch.save({**checkpoint, "config": {**checkpoint["config"], "n_layer": "two"}}, tmp_path / "word.pt")
    torch.save({**checkpoint, "model": dict.fromkeys(checkpoint["model"], 1.0)}, tmp_path / "number.pt")
    for name, reason in [("nowhere.pt", "cannot be read .No such file"), ("later.pt", "is not GPT-2's"),
                         *((f"{name}.pt", "no checkpoint") for name in ("text", "other", "list")),
                         *((f"{name}.pt", "not those of a GPT-2") for name in ("shape", "word", "number"))]:
        with pytest.raises(SystemExit, match=reason):
            export([str(tmp_path / name), str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit, match="exists: name a new folder"):
        export([str(saved[10]), str(tmp_path / "there")])
    for name, reason in [("nowhere.pt", "cannot be read (No such file"), (".", "neither a checkpoint file nor")]:
        run = run_command(sys.executable, "sample.py", tmp_path / name)
        assert run.returncode == 1 and reason in run.stderr and run.stderr.count("\n") == 1, run.stderr


def test_the_export_leaves_what_is_not_its_own(saved, tmp_path):
    (tmp_path / "hf.partial").mkdir()
    (tmp_path / "hf.partial" / "notes.txt").write_text("notes")
    load_module(ROOT / "export.py").main([str(saved[10]), str(tmp_path / "hf")])
    assert (tmp_path / "hf.partial" / "notes.txt").read_text() == "notes"
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "hf.partial"}
    assert not (tmp_path / "hf" / "tokenizer.json").exists()  # it was trained on single bytes


def test_an_export_that_fails_leaves_nothing(saved, tmp_path, monkeypatch):
    export = load_module(ROOT / "export.py")

    def full_disk(folder):
        raise OSError("No space left on device")

    monkeypatch.setattr(export, "write_tokenizer", full_disk)
    monkeypatch.setattr(export, "tokenizer_of", lambda checkpoint: "gpt2")
    with pytest.raises(SystemExit, match="could not be written .*No space left"):
        export.main([str(saved[10]), str(tmp_path / "hf")])
    assert not list(tmp_path.iterdir())


def test_only_the_baseline_goes_on_with_an_untied_model(saved, tmp_path):
    load_module(ROOT / "export.py").main([str(saved[0]), str(tmp_path / "hf")])
    for number in (1, 7, 15):
        with pytest.raises(SystemExit, match="its output layer is not its embedding: use baseline.py"):
            rung(number).GPT.from_pretrained(tmp_path / "hf")


def test_other_models_are_not_sampled(tmp_path):
    """transformers loads them all, and draws what is missing at random."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

    sample = load_module(ROOT / "sample.py")
    small = {"vocab_size": 50257, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    GPTNeoXForCausalLM(GPTNeoXConfig(**small, intermediate_size=8)).save_pretrained(tmp_path / "neox")
    GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "small")
    for name, reason in [("neox", "this is another model than GPT-2"), ("small", "its 1,000 tokens are not GPT-2's")]:
        with pytest.raises(SystemExit, match=reason):
            sample.main([str(tmp_path / name)])


def test_no_merges_for_a_model_that_needs_them(saved, tmp_path, monkeypatch):
    sample = load_module(ROOT / "sample.py")

    def no_network():
        raise sample.prepare.NoMerges("tiktoken could not fetch GPT-2's merges (ConnectionError)")

    monkeypatch.setattr(sample.prepare, "fetch_merges", no_network)
    torch.save({**torch.load(saved[10], weights_only=True), "tokenizer": "gpt2"}, tmp_path / "merges.pt")
    with pytest.raises(SystemExit, match="no text can be given to this model"):
        sample.main([str(tmp_path / "merges.pt"), "--device", "cpu"])


def test_odd_prompts_and_readers(saved):
    """Bytes that are no text, a terminal without the characters, a reader that goes away."""
    command = [sys.executable, "sample.py", saved[10], "--max-new-tokens", 20, "--device", "cpu"]
    run = run_command(*command, "--prompt", "caf\udce9 日本", PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and run.stdout.startswith("caf? ??"), run.stderr
    pipe = " ".join(map(str, [*command, "--num-samples", 20, "| head -c 3"]))
    run = run_command("bash", "-c", f"set -o pipefail; {pipe}")
    assert run.returncode == 0 and "Error" not in run.stderr, run.stderr


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_pipeline_and_tokenizer(saved, tmp_path, real_text):
    import tiktoken
    from transformers import AutoTokenizer, pipeline

    checkpoint = torch.load(saved[10], weights_only=True)
    torch.save({**checkpoint, "tokenizer": "gpt2"}, tmp_path / "merges.pt")  # its run had single bytes
    load_module(ROOT / "export.py").main([str(tmp_path / "merges.pt"), str(tmp_path / "hf")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode(real_text[:50_000]) == tiktoken.get_encoding("gpt2").encode(real_text[:50_000])
    text = pipeline("text-generation", model=str(tmp_path / "hf"))(PROMPT, max_new_tokens=5)[0]["generated_text"]
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
