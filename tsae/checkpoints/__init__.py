"""Checkpoint series: finding checkpoints, loading them, and hooks that read and write their residual streams."""

from tsae.checkpoints.series import Checkpoint, CheckpointSeries

__all__ = ["Checkpoint", "CheckpointSeries"]
