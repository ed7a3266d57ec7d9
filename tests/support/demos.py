"""The demo on its smallest setting."""

from __future__ import annotations

import tsae
from tsae.config import DemoConfig

TINY = DemoConfig(
    problems=14,
    samples=4,
    band_samples=12,
    attribute=False,
    sae=tsae.SAEConfig(d_sae=64, k=4),
    training=tsae.TrainingConfig(tokens=40_000, batch_tokens=1024),
)
