"""Compare an edit with the same edit of random features, taking the random sets as a sample, not a constant.

Random sets differ from each other, often by more than the choice of problems explains. An interval that varies only the
problems is therefore too narrow: with it a sixth random set lies "beyond" five others in up to two of three draws
(docs/measured.md). Let D be the chosen features' mean over problems minus the mean over sets and problems. Its interval
has three parts:

1. *Sets.* Let m_s be the mean over problems of random set s, and v their variance over S sets. If the chosen features
   were one more random set, D would have variance v · (1 + 1/S): this is the prediction interval of one more
   observation, ± t(S − 1) · √(v (1 + 1/S)). v holds what problems add to the spread of sets too. Random sets that share
   features are too alike: if a share r of their features is common to two of them on average, and effects of features
   add up, the variance is v · ((1 + r) / (1 − r) + 1/S).
2. *Problems.* An edit may scatter over problems more than random sets do. The excess of its variance over theirs, where
   there is any, is added in squares with t(P − 1).
3. *Ranks.* Effects of sets have heavy tails: most do nothing, a few do much. The interval is at least so wide that it
   leaves out 0 only if the chosen features lie farther from the mean of all S + 1 sets than every random one. Under
   exchangeable features that has a chance of at most 1/(S + 1), whatever the distribution.

Under exchangeable features 0 is left out in about one of twenty draws (confidence .95; docs/measured.md). With 12 sets
an effect of 4 standard deviations of random sets is found 9 times in 10, one of 3 two times in 3; with 5 sets 3 times
in 4 and 1 time in 2. Where one set in ten does much and the others nothing, it takes more than 8 sets for that.

The interval leaves out 0 where the chosen features do what a random set of their kind would not be expected to do. It
needs two sets at least, and with few it is wide: t(1) = 12.7, t(4) = 2.8, t(9) = 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from einops import reduce
from scipy.stats import t as student


class Beyond(NamedTuple):
    """What an edit does beyond the same edit of random features."""

    difference: float
    """Mean over problems: the edit − the mean over the random sets."""
    low: float
    high: float
    """Interval; NaN with one set or one problem."""
    n_problems: int
    """Problems that the edit and every random set were measured on."""
    n_sets: int


def overlap(sets: Sequence[Sequence[int]]) -> float:
    """Share of a random set's features that another one has too, on average over pairs; 0 with one set."""
    shared = [len({*a} & {*b}) / len(a) for a, b in combinations(sets, 2)]
    return sum(shared) / len(shared) if shared else 0.0


def beyond_random(chosen: np.ndarray, sets: np.ndarray, confidence: float, shared: float = 0.0) -> Beyond:
    """Interval of an edit's effect beyond that of one more random set.

    Args:
        chosen: (n_problems,) mean of a behaviour over every problem's responses, NaN where it was not measured.
        sets: (n_sets, n_problems) the same under the edits of random features.
        confidence: of the interval.
        shared: `overlap` of the random sets.
    """
    known = np.isfinite(chosen) & np.isfinite(sets).all(0)
    chosen, sets = chosen[known], sets[:, known]
    n_sets, n_problems = sets.shape
    if not n_problems:
        return Beyond(np.nan, np.nan, np.nan, 0, n_sets)
    against = chosen - reduce(sets, "set problem -> problem", "mean")
    difference = float(against.mean())
    if n_sets < 2 or n_problems < 2 or shared >= 1:
        return Beyond(difference, np.nan, np.nan, n_problems, n_sets)
    upper = (1 + confidence) / 2
    means = reduce(sets, "set problem -> set", "mean")
    alike = (1 + shared) / (1 - shared)
    of_sets = means.var(ddof=1) * (alike + 1 / n_sets)
    # The same variance for a random set. Each is compared with the mean of the other S − 1 sets, the chosen features
    # with the mean of all S; the last factor makes up for that.
    others = (sets - (sets.sum(0) - sets) / (n_sets - 1)).var(axis=1, ddof=1).mean() * (1 - 1 / n_sets**2)
    excess = max(0.0, float(against.var(ddof=1) - others)) / n_problems
    half = np.sqrt(student.ppf(upper, n_sets - 1) ** 2 * of_sets + student.ppf(upper, n_problems - 1) ** 2 * excess)
    farthest = float(np.abs(means - means.mean()).max()) * np.sqrt(alike)
    half = max(float(half), farthest * (n_sets + 1) / (n_sets - 1))
    return Beyond(difference, difference - half, difference + half, n_problems, n_sets)
