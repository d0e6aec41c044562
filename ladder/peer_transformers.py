"""The peer: Hugging Face transformers' own GPT-2, trained with everything a user would switch on.

    python ladder/peer_transformers.py -B 1 -T 1024 --steps 12

bfloat16 autocast, SDPA attention, torch.compile and fused AdamW, at the same B, T, data and seed as rung 10, timed in
the same way and logged in the same format, to `<log-dir>/peer_transformers.log`. Rung 10 should not be slower.
Dropout is off, as in the ladder. Batches, flags and helpers are rung 10's own.
"""
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import speedup_10_fused_adamw as rung_10


def build_peer(shape, device):
    """transformers' GPT-2 of the given rung 10 configuration, with random weights."""
    config = GPT2Config(
        n_positions=shape.block_size, n_embd=shape.n_embd, n_layer=shape.n_layer, n_head=shape.n_head,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config).to(device)


def main(argv=None):
    args = rung_10.parse_args(argv)
    device = args.device
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    loader = rung_10.DataLoaderLite(args.data, args.B, args.T)
    model = build_peer(rung_10.MODELS[args.model], device)
    step_model = model if args.compile_mode == "none" else torch.compile(model, mode=args.compile_mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    args.log_dir.mkdir(parents=True, exist_ok=True)
    log_file = open(args.log_dir / "peer_transformers.log", "w", buffering=1)

    def log(line):
        print(line, flush=True)
        print(line, file=log_file)

    log("# script: peer_transformers.py")
    log(f"# model: {args.model} | parameters: {sum(p.numel() for p in model.parameters()):,}")
    log(f"# device: {rung_10.device_name(device)} | torch: {torch.__version__} | precision: bfloat16 autocast")
    log(f"# compile: {args.compile_mode}")
    log(f"# batch: B={args.B} T={args.T} | steps: {args.steps} | seed: {args.seed}")
    log(f"# data: {loader.meta['source']} ({loader.meta['tokenizer']} tokens)"
        f" | loaded {len(loader.tokens)} tokens | 1 epoch = {loader.batches_per_epoch} batches")

    tokens_per_step = args.B * args.T
    seconds = []
    for step in range(1, args.steps + 1):
        t0 = time.perf_counter()
        x, y = loader.next_batch()
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = step_model(x, labels=y, shift_labels=y).loss  # our y is already the next token
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        torch.get_device_module(device).synchronize()
        dt = time.perf_counter() - t0
        seconds.append(dt)
        loss = loss.item()
        log(f"step : {step} | loss: {loss:.6f} | dt: {dt * 1000:.2f} ms | tokens/sec: {tokens_per_step / dt:.2f}")

    skipped = min(5 if args.steps > 10 else 2, args.steps - 1)
    dt = statistics.median(seconds[skipped:])
    log(f"# first step, compilation included: {seconds[0]:.2f} s")
    log(f"median : dt: {dt * 1000:.2f} ms | tokens/sec: {tokens_per_step / dt:.2f}"
        f" | peak memory: {rung_10.peak_memory(device):.2f} GB | steps {skipped + 1}-{args.steps}")


if __name__ == "__main__":
    main()
