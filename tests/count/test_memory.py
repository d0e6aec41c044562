"""The model of a step's memory, against what is kept and measured."""
import pytest
import torch
from load_script import ROOT, new_gpt, rung

from ladder.count.memory import step_bytes
from ladder.records.logs import read_folder
from ladder.rungs.list import BY_NAME, LADDER


def test_memory_model_against_measured_peaks():
    """Within 30 % for rungs 0 to 10, on every reference machine."""
    checked = set()
    for folder in {log.parent for log in (ROOT / "logs" / "reference").glob("*/round_*.log")}:
        for name, rounds in read_folder(folder)[0].items():
            label = BY_NAME[name].label if name in BY_NAME else None
            for run in [run for run in rounds if BY_NAME.get(name) in LADDER and run.peak_memory_gb]:
                expected = step_bytes(run.model, run.B, run.T, label) / 1e9
                assert run.peak_memory_gb == pytest.approx(expected, rel=0.3)
                checked.add(label)
    assert checked == {rung.label for rung in LADDER}


def test_memory_model_against_what_autograd_keeps():
    """The bytes of all tensors that the baseline's forward pass saves, its gradients of the logits left out."""
    module, B, T = rung(0), 2, 128
    model = new_gpt(module)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    x = torch.randint(0, 50257, (B, T))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(x, x)
    gradients = 8 * B * T * 50257
    expected = step_bytes("tiny", B, T, "0") - step_bytes("tiny", 0, T, "0") - gradients
    assert sum(storage.nbytes() for storage in kept.values()) == pytest.approx(expected, rel=0.02)


def test_with_chunks_the_logits_of_a_chunk_count():
    """Twice the batch keeps twice the activations, 36 bytes a token, layer and width, and no more logits."""
    whole = 4 * 4096 * 50257
    for label, logits in (("gradient_checkpointing", whole), ("chunked_cross_entropy", 0), ("zero_init", whole),
                          ("long_run", 0), ("fsdp", 0)):
        more = step_bytes("gpt2", 8, 1024, label) - step_bytes("gpt2", 4, 1024, label)
        assert more == 4096 * 36 * 12 * 768 + logits, label
