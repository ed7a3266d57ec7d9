"""Means over problems: one bootstrap for all, intervals of few problems, proportions."""
