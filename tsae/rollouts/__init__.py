"""Rollouts: the table of trajectories, sampling and importing them, checking answers, bands, behaviours, difficulty."""
