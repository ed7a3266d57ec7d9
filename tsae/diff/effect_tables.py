"""The tables of contrasts: one row a contrast and feature (`shifts`), and one row a contrast (`contrasts`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tsae.diff.config import DiffConfig
from tsae.diff.contrast.comparisons import Comparison
from tsae.diff.contrast.draw_contrast import Contrast
from tsae.diff.contrast.rows import Rows
from tsae.diff.controls.null_discoveries import null_counts
from tsae.features.feature_table import FeatureTable

_KEYS = ["kind", "checkpoint", "run", "step", "part", "band", "outcome"]
_NUMBERS = ["difference", "low", "high", "delta", "delta_low", "delta_high", "p", "q", "p_differs", "q_differs"]


def shift_table(features: FeatureTable, rows: Rows, drawn: Sequence[Contrast]) -> pd.DataFrame:
    """`FeatureDiff.shifts`: one row a contrast and tested feature."""
    parts = []
    for c in drawn:
        if c.inference is None:
            continue
        columns = {**_keys(features, c.of), "feature": c.feature, "mean": c.mean_a, "reference": c.mean_b}
        columns |= {name: getattr(c.inference, name) for name in _NUMBERS}
        silent = rows.scales[c.of.checkpoint].silent[c.feature]
        parts.append(pd.DataFrame({**columns, "scale": np.where(silent, "pooled", "base"), "auroc": c.auroc}))
    names = [*_KEYS, "feature", "mean", "reference", *_NUMBERS, "scale", "auroc"]
    return pd.concat(parts, ignore_index=True)[names] if parts else pd.DataFrame(columns=names)


def contrast_table(features: FeatureTable, rows: Rows, drawn: Sequence[Contrast], config: DiffConfig) -> pd.DataFrame:
    """`FeatureDiff.contrasts`: one row a contrast, drawn or refused."""
    nulls = null_counts(rows, [replace(c.of, note=c.note) for c in drawn], config)
    found = [c.inference for c in drawn]
    return pd.DataFrame([_keys(features, c.of) for c in drawn])[_KEYS].assign(
        n_problems=[c.of.n_problems for c in drawn],
        n_trajectories=[len(c.of.rows) for c in drawn],
        n_tokens=[int(rows.n_tokens[c.of.rows].sum()) for c in drawn],
        rows=[c.of.fingerprint for c in drawn],
        n_left_out=[c.of.n_left_out for c in drawn],
        n_tested=[len(c.feature) for c in drawn],
        n_discoveries=[0 if i is None else int((i.q <= config.q).sum()) for i in found],
        n_differs=[0 if i is None else int((i.q_differs <= config.q).sum()) for i in found],
        n_null=[mean for mean, _ in nulls],
        null_any=[share for _, share in nulls],
        detectable_delta=[c.detectable_delta for c in drawn],
        note=[c.note for c in drawn],
    )


def _keys(features: FeatureTable, of: Comparison) -> dict[str, Any]:
    reader = features.reader_info(of.checkpoint)
    return {**of.key, "run": reader["run"], "step": reader["step"]}
