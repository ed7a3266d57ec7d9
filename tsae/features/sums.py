"""Sums of sparse codes over groups of rows, in time linear in the non-zeros and memory bounded by the result.

A product of two sparse matrices does the same in five times the time.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

_VALUES = 250_000  # non-zeros gathered at once, roughly
_GROUPS = 16  # groups summed at once: sums that stay in a core's cache


def grouped_sums(
    values: sp.csr_array, rows: np.ndarray, group: np.ndarray, weight: np.ndarray, n_groups: int
) -> np.ndarray:
    """(n_groups, n_features) weighted sums of rows.

    Args:
        values: (n_rows, n_features).
        rows: (n,) rows that count.
        group: (n,) of each, 0 … n_groups − 1.
        weight: (n,) of each.
        n_groups: how many there are; those without rows have sums of 0.
    """
    order = np.argsort(group, kind="stable")
    rows, group, weight = rows[order], group[order], weight[order]
    n_features = values.shape[1]
    sums = np.zeros((n_groups, n_features))
    at_once, start = _rows_at_once(values), 0
    while start < len(rows):
        first = group[start]
        stop = min(start + at_once, int(np.searchsorted(group, first + _GROUPS)))
        part = values[rows[start:stop]]
        data = part.data * np.repeat(weight[start:stop], np.diff(part.indptr))
        n = int(group[stop - 1] - first + 1)
        # One sparse row a group, in which a feature occurs several times: making it dense sums these.
        ends = part.indptr[np.searchsorted(group[start:stop], np.arange(first, first + n + 1))]
        sums[first : first + n] += sp.csr_array((data, part.indices, ends), shape=(n, n_features)).toarray()
        start = stop
    return sums


def active_counts(values: sp.csr_array, rows: np.ndarray) -> np.ndarray:
    """(n_features,) in how many of the rows each feature is active."""
    counts = np.zeros(values.shape[1], dtype=np.int64)
    size = _rows_at_once(values)
    for start in range(0, len(rows), size):
        counts += np.bincount(values[rows[start : start + size]].indices, minlength=len(counts))
    return counts


def _rows_at_once(values: sp.csr_array) -> int:
    return max(1, _VALUES * values.shape[0] // max(values.nnz, 1))
