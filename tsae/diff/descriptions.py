"""What every feature responds to, how often it fires, and whether it goes with the length of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.rows import Rows
from tsae.diff.threads import in_threads
from tsae.features.contexts import TokenClasses, responds_to, top_tokens
from tsae.features.feature_table import FeatureTable, active_counts, masked_blocks
from tsae.features.sparse_matrices import column_blocks


def describe(
    features: FeatureTable, rows: Rows, config: DiffConfig, classes: TokenClasses | None, strings: Sequence[str]
) -> pd.DataFrame:
    """`FeatureDiff.features`: one row a feature, with what it responds to."""
    counted = features.span_mask(config.span)
    jobs: list[Callable[[], Any]] = [
        partial(top_tokens, features, strings),
        partial(_length_correlation, features, rows),
    ]
    tokens, correlation = in_threads(jobs, config.threads)
    fired = active_counts(features, counted)
    index = pd.RangeIndex(features.n_features, name="feature")
    table = pd.DataFrame(
        {
            "group": np.where(np.arange(features.n_features) < features.d_high, "high", "low"),
            "firing_rate": fired / max(int(counted.sum()), 1),
            "length_correlation": correlation,
        },
        index=index,
    )
    if features.rollouts.has_thinking:
        table["thinking_share"] = _thinking_share(features)
    if classes is not None:
        table = table.join(responds_to(features, classes))
    else:
        table["responds_to"] = [" ".join(repr(t) for t in found[:3]) or "never active" for found in tokens.top_tokens]
    return table.join(tokens)


def _thinking_share(features: FeatureTable) -> np.ndarray:
    """(n_features,) share of a feature's activation in responses that falls on thinking; 0 where it never fires."""
    of_thinking, of_response = np.zeros((2, features.n_features))
    masks = features.span_mask("thinking"), features.span_mask("response")
    for mask, total in zip(masks, (of_thinking, of_response), strict=True):
        for codes, counted in masked_blocks(features, mask):
            total += codes.T @ counted.astype(np.float64)
    return np.divide(of_thinking, of_response, out=np.zeros(features.n_features), where=of_response > 0)


def _length_correlation(features: FeatureTable, rows: Rows) -> np.ndarray:
    """(n_features,) Spearman correlation of a trajectory's mean activation with its response length, on the base."""
    base = features.readers[0]
    picked = rows.by_reader[base, rows.own(base)]
    length = rankdata(features.rollouts.n_sampled[features.trajectory[picked]])
    length, n = length - length.mean(), len(picked)
    place = np.full(len(rows.problem), -1)
    place[picked] = np.arange(n)
    product, square = np.zeros((2, features.n_features))
    for first, block in column_blocks(rows.columns, features.n_features):
        row = place[block.indices]
        inside = row >= 0
        size = np.bincount(
            np.repeat(np.arange(block.shape[1]), np.diff(block.indptr))[inside], minlength=block.shape[1]
        )
        row, rank = _ranks(block.data[inside].astype(np.float32, copy=False), row[inside], np.r_[0, size.cumsum()])
        # Activations are not negative: zeros share the lowest ranks.
        zeros, column = n - size, np.repeat(np.arange(len(size)), size)
        above = rank + ((zeros - 1) / 2)[column]
        part = slice(first, first + len(size))
        product[part] = np.bincount(column, above * length[row], minlength=len(size))
        square[part] = np.bincount(column, (above - (size / 2)[column]) ** 2, minlength=len(size))
        square[part] += zeros * (size / 2) ** 2
    norm = np.sqrt(square * (length**2).sum())
    return np.divide(product, norm, out=np.zeros(features.n_features), where=norm > 0)


def _ranks(values: np.ndarray, row: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, ranks) of the values of each column from the lowest on; equal values share the mean of their ranks.

    Args:
        values: (nnz,) float32 from 0 up, column by column.
        row: (nnz,) of each.
        ends: (n_columns + 1,) where each column begins.
    """
    # The bits of positive floats are in the order of the floats, so that sorting numbers sorts rows along with values.
    key = (values.view(np.uint32).astype(np.uint64) << np.uint64(32)) | row.astype(np.uint64)
    for start, stop in pairwise(ends.tolist()):
        key[start:stop].sort()
    bits = key >> np.uint64(32)
    new = np.ones(len(key) + 1, dtype=bool)  # where another value begins
    new[1:-1] = bits[1:] != bits[:-1]
    new[ends] = True
    bounds = np.flatnonzero(new)
    shared = (bounds[:-1] + bounds[1:] - 1) / 2 + 1
    rank = np.repeat(shared, np.diff(bounds)) - np.repeat(ends[:-1], np.diff(ends))
    return (key & np.uint64(0xFFFFFFFF)).astype(np.int64), rank
