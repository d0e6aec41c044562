"""The one exception of the tool: its text is the line that the user reads."""


class UserError(Exception):
    """Something the user can put right; the message says how."""
