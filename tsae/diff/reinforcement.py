"""Reinforcement: the shift that policy gradient on a group of rollouts predicts, and how far it comes true.

For the rollouts i of one group (one policy, problem and step) with advantages A and mean activations f,

    Cov(A, f) = 1/n Σ_i (A_i − Ā)(f_i − f̄)

is the first-order change of the feature's mean under policy gradient on that group, for a policy that could change the
probability of every response on its own. Responses share weights, so that it is a prediction and no identity
(`tsae.diff.influence` has the exact first order). The reinforcement of a feature is the mean over problems of their
groups' covariance. It is a sum over rollouts, so that it splits exactly: by band, by outcome, by kind of group (the
single successes) and by single groups.

p-values permute, within groups, which rollout has which advantage and outcome, as often as a feature needs
(`tsae.diff.statistics.sequential_p`); intervals draw problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.diff.config import DiffConfig
from tsae.diff.contrasts import Rows
from tsae.diff.permutations import permuted_weights, weight_permutations
from tsae.diff.statistics import bootstrap_interval, group_difference, q_values, sequential_p
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError
from tsae.features.table import FeatureTable
from tsae.keys import several
from tsae.rollouts.advantages import KINDS, group_names
from tsae.rollouts.table import BANDS, OUTCOMES, problem_bands

if TYPE_CHECKING:
    from tsae.diff.result import FeatureDiff

_SPLITS = 50  # of the problems into halves, for reliabilities
# Realised shifts, as `tsae.diff.contrasts` defines them.
_REALISED = ("policy", "total")


@dataclass(frozen=True)
class Reinforcement:
    """Which features the rollouts of a policy reinforce, and which of them do."""

    table: pd.DataFrame
    """One row a part and tested feature:

    by, part        all, all; band, easy …; outcome, success …; group, single success … (`tsae.rollouts.advantages`)
    n_problems      in which the part has rollouts with an advantage other than 0
    feature         index
    reinforcement   the part's share of the sum, in units of activation · advantage; shares of one `by` add up to all
    low, high       bootstrap interval over problems
    d               mean / standard deviation over problems
    p, q            permutation p-value; Benjamini–Hochberg over the features of the part
    """
    groups: pd.DataFrame
    """One row a group: policy, problem_id, step (where the rollouts have it), band, n, successes, kind."""
    per_group: sp.csr_array
    """(n_groups, n_features) each group's share of the reinforcement; the sum over groups is that of part all."""
    source: FeatureTable
    rows: Rows
    picked: np.ndarray
    """Rows of the source that it was computed from."""
    config: DiffConfig

    def __repr__(self) -> str:
        found = self.table[self.table["by"] == "all"]
        n = int((found.q <= self.config.q).sum())
        return f"Reinforcement({len(self.groups)} groups; {n} of {len(found)} features at q <= {self.config.q})"

    def _repr_html_(self) -> str:
        from tsae.report.cards import card

        whole = self.table[self.table["by"] == "all"]
        kept = ["feature", "reinforcement", "low", "high", "d", "q"]
        kinds = self.groups.groupby("kind", sort=False).size().rename("groups").reset_index()
        return card(
            "Reinforcement",
            {
                "groups": len(self.groups),
                f"features at q ≤ {self.config.q:g}": f"{(whole.q <= self.config.q).sum()} of {len(whole)}",
            },
            ("clearest features: covariance of advantage and mean activation within groups", self.top(8)[kept]),
            ("kinds of groups", kinds),
            note="A prediction of the policy gradient's first step; compare(diff) sets it beside what runs did.",
        )

    def top(self, n: int = 10, part: str | Sequence[str] = "all") -> pd.DataFrame:
        """The n features with the largest |d| among those of a part, or of several, with q at most the config's."""
        table = self.table[self.table.part.isin(several(part)) & (self.table.q <= self.config.q)]
        order = table.d.abs().sort_values(ascending=False, kind="stable").index
        return table.loc[order].head(n).reset_index(drop=True)

    def of_groups(self, feature: int) -> pd.DataFrame:
        """`groups` with their share of one feature's reinforcement, the largest first."""
        if not 0 <= feature < self.per_group.shape[1]:
            raise TsaeError(
                f"no feature {feature}; there are 0 to {self.per_group.shape[1] - 1}", where="Reinforcement.of_groups"
            )
        found = self.groups.assign(reinforcement=self.per_group[:, [feature]].toarray()[:, 0])
        order = found.reinforcement.abs().sort_values(ascending=False, kind="stable").index
        return found.loc[order].reset_index(drop=True)

    @one_blas_thread
    def compare(self, diff: FeatureDiff) -> pd.DataFrame:
        """Predicted shifts, from these rollouts alone, against those that every run realised.

        Args:
            diff: of the same features; its checkpoints are compared.

        Returns:
            one row a checkpoint, part (policy: the base reads the run's own responses; total: the run reads them),
            predicted_on (problems whose groups predict: all, or a band) and realised_on (problems over which the shift
            is measured): matched (predicted on what the run was trained on), n_features, n_problems (realised), rho
            (Spearman over features) with its bootstrap interval low, high over problems, p (advantages permuted within
            groups; two-sided), reliability_predicted and reliability_realised (Spearman between random halves of the
            problems, brought to full length by Spearman–Brown), ceiling (√ of their product: what rho can be expected
            to reach, were the prediction right), rho_halves (prediction from one half of the problems, shift of the
            other: no rollout in common), note (why it was not drawn).

        Raises:
            TsaeError: where the diff is of other rollouts.
        """
        if diff.info["rollouts"] != self.source.rollouts.fingerprint:
            raise TsaeError("is a diff of other rollouts", where="Reinforcement.compare", fix="Give that of the same.")
        records = [
            record
            for checkpoint in diff.checkpoints
            for part in _REALISED
            for record in _comparisons(self, checkpoint, part)
        ]
        return pd.DataFrame(records)


@one_blas_thread
def reinforcement(
    features: FeatureTable | str | Path, config: DiffConfig | None = None, *, policy: str | None = None
) -> Reinforcement:
    """Covariance of advantage and feature within rollout groups, as the base reads the rollouts.

    Args:
        features: or its folder; its rollouts carry advantages.
        config: defaults of `DiffConfig`; bands are those of the rollouts.
        policy: whose rollouts count; by default the base's, or all where it sampled none.

    Raises:
        TsaeError: where an advantage is missing or not finite, no group has rollouts that differ in advantage, or the
            span is within the prompt.
    """
    features = features if isinstance(features, FeatureTable) else FeatureTable.load(features)
    config = config or DiffConfig()
    if config.within_prompt:
        raise TsaeError(
            f"span={config.span!r} is the same for all rollouts of a problem, and no advantage goes with it",
            where="reinforcement",
            fix="Use span='response' or 'all'.",
        )
    rows, base = Rows.of(features, config), features.readers[0]
    if policy is None:
        policy = base if len(rows.by_reader[base, base]) else None
    picked = features.rows(reader=base, policy=policy)
    if not len(picked):
        raise TsaeError(
            f"{base} read no trajectory of {policy!r}; policies are {', '.join(features.rollouts.policies)}",
            where=features.origin,
            fix="Give one of these.",
        )
    picked = picked[np.argsort(rows.problem[picked], kind="stable")]
    frame = features.rollouts.frame.iloc[features.trajectory[picked]].reset_index(drop=True)
    labels, group = np.unique(group_names(frame), return_inverse=True)
    weights = _weights(frame, group, features.origin)
    groups = _group_frame(frame, group, len(labels))
    masks = _parts(frame, groups.kind.to_numpy()[group])
    values = sp.csr_array(rows.values[picked].astype(np.float64))
    problem = pd.factorize(frame.problem_id)[0]
    tested = _active(values, problem, config.min_problems)
    per_group: sp.csr_array = (_sums(group, _within(weights, group)) @ values).tocsr()
    parts = list(masks)
    split = np.stack([_within(weights * masks[key], group) for key in parts])  # (n_parts, n_rows)
    dense = values[:, tested].toarray()
    observed = split @ dense
    tables = []
    for i, (by, part) in enumerate(parts):
        each = (_sums(problem, split[i]) @ dense) * (problem.max() + 1)  # the mean over problems is the part's share
        low, high = bootstrap_interval(each, config.n_bootstrap, config.confidence, config.seed)
        deviation = each.std(0, ddof=1)
        d = np.divide(each.mean(0), deviation, out=np.zeros(len(tested)), where=deviation > 0)
        n_problems = len(np.unique(problem[masks[by, part] & (weights != 0)]))
        keys = {"by": by, "part": part, "n_problems": n_problems, "feature": tested, "reinforcement": observed[i]}
        count = weight_permutations(dense, split[i], group, config.seed)
        p = sequential_p(count, 1, len(tested), config.n_permutations, config.q, config.fdr)
        tables.append(pd.DataFrame({**keys, "low": low, "high": high, "d": d, "p": p, "q": q_values(p, config.fdr)}))
    table = pd.concat(tables, ignore_index=True)
    return Reinforcement(table, groups, per_group, features, rows, picked, config)


def _weights(frame: pd.DataFrame, group: np.ndarray, where: str) -> np.ndarray:
    """(n,) centred advantage / (rollouts of the problem · problems)."""
    advantage = frame.advantage.to_numpy(dtype=float)
    if not np.isfinite(advantage).all():
        raise TsaeError(
            f"{(~np.isfinite(advantage)).sum()} of {len(advantage)} trajectories have no advantage",
            where=where,
            fix="Set advantages from rewards (Rollouts.with_advantages), capture and encode again.",
        )
    problem = pd.factorize(frame.problem_id)[0]
    if problem.max() < 1:
        raise TsaeError("has one problem only, which tells nothing of others", where=where, fix="Give several.")
    centred = _within(advantage, group)
    # What rounding leaves of equal advantages is no covariance.
    centred[np.abs(centred) <= 1e-12 * max(1.0, float(np.abs(advantage).max()))] = 0.0
    if not centred.any():
        raise TsaeError(
            "no group has rollouts that differ in advantage, so that nothing is reinforced",
            where=where,
            fix="Give rollouts with several responses a problem, some right and some wrong.",
        )
    return centred / (np.bincount(problem)[problem] * (problem.max() + 1))


def _within(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n,) minus the mean of the group. Centred weights on raw activations are raw weights on centred activations."""
    centred: np.ndarray = values - (np.bincount(group, weights=values) / np.bincount(group))[group]
    return centred


def _sums(code: np.ndarray, weights: np.ndarray) -> sp.csr_array:
    """(n_codes, n_rows): weighted sums of the rows of every code."""
    return sp.csr_array((weights, (code, np.arange(len(code)))), shape=(int(code.max()) + 1, len(code)))


def _group_frame(frame: pd.DataFrame, group: np.ndarray, n_groups: int) -> pd.DataFrame:
    names = [name for name in ("policy", "problem_id", "step") if name in frame.columns]
    _, first = np.unique(group, return_index=True)
    groups = frame[names].iloc[first].reset_index(drop=True)
    groups["band"] = groups.problem_id.map(problem_bands(frame))
    n = np.bincount(group, minlength=n_groups)
    known = np.bincount(group, weights=frame.outcome != "unknown", minlength=n_groups).astype(int)
    successes = np.bincount(group, weights=frame.outcome == "success", minlength=n_groups).astype(int)
    groups["n"], groups["successes"] = n, successes
    groups["kind"] = np.select(
        [known < n, n == 1, successes == 0, successes == n, successes == 1],
        ["unknown outcomes", "one response", "all failures", "all successes", "single success"],
        "mixed",
    )
    return groups


def _parts(frame: pd.DataFrame, kind: np.ndarray) -> dict[tuple[str, str], np.ndarray]:
    """Masks of rows; those of one `by` cover every row once."""
    parts = {("all", "all"): np.ones(len(frame), dtype=bool)}
    band = frame.band.fillna("no band").to_numpy()
    if (band != "no band").any():
        parts |= {("band", b): band == b for b in (*BANDS, "no band") if (band == b).any()}
    outcome = frame.outcome.to_numpy()
    parts |= {("outcome", o): outcome == o for o in OUTCOMES if (outcome == o).any()}
    parts |= {("group", k): kind == k for k in (*KINDS, "unknown outcomes") if (kind == k).any()}
    return parts


def _active(values: sp.csr_array, problem: np.ndarray, min_problems: int) -> np.ndarray:
    """Features active in at least min_problems problems; none where nobody read anything."""
    if not len(problem):
        return np.zeros(0, dtype=np.int64)
    active = sp.csr_array(_sums(problem, np.ones(len(problem))) @ values.astype(bool).astype(np.float64))
    return np.flatnonzero(np.asarray(active.astype(bool).sum(0)).ravel() >= min_problems)


def _comparisons(found: Reinforcement, checkpoint: str, part: str) -> Iterator[dict[str, object]]:
    """Rows of `Reinforcement.compare` of one checkpoint and part."""
    config, rows = found.config, found.rows
    base = found.source.readers[0]
    info = found.source.reader_info(checkpoint)
    reader = base if part == "policy" else checkpoint
    run, own = rows.by_reader[reader, checkpoint], rows.by_reader[base, base]
    trained_on = info["trained_on"] if info["trained_on"] in BANDS else "all"
    keys = {"checkpoint": checkpoint, "run": info["run"], "step": info["step"], "part": part}
    problem = rows.problem[found.picked]
    band = pd.Series(rows.band[found.picked]).groupby(problem).first()
    here = [b for b in BANDS if (band == b).any()]
    both = np.intersect1d(np.intersect1d(rows.problem[run], rows.problem[own]), problem)
    frame = found.source.rollouts.frame.iloc[found.source.trajectory[found.picked]].reset_index(drop=True)
    group = np.unique(group_names(frame), return_inverse=True)[1]
    tested = _active(rows.values[np.concatenate([run, own])], rows.problem[np.concatenate([run, own])], 1)
    tested = np.intersect1d(tested, found.table.feature.unique())
    realised = np.zeros((0, len(tested)))
    if len(both) and len(tested):
        realised = group_difference(sp.csr_array(rows.values[:, tested]), run, own, rows.problem, both)
    values = rows.values[found.picked][:, tested].toarray().astype(np.float64)
    weights = _within(_weights(frame, group, found.source.origin), group)
    place = pd.factorize(problem)[0]
    codes = pd.unique(problem)
    predicted = np.asarray(_sums(place, weights) @ values)  # (n_problems, n_tested)
    for predicted_on in ("all", *here):
        for realised_on in dict.fromkeys((trained_on, "all")):
            mine = codes if predicted_on == "all" else codes[band[codes].to_numpy() == predicted_on]
            theirs = both if realised_on == "all" else both[band[both].to_numpy() == realised_on]
            record = keys | {"predicted_on": predicted_on, "realised_on": realised_on}
            record |= {"matched": predicted_on == trained_on, "n_features": len(tested), "n_problems": len(theirs)}
            empty = dict.fromkeys(_NUMBERS, np.nan)
            used = np.isin(problem, mine)
            if min(len(mine), len(theirs)) < 2 * config.min_problems or len(tested) < 3:
                note = f"{len(mine)} and {len(theirs)} problems, {len(tested)} features: too few"
            elif not weights[used].any():
                note = "no group there has rollouts that differ in advantage"
            else:
                note = ""
                pairs = _Pairs(predicted[np.isin(codes, mine)], mine, realised[np.isin(both, theirs)], theirs)
                empty = pairs.statistics(config)
                nulls = [
                    spearman(drawn @ values[used].astype(np.float32), pairs.realised.mean(0)[None])
                    for drawn in permuted_weights(
                        weights[used], group[used], config.n_bootstrap, np.random.default_rng([config.seed, 5])
                    )
                ]
                extreme = np.abs(np.concatenate(nulls)) >= abs(empty["rho"]) * (1 - 1e-5)
                empty["p"] = (1 + extreme.sum()) / (1 + len(extreme))
            yield {**record, **empty, "note": note}


_NUMBERS = ("rho", "low", "high", "p", "reliability_predicted", "reliability_realised", "ceiling", "rho_halves")


@dataclass(frozen=True)
class _Pairs:
    """Per-problem predictions and realised shifts of the same features, over problems that may overlap."""

    predicted: np.ndarray
    mine: np.ndarray
    realised: np.ndarray
    theirs: np.ndarray

    def statistics(self, config: DiffConfig) -> dict[str, float]:
        rng = np.random.default_rng([config.seed, 6])
        union = np.union1d(self.mine, self.theirs)
        at, to = np.searchsorted(union, self.mine), np.searchsorted(union, self.theirs)
        # Scaling of either side does not move ranks, so that weights need not be normalised.
        weights = rng.multinomial(len(union), np.full(len(union), 1 / len(union)), size=config.n_bootstrap)
        drawn = spearman(weights[:, at] @ self.predicted, weights[:, to] @ self.realised)
        tail = (1 - config.confidence) / 2
        low, high = np.quantile(drawn, [tail, 1 - tail])
        half = np.argsort(np.argsort(rng.random((_SPLITS, len(union))), axis=1), axis=1) % 2 == 0  # (splits, n)
        p_a, p_b = half[:, at] @ self.predicted, ~half[:, at] @ self.predicted
        r_a, r_b = half[:, to] @ self.realised, ~half[:, to] @ self.realised
        predicted, realised = (_full_length(spearman(a, b).mean()) for a, b in ((p_a, p_b), (r_a, r_b)))
        return {
            "rho": float(spearman(self.predicted.sum(0)[None], self.realised.sum(0)[None])[0]),
            "low": float(low),
            "high": float(high),
            "p": np.nan,
            "reliability_predicted": predicted,
            "reliability_realised": realised,
            "ceiling": float(np.sqrt(predicted * realised)),
            "rho_halves": float((spearman(p_a, r_b).mean() + spearman(p_b, r_a).mean()) / 2),
        }


def _full_length(r: float) -> float:
    """Spearman–Brown: the reliability of the whole from the correlation of its halves; 0 where that is negative."""
    return max(0.0, 2 * r / (1 + r)) if r > -1 else 0.0


def spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(n,) rank correlations of the rows of (n or 1, n_features) arrays; 0 where a row is constant."""
    a, b = (rankdata(x, axis=1) for x in (a, b))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    norm = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return np.divide((a * b).sum(1), norm, out=np.zeros(len(norm)), where=norm > 0)
