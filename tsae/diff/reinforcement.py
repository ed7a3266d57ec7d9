"""Reinforcement: the shift that policy gradient on a group of rollouts predicts, and how far it comes true.

For the rollouts i of one group (one policy, problem and step) with advantages A and mean activations f, the covariance
of A and f, natural or vanilla (`tsae.diff.covariance`), is the first-order change of the feature's mean under policy
gradient on that group, for a policy that could change the probability of every response on its own. Responses share
weights, so that it is a prediction and no identity (`tsae.diff.influence` has the exact first order). The reinforcement
of a feature is the mean over problems of their groups' covariance. It is a sum over rollouts, so that it splits
exactly: by band, by kind of group (the single successes), by single groups, and by outcome where rewards are more than
right and wrong: else that split is arithmetic and says nothing of features (`tsae.diff.covariance.graded_groups`).

*Size.* Δ = reinforcement / standard deviation of the feature over base trajectories: deviations per unit of learning
rate, of advantages as they are. It is a rate of change and no shift, so that the test is for 0 and not for a least
size.

*p-values* are the larger of two. Advantages permuted within groups: which rollout has which. And signs of problems
flipped: where a feature goes with success in some problems and against it in others, permuted advantages know nothing
of that and reject far too often. Where the interval has 0 in it, p is at least the bootstrap's own. Intervals draw
problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.base.filters import several
from tsae.base.views import views
from tsae.diff.config import DiffConfig
from tsae.diff.contrasts import active_features, draws
from tsae.diff.covariance import Gradient, Samples, effective_responses, graded_groups, sums
from tsae.diff.probabilities import logged, response_logprobs
from tsae.diff.realised import agreements
from tsae.diff.rows import Rows, scales
from tsae.diff.statistics import infer, weighted
from tsae.diff.threads import one_blas_thread
from tsae.diff.within_problems import side_means
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.advantages import KINDS
from tsae.rollouts.table import BANDS, OUTCOMES, problem_bands

if TYPE_CHECKING:
    from tsae.checkpoints.series import CheckpointSeries
    from tsae.diff.result import FeatureDiff

# Realised shifts, as `tsae.diff.contrasts` defines them.
_REALISED = ("policy", "total")


@dataclass(frozen=True)
class Reinforcement:
    """Which features the rollouts of a policy reinforce, and which of them do."""

    table: pd.DataFrame
    """One row a part and tested feature:

    gradient        natural, or vanilla where probabilities of responses are known (`tsae.diff.covariance`)
    by, part        all, all; band, easy …; group, single success … (`tsae.rollouts.advantages`); outcome, success …
                    where rewards are more than right or wrong
    n_problems      in which the part has rollouts with an advantage other than 0
    feature         index
    reinforcement   the part's share of the sum, in units of activation · advantage; shares of one `by` add up to all
    low, high       bootstrap interval over problems
    delta, delta_low, delta_high   the same in the feature's standard deviations over base trajectories
    scale           base; or pooled with the rollouts it was computed from, where the feature is silent at base, as in
                    `FeatureDiff.shifts`
    p, q            that it is 0; Benjamini–Hochberg over the features of the part
    """
    groups: pd.DataFrame
    """One row a group: policy, problem_id, step (where the rollouts have it), band, n, successes, kind, and effective:
    responses that weigh as much as the n do in the vanilla gradient, 1 where one is far more probable than the rest."""
    per_group: dict[Gradient, sp.csr_array]
    """(n_groups, n_features) each group's share of the reinforcement; the sum over groups is that of part all."""
    notes: tuple[str, ...]
    """What was left out, and why."""
    source: FeatureTable
    rows: Rows
    picked: np.ndarray
    """Rows of the source that it was computed from."""
    samples: Samples
    """These rollouts in groups, with their weights."""
    config: DiffConfig

    def __repr__(self) -> str:
        return f"Reinforcement({len(self.groups)} groups; {self._counts()} features at q <= {self.config.q})"

    def _counts(self) -> str:
        whole = self.table[self.table["by"] == "all"]
        counts = [
            f"{gradient} gradient {(rows.q <= self.config.q).sum()} of {len(rows)}"
            for gradient, rows in whole.groupby("gradient", sort=False)
        ]
        return ", ".join(counts) or "0 of 0"

    def _repr_html_(self) -> str:
        kept = ["feature", "reinforcement", "delta", "delta_low", "delta_high", "q"]
        kinds = self.groups.groupby("kind", sort=False).size().rename("groups").reset_index()
        return views().card(
            "Reinforcement",
            {"groups": len(self.groups), f"features at q ≤ {self.config.q:g}": self._counts()},
            *(
                (f"largest Δ: {gradient} gradient, covariance within groups", self.top(8, gradient=gradient)[kept])
                for gradient in self.per_group
            ),
            ("kinds of groups", kinds),
            note=" ".join([*self.notes, "A prediction of the first step; compare(diff) sets it beside what runs did."]),
        )

    def top(self, n: int = 10, part: str | Sequence[str] = "all", *, gradient: Gradient = "natural") -> pd.DataFrame:
        """The n features with the largest |delta| among those of a part, or several, with q at most the config's."""
        self._check(gradient)
        table = self.table[self.table.part.isin(several(part)) & (self.table.gradient == gradient)]
        table = table[table.q <= self.config.q]
        order = table.delta.abs().sort_values(ascending=False, kind="stable").index
        return table.loc[order].head(n).reset_index(drop=True)

    def of_groups(self, feature: int, *, gradient: Gradient = "natural") -> pd.DataFrame:
        """`groups` with their share of one feature's reinforcement, the largest first."""
        self._check(gradient)
        share = self.per_group[gradient]
        if not 0 <= feature < share.shape[1]:
            raise TsaeError(
                f"no feature {feature}; there are 0 to {share.shape[1] - 1}", where="Reinforcement.of_groups"
            )
        found = self.groups.assign(reinforcement=share[:, [feature]].toarray()[:, 0])
        order = found.reinforcement.abs().sort_values(ascending=False, kind="stable").index
        return found.loc[order].reset_index(drop=True)

    def _check(self, gradient: Gradient) -> None:
        if gradient not in self.per_group:
            raise TsaeError(
                f"has no {gradient} gradient; there is {', '.join(self.per_group)}",
                where="Reinforcement",
                fix="Give series=…, so that the checkpoints read the responses that they sampled.",
            )

    @one_blas_thread
    def compare(self, diff: FeatureDiff) -> pd.DataFrame:
        """Predicted shifts, from these rollouts alone, against those that every run realised.

        Args:
            diff: of the same features; its checkpoints are compared.

        Returns:
            one row a checkpoint, part (policy: the base reads the run's own responses; total: the run reads them),
            gradient (natural, or vanilla where it is known),
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
        tested = self.table.feature.unique()
        records = [
            record
            for checkpoint in diff.checkpoints
            for part in _REALISED
            for record in agreements(
                self.source, self.rows, self.picked, self.samples, tested, self.config, checkpoint, part
            )
        ]
        return pd.DataFrame(records)


@one_blas_thread
def reinforcement(
    features: FeatureTable | str | Path,
    config: DiffConfig | None = None,
    *,
    policy: str | None = None,
    series: CheckpointSeries | None = None,
    device: str = "cpu",
) -> Reinforcement:
    """Covariance of advantage and feature within rollout groups, as the base reads the rollouts.

    Args:
        features: or its folder; its rollouts carry advantages.
        config: defaults of `DiffConfig`; bands are those of the rollouts.
        policy: whose rollouts count; by default the base's, or all where it sampled none.
        series: has the checkpoints that sampled them, for the vanilla gradient: where the rollouts carry no column
            logprob, these read their responses once more.
        device: torch device for that.

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
    empty = rows.n_tokens[picked] == 0
    picked = picked[~empty]
    if not len(picked):
        raise TsaeError(
            f"no trajectory has a token of the span {config.span}", where=features.origin, fix="Choose another span."
        )
    picked = picked[np.argsort(rows.problem[picked], kind="stable")]
    trajectories = features.trajectory[picked]
    frame = features.rollouts.frame.iloc[trajectories].reset_index(drop=True)
    logprob = logged(features.rollouts, trajectories)
    if logprob is None and series is not None:
        logprob = response_logprobs(features.rollouts, trajectories, series, device=device)
    samples = Samples.of(frame, logprob, features.origin)
    values = sp.csr_array(rows.values[picked].astype(np.float64))
    problems = np.unique(samples.problem)
    tested = active_features(config, side_means(values, np.arange(len(picked)), samples.problem, problems))
    groups = _group_frame(samples)
    graded = graded_groups(samples)
    masks = _parts(frame, groups.kind.to_numpy()[samples.group], by_outcome=graded > 0)
    dense = values[:, tested].toarray()
    (scale,) = scales(rows, rows.by_reader[base, rows.own(base)], [picked], config)
    # What does not vary has no covariance, so that its Δ is 0 in any unit.
    deviation = np.where(scale.deviation > 0, scale.deviation, 1.0)[tested]
    scaled_by = np.where(scale.silent, "pooled", "base")[tested]
    n_problems, tables = len(problems), []
    for gradient in samples.relative:
        moved = samples.moved(dense, gradient)
        for (by, part), mask in masks.items():
            weight = samples.weight * mask
            each = (sums(samples.problem, weight) @ moved) * n_problems  # the mean over problems is the part's share
            # A first-order change per unit step: how large it would become is the step's affair, so 0 is the null.
            asked = weighted(each, deviation, moved, weight, samples.group, config.seed)
            found = infer(asked, replace(draws(config), minimum_effect=0.0))
            columns = {
                "gradient": gradient,
                "by": by,
                "part": part,
                "n_problems": len(np.unique(samples.problem[weight != 0])),
                "feature": tested,
                "reinforcement": found.difference,
                "low": found.low,
                "high": found.high,
                "delta": found.delta,
                "delta_low": found.delta_low,
                "delta_high": found.delta_high,
                "scale": scaled_by,
                "p": found.p,
                "q": found.q,
            }
            tables.append(pd.DataFrame(columns))
    return Reinforcement(
        table=pd.concat(tables, ignore_index=True),
        groups=groups,
        per_group={gradient: samples.per_group(values, gradient) for gradient in samples.relative},
        notes=(*_left_out(empty, config), *_notes(samples, graded)),
        source=features,
        rows=rows,
        picked=picked,
        samples=samples,
        config=config,
    )


def _left_out(empty: np.ndarray, config: DiffConfig) -> list[str]:
    if not empty.any():
        return []
    return [
        f"{empty.sum():,} of {len(empty):,} trajectories have no token of the span {config.span}, and count nowhere: "
        "advantages are set against the others of their groups."
    ]


def _notes(samples: Samples, graded: int) -> tuple[str, ...]:
    notes = []
    n_groups = len(np.unique(samples.group[samples.weight != 0]))
    if not graded:
        notes.append(
            "Not split by outcome: rewards only say right or wrong, and then the k successes among a group's n "
            "rollouts carry (n − k)/n of every feature's covariance, whatever the feature."
        )
    elif graded < n_groups:
        notes.append(
            f"In {graded} of {n_groups} groups advantages differ among successes or among failures; in the others the "
            "split by outcome is (n − k)/n for any feature."
        )
    if "vanilla" not in samples.relative:
        notes.append(
            "Vanilla gradient not computed: it needs every response's log-probability, from a column logprob or from "
            "the checkpoints that sampled them."
        )
    return tuple(notes)


def _group_frame(samples: Samples) -> pd.DataFrame:
    frame, group = samples.frame, samples.group
    names = [name for name in ("policy", "problem_id", "step") if name in frame.columns]
    _, first = np.unique(group, return_index=True)
    groups = frame[names].iloc[first].reset_index(drop=True)
    groups["band"] = groups.problem_id.map(problem_bands(frame))
    n = np.bincount(group)
    known = np.bincount(group, weights=frame.outcome != "unknown").astype(int)
    successes = np.bincount(group, weights=frame.outcome == "success").astype(int)
    groups["n"], groups["successes"] = n, successes
    groups["kind"] = np.select(
        [known < n, n == 1, successes == 0, successes == n, successes == 1],
        ["unknown outcomes", "one response", "all failures", "all successes", "single success"],
        "mixed",
    )
    if "vanilla" in samples.relative:
        groups["effective"] = effective_responses(samples.relative["vanilla"], group)
    return groups


def _parts(frame: pd.DataFrame, kind: np.ndarray, *, by_outcome: bool) -> dict[tuple[str, str], np.ndarray]:
    """Masks of rows; those of one `by` cover every row once."""
    parts = {("all", "all"): np.ones(len(frame), dtype=bool)}
    band = frame.band.fillna("no band").to_numpy()
    if (band != "no band").any():
        parts |= {("band", b): band == b for b in (*BANDS, "no band") if (band == b).any()}
    if by_outcome:
        outcome = frame.outcome.to_numpy()
        parts |= {("outcome", o): outcome == o for o in OUTCOMES if (outcome == o).any()}
    parts |= {("group", k): kind == k for k in (*KINDS, "unknown outcomes") if (kind == k).any()}
    return parts
