"""The tool around the ladder: `scripts` knows the rungs, `measure` runs, `count` counts, `judge` judges, `show` shows.

Nothing that only reads logs imports torch.
"""
