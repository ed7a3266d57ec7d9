"""Readers: the checkpoints whose activations are recorded, what they read, and their forward passes."""
