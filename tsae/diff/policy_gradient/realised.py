"""How far predicted shifts come true in runs: ranks of features, predicted against realised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.base.statistics.bootstrap import counts, percentile_interval
from tsae.diff.config import DiffConfig
from tsae.diff.contrast.problem_means import group_difference
from tsae.diff.contrast.rows import Rows
from tsae.diff.policy_gradient.covariance import Samples, sums
from tsae.diff.significance.permutations import permuted_weights
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.schema import BANDS

_SPLITS = 50  # of the problems into halves, for reliabilities


def agreements(
    source: FeatureTable,
    rows: Rows,
    picked: np.ndarray,
    samples: Samples,
    features: np.ndarray,
    config: DiffConfig,
    checkpoint: str,
    part: str,
) -> Iterator[dict[str, object]]:
    """Compare predictions with one part of a checkpoint's realised shift: rows of `Reinforcement.compare`.

    Args:
        source: the features.
        rows: of the source.
        picked: the rows that predict.
        samples: of these.
        features: that were tested.
        config: of the draws.
        checkpoint: whose shifts were realised.
        part: of these; see `tsae.diff.contrast.draw_contrast`.
    """
    base = source.readers[0]
    info = source.reader_info(checkpoint)
    reader = base if part == "policy" else checkpoint
    run, own = rows.by_reader[reader, checkpoint], rows.by_reader[base, base]
    trained_on = info["trained_on"] if info["trained_on"] in BANDS else "all"
    keys = {"checkpoint": checkpoint, "run": info["run"], "step": info["step"], "part": part}
    problem = rows.problem[picked]
    band = pd.Series(rows.band[picked]).groupby(problem).first()
    here = [b for b in BANDS if (band == b).any()]
    both = np.intersect1d(np.intersect1d(rows.problem[run], rows.problem[own]), problem)
    active = np.flatnonzero((rows.values[np.concatenate([run, own])] > 0).sum(0))
    tested = np.intersect1d(active, features)
    realised = np.zeros((0, len(tested)))
    if len(both) and len(tested):
        realised = group_difference(sp.csr_array(rows.columns[:, tested]), run, own, rows.problem, both)
    values = rows.values[picked][:, tested].toarray().astype(np.float64)
    codes, weight, group = pd.unique(problem), samples.weight, samples.group
    for gradient in samples.relative:
        moved = samples.moved(values, gradient)
        predicted = np.asarray(sums(samples.problem, weight) @ moved)  # (n_problems, n_tested)
        for predicted_on in ("all", *here):
            for realised_on in dict.fromkeys((trained_on, "all")):
                mine = codes if predicted_on == "all" else codes[band[codes].to_numpy() == predicted_on]
                theirs = both if realised_on == "all" else both[band[both].to_numpy() == realised_on]
                record = keys | {"gradient": gradient, "predicted_on": predicted_on, "realised_on": realised_on}
                record |= {"matched": predicted_on == trained_on, "n_features": len(tested), "n_problems": len(theirs)}
                numbers, note = dict.fromkeys(_NUMBERS, np.nan), ""
                used = np.isin(problem, mine)
                if min(len(mine), len(theirs)) < 2 * config.min_problems or len(tested) < 3:
                    note = f"{len(mine)} and {len(theirs)} problems, {len(tested)} features: too few"
                elif not weight[used].any():
                    note = "no group there has rollouts that differ in advantage"
                else:
                    pairs = _Pairs(predicted[np.isin(codes, mine)], mine, realised[np.isin(both, theirs)], theirs)
                    numbers, rng = pairs.statistics(config), np.random.default_rng([config.seed, 5])
                    shift, single = pairs.realised.mean(0)[None], moved[used].astype(np.float32)
                    permuted = permuted_weights(weight[used], group[used], config.n_bootstrap, rng)
                    nulls = np.concatenate([spearman(drawn @ single, shift) for drawn in permuted])
                    extreme = np.abs(nulls) >= abs(numbers["rho"]) * (1 - 1e-5)
                    numbers["p"] = (1 + extreme.sum()) / (1 + len(extreme))
                yield {**record, **numbers, "note": note}


_NUMBERS = ("rho", "low", "high", "p", "reliability_predicted", "reliability_realised", "ceiling", "rho_halves")


@dataclass(frozen=True)
class _Pairs:
    """Predictions and realised shifts of the same features by problem, over problems that may overlap."""

    predicted: np.ndarray
    mine: np.ndarray
    realised: np.ndarray
    theirs: np.ndarray

    def statistics(self, config: DiffConfig) -> dict[str, float]:
        rng = np.random.default_rng([config.seed, 6])
        union = np.union1d(self.mine, self.theirs)
        at, to = np.searchsorted(union, self.mine), np.searchsorted(union, self.theirs)
        # Scaling does not change ranks, so weights need not be normalised.
        weights = counts(len(union), config.n_bootstrap, rng)
        drawn = spearman(weights[:, at] @ self.predicted, weights[:, to] @ self.realised)
        low, high = percentile_interval(drawn, config.confidence)
        half = np.argsort(np.argsort(rng.random((_SPLITS, len(union))), axis=1), axis=1) % 2 == 0  # (splits, n)
        p_a, p_b = half[:, at] @ self.predicted, ~half[:, at] @ self.predicted
        r_a, r_b = half[:, to] @ self.realised, ~half[:, to] @ self.realised
        predicted, realised = (_full_length(spearman(a, b).mean()) for a, b in ((p_a, p_b), (r_a, r_b)))
        halves = (spearman(p_a, r_b).mean() + spearman(p_b, r_a).mean()) / 2
        rho = spearman(self.predicted.sum(0)[None], self.realised.sum(0)[None])[0]
        numbers = (rho, low, high, np.nan, predicted, realised, np.sqrt(predicted * realised), halves)
        return {name: float(number) for name, number in zip(_NUMBERS, numbers, strict=True)}


def _full_length(r: float) -> float:
    """The reliability of the whole from the correlation of its halves (Spearman–Brown); at least 0."""
    return max(0.0, 2 * r / (1 + r)) if r > -1 else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n,) rank correlations of the rows of (n or 1, n_features) arrays; 0 where a row is constant."""
    a, b = (rankdata(x, axis=1) for x in (a, b))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    norm = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return np.divide((a * b).sum(1), norm, out=np.zeros(len(norm)), where=norm > 0)
