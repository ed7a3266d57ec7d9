"""Views in a terminal: plain text."""
