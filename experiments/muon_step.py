"""What does Muon's update cost, however many tokens the step has? Rung 18's, torch's own, and AdamW's, interleaved.

    python -m experiments.muon_step --model small
"""
import argparse
import statistics
import time

import torch

from ladder.rungs.list import BY_LABEL, load_script

ROUNDS = 3


def optimizers(model):
    """{name: [optimizer, ...]} that train all parameters of a model."""
    ours = model.configure_optimizers(lr=6e-4, muon_lr=2e-3, weight_decay=0.1)
    matrices, *rest = (group["params"] for group in ours.param_groups)
    rest = [p for params in rest for p in params]
    return {
        "rung 17, AdamW": [torch.optim.AdamW([*matrices, *rest], fused=True)],
        "rung 18, Muon and AdamW": [ours],
        "torch.optim.Muon and AdamW": [torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"),
                                       torch.optim.AdamW(rest, fused=True)],
    }


def seconds_of(parts, model, device):
    """Of one update with random gradients."""
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.get_device_module(device).synchronize()
    started = time.perf_counter()
    for part in parts:
        part.step()
    torch.get_device_module(device).synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="small")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = load_script(BY_LABEL["18"])
    model = module.GPT(module.model_config(module.parse_args(["--model", args.model]), 50257)).to(device)
    contestants = optimizers(model)
    rounds = [[1000 * seconds_of(parts, model, device) for parts in contestants.values()] for _ in range(ROUNDS + 1)]
    print(f"{args.model}, {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, ms in zip(contestants, zip(*rounds[1:], strict=True), strict=True):  # the first warms up
        print(f"{name}: {statistics.median(ms):,.1f} ms ({min(ms):,.1f} to {max(ms):,.1f}, {ROUNDS} rounds)")
