"""Difficulty: how hard problems are for every checkpoint, and how that moves along a run."""
