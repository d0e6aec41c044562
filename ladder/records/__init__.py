"""What runs have left: logs, their tables and statistics. Loads no torch."""
