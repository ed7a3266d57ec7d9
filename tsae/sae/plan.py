"""What a training is before anything is read: its config with defaults resolved, its start, its inputs, its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tsae.activations.source import Source
from tsae.errors import TsaeError
from tsae.sae.checkpointing import RunFolder
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.finetuning import starting_config
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
    """What it reads, as JSON."""
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
        """As `train` takes them."""
        if start is None:
            site, config = training.site or _only_site(store), sae or SAEConfig()
        else:
            start = start if isinstance(start, TemporalSAE) else TemporalSAE.load(start)
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


def _only_site(store: Source) -> str:
    if len(store.sites) > 1:
        raise TsaeError(
            f"has the sites {', '.join(store.sites)}",
            where=store.path,
            fix="Name the one to train on (training.site).",
        )
    return store.sites[0]
