"""The tool around the ladder: `rungs` knows them, `count` counts, `show` shows and compares, `measure` runs.

Each imports only from those before it. Nothing that only reads logs imports torch.
"""
