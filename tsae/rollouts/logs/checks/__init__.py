"""Comparisons of what a log says twice."""
