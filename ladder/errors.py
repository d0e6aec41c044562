"""The one exception of the tool: its text is the line that the user reads."""


class UserError(Exception):
    """A mistake that the user can fix; the message says how."""
