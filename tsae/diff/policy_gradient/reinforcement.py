"""Reinforcement: which features a group of rollouts pushes under policy gradient, and how far that comes true.

For the rollouts of one group (one policy, problem and step), the covariance of advantage and mean activation is the
first-order change of the feature's mean under policy gradient on that group (`tsae.diff.policy_gradient.covariance`).
It assumes that the policy can change the probability of every response on its own. Responses share weights, so it is a
prediction (`tsae.diff.policy_gradient.influence` has the exact first order). The reinforcement of a feature is the mean
over problems of their groups' covariance. It is a sum over rollouts, so it splits exactly: by band, by kind of group
(the single successes), by single groups. It splits by outcome only where rewards are more than right and wrong
(`tsae.diff.policy_gradient.covariance.graded_groups` says why).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pandas as pd
import scipy.sparse as sp

from tsae.base.filters import several
from tsae.base.table_export import Tables
from tsae.base.views import views
from tsae.diff.config import DiffConfig
from tsae.diff.contrast.rows import Rows
from tsae.diff.policy_gradient.covariance import Gradient, Samples
from tsae.diff.policy_gradient.realised import agreements
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable


class Realised(Protocol):
    """What `Reinforcement.compare` asks of a diff."""

    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def checkpoints(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Reinforcement(Tables):
    """Which features the rollouts of a policy reinforce, and which rollouts do it."""

    table: pd.DataFrame
    """One row a part and tested feature:

    gradient        natural; vanilla where the probabilities of the responses are known
    by, part        all, all; band, easy …; group, single success … (`tsae.rollouts.rewards`); outcome, success …
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
    the number of responses that count in the vanilla gradient, 1 if one is far more probable than the rest."""
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

    @property
    def made_from(self) -> dict[str, str | None]:
        """Fingerprints of the rollouts, of their labels, and of the SAE's weights where they are known."""
        of, sae = self.source.rollouts, self.source.info.get("sae") or {}
        return {"rollouts": of.fingerprint, "labels": of.labels_fingerprint, "sae": sae.get("weights")}

    @one_blas_thread
    def compare(self, diff: Realised) -> pd.DataFrame:
        """Set the shifts that these rollouts predict against those that every run realised.

        Args:
            diff: of the same features; its checkpoints are compared.

        Returns:
            one row a comparison:

            checkpoint, part  whose shift: policy (the base reads the run's own responses) or total (the run reads them)
            gradient        natural, or vanilla where it is known
            predicted_on    problems whose groups predict: all, or a band
            realised_on     problems over which the shift is measured; n_problems of them
            matched         predicted on what the run was trained on
            n_features      tested
            rho             Spearman correlation over features; low, high its bootstrap interval over problems
            p               two-sided, by permuting advantages within groups
            reliability_predicted, reliability_realised  Spearman between random halves of the problems, brought to full
                            length by Spearman–Brown
            ceiling         √ of their product: the rho to expect if the prediction were right
            rho_halves      prediction and shift from different halves of the problems: no rollout in common
            note            why it was not drawn

        Raises:
            TsaeError: where the diff is of other rollouts.
        """
        of = {"rollouts": diff.info["rollouts"], "labels": diff.info.get("labels")}
        of |= {"sae": (diff.info.get("sae") or {}).get("weights")}
        for name, known in self.made_from.items():
            if None not in (known, of[name]) and known != of[name]:
                raise TsaeError(
                    f"is a diff of other {name}", where="Reinforcement.compare", fix="Give that of the same."
                )
        tested = self.table.feature.unique()
        records = [
            record
            for checkpoint in diff.checkpoints
            for part in ("policy", "total")
            for record in agreements(
                self.source, self.rows, self.picked, self.samples, tested, self.config, checkpoint, part
            )
        ]
        return pd.DataFrame(records)
