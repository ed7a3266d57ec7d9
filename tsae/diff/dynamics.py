"""Dynamics: features along the steps of a run, beside what the same steps do.

The shift of a feature at a step is that of `tsae.diff.effects`: the total shift if all steps and the
base sampled the same problems, else the shift on the same trajectories. All steps of a run are compared over the same
problems.

A feature is *clear* in a run if some step moved it by more than the minimum effect: Simes' p over the steps (Simes
1986), Benjamini–Hochberg over features, at most the config's q. Steps are judged by q over all steps and features of
the run. The kind of a clear feature is then

    emerging   the last step is above the base, which had at most a tenth of the last step's mean
    growing    the last step is above the base, which had the feature already
    fading     the last step is below the base
    passing    an earlier step differs from the base, but the last does not, at this q

All others are *flat*: not found to move, which does not mean that they stay.

*Onset*: the first step at which the shift has reached half of the last step's (for passing features half of the
largest clear shift). Its interval comes from the same step in bootstrap draws of problems. Only saved steps can be an
onset: nothing is known of what happened between them. The intervals cover other rollouts of the same weights. They do
not cover another run with another seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import false_discovery_control

from tsae.base import display
from tsae.base.statistics import counts, percentile_interval
from tsae.base.table_export import Tables
from tsae.diff.comparisons import Rows, comparisons, main_comparisons, side_means
from tsae.diff.config import DiffConfig
from tsae.diff.effects import active_features
from tsae.diff.inference import paired_inference, q_values
from tsae.diff.reinforcement import spearman
from tsae.diff.threads import one_blas_thread
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.behaviours import behaviour_table

KINDS = ("emerging", "growing", "fading", "passing", "flat")
FLAT = "flat"
COLUMNS = (
    "run", "step", "feature", "mean", "shift", "low", "high", "delta", "p", "q", "kind", "onset", "onset_low",
    "onset_high", "part",
)  # fmt: skip
BEHAVIOUR_COLUMNS = ("run", "step", "band", "behaviour", "mean", "low", "high", "n_problems")
_HARDLY = 0.1  # Of the last step's mean: what the base may have of an emerging feature.
_BLOCK = 2048  # features whose onsets are drawn at once


@dataclass(frozen=True)
class Dynamics(Tables):
    """Features and behaviours along the steps of runs."""

    table: pd.DataFrame
    """One row a run, step and feature, the base as step 0 of every run:

    run, step       of the checkpoint
    feature         index; those that are active in enough problems of the run
    mean            mean activation, over problems
    shift           mean − the base's, with its bootstrap interval low, high; 0 at the base
    delta, p        Δ, in standard deviations over base trajectories; p of |Δ| ≤ minimum_effect (1 at the base)
    q               over all steps and features of the run (1 at the base)
    kind            emerging, growing, fading, passing or flat: of the feature in this run, the same at every step
    onset           the first step with half of the shift, onset_low and onset_high its interval; NaN for flat features
    part            which shift: total, or same_trajectories
    """
    behaviours: pd.DataFrame
    """One row a run, step, band and behaviour: mean over the n_problems problems that the base and all steps answered,
    with its interval low, high. Runs with fewer than min_problems of these have no rows: they cannot be compared."""
    notes: dict[str, str] = field(default_factory=dict)
    """Why a run has no rows, by run."""

    def _repr_html_(self) -> str:
        features = self.table.drop_duplicates(["run", "feature"])
        kinds = features.groupby(["run", "kind"], sort=False).size().unstack(fill_value=0).reset_index()
        steps = {run: sorted(map(int, rows.step.unique())) for run, rows in self.table.groupby("run", sort=False)}
        told = [f"{run}: {', '.join(map(str, found))}" for run, found in steps.items()]
        notes = [f"{run}: {why}" for run, why in self.notes.items()] or None
        return display.card(
            "Dynamics", {"steps": "; ".join(told), "left out": notes}, ("features by what they do", kinds)
        )

    def alignment(self) -> pd.DataFrame:
        """Correlate features with behaviours along steps; see `align`."""
        return align(self.table, self.behaviours)


@one_blas_thread
def dynamics(features: FeatureTable | str | Path, config: DiffConfig | None = None) -> Dynamics | None:
    """Follow features along the steps of every run with at least two of them.

    Args:
        features: or its folder: read by the base and by several steps of a run. Encoded from a store with token
            statistics, its rollouts have the behaviour entropy.
        config: defaults of `DiffConfig`.

    Returns:
        None where no run has two steps.
    """
    features, config = FeatureTable.of(features), config or DiffConfig()
    runs = run_steps(features)
    if not runs:
        return None
    rows = Rows.of(features, config)
    tables, notes = [], {}
    for run, readers in runs.items():
        found = _along(features, rows, run, readers, config)
        if isinstance(found, str):
            notes[run] = found
        else:
            tables.append(found)
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=list(COLUMNS))
    return Dynamics(table, _behaviours(features, runs, config), notes)


def run_steps(features: FeatureTable) -> dict[str, list[str]]:
    """Readers in the order of their steps, by run; runs with fewer than two different steps are left out."""
    runs: dict[str, list[tuple[int, str]]] = {}
    for record in features.info["readers"][1:]:
        if record["run"] is not None:
            runs.setdefault(record["run"], []).append((record["step"], record["id"]))
    return {
        run: [id for _, id in sorted(found)]
        for run, found in runs.items()
        if len(found) > 1 and len({step for step, _ in found}) == len(found)
    }


def _along(
    features: FeatureTable, rows: Rows, run: str, readers: Sequence[str], config: DiffConfig
) -> pd.DataFrame | str:
    """The run's rows, or why there are none."""
    base = features.readers[0]
    found = comparisons(features, rows, config)
    parts = {of.part for reader in readers for of in main_comparisons(found, reader) if of.kind == "shift"}
    part = "total" if parts == {"total"} else "same_trajectories"
    on = rows.own(base)  # What every reader reads: the base's trajectories, or all.
    sides = [rows.by_reader[reader, reader if part == "total" else on] for reader in readers]
    before = rows.by_reader[base, on]
    problems = np.unique(rows.problem[before])
    for side in sides:
        problems = np.intersect1d(problems, rows.problem[side])
    if len(problems) < config.min_problems:
        return f"{len(problems)} problems have trajectories of every step; {config.min_problems} are needed"
    reference, *means = (side_means(rows.values, side, rows.problem, problems) for side in (before, *sides))
    tested = active_features(config, reference, *means)
    # An emerging feature is silent at the base and at early steps: they do not differ, in any unit.
    deviation = np.stack([rows.scales[reader].deviation for reader in readers])
    deviation = np.where(deviation > 0, deviation, deviation.max(0))
    tested = tested[deviation[0, tested] > 0]
    if not len(tested):
        return "no feature is active in enough problems"
    reference = reference[:, tested]
    start = reference.mean(0)
    shifts = [mean[:, tested] - reference for mean in means]
    steps = np.array([_step(features, reader) for reader in readers])
    inferences = [
        paired_inference(shift, scale[tested], config) for scale, shift in zip(deviation, shifts, strict=True)
    ]
    p = np.stack([inference.p for inference in inferences])  # (n_steps, n_tested)
    q = q_values(p.ravel(), config.fdr).reshape(p.shape)
    difference = np.stack([inference.difference for inference in inferences])
    # Simes' p is the least Benjamini–Hochberg q-value of the steps.
    q_run = q_values(false_discovery_control(p, axis=0).min(0), config.fdr)
    kind, goal = _kinds(start, difference, q, q_run, config.q)
    onset = _onsets(shifts, steps, kind, goal, config)
    columns = ["difference", "low", "high", "delta", "p"]
    at_base = {"step": _step(features, base), "mean": start, **dict.fromkeys(columns, 0.0), "p": 1.0, "q": 1.0}
    tables = [pd.DataFrame(at_base)]
    for step, i, q_step in zip(steps, inferences, q, strict=True):
        numbers = {name: getattr(i, name) for name in columns}
        tables.append(pd.DataFrame({"step": int(step), "mean": start + i.difference, **numbers, "q": q_step}))
    same = pd.DataFrame({"run": run, "feature": tested, "kind": kind, **onset, "part": part})
    table = pd.concat([pd.concat([part, same], axis=1) for part in tables], ignore_index=True)
    return table.rename(columns={"difference": "shift"})[list(COLUMNS)]


def _kinds(
    start: np.ndarray, difference: np.ndarray, q: np.ndarray, q_run: np.ndarray, limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """(n_tested,) kinds, and the index of the step whose shift defines the onset."""
    moved = (q <= limit) & (q_run <= limit)
    last, final = len(q) - 1, difference[-1]
    kind = np.full(len(start), FLAT, dtype=object)
    kind[moved.any(0)] = "passing"
    rising = moved[-1] & (final > 0)
    kind[rising] = np.where(start[rising] <= _HARDLY * (start + final)[rising], "emerging", "growing")
    kind[moved[-1] & (final < 0)] = "fading"
    largest = np.where(moved, np.abs(difference), -1.0).argmax(0)
    return kind, np.where(kind == "passing", largest, last)


def _onsets(
    shifts: Sequence[np.ndarray], steps: np.ndarray, kind: np.ndarray, goal: np.ndarray, config: DiffConfig
) -> dict[str, np.ndarray]:
    """Onset steps of the features that are not flat."""
    found = {name: np.full(len(kind), np.nan) for name in ("onset", "onset_low", "onset_high")}
    drawn_problems = counts(len(shifts[0]), config.n_bootstrap, config.seed) / len(shifts[0])
    clear = np.flatnonzero(kind != FLAT)
    for block in (clear[i : i + _BLOCK] for i in range(0, len(clear), _BLOCK)):
        observed = np.stack([shift[:, block].mean(0) for shift in shifts])[:, None]
        drawn = np.stack([drawn_problems @ shift[:, block] for shift in shifts])
        sign = np.sign(observed[goal[block], 0, np.arange(len(block))])
        found["onset"][block] = steps[_half_way(observed * sign, goal[block])[0]]
        position = _half_way(drawn * sign, goal[block])
        # The ends of the interval are saved steps: no interpolation between them.
        low, high = percentile_interval(position, config.confidence, method="nearest")
        found["onset_low"][block], found["onset_high"][block] = steps[low.astype(int)], steps[high.astype(int)]
    return found


def _half_way(shift: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """(n_draws, n) index of the first step with half of the goal's shift; the goal itself if its shift is not above 0.

    Args:
        shift: (n_steps, n_draws, n), positive in the direction of the goal.
        goal: (n,) index of a step.
    """
    reached = shift[goal, :, np.arange(shift.shape[2])].T  # (n_draws, n)
    return np.where(reached > 0, (shift >= reached / 2).argmax(0), goal)


def _behaviours(features: FeatureTable, runs: dict[str, list[str]], config: DiffConfig) -> pd.DataFrame:
    rollouts, base, parts = features.rollouts, features.readers[0], []
    for run, readers in runs.items():
        policies = [base, *readers]
        of_run = rollouts.frame.policy.isin(policies)
        answered_by = rollouts.frame[of_run].groupby("problem_id").policy.nunique()
        common = answered_by.index[answered_by == len(policies)]
        if len(common) >= config.min_problems:
            some = rollouts.select((of_run & rollouts.frame.problem_id.isin(common)).to_numpy())
            measured = behaviour_table(some, confidence=config.confidence)
            parts += [measured[measured.policy == id].assign(run=run, step=_step(features, id)) for id in policies]
    columns = list(BEHAVIOUR_COLUMNS)
    return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


def _step(features: FeatureTable, reader: str) -> int:
    return int(features.reader_info(reader)["step"])


def align(table: pd.DataFrame, behaviours: pd.DataFrame) -> pd.DataFrame:
    """Correlate features' means with behaviours over the steps of a run, base included (Spearman).

    This is a description, not a test. Steps are few and follow one another, so any two things that training moves
    steadily correlate by ±1. With n points no two-sided permutation p is below 2 / n!, even if steps were exchangeable,
    which they are not.

    Args:
        table: of `Dynamics`; flat features are left out.
        behaviours: of `Dynamics`; those over all bands count.

    Returns:
        run, feature, kind, behaviour, rho, n_points (steps with both), smallest_p (2 / n_points!). Pairs are left out
        if they have fewer than three points, or if one of the two does not change.
    """
    records = []
    for run, moved in table[table.kind != FLAT].groupby("run", sort=False):
        means = moved.pivot(index="step", columns="feature", values="mean")
        kinds = moved.groupby("feature").kind.first()
        chosen = behaviours[(behaviours.run == run) & (behaviours.band == "all")]
        for name, measured in chosen.groupby("behaviour", sort=False):
            steps = means.index.intersection(measured.step)
            n = len(steps)
            if n < 3:
                continue
            x, y = means.loc[steps].to_numpy().T, measured.set_index("step")["mean"][steps].to_numpy()[None]
            rho = np.where(np.ptp(x, axis=1) * np.ptp(y) > 0, spearman(x, y), np.nan)
            keys = {"run": run, "behaviour": name, "n_points": n, "smallest_p": 2 / math.factorial(n)}
            records.append(pd.DataFrame({**keys, "feature": means.columns, "kind": kinds.to_numpy(), "rho": rho}))
    names = ["run", "feature", "kind", "behaviour", "rho", "n_points", "smallest_p"]
    return pd.concat(records, ignore_index=True)[names].dropna() if records else pd.DataFrame(columns=names)
