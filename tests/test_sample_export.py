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
    tokenizer = load_module(ROOT / "sample.py").Tokenizer()
    ids = tokenizer.encode(PROMPT)
    for _ in range(30):
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0]
        ids.append(int(logits[0, -1, :50257].argmax()))
    run = run_command(sys.executable, "sample.py", saved[number], "--prompt", PROMPT, "--temperature", 0,
                      "--max-new-tokens", 30, "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip("\n") == tokenizer.decode(ids).rstrip("\n")


def test_sampling_flags(saved, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "prepare", raising=False)  # other tests give theirs another tokenizer
    sample = load_module(ROOT / "sample.py")

    def text(*flags):
        capsys.readouterr()
        sample.main([str(saved[10]), "--max-new-tokens", "12", "--device", "cpu", *map(str, flags)])
        return capsys.readouterr().out

    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)
    assert text("--top-k", 1) == text("--temperature", 0)  # of one token there is no choice
    assert text("--num-samples", 2).count("--- sample ") == 2
    assert text("--top-p", 0.5, "--prompt", "").strip()


def test_a_long_prompt_keeps_its_end(saved):
    run = run_command(sys.executable, "sample.py", saved[10], "--prompt", "word " * 2000, "--max-new-tokens", 5,
                      "--device", "cpu")
    assert run.returncode == 0, run.stderr
    assert "tokens do not fit" in run.stderr


@pytest.mark.parametrize("flags, reason", [
    (["--top-p", 0], "--top-p 0: must be above 0 and at most 1"),
    (["--top-p", 1.5], "--top-p 1.5: must be above 0 and at most 1"),
    (["--top-k", -1], "--top-k -1: must be at least 0"),
    (["--temperature", -1], "--temperature -1: must be at least 0"),
    (["--temperature", "nan"], "--temperature nan: must be at least 0"),
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
    for name, reason in [("nowhere.pt", "cannot be read"), ("text.pt", "cannot be read"), ("other.pt", "no checkpoint"),
                         ("later.pt", "is not GPT-2's"), ("shape.pt", "not those of a GPT-2")]:
        with pytest.raises(SystemExit, match=reason):
            export([str(tmp_path / name), str(tmp_path / "out")])
        assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit, match="exists: name a new folder"):
        export([str(saved[10]), str(tmp_path / "there")])
    run = run_command(sys.executable, "sample.py", tmp_path / "nowhere.pt")
    assert run.returncode == 1 and "neither a checkpoint file nor" in run.stderr and "Traceback" not in run.stderr


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 merges at hand")
def test_pipeline_and_tokenizer(saved, tmp_path, real_text):
    import tiktoken
    from transformers import AutoTokenizer, pipeline

    load_module(ROOT / "export.py").main([str(saved[10]), str(tmp_path / "hf")])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.encode(real_text[:50_000]) == tiktoken.get_encoding("gpt2").encode(real_text[:50_000])
    text = pipeline("text-generation", model=str(tmp_path / "hf"))(PROMPT, max_new_tokens=5)[0]["generated_text"]
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)
