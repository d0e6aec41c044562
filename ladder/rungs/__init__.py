"""What the tool knows about the scripts: the list of rungs, their laws, lessons, shared code."""
