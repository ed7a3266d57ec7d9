"""Rollouts: the table of trajectories, sampling them, checking answers, difficulty and advantages."""

from tsae.rollouts.problems import Problem, read_problems, write_problems
from tsae.rollouts.table import Rollouts

__all__ = ["Problem", "Rollouts", "read_problems", "write_problems"]
