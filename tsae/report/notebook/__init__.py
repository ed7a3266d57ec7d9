"""Views in a notebook: cards of results, and passages with their tokens."""
