"""What starts processes and measures: rungs, contests, profiles, the machine itself."""
