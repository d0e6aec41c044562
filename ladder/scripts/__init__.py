"""What the tool knows of the scripts: the list of the rungs, their laws, lessons and copies, their memory and FLOPs."""
