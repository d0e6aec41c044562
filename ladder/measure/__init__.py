"""Runs scripts and measures: rungs, races, profiles, surveys, and the machine itself."""
