"""The plan of one training, made before any activation is loaded: config, start, inputs and folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tsae.activations.batches import Windows
from tsae.activations.store import Source
from tsae.activations.windows import kept_problems
from tsae.errors import TsaeError
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.fitting.finetuning import starting_config
from tsae.sae.fitting.run_folder import RunFolder
from tsae.sae.fitting.threshold import FEWEST
from tsae.sae.model import TemporalSAE


@dataclass(frozen=True)
class Plan:
    """One training."""

    site: str
    config: SAEConfig
    training: TrainingConfig
    start: TemporalSAE | None
    """None for random weights."""
    inputs: dict[str, Any]
    """The training's inputs, as JSON."""
    folder: RunFolder | None
    """None for a training that is not written."""

    @classmethod
    def of(
        cls,
        store: Source,
        sae: SAEConfig | None,
        training: TrainingConfig,
        *,
        start: TemporalSAE | str | Path | None = None,
        to: str | Path | None = None,
    ) -> Plan:
        """The plan of a call of `train` with these arguments."""
        if start is None:
            site, config = training.site or _only_site(store), sae or SAEConfig()
        else:
            start = TemporalSAE.of(start)
            site, config = start.site, starting_config(start, store, sae, training.site)
        if config.dead_after_tokens is None:
            dead_after = min(10_000_000, max(training.tokens // 30, training.batch_tokens))
            config = replace(config, dead_after_tokens=dead_after)
        if training.data_seed is None:
            training = replace(training, data_seed=training.seed)
        inputs = store.identity(site, training.balance)
        if start is not None:
            inputs["start"] = start.fingerprint
        folder = None if to is None else RunFolder(to, config, training, inputs)
        return cls(site, config, training, start, inputs, folder)

    def windows(self, store: Source) -> Windows:
        """Windows of the problems to train on."""
        training = self.training
        partner = training.partner if self.config.temporal_weight > 0 else None
        return store.windows(
            self.site, held_out=False, partner=partner, step_ends=training.step_ends, **self._window_options()
        )

    def unseen(self, store: Source) -> np.ndarray | None:
        """(n, d_model) tokens of the problems that training leaves out; None where these are too few to go by."""
        left_out = np.flatnonzero(kept_problems(store, True) & store.rows)
        problems = store.rollouts.table["problem_id"].take(left_out)
        if len(set(problems.to_pylist())) < FEWEST:
            return None
        # A live source computes them, into a buffer that is given back before the training's is filled.
        return store.windows(self.site, held_out=True, partner=None, **self._window_options()).first_tokens

    def _window_options(self) -> dict[str, Any]:
        """Options that both kinds of windows share."""
        training = self.training
        assert training.data_seed is not None
        return {
            "span": training.span,
            "window": training.window,
            "max_norm": training.max_norm,
            "balance": training.balance,
            "seed": training.data_seed,
        }


def _only_site(store: Source) -> str:
    if len(store.sites) > 1:
        what = f"has the sites {', '.join(store.sites)}"
        raise TsaeError(what, where=store.path, fix="Name the one to train on (training.site).")
    return store.sites[0]
