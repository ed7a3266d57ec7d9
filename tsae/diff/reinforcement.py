"""Reinforcement: which features a group of rollouts pushes under policy gradient, and how far that comes true.

For the rollouts of one group (one policy, problem and step), the covariance of advantage and mean activation is the
first-order change of the feature's mean under policy gradient on that group.
It assumes that the policy can change the probability of every response on its own. Responses share weights, so it is a
prediction (`tsae.influence` has the exact first order). The reinforcement of a feature is the mean
over problems of their groups' covariance. It is a sum over rollouts, so it splits exactly: by band, by kind of group
(the single successes), by single groups. It splits by outcome only where rewards are more than right and wrong
(`graded_groups` says why).

Take one problem, and a policy π with one parameter for every response y: its logit θ_y. Such a policy can change the
probability of each response on its own. A step of policy gradient on the advantages A changes the mean of a feature f
by the learning rate times

    natural   Σ_y π(y)  (A_y − E A) (f_y − E f) = Cov(A, f)              Fisher-preconditioned step, dθ_y ∝ A_y − E A
    vanilla   Σ_y π(y)² (A_y − E A) (f_y − E f) = Cov(π (A − E A), f)    plain step, dθ_y ∝ π(y) (A_y − E A)

with means and covariances under π. Rollouts are drawn from π, so a mean over n of them replaces one π. The other π
becomes a weight of each rollout:

    1/n Σ_i w_i (A_i − Ā) (f_i − f̄)      natural: w_i = 1;  vanilla: w_i = π(y_i) / mean_j π(y_j) over the group

Under the vanilla step probable responses move faster. Without a scale, the group with short, probable responses would
count e^50 times as much as another. So w has mean 1 in each group, and only the relative probabilities of a problem's
responses matter. Both covariances then have the same unit, and agree if all responses are equally probable.
Probabilities of long responses underflow, so the largest logarithm of a group is subtracted first.

A network does neither: its responses share weights, and Adam is neither step.

*Size.* Δ = reinforcement / standard deviation of the feature over base trajectories: deviations per unit of learning
rate, with advantages as they are. It is a rate of change and not a shift, so the test is for 0 and not for a least
size.

*p-values* are the larger of two. Permuting advantages within groups asks which rollout has which. Flipping the signs of
problems covers features that go with success in some problems and against it in others: permuted advantages reject far
too often there. Where the interval contains 0, p is at least the bootstrap's own. Intervals draw problems.

*Predicted against realised*: rank correlations over features of the predictions with the shifts of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp
from scipy.stats import rankdata

from tsae.activations.forward_batches import fitting, read_batches
from tsae.activations.reading_plan import check_context, check_tokenizer
from tsae.base import display
from tsae.base.filters import need_features, several, strongest
from tsae.base.statistics import counts, percentile_interval
from tsae.base.table_export import Tables
from tsae.checkpoints.hooks import HuggingFaceReader, PredictingReader
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.comparisons import Rows, group_difference, scales, side_means
from tsae.diff.config import DiffConfig
from tsae.diff.effects import active_features
from tsae.diff.inference import infer, weighted
from tsae.diff.permutations import permuted_weights
from tsae.diff.threads import one_blas_thread
from tsae.errors import TsaeError, refuse
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.rewards import KINDS, group_names
from tsae.rollouts.schema import BANDS, OUTCOMES, problem_bands
from tsae.rollouts.table import Rollouts


@one_blas_thread
def reinforcement(
    features: FeatureTable | str | Path,
    config: DiffConfig | None = None,
    *,
    policy: str | None = None,
    series: CheckpointSeries | None = None,
    device: str = "cpu",
) -> Reinforcement:
    """Measure the covariance of advantage and feature within rollout groups, as the base reads the rollouts.

    Args:
        features: or its folder; its rollouts carry advantages.
        config: defaults of `DiffConfig`; bands are those of the rollouts.
        policy: whose rollouts count; by default the base's, or all where it sampled none.
        series: has the checkpoints that sampled them, for the vanilla gradient: where the rollouts carry no column
            logprob, these checkpoints read their responses again.
        device: torch device for that.

    Raises:
        TsaeError: where an advantage is missing or not finite, no group has rollouts that differ in advantage, or the
            span is within the prompt.
    """
    features, config = FeatureTable.of(features), config or DiffConfig()
    same = f"span={config.span!r} is the same for all rollouts of a problem, and no advantage goes with it"
    refuse("reinforcement", (config.within_prompt, same, "Use span='response' or 'all'."))
    rows, base = Rows.of(features, config), features.readers[0]
    if policy is None and len(rows.by_reader[base, base]):
        policy = base
    read = features.rows(reader=base, policy=policy)
    picked = read[rows.n_tokens[read] > 0]
    foreign = f"{base} read no trajectory of {policy!r}; policies are {', '.join(features.rollouts.policies)}"
    refuse(
        features.origin,
        (not len(read), foreign, "Give one of these."),
        (not len(picked), f"no trajectory has a token of the span {config.span}", "Choose another span."),
    )
    picked = picked[np.argsort(rows.problem[picked], kind="stable")]
    trajectories = features.trajectory[picked]
    frame = features.rollouts.frame.iloc[trajectories].reset_index(drop=True)
    logprob = logged(features.rollouts, trajectories)
    if logprob is None and series is not None:
        for checkpoint in series:
            features.need_weights(checkpoint)
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
    # A feature that does not vary has no covariance: its Δ is 0 in any unit.
    deviation = np.where(scale.deviation > 0, scale.deviation, 1.0)[tested]
    scaled_by = scale.kind[tested]
    n_problems, tables = len(problems), []
    for gradient in samples.relative:
        moved = samples.moved(dense, gradient)
        for (by, part), mask in masks.items():
            weight = samples.weight * mask
            each = (sums(samples.problem, weight) @ moved) * n_problems  # the mean over problems is the part's share
            asked = weighted(each, deviation, moved, weight, samples.group, config.seed)
            found = infer(asked, replace(config, minimum_effect=0.0))
            keys: dict[str, Any] = {"gradient": gradient, "by": by, "part": part}
            n_moving = len(np.unique(samples.problem[weight != 0]))
            keys |= {"n_problems": n_moving, "feature": tested, "reinforcement": found.difference}
            numbers = {name: getattr(found, name) for name in ("low", "high", "delta", "delta_low", "delta_high")}
            tables.append(pd.DataFrame({**keys, **numbers, "scale": scaled_by, "p": found.p, "q": found.q}))
    return Reinforcement(
        table=pd.concat(tables, ignore_index=True),
        groups=groups,
        per_group={gradient: samples.per_group(values, gradient) for gradient in samples.relative},
        notes=_notes(samples, graded, len(read), config),
        source=features,
        rows=rows,
        picked=picked,
        samples=samples,
        config=config,
    )


def _notes(samples: Samples, graded: int, n_read: int, config: DiffConfig) -> tuple[str, ...]:
    notes = []
    if (empty := n_read - len(samples.frame)) > 0:
        notes.append(
            f"{empty:,} of {n_read:,} trajectories have no token of the span {config.span}, and count nowhere: "
            "advantages are set against the others of their groups."
        )
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
        relative = samples.relative["vanilla"]
        groups["effective"] = np.bincount(group, relative) ** 2 / np.bincount(group, relative**2)
    return groups


def _parts(frame: pd.DataFrame, kind: np.ndarray, *, by_outcome: bool) -> dict[tuple[str, str], np.ndarray]:
    """Masks of rows; the masks of one `by` cover every row once."""
    parts = {("all", "all"): np.ones(len(frame), dtype=bool)}
    band = frame.band.fillna("no band").to_numpy()
    if (band != "no band").any():
        parts |= {("band", b): band == b for b in (*BANDS, "no band") if (band == b).any()}
    if by_outcome:
        outcome = frame.outcome.to_numpy()
        parts |= {("outcome", o): outcome == o for o in OUTCOMES if (outcome == o).any()}
    parts |= {("group", k): kind == k for k in (*KINDS, "unknown outcomes") if (kind == k).any()}
    return parts


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
        return display.card(
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
        return strongest(table, "delta", n)

    def of_groups(self, feature: int, *, gradient: Gradient = "natural") -> pd.DataFrame:
        """`groups` with their share of one feature's reinforcement, the largest first."""
        self._check(gradient)
        share = self.per_group[gradient]
        need_features([feature], share.shape[1], "Reinforcement.of_groups")
        found = self.groups.assign(reinforcement=share[:, [feature]].toarray()[:, 0])
        return strongest(found, "reinforcement")

    def _check(self, gradient: Gradient) -> None:
        what = f"has no {gradient} gradient; there is {', '.join(self.per_group)}"
        fix = "Give series=…, so that the checkpoints read the responses that they sampled."
        refuse("Reinforcement", (gradient not in self.per_group, what, fix))

    @one_blas_thread
    def compare(self, diff: Any) -> pd.DataFrame:
        """Set the shifts that these rollouts predict against those that every run realised.

        Args:
            diff: FeatureDiff of the same features; its checkpoints are compared.

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
        if (other := self.source.differing(diff.info)) is not None:
            raise TsaeError(f"is a diff of other {other}", where="Reinforcement.compare", fix="Give that of the same.")
        tested = self.table.feature.unique()
        parts = [(checkpoint, part) for checkpoint in diff.checkpoints for part in ("policy", "total")]
        return pd.DataFrame([record for each in parts for record in self._agreements(*each, tested)])

    def _agreements(self, checkpoint: str, part: str, features: np.ndarray) -> Iterator[dict[str, object]]:
        """Compare predictions with one part of a checkpoint's realised shift, over features: rows of `compare`."""
        base = self.source.readers[0]
        info = self.source.reader_info(checkpoint)
        reader = base if part == "policy" else checkpoint
        run, own = self.rows.by_reader[reader, checkpoint], self.rows.by_reader[base, base]
        trained_on = info["trained_on"] if info["trained_on"] in BANDS else "all"
        keys = {"checkpoint": checkpoint, "run": info["run"], "step": info["step"], "part": part}
        problem = self.rows.problem[self.picked]
        band = pd.Series(self.rows.band[self.picked]).groupby(problem).first()
        here = [b for b in BANDS if (band == b).any()]
        both = np.intersect1d(np.intersect1d(self.rows.problem[run], self.rows.problem[own]), problem)
        active = np.flatnonzero((self.rows.values[np.concatenate([run, own])] > 0).sum(0))
        tested = np.intersect1d(active, features)
        realised = np.zeros((0, len(tested)))
        if len(both) and len(tested):
            realised = group_difference(sp.csr_array(self.rows.columns[:, tested]), run, own, self.rows.problem, both)
        values = self.rows.values[self.picked][:, tested].toarray().astype(np.float64)
        codes, weight, group = pd.unique(problem), self.samples.weight, self.samples.group
        for gradient in self.samples.relative:
            moved = self.samples.moved(values, gradient)
            predicted = np.asarray(sums(self.samples.problem, weight) @ moved)  # (n_problems, n_tested)
            for predicted_on in ("all", *here):
                for realised_on in dict.fromkeys((trained_on, "all")):
                    mine = codes if predicted_on == "all" else codes[band[codes].to_numpy() == predicted_on]
                    theirs = both if realised_on == "all" else both[band[both].to_numpy() == realised_on]
                    record = keys | {"gradient": gradient, "predicted_on": predicted_on, "realised_on": realised_on}
                    record |= {
                        "matched": predicted_on == trained_on,
                        "n_features": len(tested),
                        "n_problems": len(theirs),
                    }
                    numbers, note = dict.fromkeys(_NUMBERS, np.nan), ""
                    used = np.isin(problem, mine)
                    if min(len(mine), len(theirs)) < 2 * self.config.min_problems or len(tested) < 3:
                        note = f"{len(mine)} and {len(theirs)} problems, {len(tested)} features: too few"
                    elif not weight[used].any():
                        note = "no group there has rollouts that differ in advantage"
                    else:
                        pairs = _Pairs(predicted[np.isin(codes, mine)], mine, realised[np.isin(both, theirs)], theirs)
                        numbers, rng = pairs.statistics(self.config), np.random.default_rng([self.config.seed, 5])
                        shift, single = pairs.realised.mean(0)[None], moved[used].astype(np.float32)
                        permuted = permuted_weights(weight[used], group[used], self.config.n_bootstrap, rng)
                        nulls = np.concatenate([spearman(drawn @ single, shift) for drawn in permuted])
                        extreme = np.abs(nulls) >= abs(numbers["rho"]) * (1 - 1e-5)
                        numbers["p"] = (1 + extreme.sum()) / (1 + len(extreme))
                    yield {**record, **numbers, "note": note}


Gradient = Literal["natural", "vanilla"]


@dataclass(frozen=True)
class Samples:
    """Rollouts in groups, with the weight of each in a covariance; all arrays are (n,)."""

    frame: pd.DataFrame
    """Of the rollouts."""
    group: np.ndarray
    """Codes: policy, problem and step."""
    problem: np.ndarray
    """Codes."""
    weight: np.ndarray
    """Centred advantage / (rollouts of the problem · problems), so that a sum is a mean over problems."""
    relative: dict[Gradient, np.ndarray]
    """w of the gradients that are known: natural, and vanilla where every rollout has a log-probability."""

    @classmethod
    def of(cls, frame: pd.DataFrame, logprob: np.ndarray | None, where: str) -> Samples:
        """Group rollouts that have advantages; logprob is (n,) in nats, and `where` is named in errors.

        Raises:
            TsaeError: where an advantage is missing or not finite, no group has rollouts that differ in advantage,
                there is one problem only, or a log-probability is above 0.
        """
        group = np.unique(group_names(frame), return_inverse=True)[1]
        relative: dict[Gradient, np.ndarray] = {"natural": np.ones(len(frame))}
        if logprob is not None:
            fix = "Give sums of natural logarithms over response tokens in the column logprob."
            n_above = (logprob > 1e-3).sum()
            refuse(where, (n_above, f"{n_above} log-probabilities are above 0", fix))
            relative["vanilla"] = relative_probabilities(logprob, group)
        problem = pd.factorize(frame.problem_id)[0]
        return cls(frame, group, problem, _weights(frame, group, problem, where), relative)

    def moved(self, values: np.ndarray, gradient: Gradient) -> np.ndarray:
        """(n, n_features) w_i (f_i − f̄): weighted with `weight` and summed it is the covariance."""
        mean = sums(self.group, np.ones(len(values))) @ values / np.bincount(self.group)[:, None]
        centred = values - mean[self.group]
        moved: np.ndarray = centred * self.relative[gradient][:, None]
        return moved

    def per_group(self, values: sp.csr_array, gradient: Gradient) -> sp.csr_array:
        """(n_groups, n_features) share of every group."""
        weight = within(self.weight * self.relative[gradient], self.group)
        return sp.csr_array(sums(self.group, weight) @ values)


def relative_probabilities(logprob: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n,) π / the group's mean of π, from logarithms."""
    largest = np.full(int(group.max()) + 1, -np.inf)
    np.maximum.at(largest, group, logprob)
    scaled = np.exp(logprob - largest[group])
    relative: np.ndarray = scaled * (np.bincount(group) / np.bincount(group, weights=scaled))[group]
    return relative


def within(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """(n,) minus the mean of the group. Centring the weights has the same effect as centring the activations."""
    centred: np.ndarray = values - (np.bincount(group, weights=values) / np.bincount(group))[group]
    return centred


def sums(code: np.ndarray, weights: np.ndarray) -> sp.csr_array:
    """(n_codes, n_rows): weighted sums of the rows of every code."""
    return sp.csr_array((weights, (code, np.arange(len(code)))), shape=(int(code.max()) + 1, len(code)))


def graded_groups(samples: Samples) -> int:
    """Number of groups in which advantages differ among successes, or among failures.

    In every other group all successes share one advantage and all failures another. With k successes among n rollouts
    their advantages are proportional to 1 − k/n and −k/n. The successes then carry exactly (n − k)/n of every feature's
    covariance, whatever the feature.
    """
    outcome = pd.factorize(samples.frame.outcome)[0]
    cells = pd.DataFrame({"group": samples.group, "outcome": outcome, "advantage": samples.frame.advantage.to_numpy()})
    spread = cells.groupby(["group", "outcome"]).advantage.agg(np.ptp)
    size = np.abs(cells.advantage).max()
    kinds = cells.groupby("group").outcome.nunique()
    graded = (spread > 1e-6 * max(1.0, size)).groupby("group").any() | (kinds > 2)
    return int(graded.sum())


def _weights(frame: pd.DataFrame, group: np.ndarray, problem: np.ndarray, where: str) -> np.ndarray:
    advantage = frame.advantage.to_numpy(dtype=float)
    n_lacking, largest = (~np.isfinite(advantage)).sum(), float(np.abs(advantage).max())
    again = "Set advantages from rewards (Rollouts.with_advantages), capture and encode again."
    refuse(
        where,
        (n_lacking, f"{n_lacking} of {len(advantage)} trajectories have no advantage", again),
        (problem.max() < 1, "has one problem only, and says nothing about others", "Give several."),
    )
    centred = within(advantage, group)
    endless = not np.isfinite(centred).all() or not np.isfinite(np.square(centred).sum())
    # If advantages are equal, only rounding errors are left: set them to 0.
    centred[np.abs(centred) <= 1e-12 * max(1.0, largest)] = 0.0
    nothing = "no group has rollouts that differ in advantage, so that nothing is reinforced"
    refuse(
        where,
        (endless, f"advantages as large as {largest:.3g} cannot be computed with", again),
        (not centred.any(), nothing, "Give rollouts with several responses a problem, some right and some wrong."),
    )
    return centred / (np.bincount(problem)[problem] * (problem.max() + 1))


_SPLITS = 50  # of the problems into halves, for reliabilities


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


COLUMN = "logprob"
"""Column of the rollouts: Σ log π over the response tokens that the policy sampled, end token included, in nats, at the
temperature of sampling."""


def logged(rollouts: Rollouts, rows: np.ndarray) -> np.ndarray | None:
    """(n,) log-probabilities from the log, or None if any is missing."""
    if COLUMN not in rollouts.frame.columns:
        return None
    found = rollouts.frame[COLUMN].to_numpy(dtype=float)[rows]
    return found if np.isfinite(found).all() else None


def response_logprobs(
    rollouts: Rollouts, rows: np.ndarray, series: CheckpointSeries, *, device: str = "cpu", batch_tokens: int = 16_384
) -> np.ndarray | None:
    """Let every policy read its own responses again.

    Args:
        rollouts: has the trajectories.
        rows: (n,) of them.
        series: has the checkpoints that sampled them, at temperature 1.
        device: torch device.
        batch_tokens: tokens in a forward pass, with padding.

    Returns:
        (n,) Σ log π in nats; None where a policy is not in the series.

    Raises:
        TsaeError: where a batch does not fit into memory, or a checkpoint has another tokenizer or too short a context.
    """
    policy = rollouts.frame.policy.to_numpy()[rows]
    if not set(policy) <= {checkpoint.id for checkpoint in series}:
        return None
    prompt, found = rollouts.lengths("prompt_ids")[rows], np.empty(len(rows))
    for id in dict.fromkeys(policy):
        mine = np.flatnonzero(policy == id)
        checkpoint = series[id]
        check_tokenizer(checkpoint, rollouts, rows=rows[mine])
        model = checkpoint.load_model(device=device)
        config = model.config.get_text_config()
        check_context(rollouts, getattr(config, "max_position_embeddings", None), config.vocab_size, rows=rows[mine])
        reader = PredictingReader(HuggingFaceReader(model, ["blocks.0.hook_resid_pre"]))
        texts = [np.concatenate(rollouts.tokens(int(rows[i]))) for i in mine]
        with fitting(batch_tokens, "response_logprobs"):
            for batch in read_batches(reader, texts, batch_tokens):
                for text, logprob in batch.each("logprob"):
                    i = mine[text]
                    found[i] = logprob.double().cpu().numpy()[prompt[i] :][rollouts.sampled(int(rows[i]))].sum()
    return found
