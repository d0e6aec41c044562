"""Small faults in the training scripts that no other test notices, each with the test that does.

One run of the latest script that has the code stands for all (test_ladder_laws.py): rung 24's, and FSDP's. Only
torch's functions and names that all scripts share are patched.
"""
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import losses, new_gpt, own_settings, read_steps, rung, train
from test_beyond import tokens_of, val_lines
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ladder.scripts.stages import BY_LABEL

FSDP = [label for label, stage in BY_LABEL.items() if stage.name.startswith("fsdp")]
LATEST = ["24", *FSDP]
latest = pytest.mark.parametrize("label", LATEST)
ONE = ("-B", 1, "-T", 16, "--total-batch", 16)  # a step of one micro-step
IN_A_GROUP_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
                     "TORCHELASTIC_MAX_RESTARTS": "0"}


class Stop(Exception):
    """Ends a run where a CPU cannot go on."""


def stop(*args, **kwargs):
    raise Stop


@pytest.fixture(scope="module")
def grouped(tmp_path_factory, tokens):
    """grouped(label): what is seen of a run in bfloat16, "compiled", as the only rank of a process group.

    The sums over the ranks say that another one has got a signal in the second of its four steps.
    """
    runs = {}

    def watch(label):
        module, folder = rung(label), tmp_path_factory.mktemp("grouped")
        seen = SimpleNamespace(folder=folder, forward=set(), modes=set(), angles=set(), storages=[])
        sums, forward, rotate, all_reduce = [], module.GPT.forward, module.rotate, dist.all_reduce

        def watched_forward(model, *args):
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            seen.forward.add((model.training, torch.is_grad_enabled(), dtype))
            return forward(model, *args)

        def watched_rotate(x, cos, sin):
            seen.angles |= {cos.dtype, sin.dtype}
            return rotate(x, cos, sin)

        def watched_compile(function, **options):
            seen.modes |= set() if function is torch.sin else {options.get("mode")}  # torch.sin: the probe
            return function

        def see_step(optimizer, args, kwargs):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if label not in FSDP:
                seen.storages.append((len(gradients), len({g.untyped_storage().data_ptr() for g in gradients})))

        def all_ranks(tensor, *args, **kwargs):
            all_reduce(tensor, *args, **kwargs)
            if not tensor.is_floating_point():  # the number of signals
                sums.append(tensor)
                tensor += len(sums) == 2

        module.GPT.forward, module.rotate = watched_forward, watched_rotate
        module.autocast_dtype = lambda device: torch.bfloat16
        hook = register_optimizer_step_pre_hook(see_step)
        with pytest.MonkeyPatch.context() as patch, own_settings():
            for name, value in IN_A_GROUP_OF_ONE.items():
                patch.setenv(name, value)
            patch.setattr(torch, "compile", watched_compile)
            patch.setattr(dist, "all_reduce", all_ranks)
            try:
                seen.log = train(module, folder, tokens, *ONE, "--steps", 4, "--val-every", 2, "--val-sequences", 2,
                                 compile_mode="max-autotune-no-cudagraphs")
            finally:
                hook.remove()
                if dist.is_initialized():
                    dist.destroy_process_group()
        return seen

    return lambda label: runs[label] if label in runs else runs.setdefault(label, watch(label))


@latest
def test_a_rank_stops_when_another_one_gets_a_signal(label, grouped):
    """After the same step, with a checkpoint."""
    seen = grouped(label)
    assert [step["step"] for step in read_steps(seen.log)] == [1, 2]
    log = seen.log.read_text()
    assert "# checkpoint: step 2 in" in log and "# ended by a signal after step 2" in log


@latest
def test_validation_is_under_autocast_and_without_gradients(label, grouped):
    """As --val-every calls it; training is under autocast with them."""
    assert grouped(label).forward == {(True, True, torch.bfloat16), (False, False, torch.bfloat16)}


@latest
def test_the_mode_of_torch_compile_arrives(label, grouped):
    assert grouped(label).modes == {"max-autotune-no-cudagraphs"}


@latest
def test_the_angles_of_rope_stay_in_float32(label, grouped):
    """FSDP's mixed precision casts what a block is given, unless it is told not to."""
    assert grouped(label).angles == {torch.float32}


def test_gradients_are_views_of_the_buckets(grouped):
    """All of the 3.4 million parameters fit into DDP's first two; else each gradient is there twice."""
    for n_gradients, n_storages in grouped("24").storages:
        assert n_gradients >= 10 and n_storages <= 2


@pytest.fixture(scope="module")
def begun(tmp_path_factory, tokens):
    """begun(label): the folder of a float16 run of one step, its scale 2**10, which may go on (no decay yet)."""
    folders = {}

    def begin(label):
        module, folder = rung(label), tmp_path_factory.mktemp("begun")
        module.autocast_dtype = lambda device: torch.float16
        with pytest.MonkeyPatch.context() as patch, own_settings():
            scaler = torch.amp.GradScaler
            patch.setattr(torch.amp, "GradScaler", lambda *args, **more: scaler(*args, init_scale=2.0**10, **more))
            train(module, folder, tokens, *BEGUN, "--steps", 1)
        return folder

    return lambda label: folders[label] if label in folders else folders.setdefault(label, begin(label))


BEGUN = (*ONE, "--val-every", 0, "--checkpoint-every", 1, "--decay-share", 0)


@latest
def test_a_resumed_run_has_the_scale_that_it_had(label, begun, tokens, tmp_path, monkeypatch):
    shutil.copytree(begun(label), tmp_path / "run")
    module, scalers, scaler = rung(label), [], torch.amp.GradScaler
    module.autocast_dtype = lambda device: torch.float16

    def new_scaler(*args, **more):
        scalers.append(scaler(*args, **more))
        return scalers[0]

    monkeypatch.setattr(torch.amp, "GradScaler", new_scaler)
    log = train(module, tmp_path / "run", tokens, *BEGUN, "--steps", 2, "--resume")
    assert len(losses(log)) == 2 and scalers[0].get_scale() == 2.0**10  # and not 2**16, where a new one starts


@latest
def test_other_data_or_weights_are_not_resumed(label, begun, tokens, tmp_path):
    """Also where everything else is the same: another text of as many tokens, another start."""
    shutil.copytree(tokens, tmp_path / "other")
    meta = json.loads((tokens / "meta.json").read_text())
    (tmp_path / "other" / "meta.json").write_text(json.dumps({**meta, "sha256": "0" * 64}))
    with pytest.raises(SystemExit, match="^error: --resume: .* has text .*0000"):
        train(rung(label), begun(label), tmp_path / "other", *BEGUN, "--steps", 2, "--resume")
    module = rung(label)
    module.new_model = lambda settings, loader: new_gpt(module)  # as if there were such a file
    with pytest.raises(SystemExit, match="^error: --resume: .* has pretrained .*elsewhere"):
        train(module, begun(label), tokens, *BEGUN, "--steps", 2, "--resume", "--pretrained", "elsewhere")


@pytest.mark.parametrize("label", ["ddp", *LATEST])
def test_a_rank_takes_the_gpu_of_its_own_machine(label, monkeypatch, tokens):
    """Rank 10 of all, the second on its machine."""
    module, taken = rung(label), []
    for name, value in (IN_A_GROUP_OF_ONE | {"RANK": "10", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append(int(str(device).removeprefix("cuda:"))))
    monkeypatch.setattr(dist, "init_process_group", stop)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # which a rank above 0 closes to itself
    settings = module.parse_settings(["--data", str(tokens)])
    settings.device = "cuda"
    with pytest.raises(Stop):
        module.train(settings)
    assert taken == [1]


def test_batches_are_copied_to_a_gpu_from_pinned_memory_and_without_waiting(tokens, monkeypatch):
    module, events = rung("24"), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (0, 10**15))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: events.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **more: events.append((args, more)) or self)
    loader = module.DataLoaderLite(tokens, 1, 16, "cuda")
    assert not loader.on_device  # the memory that is free decides, not the memory that there is
    loader.batch(0)
    assert events == ["pinned", (("cuda",), {"non_blocking": True})]


DEFAULTS = {  # in all scripts that have the flag; --max-lr and --steps are in the README's words
    "T": 1024, "steps": 50, "seed": 1337, "max_lr": 6e-4, "warmup_steps": 10, "total_batch": None, "val_every": 25,
    "val_sequences": 32, "checkpoint_every": 250, "recompute_blocks": 0, "loss_chunk": 4096, "muon_lr": 2e-3,
    "decay_share": 0.4, "compile_mode": "default", "resume": False, "save": None, "model": "gpt2",
}


def test_the_defaults():
    """A changed one would change what everybody's next run computes, and what committed logs compare with."""
    for stage in BY_LABEL.values():
        settings = vars(rung(stage.label).parse_settings([]))
        assert settings.items() >= {name: DEFAULTS[name] for name in DEFAULTS if name in settings}.items(), stage.file


@pytest.mark.parametrize("label", ["11", *LATEST])
def test_the_default_batch_is_that_of_gpt3(label):
    """2**19 tokens: 128 micro-steps of 4 x 1024 on one GPU, 16 on eight; four of any size on a CPU."""
    module = rung(label)
    for device, ranks, micro_steps in (("cuda", 1, 128), ("cuda", 8, 16), ("cpu", 1, 4)):
        settings = module.parse_settings(["-B", "4", "-T", "1024"])
        settings.device = device
        module.init_ranks = lambda settings, ranks=ranks: (0, ranks)
        module.autocast_dtype, module.DataLoaderLite = lambda device: torch.float32, stop
        with pytest.raises(Stop):
            module.train(settings)
        assert settings.total_batch == micro_steps * 4 * 1024 * ranks


def test_muon_does_not_care_how_small_a_gradient_is():
    """Newton-Schulz starts from a matrix of norm 1; an epsilon larger than the gradient would leave it smaller."""
    module, updates = rung("24"), []
    torch.manual_seed(0)
    gradients = [torch.randn_like(p) for p in new_gpt(module).transformer.h.parameters()]
    for scale in (1.0, 1e-6):
        torch.manual_seed(0)
        model = new_gpt(module)
        optimizer = model.configure_optimizers(weight_decay=0.0)
        before = model.transformer.h[0].mlp.gate_proj.weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for p, gradient in zip(model.transformer.h.parameters(), gradients, strict=True):
            p.grad = scale * gradient
        optimizer.step()
        updates.append(model.transformer.h[0].mlp.gate_proj.weight.detach() - before)
    assert (updates[1] - updates[0]).norm() < 0.1 * updates[0].norm()


def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name(tmp_path, tokens, monkeypatch):
    """After a power cut a file that was renamed but not written through may be empty."""
    synced, fsync, path = [], os.fsync, tmp_path / "checkpoints" / "step_0000001.pt"
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_size, path.exists())) or fsync(file))
    train(rung("24"), tmp_path, tokens, *ONE, "--steps", 1, "--val-every", 0)
    assert synced == [(path.stat().st_size, False)]


@pytest.mark.parametrize("label", ["0", "24"])
def test_the_last_batch_needs_a_token_after_it(label, tmp_path):
    """35 tokens are two batches of 17 and the target of the last; of 34 the second would lack that."""
    for n_tokens, n_batches in ((34, 1), (35, 2)):
        module, folder = rung(label), tokens_of(tmp_path / f"{label}_{n_tokens}", range(n_tokens))
        loader = module.DataLoaderLite(folder, 1, 17, *(["cpu"] if label == "24" else []))
        assert loader.n_batches == n_batches and loader.batch(n_batches - 1)[1][0, -1] == 17 * n_batches
        assert torch.equal(loader.batch(n_batches)[1], loader.batch(0)[1])


def test_the_text_takes_a_tenth_of_the_free_memory_at_most(tokens):
    """8 bytes a token; the rest is for the model."""
    module = rung("24")
    n_tokens = (tokens / "train.bin").stat().st_size // 2
    for free, on_device in ((80 * n_tokens, True), (80 * n_tokens - 1, False)):
        module.free_memory = lambda device, free=free: free
        assert module.DataLoaderLite(tokens, 1, 16, "cpu").on_device is on_device


def test_a_rank_takes_its_own_batches(tokens, tmp_path, monkeypatch):
    """Rank 1 of 2 every second one, also those that are fetched ahead (alone here, so all sums are its own)."""
    module, asked = rung("24"), []
    batch = module.DataLoaderLite.batch
    module.DataLoaderLite.batch = lambda self, i: asked.append(i) or batch(self, i)
    for name, value in IN_A_GROUP_OF_ONE.items():
        monkeypatch.setenv(name, value)
    init_ranks = module.init_ranks
    module.init_ranks = lambda settings: init_ranks(settings) and (1, 2)
    train(module, tmp_path, tokens, "-B", 1, "-T", 8, "--total-batch", 32, "--steps", 2, "--val-every", 0)
    assert list(dict.fromkeys(asked)) == [1, 3, 5, 7, 9]


def test_no_more_is_validated_than_there_is(tmp_path):
    """40 tokens are two sequences of 16; a third one would be the first again."""
    folder = tokens_of(tmp_path / "tokens", range(100), range(40))
    logs = [train(rung("24"), tmp_path / n, folder, *ONE, "--steps", 1, "--checkpoint-every", 0, "--val-sequences", n)
            for n in ("2", "3")]
    assert all("validation: every 25 steps on 2 of 2 sequences" in log.read_text() for log in logs)
    assert val_lines(logs[0]) == val_lines(logs[1])


def test_the_logged_loss_keeps_no_graph(tokens, tmp_path, monkeypatch):
    """Else the activations of all micro-steps of a step are kept at once."""
    item, graphs = torch.Tensor.item, []
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: graphs.append(tensor.grad_fn) or item(tensor))
    train(rung("24"), tmp_path, tokens, "-B", 1, "-T", 8, "--total-batch", 16, "--steps", 1, "--val-every", 0)
    assert graphs and set(graphs) == {None}


def test_a_decay_of_a_step_and_a_half():
    """Not in whole steps: the rate of the last is 1 of 1.5 parts."""
    get_lr = rung("24").get_lr
    assert [get_lr(step, 5, 1.0, 0, 0.3) for step in (3, 4, 5)] == pytest.approx([1, 1, 2 / 3])
