"""What commands share: reading a series and rollouts, and saying what was written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tsae.errors import TsaeError

if TYPE_CHECKING:
    from tsae.checkpoints.series import CheckpointSeries
    from tsae.rollouts.table import Rollouts


def load_series(*sources: str | Path) -> CheckpointSeries:
    """The series, with its notes on standard error."""
    from tsae.checkpoints.series import CheckpointSeries

    series = CheckpointSeries.load(*sources)
    for note in series.notes:
        print(f"note: {note}", file=sys.stderr)
    return series


def own_rollouts(path: Path, policy: str) -> Rollouts:
    """What a policy sampled.

    Raises:
        TsaeError: where it sampled nothing.
    """
    import tsae

    rollouts = tsae.Rollouts.read(path)
    if policy not in rollouts.policies:
        raise TsaeError(
            f"holds nothing that {policy} sampled; policies are {', '.join(rollouts.policies)}",
            where=path,
            fix="Give rollouts of that checkpoint, or another --checkpoint.",
        )
    return rollouts.where(policy=policy)


def say_wrote(path: Path, what: object | None = None) -> None:
    print(f"wrote {path}" + (f": {what}" if what is not None else ""))
