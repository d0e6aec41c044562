"""The tool around the ladder, in three parts: `scripts` knows the rungs, `show` reads logs, `measure` runs scripts.

Imports go one way: `measure` uses `show` and `scripts`, `show` uses `scripts`, and `scripts` uses neither.
"""
