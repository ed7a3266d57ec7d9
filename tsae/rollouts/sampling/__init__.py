"""Sampling: responses of a checkpoint, generated here or by a server."""
