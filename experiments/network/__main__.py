"""How fast the ranks of a job add up their gradients, and what that means for a step of DDP.

    torchrun --nnodes=2 ... -m experiments.network [megabytes ...]

All-reduces float32 buffers of these sizes between all ranks (NCCL between GPUs, else gloo), 25 MB being the size of
DDP's buckets, and prints for each

    ms       median of 5, the slowest rank's
    GB/s     the bytes of the buffer divided by the time: what DDP gets
    link     what each rank sends, and receives, in that time with the ring algorithm: 2 (n - 1) / n of the buffer

and then the time that DDP's gradients, 4 bytes per parameter once per step, take at the rate of the second size.
"""
import argparse
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import ddp_run


def all_reduce_seconds(n_bytes, device, tries=5):
    """Median seconds to all-reduce a float32 buffer of `n_bytes`, on the slowest rank."""
    buffer, seconds = torch.zeros(n_bytes // 4, device=device), []
    for _ in range(tries + 1):
        dist.barrier()
        torch.get_device_module(device).synchronize()
        t0 = time.perf_counter()
        dist.all_reduce(buffer)
        torch.get_device_module(device).synchronize()
        seconds.append(time.perf_counter() - t0)
    slowest = torch.tensor(seconds[1:], device=device)  # the first one connects the ranks
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def gradient_bytes(size):
    """Bytes of the gradients that a step of ddp_run.py moves, for a --model."""
    with torch.device("meta"):
        config = ddp_run.model_config(ddp_run.parse_args(["--model", size]), 50257)
        return 4 * sum(p.numel() for p in ddp_run.GPT(config).parameters())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("megabytes", nargs="*", type=float, default=[1, 25, 250], help="sizes (default: 1 25 250)")
    megabytes = parser.parse_args(argv).megabytes
    if "RANK" not in os.environ:
        sys.exit("error: experiments.network: needs several ranks; start it with torchrun")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    n, say = dist.get_world_size(), print if dist.get_rank() == 0 else lambda line: None
    say(f"{n} ranks on {n // int(os.environ['LOCAL_WORLD_SIZE'])} machines, {dist.get_backend()}")
    say(f"{'MB':>6} {'ms':>9} {'GB/s':>8} {'link GB/s':>10}")
    rates = []
    for size in megabytes:
        seconds = all_reduce_seconds(int(size * 1e6), device)
        rates.append(size * 1e6 / seconds)
        say(f"{size:6g} {seconds * 1e3:9.2f} {rates[-1] / 1e9:8.3f} {rates[-1] * 2 * (n - 1) / n / 1e9:10.3f}")
    say(f"{'model':<12} {'MB a step':>10} {'seconds':>8}")
    for size in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        n_bytes = gradient_bytes(size)
        say(f"{size:<12} {n_bytes / 1e6:10.1f} {n_bytes / rates[min(1, len(rates) - 1)]:8.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
