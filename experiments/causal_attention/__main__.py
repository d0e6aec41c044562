"""Can attention on a CPU be faster than PyTorch's kernel, where it skips what the causal mask hides?

    python -m experiments.causal_attention [-T 1024]

Forward and backward of one layer of GPT-2 (124M), in turn: the flash kernel of rung 6; the same kernel without a mask;
and the queries in blocks, each against the keys up to its own, by the kernel and written out.
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from ladder.rungs.list import BY_LABEL, load_script

NH, HS = 12, 64  # heads, width of a head
ROUNDS = 5


def flash(q, k, v):  # all (B, nh, T, hs)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def no_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def in_blocks(attend, size=256):
    """Attention in blocks of `size` queries. `attend` takes a block, its keys and values, and which of them it sees."""
    def attention(q, k, v):
        T = q.size(-2)
        seen = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
        rows = [slice(start, min(start + size, T)) for start in range(0, T, size)]
        return torch.cat([attend(q[..., row, :], k[..., :row.stop, :], v[..., :row.stop, :], seen[row, :row.stop])
                          for row in rows], dim=-2)
    return attention


def written_out(q, k, v, seen):
    scores = (q @ k.transpose(-2, -1)) * HS**-0.5  # (B, nh, size, end)
    return F.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1) @ v


CONTESTANTS = {
    "flash kernel, causal (rung 6)": flash,
    "flash kernel, no mask": no_mask,
    "flash kernel in blocks": in_blocks(lambda q, k, v, seen: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)),
    "written out in blocks": in_blocks(written_out),
    "written out in blocks, compiled": torch.compile(in_blocks(written_out)),
}


def timed(attention, T, dtype, device):
    """(forward, backward) in milliseconds."""
    q, k, v = (torch.randn(1, NH, T, HS, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    times = [time.perf_counter()]
    y = attention(q, k, v)
    torch.get_device_module(device).synchronize()
    times.append(time.perf_counter())
    y.sum().backward()
    torch.get_device_module(device).synchronize()
    times.append(time.perf_counter())
    return [1000 * (after - before) for before, after in zip(times, times[1:], strict=False)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-T", type=int, default=1024)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = load_script(BY_LABEL["3"]).autocast_dtype(device)
    print(f"B=1 nh={NH} T={args.T} hs={HS}, {dtype}, {device}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}")
    rounds = {name: [] for name in CONTESTANTS}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, attention in CONTESTANTS.items():
            rounds[name].append(timed(attention, args.T, dtype, device))
    for name, found in rounds.items():
        forward, backward = ([f"{f(ms):.0f}" for f in (statistics.median, min, max)]
                             for ms in zip(*found[1:], strict=True))
        print("{}: forward {} ms ({} to {}), backward {} ms ({} to {})".format(name, *forward, *backward))


if __name__ == "__main__":
    main()
