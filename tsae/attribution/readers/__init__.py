"""Readers of the settings that trainers leave, one module a trainer."""
