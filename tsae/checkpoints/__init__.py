"""Checkpoint series: finding checkpoints, loading them, and hooks that read and write their residual streams."""
