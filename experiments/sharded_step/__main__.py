"""What does sharing the optimizer's work among ranks save? long_run.py's update and `sharded_optimizer`'s, interleaved.

    torchrun --standalone --nproc_per_node=2 -m experiments.sharded_step --model gpt2
"""
import argparse
import statistics
import time

import torch
import torch.distributed as dist

from ladder.rungs.list import BY_LABEL, load_script


def state_bytes(optimizer):
    return sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    contestants = {}
    for label in ("long_run", "sharded_optimizer"):
        module = load_script(BY_LABEL[label])
        torch.manual_seed(0)  # the same weights and gradients on all ranks
        model = module.GPT(module.model_config(module.parse_args(["--model", args.model]), 50257)).to(device)
        optimizer = model.configure_optimizers(lr=6e-4, muon_lr=2e-3, weight_decay=0.1)
        contestants[label] = model, optimizer, []
    for _ in range(args.rounds + 1):  # the first warms up
        for model, optimizer, seconds in contestants.values():
            for p in model.parameters():
                p.grad = torch.randn_like(p)
            dist.barrier()
            torch.get_device_module(device).synchronize()
            started = time.perf_counter()
            optimizer.step()
            torch.get_device_module(device).synchronize()
            seconds.append(time.perf_counter() - started)
    for label, (_, optimizer, seconds) in contestants.items():
        found = seconds[1:]
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {args.model}, {device}, {label}: "
              f"{statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f}, {len(found)} rounds), "
              f"{state_bytes(optimizer) / 1e9:.2f} GB of state", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
