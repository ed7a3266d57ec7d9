"""The report: a story of statements, and the views that render it."""
