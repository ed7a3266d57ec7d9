"""Gradients of single samples along the path of checkpoints, and on disk."""
