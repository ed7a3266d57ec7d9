"""Discoveries where there is nothing to find: the tests of shifts, outcomes and interactions on the base alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from tsae.diff.config import DiffConfig
from tsae.diff.contrasts import Rows, active_features, contrast_bands
from tsae.diff.permutations import Count, band_permutations, sign_flips
from tsae.diff.statistics import outcome_tests, q_values, sequential_p, side_means
from tsae.diff.threads import in_threads
from tsae.features.table import FeatureTable


def null_contrasts(features: FeatureTable, rows: Rows, config: DiffConfig, repeats: int = 5) -> dict[str, float]:
    """Discoveries per contrast where there is nothing to find: the same procedure on the base against itself.

    shift: every problem's base trajectories split in two at random halves; outcome: labels permuted within problem;
    interaction: the same labels, in the harder of the two hardest bands − in the other.

    Returns:
        by name the mean number of discoveries at config.q over the repeats, the share of repeats with any, and the
        number of features tested. Nothing within prompts, where trajectories of a problem are the same.
    """
    base = features.readers[0]
    own = rows.pick(base, rows.own(base), "all", "all")
    own = own[np.argsort(rows.problem[own], kind="stable")]
    rng = np.random.default_rng([config.seed, 4])
    bands = [] if rows.bands_refused else contrast_bands(features, config)[1:][-2:]
    found: dict[str, list[int]] = {"shift": [], "outcome": [], "interaction": []}
    result: dict[str, float] = {"repeats": repeats}
    jobs: list[tuple[str, Callable[[], _Test | None]]] = []
    for _ in range(0 if config.within_prompt else repeats):
        order = rng.permutation(own)
        rank = pd.Series(rows.problem[order]).groupby(rows.problem[order]).cumcount().to_numpy()
        # Both orders are sorted by problem, the second shuffled within: outcomes move, problems keep theirs.
        shuffled = rows.outcome[own[np.lexsort((rng.random(len(own)), rows.problem[own]))]]
        success, failure = own[shuffled == "success"], own[shuffled == "failure"]
        jobs += [
            ("shift", partial(_halves, rows, order[rank % 2 == 0], order[rank % 2 == 1], config)),
            ("outcome", partial(_outcome, rows, success, failure, config)),
            ("interaction", partial(_interaction, rows, success, failure, bands, config)),
        ]
    counted = in_threads([partial(_discoveries, make, config) for _, make in jobs], config.threads)
    for (name, _), counts in zip(jobs, counted, strict=True):
        if counts is not None:
            found[name].append(counts[0])
            result[f"{name}_tested"] = counts[1]
    for name, each in found.items():
        if each:
            result[f"{name}_discoveries"] = float(np.mean(each))
            result[f"{name}_any"] = float(np.mean(np.array(each) > 0))
    return result


_Test = tuple[Count, int, int]  # draws, how many tests they make, and of how many features


def _discoveries(make: Callable[[], _Test | None], config: DiffConfig) -> tuple[int, int] | None:
    """How many discoveries a test makes, and of how many features."""
    if (test := make()) is None:
        return None
    p = sequential_p(*test, config.n_permutations, config.q, config.fdr)
    return int((q_values(p, config.fdr) <= config.q).sum()), len(p)


def _sides(rows: Rows, a: np.ndarray, b: np.ndarray, config: DiffConfig) -> tuple[np.ndarray, list[np.ndarray]] | None:
    """Problems that have both sides, and (n_problems, n_features) means of each."""
    both = np.intersect1d(rows.problem[a], rows.problem[b])
    if len(both) < config.min_problems:
        return None
    return both, [side_means(rows.values, side, rows.problem, both) for side in (a, b)]


def _halves(rows: Rows, a: np.ndarray, b: np.ndarray, config: DiffConfig) -> _Test | None:
    sides = _sides(rows, a, b, config)
    if sides is None or not len(feature := active_features(config, *sides[1])):
        return None
    return sign_flips((sides[1][0] - sides[1][1])[:, feature], config.seed), 1, len(feature)


def _outcome(rows: Rows, success: np.ndarray, failure: np.ndarray, config: DiffConfig) -> _Test | None:
    sides = _sides(rows, success, failure, config)
    if sides is None or not len(feature := active_features(config, *sides[1])):
        return None
    both, means = sides
    picked = np.concatenate([success, failure])
    keep = np.isin(rows.problem[picked], both)
    right, picked = (np.arange(len(picked)) < len(success))[keep], picked[keep]
    code = np.searchsorted(both, rows.problem[picked])
    differences = (means[0] - means[1])[:, feature]
    return outcome_tests(differences, rows.values[picked][:, feature], right, code, config.seed), 2, len(feature)


def _interaction(
    rows: Rows, success: np.ndarray, failure: np.ndarray, bands: list[str], config: DiffConfig
) -> _Test | None:
    if len(bands) < 2:
        return None
    by_band = [
        _sides(rows, success[rows.band[success] == band], failure[rows.band[failure] == band], config)
        for band in reversed(bands)
    ]
    means = [sides[1] for sides in by_band if sides is not None]
    if len(means) < 2:
        return None
    feature = active_features(config, *(np.concatenate(side) for side in zip(*means, strict=True)))
    if not len(feature):
        return None
    a, b = ((right - wrong)[:, feature] for right, wrong in means)
    return band_permutations(a, b, config.seed), 1, len(feature)
