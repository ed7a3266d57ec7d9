"""Interventions on chosen SAE features while a checkpoint generates, with their controls."""
