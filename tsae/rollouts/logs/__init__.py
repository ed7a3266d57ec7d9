"""Readers of trainers' rollout logs: a module a trainer, each of which turns a row of its log into entries."""
