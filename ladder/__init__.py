"""The tool around the ladder, in three rooms: `scripts` knows the rungs, `show` reads logs, `measure` runs scripts.

The arrows point one way: `measure` uses `show` and `scripts`, `show` uses `scripts`, and `scripts` uses neither.
"""
