"""Discoveries where there is nothing to find: the tests of shifts and outcomes on the base against itself."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tsae.diff.config import DiffConfig
from tsae.diff.contrasts import Rows, active_features
from tsae.diff.permutations import sign_flips
from tsae.diff.statistics import outcome_tests, q_values, sequential_p, side_means
from tsae.features.table import FeatureTable


def null_contrasts(features: FeatureTable, rows: Rows, config: DiffConfig, repeats: int = 5) -> dict[str, float]:
    """Discoveries per contrast where there is nothing to find: the same procedure on the base against itself.

    shift: every problem's base trajectories split in two at random halves; outcome: labels permuted within problem.

    Returns:
        mean number of discoveries at config.q over the repeats, and the number of features tested.
    """
    base = features.readers[0]
    own = rows.pick(base, rows.own(base), "all", "all")
    own = own[np.argsort(rows.problem[own], kind="stable")]
    rng = np.random.default_rng([config.seed, 4])
    found: dict[str, list[int]] = {"shift": [], "outcome": []}
    result: dict[str, float] = {"repeats": repeats}
    for _ in range(repeats):
        order = rng.permutation(own)
        rank = pd.Series(rows.problem[order]).groupby(rows.problem[order]).cumcount().to_numpy()
        # Both orders are sorted by problem, the second shuffled within: outcomes move, problems keep theirs.
        shuffled = rows.outcome[own[np.lexsort((rng.random(len(own)), rows.problem[own]))]]
        for name, a, b in (
            ("shift", order[rank % 2 == 0], order[rank % 2 == 1]),
            ("outcome", own[shuffled == "success"], own[shuffled == "failure"]),
        ):
            both = np.intersect1d(rows.problem[a], rows.problem[b])
            if len(both) < config.min_problems:
                continue
            means = [side_means(rows.values, side, rows.problem, both) for side in (a, b)]
            feature = active_features(config, *means)
            if not len(feature):
                continue
            differences = (means[0] - means[1])[:, feature]
            if name == "shift":
                count, tests = sign_flips(differences, config.seed), 1
            else:
                picked = np.concatenate([a, b])
                keep = np.isin(rows.problem[picked], both)
                success, picked = (np.arange(len(picked)) < len(a))[keep], picked[keep]
                code = np.searchsorted(both, rows.problem[picked])
                count = outcome_tests(differences, rows.values[picked][:, feature], success, code, config.seed)
                tests = 2
            p = sequential_p(count, tests, len(feature), config.n_permutations, config.q, config.fdr)
            found[name].append(int((q_values(p, config.fdr) <= config.q).sum()))
            result[f"{name}_tested"] = len(feature)
    return result | {f"{name}_discoveries": float(np.mean(counts)) for name, counts in found.items() if counts}
