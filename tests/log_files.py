"""Logs with known numbers."""
MEDIAN = "\nmedian : dt: 50.00 ms | tokens/sec: 1.00 | peak memory: 1.00 GB | steps 3-3\n"


def write_log(path, ms=(100, 50, 50), losses=None, header="# batch: B=4 T=1024 | steps: 3 | seed: 1\n", tail="\n"):
    losses = losses or [10 - i for i in range(len(ms))]
    lines = [f"step : {i + 1} | loss: {losses[i]} | dt: {ms[i]} ms" for i in range(len(ms))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header + "\n".join(lines) + tail)
    return path
