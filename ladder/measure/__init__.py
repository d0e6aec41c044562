"""Runs scripts and measures: rungs, races, profiles, and the machine itself."""
