"""Crosscoders: one dictionary for the base and another checkpoint, read side by side."""
