"""Sums of sparse codes over groups of rows, in time linear in the non-zeros and memory bounded by the result.

A product of two sparse matrices does the same in five times the time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse as sp

from tsae.features.feature_table import FeatureTable
from tsae.features.stored import Columns, Rows, column_blocks

_VALUES = 250_000  # non-zeros gathered at once, roughly
_COLUMNS = 1_000_000  # non-zeros of columns multiplied at once
_GROUPS = 16  # groups summed at once: sums that stay in a core's cache
_CELLS = 4_000_000  # sums of all codes, made at once


def grouped_sums(values: Rows, rows: np.ndarray, group: np.ndarray, weight: np.ndarray, n_groups: int) -> np.ndarray:
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


def weighted_sums(columns: Columns, weights: np.ndarray, some: np.ndarray) -> np.ndarray:
    """(len(some), n) float64: all rows' sum in some columns, each row times its weight, of (n_rows, n) weights."""
    sums, ends = np.zeros((len(some), weights.shape[1])), np.diff(columns.indptr)[some].cumsum()
    low = 0
    while low < len(some):
        high = max(low + 1, int(np.searchsorted(ends, (ends[low - 1] if low else 0) + _COLUMNS, side="right")))
        sums[low:high] = columns[:, some[low:high]].T @ weights
        low = high
    return sums


def sums_by_code(columns: Columns, code: np.ndarray, n_codes: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Sums of every feature over the rows of each code, some features at a time.

    Args:
        columns: (n_rows, n_features).
        code: (n_rows,) 0 … n_codes − 1 of each row; n_codes for those that do not count.
        n_codes: how many there are.

    Yields:
        (features, (n_codes, features) float64 sums), features in order.
    """
    for first, block in column_blocks(columns, max(1, _CELLS // (n_codes + 1))):
        width = block.shape[1]
        # The cells of a feature lie together, so that they stay in a core's cache.
        cell = np.repeat(np.arange(width) * (n_codes + 1), np.diff(block.indptr))
        cell += code[block.indices]
        sums = np.bincount(cell, weights=block.data, minlength=(n_codes + 1) * width)
        yield slice(first, first + width), sums.reshape(width, n_codes + 1)[:, :n_codes].T


def no_code(n_tokens: int, n_codes: int) -> np.ndarray:
    """(n_tokens,) codes for `sums_by_code`, to be filled in: all are n_codes, so that no token counts yet.

    Large tables have one of these a thread, so its numbers are as small as they can be.
    """
    return np.full(n_tokens, n_codes, dtype=np.uint16 if n_codes <= np.iinfo(np.uint16).max else np.int32)


def active_counts(features: FeatureTable, mask: np.ndarray) -> np.ndarray:
    """(n_features,) on how many of the tokens of a (n_tokens,) mask each feature is active."""
    counts = np.zeros(features.n_features, dtype=np.int64)
    for codes, counted in masked_blocks(features, mask):
        counts += np.bincount(codes[np.flatnonzero(counted)].indices, minlength=len(counts))
    return counts


def masked_blocks(features: FeatureTable, mask: np.ndarray) -> Iterator[tuple[sp.csr_array, np.ndarray]]:
    """(codes, mask) of the table's tokens, a block of rows at a time; blocks that the mask leaves out are not read."""
    for first, last in features.row_blocks():
        tokens = slice(int(features.row_offsets[first]), int(features.row_offsets[last]))
        if mask[tokens].any():
            yield features.codes[tokens], mask[tokens]


def _rows_at_once(values: Rows) -> int:
    return max(1, _VALUES * values.shape[0] // max(values.nnz, 1))
