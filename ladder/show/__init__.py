"""Shows what records/ holds: in a terminal, in Markdown, as pictures, on the page."""
