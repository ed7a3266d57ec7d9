"""Activations: what readers compute on every token, on disk or live, and batches of them for training."""
