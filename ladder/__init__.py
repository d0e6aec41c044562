"""The tool around the scripts: `python -m ladder` measures them, shows them, and keeps the copies in step."""
