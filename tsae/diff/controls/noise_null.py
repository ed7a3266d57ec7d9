"""What noise as large as an update moved: the table that stands beside a diff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from tsae.base.table_export import Tables


@dataclass(frozen=True)
class NoiseNull(Tables):
    """Shifts of checkpoints and of noise as large as their updates, on the same trajectories."""

    table: pd.DataFrame
    """One row a checkpoint, draw and tested feature:

    checkpoint      whose update gives the size of the noise
    draw            1, 2, …: a noisy checkpoint; 0: the checkpoint itself
    share           norm of the noise / norm of the update
    feature         index
    difference      the feature's mean minus the base's, on the same trajectories
    delta           the same in standard deviations of the feature over base trajectories
    p, q            of the null that the feature did not move; q over the features of the checkpoint or draw
    """
    info: dict[str, dict[str, Any]]
    """By checkpoint: note (why there is nothing, or ""), update_norm (‖W − W₀‖ / ‖W₀‖ over all weights). Where noise
    was read also draws, share, n_problems, n_trajectories; n_tested and n_moved of the checkpoint; noise_tested and
    noise_moved of every draw; run and noise: quantiles of |Δ| over features (median, q90, q99, largest)."""
