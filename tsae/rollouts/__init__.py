"""Rollouts: the table of trajectories, sampling them, checking answers, difficulty and advantages."""
