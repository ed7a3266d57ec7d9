"""Test what a diff found: of every run the features that it most clearly moved, ablated, steered and transplanted.

Features that the run raised are ablated in the run (are they necessary for what it does?), and steered and transplanted
into the base (do they bring it about alone?). Where a run raised none, those that it lowered, with the roles exchanged.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from tsae.activations.store import ActivationStore
from tsae.causal.config import CausalConfig, InterventionConfig, Mode
from tsae.causal.controls import mean_difference
from tsae.causal.intervene import intervene
from tsae.causal.intervention import Intervention
from tsae.checkpoints.series import CheckpointSeries
from tsae.diff.feature_diff import FeatureDiff
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.fresh_rollouts import choose_verifier
from tsae.rollouts.rewards import find_verifier
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

_MODES: tuple[Mode, ...] = ("ablate", "transplant", "steer")


class Planned(NamedTuple):
    """An intervention to make."""

    mode: Mode
    has: str
    """Id of the checkpoint in which the features are higher: they are ablated in it, or it is the donor."""
    lacks: str
    """The other one, into which they are put."""
    features: tuple[int, ...]
    raised: bool
    """Whether the run raised them, so that it is not the base that has them."""

    @property
    def name(self) -> str:
        """The name of the test's folder. No two tests share it: several runs may lower what the base has."""
        if self.mode == "ablate":
            return f"ablate-{self.has}" if self.raised else f"ablate-{self.has}-against-{self.lacks}"
        return f"{self.mode}-{self.has}-into-{self.lacks}"


class Tested(NamedTuple):
    """What `causal_tests` made."""

    tests: tuple[Intervention, ...]
    planned: int
    why: str
    """Why some are missing; else empty."""


def planned_tests(diff: FeatureDiff, n_features: int) -> list[Planned]:
    """Three tests for the last checkpoint of every run; none for one that moved nothing."""
    found: list[Planned] = []
    for run in diff.final_checkpoints:
        moved = diff.main_shift(run, discoveries=True)
        # The nearer end of the interval: a rare feature may have a large Δ that is hardly known.
        least = np.minimum(moved.delta_low.abs(), moved.delta_high.abs())
        moved = moved.loc[least.sort_values(ascending=False, kind="stable").index]
        raised = bool((moved.delta > 0).any())
        chosen = tuple(int(f) for f in moved[(moved.delta > 0) == raised].feature.head(n_features))
        has, lacks = (run, diff.base) if raised else (diff.base, run)
        if chosen:
            found += [Planned(mode, has, lacks, chosen, raised) for mode in _MODES]
    return found


def causal_tests(
    series: CheckpointSeries,
    sae: TemporalSAE,
    store: ActivationStore,
    features: FeatureTable,
    diff: FeatureDiff,
    config: CausalConfig,
    *,
    to: Path,
    page: Path | None,
    verifier: str | None,
    seed: int,
    device: str,
    minutes: float | None,
    progress: bool,
) -> Tested:
    """Run those of the planned tests whose results are not there yet. Each has a folder of its own.

    Args:
        series: the checkpoints of the diff.
        sae: of the features.
        store: for the mean difference, where every checkpoint has responses of its own.
        features: of the diff.
        diff: what was found.
        config: how much is tested.
        to: folder.
        page: that shows the tests. It is removed before another test is saved, so that no page stays without it.
        verifier: name of the one that checks answers; by default the one that says what the outcomes of the features'
            rollouts say.
        seed: responses are drawn with the one after it.
        device: that generates.
        minutes: no test starts that would take longer than is left, if it is as slow as the slowest before. The same
            call makes the missing ones later.
        progress: show bars.
    """
    plan, rollouts = planned_tests(diff, config.features), features.rollouts
    known = rollouts.info.get("sampled") or {}
    checker = known["verifier"] if known else choose_verifier(rollouts, verifier)[0]
    verify = None if checker is None else find_verifier(checker)
    sampling = SamplingConfig(
        n_samples=config.samples,
        max_new_tokens=known.get("max_new_tokens") or int(rollouts.lengths("response_ids").max()),
        seed=seed + 1,
        device=device,
    )

    def made_of(test: Planned) -> Intervention:
        direction: torch.Tensor | None = None
        with suppress(TsaeError):  # A log may have no responses of the base: there is no such control.
            direction = mean_difference(store, sae.site, test.has, test.lacks, sae=sae)
        transplants = test.mode == "transplant"
        settings = InterventionConfig(
            mode=test.mode,
            amount=config.amount,
            tokens="all" if transplants else "predicting",
            n_random=config.n_random,
            sampling=sampling,
        )
        return intervene(
            series[test.has if test.mode == "ablate" else test.lacks],
            sae,
            features,
            test.features,
            settings,
            problems=_some(rollouts, config.problems),
            verify=verify,
            direction=direction,
            donor=series[test.has] if transplants else None,
            progress=progress,
        )

    began, slowest, why = time.monotonic(), 0.0, ""
    made: list[Intervention] = []
    for test in plan:
        folder, start = to / test.name, time.monotonic()
        if not (folder / "causal.json").is_file():
            if minutes is not None and slowest and start - began + slowest > 60 * minutes:
                why = f"the others did not fit into {minutes:g} minutes; the same command makes them"
                break
            try:
                found = made_of(test)
            except TsaeError as error:
                why = f"{test.name}: {error.what}"
                continue
            if page is not None:
                page.unlink(missing_ok=True)
            found.save(folder)
            slowest = max(slowest, time.monotonic() - start)
        made.append(Intervention.load(folder))
    return Tested(tuple(made), len(plan), why)


def _some(rollouts: Rollouts, n: int) -> Rollouts:
    """The trajectories of n problems, spread over the table."""
    ids = rollouts.frame.problem_id.unique()
    kept = ids[np.unique(np.linspace(0, len(ids) - 1, min(n, len(ids))).astype(int))]
    return rollouts.select(rollouts.frame.problem_id.isin(kept).to_numpy())
