"""Checkpoints: find them, load them, run them, and measure how far training moved their weights."""
