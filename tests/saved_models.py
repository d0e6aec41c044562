"""Files of --save and checkpoints: what they hold, and what they look like from a GPU."""
from unittest import mock

import torch
from load_script import new_gpt


def saved_model(module, path):
    """The model in a file of --save, in evaluation mode."""
    saved = torch.load(path, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["config"])).eval()
    model.load_state_dict(saved["model"])
    return model


def assert_untrained(module, path):
    """That a file of --save holds the weights that a run of byte tokens starts from."""
    torch.manual_seed(1337)
    start, saved = new_gpt(module, vocab_size=257), torch.load(path, weights_only=True)["model"]
    assert all(torch.equal(saved[name], weight) for name, weight in start.named_parameters())


def assert_same_weights(file, truth, atol=0):
    """That two files of --save, or checkpoints, hold the same weights, to the bit unless a tolerance is given."""
    ours, truth = (torch.load(path, weights_only=True)["model"] for path in (file, truth))
    assert ours.keys() == truth.keys()
    assert [name for name in truth if not torch.allclose(ours[name], truth[name], rtol=0, atol=atol)] == []


def save_as_from_a_gpu(content, path):
    """torch.save, as if the tensors were on a GPU: a machine without one reads them only with map_location."""
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save(content, path)


def names_in(folder):
    """The names of what a folder of checkpoints holds."""
    return {path.name for path in folder.iterdir()} - {"lock"}
