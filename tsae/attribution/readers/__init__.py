"""Readers of the settings that trainers leave: what words mean is data, one table a trainer."""
