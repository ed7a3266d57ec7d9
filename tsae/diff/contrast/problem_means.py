"""Means and AUROCs within problems: one number for every problem and feature."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from tsae.features.sparse_matrices import Columns, Rows, grouped_sums

_AUROC_BYTES = 2_000_000  # of dense values at once, to stay in a core's cache


def group_difference(
    values: Rows, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """(n_problems, n_features) mean over the problem's rows in a − mean over those in b; see `side_means`."""
    return side_means(values, a, problem, problems) - side_means(values, b, problem, problems)


def difference_weights(a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """(n_rows,) weights under which the rows' values add up to the mean over problems of `group_difference`."""
    weights = np.zeros(len(problem))
    for sign, side in ((1.0, a), (-1.0, b)):
        rows, where = _of_problems(side, problem, problems)
        weights[rows] += sign / (np.bincount(where, minlength=len(problems))[where] * len(problems))
    return weights


def side_means(values: Rows, rows: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> np.ndarray:
    """(n_problems, n_features) mean over the given rows of every problem.

    Args:
        values: (n_rows, n_features).
        rows: of one side.
        problem: (n_rows,) problem code of every row.
        problems: codes of the problems to use; each has such rows.
    """
    rows, where = _of_problems(rows, problem, problems)
    weight = 1.0 / np.bincount(where, minlength=len(problems))[where]
    return grouped_sums(values, rows, where, weight, len(problems))


def some_columns(values: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Columns of (n, n_features) values, without a copy where these are all; features in order, each once."""
    return values if len(features) == values.shape[1] else values[:, features]


def _of_problems(rows: np.ndarray, problem: np.ndarray, problems: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that belong to the problems, and the index of each one's problem among these."""
    position = np.full(int(problem.max()) + 1, -1)
    position[problems] = np.arange(len(problems))
    where = position[problem[rows]]
    return rows[where >= 0], where[where >= 0]


def within_problem_auroc(
    columns: Columns, feature: np.ndarray, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """(n_features,) mean over problems of `problem_aurocs`, of some columns."""
    block = max(1, _AUROC_BYTES // (4 * columns.shape[0]))
    blocks = (columns[:, feature[start : start + block]] for start in range(0, len(feature), block))
    return np.concatenate([problem_aurocs(part, a, b, problem, problems).mean(0) for part in blocks])


def problem_aurocs(
    values: sp.csr_array | sp.csc_array, a: np.ndarray, b: np.ndarray, problem: np.ndarray, problems: np.ndarray
) -> np.ndarray:
    """Chance that a trajectory of side a has a larger value than one of side b of the same problem; ties count half.

    Returns:
        (n_problems, n_features), .5 if the sides do not differ. Arguments are as in `group_difference`.
    """
    dense = values.toarray()
    sides, pairs = [], np.ones(len(problems))
    for rows in (a, b):
        rows, where = _of_problems(rows, problem, problems)
        order = np.argsort(where, kind="stable")
        rows, where = rows[order], where[order]
        size = np.bincount(where, minlength=len(problems))
        slot = np.arange(len(rows)) - (size.cumsum() - size)[where]
        # NaN is neither larger nor smaller than any value.
        filled = np.full((int(size.max()), len(problems), dense.shape[1]), np.nan, dtype=np.float32)
        filled[slot, where] = dense[rows]
        sides.append(filled)
        pairs *= size
    wins = np.zeros(sides[0].shape[1:], dtype=np.float32)  # pairs in which a is larger − those in which b is
    found = np.empty(wins.shape, dtype=bool)
    for x in sides[0]:
        for start in range(0, len(sides[1]), 127):
            few = np.zeros(wins.shape, dtype=np.int8)
            for y in sides[1][start : start + 127]:
                few += np.greater(x, y, out=found).view(np.int8)
                few -= np.less(x, y, out=found).view(np.int8)
            wins += few
    return 0.5 + wins / (2 * pairs)[:, None]
