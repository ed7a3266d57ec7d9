"""Controls for chosen features: matched random features, and the plain mean difference.

An edit is compared with the same edit of random features, whose sets are a sample, not a constant.

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
needs two sets and eight problems at least, and with few sets it is wide: t(1) = 12.7, t(4) = 2.8, t(9) = 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from einops import reduce
from scipy.stats import t as student

from tsae.activations.store import ActivationStore
from tsae.base.statistics import FEWEST
from tsae.causal.config import Where
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable, masked_sums
from tsae.sae.model import TemporalSAE

_NEAREST = 10


@dataclass(frozen=True)
class FeatureScales:
    """How often and how strongly every feature fires; each (d_sae,)."""

    rate: np.ndarray
    """Share of the checkpoint's own tokens where it fires, of those that are to be edited; of all readers' tokens where
    the checkpoint is not among them."""
    mean: np.ndarray
    """Mean activation over the same tokens."""
    typical: np.ndarray
    """Mean activation where it fires, over all readers' response tokens; 0 where it never fires."""
    n_tokens: int
    """Tokens of rate and mean."""
    own: bool
    """Whether they are the checkpoint's own."""

    @classmethod
    def of(cls, features: FeatureTable, checkpoint: str, tokens: Where = "response") -> FeatureScales:
        """Counted over a table; `tokens` as in `InterventionConfig`."""
        response = features.span_mask("response")
        fired, total = masked_sums(features, response)
        edited = _edited(features, response, tokens)
        own = checkpoint in features.readers and checkpoint in features.rollouts.policies
        if own:
            rows = np.zeros(features.n_rows, dtype=bool)
            rows[features.rows(reader=checkpoint, policy=checkpoint)] = True
            edited &= np.repeat(rows, np.diff(features.row_offsets))
        n, (fired_there, total_there) = max(1, int(edited.sum())), masked_sums(features, edited)
        return cls(
            rate=fired_there / n, mean=total_there / n, typical=total / np.maximum(fired, 1), n_tokens=n, own=own
        )


def _edited(features: FeatureTable, response: np.ndarray, tokens: Where) -> np.ndarray:
    """(n_tokens,) bool: what an intervention on these tokens would edit."""
    if tokens == "response":
        return response.copy()
    last = features.span_mask("last_prompt")
    if tokens == "all":
        return features.span_mask("all") | last
    return last if tokens == "first" else last | response


def matched_features(
    chosen: Sequence[int],
    scales: FeatureScales,
    sae: TemporalSAE,
    n_sets: int,
    seed: int,
    *,
    exclude: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Random features that fire about as often and move the residual stream about as far as the chosen ones.

    For every chosen feature one of the 10 nearest others by log firing rate and log of typical activation × decoder
    norm, each in standard deviations; no feature comes twice in a set, and no set twice. For a single chosen feature
    and n sets one of the n nearest, where that is more.

    Args:
        chosen: the features.
        scales: of all features.
        sae: for the norms of decoder rows.
        n_sets: sets to draw.
        seed: of the draws.
        exclude: further features that are not taken.

    Raises:
        TsaeError: where fewer features fire than are needed.
    """
    norm = sae.W_dec.detach().norm(dim=1).cpu().numpy()
    alive = scales.typical > 0
    alive[list(chosen)] = alive[list(exclude)] = False
    pool = np.flatnonzero(alive)
    if len(pool) < 2 * len(chosen):
        what = f"{len(pool)} other features fire, too few to match {len(chosen)} with"
        raise TsaeError(what, where="intervene", fix="Choose fewer features, or exclude fewer.")
    # A chosen feature may never fire in the checkpoint's own tokens.
    floor = max(float(scales.rate[pool].min()), 1e-12)
    place = np.stack([np.log(np.maximum(scales.rate, floor)), np.log(np.maximum(scales.typical * norm, 1e-12))], axis=1)
    place /= np.maximum(place[pool].std(0), 1e-12)
    rng = np.random.default_rng(seed)
    near = max(_NEAREST, n_sets) if len(chosen) == 1 else _NEAREST
    sets: list[tuple[int, ...]] = []
    tries = 0
    while len(sets) < n_sets:
        tries += 1
        if tries > 100 * n_sets:
            raise TsaeError(
                f"{len(pool)} other features fire, too few for {n_sets} different random sets",
                where="intervene",
                fix="Ask for fewer sets (n_random, --n-random), or exclude fewer features.",
            )
        taken: dict[int, int] = {}
        for feature in rng.permutation(np.array(chosen)).tolist():
            free = pool[~np.isin(pool, list(taken.values()))]
            nearest = free[np.argsort(((place[free] - place[feature]) ** 2).sum(1), kind="stable")[:near]]
            taken[feature] = int(rng.choice(nearest))
        # The same features in another order are the same edit.
        if set(taken.values()) not in map(set, sets):
            sets.append(tuple(taken[feature] for feature in chosen))
    return sets


def mean_difference(
    store: ActivationStore, site: str, up: str, down: str, *, sae: TemporalSAE | None = None
) -> torch.Tensor:
    """The unit direction from what one reader computes on its own responses to what another does on its own.

    Args:
        store: has both readers' own trajectories.
        site: where.
        up: reader that the direction points to.
        down: reader that it points from.
        sae: whose outliers do not count; all tokens do without one.

    Returns:
        (d_model,) mean over `up`'s response tokens − mean over `down`'s, scaled to norm 1.

    Raises:
        TsaeError: where a reader or its own trajectories are missing, or the means are equal.
    """
    means = []
    policies = np.array(store.rollouts.table["policy"].to_pylist())
    for reader in (up, down):
        store.reader_info(reader)
        total, n = np.zeros(store.d_model(site)), 0
        for shard in store.shards(reader):
            own = np.repeat(policies[shard.trajectory] == reader, np.diff(shard.offsets))
            of_response = shard.token_span(store.rollouts, "response", store.special_ids)
            x = shard.read(site, np.flatnonzero(own & of_response))
            if sae is not None:
                x = x[~sae.outliers(torch.from_numpy(x)).numpy()]
            total += x.sum(0, dtype=np.float64)
            n += len(x)
        if n == 0:
            what = f"holds no response tokens that {reader} both sampled and read"
            raise TsaeError(what, where=store.path, fix="Name two readers that sampled rollouts themselves.")
        means.append(total / n)
    difference = torch.from_numpy(means[0] - means[1]).float()
    if not difference.norm() > 0:
        raise TsaeError(f"{up} and {down} have the same mean activation", where=store.path)
    return difference / difference.norm()


class Beyond(NamedTuple):
    """What an edit does beyond the same edit of random features."""

    difference: float
    """Mean over problems: the edit − the mean over the random sets."""
    low: float
    high: float
    """Interval; NaN with one set, and as for every change with fewer than `FEWEST` problems."""
    n_problems: int
    """Problems that the edit and every random set were measured on."""


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
        return Beyond(np.nan, np.nan, np.nan, 0)
    against = chosen - reduce(sets, "set problem -> problem", "mean")
    difference = float(against.mean())
    if n_sets < 2 or n_problems < FEWEST or shared >= 1:
        return Beyond(difference, np.nan, np.nan, n_problems)
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
    return Beyond(difference, difference - half, difference + half, n_problems)
