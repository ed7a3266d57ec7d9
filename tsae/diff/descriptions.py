"""What every feature responds to, how often it fires, and whether it goes with the length of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.rows import Rows
from tsae.diff.threads import in_threads
from tsae.features.annotations import TokenClasses, responds_to, top_tokens
from tsae.features.feature_table import FeatureTable
from tsae.features.stored import column_blocks
from tsae.features.sums import active_counts, masked_blocks


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
    product, square = np.zeros((2, features.n_features))
    for first, block in column_blocks(rows.columns, features.n_features):
        columns = sp.csc_array(block[picked])
        for feature, (start, stop) in enumerate(pairwise(columns.indptr), start=first):
            # Activations are not negative: zeros share the lowest ranks.
            zeros = n - (stop - start)
            above = rankdata(columns.data[start:stop]) + (zeros - 1) / 2
            product[feature] = above @ length[columns.indices[start:stop]]
            square[feature] = ((above - (n - zeros) / 2) ** 2).sum() + zeros * ((n - zeros) / 2) ** 2
    norm = np.sqrt(square * (length**2).sum())
    return np.divide(product, norm, out=np.zeros(features.n_features), where=norm > 0)
