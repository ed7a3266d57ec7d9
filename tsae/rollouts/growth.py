"""Growth of a log: what an earlier import held must still be there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from tsae.errors import TsaeError
from tsae.rollouts.logs.entry import hash64
from tsae.rollouts.parquet import list_lengths, read_pieces

_COLUMNS = ("problem_id", "prompt_ids", "response_ids", "reward", "step")
_SHOWN = 3


def check_grown(before: Path, now: Path, log: Path) -> None:
    """Check that a log still holds every trajectory that it held before: the same tokens, reward and step.

    Memory holds 16 bytes a trajectory.

    Args:
        before: Parquet file of the earlier import; there may be none.
        now: that of the log as it is.
        log: named in the message.

    Raises:
        TsaeError: where a trajectory is missing or has changed; the message names its step.
    """
    if not before.is_file():
        return
    held, steps = _rows(before)
    there, _ = _rows(now)
    values, counts = np.unique(there, return_counts=True)
    mine, first, needed = np.unique(held, return_index=True, return_counts=True)
    place = np.searchsorted(values, mine).clip(max=max(len(values) - 1, 0))
    found = np.where(values[place] == mine, counts[place], 0) if len(values) else np.zeros(len(mine), int)
    lost = found < needed
    if not lost.any():
        return
    # NaN where the log has no steps.
    which = sorted({int(step) for step in steps[first[lost]] if step == step})
    shown = ", ".join(map(str, which[:_SHOWN])) + (f" and {len(which) - _SHOWN} more" if len(which) > _SHOWN else "")
    raise TsaeError(
        f"no longer holds {int((needed - found)[lost].sum()):,} of the {len(held):,} trajectories that were read before"
        + (f" (of step {shown})" if which else "")
        + ": it has not only grown",
        where=log,
        fix="If the training began again, or resumed from an earlier checkpoint, analyse it in another folder (--to).",
    )


def _rows(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """(n,) uint64 hash and (n,) float64 step of every trajectory."""
    hashes: list[np.ndarray] = []
    steps: list[np.ndarray] = []
    for table in read_pieces(file, _COLUMNS):
        hashes.append(np.fromiter(_hashes(table), np.uint64, len(table)))
        steps.append(table["step"].cast(pa.float64()).to_numpy())
    return np.concatenate(hashes), np.concatenate(steps)


def _hashes(table: pa.Table) -> Iterator[int]:
    ids = {name: np.split(_values(table[name]), list_lengths(table[name]).cumsum()) for name in _COLUMNS[1:3]}
    columns = (table["problem_id"].to_pylist(), table["reward"].to_pylist(), table["step"].to_pylist())
    for problem, reward, step, prompt, response in zip(*columns, *ids.values(), strict=False):
        yield hash64(problem, repr(reward), repr(step), prompt.tobytes(), response.tobytes())


def _values(column: pa.ChunkedArray) -> np.ndarray:
    chunks = [chunk.flatten().to_numpy() for chunk in column.chunks]
    return np.concatenate([np.zeros(0, np.int32), *chunks]).astype(np.int32, copy=False)
