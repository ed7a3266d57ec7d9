"""The story: what a diff says, every statement derived once. Pages, printed text, JSON and cards render it."""
