"""data/prepare.py on real corpora: folders, .jsonl, .parquet, datasets; killed and gone on with; many processes."""
import contextlib
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from conftest import ROOT, load_module, run_command

PREPARE = ROOT / "data" / "prepare.py"
END = 50256
DOCUMENTS = ["The first document.", "A second one:\n\n  with blanks  ", "Drittes: äöü 日本 😀", "<|endoftext|> in", "x"]


@pytest.fixture
def prepare(monkeypatch):
    """A fresh data/prepare.py with single-byte tokens, which needs no network."""
    module = load_module(PREPARE)
    module.load_tokenizer = module.ByteTokenizer
    monkeypatch.syspath_prepend(PREPARE.parent)  # where its encoding processes find it
    return module


def read_documents(folder, tokenizer):
    """The texts in a folder of token files, split at <|endoftext|>."""
    tokens = np.concatenate([np.fromfile(folder / name, dtype="<u2") for name in ("train.bin", "val.bin")])
    ends = np.flatnonzero(tokens == END)
    parts = np.split(tokens, ends)
    return [tokenizer.decode(part[part != END].tolist()) for part in parts]


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts))


def write_parquet(path, texts, field="text"):
    pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), path)


def prepare_texts(prepare, out, *flags):
    prepare.main([*map(str, flags), "--out", str(out)])
    return read_documents(out, prepare.ByteTokenizer()), json.loads((out / "meta.json").read_text())


@pytest.mark.parametrize("suffix, write", [("jsonl", write_jsonl), ("parquet", write_parquet)])
def test_records_become_documents(suffix, write, prepare, tmp_path):
    """Empty and missing texts are no documents; the hash is that of the texts joined by <|endoftext|>."""
    path = tmp_path / f"corpus.{suffix}"
    write(path, [DOCUMENTS[0], "", *DOCUMENTS[1:], None])
    documents, meta = prepare_texts(prepare, tmp_path / "out", "--text", path)
    assert documents == DOCUMENTS
    joined = "<|endoftext|>".join(DOCUMENTS).encode()
    assert meta["documents"] == 5 and meta["source"] == path.name
    assert meta["sha256"] == hashlib.sha256(joined).hexdigest()
    assert meta["train_tokens"] + meta["val_tokens"] == sum(len(text.encode()) for text in DOCUMENTS) + 4


def test_a_folder_is_read_in_the_order_of_names(prepare, tmp_path, capsys):
    corpus = tmp_path / "corpus"
    (corpus / "b").mkdir(parents=True)
    write_parquet(corpus / "c.parquet", DOCUMENTS[3:])
    write_jsonl(corpus / "b" / "part.JSONL", DOCUMENTS[1:3])
    (corpus / "a.txt").write_text(DOCUMENTS[0])
    (corpus / "empty.txt").write_text("")
    (corpus / "picture.png").write_bytes(b"\xff\xfe")
    documents, meta = prepare_texts(prepare, tmp_path / "out", "--text", corpus)
    assert documents == DOCUMENTS
    assert meta["source"] == "corpus"
    assert "corpus (gpt2-bytes tokens), 5 documents" in capsys.readouterr().out


def test_another_field(prepare, tmp_path):
    write_jsonl(tmp_path / "corpus.jsonl", DOCUMENTS, field="content")
    flags = "--text", tmp_path / "corpus.jsonl", "--field", "content"
    assert prepare_texts(prepare, tmp_path / "out", *flags)[0] == DOCUMENTS


def test_half_a_surrogate_pair(prepare, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"text": "half \\ud83d pair"}\n')
    assert prepare_texts(prepare, tmp_path / "out", "--text", tmp_path / "corpus.jsonl")[0] == ["half ? pair"]


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A local dataset with two splits, in the format in which the hub stores them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "dataset" / "data"
    folder.mkdir(parents=True)
    for split, texts in {"train": DOCUMENTS, "test": DOCUMENTS[:2]}.items():
        for shard in range(2):
            write_parquet(folder / f"{split}-0000{shard}-of-00002.parquet", texts[shard::2])
    return folder.parent


def test_a_hugging_face_dataset(dataset, prepare, tmp_path):
    in_order = DOCUMENTS[::2] + DOCUMENTS[1::2]  # shard by shard
    assert prepare_texts(prepare, tmp_path / "out", "--hf", dataset)[0] == in_order
    documents, meta = prepare_texts(prepare, tmp_path / "out", "--hf", dataset, "--split", "test")
    assert documents == DOCUMENTS[:2] and meta["documents"] == 2 and meta["source"] == "dataset"


@pytest.mark.parametrize("flags, reason", [
    (["--split", "nowhere"], "nowhere"),
    (["--name", "nobody"], "nobody"),
    (["--field", "body"], "nothing is called 'body' there: name the text with --field (there is id, text)"),
    (["--field", "id"], "'id' is 0, not a text"),
])
def test_a_dataset_asked_wrongly(flags, reason, dataset, tmp_path):
    run = run_command(sys.executable, PREPARE, "--hf", dataset, *flags, "--out", tmp_path / "out")
    assert_refused(run, reason, tmp_path / "out")


def test_a_folder_of_txt_files_is_no_dataset(tmp_path, monkeypatch):
    """datasets would take each line for a document."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one\ntwo\n")
    run = run_command(sys.executable, PREPARE, "--hf", tmp_path / "texts", "--out", tmp_path / "out")
    assert_refused(run, "holds .txt files, which are no dataset: give it as --text", tmp_path / "out")


def assert_refused(run, reason, out):
    assert run.returncode == 1, run.stderr
    assert reason in run.stderr.strip().splitlines()[-1] and run.stderr.strip().splitlines()[-1].startswith("error:")
    assert "Traceback" not in run.stderr
    assert not out.exists() and not out.with_name(out.name + ".partial").exists()


def test_a_dataset_without_a_network(tmp_path):
    run = run_command(sys.executable, PREPARE, "--hf", "nobody/nothing", "--out", tmp_path / "out",
                      HF_DATASETS_CACHE=str(tmp_path / "cache"))
    assert_refused(run, "--hf nobody/nothing cannot be read", tmp_path / "out")


@pytest.mark.parametrize("name, content, reason", [
    ("a.jsonl", b'{"text": "good"}\n\n{"text": "cut', "a.jsonl line 3 is not JSON"),
    ("a.jsonl", b'{"body": ""}\n', "line 1: nothing is called 'text' there: name the text with --field (there is body"),
    ("a.jsonl", b'["x"]\n', "line 1: nothing is called 'text' there"),
    ("a.jsonl", b'{"text": 7}\n', "line 1: 'text' is 7, not a text"),
    ("a.jsonl", b'{"text": ""}\n', "is empty"),
    ("a.jsonl", b"[" * 200_000, "line 1 is not JSON"),
    ("a.parquet", b"PAR1 no parquet", "a.parquet cannot be read as parquet"),
    ("a.txt", b"caf\xe9 au lait", "a.txt is not UTF-8 text"),
    ("a.pdf", b"%PDF", "holds no .jsonl, .parquet, .txt file"),
])
def test_corpora_that_cannot_be_used(name, content, reason, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content)
    run = run_command(sys.executable, PREPARE, "--text", tmp_path / "corpus", "--out", tmp_path / "out")
    assert_refused(run, reason, tmp_path / "out")


def test_a_parquet_text_that_is_not_utf8(tmp_path):
    column = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    run = run_command(sys.executable, PREPARE, "--text", tmp_path / "a.parquet", "--out", tmp_path / "out")
    assert_refused(run, "a.parquet cannot be read as parquet", tmp_path / "out")


@pytest.mark.parametrize("flags, reason", [
    (["--text", "nowhere"], "--text nowhere: no such file or folder"),
    (["--text", "the text itself " * 30], "no such file or folder"),
    (["--name", "x"], "--name says which part of a dataset: give --hf too"),
    (["--split", "x"], "--split says which part of a dataset: give --hf too"),
    (["--field", "x"], "--field says what the text is called: give --text or --hf too"),
    (["--out", "/"], "--out /: give the name of a folder of its own"),
    (["--text", __file__, "--out", 200 * "long"], "nothing was written to longlong.*File name too long"),
])
def test_wrong_flags(flags, reason, prepare):
    with pytest.raises(SystemExit, match=reason):
        prepare.main(flags)


def test_a_parquet_file_cut_short(tmp_path):
    write_parquet(tmp_path / "whole.parquet", DOCUMENTS * 1000)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-100])
    run = run_command(sys.executable, PREPARE, "--text", tmp_path / "cut.parquet", "--out", tmp_path / "out")
    assert_refused(run, "cut.parquet cannot be read as parquet", tmp_path / "out")


@pytest.fixture
def merges(prepare, monkeypatch):
    """tiktoken's encoding, in use."""
    try:
        tokenizer = prepare.fetch_merges()
    except prepare.NoMerges as error:
        pytest.skip(str(error))
    monkeypatch.setattr(prepare, "load_tokenizer", lambda: tokenizer)
    return tokenizer


def random_texts(n, seed=0):
    draw = random.Random(seed)
    words = ["word", " ", "\n\n", "it's", "12", "é", "日本", "?!", "longer words "]
    return ["".join(draw.choices(words, k=draw.randint(1, 400))) + "." for _ in range(n)]


def test_many_processes_give_the_tokens_of_one_call(prepare, merges, tmp_path, monkeypatch):
    """Documents shorter and much longer than a chunk, against tiktoken's own encoding of each."""
    monkeypatch.setattr(prepare, "CHUNK_CHARACTERS", 5000)
    texts = random_texts(200)
    texts[70] = "".join(texts)  # about 50 chunks in one document
    write_jsonl(tmp_path / "corpus.jsonl", texts)
    prepare.main(["--text", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "out")])
    expected = []
    for text in texts:
        expected += [END] * bool(expected) + merges.encoding.encode_ordinary(text)
    tokens = np.concatenate([np.fromfile(tmp_path / "out" / name, dtype="<u2") for name in ("train.bin", "val.bin")])
    assert tokens.tolist() == expected


def test_a_million_blanks(prepare, merges, tmp_path):
    """tiktoken panics over so many in one piece."""
    text = "a" + 1_500_000 * " " + "word " + 1_100_000 * "\n" + "end"
    (tmp_path / "text.txt").write_text(text)
    prepare.main(["--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")])
    tokens = [np.fromfile(tmp_path / "out" / name, dtype="<u2").tolist() for name in ("train.bin", "val.bin")]
    assert merges.decode(sum(tokens, [])) == text


def test_a_text_without_blanks_is_cut_all_the_same(prepare, monkeypatch):
    monkeypatch.setattr(prepare, "LONGEST_WORD", 100)
    pieces = list(prepare.in_pieces(["y" * 60] * 10 + [" end"]))
    assert "".join(pieces) == "y" * 600 + " end"
    assert max(map(len, pieces)) <= 160


STOPPED_RUN = """
import os, signal, sys; sys.path.insert(0, sys.argv[1]); import prepare
prepare.load_tokenizer = prepare.ByteTokenizer
prepare.CHUNK_CHARACTERS, prepare.PROGRESS_SECONDS = 2000, 0
encode_chunks, stop_after, encoded = prepare.encode_chunks, int(sys.argv[2]), 0

def counted(chunks, tokenizer):
    global encoded
    for pair in encode_chunks(chunks, tokenizer):
        yield pair
        encoded += 1
        if encoded == stop_after:
            os.kill(os.getpid(), int(sys.argv[3]))

if __name__ == "__main__":
    prepare.encode_chunks = counted
    prepare.main(sys.argv[4:])
    print("encoded", encoded)
"""


def stopped_run(tmp_path, stop_after, *flags, signal_number=signal.SIGKILL):
    """data/prepare.py, stopped by a signal after so many chunks."""
    script = tmp_path / "stopped_run.py"
    script.write_text(STOPPED_RUN)
    return run_command(sys.executable, script, PREPARE.parent, stop_after, int(signal_number), *flags)


@pytest.mark.parametrize("kind, signal_number", [
    ("jsonl", signal.SIGKILL), ("parquet", signal.SIGINT), ("txt", signal.SIGKILL), ("hf", signal.SIGKILL)])
def test_an_interrupted_preparation_goes_on(kind, signal_number, tmp_path):
    """Stopped twice, it ends with the tokens of an undisturbed run, and encodes nothing twice."""
    texts = random_texts(200)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    if kind == "txt":
        (corpus / "a.txt").write_text(" ".join(texts))
    elif kind == "jsonl":
        write_jsonl(corpus / "a.jsonl", texts)
    else:
        write_parquet(corpus / "train-00000-of-00001.parquet", texts)
    flags = ["--hf" if kind == "hf" else "--text", corpus, "--out", tmp_path / "out"]
    for stop_after in (20, 15):
        run = stopped_run(tmp_path, stop_after, *flags, signal_number=signal_number)
        assert run.returncode not in (0, None) and "Traceback" not in run.stderr
        assert not (tmp_path / "out").exists() and (tmp_path / "out.partial" / "progress.json").exists()
        if signal_number == signal.SIGINT:
            assert "the same command goes on with what is in out.partial" in run.stderr
    done = json.loads((tmp_path / "out.partial" / "progress.json").read_text())["chunks"]
    assert 33 <= done <= 35
    resumed = stopped_run(tmp_path, 10**9, *flags)
    undisturbed = stopped_run(tmp_path, 10**9, *flags[:-1], tmp_path / "undisturbed")
    assert resumed.returncode == undisturbed.returncode == 0, resumed.stderr
    assert "going on with out.partial: " in resumed.stderr and "going on" not in undisturbed.stderr
    for name in ("train.bin", "val.bin", "meta.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    assert int(resumed.stdout.split()[-1]) == int(undisturbed.stdout.split()[-1]) - done > 10
    assert not (tmp_path / "out.partial").exists()


def test_a_text_changed_meanwhile_starts_anew(prepare, tmp_path):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    write_jsonl(corpus, random_texts(200))
    stopped_run(tmp_path, 20, "--text", corpus, "--out", out)
    for texts in (random_texts(200, seed=1), random_texts(3)):  # another text; one shorter than what was done
        write_jsonl(corpus, texts)
        run = stopped_run(tmp_path, 10 if len(texts) > 3 else 10**9, "--text", corpus, "--out", out)
        assert "the text has changed" in run.stderr
    assert read_documents(out, prepare.ByteTokenizer()) == texts


def test_another_texts_unfinished_work_is_not_thrown_away(prepare, tmp_path):
    write_jsonl(tmp_path / "corpus.jsonl", random_texts(200))
    stopped_run(tmp_path, 20, "--text", tmp_path / "corpus.jsonl", "--out", tmp_path / "out")
    before = (tmp_path / "out.partial" / "train.bin").read_bytes()
    (tmp_path / "another.txt").write_text("another text")
    with pytest.raises(SystemExit, match="out.partial holds an unfinished preparation of corpus.jsonl: finish or del"):
        prepare.main(["--text", str(tmp_path / "another.txt"), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out.partial" / "train.bin").read_bytes() == before


@pytest.mark.parametrize("damage", ["short", "no json", "no dictionary", "no hash", "other tokenizer"])
def test_a_damaged_partial_folder_is_not_used(damage, prepare, tmp_path):
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    texts = random_texts(200)
    write_jsonl(corpus, texts)
    stopped_run(tmp_path, 20, "--text", corpus, "--out", out)
    partial = tmp_path / "out.partial"
    if damage == "short":
        os.truncate(partial / "train.bin", 100)
    progress = json.loads((partial / "progress.json").read_text())
    (partial / "progress.json").write_text({
        "short": json.dumps(progress), "no json": "{", "no dictionary": "[]",
        "no hash": json.dumps({name: value for name, value in progress.items() if name != "sha256"}),
        "other tokenizer": json.dumps(progress | {"tokenizer": "another"}),
    }[damage])
    assert prepare_texts(prepare, out, "--text", corpus)[0] == texts


def test_gpt2_tokens_are_not_thrown_away_for_single_bytes(prepare, tmp_path, capsys):
    """Hours of work, and then the merges are not at hand when the same command goes on."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "out"
    write_jsonl(corpus, random_texts(200))
    stopped_run(tmp_path, 20, "--text", corpus, "--out", out)
    progress = tmp_path / "out.partial" / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"tokenizer": "gpt2"}))
    before = (tmp_path / "out.partial" / "train.bin").read_bytes()
    with pytest.raises(SystemExit, match="which need GPT-2's merges; the same command goes on with"):
        prepare.main(["--text", str(corpus), "--out", str(out)])
    assert (tmp_path / "out.partial" / "train.bin").read_bytes() == before


SLOW_RUN = """
import sys, time; sys.path.insert(0, sys.argv[1]); import prepare

class SlowTokenizer(prepare.ByteTokenizer):
    def encode_to_numpy(self, text):
        time.sleep(0.02)
        return super().encode_to_numpy(text)

if __name__ == "__main__":
    for number in prepare.STOP_SIGNALS:
        prepare.signal.signal(number, prepare.stop_once)
    prepare.load_tokenizer, prepare.CHUNK_CHARACTERS = SlowTokenizer, 2000
    prepare.main(sys.argv[2:])
"""


@contextlib.contextmanager
def slow_run(folder):
    """(A preparation of some seconds, its encoding processes just started); in the end all of them are killed."""
    (folder / "slow_run.py").write_text(SLOW_RUN)
    write_jsonl(folder / "corpus.jsonl", random_texts(1000))
    command = [sys.executable, "slow_run.py", PREPARE.parent, "--text", "corpus.jsonl", "--out", "out"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True) as run:
        try:
            workers = []
            while not workers and run.poll() is None:
                children = psutil.Process(run.pid).children()
                workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
            yield run, workers
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def kill_a_worker(run, worker):
    worker.kill()


def press_ctrl_c_until_it_ends(run, worker):
    while run.poll() is None:
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.002)


def stop_the_job(run, worker):
    os.killpg(run.pid, signal.SIGTERM)


@pytest.mark.parametrize("seconds", [0, 0.1, 0.5])
@pytest.mark.parametrize("disturb, reasons", [
    (kill_a_worker, ["error: nothing was written to out: an encoding process died"]),
    (press_ctrl_c_until_it_ends, ["stopped: nothing was written to out"]),
    (stop_the_job, ["stopped: nothing was written to out", "an encoding process died"]),
])
def test_disturbed_processes_end_with_one_line(disturb, reasons, seconds, tmp_path):
    """Just after the start of the encoding processes or later: no hang, no traceback of any process, no leftovers."""
    with slow_run(tmp_path) as (run, workers):
        time.sleep(seconds)
        disturb(run, workers[0])
        _, errors = run.communicate(timeout=30)
    # Of a killed process CPython's resource tracker may have a word to say afterwards.
    assert run.returncode == 1 and any(reason in errors.splitlines()[0] for reason in reasons), errors
    assert "Traceback" not in errors
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("seconds", [0, 1])
def test_no_process_outlives_a_killed_run(seconds, tmp_path):
    with slow_run(tmp_path) as (run, workers):
        time.sleep(seconds)
        assert workers and run.poll() is None
        run.kill()
        assert not psutil.wait_procs(workers, timeout=20)[1]


def peak_of_reading(path):
    """MiB that a process has at most which reads a parquet file and keeps nothing."""
    script = path.with_name("measured.py")
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1]); import prepare\n"
        "from conftest import peak_memory\n"
        "from tqdm import tqdm\n"
        "documents = prepare.read_parquet(prepare.Path(sys.argv[2]), 'text', tqdm(disable=True))\n"
        "size = sum(len(piece) for document in documents for piece in document)\n"
        "print(size, peak_memory())\n"
    )
    run = run_command(sys.executable, script, PREPARE.parent, path, PYTHONPATH=str(ROOT / "tests"))
    assert run.returncode == 0, run.stderr
    size, memory = run.stdout.split()
    return int(size), float(memory)


def write_random_parquet(path, n, characters, **layout):
    texts = [os.urandom(characters // 2).hex() for _ in range(n)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, **layout)


@pytest.mark.parametrize("rows_in_a_group", [500, 10**6])
def test_memory_does_not_grow_with_a_parquet_file(rows_in_a_group, tmp_path):
    """128 MB of text that does not compress, in many row groups and in one."""
    peaks = []
    for n in (100, 2000):
        path = tmp_path / f"{n}.parquet"
        write_random_parquet(path, n, 64_000, row_group_size=rows_in_a_group, write_batch_size=16)
        size, peak = peak_of_reading(path)
        assert size == n * 64_000
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 50


def test_memory_holds_a_few_long_rows_of_a_parquet_file(tmp_path):
    """Rows of 2 MB, of which 64 at once would be 128 MB several times over."""
    write_random_parquet(tmp_path / "short.parquet", 100, 64_000)
    write_random_parquet(tmp_path / "long.parquet", 64, 2_000_000, write_batch_size=1)
    assert peak_of_reading(tmp_path / "long.parquet")[1] < peak_of_reading(tmp_path / "short.parquet")[1] + 100


def test_a_full_disk_keeps_what_was_done(tmp_path):
    """A limit on the size of files stands for the full disk; afterwards the same command goes on."""
    write_jsonl(tmp_path / "corpus.jsonl", random_texts(400))
    flags = [tmp_path / "corpus.jsonl", "--out", tmp_path / "out"]
    (tmp_path / "stopped_run.py").write_text(STOPPED_RUN)
    command = [sys.executable, tmp_path / "stopped_run.py", PREPARE.parent, "1000000000", "9", "--text", *flags]
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)))
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "nothing was written" in run.stderr and "the same command goes on" in run.stderr
    assert not (tmp_path / "out").exists()
    run = stopped_run(tmp_path, 10**9, "--text", *flags)
    assert run.returncode == 0, run.stderr
    meta = json.loads((Path(tmp_path) / "out" / "meta.json").read_text())
    assert meta["documents"] == 400
