"""The rows that contrasts are drawn on: what each row is, and the unit of Δ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.problem_means import side_means
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.features.sparse_matrices import Columns, columns_of, row_blocks
from tsae.features.sparse_matrices import Rows as Matrix

_ROWS = 512  # whose squares are summed at once


class Scale(NamedTuple):
    """The unit of Δ in a checkpoint's contrasts."""

    deviation: np.ndarray
    """(n_features,) standard deviation over base trajectories; where silent, pooled with that of the checkpoint."""
    silent: np.ndarray
    """(n_features,) bool: active in fewer than min_problems of the base's problems, or with the same mean in all of its
    trajectories, so that the base says too little of the deviation."""


@dataclass(frozen=True)
class Rows:
    """What contrasts need of every row of a FeatureTable."""

    values: Matrix
    """(n_rows, n_features) mean activation over the span; 0 for a row without a token of it."""
    columns: Columns
    """The same by columns."""
    problem: np.ndarray
    """(n_rows,) problem codes."""
    band: np.ndarray
    """(n_rows,) easy, medium, hard, or None."""
    outcome: np.ndarray
    """(n_rows,) success, failure or unknown."""
    n_tokens: np.ndarray
    """(n_rows,) tokens of the span."""
    by_reader: dict[tuple[str, str | None], np.ndarray]
    """Rows of (reader, policy) that have a token of the span; of all policies under (reader, None)."""
    pooled: bool
    """Whether all trajectories count as one policy's: all readers read the same ones, and their own trajectories share
    too few problems to be compared."""
    scales: dict[str, Scale]
    """By reader."""

    @classmethod
    def of(cls, features: FeatureTable, config: DiffConfig) -> Rows:
        """The rows of a table, over the config's span.

        Raises:
            TsaeError: where a mean activation is no finite number.
        """
        frame = features.rollouts.frame.iloc[features.trajectory]
        n_tokens = features.counts(features.span_mask(config.span))
        by_reader: dict[tuple[str, str | None], np.ndarray] = {}
        for reader in features.readers:
            by_reader[reader, None] = features.rows(reader=reader)
            # The base reads what every run sampled; every other reader the base's trajectories and its own.
            for policy in features.readers if reader == features.readers[0] else (features.readers[0], reader):
                by_reader[reader, policy] = features.rows(reader=reader, policy=policy)
        problem = pd.factorize(frame.problem_id)[0]
        values = features.row_means(config.span)
        _need_finite(values, features.origin)
        rows = cls(
            values=values,
            columns=columns_of(values),
            problem=problem,
            band=frame.band.to_numpy(dtype=object),
            outcome=frame.outcome.to_numpy(dtype=object),
            n_tokens=n_tokens,
            by_reader={key: found[n_tokens[found] > 0] for key, found in by_reader.items()},
            pooled=_is_pooled(features, by_reader, problem, config),
            scales={},
        )
        own = [by_reader[reader, rows.own(reader)] for reader in features.readers]
        return replace(rows, scales=dict(zip(features.readers, scales(rows, own[0], own, config), strict=True)))

    def own(self, reader: str) -> str | None:
        """The policy whose trajectories count as a reader's: its own, or None for all."""
        return reader if not self.pooled and len(self.by_reader[reader, reader]) else None

    def of_features(self, some: np.ndarray) -> Rows:
        """The same rows with some features only, in memory."""
        columns = sp.csc_array(self.columns[:, some])
        scales = {reader: Scale(*(each[some] for each in scale)) for reader, scale in self.scales.items()}
        return replace(self, values=sp.csr_array(columns), columns=columns, scales=scales)

    def without_tokens(self, features: FeatureTable) -> dict[str, int]:
        """Number of trajectories without a token of the span, by reader; readers with none are left out."""
        empty = {id: int((self.n_tokens[features.rows(reader=id)] == 0).sum()) for id in features.readers}
        return {id: n for id, n in empty.items() if n}

    def pick(self, reader: str, policy: str | None, band: str, outcome: str) -> np.ndarray:
        rows = self.by_reader[reader, policy]
        if band != "all":
            rows = rows[self.band[rows] == band]
        if outcome != "all":
            rows = rows[self.outcome[rows] == outcome]
        return rows


def _need_finite(values: Matrix, where: str | Path) -> None:
    """Refuse NaN and infinity: no draw is as extreme as these, so that their p would be as small as can be."""
    for _, block in row_blocks(values):
        finite = np.isfinite(block.data)
        if not finite.all():
            feature = int(block.indices[~finite][0])
            raise TsaeError(f"the codes of feature {feature} are not finite", where=where, fix="Encode again.")


def scales(rows: Rows, base: np.ndarray, others: Sequence[np.ndarray], config: DiffConfig) -> list[Scale]:
    """The deviation over the base's rows, for each of the others; of a silent feature, pooled with the other's rows."""
    problems = np.unique(rows.problem[base])
    active = (side_means(rows.values, base, rows.problem, problems) > 0).sum(0)
    of_base = _variance(rows.values, base)
    silent = (active < config.min_problems) | (of_base == 0)
    found = []
    for other in others:
        of_other = of_base if np.array_equal(other, base) else _variance(rows.values, other)
        freedom = [max(len(side) - 1, 0) for side in (base, other)]
        pooled = (freedom[0] * of_base + freedom[1] * of_other) / max(sum(freedom), 1)
        found.append(Scale(np.sqrt(np.where(silent, pooled, of_base)), silent))
    return found


def _variance(values: Matrix, rows: np.ndarray) -> np.ndarray:
    """(n_features,) variance over some rows, by n − 1; 0 where it is only rounding."""
    n = len(rows)
    total, square = np.zeros((2, values.shape[1]))
    if n < 2:
        return total
    for start in range(0, n, _ROWS):
        block = values[rows[start : start + _ROWS]]
        data = block.data.astype(np.float64)
        total += np.bincount(block.indices, weights=data, minlength=len(total))
        square += np.bincount(block.indices, weights=data * data, minlength=len(total))
    mean, square = total / n, square / n
    variance = (square - mean**2) * n / (n - 1)
    return np.where(variance > 1e-9 * square, variance, 0.0)


def _is_pooled(
    features: FeatureTable, by_reader: dict[tuple[str, str | None], np.ndarray], problem: np.ndarray, config: DiffConfig
) -> bool:
    """Whether all readers read the same trajectories, and no checkpoint's own share enough problems with the base's."""
    base, *others = features.readers
    if len(np.unique(problem)) < config.min_problems:
        return False
    read = np.sort(features.trajectory[by_reader[base, None]])
    for reader in others:
        if not np.array_equal(np.sort(features.trajectory[by_reader[reader, None]]), read):
            return False
        both = np.intersect1d(problem[by_reader[reader, reader]], problem[by_reader[base, base]])
        if len(both) >= config.min_problems:
            return False
    return True
