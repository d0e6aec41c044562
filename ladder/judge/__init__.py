"""What judges: two logs step by step, the standings of a race."""
