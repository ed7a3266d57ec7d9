"""Baselines: how well plain directions in activation space tell the two sides apart, beside the best features.

Cross-validated over problems: whatever is chosen or fitted sees only the problems of the other folds. Each way gives
every trajectory a score. The score's AUROC within problem is the chance that a trajectory of the first side (a success,
or the checkpoint's) scores above one of the second side of the same problem:

- *mean difference*: the mean over problems of the sides' difference of mean raw activations;
- *linear probe*: linear discriminant analysis: that direction divided by the covariance within sides, which is shrunk
  by a tenth;
- *best feature*: the feature with the largest |difference| / standard deviation over problems, with its sign;
- *ten best features*: the ten largest of these, each divided by that deviation, with their signs.

Where a probe or the mean difference does as well as features, the features are a reading of that direction and not a
discovery beyond it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.activations.store import ActivationStore
from tsae.base.statistics import bootstrap_interval
from tsae.diff.comparisons import Comparison, Rows, comparisons, group_difference, main_comparisons, problem_aurocs
from tsae.diff.config import DiffConfig
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable

WAYS = ("best feature", "ten best features", "mean difference", "linear probe")
_SHRINK = 0.1
_FOLDS = 5


@one_blas_thread
def baselines(
    features: FeatureTable, store: ActivationStore | str | Path, config: DiffConfig | None = None
) -> pd.DataFrame:
    """Measure held-out AUROCs within problem of the best features and plain directions, for main shifts and outcomes.

    Args:
        features: the table.
        store: or its folder, from which the table was encoded.
        config: of the span and the draws.

    Returns:
        kind, checkpoint, part, rows (as in the contrast table), way, auroc with its bootstrap interval low, high (over
        problems, given the folds' fits), n_problems, note (why it was refused; its numbers are then NaN).

    Raises:
        TsaeError: where the table was not encoded from the store.
    """
    config = config or DiffConfig()
    store = store if isinstance(store, ActivationStore) else ActivationStore(store)
    rows = Rows.of(features, config)
    raw = mean_activations(features, store, config)
    found, records = comparisons(features, rows, config), []
    for reader in features.readers:
        for of in main_comparisons(found, reader):
            if of.band == "all" and not (of.kind == "outcome" and config.within_prompt):
                keys = {"kind": of.kind, "checkpoint": reader, "part": of.part, "rows": of.fingerprint}
                records += [{**keys, **record} for record in _held_out(rows, raw, of, config)]
    return pd.DataFrame(records)


def mean_activations(features: FeatureTable, store: ActivationStore, config: DiffConfig) -> np.ndarray:
    """(n_rows, d_model) mean raw activation over a row's tokens of the span, in the order of the table's rows.

    Raises:
        TsaeError: where the table was not encoded from the store.
    """
    site, mask = features.info["sae"]["site"], features.span_mask(config.span)
    for name in ("trajectory", "token_ids"):
        stored = np.concatenate([getattr(shard, name) for shard in store.outlines()])
        if not np.array_equal(getattr(features, name), stored):
            what = "the features were not encoded from this store"
            raise TsaeError(what, where=store.path, fix="Give their own store.")
    parts, token = [], 0
    for shard in store.shards():
        n = len(shard.trajectory)
        counted = np.flatnonzero(mask[token : token + shard.n_tokens])
        where = np.repeat(np.arange(n), np.diff(shard.offsets))[counted]
        size = np.bincount(where, minlength=n)
        averaging = sp.csr_array((1 / size[where], (where, counted)), shape=(n, shard.n_tokens))
        parts.append(averaging @ shard.read(site, slice(0, shard.n_tokens)).astype(np.float32))
        token += shard.n_tokens
    return np.concatenate(parts)


def _held_out(rows: Rows, raw: np.ndarray, of: Comparison, config: DiffConfig) -> list[dict[str, object]]:
    a, b, problems = of.a, of.b, of.problems
    if len(problems) < (needed := max(config.min_problems, 2 * _FOLDS)):
        note = f"{len(problems)} problems have both sides; {needed} are needed"
        nothing = {"auroc": np.nan, "low": np.nan, "high": np.nan, "n_problems": len(problems), "note": note}
        return [{"way": way, **nothing} for way in WAYS]
    fold = np.random.default_rng([config.seed, 8]).permutation(len(problems)) % _FOLDS
    found: dict[str, list[np.ndarray]] = {way: [] for way in WAYS}
    for held in range(_FOLDS):
        fit, test = problems[fold != held], problems[fold == held]
        scores = {**_feature_scores(rows, a, b, fit), **_direction_scores(rows, raw, a, b, fit)}
        for way, score in scores.items():
            found[way].append(problem_aurocs(score[:, None], a, b, rows.problem, test))
    records = []
    for way in WAYS:
        each = np.concatenate(found[way])
        low, high = bootstrap_interval(each, config.n_bootstrap, config.confidence, config.seed)
        ends = {"low": max(float(low[0]), 0.0), "high": min(float(high[0]), 1.0)}
        records.append({"way": way, "auroc": float(each.mean()), **ends, "n_problems": len(each), "note": ""})
    return records


def _feature_scores(rows: Rows, a: np.ndarray, b: np.ndarray, fit: np.ndarray) -> dict[str, np.ndarray]:
    difference = group_difference(rows.values, a, b, rows.problem, fit)
    mean, deviation = difference.mean(0), difference.std(0, ddof=1)
    d = np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 0)
    order = np.argsort(-np.abs(d), kind="stable")

    def score(best: np.ndarray) -> np.ndarray:
        weight = np.divide(np.sign(d[best]), deviation[best], out=np.zeros(len(best)), where=deviation[best] > 0)
        return np.asarray(sp.csr_array(rows.columns[:, best]) @ weight)

    return {"best feature": score(order[:1]), "ten best features": score(order[:10])}


def _direction_scores(
    rows: Rows, raw: np.ndarray, a: np.ndarray, b: np.ndarray, fit: np.ndarray
) -> dict[str, np.ndarray]:
    directions, residuals = [], []
    for side in (a, b):
        side = side[np.isin(rows.problem[side], fit)]
        code = np.searchsorted(fit, rows.problem[side])
        means = np.zeros((len(fit), raw.shape[1]))
        np.add.at(means, code, raw[side])
        means /= np.bincount(code, minlength=len(fit))[:, None]
        directions.append(means.mean(0))
        residuals.append(raw[side] - means[code])
    direction = directions[0] - directions[1]
    within = np.concatenate(residuals)
    covariance = within.T @ within / len(within)
    scale = max(float(np.trace(covariance)) / len(covariance), 1e-12)
    shrunk = (1 - _SHRINK) * covariance + _SHRINK * scale * np.eye(len(covariance))
    probe = np.linalg.solve(shrunk, direction)
    return {"mean difference": raw @ direction, "linear probe": raw @ probe}
