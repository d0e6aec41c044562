"""A file a verb, called like it."""
